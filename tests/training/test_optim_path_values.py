"""Optimizers on path values against torch's own optimizers on the vector of path
values, and their invariance.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import mlp, network
from descent import descend
from oracles.adam import train_on_path_values
from slow_names import slow_names
from torch import Tensor, nn, optim
from torch.nn import functional as F
from training_pairs import MEMBERS, Problem, largest_difference, maker, problem

import pathspace as ps
from pathspace.training import GSGD, GAdam, GaugeFixed, PathSGD, PathSpace, init_skeleton_

Make = Callable[[Any], optim.Optimizer]
NETWORKS = [
    "mlp_2x4x1x3x2",
    "residual_mlp",
    "conv_gap",
    "conv_depthwise",
    "rnn_op",
    "rnn_op_2_layers",
    "batchnorm_conv",
    "batchnorm_cnn",
    "transformer_block",
    "gated_product",
    "tied_transposed",
]


class Relative(optim.Optimizer):
    """Any optimizer on factors that stand at 1 before every step: ``v <- v u``,
    with ``dL/du = v dL/dv``.
    """

    def __init__(self, params: list[nn.Parameter], make: Make) -> None:
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


SGD = {"lr": 1e-5, "momentum": 0.9}
# (a gradient that is 0 but for rounding, say 1e-15, divided by the usual eps of 1e-8 would
# depend on the processor)
ADAM = {"lr": 1e-3, "betas": (0.8, 0.95), "eps": 1e-6}
LARGE = {**ADAM, "eps": 1e-3, "weight_decay": 0.1}
# ours -> settings, torch's on the vector of path values
LIKE: dict[str, tuple[type[Any], dict[str, Any], type[Any]]] = {
    "gsgd": (GSGD, {"lr": 1e-3}, optim.SGD),
    "momentum": (GSGD, SGD, optim.SGD),
    "dampening": (GSGD, {**SGD, "dampening": 0.5}, optim.SGD),
    "nesterov": (GSGD, {**SGD, "nesterov": True}, optim.SGD),
    "decay": (GSGD, {"lr": 1e-3, "weight_decay": 0.3}, optim.SGD),
    "gadam": (GAdam, ADAM, optim.Adam),
    "gadam_decay": (GAdam, {**ADAM, "weight_decay": 0.3}, optim.AdamW),
    "relative": (GSGD, {"lr": 1e-3, "weight_decay": 0.1, "relative": True}, optim.SGD),
    "relative_momentum": (GSGD, {**SGD, "nesterov": True, "relative": True}, optim.SGD),
    "relative_gadam": (GAdam, {**LARGE, "relative": True}, optim.AdamW),
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("rule", ["modulo", "random"])
@pytest.mark.parametrize("member", LIKE)
@pytest.mark.parametrize("name", NETWORKS)
def test_steps_are_those_of_torch_on_path_values(name: str, member: str, rule: str) -> None:
    """Tiny ones, so that no path value comes near 0 (the oracle takes logarithms)."""
    case = Problem(name, rule)
    kind, settings, like = LIKE[member]
    plain = {key: value for key, value in settings.items() if key != "relative"}
    make: Make = lambda v: like(v, **plain)  # noqa: E731
    given: Make = (lambda v: Relative(v, make)) if "relative" in settings else make
    expected = train_on_path_values(case.model, case.loss, case.oracle(), given, 5)
    make_ours = maker(kind, **settings)
    case.train(case.model, lambda m: make_ours(m, case.skeleton(m)), 5)
    assert largest_difference(case.model, expected) < 1e-10


KINDS: dict[str, Make] = {
    "Adadelta": lambda p: optim.Adadelta(p, lr=1e-2),
    "Adafactor": lambda p: optim.Adafactor(p, lr=1e-4),
    "Adagrad": lambda p: optim.Adagrad(p, lr=1e-3, eps=1e-6),
    "Adam": lambda p: optim.Adam(p, lr=1e-4, amsgrad=True),
    "AdamW": lambda p: optim.AdamW(p, lr=1e-4),
    "Adamax": lambda p: optim.Adamax(p, lr=1e-4),
    "ASGD": lambda p: optim.ASGD(p, lr=1e-5),
    "NAdam": lambda p: optim.NAdam(p, lr=1e-4),
    "RAdam": lambda p: optim.RAdam(p, lr=1e-4),
    "RMSprop": lambda p: optim.RMSprop(p, lr=1e-5, momentum=0.5, centered=True),
    "Rprop": lambda p: optim.Rprop(p, lr=1e-6, step_sizes=(1e-9, 1e-4)),
    "SGD": lambda p: optim.SGD(p, lr=1e-5, momentum=0.9, nesterov=True, weight_decay=0.1),
}


def wrapped(case: Problem, kind: str) -> Callable[[nn.Module], PathSpace]:
    return lambda m: PathSpace(KINDS[kind](m.named_parameters()), case.skeleton(m))


@pytest.mark.parametrize("kind", ["Adagrad", "RMSprop", "NAdam", "SGD"])
@pytest.mark.parametrize("name", ["residual_cnn", "rnn_op_2_layers", "transformer_block"])
def test_any_optimizer_is_itself_on_the_vector_of_path_values(name: str, kind: str) -> None:
    case = Problem(name)
    expected = train_on_path_values(case.model, case.loss, case.oracle(), KINDS[kind], 4)
    case.train(case.model, wrapped(case, kind), 4)
    assert largest_difference(case.model, expected) < 1e-9


# where a rate of descent makes the loss jump about, rounding grows from step to
# step whatever the optimizer
GENTLE = {"transformer_block": 0.1}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["residual_mlp", "rnn_op_2_layers", "conv_gap", "batchnorm_cnn", "transformer_block"]
)
@pytest.mark.parametrize("member", MEMBERS)
def test_a_hundred_steps_do_not_see_the_scales(member: str, name: str) -> None:
    case = Problem(name, unit=True)

    def make(model: nn.Module) -> optim.Optimizer:
        optimizer: optim.Optimizer = MEMBERS[member](model, case.skeleton(model))
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] * GENTLE.get(name, 1.0)
        return optimizer

    runs = [case.train(m, make, 100) for m in case.twins(2)]
    assert runs[0][-1] < runs[0][0]
    assert runs[1] == pytest.approx(runs[0], rel=1e-9)


@pytest.mark.parametrize("kind", slow_names(KINDS, KINDS.keys() - {"Adam", "SGD"}))
@pytest.mark.parametrize("name", slow_names(["residual_mlp", "rnn_op"], ["residual_mlp"]))
def test_a_hundred_steps_of_any_optimizer_do_not_see_the_scales(name: str, kind: str) -> None:
    case = Problem(name, unit=True)
    runs = [case.train(m, wrapped(case, kind), 100) for m in case.twins(2)]
    assert runs[0][-1] < runs[0][0]
    # (a running variance and the sign of a gradient amplify rounding)
    assert runs[1] == pytest.approx(runs[0], rel=1e-7)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("member", ["gsgd", "relative", "gadam_cap", "gadam_relative"])
def test_clipping_by_the_norm_of_path_gradients_does_not_see_the_scales(member: str) -> None:
    case, runs = Problem("batchnorm_cnn", unit=True), []
    for model in case.twins(2):
        optimizer = MEMBERS[member](model, case.skeleton(model))
        found: list[float] = []
        for _ in range(10):
            optimizer.zero_grad()
            value = case.loss(model)
            value.backward()
            norm = optimizer.clip_path_grad_norm_(0.1)
            optimizer.step()
            found += [value.item(), float(norm)]
        runs.append(found)
    assert runs[0][1] > 0.1
    assert runs[1] == pytest.approx(runs[0], rel=1e-9)


@pytest.mark.parametrize("member", [GSGD, GAdam])
def test_the_path_gradient_norm_is_that_of_the_oracle(member: type) -> None:
    case = Problem("rnn_op_2_layers")
    oracle = case.oracle()
    start = dict(case.model.named_parameters())
    vector = oracle.vector(start).detach()
    values = oracle.path_values(vector).requires_grad_()
    tensors = oracle.tensors(oracle.weights(values, vector[torch.from_numpy(oracle.fixed)]), start)
    (gradient,) = torch.autograd.grad(case.loss(case.model, start | tensors), values)
    optimizer = member(case.model.named_parameters(), skeleton=case.skeleton(case.model))
    case.loss(case.model).backward()
    norm = optimizer.clip_path_grad_norm_(1e-3)
    assert float(norm) == pytest.approx(float(gradient.norm()), rel=1e-10)
    assert float(optimizer.clip_path_grad_norm_(1.0)) == pytest.approx(1e-3, rel=1e-2)


@pytest.mark.parametrize("cap", [0.2, 5.0])
@pytest.mark.parametrize("kind", [GSGD, GAdam])
def test_clipping_goes_by_the_bounded_gradients(kind: type[Any], cap: float) -> None:
    """The norm is that by which a plain first step gets shorter: of SGD's ``lr sum M
    g^2``, by finite differences.
    """
    case = problem("rnn_op")
    # for beta = 0 and a large eps, Adam's step is one of gradient descent at the rate lr / eps
    settings = {"lr": 1e-2, "betas": (0.0, 0.0), "eps": 1e8} if kind is GAdam else {"lr": 1e-10}
    model = copy.deepcopy(case.model)
    optimizer = maker(kind, **settings)(model, case.skeleton(model), max_multiplier=cap)
    case.loss(model).backward()
    norm = float(optimizer.clip_path_grad_norm_(1e9))
    start = {key: p.detach().clone() for key, p in model.named_parameters()}
    optimizer.step()
    fall = -sum(
        float((p.grad * (p.detach() - start[key])).sum()) for key, p in model.named_parameters()
    )
    assert fall / 1e-10 == pytest.approx(norm**2, rel=1e-3)


@pytest.mark.parametrize("member", ["relative", "gadam_cap", "gadam_relative"])
def test_states_are_rescaled_with_the_weights(member: str) -> None:
    case = Problem("rnn_op_2_layers", unit=True)
    runs = []
    for moves in (False, True):
        model = copy.deepcopy(case.model)
        graph = ps.trace(model, *case.args, sizes="given")
        optimizer = MEMBERS[member](model, graph.skeleton("magnitude"))
        for step in range(12):
            if moves and step == 6:
                phi = torch.linspace(-2, 2, graph.num_units).double()
                ps.rescale_(model, graph, phi, optimizer=optimizer)
            last = case.step(model, optimizer)
        runs.append(last)
    assert runs[1] == pytest.approx(runs[0], rel=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["modulo", "random"])
@pytest.mark.parametrize("cap", [0.3, 3.0])
@pytest.mark.parametrize("name", ["opposite_parents", "rnn_op", "transformer_block"])
def test_bounded_adam_is_adam_on_path_values_over_their_bound(
    name: str, cap: float, rule: str
) -> None:
    """One step: ``b = min(1, sqrt(cap) |pre_u|) min(1, sqrt(cap) |s_v|)``, balanced;
    ``min(1, cap |p|)`` of a chain.
    """
    case = problem(name, rule)
    oracle, skeleton = case.oracle(), case.skeleton(case.model)
    graph = skeleton.graph
    phi = GaugeFixed(optim.SGD(copy.deepcopy(case.model).named_parameters(), lr=1.0), graph).phi
    balancing = torch.cat([torch.zeros(1), phi, torch.from_numpy(graph.forms @ phi.numpy())]).exp()
    entering, leaving = skeleton.prefixes().abs() * balancing, skeleton.suffixes().abs() / balancing

    def at(table: Tensor, unit: int) -> float:
        return float(table[unit] if unit >= 0 else 1 / table[-unit])

    blocks = {block.name: block for block in graph.blocks}
    # in the order of the oracle: chains by their first units, then edges in neither tree
    firsts = {
        int(chain): unit for unit, chain in reversed(list(enumerate(skeleton.chain))) if chain
    }
    bounds = [min(1.0, cap * at(entering * leaving, unit)) for unit in sorted(firsts.values())]
    for key, flat in oracle.slots:
        block = blocks[key]
        if not bool(skeleton.masks[key].reshape(-1)[flat]):
            tail, head = (
                int(ids.expand(block.shape).reshape(-1)[flat]) for ids in (block.tail, block.head)
            )
            scales = at(entering, tail), at(leaving, head)
            bounds.append(math.prod(min(1.0, cap**0.5 * scale) for scale in scales))
    factor = torch.tensor(bounds, dtype=torch.float64)

    class Bounded(optim.Adam):
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
    optimizer = maker(GAdam, **settings)(model, case.skeleton(model), max_multiplier=cap)
    case.step(model, optimizer)
    assert largest_difference(model, expected) < 1e-10
    assert optimizer.max_multiplier == cap
    assert bool((factor < 1).any()) or cap > 1


# --- path values that cross zero, and small ones


def test_a_path_value_that_changes_sign_is_carried_out_and_counted() -> None:
    case = Problem("mlp_2x3x5x2", unit=True)
    counts, outcome = [], []
    for model in case.twins(2):
        optimizer = GSGD(model.named_parameters(), lr=8.0, skeleton=case.skeleton(model))
        case.step(model, optimizer)
        counts.append(optimizer.clip_counts.tolist())
        outcome.append(case.loss(model).item())
    assert counts[0] == counts[1] and counts[0][0] > 0 == counts[0][1]
    assert outcome[1] == pytest.approx(outcome[0], rel=1e-9)


@pytest.mark.parametrize(("least", "steps"), [(1e-6, 1), (1e-12, 60)])
def test_a_path_value_that_would_become_zero_is_stopped_and_counted(
    least: float, steps: int
) -> None:
    """However often: it is never less than this part of what it was at the start."""
    model = mlp(1, 1, 1, bias=False).double()
    for parameter in model.parameters():
        nn.init.ones_(parameter)
    skeleton = ps.trace(model, torch.ones(1, 1).double()).skeleton()
    optimizer = GSGD(model.named_parameters(), lr=1.0, skeleton=skeleton, min_ratio=least)
    for _ in range(steps):
        # the gradient that leads to 0 exactly
        first, last = (float(p.detach()) for p in model.parameters())
        model[0].weight.grad = torch.full((1, 1), first * last * last).double()
        model[2].weight.grad = torch.full((1, 1), first * last * first).double()
        optimizer.step()
    assert optimizer.min_ratio == least and optimizer.clip_counts.tolist()[1] == steps
    path = float((model[0].weight * model[2].weight).detach())
    assert abs(path) == pytest.approx(least, abs=0)


def test_a_bound_on_the_multiplier_makes_default_initialisation_usable() -> None:
    model, x = mlp(8, 32, 32, 1), torch.randn(64, 8)
    y = x.square().mean(1, keepdim=True)
    skeleton, ends = ps.trace(model, x).skeleton(), {}
    for cap in (None, 1.0):
        twin = copy.deepcopy(model)
        optimizer = maker(GSGD, lr=0.05, max_multiplier=cap)(twin, skeleton)
        ends[cap] = descend(optimizer, lambda twin=twin: F.mse_loss(twin(x), y), 60)[-1]
    assert ends[1.0] < 0.5 * F.mse_loss(0 * y, y).item()
    assert not ends[None] < ends[1.0]


def deep(layers: int) -> nn.Module:
    torch.manual_seed(0)
    return mlp(8, *[64] * layers, 1)


@pytest.mark.slow
def test_path_values_beyond_the_numbers_are_refused_or_bounded() -> None:
    """1 / p^2 of sixteen layers with torch's default weights is beyond single precision."""
    model, x = deep(16), torch.randn(8, 8)
    skeleton = ps.trace(model, x).skeleton()
    for member, way in (("gsgd", "max_multiplier"), ("gadam", "init_skeleton")):
        with pytest.raises(ps.UnsupportedError, match=way):
            MEMBERS[member](model, skeleton)
        # what a look at gradients would find to be within the range
    for layers in (8, 12):
        twin = deep(layers)
        MEMBERS["gadam"](twin, ps.trace(twin, x).skeleton())
    runs = [(deep(16), "cap", {})]
    init_skeleton_(model, skeleton)
    runs += [(copy.deepcopy(model), member, {"lr": 1e-6}) for member in ("gsgd", "gadam")]
    for twin, member, more in runs:
        optimizer = MEMBERS[member](twin, ps.trace(twin, x).skeleton(), **more)
        losses = descend(optimizer, lambda twin=twin: (twin(x) - 1).square().mean(), 3)
        assert all(map(math.isfinite, losses))


def test_relative_steps_need_no_bound_and_warn_of_zeros() -> None:
    layers = [layer for _ in range(16) for layer in (nn.Linear(16, 16), nn.ReLU())]
    model, x, y = nn.Sequential(*layers, nn.Linear(16, 1)), torch.randn(64, 16), torch.randn(64, 1)
    skeleton = ps.trace(model, x).skeleton()
    optimizer = GAdam(model.named_parameters(), lr=0.003, skeleton=skeleton, relative=True)
    losses = descend(optimizer, lambda: F.mse_loss(model(x), y), 30)
    assert losses[-1] < losses[0]
    nn.init.zeros_(model[0].bias[:3])
    with pytest.warns(UserWarning, match=r"found 3 of .* weights at 0 \(first: '0.bias'\)"):
        GSGD(model.named_parameters(), lr=0.003, skeleton=skeleton, relative=True)


def _with_a_tiny_weight(seed: int) -> tuple[nn.Module, Callable[[], Tensor], ps.Skeleton]:
    """A network with a weight of 1e-4 that is on both trees of the default rule."""
    torch.manual_seed(seed)
    model, x, y = mlp(6, 8, 8, 3).double(), torch.randn(64, 6).double(), torch.randint(0, 3, (64,))
    skeleton = ps.trace(model, x).skeleton()
    trees = [
        set(zip(tree.block.tolist(), tree.index.tolist(), strict=True))
        for tree in (skeleton.tree_in, skeleton.tree_out)
    ]
    block, index = min(pair for pair in trees[0] & trees[1] if pair[0] >= 0)
    with torch.no_grad():
        model.get_parameter(skeleton.graph.blocks[block].name).view(-1)[index] = 1e-4
    return model, lambda: F.cross_entropy(model(x), y), ps.trace(model, x).skeleton()


@pytest.mark.parametrize("kind", [GSGD, GAdam])
def test_a_rescaling_in_mid_run_does_not_move_the_bound(kind: type[Any]) -> None:
    runs = []
    for rescaled in (False, True):
        model, loss, skeleton = _with_a_tiny_weight(0)
        optimizer = kind(model.named_parameters(), lr=0.01, skeleton=skeleton, max_multiplier=0.7)
        losses = descend(optimizer, loss, 3)
        for steps, factor in ((5, -2), (4, 3)):
            if rescaled:
                phi = torch.linspace(-2, 2, skeleton.graph.num_units).double()
                ps.rescale_(model, skeleton.graph, phi * factor)
            losses += descend(optimizer, loss, steps)
        runs.append(losses)
    assert runs[1] == pytest.approx(runs[0], rel=1e-9)


# --- Path-SGD


def kappa(model: nn.Module, *example: Tensor, second: bool = True) -> dict[str, Tensor]:
    optimizer = PathSGD(model.named_parameters(), model=model, example=example)
    return optimizer.path_norm.kappa(second)


def check_curvature(model: nn.Module, *example: Tensor) -> None:
    """Kappa is half the second derivative of the path norm with respect to each weight."""
    ones = tuple(torch.ones_like(a) for a in example)
    start = {key: p.detach() for key, p in model.named_parameters()}
    found = kappa(model, *example)
    for key, weight in start.items():

        def norm(weight: Tensor, key: str = key) -> Tensor:
            squares = {k: v.square() for k, v in {**start, key: weight}.items()}
            return torch.func.functional_call(model, squares, ones).sum()

        hessian = torch.func.hessian(norm)(weight).reshape(weight.numel(), weight.numel())
        expected = 0.5 * hessian.diagonal().view(weight.shape)
        torch.testing.assert_close(found[key], expected, rtol=1e-10, atol=0)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "name", ["mlp_2x3x5x2", "residual_mlp", "rnn_first_input_nobias", "rnn_op", "rnn_op_2_layers"]
)
def test_kappa_is_that_of_all_paths(name: str) -> None:
    """The path norm is the sum over all paths; the second term is that of weights which paths
    pass several times.
    """
    case = Problem(name)
    example = tuple(a[:1] for a in case.args)
    check_curvature(case.model, *example)
    both, plain = (kappa(case.model, *example, second=second) for second in (True, False))
    assert name.startswith("rnn") == any(
        float((plain[key] - both[key]).abs().max()) > 1e-3 for key in plain
    )


@pytest.mark.parametrize("name", ["conv_fully", "conv_gap", "residual_cnn"])
def test_kappa_of_convolutions_is_half_the_second_derivative(name: str) -> None:
    """A tap is met at every position, by paths of their own: all of them are in the path
    norm of the whole output.
    """
    case = Problem(name)
    check_curvature(case.model, *(a[:1] for a in case.args))


def three_times(weight: Tensor, x: Tensor) -> Tensor:
    for _ in range(3):
        x = torch.relu(x @ weight.T)
    return x


PASSED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "transposed": three_times,
    "power": lambda weight, x: x @ torch.linalg.matrix_power(weight, 2),
    "product": lambda weight, x: x @ (weight * weight),
    "square": lambda weight, x: x @ weight.square(),
    "chunks": lambda weight, x: x[:, :2] @ weight.chunk(2)[0] + x[:, 2:] @ weight.chunk(2)[1],
}


@pytest.mark.parametrize("form", PASSED)
def test_weights_that_paths_pass_again_are_found(form: str) -> None:
    model = network(
        lambda net, x: net.leave(PASSED[form](net.weight, torch.relu(net.enter(x)))),
        enter=nn.Linear(3, 4),
        leave=nn.Linear(4, 2),
        weight=nn.Parameter(torch.rand(4, 4)),
    ).double()
    x = torch.ones(1, 3).double()
    norm = PathSGD(model.named_parameters(), model=model, example=(x,)).path_norm
    assert norm.reused == (() if form == "chunks" else ("weight",))
    check_curvature(model, x)


@pytest.mark.slow
@pytest.mark.parametrize("second", [True, False])
@pytest.mark.parametrize("name", ["residual_mlp", "rnn_op", "conv_flatten_spatial"])
def test_path_sgd_does_not_see_the_scales(name: str, second: bool) -> None:
    case = Problem(name)
    more = {"lr": 0.01, "example": tuple(a[:1] for a in case.args), "second": second}
    runs = [
        case.train(m, lambda m: PathSGD(m.named_parameters(), model=m, **more), 20)
        for m in case.twins(2)
    ]
    assert runs[0][-1] < runs[0][0]
    assert runs[1] == pytest.approx(runs[0], rel=1e-9)


@pytest.mark.parametrize(("every", "renewed"), [(1, [0, 1, 2, 3, 4]), (2, [0, 2, 4]), (3, [0, 3])])
def test_path_sgd_renews_its_scaling_at_every_so_many_steps(
    every: int, renewed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = mlp(3, 4, 2, bias=False)
    optimizer = PathSGD(
        model.named_parameters(), lr=0.01, model=model, example=(torch.randn(1, 3),), every=every
    )
    steps: list[int] = []
    real = optimizer.path_norm.kappa

    def noted(second: bool) -> object:
        steps.append(max((one.get("step", 0) for one in optimizer.state.values()), default=0))
        return real(second)

    monkeypatch.setattr(optimizer.path_norm, "kappa", noted)
    descend(optimizer, lambda: model(torch.randn(8, 3)).square().mean(), 5)
    assert steps == renewed


@pytest.mark.parametrize("first", [True, False])
def test_path_sgd_takes_the_step_of_one_sample(first: bool) -> None:
    rnn = nn.RNN(3, 4, nonlinearity="relu", batch_first=first)
    model = network(lambda net, x: net.rnn(x)[0], rnn=rnn).double()
    one, *others = (
        kappa(model, torch.ones((count, 5, 3) if first else (5, count, 3)).double())
        for count in (1, 2, 8)
    )
    for other in others:
        for name, value in one.items():
            torch.testing.assert_close(other[name], value, rtol=1e-12, atol=0)


def test_path_sgd_sees_no_dropout_and_moves_nothing_on_no_path() -> None:
    layers = [nn.Embedding(9, 4), nn.Linear(4, 6), nn.ReLU(), nn.Dropout(0.5), nn.Linear(6, 2)]
    model = nn.Sequential(*layers).double()
    some, others = torch.tensor([[1, 2, 3]]), torch.tensor([[5, 6, 7]])
    optimizer = PathSGD(model.named_parameters(), lr=1e-2, model=model, example=some)
    assert model[3].training
    before = model[0].weight.detach().clone()
    descend(optimizer, lambda: (model(others) - 1).square().mean(), 3)
    # the example does not reach these rows
    assert torch.equal(model[0].weight, before)
    assert max(float(p.detach().abs().max()) for p in model.parameters()) < 10


@pytest.mark.parametrize("kind", [GSGD, GAdam])
@pytest.mark.parametrize("seed", range(3))
def test_a_tiny_weight_on_both_trees_does_not_undo_the_bound(seed: int, kind: type[Any]) -> None:
    model, loss, skeleton = _with_a_tiny_weight(seed)
    rate = 0.1 if kind is GSGD else 0.01
    optimizer = kind(model.named_parameters(), lr=rate, skeleton=skeleton, max_multiplier=1.0)
    losses = descend(optimizer, loss, 5)
    assert losses == sorted(losses, reverse=True)


def test_the_shared_weight_term_dominates_near_the_identity() -> None:
    rnn = nn.RNN(2, 8, nonlinearity="relu", bias=False, batch_first=True).double()
    nn.init.eye_(rnn.weight_hh_l0)
    model = network(lambda net, x: net.rnn(x)[0][:, -1], rnn=rnn)
    both, first = (
        kappa(model, torch.ones(1, 30, 2).double(), second=second)["rnn.weight_hh_l0"].diagonal()
        for second in (True, False)
    )
    assert float(((both - first) / both).min()) > 0.9
