"""Trained networks as they are: dead rows, frozen parts, rescaled copies; steps
and canonical forms go on.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable

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
from pathspace.training import GSGD, GAdam, init_skeleton_


def with_dead_rows() -> tuple[nn.Module, Tensor]:
    """Convolutions and norms, as they are trained: some kernels all zero, some channels off."""
    torch.manual_seed(0)
    model = (
        network(
            lambda net, x: net.head(
                F.relu(net.second(F.relu(net.norm(net.first(x))))).mean((2, 3))
            ),
            first=nn.Conv2d(2, 6, 3, padding=1, bias=False),
            norm=nn.BatchNorm2d(6),
            second=nn.Conv2d(6, 5, 3, padding=1),
            head=nn.Linear(5, 3),
        )
        .double()
        .eval()
    )
    # statistics follow exactly only without eps
    model.norm.eps = 0.0
    with torch.no_grad():
        model.norm.running_var.uniform_(0.5, 2)
        # a kernel before a norm: nothing but zeros at its unit
        model.first.weight[1] = 0
        # a unit with both sides zero
        model.second.weight[2] = model.second.bias[2] = 0
        model.head.weight[:, 2] = 0
        # nothing enters, nothing leaves
        model.second.weight[3] = model.second.bias[3] = 0
        model.head.weight[:, 4] = 0
    return model, torch.randn(4, 2, 5, 5).double()


RULES = ("modulo", "magnitude", "random")


@pytest.mark.parametrize("rule", RULES)
def test_dead_units_are_named_and_left_out_of_canonical_forms(rule: str) -> None:
    model, x = with_dead_rows()
    graph, before = ps.trace(model, x), model(x)
    skeleton = graph.skeleton(rule)
    heads = dict(zip([b.name for b in graph.blocks], graph.blocks, strict=True))
    expected = {
        int(heads["first.weight"].head.reshape(-1)[1]),
        int(heads["second.weight"].head.reshape(-1)[2]),
    }
    assert set(skeleton.dead.tolist()) == expected
    for tree in ("in", "out"):
        twin = copy.deepcopy(model)
        with pytest.warns(UserWarning, match=r"2 of 17 units.*first\.weight, second\.weight"):
            ps.canonicalise_(twin, skeleton, tree)
        torch.testing.assert_close(twin(x), before, rtol=1e-10, atol=1e-12)
        own = dict(twin.named_parameters())
        masks = skeleton.live.incoming if tree == "in" else skeleton.live.outgoing
        for name, mask in masks.items():
            torch.testing.assert_close(own[name][mask].abs(), torch.ones(int(mask.sum())).double())
    assert len(skeleton.basis()) == graph.dimension


MAKERS: dict[str, Callable[[nn.Module, ps.Skeleton], torch.optim.Optimizer]] = {
    "gsgd": lambda m, s: GSGD(m.named_parameters(), lr=1e-3, skeleton=s, max_multiplier=1.0),
    "momentum": lambda m, s: GSGD(
        m.named_parameters(), lr=1e-3, skeleton=s, momentum=0.9, max_multiplier=1.0
    ),
    "uncapped": lambda m, s: GSGD(m.named_parameters(), lr=1e-7, skeleton=s),
    "gadam": lambda m, s: GAdam(m.named_parameters(), lr=1e-6, skeleton=s),
}


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, steps: int = 10
) -> list[float]:
    target = torch.arange(len(x)) % 3
    return descend(optimizer, lambda: F.cross_entropy(model(x), target), steps)


@pytest.mark.parametrize("kind", slow_names(MAKERS, MAKERS.keys() - {"momentum"}))
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.filterwarnings("ignore:.*only weights of 0:UserWarning")
def test_steps_go_on_and_dead_rows_stay(kind: str, rule: str) -> None:
    model, x = with_dead_rows()
    twin = copy.deepcopy(model)
    graph, other = ps.trace(model, x), ps.trace(twin, x)
    ps.rescale_(
        twin,
        other,
        0.5 * torch.randn(other.num_units, generator=torch.Generator().manual_seed(1)).double(),
    )
    skeleton = graph.skeleton(rule)
    optimizer = MAKERS[kind](model, skeleton)
    losses = train(model, optimizer, x)
    assert np.isfinite(losses).all() and losses[-1] < losses[0]
    assert optimizer.skeleton.dead.tolist() == skeleton.dead.tolist()
    assert (
        not model.first.weight[1].any()
        and not model.head.weight[:, 2].any()
        and not model.second.weight[2].any()
    )
    # units whose entering or leaving weights alone are zero still learn
    assert model.head.weight[:, 4].any()
    if rule == "magnitude":
        same = MAKERS[kind](twin, other.skeleton(rule))
        np.testing.assert_allclose(train(twin, same, x), losses, rtol=1e-7)


def test_three_tensors_with_dead_units_are_named() -> None:
    model = mlp(2, 3, 3, 3, 1)
    layers = [module for module in model.modules() if isinstance(module, nn.Linear)]
    with torch.no_grad():
        for before, after in itertools.pairwise(layers):
            before.weight[0], before.bias[0], after.weight[:, 0] = 0, 0, 0
    skeleton = ps.trace(model, torch.randn(1, 2)).skeleton()
    names = [name for name, _ in model.named_parameters()][:3]
    with pytest.warns(UserWarning, match=f"they lie in {', '.join(names)} and others[.]"):
        GSGD(model.named_parameters(), lr=0.01, skeleton=skeleton)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*only weights of 0:UserWarning")
def test_dead_units_with_opposite_scales_and_products_stay() -> None:
    for name in ("tied_transposed", "gated_product", "tied_depth"):
        pair = problem(name)
        model = copy.deepcopy(pair.model)
        stem = next(p for n, p in model.named_parameters() if p.dim() == 2)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter is not stem:
                    parameter.zero_()
        skeleton = ps.trace(model, *pair.args).skeleton("magnitude")
        optimizer = GSGD(model.named_parameters(), lr=0.01, skeleton=skeleton, max_multiplier=1.0)
        for _ in range(3):
            pair.step(model, optimizer)
        assert all(bool(p.isfinite().all()) for p in model.parameters())


# --- frozen weights


class Adapted(nn.Module):
    """A frozen body with adapters that start at zero."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.ModuleList([nn.Linear(4, 8), nn.Linear(8, 8)])
        self.down = nn.ModuleList([nn.Linear(4, 2, bias=False), nn.Linear(8, 2, bias=False)])
        self.up = nn.ModuleList([nn.Linear(2, 8, bias=False), nn.Linear(2, 8, bias=False)])
        self.head = nn.Linear(8, 3)
        for layer in self.up:
            nn.init.zeros_(layer.weight)
        self.body.requires_grad_(False)
        self.head.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for body, down, up in zip(self.body, self.down, self.up, strict=True):
            x = F.relu(body(x) + up(down(x)))
        return self.head(x)


@pytest.mark.parametrize("rule", RULES)
def test_frozen_weights_are_never_written(rule: str) -> None:
    model, x = Adapted().double(), torch.randn(32, 4).double()
    frozen = {name: p.clone() for name, p in model.named_parameters() if not p.requires_grad}
    before = model(x).detach()
    skeleton = ps.trace(model, x).skeleton(rule)
    init_skeleton_(model, skeleton)
    # adapters that do nothing still do nothing
    torch.testing.assert_close(model(x), before)
    optimizer = GSGD(model.named_parameters(), lr=0.05, skeleton=skeleton, max_multiplier=1.0)
    losses = train(model, optimizer, x, 60)
    assert losses[-1] < losses[0]
    for name, value in frozen.items():
        assert torch.equal(model.get_parameter(name), value)
    assert any(layer.weight.abs().max() > 0 for layer in model.up)


def test_trees_take_frozen_weights_first() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    model[0].bias.requires_grad_(False)
    skeleton = ps.trace(model, torch.randn(1, 3)).skeleton("magnitude")
    assert skeleton.incoming["0.weight"].sum() == 4
    model.requires_grad_(True)
    model[0].weight.requires_grad_(False)
    with torch.no_grad():
        model[0].bias.fill_(100.0)
    skeleton = ps.trace(model, torch.randn(1, 3)).skeleton("magnitude")
    assert skeleton.incoming["0.weight"].sum() == 4 and not skeleton.incoming["0.bias"].any()


# --- rescaled copies


def test_copies_with_equal_weights_break_ties_alike() -> None:
    model = mlp(4, 6, 6, 3).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.sign() * 0.5)
    x = torch.randn(2, 4).double()
    graph = ps.trace(model, x)
    first = graph.skeleton("magnitude")
    for seed in range(5):
        twin = copy.deepcopy(model)
        other = ps.trace(twin, x)
        ps.rescale_(
            twin, other, torch.randn(15 - 3, generator=torch.Generator().manual_seed(seed)).double()
        )
        second = other.skeleton("magnitude")
        assert (first.tree_in.index == second.tree_in.index).all()
        assert (first.tree_out.index == second.tree_out.index).all()


@pytest.mark.parametrize("rule", ["modulo", "magnitude", "random"])
def test_a_dead_unit_gets_an_edge_that_lies_on_paths(rule: str) -> None:
    # on one pixel only the middle of a 3 x 3 kernel meets data; here that is
    # 0, and so is all around it
    model = nn.Sequential(
        nn.Conv2d(3, 5, 1),
        nn.ReLU(),
        nn.Conv2d(5, 5, 3, padding=1, groups=5, bias=False),
        nn.ReLU(),
        nn.Conv2d(5, 2, 1),
    )
    with torch.no_grad():
        model[0].weight[1], model[0].bias[1] = 0, 0
        model[2].weight[1, 0, 1, 1] = 0
        model[4].weight[:, 1] = 0
    graph = ps.trace(model, torch.randn(2, 3, 1, 1))
    skeleton = graph.skeleton(rule)
    assert len(skeleton.dead) == 2
    assert len(skeleton.basis()) == graph.dimension
    for block in graph.blocks:
        if block.unused is not None:
            assert not (skeleton.masks[block.name] & block.unused.expand(block.shape)).any()
