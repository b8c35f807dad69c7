"""Models that were written to break what rules, liveness and recaptures take for granted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pathspace as ps


class Own(nn.Module):
    """Two layers in, one out, two tables of positions, and code of one's own."""

    def __init__(self, code: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.b, self.o = nn.Linear(3, 4), nn.Linear(3, 4), nn.Linear(4, 2)
        self.f, self.g = nn.Embedding(6, 4), nn.Embedding(6, 4)
        self.norm, self.code = nn.LayerNorm(4, eps=1e-12), code
        self.order = torch.eye(4)[[1, 2, 3, 0]]

    def forward(self, x: Tensor) -> Tensor:
        return self.code(self, x)


def changes(model: nn.Module, graph: Any, *given: Tensor) -> float:
    """The largest change of outputs by random scales, and by other numbers in weights that count as
    unused.
    """
    before = [model(x).detach() for x in given]
    twin = type(model)(model.code).double()  # type: ignore[attr-defined, operator]
    twin.order = model.order.double()  # type: ignore[assignment]
    twin.load_state_dict(model.state_dict())
    ps.rescale_(twin, graph, torch.randn(graph.num_units, dtype=torch.float64))
    with torch.no_grad():
        for name in graph.unused:
            twin.get_parameter(name).normal_()
    after = [twin(x).detach() for x in given]
    pairs = zip(before, after, strict=True)
    return max(float((one - two).abs().max() / one.abs().max()) for one, two in pairs)


def made(code: Callable[[Any, Tensor], Tensor]) -> Any:
    torch.manual_seed(0)
    model = Own(code).double()
    model.order = model.order.double()
    return model


def in_region(write: Callable[[Tensor], Any]) -> Callable[[Any, Tensor], Tensor]:
    def code(net: Any, x: Tensor) -> Tensor:
        h = F.relu(net.a(x)) + 0
        with torch.no_grad():
            write(h)
        return net.o(h)

    return code


def dropped(net: Any, x: Tensor) -> Tensor:
    kept, _ = torch.native_dropout(torch.ones(5, 4).to(x), 0.5, True)
    torch.manual_seed(0)
    return net.o(torch.where(kept > 0, F.relu(net.a(x)), F.relu(net.b(x))))


ONCE: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "a difference by addmm": lambda net, x: net.o(
        torch.addmm(h := F.relu(net.a(x)), h, net.order, alpha=-1)
    ),
    "a difference by baddbmm": lambda net, x: net.o(
        torch.baddbmm(h := F.relu(net.a(x))[None], net.order[None, :1].expand(1, 5, 4) * 0 + h,
                      net.order[None], beta=-1)[0]
    ),
    "a write by unsafe_split": in_region(lambda h: torch.unsafe_split(h, 2, 1)[0].add_(1.0)),
}  # fmt: skip


@pytest.mark.parametrize("name", ONCE)
def test_units_hold_and_unused_weights_are_unused(name: str) -> None:
    model, x = made(ONCE[name]), torch.randn(5, 3).double()
    assert changes(model, ps.trace(model, x, norm_eps="respect"), x) < 1e-9


def test_a_result_beside_others_is_no_constant() -> None:
    model, x = made(dropped), torch.randn(5, 3).double()
    assert not {"a.weight", "b.weight"} & set(ps.trace(model, x).unused)


def test_memory_beyond_a_part_is_refused_in_words() -> None:
    def code(net: Any, x: Tensor) -> Tensor:
        h = torch.cat([F.relu(net.a(x)), F.relu(net.b(x))])[:5]
        return net.o(h.as_strided((5, 4), (8, 1)))

    with pytest.raises(ps.UnsupportedError, match="reads memory beyond its operand"):
        ps.trace(made(code), torch.randn(5, 3).double())


def steps(x: Tensor) -> Tensor:
    return torch.arange(x.shape[1])


SIZES: dict[str, tuple[Callable[[Any, Tensor], Tensor], tuple[int, ...], tuple[int, ...]]] = {
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
    code, shape, other = SIZES[name]
    model = made(code)
    graph = ps.trace(model, torch.randn(shape).double())
    assert changes(model, graph, torch.randn(shape).double(), torch.randn(other).double()) < 1e-7


def test_a_write_through_a_view_without_an_inverse_is_refused() -> None:
    model = made(lambda net, x: net.o(torch.einsum("bi->ib", F.relu(net.a(x))).mul_(2).T))
    with pytest.raises(ps.CaptureError, match="a write through einsum has no inverse"):
        ps.trace(model, torch.randn(2, 3).double())
