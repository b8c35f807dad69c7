"""Torch's conventions for optimizers: calls, hooks, schedulers, groups, states, copies."""

from __future__ import annotations

import copy
import io
import math
import pickle
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import mlp
from descent import descend
from torch import Tensor, nn, optim
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.optim import lr_scheduler
from training_pairs import MEMBERS, Problem, largest_difference

import pathspace as ps
from pathspace import InputError, UnsupportedError
from pathspace.training import GaugeFixed, PathSGD, PathSpace
from pathspace.training.optim.shell import Shell

Make = Callable[..., Any]


def two(model: nn.Module, skeleton: ps.Skeleton, **more: Any) -> PathSpace:
    first, *rest = model.named_parameters()
    settings = {"lr": 1e-3, **more}
    return PathSpace([optim.SGD([first], **settings), optim.Adam(rest, **settings)], skeleton)


def path_sgd(model: nn.Module, skeleton: ps.Skeleton, **more: Any) -> PathSGD:
    settings = {"lr": 0.01, "every": 2, "model": model, "example": torch.ones(1, 3, 2).double()}
    return PathSGD(model.named_parameters(), **{**settings, **more})


def gauge_fixed(
    model: nn.Module, skeleton: ps.Skeleton, return_to: Any = "canonical", **more: Any
) -> GaugeFixed:
    inner = optim.AdamW(model.named_parameters(), **{"lr": 0.01, **more})
    return GaugeFixed(inner, skeleton.graph, model=model, return_to=return_to)


users_gauge = partial(gauge_fixed, return_to="user")


PATHWISE = {name: MEMBERS[name] for name in ("gsgd", "momentum", "gadam", "gadam_cap")}
EVERY: dict[str, Make] = {
    **PATHWISE, "two": two, "path_sgd": path_sgd, "gauge_fixed": gauge_fixed,
    "users_gauge": users_gauge,
}  # fmt: skip
every = pytest.mark.parametrize("make", EVERY.values(), ids=EVERY)
pathwise = pytest.mark.parametrize("make", PATHWISE.values(), ids=PATHWISE)


def fresh(name: str = "rnn_op") -> tuple[Problem, nn.Module, ps.Skeleton]:
    case = Problem(name, unit=True)
    return case, case.model, case.skeleton(case.model)


def drawn(model: nn.Module) -> nn.Module:
    """Other weights, the same each time."""
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=p.dtype))
    return model


def equal(one: nn.Module, other: nn.Module) -> bool:
    return all(map(torch.equal, one.parameters(), other.parameters()))


# --- calls


@pytest.mark.sampled(3)
@every
@pytest.mark.parametrize("climbs", [False, True])
def test_the_loss_falls_or_is_maximised(make: Make, climbs: bool) -> None:
    case, model, skeleton = fresh()
    more = {"maximize": True, "lr": 1e-4} if climbs else {}
    losses = case.train(model, lambda m: make(m, skeleton, **more), 20)
    assert losses[-1] > losses[0] if climbs else losses[-1] < losses[0]


@pytest.mark.sampled(3)
@every
def test_tensor_lr_is_the_same_as_a_number(make: Make) -> None:
    case, model, skeleton = fresh()
    twin = copy.deepcopy(model)
    case.train(model, lambda m: make(m, skeleton, lr=0.004), 5)
    case.train(twin, lambda m: make(m, skeleton, lr=torch.tensor(0.004, dtype=torch.float64)), 5)
    assert largest_difference(model, twin) < 1e-12


@pytest.mark.sampled(3)
@every
@pytest.mark.parametrize("gradients", ["zero", "none"])
def test_no_gradient_or_no_learning_rate_leaves_the_weights_alone(
    make: Make, gradients: str
) -> None:
    case, model, skeleton = fresh()
    optimizer = make(model, skeleton, lr=0.0)
    before = copy.deepcopy(model)
    for parameter in model.parameters():
        parameter.grad = None if gradients == "none" else torch.zeros_like(parameter)
    optimizer.step()
    if gradients == "zero":
        case.step(model, optimizer)
    if make is gauge_fixed or make is users_gauge:
        assert largest_difference(model, before) < 1e-12
    else:
        assert equal(model, before)


@every
def test_a_closure_is_called_with_gradients_enabled(make: Make) -> None:
    case, model, skeleton = fresh()
    optimizer = make(model, skeleton)
    seen = []

    def closure() -> Tensor:
        optimizer.zero_grad()
        value = case.loss(model)
        value.backward()
        seen.append(torch.is_grad_enabled())
        return value

    with torch.no_grad():
        result = optimizer.step(closure)
    assert seen == [True]
    assert result.item() > case.loss(model).item()


@every
def test_hooks_run_once_around_every_step(make: Make) -> None:
    case, model, skeleton = fresh()
    optimizer = make(model, skeleton)
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    optimizer.register_state_dict_pre_hook(lambda _: calls.append("save"))
    optimizer.register_load_state_dict_post_hook(lambda _: calls.append("load"))
    case.step(model, optimizer)
    optimizer.load_state_dict(optimizer.state_dict())
    assert calls == ["before", "after", "save", "load"]


SCHEDULERS: dict[str, Callable[[optim.Optimizer], Any]] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda e: 0.9**e),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.01, total_steps=8, cycle_momentum=False),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o, 0.5, 2), lr_scheduler.ExponentialLR(o, 0.9)], [2]
    ),
}


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("make", [MEMBERS["gsgd"], gauge_fixed], ids=["gsgd", "gauge_fixed"])
def test_schedulers_drive_it(make: Make, name: str) -> None:
    """The rates are those SGD gets, and the step obeys them."""
    case, model, skeleton = fresh()
    twin = copy.deepcopy(model)
    optimizer, fixed = make(model, skeleton, lr=0.01), make(twin, skeleton, lr=0.01)
    plain = optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.01)
    schedulers, rates = [SCHEDULERS[name](one) for one in (optimizer, plain)], []
    for _ in range(4):
        rates.append(optimizer.param_groups[0]["lr"])
        assert rates[-1] == plain.param_groups[0]["lr"]
        fixed.param_groups[0]["lr"] = rates[-1]
        case.step(model, optimizer)
        case.step(twin, fixed)
        plain.step()
        for scheduler in schedulers:
            scheduler.step(*([1.0] if name == "ReduceLROnPlateau" else []))
    assert len(set(rates)) > 1
    assert equal(model, twin)


def test_schedulers_of_several_optimizers_cycle_only_what_all_have() -> None:
    """A scheduler of torch looks into ``defaults`` once, and then into every group."""
    model = mlp(4, 6, 2)
    matrices, biases = ([p for p in model.parameters() if p.ndim == dims] for dims in (2, 1))
    pair = [optim.Muon(matrices, lr=0.01), optim.AdamW(biases, lr=0.01)]
    optimizer = GaugeFixed(pair, ps.trace(model, torch.randn(8, 4)))
    with pytest.raises(ValueError, match="must support momentum or beta1"):
        lr_scheduler.OneCycleLR(optimizer, 0.02, total_steps=8)
    before = [group["lr"] for group in optimizer.param_groups]
    lr_scheduler.OneCycleLR(optimizer, 0.02, total_steps=8, cycle_momentum=False)
    assert {group["lr"] for group in optimizer.param_groups}.isdisjoint(before)


@pytest.mark.parametrize(("member", "key"), [("momentum", "momentum"), ("gadam", "betas")])
def test_momentum_and_betas_can_be_cycled(member: str, key: str) -> None:
    _, model, skeleton = fresh()
    optimizer = PATHWISE[member](model, skeleton)
    before = optimizer.param_groups[0][key]
    lr_scheduler.OneCycleLR(optimizer, 0.01, total_steps=8)
    assert optimizer.param_groups[0][key] != before


@every
def test_a_gradient_scaler_skips_steps_with_infinite_gradients(make: Make) -> None:
    case, model, skeleton = fresh()
    twin = copy.deepcopy(model)
    optimizer, plain = make(model, skeleton), make(twin, skeleton)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for step in range(3):
        optimizer.zero_grad()
        scaler.scale(case.loss(model)).backward()
        if step == 1:
            next(model.parameters()).grad[0] = math.inf
        scaler.step(optimizer)
        scaler.update()
        if step != 1:
            case.step(twin, plain)
    assert largest_difference(model, twin) < 1e-12


@pathwise
@pytest.mark.parametrize("kind", ["sparse", "complex"])
def test_sparse_and_complex_gradients_are_refused(make: Make, kind: str) -> None:
    case, model, skeleton = fresh()
    optimizer = make(model, skeleton)
    case.loss(model).backward()

    zeros = torch.zeros(1, dtype=torch.complex64 if kind == "complex" else None)
    zeros.requires_grad_().grad = zeros.detach().to_sparse() if kind == "sparse" else zeros.detach()
    optimizer.space.entries[0].parameter = zeros
    with pytest.raises(UnsupportedError, match="sparse or complex gradient"):
        optimizer.step()


@pytest.mark.parametrize("member", [*PATHWISE, "users_gauge"])
def test_the_gradients_stay_those_of_the_weights(member: str) -> None:
    case, model, skeleton = fresh("conv_gap")
    optimizer = EVERY[member](model, skeleton)
    case.loss(model).backward()
    before = [p.grad.clone() for p in model.parameters()]
    optimizer.step()
    allowed = 1e-12 if member == "users_gauge" else 0.0
    for p, gradient in zip(model.parameters(), before, strict=True):
        torch.testing.assert_close(p.grad, gradient, rtol=allowed, atol=0)


# --- groups


@pathwise
def test_groups_have_settings_of_their_own(make: Make) -> None:
    case, model, skeleton = fresh()
    twin, named = copy.deepcopy(model), list(model.named_parameters())
    whole = make(twin, skeleton)
    # (torch's AdamW has one more default than its constructor takes)
    settings = {k: v for k, v in whole.defaults.items() if k != "decoupled_weight_decay"}
    grouped = type(whole)(
        [{"params": named[:2]}, {"params": named[2:]}], **settings, skeleton=skeleton,
        max_multiplier=whole.max_multiplier,
    )  # fmt: skip
    for _ in range(3):
        case.step(model, grouped)
        case.step(twin, whole)
    assert largest_difference(model, twin) < 1e-12
    grouped.param_groups[0]["lr"] = 0.0
    case.step(model, grouped)
    assert largest_difference(model, twin) > 1e-6


@pytest.mark.parametrize("member", ["gsgd", "momentum", "gadam"])
def test_parameters_outside_path_space_train_by_the_plain_rule(member: str) -> None:
    """With settings and steps of their own, and at rest without a gradient."""
    case, model, skeleton = fresh()
    optimizer = PATHWISE[member](model, skeleton)
    for _ in range(3):
        case.step(model, optimizer)
    extra, twin, alone = (nn.Parameter(torch.tensor([2.0, -1.0]).double()) for _ in range(3))
    more: dict[str, Any] = {"lr": 0.1, "weight_decay": 0.1}
    more |= {"betas": (0.5, 0.9)} if member == "gadam" else {"momentum": 0.8}
    optimizer.add_param_group({"params": [("extra", extra), ("alone", alone)], **more})
    kind = optim.AdamW if member == "gadam" else optim.SGD
    plain = kind([twin], **more)
    for _ in range(4):
        plain.zero_grad()
        twin.square().sum().backward()
        optimizer.zero_grad()
        extra.grad = twin.grad.clone()
        case.loss(model).backward()
        optimizer.step()
        plain.step()
    torch.testing.assert_close(extra, twin, rtol=1e-12, atol=0)
    assert torch.equal(alone, torch.tensor([2.0, -1.0]).double())


# --- states and copies


@pytest.fixture
def one_process() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.sampled(3)
@every
@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("way", ["model first", "optimizer first", "of torch.distributed"])
def test_killing_and_resuming_goes_on_bitwise(make: Make, way: str) -> None:
    """Wherever the other model has started."""
    case, model, skeleton = fresh()
    optimizer = make(model, skeleton)
    for _ in range(3):
        case.step(model, optimizer)
    other = drawn(copy.deepcopy(model))
    resumed, file = make(other, skeleton), io.BytesIO()
    if way == "of torch.distributed":
        torch.save(get_state_dict(model, optimizer), file)
    else:
        torch.save((model.state_dict(), optimizer.state_dict()), file)
    file.seek(0)
    weights, state = torch.load(file, weights_only=True)
    if way == "of torch.distributed":
        set_state_dict(other, resumed, model_state_dict=weights, optim_state_dict=state)
    else:
        loads = [lambda: other.load_state_dict(weights), lambda: resumed.load_state_dict(state)]
        for load in loads if way == "model first" else loads[::-1]:
            load()
    assert equal(model, other)
    for _ in range(3):
        case.step(model, optimizer)
        case.step(other, resumed)
    assert equal(model, other)


@pytest.mark.sampled(3)
@pathwise
@pytest.mark.parametrize("first", ["model", "optimizer"])
def test_a_state_brings_the_trees_that_its_rule_has_chosen(make: Make, first: str) -> None:
    """The rule 'magnitude' chooses other trees for trained weights, which trainers
    load before they choose.
    """
    case, model, _ = fresh()
    twin = copy.deepcopy(model)
    drawn(model)
    optimizer = make(model, ps.trace(model, *case.args).skeleton("magnitude"))
    for _ in range(3):
        case.step(model, optimizer)
    with torch.no_grad():
        # (as if trained for longer)
        for p in model.parameters():
            p.copy_(torch.randn_like(p))
    weights, state = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    if first == "model":
        twin.load_state_dict(weights)
    resumed = make(twin, ps.trace(twin, *case.args).skeleton("magnitude"))
    assert resumed.relative is False and resumed.max_multiplier == optimizer.max_multiplier
    assert resumed.fingerprint() != optimizer.fingerprint()
    resumed.load_state_dict(state)
    twin.load_state_dict(weights)
    assert resumed.fingerprint() == optimizer.fingerprint()
    for _ in range(3):
        case.step(model, optimizer)
        case.step(twin, resumed)
    assert equal(model, twin)


def joined(model: nn.Module, skeleton: ps.Skeleton) -> Shell:
    weights, biases = ([p for p in model.parameters() if p.dim() == dims] for dims in (2, 1))
    return Shell([optim.Muon(weights, lr=0.1), optim.AdamW(biases, lr=0.01)])


def changed(good: dict[str, Any], key: str, value: Callable[[Any], Any]) -> dict[str, Any]:
    """A state whose first part about path space is another one."""
    first = good["state"][0]
    part = {**first["path_space"], key: value(first["path_space"][key])}
    return {**good, "state": {**good["state"], 0: {**first, "path_space": part}}}


DAMAGED: dict[str, Callable[[dict[str, Any]], Any]] = {
    "nothing": lambda good: None,
    "without groups": lambda good: {"state": good["state"]},
    "no state": lambda good: {**good, "state": None},
}
PARTS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "a list of it": lambda good: changed(good, "least", lambda found: [1.0]),
    "a part of it": lambda good: changed(good, "least", lambda found: found[1:]),
    "without a fingerprint": lambda good: changed(good, "fingerprint", lambda found: None),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("member", "how"),
    [(member, how) for member in (*EVERY, "joined") for how in DAMAGED]
    + [(member, how) for member in PATHWISE for how in PARTS],
)
def test_damaged_states_are_refused_and_nothing_is_loaded(member: str, how: str) -> None:
    case, model, skeleton = fresh()
    optimizer = {**EVERY, "joined": joined}[member](model, skeleton)
    case.step(model, optimizer)
    good = optimizer.state_dict()
    before = copy.deepcopy(good)
    with pytest.raises(InputError, match=f"{type(optimizer).__name__} found a "):
        optimizer.load_state_dict({**DAMAGED, **PARTS}[how](good))
    assert str(optimizer.state_dict()) == str(before)
    optimizer.load_state_dict(good)


@pathwise
def test_a_state_of_another_skeleton_or_optimizer_is_refused(make: Make) -> None:
    case, model, skeleton = fresh()
    optimizer = make(model, skeleton)
    other = make(model, ps.trace(model, *case.args).skeleton("random", seed=1))
    foreign = PATHWISE["gsgd" if "gadam" in str(type(optimizer)).lower() else "gadam"]
    for state in (
        other.state_dict(),
        foreign(model, skeleton).state_dict(),
        optim.SGD(model.parameters()).state_dict(),
    ):
        with pytest.raises(InputError, match="another optimizer or skeleton"):
            optimizer.load_state_dict(state)


@pytest.mark.sampled(4)
@every
@pytest.mark.parametrize("way", ["deepcopy", "pickle"])
def test_copies_go_on_alone(make: Make, way: str) -> None:
    """A bound is that of the gauge at the start, which must come along."""
    case, model, _ = fresh()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(torch.linspace(0.5, 1.5, p.numel(), dtype=p.dtype).view_as(p))
    optimizer = make(model, case.skeleton(model))
    # a scheduler puts a step of its own in the place of the optimizer's, bound to this optimizer
    lr_scheduler.StepLR(optimizer, 100)
    for _ in range(5):
        case.step(model, optimizer)
    pair = (model, optimizer)
    twin, copied = copy.deepcopy(pair) if way == "deepcopy" else pickle.loads(pickle.dumps(pair))
    for _ in range(3):
        case.step(model, optimizer)
        case.step(twin, copied)
    assert equal(model, twin)


# --- parameters in another order, and in other groups

Named = list[tuple[str, nn.Parameter]]
X = torch.randn(16, 4, generator=torch.Generator().manual_seed(0)).double()


def square() -> nn.Sequential:
    """Its two inner layers have the same shapes."""
    torch.manual_seed(0)
    return mlp(4, 5, 5, 5, 3).double()


ORDERED: dict[str, Callable[[Any, nn.Module], Any]] = {
    "gsgd": lambda p, m: ps.training.GSGD(
        p, lr=1e-4, momentum=0.9, skeleton=ps.trace(m, X).skeleton(), max_multiplier=1.0
    ),
    "gadam": lambda p, m: ps.training.GAdam(
        p, lr=1e-4, skeleton=ps.trace(m, X).skeleton(), max_multiplier=1.0
    ),
    "path_sgd": lambda p, m: PathSGD(p, lr=1e-4, model=m, example=(X[:1],), every=10),
    "gauge_fixed": lambda p, m: GaugeFixed(optim.AdamW(p, lr=1e-4), ps.trace(m, X), model=m),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("groups", "words"),
    [
        ([[0, 1, 4, 5, 2, 3], [6, 7]], "parameter '2.weight' in place of '4.weight', expected"),
        ([[0, 1, 2, 3], [4, 5, 6, 7]], r"groups of \[6, 2\] parameters, expected \[4, 4\]"),
    ],
)
@pytest.mark.parametrize("kind", ORDERED)
def test_a_state_in_another_order_is_refused(
    kind: str, groups: list[list[int]], words: str
) -> None:
    """It would give the moments of one layer to another one of the same shape."""
    model, twin = square(), square()
    named, mine = list(model.named_parameters()), list(twin.named_parameters())
    optimizer = ORDERED[kind]([{"params": named[:6]}, {"params": named[6:]}], model)
    other = ORDERED[kind]([{"params": [mine[i] for i in group]} for group in groups], twin)
    descend(optimizer, lambda: model(X).square().mean(), 3)
    before = copy.deepcopy(other.state_dict())
    with pytest.raises(InputError, match=words):
        other.load_state_dict(optimizer.state_dict())
    assert str(other.state_dict()) == str(before)


def test_states_of_other_optimizers_are_refused_without_names() -> None:
    model, twin = square(), square()
    optimizer = ORDERED["gauge_fixed"](model.parameters(), model)
    descend(optimizer, lambda: model(X).square().mean())
    with pytest.raises(InputError, match=r"found a state with 'exp_avg' of shape \(5, 4"):
        other = ORDERED["gauge_fixed"](list(twin.parameters())[::-1], twin)
        other.load_state_dict(optimizer.state_dict())
    words = r"PathSGD found a state with '.*', expected 'kappa' and 'step'"
    for kind in (optim.Adam, optim.Adagrad):
        foreign = kind(model.parameters())
        descend(foreign, lambda: model(X).square().mean())
        with pytest.raises(InputError, match=words):
            ORDERED["path_sgd"](model.named_parameters(), model).load_state_dict(
                foreign.state_dict()
            )


@pathwise
def test_half_precision_follows_full_precision(make: Make) -> None:
    case, model, skeleton = fresh("mlp_2x3x5x2")
    model.float()
    case.args, case.target = tuple(a.float() for a in case.args), case.target.float()
    optimizer = make(model, skeleton, lr=1e-3)
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            value = case.loss(model)
        value.backward()
        optimizer.step()
        losses.append(value.item())
    assert losses[-1] < losses[0]
    assert all(p.dtype == torch.float32 and p.isfinite().all() for p in model.parameters())


def test_hooks_of_the_state_see_path_space() -> None:
    _, model, skeleton = fresh()
    optimizer = PATHWISE["gsgd"](model, skeleton)
    seen: list[bool] = []
    optimizer.register_state_dict_post_hook(
        lambda _, state: seen.append("path_space" in state["state"][0])
    )
    state = optimizer.state_dict()
    optimizer.register_load_state_dict_pre_hook(lambda _, found: {**found, "state": state["state"]})
    optimizer.load_state_dict({**state, "state": {}})
    assert seen == [True]
