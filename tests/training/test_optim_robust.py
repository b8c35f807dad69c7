"""What happens to optimizers on path values in the course of a life: frozen layers, late groups,
weights that others write, memory that is laid out again, names that wrappers change.
"""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases import mlp, network
from descent import descend
from torch import Tensor, nn, optim
from training_pairs import MEMBERS, Problem, largest_difference

import pathspace as ps
from pathspace import InputError, UnsupportedError
from pathspace.training import GSGD, GAdam, GaugeFixed, PathSpace, init_skeleton_
from tests.training.test_gsgd_oracle import NETWORKS

PATHWISE = {name: MEMBERS[name] for name in ("gsgd", "momentum", "cap_decay_momentum", "gadam")}
pathwise = pytest.mark.parametrize("make", PATHWISE.values(), ids=PATHWISE)
kinds = pytest.mark.parametrize("kind", [GSGD, GAdam])
X = torch.randn(16, 4, generator=torch.Generator().manual_seed(9), dtype=torch.float64)


def net(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return mlp(4, 6, 5, 2).double()


def skeleton_of(model: nn.Module, x: Tensor = X) -> ps.Skeleton:
    return ps.trace(model, x).skeleton()


def step(model: nn.Module, optimizer: optim.Optimizer, x: Tensor = X, steps: int = 1) -> float:
    return descend(optimizer, lambda: (model(x) - 1).square().mean(), steps)[-1]


def equal(one: nn.Module, other: nn.Module) -> bool:
    return all(map(torch.equal, one.parameters(), other.parameters()))


# --- frozen weights


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("which", ["first", "last", "every other"])
def test_frozen_weights_stay_and_the_rest_descends(name: str, which: str) -> None:
    """Path values move along their gradient, except those that a frozen
    weight would have to follow.
    """
    case = Problem(name)
    model, problem = case.model, case.oracle()
    optimizer = GSGD(model.named_parameters(), lr=1e-4, skeleton=case.skeleton(model))
    names = [key for key, _ in model.named_parameters()]
    frozen = {"first": names[:1], "last": names[-1:], "every other": names[::2]}[which]
    if len(frozen) == len(names):
        return
    for key in frozen:
        model.get_parameter(key).requires_grad_(False)
    start = {key: p.detach().clone() for key, p in model.named_parameters()}
    vector = problem.vector(start)
    fixed = vector[torch.from_numpy(problem.fixed)]
    values = problem.path_values(vector).requires_grad_()
    everything = start | problem.tensors(problem.weights(values, fixed), start)
    (gradient,) = torch.autograd.grad(case.loss(model, everything), values)
    follow = np.array([problem.slots[edge][0] in frozen for edge in problem.free], bool)
    held = torch.from_numpy((problem.inverse[follow] != 0).any(0))
    moved = (values - 1e-4 * gradient * ~held).detach()
    wanted = problem.tensors(problem.weights(moved, fixed), start)
    case.loss(model).backward()
    optimizer.step()
    for key in frozen:
        assert torch.equal(model.get_parameter(key), start[key]), key
    for key in wanted.keys() & optimizer.skeleton.graph.index.keys():
        found = model.get_parameter(key).detach()
        torch.testing.assert_close(found, wanted[key], rtol=1e-9, atol=1e-12)


@pathwise
def test_a_frozen_body_stays_whatever_is_remembered(make: Callable[..., Any]) -> None:
    """Momentum, moments and decay would move it; a head outside path space trains on."""
    body, head = net(), nn.Linear(2, 3).double()
    both = nn.Sequential(body, head)
    optimizer = make(body, skeleton_of(body), weight_decay=0.1, lr=1e-3)
    group = {"params": [(f"head.{key}", p) for key, p in head.named_parameters()], "lr": 1e-2}
    optimizer.add_param_group(group)
    step(both, optimizer, steps=3)
    body.requires_grad_(False)
    before = copy.deepcopy(both)
    step(both, optimizer, steps=3)
    assert equal(body, before[0]) and largest_difference(head, before[1]) > 1e-4
    body.requires_grad_(True)
    assert step(both, optimizer, steps=20) < step(before, optim.SGD(before[1].parameters(), lr=0))


@pathwise
def test_layers_without_gradients_rest_as_by_torch(make: Callable[..., Any]) -> None:
    """A linear map from inputs to outputs, which a step leaves out, keeps its weights and
    moments, with decay and momentum, too.
    """

    def forward(model: Any, x: Tensor, beside: bool = True) -> Tensor:
        return model.net(x) + model.beside(x) if beside else model.net(x)

    model = network(forward, net=net(), beside=nn.Linear(4, 2).double())
    optimizer = make(model, skeleton_of(model), weight_decay=0.1)
    step(model, optimizer, steps=2)
    before = copy.deepcopy(dict(model.named_parameters()))
    optimizer.zero_grad()
    model(X, beside=False).square().mean().backward()
    optimizer.step()
    for name, p in model.named_parameters():
        assert torch.equal(p, before[name]) == name.startswith("beside"), name


@kinds
def test_a_list_of_what_is_trained_is_the_whole_list_with_the_rest_frozen(kind: type[Any]) -> None:
    first = net()
    first[0].requires_grad_(False)
    second = copy.deepcopy(first)
    trained = [(name, p) for name, p in first.named_parameters() if p.requires_grad]
    optimizers = [
        kind(params, lr=1e-3, weight_decay=0.1, skeleton=skeleton_of(model), max_multiplier=1.0)
        for model, params in ((first, trained), (second, list(second.named_parameters())))
    ]
    for turn in range(6):
        for model, optimizer in zip((first, second), optimizers, strict=True):
            step(model, optimizer)
            if turn == 2:
                # a state and a pickle know what was not given, too
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        assert largest_difference(first, second) < 1e-12
    assert len(optimizers[0].param_groups[0]["params"]) == len(trained)
    assert torch.equal(first[0].weight, net()[0].weight)
    again = pickle.loads(pickle.dumps(optimizers[0]))
    assert set(again.weights) == set(optimizers[1].weights)


def test_weights_that_are_not_given_stay_though_they_ask_for_gradients() -> None:
    model, x = mlp(4, 8, 2), torch.randn(16, 4)
    skeleton = skeleton_of(model, x)
    init_skeleton_(model, skeleton)
    start = copy.deepcopy(model)
    optimizer = GSGD(model[2].named_parameters(), lr=0.01, skeleton=skeleton)
    model(x).square().sum().backward()
    gradient = model[0].weight.grad.clone()
    optimizer.clip_path_grad_norm_(1e-3)
    optimizer.step()
    assert torch.equal(model[0].weight, start[0].weight)
    assert torch.equal(gradient, model[0].weight.grad)
    assert not torch.equal(model[2].weight, start[2].weight)
    # of a copy nobody knows where the rest is
    twin = copy.deepcopy(model)
    with pytest.raises(ps.PathspaceError, match="found no parameter for 2 blocks"):
        named = [(f"2.{name}", p) for name, p in twin[2].named_parameters()]
        GSGD(named, lr=0.01, skeleton=skeleton)


# --- groups and names


@pytest.mark.parametrize("member", PATHWISE)
def test_layers_that_are_released_late_move_in_path_space(member: str) -> None:
    """As in gradual unfreezing: rescaled copies take the same steps before and after."""
    outputs = []
    for phi in (0.0, 1.0):
        model = net()
        graph = ps.trace(model, X)
        init_skeleton_(model, graph.skeleton())
        ps.rescale_(model, graph, phi * torch.linspace(-1, 1, graph.num_units).double())
        start = model[0].weight.clone()
        optimizer = MEMBERS[member](model[4], graph.skeleton(), lr=1e-3)
        for layer in (2, 0):
            step(model, optimizer, steps=3)
            optimizer.add_param_group({"params": list(model[layer].named_parameters())})
        step(model, optimizer, steps=3)
        assert not torch.equal(start, model[0].weight)
        outputs.append(model(X).detach())
    torch.testing.assert_close(*outputs, rtol=1e-9, atol=1e-10)


@pathwise
def test_a_refused_group_leaves_no_trace(make: Callable[..., Any]) -> None:
    model = net()
    optimizer = copy.deepcopy(make(model, skeleton_of(model)))
    with pytest.raises(UnsupportedError, match="complex"):
        odd = nn.Parameter(torch.ones(2, dtype=torch.cfloat))
        optimizer.add_param_group({"params": [("c", odd)]})
    with pytest.raises(InputError, match="lr=-1"):
        optimizer.add_param_group({"params": [("d", nn.Parameter(torch.ones(2)))], "lr": -1})
    optimizer.add_param_group({"params": [("e", nn.Parameter(torch.ones(2)))]})
    assert len(optimizer.param_groups) == 2


def test_one_parameter_twice_is_refused() -> None:
    model = net()
    skeleton, twin = skeleton_of(model), list(copy.deepcopy(model).named_parameters())
    with (
        pytest.raises(InputError, match=r"two parameters for '0\.weight'"),
        pytest.warns(UserWarning, match="duplicate"),
    ):
        GSGD([*twin, twin[0]], lr=0.1, skeleton=skeleton)


@pytest.mark.parametrize("prefix", ["module.", "module._orig_mod."])
@pytest.mark.parametrize("kind", [GSGD, GAdam, GaugeFixed])
def test_prefixes_of_wrappers_are_no_part_of_names(kind: type[Any], prefix: str) -> None:
    model = net()
    graph = ps.trace(model, X)
    ends = []
    for before in ("", prefix):
        twin = copy.deepcopy(model)
        named = [(before + name, p) for name, p in twin.named_parameters()]
        if kind is GaugeFixed:
            optimizer: optim.Optimizer = GaugeFixed(optim.AdamW(named, lr=0.01), graph)
        else:
            optimizer = kind(named, lr=0.01, skeleton=graph.skeleton())
        step(twin, optimizer)
        ends.append(twin)
    assert largest_difference(ends[0], model) > 0
    assert largest_difference(ends[0], ends[1]) == 0


# --- weights that other code writes


@pathwise
def test_weights_changed_by_others_are_noticed(make: Callable[..., Any]) -> None:
    model = net()
    optimizer = make(model, skeleton_of(model))
    step(model, optimizer, steps=3)
    for p in model.parameters():
        p.data.mul_(0.5)
    changed = copy.deepcopy(model)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    step(model, optimizer)
    assert largest_difference(model, changed) < 1e-14


def test_a_weight_of_zero_on_a_tree_is_refused_before_anything_changes() -> None:
    model = net()
    optimizer = GSGD(model.named_parameters(), lr=1e-3, skeleton=skeleton_of(model))
    step(model, optimizer)
    model[0].weight.data.zero_()
    before = copy.deepcopy(model)
    with pytest.raises(UnsupportedError, match="found a skeleton weight of 0"):
        step(model, optimizer)
    assert equal(model, before)


# --- memory


@pathwise
@pytest.mark.parametrize("when", ["before", "midway", "loaded"])
def test_weights_that_are_laid_out_otherwise_take_the_same_steps(
    make: Callable[..., Any], when: str
) -> None:
    layers = nn.Conv2d(4, 6, 3, groups=2), nn.ReLU(), nn.ConvTranspose2d(6, 4, 3), nn.ReLU()
    model = nn.Sequential(*layers, nn.Conv2d(4, 2, 3)).double()
    x, twin = torch.randn(2, 4, 6, 6).double(), copy.deepcopy(model)
    last = {"memory_format": torch.channels_last}
    if when == "before":
        twin.to(**last)
    optimizer, other = (make(m, skeleton_of(m, x)) for m in (model, twin))
    for m, by in ((model, optimizer), (twin, other)):
        step(m, by, x, 2)
    if when == "midway":
        twin.to(**last)
    elif when == "loaded":
        twin = copy.deepcopy(twin).to(**last)
        state = copy.deepcopy(other.state_dict())
        other = make(twin, skeleton_of(twin, x))
        other.load_state_dict(state)
    for m, by in ((model, optimizer), (twin, other)):
        step(m, by, x, 4)
    assert largest_difference(twin, model) < 1e-10


@pytest.mark.parametrize("inner", [optim.SGD, optim.Adagrad, optim.AdamW])
@pytest.mark.parametrize("what", ["weights", "gradients"])
def test_fused_kernels_get_no_strides(inner: Callable[..., Any], what: str) -> None:
    """Those of torch on a processor give wrong results for them, and say nothing."""
    ends = []
    for fused in (False, True):
        model = net()
        weight = model[0].weight
        if what == "weights":
            weight.data = weight.data.t().contiguous().t()
        optimizer = PathSpace(inner(model.parameters(), lr=0.01, fused=fused), skeleton_of(model))
        for _ in range(2):
            (model(X) - 1).square().mean().backward()
            if what == "gradients":
                weight.grad = weight.grad.t().contiguous().t()
            optimizer.step()
            optimizer.zero_grad()
        ends.append(model)
    assert largest_difference(*ends) < 1e-12


def test_gadam_is_fused_on_a_processor_by_default() -> None:
    model = net()
    named, skeleton = list(model.named_parameters()), skeleton_of(model)
    settings = {"by default": {}, "asked": {"fused": False}, "in turns": {"foreach": False}}
    made = {how: GAdam(named, skeleton=skeleton, **given) for how, given in settings.items()}
    found = {how: optimizer.param_groups[0]["fused"] for how, optimizer in made.items()}
    assert found == {"by default": True, "asked": False, "in turns": None}


@pathwise
def test_a_model_may_change_its_type(make: Callable[..., Any]) -> None:
    model = net().float()
    optimizer = make(model, skeleton_of(model, X.float()), lr=1e-3)
    first = step(model, optimizer, X.float())
    assert step(model.double(), optimizer, steps=3) < first


# --- the shell, and masks in a file


def test_a_step_of_the_optimizer_inside_warns_until_it_is_unwrapped() -> None:
    model = net()
    inner, graph = optim.SGD(model.parameters(), lr=0.01), ps.trace(model, X)
    makers: dict[str, Callable[[], Any]] = {
        "PathSpace": lambda: PathSpace(inner, graph.skeleton(), max_multiplier=1.0),
        "GaugeFixed": lambda: GaugeFixed(inner, graph),
    }
    for name, make in makers.items():
        wrapped = make()
        with pytest.warns(UserWarning, match=f"{name} found a step of its inner SGD"):
            step(model, inner)
        assert wrapped.unwrap() is inner
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            step(model, inner)
        with pytest.raises(InputError, match="step after unwrap"):
            step(model, wrapped)


def test_masks_from_a_file_make_the_optimizer_that_wrote_them(tmp_path: Path) -> None:
    model, path = net(), tmp_path / "masks.safetensors"
    skeleton = ps.trace(model, X).skeleton("random", seed=4)
    ps.save_masks(skeleton, path)
    masks, twin = ps.load_masks(path), copy.deepcopy(model)
    for one, trees in ((model, skeleton), (twin, masks.skeleton(ps.trace(model, X)))):
        step(one, MEMBERS["cap"](one, trees), steps=3)
    assert equal(model, twin)
    for mask in masks.incoming.values():
        mask.zero_()
    with pytest.raises(InputError, match="reach 0 of 11 units"):
        masks.skeleton(ps.trace(model, X))


@pathwise
def test_path_values_of_a_frozen_weight_wait_with_what_is_remembered(
    make: Callable[..., Any],
) -> None:
    model = net()
    init_skeleton_(model, skeleton_of(model))
    optimizer = make(model, skeleton_of(model), lr=1e-3)
    first = step(model, optimizer, steps=3)
    model[0].weight.requires_grad_(False)
    before = model[0].weight.clone()
    assert step(model, optimizer, steps=20) < first
    assert torch.equal(model[0].weight, before)


@kinds
def test_chains_have_the_settings_of_their_own_group(kind: type[Any]) -> None:
    """A path value goes down where its group minimises, whatever another
    group does with its own.
    """
    model = mlp(2, 1, 2, bias=False).double()
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([[1.0, 2.0]]))
        model[2].weight.copy_(torch.tensor([[1.0], [3.0]]))
    x = torch.ones(1, 2).double()
    skeleton, ends = skeleton_of(model, x), []
    for other in ({}, {"maximize": True}):
        twin = copy.deepcopy(model)
        groups = [
            {"params": [("0.weight", twin[0].weight)]},
            {"params": [("2.weight", twin[2].weight)], **other},
        ]
        optimizer = kind(groups, lr=0.01, skeleton=skeleton)
        twin(x).square().sum().backward()
        optimizer.step()
        ends.append(float((twin[0].weight[0, 0] * twin[2].weight[0, 0]).detach()))
    assert ends[0] == pytest.approx(ends[1], rel=1e-14)


@pathwise
def test_weights_with_gaps_in_memory_take_the_same_steps(make: Callable[..., Any]) -> None:
    model = net()
    twin, wide = copy.deepcopy(model), torch.zeros(12, 8, dtype=torch.float64)
    wide[::2, ::2] = model[0].weight.detach()
    twin[0].weight = nn.Parameter(wide[::2, ::2])
    for m in (model, twin):
        step(m, make(m, skeleton_of(m)), steps=4)
    assert largest_difference(twin, model) < 1e-12
