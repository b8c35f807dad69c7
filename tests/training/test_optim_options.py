"""Bounded Adam, relative steps, lists of what is trained, and names that wrappers have changed."""

from __future__ import annotations

import copy
import math
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from descent import descend
from oracles.adam import train_on_path_values
from slow_names import slow_names
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Adam, AdamW, Optimizer
from training_pairs import Problem, largest_difference, problem

import pathspace as ps
from pathspace.training import GSGD, GAdam, GaugeFixed, init_skeleton_

SGD = torch.optim.SGD


class Relative(Optimizer):
    """Any optimizer on factors that stand at 1 before every step: ``v <- v u``,
    with ``dL/du = v dL/dv``.
    """

    def __init__(
        self, params: list[nn.Parameter], make: Callable[[list[nn.Parameter]], Optimizer]
    ) -> None:
        super().__init__(params, {})
        self.values = params
        self.factors = [nn.Parameter(torch.ones_like(v)) for v in params]
        self.inner = make(self.factors)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for value, factor in zip(self.values, self.factors, strict=True):
            factor.fill_(1.0)
            factor.grad = value * value.grad
        self.inner.step()
        for value, factor in zip(self.values, self.factors, strict=True):
            value.mul_(factor)


RELATIVE: dict[str, tuple[type[Any], dict[str, Any], Callable[..., Optimizer]]] = {
    "gsgd": (GSGD, {"lr": 1e-3, "weight_decay": 0.1}, lambda v: SGD(v, lr=1e-3, weight_decay=0.1)),
    "momentum": (
        GSGD,
        {"lr": 1e-4, "momentum": 0.9, "nesterov": True},
        lambda v: SGD(v, lr=1e-4, momentum=0.9, nesterov=True),
    ),
    "gadam": (
        GAdam,
        {"lr": 1e-3, "betas": (0.8, 0.95), "eps": 1e-3, "weight_decay": 0.1},
        lambda v: AdamW(v, lr=1e-3, betas=(0.8, 0.95), eps=1e-3, weight_decay=0.1),
    ),
}


@pytest.mark.parametrize("member", RELATIVE)
@pytest.mark.parametrize(
    "name", ["rnn_op", "conv_depthwise", "transformer_block", "tied_transposed"]
)
def test_relative_steps_multiply_path_values(name: str, member: str) -> None:
    case = Problem(name)
    kind, settings, reference = RELATIVE[member]
    expected = train_on_path_values(
        case.model, case.loss, case.oracle(), lambda v: Relative(v, reference), 4
    )
    case.train(
        case.model,
        lambda m: kind(m.named_parameters(), skeleton=case.skeleton(m), relative=True, **settings),
        4,
    )
    assert largest_difference(case.model, expected) < 1e-10


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["modulo", "random"])
@pytest.mark.parametrize("cap", [0.3, 3.0])
@pytest.mark.parametrize(
    "name", slow_names(["opposite_parents", "rnn_op", "transformer_block"], ["transformer_block"])
)
def test_bounded_adam_is_adam_on_path_values_over_their_bound(
    name: str, cap: float, rule: str
) -> None:
    """One step: ``b = min(1, sqrt(cap) |pre_u|) min(1, sqrt(cap) |s_v|)``, balanced;
    ``min(1, cap |p|)`` of a chain.
    """
    case = problem(name, rule)
    oracle, skeleton = case.oracle(), case.skeleton(case.model)
    graph = skeleton.graph
    phi = GaugeFixed(
        torch.optim.SGD(copy.deepcopy(case.model).named_parameters(), lr=1.0), graph
    ).phi
    balancing = torch.cat([torch.zeros(1), phi, torch.from_numpy(graph.forms @ phi.numpy())]).exp()
    entering, leaving = skeleton.prefixes().abs() * balancing, skeleton.suffixes().abs() / balancing

    def at(table: torch.Tensor, unit: int) -> float:
        return float(table[unit] if unit >= 0 else 1 / table[-unit])

    blocks = {block.name: block for block in skeleton.graph.blocks}
    # in the order of the oracle: chains by their first units, then edges in neither tree
    firsts = {
        int(chain): unit for unit, chain in reversed(list(enumerate(skeleton.chain))) if chain
    }
    bounds = [min(1.0, cap * at(entering * leaving, unit)) for unit in sorted(firsts.values())]
    for key, flat in oracle.slots:
        block = blocks[key]
        if not bool(skeleton.masks[key].reshape(-1)[flat]):
            ends = [
                int(ids.expand(block.shape).reshape(-1)[flat]) for ids in (block.tail, block.head)
            ]
            scales = [
                at(table, unit) for table, unit in zip((entering, leaving), ends, strict=True)
            ]
            bounds.append(math.prod(min(1.0, cap**0.5 * scale) for scale in scales))
    factor = torch.tensor(bounds, dtype=torch.float64)

    class Bounded(Adam):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            (values,) = self.param_groups[0]["params"]
            values.grad.mul_(factor)
            before = values.clone()
            super().step()
            values.copy_(before + factor * (values - before))

    settings: dict[str, Any] = {"lr": 1e-4, "eps": 1e-2}
    expected = train_on_path_values(
        case.model, case.loss, oracle, lambda v: Bounded(v, **settings), 1
    )
    model = copy.deepcopy(case.model)
    optimizer = GAdam(
        model.named_parameters(), skeleton=case.skeleton(model), max_multiplier=cap, **settings
    )
    case.step(model, optimizer)
    assert largest_difference(model, expected) < 1e-10
    assert optimizer.max_multiplier == cap
    assert bool((factor < 1).any()) or cap > 1


MEMBERS: dict[str, Callable[..., Any]] = {
    "bounded adam": lambda m, s: GAdam(
        m.named_parameters(), lr=0.003, max_multiplier=0.5, weight_decay=0.1, skeleton=s
    ),
    "relative adam": lambda m, s: GAdam(m.named_parameters(), lr=0.003, relative=True, skeleton=s),
    "relative momentum": lambda m, s: GSGD(
        m.named_parameters(), lr=0.003, momentum=0.9, relative=True, skeleton=s
    ),
}


@pytest.mark.parametrize("member", MEMBERS)
@pytest.mark.parametrize(
    "name", slow_names(["rnn_op_2_layers", "batchnorm_cnn"], ["batchnorm_cnn"])
)
def test_the_scales_are_not_seen(name: str, member: str) -> None:
    case = Problem(name, unit=True)
    runs, norms = [], []
    for model in case.twins(2):
        optimizer = MEMBERS[member](model, case.skeleton(model))
        losses = []
        for _ in range(20):
            optimizer.zero_grad()
            value = case.loss(model)
            value.backward()
            norms.append(float(optimizer.clip_path_grad_norm_(1.0)))
            optimizer.step()
            losses.append(value.item())
        runs.append(losses)
    assert runs[0][-1] < runs[0][0]
    assert runs[1] == pytest.approx(runs[0], rel=1e-9)
    assert norms[20:] == pytest.approx(norms[:20], rel=1e-9)


@pytest.mark.parametrize("member", MEMBERS)
def test_states_are_rescaled_with_the_weights(member: str) -> None:
    case = Problem("rnn_op_2_layers", unit=True)
    runs = []
    for moves in (False, True):
        model = copy.deepcopy(case.model)
        graph = ps.trace(model, *case.args, sizes="given")
        optimizer = MEMBERS[member](model, graph.skeleton("magnitude"))
        for step in range(12):
            if moves and step == 6:
                ps.rescale_(
                    model,
                    graph,
                    torch.linspace(-2, 2, graph.num_units).double(),
                    optimizer=optimizer,
                )
            last = case.step(model, optimizer)
        runs.append(last)
    assert runs[1] == pytest.approx(runs[0], rel=1e-9)


@pytest.mark.parametrize("cap", [0.2, 5.0])
@pytest.mark.parametrize("kind", [GSGD, GAdam])
def test_clipping_goes_by_the_bounded_gradients(kind: type[Any], cap: float) -> None:
    """The norm is that by which a plain first step gets shorter: of SGD's ``lr sum M
    g^2``, by finite differences.
    """
    case = problem("rnn_op")
    if kind is GAdam:
        # for beta = 0 and a large eps, Adam's step is one of gradient descent at the rate lr / eps
        settings: dict[str, Any] = {"lr": 1e-2, "betas": (0.0, 0.0), "eps": 1e8}
        rate = 1e-10
    else:
        settings, rate = {"lr": 1e-10}, 1e-10
    model = copy.deepcopy(case.model)
    optimizer = kind(
        model.named_parameters(), skeleton=case.skeleton(model), max_multiplier=cap, **settings
    )
    value = case.loss(model)
    value.backward()
    norm = float(optimizer.clip_path_grad_norm_(1e9))
    start = {key: p.detach().clone() for key, p in model.named_parameters()}
    optimizer.step()
    fall = -sum(
        float((p.grad * (p.detach() - start[key])).sum()) for key, p in model.named_parameters()
    )
    assert fall / rate == pytest.approx(norm**2, rel=1e-3)


def test_relative_steps_need_no_bound_and_warn_of_zeros() -> None:
    torch.manual_seed(0)
    layers = [layer for _ in range(16) for layer in (nn.Linear(16, 16), nn.ReLU())]
    model, x, y = nn.Sequential(*layers, nn.Linear(16, 1)), torch.randn(64, 16), torch.randn(64, 1)
    skeleton = ps.trace(model, x).skeleton()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer = GAdam(model.named_parameters(), lr=0.003, skeleton=skeleton, relative=True)
    losses = descend(optimizer, lambda: nn.functional.mse_loss(model(x), y), 30)
    assert losses[-1] < losses[0]
    with torch.no_grad():
        model[0].bias[:3] = 0
    with pytest.warns(UserWarning, match=r"found 3 of .* weights at 0 \(first: '0.bias'\)"):
        GSGD(model.named_parameters(), lr=0.003, skeleton=skeleton, relative=True)
    for kind in (GSGD, GAdam):
        with pytest.raises(ps.PathspaceError, match="whose steps have no multipliers"):
            kind(model.named_parameters(), skeleton=skeleton, relative=True, max_multiplier=1.0)


# --- what is trained, and under which names


class Adapted(nn.Module):
    """A frozen layer with a low-rank adapter."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.out = nn.Linear(5, 8).requires_grad_(False), nn.Linear(8, 3)
        self.a, self.b = nn.Parameter(torch.randn(2, 5)), nn.Parameter(torch.randn(8, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.relu(self.base(x) + x @ self.a.T @ self.b.T))


def trained(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name, p) for name, p in model.named_parameters() if p.requires_grad]


@pytest.mark.parametrize("kind", [GSGD, GAdam])
def test_a_list_of_what_is_trained_is_the_whole_list_with_the_rest_frozen(kind: type[Any]) -> None:
    torch.manual_seed(0)
    first, x = Adapted().double(), torch.randn(32, 5).double()
    y = torch.randn(32, 3).double()
    second = copy.deepcopy(first)
    optimizers = []
    for model, params in ((first, trained(first)), (second, list(second.named_parameters()))):
        skeleton = ps.trace(model, x).skeleton()
        optimizers.append(kind(params, lr=1e-3, weight_decay=0.1, skeleton=skeleton))
    for turn in range(6):
        for i, model in enumerate((first, second)):
            optimizers[i].zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizers[i].clip_path_grad_norm_(1.0)
            optimizers[i].step()
            if turn == 2:
                # a state and a pickle know what was not given, too
                optimizers[i].load_state_dict(copy.deepcopy(optimizers[i].state_dict()))
        assert largest_difference(first, second) < 1e-12
    assert len(optimizers[0].param_groups[0]["params"]) == len(trained(first))
    assert torch.equal(first.base.weight, second.base.weight)
    again = pickle.loads(pickle.dumps(optimizers[0]))
    assert set(again.weights) == set(optimizers[1].weights)
    extra = nn.Parameter(torch.ones(2).double())
    optimizers[0].add_param_group({"params": [("extra", extra)]})
    extra.grad = torch.ones_like(extra)
    optimizers[0].step()
    assert not torch.equal(extra, torch.ones(2).double())


def test_weights_that_are_not_given_stay_though_they_ask_for_gradients() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), torch.randn(16, 4)
    skeleton = ps.trace(model, x).skeleton()
    init_skeleton_(model, skeleton)
    start = copy.deepcopy(model)
    optimizer = GSGD(model[2].named_parameters(), lr=0.01, skeleton=skeleton)
    model(x).square().sum().backward()
    gradient = model[0].weight.grad.clone()
    optimizer.clip_path_grad_norm_(1e-3)
    optimizer.step()
    assert torch.equal(model[0].weight, start[0].weight) and torch.equal(
        gradient, model[0].weight.grad
    )
    assert not torch.equal(model[2].weight, start[2].weight)
    # of a copy nobody knows where the rest is
    with pytest.raises(ps.PathspaceError, match="found no parameter for 2 blocks"):
        twin = copy.deepcopy(model)
        GSGD(
            [(f"2.{name}", p) for name, p in twin[2].named_parameters()], lr=0.01, skeleton=skeleton
        )


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod."])
@pytest.mark.parametrize("kind", [GSGD, GAdam, GaugeFixed])
def test_prefixes_of_wrappers_are_no_part_of_names(kind: type[Any], prefix: str) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), torch.randn(16, 4)
    graph = ps.trace(model, x)
    ends = []
    for before in ("", prefix):
        twin = copy.deepcopy(model)
        named = [(before + name, p) for name, p in twin.named_parameters()]
        if kind is GaugeFixed:
            optimizer: Optimizer = GaugeFixed(AdamW(named, lr=0.01), graph)
        else:
            optimizer = kind(named, lr=0.01, skeleton=graph.skeleton())
        twin(x).square().sum().backward()
        optimizer.step()
        ends.append(twin)
    assert largest_difference(ends[0], model) > 0
    assert largest_difference(ends[0], ends[1]) == 0


def test_modules_that_are_called_like_wrappers_keep_their_names() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = nn.Linear(3, 4)
            self.weight = nn.Parameter(torch.randn(2, 4))
            self.bias = nn.Parameter(torch.randn(2))

        def forward(self, x: Tensor) -> Tensor:
            return torch.relu(self.module(x)) @ self.weight.T + self.bias

    torch.manual_seed(0)
    model, x = Odd(), torch.randn(5, 3)
    graph, twin = ps.trace(model, x), copy.deepcopy(model)
    optimizer = GSGD(twin.named_parameters(), lr=0.1, skeleton=graph.skeleton())
    assert all(optimizer.weights[name] is p for name, p in twin.named_parameters())


def _with_a_tiny_weight(seed: int) -> tuple[nn.Module, Tensor, Tensor, ps.Skeleton]:
    """A network with a weight of 1e-4 that is on both trees of the default rule."""
    torch.manual_seed(seed)
    layers = nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3)
    model, x, y = (
        nn.Sequential(*layers).double(),
        torch.randn(64, 6).double(),
        torch.randint(0, 3, (64,)),
    )
    skeleton = ps.trace(model, x).skeleton()
    trees = [
        set(zip(tree.block.tolist(), tree.index.tolist(), strict=True)) for tree in _trees(skeleton)
    ]
    block, index = min(pair for pair in trees[0] & trees[1] if pair[0] >= 0)
    with torch.no_grad():
        model.get_parameter(skeleton.graph.blocks[block].name).view(-1)[index] = 1e-4
    return model, x, y, ps.trace(model, x).skeleton()


def _trees(skeleton: ps.Skeleton) -> tuple[Any, Any]:
    return skeleton.tree_in, skeleton.tree_out


@pytest.mark.parametrize("kind", [GSGD, GAdam])
@pytest.mark.parametrize("seed", range(3))
def test_a_tiny_weight_on_both_trees_does_not_undo_the_bound(seed: int, kind: type[Any]) -> None:
    model, x, y, skeleton = _with_a_tiny_weight(seed)
    rate = 0.1 if kind is GSGD else 0.01
    optimizer = kind(model.named_parameters(), lr=rate, skeleton=skeleton, max_multiplier=1.0)
    losses = descend(optimizer, lambda: F.cross_entropy(model(x), y), 5)
    assert losses == sorted(losses, reverse=True)


@pytest.mark.parametrize("kind", [GSGD, GAdam])
def test_a_rescaling_in_mid_run_does_not_move_the_bound(kind: type[Any]) -> None:
    runs = []
    for rescaled in (False, True):
        model, x, y, skeleton = _with_a_tiny_weight(0)
        optimizer = kind(model.named_parameters(), lr=0.01, skeleton=skeleton, max_multiplier=0.7)
        losses = []
        for step in range(12):
            if rescaled and step in (3, 8):
                graph = skeleton.graph
                ps.rescale_(
                    model, graph, torch.linspace(-2, 2, graph.num_units).double() * (step - 5)
                )
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        runs.append(losses)
    assert runs[1] == pytest.approx(runs[0], rel=1e-9)
