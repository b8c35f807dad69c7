"""Answers of verify and of the upper bound where a norm has a mode of its own, weights are
complex, gradients sparse, tensors plain attributes, or inputs ignored.
"""

from __future__ import annotations

import torch
from cases import network
from torch import Tensor, nn

import pathspace as ps


def frozen_norm(train_root: bool, norm: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), norm, nn.ReLU(), nn.Linear(4, 2))
    model.train(train_root)
    model[1].train(not train_root)
    return model


def test_a_frozen_batch_norm_in_a_training_model_is_certified() -> None:
    model, x = frozen_norm(True, nn.BatchNorm1d(4)), torch.randn(6, 3)
    s = torch.rand(4).double() + 0.5
    with torch.no_grad():
        first, norm, last = model[0].double(), model[1].double(), model[3].double()
        before = model(x.double())
        norm.weight.mul_(s), norm.bias.mul_(s), last.weight.div_(s)
        first.weight.mul_(2), first.bias.mul_(2), norm.running_mean.mul_(2), norm.weight.div_(2)
        after = model(x.double())
    # (units of the norm's outputs, and of its inputs, move nothing: 4 + 4)
    assert torch.allclose(before, after, rtol=1e-9)
    found = ps.verify(frozen_norm(True, nn.BatchNorm1d(4)), x, upper_bound=True)
    assert (found.holds, found.units, found.units_at_most) == (True, 8, 8)


def test_a_training_batch_norm_in_an_evaluated_model_gets_a_bound() -> None:
    model = frozen_norm(False, nn.BatchNorm1d(4))
    found = ps.verify(model, torch.randn(6, 3), upper_bound=True)
    assert found.holds and found.units_at_most == found.units


def test_a_tracked_instance_norm_that_is_frozen_is_certified() -> None:
    norm = nn.InstanceNorm1d(4, affine=True, track_running_stats=True)
    model = nn.Sequential(nn.Conv1d(3, 4, 1), norm, nn.ReLU(), nn.Conv1d(4, 2, 1))
    model[1].eval()
    assert ps.verify(model, torch.randn(6, 3, 5)).holds


class Spectral(nn.Module):
    def __init__(self, i: int, o: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(i, o, 3, dtype=torch.cfloat))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.einsum("bik,iok->bok", torch.fft.rfft(x)[..., :3], self.w)
        return torch.fft.irfft(y, n=x.shape[-1])


def test_a_model_of_complex_parameters_is_verified() -> None:
    model = nn.Sequential(Spectral(2, 4), nn.ReLU(), Spectral(4, 3))
    found = ps.verify(model, torch.randn(2, 2, 8), upper_bound=True)
    assert found.holds


def test_a_model_that_ignores_its_input_is_called_so() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1), nn.LayerNorm(1))
    x = torch.randn(6, 3)
    assert torch.equal(model(x), model(3 * x + 1))
    assert ps.verify(model, x).invariance["vacuous"]


def test_a_sparse_embedding_gets_a_bound() -> None:
    model = nn.Sequential(nn.Embedding(5, 4, sparse=True), nn.ReLU(), nn.Linear(4, 2))
    found = ps.verify(model, torch.tensor([[0, 1, 2], [3, 4, 0]]), upper_bound=True)
    assert (found.units, found.units_at_most) == (4, 4)


def test_a_plain_tensor_attribute_does_not_make_verify_fall_back() -> None:
    model = network(
        lambda net, x: net.b(torch.relu(net.a(x @ net.k))),
        a=nn.Linear(3, 4), b=nn.Linear(4, 2), k=torch.eye(3),
    )  # fmt: skip
    found = ps.verify(model, torch.randn(5, 3), upper_bound=True)
    words = found.upper_bound["evidence"]
    assert found.units_at_most == 4 or "self.k" in words or "attribute" in words


def test_a_bound_that_is_not_attempted_names_the_true_reason() -> None:
    layers = nn.GroupNorm(2, 4), nn.BatchNorm2d(4, affine=False), nn.LeakyReLU()
    found = ps.verify(nn.Sequential(*layers), torch.randn(3, 4, 5, 5), upper_bound=True)
    assert "detached" not in found.upper_bound["evidence"]
