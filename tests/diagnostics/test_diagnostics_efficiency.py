"""Observed quantities against slow autograd, one sample at a time, in float64."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import network, recomputed
from processes import two_processes
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointFunction

from pathspace.diagnostics import MarkovChain, cost, gradients, signal
from pathspace.diagnostics.chain.efficiency import observe
from pathspace.diagnostics.shared.recomputation import RUNNING
from pathspace.diagnostics.shared.sample_rows import Samples
from pathspace.errors import InputError, UnsupportedError


class Residuals(nn.Module):
    """A stem, residual blocks and a head; `run` also returns every stream and
    direction, for the oracle.
    """

    def __init__(
        self, stem: nn.Module, blocks: list[nn.Module], head: nn.Module, in_place: bool = False
    ) -> None:
        super().__init__()
        self.stem, self.blocks, self.head = stem, nn.ModuleList(blocks), head
        self.in_place, self.reentrant = in_place, None

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            z = recomputed(block, x, reentrant=self.reentrant)
            if self.in_place:
                z += x
                x = F.relu_(z)
            else:
                x = x + z
        return self.head(x)

    def run(self, x: Tensor) -> tuple[Tensor, list[Tensor], list[Tensor], list[Tensor]]:
        streams, directions, states = [], [], []
        x = self.stem(x)
        for block in self.blocks:
            streams.append(x)
            directions.append(block(x))
            x = x + directions[-1]
            states.append(x)
            x = F.relu(x) if self.in_place else x
        return self.head(x), streams, directions, states


@pytest.mark.parametrize("first", [False, True])
def test_other_calls_of_the_adding_module_are_not_measured(first: bool) -> None:
    """One module makes the node and another addition, before it or after it."""

    def forward(net: Any, x: Tensor) -> Tensor:
        if first:
            x = net.add(net.f(x), net.g(x)).sin()
        net.direction = net.f(x).tanh()
        net.state = net.add(x, net.direction)
        return net.state if first else net.add(net.f(net.state), net.g(net.state)).sin()

    add = network(lambda net, a, b: a + b)
    model = network(forward, add=add, f=nn.Linear(4, 4), g=nn.Linear(4, 4)).double()
    x = torch.randn(5, 4, dtype=torch.float64)
    record = MarkovChain.trace(model, x).observe(lambda y, _: y.square().sum(), x, None)
    loss = model(x).square().sum()
    (gradient,) = torch.autograd.grad(loss, model.state)
    wanted = -F.cosine_similarity(model.direction, gradient)
    assert torch.allclose(record.cosines, wanted[None], atol=1e-12)


def attention() -> nn.Module:
    return network(
        lambda net, x: net.inner(*3 * [net.norm(x)])[0],
        norm=nn.LayerNorm(8),
        inner=nn.MultiheadAttention(8, 2, batch_first=True),
    )


def build(kind: str) -> tuple[Residuals, Tensor]:
    torch.manual_seed(0)
    if kind.startswith("mlp"):
        blocks: list[nn.Module] = [
            nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 6)) for _ in range(4)
        ]
        model = Residuals(nn.Linear(3, 6), blocks, nn.Linear(6, 2), kind == "mlp_in_place")
        x = torch.randn(6, 3)
    elif kind == "cnn":
        blocks = [nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)) for _ in range(3)]
        head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2))
        model, x = Residuals(nn.Conv2d(3, 4, 3), blocks, head, True).eval(), torch.randn(6, 3, 7, 7)
    else:
        mlp = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
        head = nn.Sequential(nn.LayerNorm(8), nn.Flatten(), nn.Linear(40, 2))
        model = Residuals(nn.Linear(3, 8), [attention(), mlp, attention()], head)
        x = torch.randn(6, 5, 3)
    return model.double(), x.double()


def sum_loss(y: Tensor, t: Tensor) -> Tensor:
    return (y - t).square().sum()


KINDS = ["mlp", "mlp_in_place", "cnn", "transformer"]


@pytest.mark.parametrize("kind", KINDS)
def test_against_autograd_sample_by_sample(kind: str) -> None:
    model, x = build(kind)
    t = torch.randn(6, 2, dtype=torch.float64)
    record = observe(MarkovChain.trace(model, x), sum_loss, x, t)
    names = ("cosines", "direction_norms", "stream_norms", "gradient_norms", "products")
    slow: dict[str, list[list[float]]] = {name: [] for name in names}
    tensors: list[list[tuple[Tensor, Tensor]]] = []
    for i in range(6):
        y, streams, directions, states = model.run(x[i : i + 1])
        gradients = torch.autograd.grad(sum_loss(y, t[i : i + 1]), states)
        rows = [
            (-(z * g).sum() / (z.norm() * g.norm()), z.norm(), s.norm(), g.norm(), (z * g).sum())
            for s, z, g in zip(streams, directions, gradients, strict=True)
        ]
        for k, name in enumerate(names):
            slow[name].append([float(row[k].detach()) for row in rows])
        tensors.append([(z.detach(), g) for z, g in zip(directions, gradients, strict=True)])
    for name in names:
        want = torch.tensor(slow[name], dtype=torch.float64).T
        assert torch.allclose(getattr(record, name), want, rtol=1e-10, atol=1e-12), name
    # the gauge: derivative with respect to the log of each branch's scale
    for index, block in enumerate(model.blocks):
        scale = torch.ones((), dtype=torch.float64, requires_grad=True)
        handle = block.register_forward_hook(lambda m, a, out, scale=scale: out * scale)
        (slope,) = torch.autograd.grad(sum_loss(model(x), t), scale)
        handle.remove()
        assert abs(float(slope) - float(record.gauge[index])) < 1e-10 * max(1, abs(float(slope)))
    # definitions with eta, written out
    for eta in (1e-3, 0.7, 50.0):
        for i, pairs in enumerate(tensors):
            moved = [(z, z - eta * g / g.norm()) for z, g in pairs]
            eps = [(z * d).sum() / (z.norm() * d.norm()) for z, d in moved]
            delta = [(z * d).sum() / d.square().sum() for z, d in moved]
            assert float(record.eps(eta)[i]) == pytest.approx(float(sum(eps)) / len(eps), rel=1e-10)
            assert float(record.delta(eta)[i]) == pytest.approx(float(min(delta)), rel=1e-9)


@pytest.mark.parametrize("factor", [1e-30, 65536.0])
def test_cosines_do_not_depend_on_the_scale_of_the_loss(factor: float) -> None:
    model, x = build("transformer")
    whole = observe(MarkovChain.trace(model, x), lambda y, _: y.square().sum(), x, None)
    record = observe(MarkovChain.trace(model, x), lambda y, _: factor * y.square().mean(), x, None)
    assert torch.allclose(record.cosines, whole.cosines, rtol=0, atol=1e-12)


def train(model: Residuals, x: Tensor, steps: int) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(steps):
        optimizer.zero_grad()
        for part in x.chunk(2):
            model(part).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("reentrant", [None, False], ids=["", "checkpointing"])
def test_watching_a_training_loop(reentrant: bool | None) -> None:
    model, x = build("transformer")
    model.reentrant = reentrant
    chain = MarkovChain.trace(model, x)
    with chain.watch() as watch:
        train(model, x, 3)
    assert len(watch.records) == 6
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    twin, _ = build("transformer")
    train(twin, x, 3)
    assert all(
        torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True)
    )
    fresh, _ = build("transformer")
    first = observe(MarkovChain.trace(fresh, x), lambda y, t: y.square().mean(), x[:3], None)
    assert torch.allclose(watch.records[0].cosines, first.cosines, rtol=0, atol=1e-12)
    assert torch.isfinite(watch.records[0].cosines).all()


def test_watch_removes_its_hooks_after_an_exception() -> None:
    model, x = build("mlp")
    chain = MarkovChain.trace(model, x)
    with pytest.raises(ZeroDivisionError), chain.watch() as watch:
        train(model, x, 2)
        raise ZeroDivisionError
    assert len(watch.records) == 4
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    with pytest.raises(RuntimeError), chain.watch():
        model(torch.ones(2, 9, dtype=torch.float64))
    assert torch._C._len_torch_function_stack() == 0 and RUNNING == []


def test_watch_sometimes_and_without_backward() -> None:
    model, x = build("mlp")
    with MarkovChain.trace(model, x).watch(every=2) as watch:
        train(model, x, 3)
        with torch.no_grad():
            model(x)
    assert len(watch.records) == 3


def test_frozen_prefix_and_zero_branch() -> None:
    model, x = build("mlp")
    model.stem.requires_grad_(False)
    model.blocks[0].requires_grad_(False)
    nn.init.zeros_(model.blocks[1][2].weight)
    nn.init.zeros_(model.blocks[1][2].bias)
    record = observe(MarkovChain.trace(model, x), lambda y, t: y.square().sum(), x, None)
    assert record.cosines[0].isnan().all() and record.cosines[1].isnan().all()
    assert record.cosines[2:].isfinite().all() and record.efficiency.isfinite().all()
    model.requires_grad_(False)
    with pytest.raises(InputError, match="frozen"):
        observe(MarkovChain.trace(model, x), lambda y, t: y.square().sum(), x, None)


def test_bad_input() -> None:
    model, x = build("mlp")
    with pytest.raises(InputError, match="nothing to observe"):
        MarkovChain.trace(nn.Linear(3, 3).double(), x).observe(F.mse_loss, x, x)
    with pytest.raises(InputError, match="without a gradient"):
        MarkovChain.trace(model, x).observe(lambda y, t: y.detach().sum(), x, None)
    with pytest.raises(InputError, match="every=0"):
        MarkovChain.trace(model, x).watch(every=0)


def _rank(rank: int, folder: Path) -> None:
    model, x = build("mlp")
    chain = MarkovChain.trace(model, x)
    parallel = nn.parallel.DistributedDataParallel(model)
    with chain.watch() as watch:
        parallel(x.chunk(2)[rank]).square().mean().backward()
    torch.save(watch.records[0].cosines, folder / f"{rank}.pt")


@pytest.mark.slow
def test_data_parallel(tmp_path: Path) -> None:
    two_processes(_rank, tmp_path)
    got = torch.cat([torch.load(tmp_path / f"{rank}.pt") for rank in range(2)], 1)
    model, x = build("mlp")
    want = observe(MarkovChain.trace(model, x), lambda y, t: y.square().sum(), x, None).cosines
    assert torch.allclose(got, want, rtol=0, atol=1e-12)


@pytest.mark.parametrize("alpha", [0.5, -2.0])
def test_a_direction_is_what_is_added_with_its_factor(alpha: float) -> None:
    model = network(lambda net, x: torch.add(x, net.block(x), alpha=alpha), block=nn.Linear(4, 4))
    model, x, y = model.double(), torch.randn(3, 4).double(), torch.randn(3, 4).double()
    found = observe(
        MarkovChain.trace(model, x), lambda out, target: (out - target).square().sum(1), x, y
    )
    z = alpha * model.block(x).detach()
    g = 2 * (x + z - y)
    assert torch.allclose(found.direction_norms, z.norm(dim=1)[None])
    assert torch.allclose(found.products, (z * g).sum(1)[None])


def merged(order: str) -> nn.Module:
    """The samples and the steps in one dimension, in some order."""

    def forward(net: Any, x: Tensor) -> Tensor:
        if order == "steps outside":
            x = x.transpose(0, 1)
        shape = x.shape
        x = x.flatten(0, 1)
        for _ in range(2):
            net.direction = net.f(x).tanh()
            net.state = x = x + net.direction
        x = x.view(shape)
        return x.transpose(0, 1) if order == "steps outside" else x

    return network(forward, f=nn.Linear(4, 4))


def cubes(y: Tensor, _: object) -> Tensor:
    return y.pow(3).flatten(1).sum(1)


@pytest.mark.parametrize(("samples", "steps"), [(1, 4), (3, 6), (4, 4)])
@pytest.mark.parametrize("order", ["samples outside", "steps outside"])
def test_samples_merged_with_steps(order: str, samples: int, steps: int) -> None:
    model = merged(order).double()
    chain = MarkovChain.trace(model, torch.randn(samples, 4, 4, dtype=torch.float64))
    x = torch.randn(5, steps, 4, dtype=torch.float64)
    record = chain.observe(cubes, x, None)
    wanted = []
    for one in x:
        loss = cubes(model(one[None]), None).sum()
        (gradient,) = torch.autograd.grad(loss, model.state)
        wanted.append(-F.cosine_similarity(model.direction.flatten(), gradient.flatten(), 0))
    assert torch.allclose(record.cosines[1], torch.stack(wanted), atol=1e-12)


LAST_LAYERS: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "quotient": lambda m, h: (h @ m.p) / m.t,
    "numerator": lambda m, h: m.g / (2 + h),
    "one after another": lambda m, h: h @ m.p @ m.q,
    "scaled": lambda m, h: torch.addcmul(m.g, h, m.t, value=0.5),
    "norm": lambda m, h: F.layer_norm(h, (4,), m.g, m.r),
    "norm with a computed bias": lambda m, h: F.layer_norm(h, (4,), m.g, m.p[0]),
    "linear": lambda m, h: F.linear(h, m.p, m.g),
}


@pytest.mark.parametrize("last", LAST_LAYERS)
def test_gauge_of_every_last_layer(last: str) -> None:
    p, q, g, r = (nn.Parameter(torch.randn(size)) for size in ((4, 4), (4, 4), 4, 4))
    model = network(
        lambda net, x: x + LAST_LAYERS[last](net, net.f(x).tanh()),
        f=nn.Linear(4, 4), t=nn.Parameter(torch.tensor(2.0)), p=p, q=q, g=g, r=r,
    )  # fmt: skip
    x = torch.randn(5, 4)
    record = MarkovChain.trace(model, x).observe(cubes, x, None)
    # it is known, and then that of its definition, or it is not known
    known = ("numerator", "one after another", "scaled", "norm", "linear")
    assert bool(record.gauge.isfinite()) == (last in known)
    if last in known:
        assert torch.allclose(record.gauge, record.products.sum(1), rtol=1e-4)


def test_reentrant_checkpointing_is_measured() -> None:
    model, x = build("mlp")
    labels, found, costs = torch.randint(0, 2, (6,)), [], []
    for model.reentrant in (None, False, True):
        record = MarkovChain.trace(model, x).observe(F.cross_entropy, x, labels)
        table = gradients(model, F.cross_entropy, [(x, labels)])
        found.append((record.cosines.tolist(), [row.rms for row in table], signal(model, x).rows))
        costs.append(cost(model, x))
        assert RUNNING == [] and "apply" not in vars(CheckpointFunction)
    assert found[0] == found[1] == found[2]
    # what is computed again counts, in both ways of checkpointing
    assert costs[0] != costs[1] == costs[2]


def test_a_dimension_that_is_not_made_of_samples_is_refused() -> None:
    model = merged("samples outside")
    chain = MarkovChain.trace(model, torch.randn(2, 4, 4))
    with pytest.raises(UnsupportedError, match=r"6 entries in dimension 0, .* of 4 samples"):
        Samples(0).rows(torch.ones(6, 2), 4)
    assert [place.dim for place in chain.samples()] == [0, 0]
