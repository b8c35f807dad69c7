"""Advice before the first step: multipliers edge by edge, and ten steps as advised."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable

import numpy as np
import pytest
import torch
from benchmarks import advice
from cases import mlp
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import prune

import pathspace as ps
from pathspace.training import GSGD, GAdam, init_skeleton_, suggest
from pathspace.training.experiments.models import CharacterGPT, CifarResNet, VisionTransformer
from pathspace.training.optim.multipliers import multipliers


def deep(layers: int = 3, width: int = 16) -> nn.Sequential:
    return mlp(5, *[width] * layers, 3)


def conv() -> nn.Sequential:
    layers = nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 6, 3), nn.ReLU(), nn.Flatten()
    return nn.Sequential(*layers, nn.Linear(24, 3))


SMALL: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (deep, (5,)),
    "cnn": (conv, (1, 6, 6)),
    "resnet": (lambda: CifarResNet(8, channels=1, width=4, outputs=3), (1, 6, 6)),
    "vit": (lambda: VisionTransformer(size=6, patch=3, width=8, outputs=3), (1, 6, 6)),
    "gpt": (lambda: CharacterGPT(9, 6, width=8), (6,)),
}


def falls(
    model: nn.Module, optimizer: torch.optim.Optimizer, loss: Callable[[nn.Module], Tensor]
) -> bool:
    losses = []
    for _ in range(11):
        optimizer.zero_grad()
        value = loss(model)
        value.backward()
        losses.append(value.item())
        optimizer.step()
    return all(map(math.isfinite, losses)) and losses[-1] < losses[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("tried", [False, True])
def test_ten_steps_as_advised(name: str, tried: bool, capsys: pytest.CaptureFixture[str]) -> None:
    build, shape = SMALL[name]
    model = build()
    x = torch.randint(0, 9, (32, *shape)) if name == "gpt" else torch.randn(32, *shape)
    y = (x + 1) % 9 if name == "gpt" else torch.arange(32) % 3

    def loss(one: nn.Module) -> Tensor:
        return F.cross_entropy(one(x).flatten(0, -2), y.flatten())

    before = copy.deepcopy(model.state_dict())
    told = suggest(model, ps.trace(model, x[:2]), loss if tried else None)
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    assert f"lr {told.lr:.1e}" in capsys.readouterr().out
    assert falls(model, told.make(), loss)


@pytest.mark.slow
def test_ten_steps_on_the_leaderboards_tasks_and_on_other_networks() -> None:
    rows = [
        advice.followed(subject, tried=False)
        for subject in (*advice.others(), *advice.tasks(("scrambled 100",)))
    ]
    assert [row["network"] for row in rows if not row["falls"]] == []
    assert {row["optimizer"] for row in rows} == {"AdamW", "GaugeFixed(AdamW)"}


def test_advice_is_the_same_for_rescaled_copies() -> None:
    model = deep().double()
    x = torch.randn(4, 5).double()
    graph = ps.trace(model, x)
    twin = ps.rescale_(copy.deepcopy(model), graph, 2 * torch.randn(graph.num_units).double())
    one, other = suggest(model, graph, show=False), suggest(twin, ps.trace(twin, x), show=False)
    assert (one.lr, one.reasons) == (other.lr, other.reasons)
    for rule, found in one.multipliers.items():
        assert found.decades == other.multipliers[rule].decades


def test_advice_is_the_same_for_wrapped_models() -> None:
    """Wrappers put parts into names."""
    model, x = deep().double(), torch.randn(16, 5).double()
    graph = ps.trace(model, x)

    def loss(one: nn.Module) -> Tensor:
        return F.cross_entropy(one(x), torch.arange(16) % 3)

    for given in (None, loss):
        plain = suggest(copy.deepcopy(model), graph, given, show=False)
        wrapped = nn.DataParallel(torch.compile(copy.deepcopy(model), backend="eager"))
        found = suggest(wrapped, graph, given, show=False)
        assert found.optimizer == plain.optimizer == "GaugeFixed(AdamW)"
        assert found.lr == plain.lr and found.reasons[0] == plain.reasons[0]
        assert falls(wrapped, found.make(), loss)


@pytest.mark.parametrize("even", [True, False])
@pytest.mark.parametrize("rule", ["modulo", "magnitude"])
def test_multipliers_edge_by_edge(rule: str, even: bool) -> None:
    """Products along the trees, by walking them: 1 / (pre_u s_v)^2 for every edge outside the
    trees, or 1 / |p_u p_v|, and 1 / p^2 for every chain, units joined by edges of both trees.
    """
    model = deep(2, 4).double()
    graph = ps.trace(model, torch.randn(1, 5).double())
    skeleton = graph.skeleton(rule)
    weights, (tails, heads) = graph.weights().abs().numpy(), graph.ends()

    def product(unit: int, tree: np.ndarray, here: np.ndarray, there: np.ndarray) -> float:
        if not unit:
            return 1.0
        edge = next(e for e in np.flatnonzero(here == unit) if tree[e])
        return weights[edge] * product(there[edge], tree, here, there)

    inner, outer = (
        np.concatenate([side[block.name].reshape(-1).numpy() for block in graph.blocks])
        for side in (skeleton.incoming, skeleton.outgoing)
    )
    units = range(graph.num_units + 1)
    pre = [product(unit, inner, heads, tails) for unit in units]
    suf = [product(unit, outer, tails, heads) for unit in units]
    value = [a * b for a, b in zip(pre, suf, strict=True)]
    free = np.flatnonzero(~inner & ~outer)
    # (an edge of both trees makes its ends one chain)
    firsts = set(units[1:]) - {
        int(heads[e]) for e in np.flatnonzero(inner & outer) if tails[e] and heads[e]
    }
    wanted = [
        1 / (value[u] * value[v]) if even else 1 / (pre[u] * suf[v]) ** 2
        for u, v in zip(tails[free], heads[free], strict=True)
    ] + [1 / value[v] ** 2 for v in firsts if not math.isclose(value[v], 1.0)]
    found = multipliers(skeleton, even=even)
    assert sum(found.decades.values()) == len(wanted) == graph.num_weights - graph.num_units
    assert found.largest == pytest.approx(max(wanted), rel=1e-9)
    assert abs(math.log10(found.median / np.median(wanted))) < 0.15


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(("make", "power"), [(GSGD, 1.0), (GAdam, 0.5)])
def test_a_warning_has_the_numbers_of_the_step(make: type[GSGD], power: float) -> None:
    """In the gauge of the weights, and their roots for G-Adam, which has no squares."""
    model = deep(4, 32)
    graph = ps.trace(model, torch.randn(1, 5))
    model = ps.rescale_(model, graph, torch.randn(graph.num_units).double())
    skeleton = graph.skeleton()
    found = multipliers(skeleton, even=False)
    words = f"by {found.median**power:.0e} at the median and {found.largest**power:.0e} at most"
    with pytest.warns(UserWarning, match=f"{re.escape(words)}.* pass max_multiplier=1\\.0"):
        make(model.named_parameters(), lr=0.1, skeleton=skeleton)
    # nothing of the kind, where steps are bounded or path values are 1
    make(model.named_parameters(), lr=0.1, skeleton=skeleton, max_multiplier=1.0)
    init_skeleton_(model, skeleton)
    make(model.named_parameters(), lr=0.1, skeleton=skeleton)


def test_what_cannot_be_advised_is_refused() -> None:
    model, x = deep(), torch.randn(2, 5)
    graph = ps.trace(model, x)
    with pytest.raises(ps.PathspaceError, match="falls over 10 steps"):
        suggest(model, graph, lambda one: 0 * one(x).sum())
    for loss in (lambda one: one(x).sum(1), lambda one: 1.0, lambda one: one(x).sum().detach()):
        with pytest.raises(ps.InputTypeError, match="expected one number with gradients"):
            suggest(model, graph, loss)
    with pytest.raises(ps.PathspaceError, match="as its graph, expected a ReductionGraph"):
        suggest(model, model)
    with pytest.raises(ps.PathspaceError, match="no parameter with requires_grad"):
        suggest(copy.deepcopy(model).requires_grad_(False), graph)
    for bad in (lambda: 3, lambda one, other: one(other), 3):
        with pytest.raises(ps.InputTypeError, match="as its loss, expected a function of a model"):
            suggest(model, graph, bad)
    with pytest.raises(ps.InputError, match=r"'0\.weight' of shape \(9, 5\), expected \(16, 5\)"):
        suggest(deep(3, 9), graph)
    with pytest.raises(ps.InputError, match=r"no tensor '4\.weight' of the reduction graph"):
        suggest(model[:4], graph)
    told = suggest(model, graph, show=False)
    with pytest.raises(ps.InputTypeError, match=r"Advice\.make found a str as its model"):
        told.make("x")
    with pytest.raises(ps.InputError, match=r"Advice\.make found no parameter with requires_grad"):
        told.make(copy.deepcopy(model).requires_grad_(False))
    plain = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2))
    assert suggest(plain, ps.trace(plain, torch.randn(1, 3)), show=False).optimizer == "AdamW"


@pytest.mark.parametrize("tried", [False, True])
def test_decay_does_not_undo_steps_on_large_weights(tried: bool) -> None:
    """AdamW's decay multiplies by ``1 - lr decay``, with rates of the size of the weights."""
    model = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3)).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1e6)
    x, y = torch.randn(40, 5).double(), torch.arange(40) % 3

    def loss(one: nn.Module) -> Tensor:
        return F.cross_entropy(one(x), y)

    told = suggest(model, ps.trace(model, x), loss if tried else None, show=False)
    assert told.lr > 100
    assert falls(model, told.make(), loss)


def test_rates_below_the_rounding_of_the_weights_are_said_to_be() -> None:
    for kind, said in ((torch.bfloat16, True), (torch.float32, False)):
        model, x = deep().to(kind), torch.randn(4, 5).to(kind)
        told = suggest(model, ps.trace(model, x), show=False)
        assert any("lost by rounding in torch.bfloat16" in r for r in told.reasons) is said


def test_sparse_gradients_are_refused_before_a_step() -> None:
    model = nn.Sequential(nn.Embedding(7, 4, sparse=True), nn.ReLU(), nn.Linear(4, 2))
    graph = ps.trace(model, torch.arange(3))
    with pytest.raises(ps.UnsupportedError, match="sparse gradients of the embedding '0'"):
        suggest(model, graph)
    model[0].requires_grad_(False)
    assert suggest(model, graph, show=False).lr > 0


@pytest.mark.parametrize("change", ["pruned", "kept"])
def test_models_that_hold_tensors_of_a_pass_are_tried(change: str) -> None:
    """``copy.deepcopy`` cannot copy such models."""
    model, x, y = mlp(6, 16, 3), torch.randn(64, 6), torch.randint(0, 3, (64,))
    if change == "pruned":
        prune.l1_unstructured(model[0], "weight", 0.3)
    else:
        model.register_forward_hook(lambda module, _args, output: setattr(module, "kept", [output]))
    model(x)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    graph = ps.trace(model, x)
    advice = suggest(model, graph, lambda twin: F.cross_entropy(twin(x), y), show=False)
    assert 0 < advice.lr < math.inf
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
