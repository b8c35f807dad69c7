"""Elements that reach no output: nothing depends on them, and what they
depend on restricts nothing.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor, fx, nn

import pathspace as ps
from pathspace.capture.capture import capture
from pathspace.inference.liveness import live_elements
from pathspace.inference.rules import contraction
from pathspace.inference.values import with_value


class _Places(nn.Module):
    """Adds a vector to each of six places, and reads what `read` leaves."""

    def __init__(self, read: Callable[[Tensor, Any], Tensor]) -> None:
        super().__init__()
        self.enter, self.places = nn.Linear(3, 4), nn.Parameter(torch.randn(6, 4))
        self.leave, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)
        self.read, self.order = read, nn.Buffer(torch.tensor([4, 1]))

    def forward(self, x: Tensor) -> Tensor:
        return self.read(torch.relu(self.enter(x) + self.places), self)


def _attended(h: Tensor, m: _Places) -> Tensor:
    q, k, v = (t.unsqueeze(1) for t in (h, h[:, :4], m.leave(h)[:, :4]))
    return F.scaled_dot_product_attention(q, k, v)[:, 0, :2]


def _by_hand(h: Tensor, m: _Places) -> Tensor:
    scores = torch.softmax(h[:, :3] @ h[:, 1:4].transpose(1, 2), -1)
    return torch.bmm(scores, m.leave(h)[:, 1:4])[:, 2]


def _written(h: Tensor, m: _Places) -> Tensor:
    out = h.clone()
    out[:, 1:3] = h[:, 3:5] * 2
    return out[:, :3]


def _picked(h: Tensor, m: _Places) -> Tensor:
    return m.leave(h)[:, m.order]


def _convolved(h: Tensor, m: _Places) -> Tensor:
    return F.conv1d(h.transpose(1, 2), m.leave.weight[:, :, None], None, 2).sum(-1)[:, :3]


def _by_itself(h: Tensor, m: _Places) -> Tensor:
    first, second = h[0, :4], h[1]
    return F.linear(second, second)[0] + (first @ first)[0, 0]


def _batchless(h: Tensor, m: _Places) -> Tensor:
    return F.conv1d(h[0].T, m.leave.weight[:, :, None], m.leave.bias, 2)[:, 1:]


def _added(h: Tensor, m: _Places) -> Tensor:
    return torch.baddbmm(h[:, :, :1], m.leave(h), h.transpose(1, 2)[:, :, :3])[:, 2, :2]


FIRST_TWO = torch.arange(6)[:, None] < 2
KEPT = F.one_hot(torch.tensor([1, 2]), 6).float()

# how the places are read -> the places that are
READS: dict[str, tuple[Callable[[Tensor, _Places], Tensor], set[int]]] = {
    "first": (lambda h, m: m.leave(h)[:, 0], {0}),
    "normalised": (lambda h, m: m.norm(m.leave(h))[:, 2:4], {2, 3}),
    "split": (lambda h, m: h.split(2, 1)[1] + h.chunk(3, 1)[2].flip(1), {2, 3, 4, 5}),
    "unbound": (lambda h, m: h.unbind(1)[3], {3}),
    "joined": (lambda h, m: torch.cat([h[:, :1], m.leave(h)[:, 4:]], 1).mean(1), {0, 4, 5}),
    "reshaped": (lambda h, m: h.reshape(h.shape[0], 2, 12)[:, 1].reshape(-1, 3, 4), {3, 4, 5}),
    "picked": (_picked, {1, 4}),
    "gathered": (lambda h, m: torch.index_select(h, 1, m.order), {1, 4}),
    "written": (_written, {0, 3, 4}),
    "attended": (_attended, {0, 1, 2, 3}),
    "by hand": (_by_hand, {1, 2, 3}),
    "padded": (lambda h, m: F.pad(h, (0, 0, -2, 1)), {2, 3, 4, 5}),
    "accumulated": (lambda h, m: m.leave(h).cumsum(1)[:, :3], {0, 1, 2}),
    "pooled": (lambda h, m: F.avg_pool1d(h.transpose(1, 2), 2)[:, :, 1], {2, 3}),
    "strided": (_convolved, {0, 2, 4}),
    "summed": (lambda h, m: m.leave(h).sum(1), {0, 1, 2, 3, 4, 5}),
    "by itself": (_by_itself, {0, 1, 2, 3, 4, 5}),
    "looked up": (lambda h, m: F.embedding(m.order, h[0], padding_idx=1), {1, 4}),
    "weighed": (
        lambda h, m: (h @ m.leave.bias)[:, 1:3] + F.linear(h, m.leave.bias)[:, 2:4],
        {1, 2, 3},
    ),
    "sloped": (lambda h, m: F.prelu(m.norm(h).transpose(1, 2), m.leave.bias)[:, :, 5:], {5}),
    "same shape": (lambda h, m: torch.ones_like(h)[:, 0] * h[:, 2], {2}),
    "shrunk": (lambda h, m: F.interpolate(h.transpose(1, 2), scale_factor=0.5), {0, 2, 4}),
    "norm by hand": (lambda h, m: (h / h.std(-1, keepdim=True) / h.amax(-1)[..., None])[:, 3], {3}),
    "batchless": (_batchless, {2, 4}),
    "added": (_added, {0, 1, 2}),
    "indexed": (lambda h, m: torch.zeros_like(h).index_add(1, m.order, h[:, :2])[:, 4], {0}),
    "sorted": (lambda h, m: h.sort(1)[0][:, 0], {0, 1, 2, 3, 4, 5}),
    "times a mask": (lambda h, m: h.tanh() * FIRST_TWO, {0, 1}),
    "times numbers": (lambda h, m: m.leave(h * FIRST_TWO.float()), {0, 1}),
    "times zero": (lambda h, m: h.tanh() * 0 + h[:, :1], {0}),
    "times zeros of its shape": (lambda h, m: h.tanh() * torch.zeros_like(h) + h[:, :1], {0}),
    "times zeros and added": (
        lambda h, m: torch.addcmul(h[:, :1], FIRST_TWO.float(), h.tanh()),
        {0, 1},
    ),
    "divided": (lambda h, m: FIRST_TWO.float() / (1 + h.exp()), {0, 1}),
    "by a matrix": (lambda h, m: KEPT @ h.tanh(), {1, 2}),
    "into a matrix": (lambda h, m: torch.einsum("ij,bjk->bik", KEPT, h.tanh())[:, 1], {2}),
    "chosen": (lambda h, m: torch.where(FIRST_TWO, h.tanh(), m.leave(h).flip(1)), {0, 1, 2, 3}),
    "filled": (lambda h, m: F.gelu(h).masked_fill(~FIRST_TWO, 0.0), {0, 1}),
    "filled from elsewhere": (lambda h, m: h.masked_fill(FIRST_TWO, h[0, 5, 0]), {2, 3, 4, 5}),
    "chosen by data": (lambda h, m: torch.where(h > 0, h.tanh(), 0.0), {0, 1, 2, 3, 4, 5}),
}


def _used(graph: ps.ReductionGraph) -> set[int]:
    """The places with a weight on a path."""
    (block,) = (block for block in graph.blocks if block.name == "places")
    unused = (
        torch.zeros(block.shape, dtype=torch.bool)
        if block.unused is None
        else block.unused.expand(block.shape)
    )
    return set((~unused).any(1).nonzero().flatten().tolist())


@pytest.mark.parametrize("name", READS)
def test_places_that_are_not_read_are_on_no_path(name: str) -> None:
    read, expected = READS[name]
    model, x = _Places(read), torch.randn(2, 6, 3)
    graph = ps.trace(model, x)
    assert _used(graph) == expected
    certificate = ps.verify(model, x)
    assert certificate.holds and certificate.theorem3["holds"]


def test_a_dropped_part_of_a_function_restricts_nothing() -> None:
    """The features themselves are read elsewhere."""
    model, x = (
        _Places(lambda h, m: m.leave(h) + h.tanh()[:, :1] + FIRST_TWO * h.tanh()),
        torch.randn(2, 6, 3),
    )
    certificate = ps.verify(model, x, upper_bound=True)
    assert certificate.holds and certificate.units == certificate.units_at_most


def _outputs(module: fx.GraphModule, values: list[Any], changed: dict[str, Any]) -> list[Tensor]:
    """Run a captured graph, with other numbers in the dead elements of its results."""

    class Changed(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            result = super().run_node(n)
            live = changed.get(n.name, True)
            if live is True or not isinstance(result, Tensor) or not result.is_floating_point():
                return result
            return torch.where(
                torch.as_tensor(live).expand(result.shape), result, torch.randn(result.shape)
            )

    return [leaf.clone() for leaf in torch.utils._pytree.tree_leaves(Changed(module).run(*values))]


def _dead_elements_do_not_matter(model: nn.Module, x: Tensor) -> bool:
    """Whether some elements are dead; the outputs are the same with other numbers there."""
    captured = capture(model, (x,), {})
    held = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    nodes = [node for node in captured.graph.graph.nodes if node.op == "placeholder"]
    values = {}
    for node in nodes:
        _, source = captured.sources.get(node.name, ("input", ""))
        values[node.name] = held.get(source, captured.constants.get(node.name, x))
    indices = {
        name: with_value(value) for name, value in values.items() if not value.is_floating_point()
    }
    dead = live_elements(captured.graph, indices)
    with torch.no_grad():
        plain, other = (
            _outputs(captured.graph, [*values.values()], changed) for changed in ({}, dead)
        )
    assert all(torch.equal(one, two) for one, two in zip(plain, other, strict=True))
    return bool(dead)


@torch.inference_mode()
def test_in_inference_mode() -> None:
    read, expected = READS["strided"]
    graph = ps.trace(_Places(read), torch.randn(2, 6, 3))
    assert _used(graph) == expected
    assert sum(1 for _ in graph.paths()) > 0


@pytest.mark.parametrize("name", READS)
def test_nothing_depends_on_dead_elements(name: str) -> None:
    read, expected = READS[name]
    found = _dead_elements_do_not_matter(_Places(read), torch.randn(2, 6, 3))
    assert found or len(expected) == 6


def _stacked(h: Tensor, m: _Places) -> Tensor:
    return torch.stack([h, -h], 2).flatten(1, 2)[:, 1:5]


# steps from a tensor (B, T, 4) to another, for any T >= 2
STEPS: list[Callable[[Tensor, _Places], Tensor]] = [
    lambda h, m: h[:, 1:], lambda h, m: h[:, ::2], lambda h, m: h[:, :-1],
    lambda h, m: h[:, -1:] + h[:, :2],
    lambda h, m: h.flip(1), lambda h, m: h.roll(1, 1), lambda h, m: torch.cat([h[:, 1:], h], 1),
    lambda h, m: h.softmax(-1), lambda h, m: h.softmax(1), lambda h, m: m.norm(h),
    lambda h, m: m.leave(h),
    lambda h, m: h @ h.transpose(1, 2) @ h, lambda h, m: h.cumsum(1),
    lambda h, m: h.mean(1, keepdim=True) + h[:, :3],
    lambda h, m: F.pad(h, (0, 0, 1, -1)),
    lambda h, m: h.masked_fill(torch.arange(h.shape[1])[:, None] > 1, 0.0),
    lambda h, m: h.index_select(1, torch.tensor([1, 0, 1])), lambda h, m: h.chunk(2, 1)[0],
    _stacked,
    lambda h, m: F.conv1d(h.transpose(1, 2), m.leave.weight[:, :, None], None, 2).transpose(1, 2),
    lambda h, m: F.scaled_dot_product_attention(h[:, None], h.flip(1)[:, None], m.leave(h)[:, None])[:, 0],  # noqa: E501
    lambda h, m: h.unfold(1, 2, 1).sum(-1), lambda h, m: h.repeat(1, 2, 1)[:, 1:5],
    lambda h, m: h.sort(1)[0],
    lambda h, m: h.gather(1, h.argsort(1)), lambda h, m: torch.where(h > 0, h, m.leave(h)),
    lambda h, m: h.clone().index_fill_(1, torch.tensor([0]), 2.0),
    lambda h, m: h * h.amax(1, keepdim=True),
    lambda h, m: torch.einsum("btd,bsd->bts", h, h) @ m.leave(h),
    lambda h, m: h.diff(dim=1, prepend=h[:, :1]),
    lambda h, m: F.max_pool1d(h.transpose(1, 2), 2, 1).transpose(1, 2),
    lambda h, m: h.permute(1, 0, 2).permute(1, 0, 2),
    lambda h, m: F.layer_norm(h, h.shape[1:]), lambda h, m: F.glu(torch.cat([h, h.flip(1)], 2)),
    lambda h, m: torch.baddbmm(h, h @ h.transpose(1, 2), h),
    lambda h, m: torch.fft.rfft(h, dim=1).real,
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(40))
def test_chains_of_operations(seed: int) -> None:
    rng = random.Random(seed)
    steps = rng.choices(STEPS, k=rng.randint(2, 6))

    def read(h: Tensor, m: _Places) -> Tensor:
        for step in steps:
            h = step(h, m)
            # (every step takes at least two places)
            h = h if h.shape[1] > 1 else torch.cat([h, h], 1)
        return h[:, rng.randrange(2) :][:, :1] if seed % 2 else h[:, :2]

    model, x = _Places(read).double(), torch.randn(2, 6, 3, dtype=torch.float64)
    state = rng.getstate()

    def again(h: Tensor, m: _Places) -> Tensor:
        rng.setstate(state)
        return read(h, m)

    model.read = again
    _dead_elements_do_not_matter(model, x)
    graph = ps.trace(model, x)
    before = model(x)
    ps.rescale(model, graph, graph.exact_part(torch.randn(graph.num_units, dtype=torch.float64)))
    assert torch.allclose(model(x), before, rtol=1e-8, atol=1e-10)


def _causal(h: Tensor, m: _Places) -> Tensor:
    hidden = torch.ones(6, 6, dtype=torch.bool).triu(1)
    scores = (m.leave(h) @ h.transpose(1, 2)).masked_fill(hidden, 0.0)
    return (scores @ torch.ones_like(h))[:, 0]


def test_large_products_leave_out_rows_that_reach_no_output(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, x = _Places(_causal).double(), torch.randn(2, 6, 3, dtype=torch.float64)
    before, wanted = model(x), ps.trace(model, x)
    monkeypatch.setattr(contraction, "LARGEST", 100)
    graph = ps.trace(model, x)
    assert (graph.num_units, graph.num_weights) == (wanted.num_units, wanted.num_weights) == (4, 40)
    assert not graph.pinned
    ps.rescale(model, graph, torch.randn(graph.num_units, dtype=torch.float64))
    assert torch.allclose(model(x), before)


class _Slopes(nn.Module):
    """A slope for each of four channels; the output reads two channels."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.act = nn.Linear(3, 4), nn.PReLU(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.enter(x))[:, :2]


def test_slopes_of_channels_that_are_not_read_are_on_no_path() -> None:
    certificate = ps.verify(_Slopes(), torch.randn(5, 3))
    assert certificate.holds and certificate.theorem3["holds"]
    assert certificate.weights == 2 * 3 + 2 + 2


class _Bordered(nn.Module):
    """Channels of zeros around those of the input."""

    def __init__(self) -> None:
        super().__init__()
        self.leave = nn.Conv2d(11, 2, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(nn.functional.pad(x, (0, 0, 0, 0, 1, 1)))


def test_channels_of_zeros_are_on_no_path() -> None:
    assert ps.trace(_Bordered(), torch.randn(2, 9, 4, 4)).num_weights == 2 * 9 * 9 + 2


class _LastWord(nn.Module):
    """Looks up the rows of a table, and reads the row of the last word."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.leave = nn.Embedding(4, 3), nn.Linear(3, 2)

    def forward(self, words: Tensor) -> Tensor:
        return self.leave(torch.relu(self.table(words))[:, -1])


@pytest.mark.parametrize("shape", [(1, 3), (2, 5), (5, 2)])
def test_every_row_of_a_table_is_on_paths_if_few_words_are_read(shape: tuple[int, int]) -> None:
    certificate = ps.verify(_LastWord(), torch.randint(4, shape))
    assert certificate.holds and certificate.theorem3["holds"]
    assert certificate.weights == 4 * 3 + 2 * 3 + 2


class _Channels(nn.Module):
    """One batch norm used twice; each use leaves out one of three channels,
    by a slice or by a zero.
    """

    def __init__(self, masked: bool) -> None:
        super().__init__()
        self.enter, self.norm, self.leave = nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(4, 2)
        self.norm.running_var.uniform_(0.01, 2)
        self.mask = torch.tensor([1.0, 1.0, 0.0]) if masked else torch.ones(3)

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.norm(self.enter(x) * self.mask), self.norm(torch.relu(self.enter(x)))
        return self.leave(torch.relu(torch.cat([first[:, :2], second[:, 1:]], 1)))


@pytest.mark.parametrize("masked", [False, True])
def test_statistics_follow_channels_that_one_use_leaves_out(masked: bool) -> None:
    model, x = _Channels(masked).eval().double(), torch.randn(5, 3, dtype=torch.float64)
    model.mask = model.mask.double()
    graph, before = ps.trace(model, x), model(x)
    assert graph.num_exact_units >= 2
    ps.rescale(model, graph, torch.randn(graph.num_units, dtype=torch.float64))
    assert torch.allclose(model(x), before, rtol=1e-9)


def test_channels_that_are_dropped_behind_a_batch_norm_are_on_no_path() -> None:
    model = nn.Sequential(
        nn.Conv1d(2, 4, 1),
        nn.BatchNorm1d(4),
        nn.ReLU(),
        nn.ChannelShuffle(2),
        _First(),
        nn.Conv1d(3, 2, 1),
    )
    certificate = ps.verify(model.eval(), torch.randn(2, 2, 5))
    assert certificate.holds and certificate.theorem3["holds"]
    assert certificate.weights == 3 * (2 + 1 + 2) + 3 * 2 + 2


class _First(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[:, :3]


class _Windows(nn.Module):
    """Reads what some windows leave of an activation."""

    def __init__(self, read: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.read = read

    def forward(self, x: Tensor) -> Tensor:
        return self.read(torch.relu(x))


def _by_gradient(read: Callable[[Tensor], Tensor], shape: tuple[int, ...]) -> Tensor:
    """Elements with an influence on what is read."""
    x = torch.ones(shape, dtype=torch.float64, requires_grad=True)
    (found,) = torch.autograd.grad(read(x).sum(), x)
    return found != 0


@pytest.mark.slow
@given(data=st.data())
def test_places_that_no_window_meets_are_those_without_a_gradient(data: st.DataObject) -> None:
    dims = data.draw(st.integers(1, 2))
    shape = (1, 2, *(data.draw(st.integers(6, 9)) for _ in range(dims)))
    size, stride, hole = ([data.draw(st.integers(1, n)) for _ in range(dims)] for n in (3, 4, 2))
    margin = data.draw(st.sampled_from([0, 1, "valid"]))
    weight = torch.ones(2, 2, *size, dtype=torch.float64)
    kind, back = (F.conv1d, F.conv_transpose1d) if dims == 1 else (F.conv2d, F.conv_transpose2d)
    crop = 0 if margin == "valid" else margin
    reads: list[Callable[[Tensor], Tensor]] = [
        lambda x: kind(x, weight, None, stride, margin, hole),
        lambda x: kind(x, weight, None, stride, margin, hole)[:, :, :1],
        lambda x: back(x, weight, None, stride, crop, 0, 1, hole),
        lambda x: back(x, weight[:, :1], None, stride, crop, 0, 2, hole)[:, :, :2],
    ]
    if dims == 2:
        reads.append(lambda x: F.avg_pool2d(x, size, stride))
        reads.append(lambda x: F.adaptive_avg_pool2d(x, tuple(size)))
    for read in reads:
        captured = capture(_Windows(read), (torch.ones(shape, dtype=torch.float64),), {})
        live = live_elements(captured.graph, {}).get("relu", True)
        mask = live if isinstance(live, Tensor) else torch.tensor(live).expand(shape)
        assert torch.equal(mask, _by_gradient(read, shape)), (shape, size, stride, margin, hole)


class _Taps(nn.Module):
    """A convolution of an activation, of which some places are read."""

    def __init__(self, kernel: nn.Module, places: int) -> None:
        super().__init__()
        self.enter, self.kernel, self.places = nn.Conv1d(1, 4, 1, bias=False), kernel, places

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.enter(x.flatten(2))).reshape(x.shape[0], 4, *x.shape[2:])
        first, *others = self.kernel(h).tensor_split(2, 1)
        return torch.cat(
            [first[..., : self.places], *(other[..., -self.places :] for other in others)], 1
        )


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Using padding=.same. with even kernel lengths:UserWarning")
@given(data=st.data())
def test_taps_that_meet_only_padding_where_a_result_is_read_are_on_no_path(
    data: st.DataObject,
) -> None:
    dims, transposed = data.draw(st.integers(1, 2)), data.draw(st.booleans())
    sizes, kernel, stride, hole, groups = (
        [data.draw(st.integers(1, 4)) for _ in range(dims)],
        *(data.draw(st.integers(1, most)) for most in (4, 3, 2, 2)),
    )
    kinds = (nn.ConvTranspose1d, nn.ConvTranspose2d) if transposed else (nn.Conv1d, nn.Conv2d)
    options: dict[str, Any] = {"stride": stride, "dilation": hole, "groups": groups, "bias": False}
    options["padding"] = data.draw(
        st.integers(0, 1) if transposed or stride > 1 else st.sampled_from([0, 1, "same"])
    )
    model = _Taps(kinds[dims - 1](4, 4, kernel, **options), data.draw(st.integers(1, 3)))
    x = torch.rand(2, 1, *sizes, dtype=torch.float64) + 0.5
    for weight in model.parameters():
        nn.init.ones_(weight)
    try:
        model.double()(x).sum().backward()
    except RuntimeError:
        assume(False)  # (no place is left)
    graph = ps.trace(model, x, sizes="given")
    unused = {block.name: block.unused for block in graph.blocks}
    grad = model.kernel.weight.grad
    assert isinstance(grad, Tensor)
    found = unused.get("kernel.weight", torch.tensor(True))
    assert torch.equal(
        (torch.tensor(False) if found is None else found).expand(grad.shape), grad == 0
    ), options


class _Places1d(nn.Module):
    """A convolution of every second place, of which a function reads some."""

    def __init__(self, kernel: nn.Module, read: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.kernel, self.read = kernel, read

    def forward(self, x: Tensor) -> Tensor:
        return self.read(self.kernel(x[..., ::2]))


APART: dict[str, tuple[nn.Module, int, Callable[[Tensor], Tensor]]] = {
    "each place by its own tap": (nn.ConvTranspose1d(2, 2, 2, bias=False), 2,
                                  lambda h: h[..., ::2]),
    "the second place by its own tap": (nn.ConvTranspose1d(2, 2, 2, bias=False), 2,
                                        lambda h: h[..., 1:]),
    "places that are only margin": (nn.Conv1d(2, 2, 1, padding=1, bias=False), 3,
                                    lambda h: h.cumsum(-1)),
    "places beyond the last window": (
        nn.ConvTranspose1d(2, 2, 3, stride=2, output_padding=1, bias=False), 5,
        lambda h: h.flip(-1)[..., :2]
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", APART)
def test_places_that_a_margin_tells_apart(name: str) -> None:
    kernel, length, read = APART[name]
    model, x = _Places1d(kernel, read).double(), torch.randn(3, 2, length).double()
    graph, before = ps.trace(model, x, sizes="given"), model(x)
    ps.rescale(model, graph, torch.ones(graph.num_units))
    torch.testing.assert_close(model(x), before)
    certificate = ps.verify(model, x, upper_bound=True)
    assert certificate.holds and certificate.units == certificate.units_at_most


def test_a_kernel_that_is_computed_has_no_path_through_taps_that_meet_only_padding() -> None:
    class Computed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.enter, self.one, self.other = (
                nn.Conv1d(1, 2, 1),
                *(nn.Parameter(torch.randn(3, 2, 3)) for _ in "ab"),
            )

        def forward(self, x: Tensor) -> Tensor:
            return F.conv1d(torch.relu(self.enter(x)), self.one * self.other, padding=1)[..., 0]

    certificate = ps.verify(Computed(), torch.randn(2, 1, 5))
    assert certificate.holds and certificate.weights == 4 + 2 * 3 * 2 * 2


class _Positions(nn.Module):
    """A table of positions that meets the input itself."""

    def __init__(self, read: Callable[[Tensor, Any], Tensor]) -> None:
        super().__init__()
        self.table, self.enter, self.norm = nn.Embedding(5, 3), nn.Linear(3, 4), nn.LayerNorm(3)
        self.waves, self.held, self.read = nn.Buffer(torch.randn(5, 3)), torch.randn(5, 3), read

    def forward(self, x: Tensor) -> Tensor:
        return self.read(x, self)


# places 0 and 1 of five are read
AT_INPUTS: dict[str, Callable[[Tensor, _Positions], Tensor]] = {
    "embedded": lambda x, m: m.enter(x + m.table(torch.arange(5)))[:, :2],
    "dropped first": lambda x, m: m.enter((x + m.table.weight)[:, :2]),
    "normalised": lambda x, m: m.enter(m.norm(x + m.table.weight))[:, :2],
    "read elsewhere": lambda x, m: m.enter(x + m.table.weight)[:, :2] + m.enter(x[:, :2]),
    "the larger": lambda x, m: m.enter(torch.maximum(x, m.table.weight))[:, :2],
    "a buffer": lambda x, m: m.enter((m.waves + m.table.weight)[:2]) + m.enter(x)[:, :2],
    "a constant": lambda x, m: m.enter((m.held + m.table.weight)[:2]) + m.enter(x)[:, :2],
}


@pytest.mark.parametrize("name", AT_INPUTS)
def test_inputs_and_buffers_at_places_that_are_not_read_restrict_nothing(name: str) -> None:
    model, x = _Positions(AT_INPUTS[name]), torch.randn(2, 5, 3)
    certificate = ps.verify(model, x)
    assert certificate.holds and certificate.theorem3["holds"]
    assert certificate.weights == 2 * 3 + 4 * 3 + 4 + 6 * (name == "normalised")
    assert _dead_elements_do_not_matter(model, x)
