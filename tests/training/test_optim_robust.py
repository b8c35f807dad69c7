"""What happens to optimizers on path values in the course of a life: frozen layers, checkpoints,
late groups, small path values, memory that is laid out again.
"""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from descent import descend
from torch import Tensor, nn
from training_pairs import Problem, largest_difference

import pathspace as ps
from pathspace import InputError, PathspaceError, UnsupportedError
from pathspace.training import GSGD, GAdam, PathSGD, init_skeleton_
from tests.training.test_gsgd_oracle import NETWORKS

Make = Callable[..., torch.optim.Optimizer]


def gsgd(model: nn.Module, skeleton: ps.Skeleton, **more: Any) -> GSGD:
    return GSGD(model.named_parameters(), **{"lr": 1e-3, "skeleton": skeleton, **more})


def gadam(model: nn.Module, skeleton: ps.Skeleton, **more: Any) -> GAdam:
    return GAdam(model.named_parameters(), **{"lr": 1e-3, "skeleton": skeleton, **more})


MEMBERS: dict[str, Make] = {
    "gsgd": gsgd,
    "momentum": lambda m, s, **more: gsgd(m, s, momentum=0.9, **more),
    "cap": lambda m, s, **more: gsgd(m, s, max_multiplier=1.0, weight_decay=0.1, **more),
    "gadam": gadam,
}
members = pytest.mark.parametrize("member", MEMBERS)


def mlp(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    layers = [nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 2)]
    return nn.Sequential(*layers).double()


X = torch.randn(16, 4, generator=torch.Generator().manual_seed(9), dtype=torch.float64)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor = X) -> float:
    return descend(optimizer, lambda: (model(x) - 1).square().mean())[0]


# --- checkpoints


@members
@pytest.mark.parametrize("weights_first", [True, False])
def test_a_state_belongs_to_its_weights_wherever_the_model_started(
    member: str, weights_first: bool
) -> None:
    model = mlp(0)
    optimizer = MEMBERS[member](model, ps.trace(model, X).skeleton())
    step(model, optimizer)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    other = mlp(1)
    resumed = MEMBERS[member](other, ps.trace(other, X).skeleton())
    loads = [lambda: other.load_state_dict(saved[0]), lambda: resumed.load_state_dict(saved[1])]
    for load in loads if weights_first else loads[::-1]:
        load()
    for _ in range(4):
        assert step(model, optimizer) == step(other, resumed)
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two)


def test_damaged_states_are_refused_and_nothing_is_loaded() -> None:
    model = mlp()
    optimizer = gsgd(model, ps.trace(model, X).skeleton())
    step(model, optimizer)
    good, before = optimizer.state_dict(), copy.deepcopy(model)
    first = good["state"][0]
    inside = first["path_space"]

    def changed(**parts: object) -> dict[str, object]:
        return {**good, "state": {**good["state"], 0: {**first, **parts}}}

    damaged = (
        [],
        {},
        changed(path_space=None),
        {key: value for key, value in good.items() if key != "param_groups"},
        {key: value for key, value in good.items() if key != "state"},
        changed(path_space={**inside, "least": [1.0]}),
        changed(path_space={key: value for key, value in inside.items() if key != "fingerprint"}),
        changed(path_space={key: value for key, value in inside.items() if key != "counts"}),
        changed(path_space={**inside, "least": inside["least"][1:]}),
    )
    for bad in damaged:
        with pytest.raises(InputError, match="GSGD found a "):
            optimizer.load_state_dict(bad)  # type: ignore[arg-type]
    twin = copy.deepcopy(before)
    reference = gsgd(twin, ps.trace(twin, X).skeleton())
    reference.load_state_dict(good)
    assert step(model, optimizer) == step(twin, reference)


def test_hooks_of_the_state_see_path_space() -> None:
    model = mlp()
    optimizer = gsgd(model, ps.trace(model, X).skeleton())
    seen: list[bool] = []
    optimizer.register_state_dict_post_hook(
        lambda _, state: seen.append("path_space" in state["state"][0])
    )
    state = optimizer.state_dict()
    hidden = {**state, "state": {}}
    optimizer.register_load_state_dict_pre_hook(lambda _, found: {**found, "state": state["state"]})
    optimizer.load_state_dict(hidden)
    assert seen == [True]


# --- frozen weights


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("which", ["first", "last", "every other"])
def test_frozen_weights_stay_and_the_rest_descends(name: str, which: str) -> None:
    """Path values move along their gradient, except those that a frozen
    weight would have to follow.
    """
    case = Problem(name)
    model, problem = case.model, case.oracle()
    optimizer = gsgd(model, case.skeleton(model), lr=1e-4, weight_decay=0.0)
    names = [key for key, _ in model.named_parameters()]
    frozen = {"first": names[:1], "last": names[-1:], "every other": names[::2]}[which]
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
    wanted = problem.tensors(
        problem.weights((values - 1e-4 * gradient * ~held).detach(), fixed), start
    )
    if len(frozen) == len(names):
        return
    case.loss(model).backward()
    optimizer.step()
    for key in frozen:
        assert torch.equal(model.get_parameter(key), start[key]), key
    inside = {
        key: value
        for key, value in wanted.items()
        if key in {b.name for b in optimizer.skeleton.graph.blocks}
    }
    moved = {key: model.get_parameter(key).detach() for key in inside}
    for key in inside:
        torch.testing.assert_close(moved[key], inside[key], rtol=1e-9, atol=1e-12)


@members
def test_a_frozen_body_stays_whatever_is_remembered(member: str) -> None:
    """Momentum, moments and decay would move it; a head outside path space trains on."""
    body, head = mlp(), nn.Linear(2, 3).double()
    skeleton = ps.trace(body, X).skeleton()
    both = nn.Sequential(body, head)
    named = [*body.named_parameters(), *((f"head.{key}", p) for key, p in head.named_parameters())]
    kind = GAdam if member == "gadam" else GSGD
    more: dict[str, Any] = {"momentum": {"momentum": 0.9}, "cap": {"max_multiplier": 1.0}}.get(
        member, {}
    )
    optimizer = kind(named, lr=1e-2, weight_decay=0.1, skeleton=skeleton, **more)
    for _ in range(3):
        step(both, optimizer)
    body.requires_grad_(False)
    before, head_before = copy.deepcopy(body), copy.deepcopy(head)
    for _ in range(3):
        step(both, optimizer)
    for one, two in zip(body.parameters(), before.parameters(), strict=True):
        assert torch.equal(one, two)
    assert largest_difference(head, head_before) > 1e-4
    body.requires_grad_(True)
    losses = [step(both, optimizer) for _ in range(20)]
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("kind", [GSGD, GAdam])
def test_parameters_outside_without_a_gradient_do_not_decay(kind: type[GSGD]) -> None:
    model = mlp()
    alone = nn.Parameter(torch.ones(3).double())
    optimizer = kind(
        [*model.named_parameters(), ("alone", alone)],
        lr=0.01,
        weight_decay=0.5,
        skeleton=ps.trace(model, X).skeleton(),
    )
    step(model, optimizer)
    assert torch.equal(alone, torch.ones(3).double())


# --- groups


def test_modules_with_equal_names_are_told_apart() -> None:
    body, head = mlp(0), mlp(1)
    alone = copy.deepcopy(body)
    skeleton = ps.trace(body, X).skeleton()
    optimizer = GSGD(
        [{"params": body.named_parameters()}, {"params": head.named_parameters()}],
        lr=1e-3,
        skeleton=skeleton,
    )
    reference = gsgd(alone, skeleton)
    ((body(X) - 1).square().mean() + head(X).square().mean()).backward()
    optimizer.step()
    step(alone, reference)
    assert largest_difference(body, alone) < 1e-14
    gsgd(torch.compile(body), skeleton)  # type: ignore[arg-type]
    twin = list(copy.deepcopy(body).named_parameters())
    with (
        pytest.raises(InputError, match=r"two parameters for '0\.weight'"),
        pytest.warns(UserWarning, match="duplicate"),
    ):
        GSGD([*twin, twin[0]], lr=0.1, skeleton=skeleton)


@pytest.mark.parametrize("kind", [GSGD, GAdam])
def test_chains_have_the_settings_of_their_own_group(kind: type[GSGD]) -> None:
    """A path value goes down where its group minimises, whatever another
    group does with its own.
    """
    model = nn.Sequential(
        nn.Linear(2, 1, bias=False), nn.ReLU(), nn.Linear(1, 2, bias=False)
    ).double()
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([[1.0, 2.0]]))
        model[2].weight.copy_(torch.tensor([[1.0], [3.0]]))
    x = torch.ones(1, 2).double()
    skeleton, ends = ps.trace(model, x).skeleton(), []
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


def test_every_tensor_counts_its_own_steps() -> None:
    model = mlp()
    optimizer = gadam(model, ps.trace(model, X).skeleton())
    for _ in range(20):
        step(model, optimizer)
    late, twin = (nn.Parameter(torch.ones(2).double()) for _ in range(2))
    optimizer.add_param_group({"params": [("late", late)], "lr": 0.1, "betas": (0.5, 0.9)})
    reference = torch.optim.Adam([twin], lr=0.1, betas=(0.5, 0.9))
    for i in range(3):
        optimizer.zero_grad()
        late.grad, twin.grad = (
            torch.full((2,), 1.0 + i).double(),
            torch.full((2,), 1.0 + i).double(),
        )
        optimizer.step()
        reference.step()
    torch.testing.assert_close(late, twin, rtol=1e-12, atol=0)


@members
def test_layers_that_are_released_late_move_in_path_space(member: str) -> None:
    """As in gradual unfreezing: rescaled copies take the same steps before and after."""
    outputs = []
    for phi in (0.0, 1.0):
        model = mlp()
        graph = ps.trace(model, X)
        init_skeleton_(model, graph.skeleton())
        ps.rescale_(model, graph, phi * torch.linspace(-1, 1, graph.num_units).double())
        settings = {"weight_decay": 0.1} if member == "cap" else {}
        settings |= {"momentum": 0.9} if member == "momentum" else {}
        settings |= {"max_multiplier": 1.0} if member == "cap" else {}
        kind: Any = GAdam if member == "gadam" else GSGD
        optimizer = kind(model[4].parameters(), lr=1e-3, skeleton=graph.skeleton(), **settings)
        ends = [model[0].weight.clone()]
        for layer in (2, 0):
            for _ in range(3):
                step(model, optimizer)
            optimizer.add_param_group({"params": list(model[layer].parameters())})
        for _ in range(3):
            step(model, optimizer)
        assert not torch.equal(ends[0], model[0].weight)
        outputs.append(model(X).detach())
    torch.testing.assert_close(*outputs, rtol=1e-9, atol=1e-10)


@members
def test_layers_without_gradients_rest_as_by_torch(member: str) -> None:
    """A linear map from inputs to outputs, which a step leaves out, keeps its weights and
    moments, with decay and momentum, too.
    """

    class Beside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.beside = mlp(), nn.Linear(4, 2).double()

        def forward(self, x: Tensor, beside: bool = True) -> Tensor:
            return self.net(x) + self.beside(x) if beside else self.net(x)

    model = Beside()
    more = {"weight_decay": 0.1} if member != "cap" else {}
    optimizer = MEMBERS[member](model, ps.trace(model, X).skeleton(), **more)
    for _ in range(2):
        step(model, optimizer)
    before = copy.deepcopy(dict(model.named_parameters()))
    optimizer.zero_grad()
    model(X, beside=False).square().mean().backward()
    optimizer.step()
    for name, p in model.named_parameters():
        assert torch.equal(p, before[name]) == name.startswith("beside"), name


@members
def test_a_refused_group_leaves_no_trace(member: str) -> None:
    model = mlp()
    first = MEMBERS[member](model, ps.trace(model, X).skeleton())
    optimizer = copy.deepcopy(first)
    with pytest.raises(UnsupportedError, match="complex"):
        optimizer.add_param_group(
            {"params": [("c", nn.Parameter(torch.ones(2, dtype=torch.cfloat)))]}
        )
    with pytest.raises(InputError, match="lr=-1"):
        optimizer.add_param_group({"params": [("d", nn.Parameter(torch.ones(2)))], "lr": -1})
    optimizer.add_param_group({"params": [("e", nn.Parameter(torch.ones(2)))]})
    assert len(optimizer.param_groups) == 2


def test_momentum_may_pause() -> None:
    """By hand, for one chain: p = a b with b constant, and P = c d; torch's SGD on
    path values gives the same.
    """
    model = nn.Sequential(
        nn.Linear(2, 1, bias=False), nn.ReLU(), nn.Linear(1, 1, bias=False)
    ).double()
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([[1.0, 3.0]]))
        model[2].weight.fill_(2.0)
    x = torch.ones(1, 2).double()
    values = torch.tensor([2.0, 6.0], dtype=torch.float64, requires_grad=True)
    optimizer = gsgd(model, ps.trace(model, x).skeleton(), lr=0.01, momentum=0.9)
    reference = torch.optim.SGD([values], lr=0.01, momentum=0.9)
    for i in range(9):
        for one in (optimizer, reference):
            one.zero_grad()
            one.param_groups[0]["momentum"] = 0.0 if 3 <= i <= 5 else 0.9
        (model(x) - 3).square().sum().backward()
        (values.sum() - 3).square().backward()
        optimizer.step()
        reference.step()
        found = (model[0].weight * model[2].weight).detach().reshape(-1)
        torch.testing.assert_close(found, values.detach(), rtol=1e-12, atol=0)


# --- small path values


def deep(layers: int) -> nn.Module:
    torch.manual_seed(0)
    body = [part for i in range(layers) for part in (nn.Linear(8 if i == 0 else 64, 64), nn.ReLU())]
    return nn.Sequential(*body, nn.Linear(64, 1))


@pytest.mark.slow
def test_path_values_beyond_the_numbers_are_refused_or_bounded() -> None:
    """1 / p^2 of sixteen layers with torch's default weights is beyond single precision."""
    model, x = deep(16), torch.randn(8, 8)
    skeleton = ps.trace(model, x).skeleton()
    for make, way in ((gsgd, "max_multiplier"), (gadam, "init_skeleton")):
        with pytest.raises(UnsupportedError, match=way):
            make(model, skeleton)
    # what a look at gradients would find to be within the range
    for layers in (8, 12):
        twin = deep(layers)
        gadam(twin, ps.trace(twin, x).skeleton())
    for ready in (copy.deepcopy(model), deep(16)):
        if ready is not model:
            optimizer = gsgd(ready, ps.trace(ready, x).skeleton(), max_multiplier=1.0)
        for _ in range(3):
            assert math.isfinite(step(ready, optimizer, x))
    init_skeleton_(model, skeleton)
    for make in (gsgd, gadam):
        twin = copy.deepcopy(model)
        optimizer = make(twin, skeleton, lr=1e-6)
        for _ in range(3):
            assert math.isfinite(step(twin, optimizer, x))


def test_a_path_value_that_is_stopped_again_and_again_stays_a_number() -> None:
    model = nn.Sequential(
        nn.Linear(1, 1, bias=False), nn.ReLU(), nn.Linear(1, 1, bias=False)
    ).double()
    with torch.no_grad():
        model[0].weight.fill_(1.0)
        model[2].weight.fill_(1.0)
    x = torch.ones(1, 1).double()
    optimizer = gsgd(model, ps.trace(model, x).skeleton(), lr=1.0)
    for _ in range(60):
        # the gradient that leads to 0 exactly
        optimizer.zero_grad()
        p = float((model[0].weight * model[2].weight).detach())
        model[0].weight.grad = torch.full((1, 1), p * float(model[2].weight.detach())).double()
        model[2].weight.grad = torch.full((1, 1), p * float(model[0].weight.detach())).double()
        optimizer.step()
    assert float((model[0].weight * model[2].weight).detach()) == pytest.approx(1e-12)
    assert int(optimizer.clip_counts[1]) == 60


# --- memory


@members
@pytest.mark.parametrize("when", ["midway", "loaded"])
def test_state_follows_weights_that_are_laid_out_anew(member: str, when: str) -> None:
    torch.manual_seed(0)
    layers = [
        nn.Conv2d(4, 6, 3, groups=2),
        nn.ReLU(),
        nn.ConvTranspose2d(6, 4, 3),
        nn.ReLU(),
        nn.Conv2d(4, 2, 3),
    ]
    model = nn.Sequential(*layers).double()
    x = torch.randn(2, 4, 6, 6).double()
    twin = copy.deepcopy(model)
    runs = [(m, MEMBERS[member](m, ps.trace(m, x).skeleton())) for m in (model, twin)]
    for m, optimizer in runs:
        for _ in range(2):
            step(m, optimizer, x)
    if when == "midway":
        twin.to(memory_format=torch.channels_last)
    else:
        other = copy.deepcopy(twin).to(memory_format=torch.channels_last)
        fresh = MEMBERS[member](other, ps.trace(other, x).skeleton())
        fresh.load_state_dict(copy.deepcopy(runs[1][1].state_dict()))
        runs[1] = (other, fresh)
    for m, optimizer in runs:
        for _ in range(4):
            step(m, optimizer, x)
    assert largest_difference(runs[1][0], model) < 1e-10


@members
def test_weights_with_gaps_in_memory_take_the_same_steps(member: str) -> None:
    model = mlp()
    twin = copy.deepcopy(model)
    wide = torch.zeros(12, 8, dtype=torch.float64)
    wide[::2, ::2] = model[0].weight.detach()
    twin[0].weight = nn.Parameter(wide[::2, ::2])
    for m in (model, twin):
        optimizer = MEMBERS[member](m, ps.trace(m, X).skeleton())
        for _ in range(4):
            step(m, optimizer)
    assert largest_difference(twin, model) < 1e-12


@members
def test_a_model_may_change_its_type(member: str) -> None:
    model = mlp().float()
    optimizer = MEMBERS[member](model, ps.trace(model, X.float()).skeleton())
    step(model, optimizer, X.float())
    model.double()
    losses = [step(model, optimizer) for _ in range(3)]
    assert losses[-1] < losses[0]


# --- the others


class Difference(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(3, 4), nn.Linear(4, 2), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.relu(self.a(x))) - self.c(x)


class Gated(nn.Module):
    def __init__(self, how: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2)
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.a(x))
        return self.c(self.how(h, torch.relu(self.b(h))))


STRANGE: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "a difference": (Difference, "kappa negative for 'c"),
    "slopes": (
        lambda: nn.Sequential(nn.Linear(3, 4), nn.PReLU(), nn.Linear(4, 2)),
        "kappa 0 for '1.weight'",
    ),
    "softmax": (lambda: nn.Sequential(nn.Linear(3, 2), nn.Softmax(-1)), "softmax"),
    "tanh": (lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), "tanh"),
    "norm": (
        lambda: nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2)),
        "layer_norm",
    ),
    "a gate": (lambda: Gated(torch.mul), "aten.mul of values"),
    "a square": (lambda: Gated(lambda x, y: x + y.square()), "aten.square of values"),
    "a length": (lambda: Gated(lambda x, y: x + y.norm(dim=-1, keepdim=True)), "norm"),
    "a median": (lambda: Gated(lambda x, y: x + y.median(-1, keepdim=True)[0]), "median"),
    "gates": (lambda: nn.GRU(3, 2), "gru"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", STRANGE)
def test_path_sgd_refuses_networks_that_are_no_sums_over_paths(name: str) -> None:
    make, why = STRANGE[name]
    torch.manual_seed(0)
    model = make()
    with pytest.raises(UnsupportedError, match=why):
        PathSGD(model.named_parameters(), model=model, example=(torch.ones(1, 3),))


def test_path_sgd_sees_no_dropout_moves_nothing_on_no_path_and_is_copied() -> None:
    torch.manual_seed(0)
    layers = [nn.Embedding(9, 4), nn.Linear(4, 6), nn.ReLU(), nn.Dropout(0.5), nn.Linear(6, 2)]
    model = nn.Sequential(*layers).double()
    some, others = torch.tensor([[1, 2, 3]]), torch.tensor([[5, 6, 7]])
    optimizer = PathSGD(model.named_parameters(), lr=1e-2, model=model, example=some)
    assert model[3].training
    model, optimizer = pickle.loads(pickle.dumps(copy.deepcopy((model, optimizer))))
    before = model[0].weight.detach().clone()
    for _ in range(3):
        step(model, optimizer, others)
    # the example does not reach these rows
    assert torch.equal(model[0].weight, before)
    assert max(float(p.detach().abs().max()) for p in model.parameters()) < 10
    with pytest.raises(InputError, match="not the model's"):
        optimizer.add_param_group({"params": [("x", nn.Parameter(torch.ones(1)))]})
    model.float()
    step(model, optimizer, others)


@pytest.mark.parametrize("kind", [GSGD, GAdam])
def test_no_parameters_are_refused_in_words(kind: type[torch.optim.Optimizer]) -> None:
    make: Callable[..., torch.optim.Optimizer] = kind
    settings = {"skeleton": ps.trace(mlp(), X).skeleton()}
    read = iter(mlp().parameters())
    list(read)
    with pytest.raises(
        InputError, match=f"{kind.__name__} found no parameters, expected at least one"
    ):
        make(read, **settings)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"lr": np.float32(-0.1)}, "lr="),
        ({"lr": torch.tensor(-1.0)}, "lr="),
        ({"max_multiplier": "1"}, "max_multiplier='1'"),
        ({"min_ratio": 0.0}, "a number between 0 and 1"),
    ],
)
def test_wrong_numbers_are_refused(settings: dict[str, Any], why: str) -> None:
    model = mlp()
    skeleton = ps.trace(model, X).skeleton()
    gsgd(model, skeleton, lr=np.float32(0.1))
    with pytest.raises(PathspaceError, match=why):
        gsgd(model, skeleton, **settings)
    with pytest.raises(InputError, match="two numbers"):
        gadam(model, skeleton, betas=(0.9,))
    with pytest.raises(ps.InputTypeError, match="a int as its skeleton"):
        init_skeleton_(model, 3)  # type: ignore[arg-type]
