"""Parameters that a model adds a constant to, as norms with `1 + weight`: the sum scales."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import network
from descent import descend
from rescaled import change
from slow_names import slow_names
from torch import Tensor, nn
from torch.nn import functional as F
from zoo import soundness

import pathspace as ps
from pathspace.evidence.proof import document_digest
from pathspace.training import GSGD, PathSGD, init_skeleton_

WIDTH = 6


Use = Callable[[Any, Tensor], Tensor]


def net_of(use: Use) -> Any:
    """Two layers, and what a parameter does between them."""
    return network(
        lambda net, x: net.last(F.relu(use(net, net.first(x)))),
        first=nn.Linear(3, WIDTH, bias=False),
        last=nn.Linear(WIDTH, 2),
        gain=nn.Parameter(0.3 * torch.randn(WIDTH)),
    ).double()


def gemma(net: Any, x: Tensor) -> Tensor:
    """A norm without an eps, which is exact as it stands."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True)) * (1.0 + net.gain)


def by(gain: Callable[[Tensor], Tensor]) -> Use:
    return lambda net, x: x * gain(net.gain)


def region(net: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        gain = 2.0 * net.gain
        return x * (gain + 1.0)


# how the parameter is used -> units, and the constant that is added to it (None
# where it stays as it is)
USES: dict[str, tuple[Use, int, float | None]] = {
    "after a norm": (gemma, 7, 1.0),
    "one plus weight": (by(lambda w: 1.0 + w), 12, 1.0),
    "weight plus a number": (by(lambda w: w + 2), 12, 2.0),
    "weight less a number": (by(lambda w: w - 0.5), 12, -0.5),
    "one less weight": (by(lambda w: 1.0 - w), 12, -1.0),
    "with a multiple": (by(lambda w: torch.add(w, 1.0, alpha=3)), 12, 3.0),
    "a multiple of the sum": (by(lambda w: 3 * (1 + w)), 12, 1.0),
    "part of the sum": (by(lambda w: torch.cat([(1 + w)[:3], (1 + w)[3:]])), 12, 1.0),
    "twice alike": (lambda net, x: F.relu(x * (1 + net.gain)) * (1.0 + net.gain), 12, 1.0),
    "as a bias": (lambda net, x: x + (1 + net.gain), 6, 1.0),
    "masked": (by(lambda w: (1 + w) * torch.tensor([1.0, 0, 1, 1, 0, 1])), 8, 1.0),
    "different constants": (lambda net, x: F.relu(x * (1 + net.gain)) * (2 + net.gain), 6, None),
    "a multiple of the weight": (by(lambda w: 2 * w + 1), 6, None),
    "a constant to a part": (by(lambda w: torch.cat([w[:3] + 1, w[3:]])), 9, None),
    "a sum of a sum": (by(lambda w: 1 + w.sum()), 6, None),
    "in a region": (region, 6, None),
}

# scalars that the model does not use, or that have a scale no rule sees
BEYOND = {"masked"}


def made(name: str) -> tuple[Any, Tensor, ps.ReductionGraph]:
    net, x = net_of(USES[name][0]), torch.randn(9, 3).double()
    return net, x, ps.trace(net, x)


def normal(graph: ps.ReductionGraph, seed: int = 0) -> Tensor:
    return torch.randn(
        graph.num_units, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )


@pytest.mark.parametrize("name", slow_names(USES, [*USES][::2]))
def test_a_sum_scales_where_all_uses_agree_on_the_constant(name: str) -> None:
    _, units, shift = USES[name]
    net, x, graph = made(name)
    assert graph.num_units == units
    assert graph.shifts == ({} if shift is None else {"gain": shift})
    assert change(net, graph, x) < 1e-10
    phi = normal(graph)
    after = ps.rescale_(copy.deepcopy(net), graph, phi)
    a, b = graph.gauge_affine(phi).get("gain", (torch.ones(1), torch.zeros(1)))
    torch.testing.assert_close(after.gain, a.double() * net.gain + b)
    assert ps.verify(net, x).holds
    if name not in BEYOND:
        _, runner = soundness.trace_double(net, (x,), {})
        assert soundness.scaling_dimension(runner)[0] == units


def plain_of(net: Any, name: str) -> Any:
    """The same function with the sum itself as its parameter."""

    def forward(own: Any, x: Tensor) -> Tensor:
        x = own.first(x)
        if name == "after a norm":
            x = x * torch.rsqrt(x.square().mean(-1, keepdim=True))
        return own.last(F.relu(x * own.gain))

    first, last = copy.deepcopy(net.first), copy.deepcopy(net.last)
    return network(forward, first=first, last=last, gain=nn.Parameter(1 + net.gain.detach()))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["after a norm", "one plus weight"])
@pytest.mark.parametrize("rule", ["modulo", "magnitude"])
def test_all_that_reads_weights_reads_the_sum(name: str, rule: str) -> None:
    net, x, graph = made(name)
    plain = plain_of(net, name)
    other = ps.trace(plain, x)
    torch.testing.assert_close(plain(x), net(x))
    basis, twin = graph.skeleton(rule=rule).basis(), other.skeleton(rule=rule).basis()
    torch.testing.assert_close(graph.weights(), other.weights())
    torch.testing.assert_close(basis.values(), twin.values())
    assert [path.value for path in basis][:9] == pytest.approx([path.value for path in twin][:9])
    if name == "one plus weight":
        assert graph.path_norm() == pytest.approx(other.path_norm())
    one, two = ps.path_statistics(basis.skeleton), ps.path_statistics(twin.skeleton)
    assert one.log_norm == pytest.approx(two.log_norm)
    rebuilt = basis.rebuild(basis.values(), basis.skeleton.signs())
    torch.testing.assert_close(
        rebuilt["gain"] + 1, twin.rebuild(twin.values(), twin.skeleton.signs())["gain"]
    )
    for move in (
        lambda m, g: ps.balance_(m, g),
        lambda m, g: ps.canonicalise_(m, g.skeleton(rule=rule)),
        lambda m, g: ps.rescale_(m, g, normal(g)),
    ):
        mine, its = move(copy.deepcopy(net), graph), move(copy.deepcopy(plain), other)
        torch.testing.assert_close(mine.gain + 1, its.gain, rtol=1e-6, atol=1e-9)
        torch.testing.assert_close(mine.last.weight, its.last.weight, rtol=1e-6, atol=1e-9)
        torch.testing.assert_close(mine(x), net(x), rtol=1e-6, atol=1e-9)


def test_the_proof_names_the_constant_and_the_checker_adds_it() -> None:
    net, x, graph = made("one plus weight")
    document = ps.proof(graph.skeleton())
    assert [entry.get("shift") for entry in document["tensors"] if entry["name"] == "gain"] == [1.0]
    assert ps.check(document, model=net, args=(x,)).accepted
    for entry in document["tensors"]:
        entry.pop("shift", None)
    assert not ps.check(
        document | {"digest": document_digest(document)}, model=net, args=(x,)
    ).accepted


def test_optimizers_on_path_values_ask_for_a_graph_without_such_sums() -> None:
    net, x, graph = made("one plus weight")
    with pytest.raises(ps.UnsupportedError, match=r"'gain'.*affine=False"):
        GSGD(net.named_parameters(), lr=0.1, skeleton=graph.skeleton())
    pinned = ps.trace(net, x, affine=False)
    assert (pinned.num_units, pinned.shifts) == (6, {})
    optimizer = GSGD(
        net.named_parameters(), lr=0.01, skeleton=pinned.skeleton("magnitude"), max_multiplier=1.0
    )
    gain = net.gain.detach().clone()
    losses = descend(optimizer, lambda: net(x).square().mean(), 10)
    # outside of path space it takes part by plain descent
    assert losses[-1] < losses[0] and not torch.equal(net.gain, gain)
    with pytest.raises(ps.UnsupportedError):
        PathSGD(net.parameters(), lr=0.1, model=net, example=(x[:1],))


def test_skeleton_weights_of_size_one_are_sums() -> None:
    net, _, graph = made("after a norm")
    skeleton = graph.skeleton()
    init_skeleton_(net, skeleton)
    chosen = skeleton.masks["gain"]
    assert bool(chosen.any())
    torch.testing.assert_close((net.gain[chosen] + 1).abs(), torch.ones(int(chosen.sum())).double())
