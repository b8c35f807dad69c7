"""Rescaling, canonical forms and balancing: the same function, other weights, and
optimizers that come along.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch
from cases import CASES, mlp
from descent import descend
from torch import Tensor, nn

import pathspace as ps

HELD_OUT = sorted(CASES)[::3]


def doubled(name: str) -> tuple[nn.Module, tuple[Tensor, ...]]:
    model, args = CASES[name]()
    model = model.double()
    for module in model.modules():
        if isinstance(getattr(module, "eps", None), float):
            module.eps = 1e-30
    return model, tuple(arg.double() if arg.is_floating_point() else arg for arg in args)


def outputs(model: nn.Module, args: tuple[Tensor, ...]) -> Tensor:
    with torch.no_grad():
        leaves = torch.utils._pytree.tree_leaves(copy.deepcopy(model)(*args))
    return torch.cat([leaf.reshape(-1) for leaf in leaves])


def sides(model: nn.Module, graph: ps.ReductionGraph, p: float) -> tuple[np.ndarray, np.ndarray]:
    """Sums of |w|^p over the edges into and out of every unit, edge by edge."""
    tails, heads = graph.ends()
    own = dict(model.named_parameters(remove_duplicate=False))
    values = np.concatenate(
        [own[block.name].detach().abs().pow(p).reshape(-1).numpy() for block in graph.blocks]
    )
    count = graph.num_units + 1
    loops = tails == heads
    incoming, outgoing = np.zeros(count), np.zeros(count)
    for tail, head, value in zip(tails[~loops], heads[~loops], values[~loops], strict=True):
        (incoming if head > 0 else outgoing)[abs(head)] += value
        (outgoing if tail > 0 else incoming)[abs(tail)] += value
    return incoming[1:], outgoing[1:]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", HELD_OUT)
@pytest.mark.parametrize("tree", ["in", "out"])
def test_canonical_models_compute_the_same_with_skeleton_weights_of_size_one(
    name: str, tree: str
) -> None:
    model, args = doubled(name)
    before = outputs(model, args)
    skeleton = ps.trace(model, *args).skeleton("random", 1)
    ps.canonicalise_(model, skeleton, tree)
    torch.testing.assert_close(
        outputs(model, args), before, rtol=1e-10, atol=1e-10 * float(before.abs().max())
    )
    chosen = (skeleton.tree_in if tree == "in" else skeleton.tree_out).gather(skeleton.graph)
    torch.testing.assert_close(chosen.abs(), torch.ones_like(chosen), rtol=1e-12, atol=0)


def test_rescaled_models_have_one_canonical_form() -> None:
    model, args = doubled("residual_cnn")
    twin = copy.deepcopy(model)
    graph, other = ps.trace(model, *args), ps.trace(twin, *args)
    ps.rescale_(twin, other, torch.randn(other.num_units).double())
    ps.canonicalise_(model, graph.skeleton())
    ps.canonicalise_(twin, other.skeleton())
    for one, two in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-10, atol=0)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", HELD_OUT)
@pytest.mark.parametrize("p", [1, 2])
def test_balanced_models_compute_the_same_with_equal_sides(name: str, p: int) -> None:
    model, args = doubled(name)
    before = outputs(model, args)
    graph = ps.trace(model, *args)
    ps.balance_(model, graph, p=p)
    torch.testing.assert_close(
        outputs(model, args), before, rtol=1e-10, atol=1e-10 * float(before.abs().max())
    )
    if graph.forms.shape[0] or any(block.unused is not None for block in graph.blocks):
        return
    incoming, outgoing = sides(model, graph, p)
    free = np.setdiff1d(np.arange(graph.num_units), ps.balancing(model, graph).kept - 1)
    np.testing.assert_allclose(incoming[free], outgoing[free], rtol=1e-9)


def test_wrong_requests_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model, args = doubled("mlp_3x4x2")
    graph = ps.trace(model, *args)
    with pytest.raises(ps.InputError, match="tree"):
        ps.canonicalise_(model, graph.skeleton(), "up")
    with pytest.raises(ps.InputError, match="positive"):
        ps.balance_(model, graph, p=0)
    with pytest.raises(ps.InputError, match="tolerance=-1, expected a positive number"):
        ps.balance_(model, graph, tolerance=-1)
    monkeypatch.setattr("pathspace.gauge.programme.STEPS", 1)
    with pytest.raises(ps.InputError, match="after 1 steps"):
        ps.balance_(model, graph, tolerance=1e-15)
    skeleton = graph.skeleton()
    with torch.no_grad():
        model[2].weight.zero_()
    with pytest.raises(ps.InputError, match="zero"):
        ps.canonicalise_(model, skeleton)


# --- optimizers

x, y = (
    torch.randn(16, 3, generator=torch.Generator().manual_seed(0)).double(),
    torch.ones(16, 2).double(),
)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    descend(optimizer, lambda: nn.functional.mse_loss(model(x), y), steps)


def two(make: Any) -> list[tuple[nn.Module, ps.ReductionGraph, torch.optim.Optimizer]]:
    """The same network twice, trained for five steps."""
    result = []
    for _ in range(2):
        torch.manual_seed(0)
        model = mlp(3, 6, 5, 2).double()
        graph = ps.trace(model, x)
        optimizer = make(model, graph)
        train(model, optimizer, 5)
        result.append((model, graph, optimizer))
    return result


def phi_for(graph: ps.ReductionGraph) -> Tensor:
    return torch.randn(
        graph.num_units, generator=torch.Generator().manual_seed(3), dtype=torch.float64
    )


MAKERS = {
    "sgd": lambda m, g: torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9),
    "adam": lambda m, g: torch.optim.Adam(m.parameters(), lr=1e-3, amsgrad=True, eps=1e-30),
    "adagrad": lambda m, g: torch.optim.Adagrad(m.parameters(), lr=1e-3, eps=1e-30),
    "rmsprop": lambda m, g: torch.optim.RMSprop(m.parameters(), lr=1e-3, momentum=0.9, eps=1e-30),
    "adamax": lambda m, g: torch.optim.Adamax(m.parameters(), lr=1e-3, eps=1e-30),
}


@pytest.mark.parametrize("kind", MAKERS)
def test_buffers_are_what_they_would_be_had_the_network_always_been_rescaled(kind: str) -> None:
    """With a learning rate of zero the weights stay, so the buffers of both networks can
    be gathered and compared.
    """
    (_, graph, _), (other, twin, late) = two(lambda m, g: _still(MAKERS[kind](m, g)))
    ps.rescale_(other, twin, phi_for(twin), optimizer=late, keep_trajectory=False)
    torch.manual_seed(0)
    early = mlp(3, 6, 5, 2).double()
    ps.rescale_(early, ps.trace(early, x), phi_for(graph))
    fresh = _still(MAKERS[kind](early, graph))
    train(early, fresh, 5)
    seen = 0
    for one, two_ in zip(early.parameters(), other.parameters(), strict=True):
        for key, buffer in fresh.state[one].items():
            tolerance = 1e-5 if kind == "rmsprop" and key == "momentum_buffer" else 1e-9
            torch.testing.assert_close(
                late.state[two_][key], buffer, rtol=tolerance, atol=1e-300 + tolerance * 1e-3
            )
            seen += 1
    assert seen >= 6


def _still(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    return optimizer


def test_gsgd_with_momentum_goes_on_as_if_nothing_had_happened() -> None:
    from pathspace.training import GSGD

    def make(model: nn.Module, graph: ps.ReductionGraph) -> torch.optim.Optimizer:
        with torch.no_grad():
            for name, mask in graph.skeleton().masks.items():
                parameter = model.get_parameter(name)
                parameter[mask] = parameter[mask].sign()
        return GSGD(model.named_parameters(), lr=0.01, momentum=0.9, skeleton=graph.skeleton())

    (model, _, optimizer), (other, graph, late) = two(make)
    ps.rescale_(other, graph, phi_for(graph), optimizer=late)
    for _ in range(10):
        train(model, optimizer, 1)
        train(other, late, 1)
        torch.testing.assert_close(other(x), model(x), rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("nesterov", [False, True])
def test_sgd_with_momentum_keeps_its_trajectory(nesterov: bool) -> None:
    def make(model: nn.Module, graph: ps.ReductionGraph) -> torch.optim.Optimizer:
        return torch.optim.SGD(
            model.parameters(), lr=0.05, momentum=0.9, nesterov=nesterov, weight_decay=0.01
        )

    (model, _, optimizer), (other, graph, late) = two(make)
    start = model(x).detach()
    ps.rescale_(other, graph, phi_for(graph), optimizer=late)
    for step in range(20):
        if step == 10:
            ps.rescale_(other, graph, -0.5 * phi_for(graph), optimizer=late, keep_trajectory=True)
        train(model, optimizer, 1)
        train(other, late, 1)
        torch.testing.assert_close(other(x), model(x), rtol=1e-8, atol=1e-8)
    assert (model(x) - start).abs().max() > 1e-2


def test_an_optimizer_that_cannot_be_transported_is_refused_before_anything_changes() -> None:
    model = mlp(3, 6, 5, 2).double()
    graph = ps.trace(model, x)
    optimizer: torch.optim.Optimizer = torch.optim.Adafactor(model.parameters())
    train(model, optimizer, 1)
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(ps.UnsupportedError, match="Adafactor"):
        ps.rescale_(model, graph, phi_for(graph), optimizer=optimizer)
    with pytest.raises(ps.InputTypeError, match="SGD"):
        ps.rescale_(model, graph, phi_for(graph), optimizer=optimizer, keep_trajectory=True)
    with pytest.raises(ps.InputError, match="optimizer="):
        ps.rescale_(model, graph, phi_for(graph), keep_trajectory=True)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_numbers_kept_for_a_scalar_parameter_have_no_scale() -> None:
    """NAdam's product of momenta is as large as a parameter of one number."""
    model = nn.Sequential(nn.Linear(3, 1), nn.ReLU(), nn.Linear(1, 2)).double()
    model[0].bias = nn.Parameter(torch.tensor(0.3, dtype=torch.float64))
    graph = ps.trace(model, x)
    optimizer = torch.optim.NAdam(model.parameters())
    train(model, optimizer, 2)
    state = optimizer.state[model[0].bias]
    product, average = state["mu_product"].clone(), state["exp_avg"].clone()
    factor = math.exp(0.7)
    ps.rescale_(model, graph, torch.full((graph.num_units,), 0.7), optimizer=optimizer)
    assert torch.equal(state["mu_product"], product)
    torch.testing.assert_close(state["exp_avg"], average / factor)
