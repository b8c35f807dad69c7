"""Normalisations written out by hand, outputs without numbers, modules held twice: what
verification makes of them.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from slow_names import slow_names
from torch import Tensor, nn

import pathspace as ps
from pathspace.models.running import evaluate
from pathspace.training import PathSGD

NORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "root mean square": lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6),
    "length and a bit": lambda x: x / (x.norm(dim=-1, keepdim=True) + 1e-8),
    "clamped, over lines": lambda x: (
        x
        / x.pow(2)
        .sum(-1, keepdim=True)
        .clamp(
            min=1e-5,
        )
        .sqrt()
    ),
    "variance to a power": lambda x: (
        (x - x.mean(-1, keepdim=True)) * (x.var(-1, keepdim=True) + 1e-5) ** -0.5
    ),
    "no eps": lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True)),
}


class ByHand(nn.Module):
    """A normalisation with a gain, its eps a literal in the code."""

    def __init__(self, width: int, how: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.rand(width) + 0.5)
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        return self.how(x) * self.gain


@pytest.mark.parametrize("name", NORMS)
def test_an_eps_in_the_code_is_left_out_like_that_of_a_layer(name: str) -> None:
    torch.manual_seed(0)
    norm = NORMS[name]
    model = nn.Sequential(
        nn.Linear(4, 6),
        ByHand(6, norm),
        nn.Linear(6, 5),
        nn.ReLU(),
        ByHand(5, norm),
        nn.Linear(5, 2),
    )
    certificate = ps.verify(model, torch.randn(7, 4))
    assert certificate.units > 6
    assert certificate.holds, certificate.invariance["evidence"]
    assert bool(certificate.approximate_units) == (name != "no eps")
    assert certificate.invariance["rescaling"] < 1e-12
    # the constant counts where the model is left as it stands
    assert name == "no eps" or certificate.invariance["rescaling_as_it_stands"] > 1e-9


class Shifted(nn.Module):
    """A small constant of the same size on a line of its own, which is not an eps."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 4, bias=False), nn.Linear(4, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-4)
        return self.last(torch.relu(x - 1e-4))


def test_only_the_constant_that_was_taken_for_an_eps_is_left_out() -> None:
    torch.manual_seed(0)
    model, x = Shifted(), torch.randn(5, 3)
    graph = ps.trace(model, x)
    assert [value for _, value in graph.folded_eps] == [1e-4]
    assert any("constant" in pin.reason for pin in graph.pinned)
    assert ps.verify(model, x).holds


def test_outputs_that_are_no_numbers_are_counted_and_have_to_stay() -> None:
    torch.manual_seed(0)
    model, x = (
        nn.Sequential(ByHand(4, NORMS["no eps"]), nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)),
        torch.randn(7, 4),
    )
    x[2] = 0
    found = ps.verify(model, x).invariance
    assert found["holds"]
    assert "2 of 14 outputs are NaN, and stay so" in found["evidence"]
    assert not found["vacuous"]
    nothing = ps.verify(model, 0 * x).invariance
    assert nothing["vacuous"]
    assert "14 of 14" in nothing["evidence"]


def held_twice() -> nn.Module:
    layer, norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
    return nn.Sequential(layer, norm, nn.ReLU(), layer, norm, nn.ReLU(), nn.Linear(4, 2)).double()


def test_a_module_held_twice_is_left_alone() -> None:
    torch.manual_seed(0)
    model, x = held_twice(), torch.randn(8, 4).double()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    kinds = [type(parameter) for parameter in model[0]._parameters.values()]
    doubled = {name: 2 * tensor for name, tensor in model.named_parameters()}
    wanted = held_twice()
    wanted.load_state_dict(
        {name: 2 * t if t.is_floating_point() else t for name, t in before.items()}
    )
    wanted[1].running_mean.zero_()
    wanted[1].running_var.fill_(1)
    torch.testing.assert_close(
        evaluate(model.eval(), doubled, (x,)), wanted.eval()(x), rtol=1e-14, atol=1e-14
    )
    certificate = ps.verify(model, x)
    assert certificate.holds
    assert [type(parameter) for parameter in model[0]._parameters.values()] == kinds
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name


def test_path_sgd_leaves_a_module_held_twice_alone() -> None:
    """It evaluates the model at squared weights."""
    torch.manual_seed(0)
    layer = nn.Linear(4, 4, bias=False)
    model = nn.Sequential(
        nn.Sequential(layer, nn.ReLU()), layer, nn.ReLU(), nn.Linear(4, 2, bias=False)
    ).double()
    x = torch.randn(8, 4).double()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer = PathSGD(model.named_parameters(), lr=0.0, model=model, example=(x,))
    assert optimizer.path_norm.reused == ("0.0.weight",)
    model(x).sum().backward()
    optimizer.step()
    for parameter, old in zip(model.parameters(), before, strict=True):
        assert torch.equal(parameter, old)


OF_FEW = {
    "groups of 2": (
        lambda: nn.Sequential(nn.Linear(3, 8), nn.GroupNorm(4, 8), nn.ReLU(), nn.Linear(8, 2)),
        (5, 3),
    ),
    "groups of 1": (
        lambda: nn.Sequential(nn.Linear(3, 8), nn.GroupNorm(8, 8), nn.ReLU(), nn.Linear(8, 2)),
        (5, 3),
    ),
    "layer of 2": (
        lambda: nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2), nn.ReLU(), nn.Linear(2, 2)),
        (5, 3),
    ),
    "root mean square of 1": (
        lambda: nn.Sequential(nn.Linear(3, 1), nn.RMSNorm(1), nn.Linear(1, 2)),
        (5, 3),
    ),
    "batch of 2": (
        lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2)),
        (2, 3),
    ),
    "instance of 2": (
        lambda: nn.Sequential(nn.Conv1d(3, 4, 1), nn.InstanceNorm1d(4), nn.Conv1d(4, 2, 1)),
        (5, 3, 2),
    ),
}


@pytest.mark.parametrize("norm_eps", ["ignore", "respect"])
@pytest.mark.parametrize("name", slow_names(OF_FEW, ["groups of 2", "instance of 2"]))
def test_a_gradient_that_vanishes_refutes_nothing(name: str, norm_eps: str) -> None:
    """Two numbers become 1 and -1, one becomes 0: all that is left of the gradient
    before the norm is rounding.
    """
    build, shape = OF_FEW[name]
    for seed in range(3):
        torch.manual_seed(seed)
        certificate = ps.verify(build(), 10**seed * torch.randn(shape), norm_eps=norm_eps)
        assert certificate.holds, certificate.invariance["evidence"]
