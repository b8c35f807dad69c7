"""Optimizers in the canonical gauge: against sums edge by edge, explicit rescalings, and
copies that were rescaled.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from descent import descend
from gauged import BUILDS, OPTIMIZERS, Lion, cnn, made, mlp, resnet, scrambled, train
from hypothesis import given, settings
from hypothesis import strategies as st
from slow_names import slow_names
from torch import Tensor, nn
from torch.nn import functional as F

import pathspace as ps
from pathspace.training import GaugeFixed
from pathspace.training.optim import canonical_gauge
from pathspace.training.optim.canonical_gauge import EVERY, Side


def both_sides(
    graph: ps.ReductionGraph, tensors: dict[str, Tensor]
) -> tuple[np.ndarray, np.ndarray]:
    """Squares that enter and that leave every unit, edge by edge."""
    entering, leaving = np.zeros(graph.num_units + 1), np.zeros(graph.num_units + 1)
    for block in graph.blocks:
        values = (tensors[block.name].detach() + block.shift).reshape(-1).tolist()
        heads, tails = (
            ids.expand(block.shape).reshape(-1).tolist() for ids in (block.head, block.tail)
        )
        for value, head, tail in zip(values, heads, tails, strict=True):
            (entering if head > 0 else leaving)[abs(head)] += value * value
            (leaving if tail > 0 else entering)[abs(tail)] += value * value
    return entering[1:], leaving[1:]


@pytest.mark.parametrize("name", slow_names(BUILDS, ["gpt", "vit", "resnet"]))
def test_rescaled_copies_take_one_trajectory_and_adamw_does_not(name: str) -> None:
    model, x, y = made(BUILDS[name])
    graph = ps.trace(model, x[:2])
    pairs = [(copy.deepcopy(model), scrambled(model, graph)) for _ in range(2)]
    fixed, plain = [], []
    for one, other in zip(*pairs, strict=True):
        optimizer = GaugeFixed(OPTIMIZERS["adamw"](one), graph, model=one)
        fixed.append(train(one, optimizer, x, y, 200 if name == "mlp" else 20, clip=1.0))
        plain.append(train(other, OPTIMIZERS["adamw"](other), x, y, 5))
    np.testing.assert_allclose(fixed[0], fixed[1], rtol=1e-9)
    assert abs(plain[0] / plain[1] - 1).max() > 1e-3


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_becomes_invariant(name: str) -> None:
    model, x, y = made(cnn)
    losses, graph = [], ps.trace(model, x[:2])
    for one in (copy.deepcopy(model), scrambled(model, graph)):
        losses.append(train(one, GaugeFixed(OPTIMIZERS[name](one), graph, model=one), x, y, 30))
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-9)
    assert losses[0][-5:].mean() < losses[0][:5].mean()


@pytest.mark.parametrize("name", BUILDS)
def test_start_is_balanced_and_of_fixed_norm_edge_by_edge(name: str) -> None:
    model, x, _ = made(BUILDS[name])
    graph = ps.trace(model, x[:2])
    model = scrambled(model, graph, 10)
    before = model.eval()(x).detach() if not graph.has_cuts else None
    optimizer = GaugeFixed(torch.optim.AdamW(model.parameters()), graph, model=model)
    entering, leaving = both_sides(graph, dict(model.named_parameters()))
    balanced, norm = (optimizer.fixed_units[key] - 1 for key in ("balanced", "norm"))
    assert len(balanced) + len(norm) == graph.num_units
    np.testing.assert_allclose(entering[balanced], leaving[balanced], rtol=1e-10)
    assert not leaving[norm].any()
    if name == "resnet":
        # a row of a convolution without bias: inputs times 1 / (3 inputs)
        np.testing.assert_allclose(entering[norm], 1 / 3, rtol=1e-10)
    if before is not None:
        torch.testing.assert_close(model(x), before)


class Branches(nn.Module):
    """A residual branch around each of two norms: units that weights only
    enter, the branch's own apart.
    """

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.first, self.last = nn.Linear(5, 4), nn.LayerNorm(4), nn.LayerNorm(4)
        self.branch, self.leave = (
            nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 4)),
            nn.Linear(4, 3),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(self.enter(x))
        return self.leave(self.last(x + self.branch(x)))


def test_groups_that_weights_only_enter() -> None:
    torch.manual_seed(0)
    model, x, y = Branches().double(), torch.randn(40, 5).double(), torch.arange(40) % 3
    graph, losses = ps.trace(model, x[:2]), []
    for one in (copy.deepcopy(model), scrambled(model, graph)):
        optimizer = GaugeFixed(OPTIMIZERS["adamw"](one), graph, model=one)
        assert not len(optimizer.fixed_units["nothing"]) and len(optimizer.fixed_units["norm"]) == 2
        # gains of one each, in expectation, and the row of a matrix
        torch.testing.assert_close(one.first.weight.square().sum(), torch.tensor(4.0).double())
        losses.append(train(one, optimizer, x, y, 30))
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-9)


@pytest.mark.parametrize("norms", ["unit", "tensor", "initial"])
def test_norms_are_kept_while_training(norms: str) -> None:
    model, x, y = made(resnet)
    rows = {
        name: p.detach().square().sum((1, 2, 3))
        for name, p in model.named_parameters()
        if p.dim() == 4
    }
    optimizer = GaugeFixed(
        torch.optim.AdamW(model.parameters(), lr=1e-2), ps.trace(model, x[:2]), norms=norms
    )

    def off(name: str, p: Tensor) -> Tensor:
        found, wanted = (
            p.detach().square().sum((1, 2, 3)),
            torch.full((len(p),), 1 / 3, dtype=torch.float64),
        )
        if norms == "initial":
            wanted = rows[name]
        return found.sum() / wanted.sum() - 1 if norms == "tensor" else found / wanted - 1

    for steps, tolerance in ((0, 1e-10), (30, 0.3)):
        train(model, optimizer, x, y, steps)
        for name, p in model.named_parameters():
            if p.dim() == 4:
                assert off(name, p).abs().max() < tolerance, (name, steps)


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_large_rates_turn_weights_of_fixed_norm_and_nothing_overflows(kind: str) -> None:
    """Ten times the rate turns normalised weights several times as far, as projections do."""
    turned = []
    for rate in (0.03, 0.3):
        torch.manual_seed(0)
        layers = [nn.Linear(8, 16, bias=False), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3)]
        model, x, y = nn.Sequential(*layers).double(), torch.randn(64, 8), torch.arange(64) % 3
        x = x.double()
        makers = {
            "sgd": lambda m, lr: torch.optim.SGD(m.parameters(), lr=lr, momentum=0.9),
            "adamw": lambda m, lr: torch.optim.AdamW(m.parameters(), lr=lr),
        }
        optimizer = GaugeFixed(makers[kind](model, rate), ps.trace(model, x))
        angles = []
        for _ in range(150):
            before = model[0].weight.detach().clone()
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            after = model[0].weight.detach()
            angles.append(1 - nn.functional.cosine_similarity(before, after).mean())
            assert all(p.isfinite().all() and p.abs().max() < 1e3 for p in model.parameters())
        turned.append(float(torch.stack(angles[50:]).mean().sqrt()))
    # (steps so large are chaotic)
    assert turned[1] > 1.5 * turned[0]


@pytest.mark.parametrize(("name", "kind"), [("mlp", "adamw"), ("gpt", "sgd"), ("resnet", "adamw")])
def test_a_step_is_the_optimizers_step_and_a_rescaling(name: str, kind: str) -> None:
    """The sweep changes log-scales by the formula, and moves weights, statistics and
    moments as ``ps.rescale_`` does; moments follow balanced units alone.
    """
    model, x, y = made(BUILDS[name])
    graph = ps.trace(model, x[:2])
    optimizer = GaugeFixed(OPTIMIZERS[kind](model), graph)
    twin = copy.deepcopy(model)
    slow = OPTIMIZERS[kind](twin)
    balanced = optimizer.fixed_units["balanced"] - 1
    for number in range(2 * EVERY):
        before = optimizer.phi.numpy()
        train(twin, slow, x, y, 1)
        entering, leaving = both_sides(graph, dict(twin.named_parameters()))
        train(model, optimizer, x, y, 1)
        change = optimizer.phi.numpy() - before
        assert (np.abs(change) > 0).any() == (number % EVERY == 0)
        if number % EVERY:
            continue
        # (half of what is exact for each alone, because two scales change at one weight)
        np.testing.assert_allclose(
            change[balanced],
            np.log(leaving[balanced] / entering[balanced]) / 8,
            rtol=1e-6,
            atol=1e-14,
        )
        followed = np.zeros_like(change)
        followed[balanced] = change[balanced]
        ps.rescale_(twin, graph, torch.from_numpy(followed), slow, keep_trajectory=False)
        ps.rescale_(twin, graph, torch.from_numpy(change - followed))
        for one, other in zip(model.state_dict().values(), twin.state_dict().values(), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)
        states = (optimizer.state_dict()["state"], slow.state_dict()["state"])
        for key in states[0]:
            for part in states[0][key].keys() - {"gauge"}:
                torch.testing.assert_close(
                    states[0][key][part], states[1][key][part], rtol=1e-8, atol=1e-12
                )


def test_a_disturbance_is_undone_by_sweeps() -> None:
    model, x, _ = made(cnn)
    graph = ps.trace(model, x[:2])
    optimizer = GaugeFixed(torch.optim.SGD(model.parameters(), lr=0.0), graph)
    ps.rescale_(model, graph, torch.randn(graph.num_units).double())
    model(x).sum().backward()
    previous = np.inf
    for _ in range(100):
        for _ in range(EVERY):
            optimizer.step()
        entering, leaving = both_sides(graph, dict(model.named_parameters()))
        worst = abs(np.log(entering / leaving)).max()
        assert worst <= previous + 1e-12
        previous = worst
    assert worst < 1e-6


@settings(max_examples=8)
@given(st.lists(st.integers(1, 6), min_size=1, max_size=4), st.integers(0, 99), st.booleans())
def test_plain_networks_of_all_widths(widths: list[int], seed: int, bias: bool) -> None:
    def build() -> tuple[nn.Module, Tensor, Tensor]:
        sizes = [3, *widths, 2]
        layers = [layer for a, b in pairwise(sizes) for layer in (nn.Linear(a, b, bias), nn.ReLU())]
        return (
            nn.Sequential(*layers[:-1]).double(),
            torch.randn(40, 3).double(),
            torch.arange(40) % 2,
        )

    model, x, y = made(build, seed)
    ends, graph = [], ps.trace(model, x[:2])
    for one in (copy.deepcopy(model), scrambled(model, graph, seed=seed)):
        ends.append(train(one, GaugeFixed(OPTIMIZERS["adamw"](one), graph, model=one), x, y, 6))
    np.testing.assert_allclose(ends[0], ends[1], rtol=1e-9)


def test_the_users_gauge_is_kept_between_steps() -> None:
    model, x, y = made(mlp)
    graph = ps.trace(model, x[:2])
    model = scrambled(model, graph, 10)
    losses, copies = [], [copy.deepcopy(model) for _ in range(2)]
    for one, where in zip(copies, ("canonical", "user"), strict=True):
        before = copy.deepcopy(one)
        optimizer = GaugeFixed(
            torch.optim.AdamW(one.parameters(), lr=1e-3), graph, return_to=where, model=one
        )
        same = all(
            torch.equal(a, b) for a, b in zip(one.parameters(), before.parameters(), strict=True)
        )
        assert same is (where == "user")
        losses.append(train(one, optimizer, x, y, 30))
        if where == "user":
            ps.rescale_(one, graph, optimizer.phi)
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-9)
    for a, b in zip(*(one.parameters() for one in copies), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("frozen", [False, True])
def test_a_closure_runs_a_model_whose_statistics_have_the_gauge_of_its_weights(
    frozen: bool,
) -> None:
    """A closure sees canonical weights, also where they go back after the step."""
    torch.manual_seed(0)
    layers = nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)
    model, x, y = nn.Sequential(*layers).double(), torch.randn(40, 5).double(), torch.arange(40) % 3
    model(x)
    model.train(not frozen)
    graph, found = ps.trace(model, x), []
    for where in ("canonical", "user"):
        one = scrambled(model, graph, 10)
        optimizer = GaugeFixed(
            torch.optim.SGD(one.parameters(), 0.05), graph, return_to=where, model=one
        )

        def closure(one: nn.Module = one, optimizer: GaugeFixed = optimizer) -> Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(one(x), y)
            loss.backward()
            return loss

        losses = [optimizer.step(closure).detach() for _ in range(10)]

        def interrupted() -> None:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            optimizer.step(interrupted)
        found.append(torch.cat([torch.stack(losses), one.eval()(x).detach().flatten()]))
    torch.testing.assert_close(*found, rtol=1e-10, atol=1e-12)


def test_gradients_come_back_with_the_users_gauge() -> None:
    """Whoever logs them after a step, or adds to them, finds those before it."""
    model, x, y = made(mlp)
    graph = ps.trace(model, x[:2])
    model = scrambled(model, graph, 10)
    optimizer = GaugeFixed(
        torch.optim.SGD(model.parameters(), lr=1e-3), graph, return_to="user", model=model
    )
    F.cross_entropy(model(x).flatten(0, -2), y.flatten()).backward()
    before = {name: p.grad.clone() for name, p in model.named_parameters()}
    optimizer.step()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, before[name], rtol=1e-12, atol=0, msg=name)


@pytest.mark.parametrize("shape", [(4, 3), (4, 3, 2, 2), (4, 3, 5)])
@pytest.mark.parametrize("kept", [(0,), (1,), (0, 1)])
def test_sums_of_squares_have_one_for_each_entry(
    shape: tuple[int, ...], kept: tuple[int, ...]
) -> None:
    value = torch.randn(shape, dtype=torch.float64)
    ids = torch.zeros([n if d in kept else 1 for d, n in enumerate(shape)], dtype=torch.long)
    for held in (value, value.transpose(0, 1).contiguous().transpose(0, 1)):
        found = Side("w", ids, 1, None, 0.0).squares(held)
        summed = tuple(d for d in range(len(shape)) if d not in kept)
        torch.testing.assert_close(
            found, value.square().sum(summed, keepdim=True) if summed else value.square()
        )


class Adapted(nn.Module):
    """A frozen layer with a low-rank adapter, between two frozen layers."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Sequential(
            nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 3)
        )
        self.base.requires_grad_(False)
        self.a, self.b = nn.Parameter(0.3 * torch.randn(2, 6)), nn.Parameter(torch.zeros(6, 2))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.base[:2](x)
        return self.base[3:](self.base[2](hidden) + hidden @ self.a.T @ self.b.T)


@pytest.mark.parametrize("listed", [True, False])
@pytest.mark.filterwarnings("ignore:GaugeFixed found .* trained parameters:UserWarning")
def test_adapters_have_a_gauge_of_their_own(listed: bool) -> None:
    torch.manual_seed(0)
    model, x, y = Adapted().double(), torch.randn(40, 5).double(), torch.arange(40) % 3
    if not listed:
        # a list of what is trained says the same as requires_grad
        model.requires_grad_(True)
    graph = ps.trace(model, x[:2])
    losses = []
    for factor in (1.0, 50.0):
        one = copy.deepcopy(model)
        with torch.no_grad():
            one.a.mul_(factor)
            one.b.div_(factor)
        frozen = {name: p.clone() for name, p in one.named_parameters() if name.startswith("base")}
        parts = one.parameters() if listed else [one.a, one.b]
        optimizer = GaugeFixed(torch.optim.AdamW(parts, lr=1e-2), ps.trace(one, x[:2]))
        assert (
            len(optimizer.fixed_units["norm"]) == 2
            and len(optimizer.fixed_units["nothing"]) == graph.num_units - 2
        )
        losses.append(train(one, optimizer, x, y, 40))
        assert all(torch.equal(p, dict(one.named_parameters())[name]) for name, p in frozen.items())
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-9)
    assert losses[0][-5:].mean() < losses[0][:5].mean()


@pytest.mark.parametrize("norms", ["unit", "tensor"])
def test_weights_before_zeros_start_four_times_as_large(norms: str) -> None:
    """A fresh adapter, and a network with a last layer of zeros; a last layer that
    is not zero is balanced.
    """
    torch.manual_seed(1)
    adapted, x = Adapted().double(), torch.randn(7, 5).double()
    plain = nn.Sequential(
        nn.Linear(5, 4, bias=False), nn.ReLU(), nn.Linear(4, 2, bias=False)
    ).double()
    zero = copy.deepcopy(plain)
    nn.init.zeros_(zero[2].weight)
    for model in (adapted, plain, zero):
        trained = [p for p in model.parameters() if p.requires_grad]
        before = model(x)
        GaugeFixed(torch.optim.AdamW(trained, lr=1e-2), ps.trace(model, x), norms=norms)
        torch.testing.assert_close(model(x), before)
    for weight in (adapted.a, zero[0].weight):
        squares = weight.detach().square().sum(1)
        assert float(squares.mean()) == pytest.approx(16 / 3) and (
            norms == "tensor" or torch.allclose(squares, squares[:1])
        )
    torch.testing.assert_close(plain[0].weight.square().sum(1), plain[2].weight.square().sum(0))


class Gain(nn.Module):
    """Divides by the root mean square and multiplies by 1 + weight."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-12) * (1 + self.weight)


def test_gains_with_a_constant_and_running_statistics() -> None:
    torch.manual_seed(0)
    layers = (
        nn.Linear(5, 6, bias=False),
        Gain(6),
        nn.Linear(6, 4),
        nn.BatchNorm1d(4),
        nn.ReLU(),
        nn.Linear(4, 3),
    )
    model, x, y = nn.Sequential(*layers).double(), torch.randn(40, 5).double(), torch.arange(40) % 3
    losses, functions = [], []
    graph = ps.trace(model, x[:2])
    for one in (copy.deepcopy(model), scrambled(model, graph, 5)):
        losses.append(train(one, GaugeFixed(OPTIMIZERS["adamw"](one), graph, model=one), x, y, 30))
        functions.append(one.eval()(x))
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-9)
    torch.testing.assert_close(functions[0], functions[1], rtol=1e-9, atol=1e-9)


def test_torchs_conventions() -> None:
    model, x, y = made(mlp)
    optimizer = GaugeFixed(torch.optim.AdamW(model.parameters(), lr=1e-2), ps.trace(model, x[:2]))
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert optimizer.param_groups is optimizer.optimizers[0].param_groups
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.5)
    seen: list[str] = []
    optimizer.register_step_post_hook(lambda *_: seen.append("step"))
    for _ in range(10):
        train(model, optimizer, x, y, 1)
        schedule.step()
    assert (
        optimizer.optimizers[0].param_groups[0]["lr"] == pytest.approx(2.5e-3) and len(seen) == 10
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss

    assert optimizer.step(closure).item() > 0
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(F.cross_entropy(model(x), y)).backward()
    scaler.step(optimizer)
    with pytest.raises(ps.PathspaceError, match="expected all of them before"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})


def test_wrong_use_is_refused_in_a_sentence() -> None:
    model, x, _ = made(mlp)
    graph = ps.trace(model, x[:2])

    def inner() -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters())

    before = copy.deepcopy(model.state_dict())
    cases: list[tuple[Callable[[], Any], str]] = [
        (lambda: GaugeFixed(model, graph), "found an optimizer of type Sequential"),
        (lambda: GaugeFixed(inner(), model), "GaugeFixed found a Sequential as its graph"),
        (lambda: GaugeFixed(inner(), graph, norms="rows"), "norms='rows'"),
        (lambda: GaugeFixed(inner(), graph, return_to="there"), "return_to='there'"),
    ]
    for call, sentence in cases:
        with pytest.raises(ps.PathspaceError, match=sentence):
            call()
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    optimizer = GaugeFixed(inner(), graph)
    model[0].weight.requires_grad_(False)
    with pytest.raises(ps.PathspaceError, match=r"'0\.weight' frozen since"):
        optimizer.step()

    model[0].weight.requires_grad_(True)

    class Strange(Lion):
        def step(self, closure: Any = None) -> None:
            for p in self.param_groups[0]["params"]:
                self.state[p]["whatever"] = torch.zeros_like(p)

    for refused in (torch.optim.LBFGS, torch.optim.Adafactor):
        with pytest.raises(ps.UnsupportedError, match=f"GaugeFixed found {refused.__name__}"):
            GaugeFixed(refused(model.parameters()), graph)
    with pytest.raises(ps.PathspaceError, match="register_transport"):
        GaugeFixed(Strange(model.parameters(), lr=0.1), graph).step()
    ps.register_transport(Strange, {"whatever": 1})
    GaugeFixed(Strange(model.parameters(), lr=0.1), graph).step()


@pytest.mark.slow
def test_a_compiled_step_is_the_same_step_and_compiled_once() -> None:
    torch._dynamo.reset()
    model, x, y = made(cnn)
    # (compiled, torch's AdamW computes its correction of the start in float32)
    graph, losses, frames = ps.trace(model, x[:2]), [], []

    def backend(found: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        frames.append(found)
        return found.forward

    for compiled in (False, True):
        one = copy.deepcopy(model)
        optimizer = GaugeFixed(
            torch.optim.SGD(one.parameters(), lr=1e-2, momentum=0.9), graph, model=one
        )
        if compiled:
            optimizer.step = torch.compile(optimizer.step, backend=backend)  # type: ignore[method-assign]
        losses.append(train(one, optimizer, x, y, 4))
        known = len(frames)
        losses[-1] = np.append(losses[-1], train(one, optimizer, x, y, 2 * EVERY))
        # with a sweep or without
        assert len(frames) == known
    assert len(losses[0]) == len(losses[1])
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-9)


def test_moments_move_only_where_a_unit_is_balanced() -> None:
    """The sweep reads no moments of tensors at units of fixed norm alone."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU()
    ).append(nn.Linear(5, 3))
    graph = ps.trace(model, torch.randn(8, 4))
    fixed = GaugeFixed(torch.optim.AdamW(model.parameters(), lr=0.1), graph)
    follows = dict(zip((side.name for side in fixed.sweep.sides), fixed.sweep.follows, strict=True))
    balanced = {"1.weight", "1.bias", "3.weight", "4.weight", "4.bias", "6.weight"}
    assert {name for name, on in follows.items() if on} == balanced


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
def test_the_way_to_the_gauge_and_back_does_not_round_short_weights(kind: torch.dtype) -> None:
    """At rate 0 nothing moves; otherwise a step is rounded once, as torch's own."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3)).to(kind)
    x = torch.randn(4, 5, dtype=kind)
    graph = ps.trace(model, x)
    ps.rescale_(model, graph, 2 * torch.randn(7).double())
    before = [p.detach().clone() for p in model.parameters()]
    still = GaugeFixed(torch.optim.SGD(model.parameters(), lr=0.0), graph, return_to="user")
    descend(still, lambda: model(x).float().square().mean(), 20)
    assert all(map(torch.equal, before, model.parameters()))
    twin = copy.deepcopy(model).double()
    gauge = still.phi
    for optimizer, m in (
        (GaugeFixed(torch.optim.SGD(model.parameters(), lr=0.05), graph, return_to="user"), model),
        (
            GaugeFixed(
                torch.optim.SGD(twin.parameters(), lr=0.05), graph, return_to="user", model=twin
            ),
            twin,
        ),
    ):
        for one, other in zip(m.parameters(), model.parameters(), strict=True):
            one.grad = torch.ones_like(other, dtype=one.dtype)
        optimizer.step()
    assert gauge.abs().max() > 0.5
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(one.double(), other, rtol=4 * torch.finfo(kind).eps, atol=1e-3)


def test_the_search_for_the_gauge_ends_where_rounding_stops_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Sums of 20,000 squares are rounded by as much as the tolerance (34 rounds before)."""
    rounds: list[float] = []
    deviation = canonical_gauge.Sweep.deviation

    def counted(votes: Any, squares: Tensor) -> Tensor:
        off = deviation(votes, squares)
        rounds.append(float(off.abs().max()))
        return off

    monkeypatch.setattr(canonical_gauge.Sweep, "deviation", counted)
    torch.manual_seed(2)
    layers = (nn.Linear(20_000, 16), nn.BatchNorm1d(16), nn.ReLU())
    layers += (nn.Linear(16, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 2))
    model = nn.Sequential(*layers)
    graph = ps.trace(model, torch.randn(3, 20_000))
    GaugeFixed(torch.optim.SGD(model.parameters(), lr=0.1), graph)
    assert len(rounds) <= 15
    assert rounds[-1] < 1e-12
