"""What the rules say about single operations: units counted by hand, pins with their place."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from cases import Between, network
from rescaled import change, traced
from torch import Tensor, nn
from torch.nn import functional as F

import pathspace as ps
from pathspace.inference.registry import FACTS, RULES
from pathspace.inference.rules import reductions
from pathspace.inference.scales import Scales

Use = Callable[[Any, Tensor], Any]
PAIRS = torch.tensor([0, 0, 1, 1, 2, 2])
# operation, features it leaves, free units
OPERATIONS: dict[str, tuple[Callable[[Tensor], Tensor], int, int]] = {
    "relu": (F.relu, 6, 6),
    "times a number": (lambda h: -3 * h / 2, 6, 6),
    "plus a number": (lambda h: h + 1, 6, 0),
    "pairwise maximum": (lambda h: F.max_pool1d(F.relu(h).unsqueeze(1), 2).squeeze(1), 3, 3),
    "padding with zeros": (lambda h: F.pad(F.relu(h), (1, 1)), 8, 6),
    "flip and add": (lambda h: F.relu(h) + F.relu(h).flip(-1), 6, 3),
    "glued to its double": (lambda h: torch.cat([F.relu(h), 2 * F.relu(h)], -1), 12, 6),
    "gate by sigmoid of itself": (lambda h: h * torch.sigmoid(h), 6, 0),
    "bilinear": (lambda h: F.relu(h[:, :3]) * h[:, 3:], 3, 6),
    "root of a square": (lambda h: h.square().sqrt(), 6, 6),
    "quotient": (lambda h: h[:, :3] / (h[:, 3:].abs()), 3, 6),
    "length one": (lambda h: h / h.square().sum(-1, keepdim=True).sqrt(), 6, 1),
    "masked": (lambda h: F.relu(h).masked_fill(torch.tensor([True, False] * 3), 0.0), 6, 3),
    "adaptive mean of pairs": (
        lambda h: F.adaptive_avg_pool1d(F.relu(h).view(-1, 3, 2), 1).squeeze(-1),
        3,
        3,
    ),
    "close, with a share alone": (lambda h: h * h.isclose(h.flip(-1), 0.5), 6, 0),
    "to 8 bits and back": (lambda h: F.relu(h).to(torch.float8_e4m3fn).to(h.dtype), 6, 0),
    "to 8 bits of a larger range": (lambda h: h.to(torch.float8_e5m2).to(h.dtype), 6, 0),
    "added at known places": (
        lambda h: torch.zeros_like(h).scatter_add(1, PAIRS.expand_as(h), F.relu(h)),
        6,
        3,
    ),
}


@pytest.fixture(autouse=True)
def registry_as_before() -> Iterator[None]:
    """Rules that a test registers, and their facts, go with it."""
    before = dict(RULES), dict(FACTS)
    yield
    for table, kept in zip((RULES, FACTS), before, strict=True):
        table.clear()
        table.update(kept)


@pytest.mark.usefixtures("no_rule_fails")
@pytest.mark.parametrize("name", OPERATIONS)
def test_units_are_those_counted_by_hand(name: str) -> None:
    operation, features, units = OPERATIONS[name]
    model, x = Between(operation, features), torch.randn(5, 4)
    certificate = ps.verify(model, x)
    assert certificate.units == units
    assert certificate.holds, certificate


def projected(layers: int, bidirectional: bool, last: bool) -> nn.Module:
    """An LSTM whose states are projected, read by its outputs or by its last states."""

    def forward(net: Any, x: Tensor) -> Tensor:
        outputs, (states, _) = net.lstm(x)
        return net.out(states if last else outputs)

    lstm = nn.LSTM(2, 3, layers, proj_size=2, bidirectional=bidirectional)
    return network(forward, lstm=lstm, out=nn.Linear(2 if last or not bidirectional else 4, 1))


def spectral(real: bool) -> nn.Module:
    """Complex weights on the lowest frequencies, as one complex parameter or as two real parts."""

    def forward(net: Any, x: Tensor) -> Tensor:
        h = F.relu(net.first(x)).transpose(1, 2)
        weight = torch.view_as_complex(net.weight) if real else net.weight
        low = torch.einsum("bik,iok->bok", torch.fft.rfft(h)[:, :, :3], weight)
        return net.second(F.relu(torch.fft.irfft(F.pad(low, (0, 2)), n=8)).transpose(1, 2))

    weight = torch.randn(4, 4, 3, dtype=torch.complex64)
    weight = torch.view_as_real(weight).clone() if real else weight
    return network(
        forward, first=nn.Linear(2, 4), second=nn.Linear(4, 2), weight=nn.Parameter(weight)
    )


# network, shape of its input, free units, weights in path space (None: all of them)
Built = Callable[[], nn.Module]
NETWORKS: dict[str, tuple[Built, tuple[int, ...], int, int | None]] = {
    "an LSTM with projected states": (lambda: projected(1, False, False), (3, 2, 2), 2, None),
    "its two layers": (lambda: projected(2, False, False), (3, 2, 2), 4, None),
    "its two directions": (lambda: projected(1, True, False), (3, 2, 2), 4, None),
    # what reads the last states of all layers and directions has one scale per feature for them
    "all last states": (lambda: projected(2, True, True), (3, 2, 2), 2, None),
    "frequencies with weights in two real parts": (lambda: spectral(True), (2, 8, 2), 8, None),
    "a convolution that reads its margin": (
        # (weights that read a sum of no data are on no path)
        lambda: nn.Sequential(
            nn.Conv1d(2, 3, 1, padding=1, bias=False), nn.ReLU(), nn.Flatten(), nn.Linear(18, 2)
        ),
        (3, 2, 4),
        3,
        6 + 2 + 2 * 3 * 4,
    ),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_networks_have_the_units_counted_by_hand(name: str) -> None:
    make, shape, units, weights = NETWORKS[name]
    certificate = ps.verify(make(), torch.randn(shape))
    assert certificate.holds, certificate
    assert certificate.units == units
    assert certificate.weights == (weights or certificate.parameters["total"])


def test_complex_weights_are_pinned_and_the_way_out_is_named() -> None:
    pins = ps.trace(spectral(False), torch.randn(2, 8, 2)).pinned
    (pin,) = (pin for pin in pins if pin.parameters == ("weight",))
    assert "torch.view_as_real(weight)" in pin.reason


def padded(apart: bool) -> nn.Module:
    """Two convolutions, padded by themselves or by an operation of its own."""

    def forward(net: Any, x: Tensor) -> Tensor:
        for layer in (net.first, net.second):
            x = F.relu(layer(F.pad(x, (1, 1, 1, 1)) if apart else x))
        return x.mean((2, 3))

    margin = 0 if apart else 1
    first = nn.Conv2d(2, 4, 3, padding=margin)
    return network(forward, first=first, second=nn.Conv2d(4, 3, 3, padding=margin, bias=False))


@pytest.mark.parametrize("size", [1, 2, 9])
def test_padding_apart_is_padding_within(size: int) -> None:
    apart, within = (ps.trace(padded(way), torch.randn(2, 2, size, size)) for way in (True, False))
    assert (apart.num_units, apart.num_weights) == (within.num_units, within.num_weights)
    # on a single pixel, all but the middle of a kernel meets zeros only
    assert within.num_weights == (2 * 4 + 4 + 4 * 3 if size == 1 else 2 * 4 * 9 + 4 + 4 * 3 * 9)


def normed(forward: Use) -> nn.Module:
    """A network around batch norms whose running statistics are used in some way."""
    a, c, b = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2)
    model: Any = network(forward, a=a, c=c, b=b, norm=nn.BatchNorm1d(4, eps=1e-30))
    model.register_buffer("means", torch.randn(2, 4))
    model.register_buffer("vars", torch.rand(2, 4) + 0.5)
    model.norm.running_mean.normal_()
    model.norm.running_var.uniform_(0.5, 2)
    return model.double()


def frozen(net: Any, x: Tensor, mean: Tensor, var: Tensor) -> Tensor:
    """A layer, normalised by given statistics, a layer."""
    return net.b(F.relu(F.batch_norm(net.a(x), mean, var, None, None, False, 0.0, 1e-30)))


def squared_in_place(h: Tensor) -> Tensor:
    return F.relu(h).mul_(h)


# how a network uses its statistics -> free units, entries in graph.statistics
STATISTICS: dict[str, tuple[Use, int, int]] = {
    "one call": (lambda m, x: m.b(F.relu(m.norm(m.a(x)))), 8, 1),
    "two calls share channels": (
        lambda m, x: m.b(F.relu(m.norm(m.c(F.relu(m.norm(m.a(x))))))),
        8,
        1,
    ),
    "two calls, each with its own eps": (
        lambda m, x: m.b(
            F.relu(F.batch_norm(m.norm(m.a(x)), m.norm.running_mean, m.norm.running_var, eps=1e-5))
        ),
        0,
        1,
    ),
    "two calls, functionalised": (lambda m, x: m.b(squared_in_place(m.norm(m.norm(m.a(x))))), 4, 1),
    "part of a buffer": (lambda m, x: frozen(m, x, m.means[1], m.vars[1]), 0, 0),
    "constants": (lambda m, x: frozen(m, x, x.new_ones(4), x.new_ones(4)), 0, 0),
    "computed": (lambda m, x: frozen(m, x, m.norm.running_mean, m.norm.running_var + 0.1), 0, 0),
    "one buffer for both": (
        lambda m, x: frozen(m, x, m.norm.running_var, m.norm.running_var),
        0,
        1,
    ),
    "read before": (lambda m, x: m.b(F.relu(m.norm(m.norm.running_var * m.a(x)))), 4, 1),
    "read after": (lambda m, x: m.b(F.relu(m.norm(m.a(x))) * m.norm.running_var), 4, 1),
    "an output": (lambda m, x: (m.b(F.relu(m.norm(m.a(x)))), m.norm.running_mean), 4, 1),
}


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", STATISTICS)
def test_rescaling_keeps_what_frozen_statistics_compute(name: str, training: bool) -> None:
    forward, units, entries = STATISTICS[name]
    model, x = normed(forward).train(training), torch.randn(5, 3).double()
    graph = ps.trace(model, x)
    assert (graph.num_units, len(graph.statistics)) == (units, entries)
    assert change(model.eval(), graph, x, spread=3.0) < 1e-9


# something that divides by h + eps, which is a normalisation at eps = 0 -> units it leaves
NORMS: dict[str, tuple[Callable[[Tensor, float], Tensor], int]] = {
    "RMS norm": (lambda h, eps: h * torch.rsqrt(h.square().mean(-1, keepdim=True) + eps), 1),
    "length and a bit": (lambda h, eps: h / (h.norm(dim=-1, keepdim=True) + eps), 1),
    "a clamped sum of squares": (
        lambda h, eps: h / h.square().sum(-1, keepdim=True).clamp(min=eps).sqrt(),
        1,
    ),
    "layer norm": (
        lambda h, eps: (h - h.mean(-1, True)) / (h.var(-1, keepdim=True) + eps).sqrt(),
        1,
    ),
    "standardised": (lambda h, eps: (h - h.mean(-1, True)) / (h.std(-1, keepdim=True) + eps), 1),
    "length one": (lambda h, eps: F.normalize(h, dim=-1, eps=eps), 1),
    "a sum of sizes": (lambda h, eps: h / (h.abs() + eps).sum(-1, keepdim=True), 1),
    "parts of a sum": (lambda h, eps: F.relu(h) * (1 / (F.relu(h).sum(-1, keepdim=True) + eps)), 1),
}
# the same constant where it normalises nothing
NO_NORMS: dict[str, Callable[[Tensor, float], Tensor]] = {
    "added": lambda h, eps: F.relu(h) + eps,
    "clamped": lambda h, eps: h.clamp(min=eps),
    "smooth size": lambda h, eps: torch.sqrt(h.square() + eps),
    "divides a number": lambda h, eps: 1 / (h.abs() + eps),
    "seen under another name": lambda h, eps: (
        h / h.abs().add_(eps).sqrt() + h.abs().view(-1, 6).add_(eps).view(-1, 6)
    ),
    "beside a large factor": lambda h, eps: h / torch.add(h.abs(), eps, alpha=1e5),
    "distance": lambda h, eps: F.pairwise_distance(h, -h, eps=eps, keepdim=True) + 0 * h,
}


@pytest.mark.parametrize("name", NORMS)
def test_a_small_constant_in_a_norm_written_out_is_its_eps(name: str) -> None:
    function, units = NORMS[name]
    x = torch.randn(5, 4)
    graph = ps.trace(Between(lambda h: function(h, 1e-5), 6), x)
    assert graph.num_units == len(graph.approximate) == units
    assert ps.trace(Between(lambda h: function(h, 1e-5), 6), x, norm_eps="respect").num_units == 0
    assert ps.verify(Between(lambda h: function(h, 1e-5), 6), x).invariance["rescaling"] < 1e-12
    certificate = ps.verify(Between(lambda h: function(h, 1e-30), 6), x)
    assert certificate.units == units and certificate.holds, certificate


@pytest.mark.parametrize("name", NO_NORMS)
def test_a_small_constant_elsewhere_is_a_constant(name: str) -> None:
    certificate = ps.verify(
        Between(lambda h: NO_NORMS[name](h, 1e-5), 6).double(), torch.randn(5, 4).double()
    )
    assert certificate.units == 0 and certificate.holds, certificate


class Cell(nn.Module):
    """A cell, or so many steps of a layer, whose input and states are rectified."""

    def __init__(self, kind: str, steps: int = 0) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(3, 4), nn.Linear(3, 5), nn.Linear(3, 5)])
        self.cell, self.last = getattr(nn, kind)(4, 5), nn.Linear(5, 2)
        self.kind, self.steps = kind, steps

    def forward(self, x: Tensor) -> Tensor:
        x, *states = (F.relu(layer(x)) for layer in self.layers)
        if self.steps:
            x, states = x.expand(self.steps, *x.shape), [state[None] for state in states]
        found = self.cell(x, tuple(states) if "LSTM" in self.kind else states[0])
        return self.last(found if isinstance(found, Tensor) else found[0])


@pytest.mark.usefixtures("no_rule_fails")
@pytest.mark.parametrize(
    ("kind", "steps", "units", "fixed"),
    [("LSTMCell", 0, 9, 20), ("GRUCell", 0, 4, 15), ("RNNCell", 0, 9, 5), ("LSTM", 1, 9, 5),
     ("LSTM", 2, 4, 10), ("GRU", 1, 4, 5), ("RNN", 1, 9, 0), ("RNN", 2, 4, 5)],
)  # fmt: skip
def test_states_that_gates_are_multiplied_with_are_fixed(
    kind: str, steps: int, units: int, fixed: int
) -> None:
    """Inputs are free, and the hidden states of one step of an LSTM and of a plain
    cell; that of a GRU is not. Cells are read by their steps, each gate with a pin.
    """
    graph = traced(Cell(kind, steps).double(), torch.randn(2, 3).double(), units=units)
    assert sum(pin.elements for pin in graph.pinned) == fixed


class Steps(nn.Module):
    """A recurrence without bias, in which every step may have a scale of its own."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.first, self.steps = nn.Linear(3, 2 * steps), steps
        self.rnn = nn.RNN(2, 2, nonlinearity="relu", batch_first=True, bias=False)
        self.last = nn.Linear(2, 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.rnn(self.first(x).unflatten(1, (self.steps, 2)))[1][0])


@pytest.mark.parametrize("steps", [2, 4, 8, 9, 12])
def test_scales_that_grow_from_step_to_step_are_right_or_left_out(steps: int) -> None:
    """Of many steps few are interpreted, so that the scales of the others must be those of the
    last; a factor per step is a unit only where every step is interpreted.
    """
    model, x = Steps(steps).double(), torch.randn(5, 3).double()
    with torch.no_grad():
        for weight in model.parameters():
            # (a state that is zero could hide a wrong scale)
            weight.abs_()
    graph = ps.trace(model, x.abs_())
    assert graph.num_units == 4 + (steps <= 8)
    assert change(model, graph, x) < 1e-9
    if steps < 8:
        certificate = ps.verify(model, x)
        assert certificate.holds, certificate


@pytest.mark.parametrize("mode", ["nearest", "nearest-exact"])
@pytest.mark.parametrize(("size", "factor"), [(10, 1.19), (14, 0.25), (11, 0.3)])
def test_upsampling_by_a_factor_copies_the_elements_that_torch_copies(
    size: int, factor: float, mode: str
) -> None:
    """The factor that is asked for, and not the ratio of the sizes, decides."""

    def resize(h: Tensor) -> Tensor:
        return F.interpolate(h, scale_factor=factor, mode=mode, recompute_scale_factor=False)

    copied = resize(torch.arange(float(size)).reshape(1, 1, -1)).unique()
    model = Between(lambda h: resize(h.unsqueeze(1)).squeeze(1), int(size * factor), 3, size)
    certificate = ps.verify(model.double(), torch.randn(5, 3).double())
    assert certificate.holds, certificate
    assert certificate.units == len(copied)


@pytest.mark.parametrize(
    ("kernel", "padding", "stride", "length"), [(1, 1, 1, 6), (3, 3, 2, 9), (1, 2, 1, 7)]
)
def test_transposed_convolutions_that_leave_out_borders(
    kernel: int, padding: int, stride: int, length: int
) -> None:
    grow = nn.ConvTranspose1d(4, 3, kernel, stride, padding)
    layers = nn.Conv1d(2, 4, 1), nn.ReLU(), grow, nn.ReLU(), nn.Conv1d(3, 2, 1)
    graph = ps.trace(nn.Sequential(*layers), torch.randn(2, 2, length))
    assert graph.num_units == 7 and not graph.pinned


def test_products_are_followed_up_to_a_number_of_factors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reductions, "FACTORS", 3)
    for count, pins in ((3, 0), (4, 1)):
        model = Between(lambda h, n=count: h[:, :n].prod(-1, keepdim=True), 1)
        graph = ps.trace(model, torch.randn(2, 4))
        assert len(graph.pinned) == pins


def test_weights_and_values_without_dimensions_have_scales() -> None:
    v, t, w = (nn.Parameter(torch.tensor(value)) for value in (1.3, 0.2, 0.7))
    model = network(lambda net, x: net.w * (net.v * x + net.t).relu(), v=v, t=t, w=w)
    x = torch.tensor(2.0)
    assert ps.verify(model, x).units == 1 and not ps.trace(model, x).pinned
    assert ps.path_norm(model, x) == pytest.approx(0.7 * (1.3 + 0.2), rel=1e-6)


# what is added to the six features, from tensors without elements
NOTHING: dict[str, Callable[[Tensor], Tensor]] = {
    "a sum": lambda h: h + h[:, :0].sum(-1, keepdim=True),
    "a matrix product": lambda h: h + h[:, :0] @ h[:0],
    "no keys": lambda h: h + F.scaled_dot_product_attention(h[None], h[None, :0], h[None, :0])[0],
    "a sort": lambda h: torch.cat([h, h[:, :0].sort(-1)[0]], 1),
}


@pytest.mark.usefixtures("no_rule_fails")
@pytest.mark.parametrize("name", NOTHING)
def test_tensors_without_elements_restrict_nothing(name: str) -> None:
    model, x = Between(NOTHING[name]), torch.randn(5, 4)
    certificate = ps.verify(model, x)
    assert certificate.holds and certificate.theorem3["holds"]
    assert certificate.units == 6 and not ps.trace(model, x).pinned
    assert ps.channels(model, x).groups


def test_the_scale_before_normalize_is_exact() -> None:
    """A floor of 1e-12 below a norm is met by zeros alone."""
    model = Between(lambda h: F.normalize(h, dim=-1)).double()
    graph = traced(model, torch.randn(6, 4).double(), units=1)
    assert graph.num_exact_units == 1


# --- rules of one's own


def unknown(name: str) -> nn.Module:
    """A new operation of torch, and a model that uses it once."""

    @torch.library.custom_op(f"pathspace_own::{name}", mutates_args=())
    def operation(x: Tensor) -> Tensor:
        return torch.where(x > 0, x, 0.1 * x)

    operation.register_fake(torch.empty_like)
    return Between(lambda h: operation(h))


def test_an_unknown_operation_pins_and_is_named() -> None:
    model, x = unknown("opaque"), torch.randn(5, 4)
    graph = ps.trace(model, x)
    (pin,) = graph.pinned
    assert (graph.num_units, pin.op) == (0, "pathspace_own.opaque")
    assert "inference/test_units.py" in pin.source
    with pytest.raises(ps.UnsupportedError, match="opaque"):
        ps.trace(model, x, strict=True)


@pytest.mark.parametrize("name", ["pathspace_own.spelled", "pathspace_own::torchs"])
def test_a_rule_takes_both_spellings_of_an_operation(name: str) -> None:
    model = unknown(name.replace(":", ".").rpartition(".")[2])
    ps.rule(name)(lambda semantics, x: x)
    assert ps.trace(model, torch.randn(5, 4), strict=True).num_units == 6


def test_a_rule_for_an_operation_that_does_not_exist_warns() -> None:
    with pytest.warns(UserWarning, match="'pathspace_own.tyepd', which is not an operation"):
        ps.rule("pathspace_own.tyepd")(lambda semantics, x: x)


@pytest.mark.parametrize(
    ("name", "rule", "words"),
    [
        ("faulty", lambda semantics, x: semantics.activaton(x), "AttributeError.*activaton"),
        ("empty", lambda semantics, x: None, "returns NoneType, expected ids of 1 result:"),
        ("twice", lambda semantics, x: (x, x), "returns Tensor, Tensor, expected ids"),
        ("plus", lambda semantics, x: x + 1, "returns Tensor, expected ids"),
        ("real", lambda semantics, x: x.double(), "returns Tensor, expected ids"),
    ],
)
def test_a_mistake_in_a_rule_is_named(name: str, rule: Callable[..., Any], words: str) -> None:
    model = unknown(name)
    ps.rule(f"pathspace_own.{name}")(rule)
    with pytest.raises(ps.InputTypeError, match=f"The rule of pathspace_own.{name}.*{words}"):
        ps.trace(model, torch.randn(5, 4))


def test_a_result_of_another_shape_is_noticed() -> None:
    model = unknown("turned")
    ps.rule("pathspace_own.turned")(lambda semantics, x: x.t())
    (pin,) = ps.trace(model, torch.randn(5, 4)).pinned
    assert "returned shape (6, 5), expected (5, 6)" in pin.reason


def test_a_misspelled_fact_of_a_rule_names_the_rule() -> None:
    with pytest.raises(ps.InputTypeError, match=r"ps\.rule states degre="):
        ps.rule("pathspace_own.spelled", degre=(1,))


def test_a_form_that_a_rule_does_not_cover_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def halves(*_: Any) -> None:
        raise ValueError("only halves")

    monkeypatch.setitem(RULES, "aten.flip", halves)
    model, x = Between(lambda h: h.flip(1)), torch.randn(5, 4)
    why = r"its rule does not cover this form \(only halves\)"
    with pytest.warns(UserWarning, match=r"The rule of aten.flip \(halves\) does not cover a form"):
        (pin,) = ps.trace(model, x).pinned
        assert re.fullmatch(why, pin.reason)
        with pytest.raises(ps.UnsupportedError, match=f"is pinned, because {why}"):
            ps.trace(model, x, strict=True)


# --- a parameter that a reduction adds up has one id a row; units are as with one id a scalar


def rows(weight: Tensor) -> Tensor:
    shape = weight.shape
    return F.batch_norm(weight.reshape(1, shape[0], -1), None, None, training=True).view(shape)


REDUCED: dict[str, Callable[[Tensor], Tensor]] = {
    "rows": rows,
    "channels of kernels": lambda w: w / w.abs().sum((0, 2, 3), keepdim=True),
    "turned": lambda w: rows(w.transpose(0, 1)).transpose(0, 1),
    "twice": lambda w: rows(w) + w / w.abs().sum((1, 2, 3), keepdim=True),
    "then a scalar": lambda w: rows(w) * w.abs().sum((2, 3), keepdim=True),
    "scalars first": lambda w: w.square() * rows(w),
}


@pytest.mark.parametrize("name", REDUCED)
def test_units_do_not_depend_on_the_number_of_ids(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = network(
        lambda net, x: net.second(F.relu(F.conv2d(x, REDUCED[name](net.weight), net.bias))),
        weight=nn.Parameter(torch.randn(4, 3, 3, 3)),
        bias=nn.Parameter(torch.randn(4)),
        second=nn.Conv2d(4, 2, 1),
    )
    x = torch.randn(2, 3, 6, 6)
    quick = ps.trace(model, x)
    monkeypatch.setattr(Scales, "attach_reduced", lambda self, weight, dims: None)
    slow = ps.trace(model, x)
    assert quick.num_units == slow.num_units > 0
    assert [pin.reason for pin in quick.pinned] == [pin.reason for pin in slow.pinned]
    for one, other in zip(quick.blocks, slow.blocks, strict=True):
        for ids, expected in ((one.tail, other.tail), (one.head, other.head)):
            assert torch.equal(ids.expand(one.shape), expected.expand(one.shape)), one.name


@pytest.mark.parametrize("largest", [F.max_pool1d, F.adaptive_max_pool1d])
def test_weights_that_decide_only_positions_are_used(largest: Callable[..., Any]) -> None:
    """Which element of a window is the largest depends on them, and not on their scale."""
    model = network(
        lambda net, x: net.last(largest(net.first(x), 2, return_indices=True)[1].to(x.dtype)),
        first=nn.Conv1d(2, 3, 1),
        last=nn.Linear(3 if largest is F.max_pool1d else 2, 2),
    )
    certificate = ps.verify(model.double(), torch.randn(4, 2, 6).double())
    assert not certificate.unused and certificate.holds
    assert certificate.weights == certificate.parameters["total"] and certificate.units == 3


def test_a_constant_padding_is_listed_as_what_fixes_the_scales() -> None:
    (pin,) = ps.trace(
        nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(), nn.ConstantPad2d(1, 1.0), nn.Conv2d(4, 2, 3)),
        torch.randn(1, 3, 5, 5),
    ).pinned
    assert (pin.op, pin.elements) == ("aten.pad", 4)
