"""What a step and its trees are made of, computed once more one edge at a time."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from cases import mlp, network
from descent import descend
from slow_names import slow_names
from torch import Tensor, nn
from torch.nn import functional as F
from training_pairs import problem

import pathspace as ps
from pathspace.graph.parts import WeightBlock
from pathspace.training import GSGD, GAdam, GaugeFixed

RULES = ("modulo", "magnitude", "random")


def at(table: Tensor, unit: int) -> float:
    """The scale an id stands for."""
    return float(table[unit]) if unit >= 0 else 1 / float(table[-unit])


def ends(block: WeightBlock) -> list[tuple[int, int]]:
    sides = (ids.expand(block.shape).reshape(-1).tolist() for ids in (block.tail, block.head))
    return list(zip(*sides, strict=True))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("cap", [0.3, 1.0, 30.0])
@pytest.mark.parametrize(
    "name",
    slow_names(["opposite_parents", "residual_cnn", "transformer_block"], ["transformer_block"]),
)
def test_multipliers_are_bounded_edge_by_edge(name: str, cap: float, rule: str) -> None:
    """``w <- (w - lr M g) / R_tail`` with ``M = 1 / (pre s)^2``, at either end at most
    ``sqrt(cap)`` when balanced.
    """
    case = problem(name)
    model = copy.deepcopy(case.model)
    graph = ps.trace(model, *case.args)
    skeleton = graph.skeleton(rule, seed=3)
    pre, suffix = skeleton.prefixes(), skeleton.suffixes()
    p = pre * suffix
    chain = skeleton.chain
    phi = GaugeFixed(torch.optim.SGD(copy.deepcopy(model).named_parameters(), lr=1.0), graph).phi
    balancing = torch.cat([torch.zeros(1), phi, torch.from_numpy(graph.forms @ phi.numpy())]).exp()
    start = {key: value.detach().clone() for key, value in model.named_parameters()}
    lr = 1e-4
    optimizer = GSGD(model.named_parameters(), lr=lr, skeleton=skeleton, max_multiplier=cap)
    case.loss(model).backward()
    optimizer.step()
    ratio = skeleton.prefixes() / pre
    checked = against = 0
    for block in graph.blocks:
        old, new = (
            start[block.name].reshape(-1).tolist(),
            model.get_parameter(block.name).reshape(-1).tolist(),
        )
        grad, tree = (
            model.get_parameter(block.name).grad.reshape(-1).tolist(),
            skeleton.masks[block.name].reshape(-1),
        )
        unused = None if block.unused is None else block.unused.expand(block.shape).reshape(-1)
        for edge, (tail, head) in enumerate(ends(block)):
            if tree[edge] or (unused is not None and unused[edge]):
                continue
            ends_when_balanced = (
                at(pre, tail) * at(balancing, tail),
                at(suffix, head) / at(balancing, head),
            )
            multiplier = (at(balancing, tail) / at(balancing, head)) ** 2
            for scale in ends_when_balanced:
                multiplier *= min(1 / scale**2, cap**0.5)
            against += tail < 0 or head < 0
            expected = (old[edge] - lr * multiplier * grad[edge]) / at(ratio, tail)
            assert new[edge] - old[edge] == pytest.approx(expected - old[edge], rel=1e-6, abs=1e-12)
            checked += 1
    assert checked
    # what a chain steps by is bounded, too: 1 / p_k^2
    twin = copy.deepcopy(case.model)
    free = ps.trace(twin, *case.args).skeleton(rule, seed=3)
    optimizer = GSGD(twin.named_parameters(), lr=1e-9, skeleton=free)
    case.loss(twin).backward()
    optimizer.step()
    unbounded, units = free.prefixes() / pre, range(1, graph.num_units + 1)
    firsts = {int(chain[unit]): unit for unit in reversed(units) if chain[unit]}
    for unit in firsts.values():
        moved, wished = float(ratio[unit] - 1) / lr, float(unbounded[unit] - 1) / 1e-9
        assert moved == pytest.approx(
            wished * min(1.0, cap * float(p[unit]) ** 2), rel=1e-3, abs=1e-4
        )
    # somewhere an end moves against its chain
    assert name != "opposite_parents" or against


def taps() -> nn.Module:
    """Kernels whose largest tap lies elsewhere in each."""
    first, second = (nn.Conv2d(*sizes, bias=False) for sizes in ((1, 4, (2, 3)), (4, 2, (3, 2))))
    for layer in (first, second):
        nn.init.uniform_(layer.weight, 0.1, 1.1)
    return network(lambda net, x: net.second(F.relu(net.first(x))), first=first, second=second)


@pytest.mark.parametrize("rule", ["modulo", "random"])
def test_other_rules_step_aside_where_a_weight_is_zero(rule: str) -> None:
    model, x = taps().double(), torch.randn(2, 1, 9, 9).double()
    graph = ps.trace(model, x)
    chosen = graph.skeleton(rule, seed=1).masks
    with torch.no_grad():
        for key, mask in chosen.items():
            model.get_parameter(key)[mask] = 0
    skeleton = graph.skeleton(rule, seed=1)
    for tree in (skeleton.tree_in, skeleton.tree_out):
        assert bool((tree.gather(graph) != 0).all())
    for channel in range(4):
        row, taken = model.first.weight[channel], skeleton.incoming["first.weight"][channel]
        assert int(taken.flatten().int().argmax()) == int((row != 0).flatten().int().argmax()), (
            "the first that is not 0"
        )
    assert not len(skeleton.dead) and len(skeleton.basis()) == graph.dimension
    GSGD(model.named_parameters(), lr=0.01, skeleton=skeleton)


def test_magnitude_trees_wait_for_large_edges() -> None:
    """A bias leads to the root at once, the weights beside it only after the norm's own."""
    # between two norms, hidden units whose biases are almost nothing, as in trained attention
    model = network(
        lambda net, x: net.head(net.last(net.norm(x) + net.down(F.relu(net.up(net.norm(x)))))),
        norm=nn.LayerNorm(4), up=nn.Linear(4, 6), down=nn.Linear(6, 4), last=nn.LayerNorm(4),
        head=nn.Linear(4, 2),
    ).double()  # fmt: skip
    x = torch.randn(16, 4).double()
    with torch.no_grad():
        model.up.bias.mul_(1e-8)
    graph = ps.trace(model, x)
    skeleton = graph.skeleton("magnitude")
    assert not skeleton.masks["up.bias"].any() and skeleton.incoming["up.weight"].sum() == 6
    twin = ps.rescale_(copy.deepcopy(model), graph, torch.linspace(-2, 2, graph.num_units))
    pair = [ps.trace(net, x).skeleton("magnitude") for net in (model, twin)]
    for one, two in zip(
        (pair[0].tree_in, pair[0].tree_out), (pair[1].tree_in, pair[1].tree_out), strict=True
    ):
        assert np.array_equal(one.block, two.block) and np.array_equal(one.index, two.index)


def test_rebuilding_keeps_a_frozen_norm_with_its_eps() -> None:
    """Variances follow as ``s^2 (var + eps) - eps``: with an eps as large as they
    are, any other way shows.
    """
    norm = nn.BatchNorm2d(3, eps=0.1)
    model = (
        nn.Sequential(nn.Conv2d(2, 3, 3), norm, nn.ReLU(), nn.Flatten(), nn.Linear(27, 2))
        .double()
        .eval()
    )
    norm.running_mean.normal_()
    norm.running_var.uniform_(0.5, 1.5)
    for parameter in norm.parameters():
        nn.init.normal_(parameter)
    with torch.no_grad():
        # so that every channel gets larger: a scale below 1 might leave no room for eps
        model[0].weight.mul_(0.3)
    x = torch.randn(2, 2, 5, 5).double()
    graph = ps.trace(model, x)
    basis = graph.skeleton("magnitude").basis()
    rebuilt = basis.rebuild(basis.values(), basis.skeleton.signs())
    outputs = torch.func.functional_call(model, dict(model.named_parameters()) | rebuilt, (x,))
    torch.testing.assert_close(outputs, model(x), rtol=1e-9, atol=1e-11)
    factor = (rebuilt["1.running_mean"] / norm.running_mean).square()
    torch.testing.assert_close(rebuilt["1.running_var"], factor * (norm.running_var + 0.1) - 0.1)
    assert float((factor - 1).abs().min()) > 0.1


def test_adam_without_eps_leaves_what_has_no_gradient() -> None:
    model = mlp(3, 4, 2).double()
    x = torch.randn(8, 3).double()
    with torch.no_grad():
        # one unit that is never active, and an input that is always 0
        model[0].bias[1] = -100
        x[:, 2] = 0
    optimizer = GAdam(
        model.named_parameters(), lr=1e-3, eps=0, skeleton=ps.trace(model, x).skeleton("magnitude")
    )
    start = [p.detach().clone() for p in model.parameters()]
    losses = descend(optimizer, lambda: F.mse_loss(model(x), torch.ones(8, 2).double()), 5)
    assert all(bool(p.isfinite().all()) for p in model.parameters()) and losses[-1] < losses[0]
    # (to the rounding of a path value)
    torch.testing.assert_close(model[0].weight[1], start[0][1], rtol=1e-15, atol=0)
    torch.testing.assert_close(model[2].weight[:, 1], start[2][:, 1], rtol=1e-15, atol=0)
