"""A recording of one run says the same about a model as torch's export, and
steps back where it may not.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from captures import Model, answer, counted, exported, models, traced
from torch import Tensor, nn

import pathspace as ps
from pathspace.capture.capture import capture
from pathspace.capture.captured import place

pytestmark = [pytest.mark.filterwarnings("ignore")]
# the sample changes what it covers in small models: recurrence, attention, norms,
# convolutions, branches, sharing
SAMPLE = [model for kind in ("cases", "odd") for model in models(kind)[::9]]


@pytest.fixture(autouse=True)
def settings_of_torch() -> Iterator[None]:
    yield
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
    torch.compiler.reset()


@pytest.mark.slow
@pytest.mark.parametrize("model", [pytest.param(model, id=model.name) for model in SAMPLE])
def test_both_captures_lead_to_the_same_answer(model: Model) -> None:
    with model.around():
        found = traced(model)
        with exported():
            assert found == traced(model)


class Block(nn.Module):
    def __init__(self, step: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.first, self.second, self.step = nn.Linear(4, 6), nn.Linear(6, 3), step
        self.norm = nn.BatchNorm1d(6)
        self.register_buffer("count", torch.zeros(()))
        self.table = torch.tensor([1.0, 2.0, 4.0, 1.0, 2.0, 4.0])

    def forward(self, x: Tensor) -> Any:
        return self.second(self.step(self, self.first(x)))


def helper(h: Tensor) -> Tensor:
    return torch.tanh(h)


def written(block: Any, h: Tensor) -> Tensor:
    mask = torch.zeros(6)
    mask[1:3] = 1
    return h * mask


def counts(block: Any, h: Tensor) -> Tensor:
    block.count = block.count + 1
    return h.relu()


def asks(block: Any, h: Tensor) -> Tensor:
    return h.relu() if h.sum() > 0 else h


def keeps(block: Any, h: Tensor) -> Tensor:
    block.last = h.relu()
    return block.last


def in_half(block: Any, h: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return (h @ block.first.weight @ block.first.weight.T).float()


def differentiates(block: Any, h: Tensor) -> Tensor:
    with torch.enable_grad():
        y = h.detach().requires_grad_()
        return torch.autograd.grad(y.pow(2).sum(), y)[0]


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: Tensor) -> Tensor:
        ctx.save_for_backward(h)
        return h.square()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return 2 * ctx.saved_tensors[0] * g


RECORDED: dict[str, Callable[[Any, Tensor], Any]] = {
    "in place": lambda _, h: h.mul(2).relu_().add_(0.0),
    "views": lambda _, h: h.view(-1, 2, 3).transpose(1, 2).reshape(-1, 6),
    "parts": lambda _, h: torch.cat(h.chunk(3, 1)[::-1], 1).relu(),
    "batch norm": lambda block, h: block.norm(h).relu(),
    "dropout": lambda _, h: torch.nn.functional.dropout(h, 0.5, training=True).relu(),
    "held constant": lambda block, h: h.relu() * block.table,
    "constants made": lambda _, h: (
        h.relu() * torch.tensor([1.0, 0, 1, 0, 1, 0]) + torch.arange(6) + torch.zeros(6)
    ),
    "like another": lambda _, h: h * torch.ones_like(h) + torch.zeros_like(h),
    "number of a constant": lambda _, h: h.relu() * torch.tensor(3.0).item(),
    "no gradients": lambda _, h: torch.no_grad()(torch.relu)(h),
    "as it was": lambda _, h: torch.autocast("cpu", enabled=False)(torch.relu)(h),
    "function of one's own": lambda _, h: Square.apply(h),
    "recomputed": lambda block, h: torch.utils.checkpoint.checkpoint(
        block.norm, h, use_reentrant=False
    ),
    "complex": (
        lambda _, h: torch.view_as_real(torch.view_as_complex(h.view(-1, 3, 2)) * 1j).flatten(1)
    ),
    "helper": lambda _, h: helper(h),
    "asks for gradients": lambda _, h: h.relu() if h.requires_grad else h.exp(),
}
EXPORTED = {
    "written in part": written,
    "buffer set": counts,
    "control flow": asks,
    "tensor kept": keeps,
    "another precision": in_half,
    "derivative": differentiates,
    "mapped": lambda _, h: torch.vmap(torch.relu)(h),
}


def both(step: Callable[[Any, Tensor], Any], training: bool = False) -> list[str]:
    def make() -> tuple[nn.Module, tuple[Tensor, ...], dict[str, Any]]:
        return Block(step).train(training), (torch.randn(5, 4),), {}

    reasons: list[str] = []
    model = Model("block", make)
    with counted(reasons):
        found = traced(model)
    with exported():
        assert found == traced(model)
    return reasons


@pytest.mark.parametrize("name", RECORDED)
def test_recorded(name: str) -> None:
    assert set(both(RECORDED[name], training=True)) == {""}


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPORTED)
def test_left_to_the_export(name: str) -> None:
    assert "" not in both(EXPORTED[name])


class Twice(nn.Module):
    """A module with two names, each of which is called."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        self.right = nn.Sequential(nn.ReLU(), self.left[0])

    def forward(self, x: Tensor, *, y: dict[str, Tensor]) -> dict[str, Any]:
        return {"sum": self.left(x), "other": [self.right(y["a"]), {"unused": y["b"]}]}


def test_operations_know_their_modules_and_lines() -> None:
    inputs = (torch.randn(2, 4),), {"y": {"a": torch.randn(2, 4), "b": torch.randn(1)}}
    recorded = capture(Twice(), *inputs)
    with exported():
        judge = capture(Twice(), *inputs)
    graphs = [one.graph.graph for one in (recorded, judge)]
    calls = [
        [(str(n.target), *place(n)) for n in graph.nodes if n.op == "call_function"]
        for graph in graphs
    ]
    assert calls[0] == calls[1]
    assert {module for _, module, _ in calls[0]} == {"left.0", "left.1", "right.0", "right.1"}
    assert recorded.canonical == judge.canonical
    assert sorted(recorded.sources.values()) == sorted(judge.sources.values())
    values = [
        recorded.parameters[name] for kind, name in recorded.sources.values() if kind == "parameter"
    ]
    given = [*values, inputs[0][0], *inputs[1]["y"].values()]
    assert all(map(torch.equal, recorded.graph(*given), judge.graph(*given)))


def test_models_without_numbers() -> None:
    with ps.without_weights():
        model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
    x = torch.randn(2, 4)
    reasons: list[str] = []
    with counted(reasons):
        found = answer(ps.trace(model, x))
    with exported():
        assert answer(ps.trace(model, x)) == found
    assert set(reasons) == {""}


def test_settings_are_as_before() -> None:
    def found() -> Any:
        flags = torch.backends.mha.get_fastpath_enabled(), torch.compiler.is_exporting()
        return (
            *flags,
            nn.Module.__call__,
            nn.Module._call_impl,
            gc.isenabled(),
            gc.get_freeze_count(),
        )

    before = found()
    for step in (RECORDED["views"], asks, differentiates):
        with contextlib.suppress(ps.PathspaceError):
            ps.trace(Block(step), torch.randn(5, 4))
    assert found() == before


class OddNames(nn.Module):
    """Names that no code can have, one module twice, and a list that the code fills."""

    def __init__(self) -> None:
        super().__init__()
        self.again: nn.Module = nn.Linear(6, 6)
        self.add_module("part-0", nn.Linear(4, 6))
        self.add_module("part-1", self.again)
        self.cache: dict[str, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        first = self.get_submodule("part-0")
        self.cache["seen"] = self.get_submodule("part-1")(first(x).relu())
        result: Tensor = self.again(self.cache["seen"].relu())
        return result


def test_names_that_are_no_identifiers_and_lists_that_are_filled_are_recorded() -> None:
    reasons: list[str] = []
    model = Model("odd names", lambda: (OddNames(), (torch.randn(5, 4),), {}))
    with counted(reasons):
        found = traced(model)
    with exported():
        assert found == traced(model)
    assert reasons == [""]


@pytest.mark.parametrize(
    "asks",
    [
        lambda h: h.device.type == "cpu" and h.is_cpu and not h.is_meta,
        lambda h: h.new_zeros(2).device.type == "cpu",
    ],
)
def test_tensors_say_that_they_lie_where_the_model_does(asks: Callable[[Tensor], bool]) -> None:
    def step(block: Any, h: Tensor) -> Tensor:
        return (h + torch.arange(6, device=h.device)).relu() if asks(h) else h.sigmoid()

    assert set(both(step)) == {""}
    with torch.device("cpu"):
        graph = ps.trace(Block(step), torch.randn(5, 4))
    assert "aten.relu.default" in {str(node.target) for node in graph.captured.graph.graph.nodes}


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "einsum": lambda u: torch.einsum("ij->ji", u),
    "broadcast_tensors": lambda u: torch.broadcast_tensors(torch.ones(1), u)[1],
    "atleast_3d": torch.atleast_3d,
    "cartesian_prod": lambda u: torch.cartesian_prod(u.flatten()),
    "dropout": lambda u: torch.nn.functional.dropout(u, 0.1, False),
    "unsafe_split": lambda u: u.unsafe_split(6, 1)[0],
    "conj_physical": torch.conj_physical,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.parametrize("around", [contextlib.nullcontext, exported])
def test_writes_through_views_that_signatures_do_not_mention_are_seen(
    name: str, around: Callable[[], Any]
) -> None:
    def step(block: Any, h: Tensor) -> Tensor:
        for _ in range(2):
            # the second time, the shape of the result is known
            h = h * 1
            VIEWS[name](h).mul_(block.norm.weight[0])
        return h

    model, x = Block(step).eval(), torch.randn(5, 4)
    with around():
        graph = ps.trace(model, x)
        assert "norm.weight" not in graph.unused
        assert ps.verify(model, x).holds


@pytest.mark.parametrize(
    "asks",
    [
        lambda h: h.clone().untyped_storage().data_ptr() == h.untyped_storage().data_ptr(),
        lambda h: h.clone().data_ptr() == h.data_ptr(),
        lambda h: h.grad_fn is None,
        lambda h: h.is_leaf,
        lambda h: torch.empty(6, device="meta").device.type != "meta",
        lambda h: not torch.empty(6, device=torch.device("meta")).is_meta,
    ],
)
def test_no_question_gets_a_wrong_answer(asks: Callable[[Tensor], bool]) -> None:
    def step(_: Any, h: Tensor) -> Tensor:
        return h.sigmoid() if asks(h) else h.relu()

    try:
        graph = ps.trace(Block(step).eval(), torch.randn(5, 4))
    except ps.CaptureError:
        return  # (a graph cannot say which memory a tensor has)
    assert graph.num_units == 6


def test_operations_without_a_rule_are_decomposed_and_their_writes_are_seen() -> None:
    def step(_: Any, h: Tensor) -> Tensor:
        return nn.utils.rnn.pad_sequence([h[:2], h[2:]], batch_first=True).flatten(0, 1).relu()

    model, x = Block(step).eval(), torch.randn(5, 4)
    graph = ps.trace(model, x)
    assert (graph.num_units, graph.pinned) == (6, ())
    assert ps.verify(model, x).holds
    with exported():
        assert answer(graph) == answer(ps.trace(model, x))
