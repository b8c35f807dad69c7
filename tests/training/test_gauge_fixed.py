"""Optimizers in the canonical gauge: against sums edge by edge, explicit rescalings, and
copies that were rescaled.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from cases import mlp as perceptron
from cases import network
from descent import descend
from gauged import BUILDS, OPTIMIZERS, cnn, made, mlp, resnet, scrambled, train
from hypothesis import given, settings
from hypothesis import strategies as st
from slow_names import slow_names
from torch import Tensor, nn
from torch.nn import functional as F

import pathspace as ps
from pathspace.training import GaugeFixed
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


@pytest.mark.sampled(3)
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


@pytest.mark.sampled(3)
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


@settings(max_examples=8)
@given(st.lists(st.integers(1, 6), min_size=1, max_size=4), st.integers(0, 99), st.booleans())
def test_plain_networks_of_all_widths(widths: list[int], seed: int, bias: bool) -> None:
    torch.manual_seed(seed)
    model = perceptron(3, *widths, 2, bias=bias).double()
    x, y = torch.randn(40, 3).double(), torch.arange(40) % 2
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


def test_units_that_norms_follow() -> None:
    """A residual branch around each of two norms: weights only enter its units."""

    def forward(net: Any, x: Tensor) -> Tensor:
        x = net.first(net.enter(x))
        return net.leave(net.last(x + net.branch(x)))

    norms = {"first": nn.LayerNorm(4), "last": nn.LayerNorm(4)}
    enter, leave, branch = nn.Linear(5, 4), nn.Linear(4, 3), perceptron(4, 6, 4)
    model = network(forward, enter=enter, **norms, branch=branch, leave=leave).double()
    x, y, losses = torch.randn(40, 5).double(), torch.arange(40) % 3, []
    graph = ps.trace(model, x[:2])
    for one in (copy.deepcopy(model), scrambled(model, graph, 5)):
        optimizer = GaugeFixed(OPTIMIZERS["adamw"](one), graph, model=one)
        assert not len(optimizer.fixed_units["nothing"])
        assert len(optimizer.fixed_units["norm"]) == 2
        # gains of one each, in expectation, and the row of a matrix
        assert float(one.first.weight.detach().square().sum()) == pytest.approx(4)
        losses.append(train(one, optimizer, x, y, 30))
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-9)


@pytest.mark.parametrize("frozen", [False, True])
def test_a_closure_runs_a_model_whose_statistics_have_the_gauge_of_its_weights(
    frozen: bool,
) -> None:
    """A closure sees canonical weights, also where they go back after the step."""
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
        found.append(torch.cat([torch.stack(losses), one.eval()(x).detach().flatten()]))
    torch.testing.assert_close(*found, rtol=1e-10, atol=1e-12)


def adapted() -> nn.Module:
    """A frozen layer with a low-rank adapter, between two frozen layers."""

    def forward(net: Any, x: Tensor) -> Tensor:
        hidden = net.base[:2](x)
        return net.base[3:](net.base[2](hidden) + hidden @ net.a.T @ net.b.T)

    base = perceptron(5, 6, 6, 3).requires_grad_(False)
    a, b = nn.Parameter(0.3 * torch.randn(2, 6)), nn.Parameter(torch.zeros(6, 2))
    return network(forward, base=base, a=a, b=b).double()


@pytest.mark.parametrize("listed", [True, False])
@pytest.mark.filterwarnings("ignore:GaugeFixed found .* trained parameters:UserWarning")
def test_adapters_have_a_gauge_of_their_own(listed: bool) -> None:
    model, x, y = adapted(), torch.randn(40, 5).double(), torch.arange(40) % 3
    if not listed:
        # a list of what is trained says the same as requires_grad
        model.requires_grad_(True)
    graph, losses = ps.trace(model, x[:2]), []
    for factor in (1.0, 50.0):
        one = copy.deepcopy(model)
        with torch.no_grad():
            one.a.mul_(factor)
            one.b.div_(factor)
        frozen = copy.deepcopy(one.base)
        parts = one.parameters() if listed else [one.a, one.b]
        optimizer = GaugeFixed(torch.optim.AdamW(parts, lr=1e-2), ps.trace(one, x[:2]))
        counts = [len(optimizer.fixed_units[key]) for key in ("norm", "nothing")]
        assert counts == [2, graph.num_units - 2]
        losses.append(train(one, optimizer, x, y, 40))
        assert all(map(torch.equal, frozen.parameters(), one.base.parameters()))
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-9)
    assert losses[0][-5:].mean() < losses[0][:5].mean()


@pytest.mark.parametrize("norms", ["unit", "tensor"])
def test_weights_before_zeros_start_four_times_as_large(norms: str) -> None:
    """A fresh adapter, and a network with a last layer of zeros; a last layer that
    is not zero is balanced.
    """
    adapter, plain = adapted(), perceptron(5, 4, 2, bias=False).double()
    zero, x = copy.deepcopy(plain), torch.randn(7, 5).double()
    nn.init.zeros_(zero[2].weight)
    for model in (adapter, plain, zero):
        trained = [p for p in model.parameters() if p.requires_grad]
        before = model(x)
        GaugeFixed(torch.optim.AdamW(trained, lr=1e-2), ps.trace(model, x), norms=norms)
        torch.testing.assert_close(model(x), before)
    for weight in (adapter.a, zero[0].weight):
        squares = weight.detach().square().sum(1)
        assert float(squares.mean()) == pytest.approx(16 / 3)
        assert norms == "tensor" or torch.allclose(squares, squares[:1])
    torch.testing.assert_close(plain[0].weight.square().sum(1), plain[2].weight.square().sum(0))


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
def test_the_way_to_the_gauge_and_back_does_not_round_short_weights(kind: torch.dtype) -> None:
    """At rate 0 nothing moves; otherwise a step is rounded once, as torch's own."""
    model, x = perceptron(5, 7, 3).to(kind), torch.randn(4, 5, dtype=kind)
    graph = ps.trace(model, x)
    ps.rescale_(model, graph, 2 * torch.randn(7).double())
    before = copy.deepcopy(model)

    def fixed(net: nn.Module, rate: float) -> GaugeFixed:
        inner = torch.optim.SGD(net.parameters(), lr=rate)
        return GaugeFixed(inner, graph, return_to="user", model=net)

    still = fixed(model, 0.0)
    descend(still, lambda: model(x).float().square().mean(), 20)
    assert all(map(torch.equal, before.parameters(), model.parameters()))
    assert still.phi.abs().max() > 0.5
    twin = copy.deepcopy(model).double()
    for net in (model, twin):
        optimizer = fixed(net, 0.05)
        for p in net.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(one.double(), other, rtol=4 * torch.finfo(kind).eps, atol=1e-3)
