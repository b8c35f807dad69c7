"""Models that were written to break what rules, liveness and recaptures take for granted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import network
from rescaled import change
from torch import Tensor, nn
from torch.nn import functional as F

import pathspace as ps

Code = Callable[[Any, Tensor], Tensor]


def made(code: Code) -> nn.Module:
    """Two layers in, one out, two tables of positions, and code of one's own."""
    layers = {name: nn.Linear(3, 4) for name in "ab"} | {name: nn.Embedding(6, 4) for name in "fg"}
    order, norm = torch.eye(4).double()[[1, 2, 3, 0]], nn.LayerNorm(4, eps=1e-12)
    return network(code, **layers, o=nn.Linear(4, 2), norm=norm, order=order).double()


def without_gradients(net: Any, x: Tensor) -> Tensor:
    h = F.relu(net.a(x)) + 0
    with torch.no_grad():
        torch.unsafe_split(h, 2, 1)[0].add_(1.0)
    return net.o(h)


def dropped(net: Any, x: Tensor) -> Tensor:
    kept, _ = torch.native_dropout(torch.ones(5, 4).to(x), 0.5, True)
    torch.manual_seed(0)
    return net.o(torch.where(kept > 0, F.relu(net.a(x)), F.relu(net.b(x))))


ONCE: dict[str, Code] = {
    "a difference by addmm": lambda net, x: net.o(
        torch.addmm(h := F.relu(net.a(x)), h, net.order, alpha=-1)
    ),
    "a difference by baddbmm": lambda net, x: net.o(
        torch.baddbmm(h := F.relu(net.a(x))[None], net.order[None, :1].expand(1, 5, 4) * 0 + h,
                      net.order[None], beta=-1)[0]
    ),
    "a write by unsafe_split": without_gradients,
}  # fmt: skip


@pytest.mark.parametrize("name", ONCE)
def test_units_hold_and_unused_weights_are_unused(name: str) -> None:
    model, x = made(ONCE[name]), torch.randn(5, 3).double()
    assert change(model, ps.trace(model, x, norm_eps="respect"), x) < 1e-9


def test_a_result_beside_others_is_no_constant() -> None:
    model, x = made(dropped), torch.randn(5, 3).double()
    assert not {"a.weight", "b.weight"} & set(ps.trace(model, x).unused)


def steps(x: Tensor) -> Tensor:
    return torch.arange(x.shape[1])


SIZES: dict[str, tuple[Code, tuple[int, ...], tuple[int, ...]]] = {
    "tables as long as the example": (
        lambda net, x: net.o(F.relu(net.a(x)) * net.f(steps(x)) * net.g(steps(x).flip(0))),
        (2, 6, 3), (2, 4, 3),
    ),
    "slices as long as the example": (
        lambda net, x: net.o(
            F.relu(net.a(x)) * net.f.weight[: x.shape[1]] * net.g.weight[-x.shape[1] :]
        ),
        (2, 6, 3), (2, 4, 3),
    ),
    "a pool to the size that there is": (
        lambda net, x: net.o(
            net.norm(F.adaptive_avg_pool1d(net.f((x[..., 0] * 0).long()).transpose(1, 2), 4)
                     .transpose(1, 2) * net.g(torch.arange(4)))
        ),
        (3, 4, 3), (3, 8, 3),
    ),
    "a mean over one sample": (
        lambda net, x: net.o(net.norm(net.f((x[..., 0] > 0).long()).mean(0))),
        (1, 4, 3), (3, 8, 3),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SIZES)
def test_units_hold_at_other_sizes(name: str) -> None:
    code, *shapes = SIZES[name]
    model, samples = made(code), [torch.randn(shape).double() for shape in shapes]
    assert change(model, ps.trace(model, samples[0]), *samples) < 1e-7


REFUSED: dict[str, Code] = {
    "a write through einsum has no inverse": lambda net, x: net.o(
        torch.einsum("bi->ib", F.relu(net.a(x))).mul_(2).T
    ),
    "reads memory beyond its operand": lambda net, x: net.o(
        torch.cat([F.relu(net.a(x)), F.relu(net.b(x))])[:5].as_strided((5, 4), (8, 1))
    ),
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_has_no_graph_is_refused_in_words(words: str) -> None:
    with pytest.raises(ps.PathspaceError, match=words):
        ps.trace(made(REFUSED[words]), torch.randn(5, 3).double())
