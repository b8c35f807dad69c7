"""Torch's conventions for optimizers; the list follows torch's own tests of optimizers
(names in the docstrings).
"""

from __future__ import annotations

import copy
import io
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler
from training_pairs import Problem, largest_difference

import pathspace as ps
from pathspace import InputError, PathspaceError, UnsupportedError
from pathspace.training import GSGD, GAdam, GaugeFixed, PathSGD

Make = Callable[..., torch.optim.Optimizer]


def gsgd(case: Problem, model: nn.Module, **more: object) -> torch.optim.Optimizer:
    return GSGD(model.named_parameters(), **{"lr": 0.01, "skeleton": case.skeleton(model), **more})


def momentum(case: Problem, model: nn.Module, **more: object) -> torch.optim.Optimizer:
    return gsgd(case, model, **{"lr": 0.002, "momentum": 0.9, **more})


def gadam(case: Problem, model: nn.Module, **more: object) -> torch.optim.Optimizer:
    return GAdam(model.named_parameters(), **{"lr": 0.01, "skeleton": case.skeleton(model), **more})


def path_sgd(case: Problem, model: nn.Module, **more: object) -> torch.optim.Optimizer:
    example = tuple(a[:1] for a in case.args)
    return PathSGD(
        model.named_parameters(), **{"lr": 0.01, "model": model, "example": example, **more}
    )


PATHWISE = {"gsgd": gsgd, "momentum": momentum, "gadam": gadam}
MEMBERS: dict[str, Make] = {
    **PATHWISE,
    "path_sgd": path_sgd,
}
every = pytest.mark.parametrize("make", MEMBERS.values(), ids=MEMBERS)
pathwise = pytest.mark.parametrize("make", PATHWISE.values(), ids=PATHWISE)


def fresh(name: str = "rnn_op") -> tuple[Problem, nn.Module]:
    case = Problem(name, unit=True)
    return case, case.model


@every
def test_the_loss_falls(make: Make) -> None:
    """test_forloop_goes_right_direction, test_foreach_large_tensor's little sister."""
    case, model = fresh()
    losses = case.train(model, lambda m: make(case, m), 40)
    assert losses[-1] < losses[0]


@every
def test_maximize_climbs(make: Make) -> None:
    """test_forloop_goes_right_direction with maximize, test_rosenbrock with maximize."""
    case, model = fresh()
    losses = case.train(model, lambda m: make(case, m, maximize=True, lr=1e-4), 10)
    assert losses[-1] > losses[0]


@every
def test_tensor_lr_is_the_same_as_a_number(make: Make) -> None:
    """test_tensor_lr."""
    case, model = fresh()
    twin = copy.deepcopy(model)
    case.train(model, lambda m: make(case, m, lr=0.004), 5)
    case.train(twin, lambda m: make(case, m, lr=torch.tensor(0.004, dtype=torch.float64)), 5)
    assert largest_difference(model, twin) < 1e-12


@every
@pytest.mark.parametrize("gradients", ["zero", "none"])
def test_no_gradient_or_no_learning_rate_leaves_the_weights_alone(
    make: Make, gradients: str
) -> None:
    """test_param_groups_lr, test_step_is_noop_for_zero_grads,
    test_step_is_noop_when_params_have_no_grad.
    """
    case, model = fresh()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = make(case, model, lr=0.0)
    for parameter in model.parameters():
        parameter.grad = None if gradients == "none" else torch.zeros_like(parameter)
    optimizer.step()
    if gradients == "zero":
        case.step(model, optimizer)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


@every
def test_a_closure_is_called_with_gradients_enabled(make: Make) -> None:
    """test_step_post_hook's closure, test_closure."""
    case, model = fresh()
    optimizer = make(case, model)
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
    """test_step_pre_hook, test_step_post_hook, test_step_all_hooks, test_state_dict_*_hook."""
    case, model = fresh()
    torch.optim.SGD([nn.Parameter(torch.zeros(1))])
    optimizer = make(case, model)
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    optimizer.register_state_dict_pre_hook(lambda _: calls.append("save"))
    optimizer.register_load_state_dict_post_hook(lambda _: calls.append("load"))
    case.step(model, optimizer)
    optimizer.load_state_dict(optimizer.state_dict())
    assert calls == ["before", "after", "save", "load"]


@every
def test_killing_and_resuming_goes_on_bitwise(make: Make) -> None:
    """test_can_load_older_state_dict's purpose, test_state_dict_deterministic,
    test_load_nontensor_step.
    """
    case, model = fresh()
    optimizer = make(case, model)
    for _ in range(3):
        case.step(model, optimizer)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    for _ in range(3):
        case.step(model, optimizer)
    for first in ("model", "optimizer"):
        file.seek(0)
        saved = torch.load(file, weights_only=True)
        again, twin = fresh()
        resumed = make(again, twin)
        for part, holder in sorted(
            {"model": twin, "optimizer": resumed}.items(), key=lambda pair: pair[0] != first
        ):
            holder.load_state_dict(saved[part])
        for _ in range(3):
            again.step(twin, resumed)
        assert all(
            torch.equal(p, q) for p, q in zip(model.parameters(), twin.parameters(), strict=True)
        )


@pathwise
@pytest.mark.parametrize("first", ["model", "optimizer"])
def test_a_state_brings_the_trees_that_its_rule_has_chosen(make: Make, first: str) -> None:
    """The rule 'magnitude' chooses other trees for trained weights, which trainers
    load before they choose.
    """
    case, model = fresh()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn_like(p))
    optimizer = make(case, model, skeleton=ps.trace(model, *case.args).skeleton("magnitude"))
    for _ in range(3):
        case.step(model, optimizer)
    with torch.no_grad():
        # (as if trained for longer)
        for p in model.parameters():
            p.copy_(torch.randn_like(p))
    weights, state = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    again, twin = fresh()
    if first == "model":
        twin.load_state_dict(weights)
    resumed = make(again, twin, skeleton=ps.trace(twin, *again.args).skeleton("magnitude"))
    assert resumed.relative is False and resumed.max_multiplier is None
    assert resumed.fingerprint() != optimizer.fingerprint()
    kept = resumed.fingerprint(), resumed.space, copy.deepcopy(resumed.state_dict())
    damaged = copy.deepcopy(state)
    next(
        entry["path_space"] for entry in damaged["state"].values() if "least" in entry["path_space"]
    ).pop("counts")
    with pytest.raises(InputError, match="damaged"):
        resumed.load_state_dict(damaged)
    assert (resumed.fingerprint(), resumed.space) == kept[:2]
    resumed.load_state_dict(state)
    twin.load_state_dict(weights)
    assert resumed.fingerprint() == optimizer.fingerprint()
    for _ in range(3):
        case.step(model, optimizer)
        again.step(twin, resumed)
    assert all(
        torch.equal(p, q) for p, q in zip(model.parameters(), twin.parameters(), strict=True)
    )


@pathwise
def test_a_state_of_another_skeleton_or_optimizer_is_refused(make: Make) -> None:
    case, model = fresh()
    optimizer = make(case, model)
    other = make(case, model, skeleton=ps.trace(model, *case.args).skeleton("random", seed=1))
    for state in (other.state_dict(), torch.optim.SGD(model.parameters()).state_dict()):
        with pytest.raises(InputError, match="another optimizer or skeleton"):
            optimizer.load_state_dict(state)
    with pytest.raises(InputError, match="another optimizer or skeleton"):
        (gadam if make is not gadam else gsgd)(case, model).load_state_dict(optimizer.state_dict())


@pathwise
@pytest.mark.parametrize("cap", [None, 1.0])
@pytest.mark.parametrize("way", ["deepcopy", "pickle"])
def test_copies_go_on_alone(make: Make, way: str, cap: float | None) -> None:
    """test_deepcopy_copies_all_public_attrs, test_pickle."""
    # (from its own start: a bound is that of the gauge at the start, which must come along)
    case, model = fresh()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(
                torch.linspace(0.5, 1.5, parameter.numel(), dtype=parameter.dtype).view_as(
                    parameter
                )
            )
    optimizer = make(case, model, max_multiplier=cap)
    for _ in range(5):
        case.step(model, optimizer)
    pair = (model, optimizer)
    twin, copied = copy.deepcopy(pair) if way == "deepcopy" else pickle.loads(pickle.dumps(pair))
    for _ in range(3):
        case.step(model, optimizer)
        case.step(twin, copied)
    assert all(
        torch.equal(p, q) for p, q in zip(model.parameters(), twin.parameters(), strict=True)
    )
    assert copied.fingerprint() == optimizer.fingerprint()


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], object]] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda e: 0.9**e),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda e: 0.9),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [1, 3]),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, 0.5, 2),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, 0.5, total_iters=3),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 4),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 4),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.001, 0.01, 2, cycle_momentum=False),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.01, total_steps=8, cycle_momentum=False),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o, 0.5, 2), lr_scheduler.ExponentialLR(o, 0.9)], [2]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.5, 2), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_every_scheduler_drives_it(name: str) -> None:
    """test_lr_scheduler: the rates are those SGD gets, and the step obeys them."""
    case, model = fresh()
    optimizer = gsgd(case, model)
    plain = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.01)
    ours, theirs = SCHEDULERS[name](optimizer), SCHEDULERS[name](plain)
    twin, rates = copy.deepcopy(model), []
    fixed = gsgd(case, twin)
    for _ in range(4):
        rates.append(optimizer.param_groups[0]["lr"])
        assert rates[-1] == plain.param_groups[0]["lr"]
        fixed.param_groups[0]["lr"] = rates[-1]
        case.step(model, optimizer)
        case.step(twin, fixed)
        plain.step()
        for scheduler in (ours, theirs):
            scheduler.step(*([1.0] if name == "ReduceLROnPlateau" else []))  # type: ignore[attr-defined]
    assert len(set(rates)) > 1
    assert all(
        torch.equal(p, q) for p, q in zip(model.parameters(), twin.parameters(), strict=True)
    )


def test_momentum_and_betas_can_be_cycled() -> None:
    """test_onecycle_lr with momentum."""
    for make, key in ((momentum, "momentum"), (gadam, "betas")):
        case, model = fresh()
        optimizer = make(case, model)
        before = optimizer.param_groups[0][key]
        lr_scheduler.OneCycleLR(optimizer, 0.01, total_steps=8)
        assert optimizer.param_groups[0][key] != before


Optimizers = Callable[[Any, Any], list[torch.optim.Optimizer]]


@pytest.mark.parametrize(
    ("make", "key"),
    [
        (lambda a, b: [torch.optim.Muon(a, lr=0.01), torch.optim.AdamW(b, lr=0.01)], None),
        (lambda a, b: [torch.optim.AdamW(b, lr=0.01), torch.optim.Muon(a, lr=0.01)], None),
        (
            lambda a, b: [torch.optim.Muon(a, lr=0.01), torch.optim.SGD(b, lr=0.01, momentum=0.9)],
            "momentum",
        ),
        (lambda a, b: [torch.optim.NAdam(a, lr=0.01), torch.optim.AdamW(b, lr=0.01)], "betas"),
        (lambda a, b: [torch.optim.AdamW([*a, *b], lr=0.01)], "betas"),
    ],
)
@pytest.mark.parametrize("kind", ["OneCycleLR", "CyclicLR"])
def test_schedulers_of_several_optimizers_cycle_only_what_all_have(
    make: Optimizers, key: str | None, kind: str
) -> None:
    """A scheduler of torch looks into ``defaults`` once, and then into every group."""
    model, x = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2)), torch.randn(8, 4)
    weights = [
        [p for p in model.parameters() if (p.ndim > 1) is matrix] for matrix in (True, False)
    ]
    optimizer = GaugeFixed(make(*weights), ps.trace(model, x))
    settings = [set(group) for group in optimizer.param_groups]

    def scheduled(**options: bool) -> Any:
        if kind == "OneCycleLR":
            return lr_scheduler.OneCycleLR(optimizer, 0.02, total_steps=8, **options)
        return lr_scheduler.CyclicLR(optimizer, 0.01, 0.02, 2, **options)

    if key is None:
        with pytest.raises(ValueError, match="must support momentum or beta1"):
            scheduled()
    scheduler = scheduled() if key else scheduled(cycle_momentum=False)
    for _ in range(3):
        model(x).square().sum().backward()
        optimizer.step()
        before = [(group["lr"], group[key] if key else None) for group in optimizer.param_groups]
        scheduler.step()
        after = [(group["lr"], group[key] if key else None) for group in optimizer.param_groups]
        assert all(
            old[0] != new[0] and (key is None or old[1] != new[1])
            for old, new in zip(before, after, strict=True)
        )
    for held, group in zip(settings, optimizer.param_groups, strict=True):
        assert {"betas", "momentum"} & set(group) == {"betas", "momentum"} & held


@pathwise
def test_a_gradient_scaler_skips_steps_with_infinite_gradients(make: Make) -> None:
    """test_grad_scaling_autocast_fused_optimizers, on a processor."""
    case, model = fresh()
    twin = copy.deepcopy(model)
    optimizer, plain = make(case, model), make(case, twin)
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
def test_half_precision_follows_full_precision(make: Make) -> None:
    """test_mixed_device_dtype, autocast in bfloat16."""
    case = Problem("mlp_2x3x5x2", unit=True)
    case.model.float()
    case.args, case.target = tuple(a.float() for a in case.args), case.target.float()
    model = case.model
    optimizer = make(case, model, lr=1e-3)
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            value = case.loss(model)
        value.backward()
        optimizer.step()
        losses.append(value.item())
    assert losses[-1] < losses[0]
    assert all(
        p.dtype == torch.float32 and bool(torch.isfinite(p).all()) for p in model.parameters()
    )


@pathwise
def test_groups_have_settings_of_their_own(make: Make) -> None:
    """test_param_groups_weight_decay, test_param_groups_lr, test_add_param_group."""
    case, model = fresh()
    twin = copy.deepcopy(model)
    named = list(model.named_parameters())
    alike = [{"params": named[:2]}, {"params": named[2:]}]
    skeleton = case.skeleton(model)
    optimizer = make(case, model)
    grouped = type(optimizer)(
        alike, **{**settings(optimizer), "skeleton": skeleton, **amsless(optimizer)}
    )
    whole = make(case, twin)
    for _ in range(3):
        case.step(model, grouped)
        case.step(twin, whole)
    assert largest_difference(model, twin) < 1e-12
    grouped.param_groups[0]["lr"] = 0.0
    before = named[0][1].detach().clone()
    case.step(model, grouped)
    assert largest_difference(model, twin) > 1e-6
    frozen = skeleton.graph.index[named[0][0]]
    assert skeleton.graph.blocks[frozen].name == named[0][0]
    assert before.shape == named[0][1].shape


def amsless(optimizer: torch.optim.Optimizer) -> dict[str, object]:
    return {"min_ratio": optimizer.min_ratio}


def settings(optimizer: torch.optim.Optimizer) -> dict[str, object]:
    """The defaults that the constructors take (torch's AdamW has one more)."""
    return {k: v for k, v in optimizer.defaults.items() if k != "decoupled_weight_decay"}


@pathwise
def test_parameters_outside_path_space_train_by_the_plain_rule(make: Make) -> None:
    case, model = fresh()
    extra, twin = (
        nn.Parameter(torch.tensor([2.0, -1.0]).double()),
        nn.Parameter(torch.tensor([2.0, -1.0]).double()),
    )
    optimizer = make(case, model)
    optimizer.add_param_group({"params": [("extra", extra)], "lr": 0.1})
    plain: torch.optim.Optimizer = torch.optim.SGD(
        [twin], lr=0.1, momentum=0.9 if make is momentum else 0.0
    )
    if make is gadam:
        plain = torch.optim.Adam([twin], lr=0.1)
    for _ in range(4):
        for parameter in (extra, twin):
            parameter.grad = None
        for parameter in (extra, twin):
            parameter.square().sum().backward()
        optimizer.zero_grad(set_to_none=True)
        extra.grad = twin.grad.clone()
        case.loss(model).backward()
        optimizer.step()
        plain.step()
    torch.testing.assert_close(extra, twin, rtol=1e-12, atol=0)


@pathwise
@pytest.mark.parametrize("kind", ["sparse", "complex"])
def test_sparse_and_complex_gradients_are_refused(make: Make, kind: str) -> None:
    """test_sparse, test_complex."""
    case, model = fresh()
    optimizer = make(case, model)
    case.loss(model).backward()

    class Odd:
        is_sparse, is_complex_ = kind == "sparse", kind == "complex"

        def is_complex(self) -> bool:
            return self.is_complex_

    optimizer.space.entries[0].parameter = type("Holder", (), {"grad": Odd()})()
    with pytest.raises(UnsupportedError, match="sparse or complex gradient"):
        optimizer.step()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr": -1.0}, "lr=-1.0, expected a number of at least 0"),
        ({"lr": torch.ones(2)}, "lr=a Tensor, expected a number of at least 0"),
        ({"momentum": -0.1}, "momentum=-0.1"),
        ({"weight_decay": -0.1}, "weight_decay=-0.1"),
        ({"nesterov": True}, "nesterov=True, which needs momentum"),
        ({"max_multiplier": 0.0}, "max_multiplier=0.0"),
        ({"min_ratio": 2.0}, "min_ratio=2.0"),
        ({"differentiable": True}, "differentiable=True"),
        ({"skeleton": None}, "found a NoneType as its skeleton"),
    ],
)
def test_wrong_settings_are_refused_in_one_sentence(
    settings: dict[str, object], message: str
) -> None:
    """test_errors."""
    case, model = fresh()
    with pytest.raises(PathspaceError, match=message) as refused:
        gsgd(case, model, **settings)
    assert str(refused.value).count(". ") == 0


@pytest.mark.parametrize("settings", [{"lr": -1.0}, {"betas": (0.9, 1.0)}, {"eps": -1.0}])
def test_wrong_settings_of_adam_are_refused(settings: dict[str, object]) -> None:
    """test_errors."""
    case, model = fresh()
    with pytest.raises(InputError, match="GAdam found"):
        gadam(case, model, **settings)


@pathwise
def test_a_frozen_parameter_keeps_its_path_values(make: Make) -> None:
    """test_step_is_noop_when_params_have_no_grad, for one parameter of several."""
    case, model = fresh("mlp_2x3x5x2")
    next(model.parameters()).requires_grad_(False)
    losses = case.train(model, lambda m: make(case, m, lr=1e-3), 20)
    assert losses[-1] < losses[0]


@pathwise
def test_weights_changed_by_others_are_noticed(make: Make) -> None:
    case, model = fresh()
    optimizer = make(case, model, lr=0.0)
    case.step(model, optimizer)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.25)
    changed = copy.deepcopy(model)
    case.step(model, optimizer)
    assert largest_difference(model, changed) < 1e-14


@pathwise
@pytest.mark.parametrize("name", ["conv_gap", "residual_cnn"])
def test_channels_last_weights_take_the_same_steps(make: Make, name: str) -> None:
    """test_mixed memory formats."""
    case, model = fresh(name)
    twin = copy.deepcopy(model).to(memory_format=torch.channels_last)
    losses = [case.train(m, lambda m: make(case, m, lr=1e-3), 4) for m in (model, twin)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-10)
    assert largest_difference(twin, model) < 1e-9


def test_weights_that_multiply_from_the_right_take_the_same_step() -> None:
    """Their tails stand in rows, and those of linear layers in columns."""

    class Products(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Parameter(torch.randn(20, 30) / 4)
            self.second = nn.Parameter(torch.randn(30, 25) / 5)
            self.third = nn.Parameter(torch.randn(25, 3) / 5)

        def forward(self, x: Tensor) -> Tensor:
            return torch.relu(torch.relu(x @ self.first) @ self.second) @ self.third

    torch.manual_seed(0)
    model, x = Products().double(), torch.randn(8, 20, dtype=torch.float64)
    layers = [nn.Linear(*p.shape, bias=False).double() for p in model.parameters()]
    twin = nn.Sequential(layers[0], nn.ReLU(), layers[1], nn.ReLU(), layers[2])
    for one, other in zip(twin.parameters(), model.parameters(), strict=True):
        one.data = other.detach().t().clone()
    for one in (model, twin):
        skeleton = ps.trace(one, x).skeleton()
        optimizer = GSGD(one.parameters(), lr=0.01, skeleton=skeleton, max_multiplier=1.0)
        one(x).square().mean().backward()
        optimizer.step()
    for one, other in zip(twin.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(one.t(), other, rtol=1e-12, atol=1e-12)
