"""G-SGD against gradient descent on path values, differentiated through
the weights they determine.
"""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from descent import descend
from hypothesis import given
from oracles.alignment import path_problem
from oracles.gsgd import PathProblem, ends, gsgd_step
from oracles.networks import Case, RandomDag, random_rnn
from oracles.strategies import dag_specs, modest, rnn_specs, rules, tied_dag_specs
from slow_names import slow_names
from torch import Tensor, nn
from training_cases import TRAINED

import pathspace as ps
from pathspace.training import GSGD, init_skeleton_

RULES = ["modulo", "magnitude", "random"]
NETWORKS = [
    "mlp_2x3x5x2",
    "mlp_2x4x1x3x2",
    "mlp_prelu_channels",
    "residual_mlp",
    "residual_on_input",
    "dense_mlp",
    "conv_gap",
    "conv_depthwise",
    "residual_cnn",
    "rnn_op",
    "rnn_loop",
    "rnn_first_input_nobias",
    "rnn_op_2_layers",
    "rnn_loop_unequal_none_state",
    "rnn_op_bidirectional",
    "rnn_op_learned_state",
    "conv_dead_taps",
    "parameters_everywhere",
    "tied_transposed",
    "tied_names",
    "tied_depth",
    "gated_product",
    "batchnorm_conv",
    "batchnorm_residual",
    "batchnorm_cnn",
    "transformer_block",
]


def squared_error(args: tuple[Tensor, ...], target: Tensor) -> functools.partial[Tensor]:
    def loss(
        model: nn.Module, parameters: dict[str, Tensor], args: tuple[Tensor, ...], target: Tensor
    ) -> Tensor:
        return (torch.func.functional_call(model, parameters, args) - target).square().mean()

    return functools.partial(loss, args=args, target=target)


def in_double(case: Case) -> tuple[nn.Module, tuple[Tensor, ...], Tensor]:
    """A case in float64, with a random target."""
    model, args = case
    generator = torch.Generator().manual_seed(3)
    model = model.double()
    # mostly positive weights and positive biases keep units alive, so that gradients are
    # there to compare; the oracle takes logarithms, so nothing may be zero (see the test
    # of zero weights for those)
    with torch.no_grad():
        for parameter in model.parameters():
            drawn = 0.1 + 0.5 * torch.rand(
                parameter.shape, generator=generator, dtype=parameter.dtype
            )
            parameter.copy_(torch.where(parameter == 0, drawn, parameter))
            positive = torch.rand(parameter.shape, generator=generator) < (
                1.0 if parameter.ndim == 1 else 0.75
            )
            parameter.copy_(torch.where(positive, parameter.abs(), -parameter.abs()))
    args = tuple(torch.randn(arg.shape, generator=generator, dtype=torch.float64) for arg in args)
    target = torch.randn(model(*args).shape, generator=generator, dtype=torch.float64)
    return model, args, target


def rate(
    problem: PathProblem,
    step_loss: functools.partial[Tensor],
    model: nn.Module,
    change: float = 0.3,
) -> float:
    """A learning rate at which the skeleton path values move by at most the fraction `change`."""
    probe = gsgd_step(model, step_loss, problem, 0.0)
    ratio = (probe.gradient / probe.values).abs().numpy()
    chains = len(probe.values) - (len(problem.slots) - len({*problem.tree_in, *problem.tree_out}))
    return change / max(float(ratio[:chains].max(initial=0.0)), 1e-3)


# --- the oracle itself


def test_one_step_by_hand() -> None:
    # f = w2 w1 x with T_in = {w1}, T_out = {w2}: v = w1 w2 = 6, dL/dv = 2 (v x - y) x =
    # 2, w1' = (6 - 0.1 * 2) / 3
    model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)).double()
    with torch.no_grad():
        model.get_parameter("0.weight").fill_(2.0)
        model.get_parameter("1.weight").fill_(3.0)
    problem = PathProblem(*ends([(0, 1), (1, 0)], 1), [("0.weight", 0), ("1.weight", 0)], [0], [1])
    x = torch.ones(1, 1, dtype=torch.float64)
    step = gsgd_step(model, squared_error((x,), 5 * x), problem, 0.1)
    assert step.values.item() == pytest.approx(6)
    assert step.gradient.item() == pytest.approx(2)
    assert step.parameters["0.weight"].item() == pytest.approx(5.8 / 3)
    assert step.parameters["1.weight"].item() == pytest.approx(3)


def test_one_step_with_equal_trees_by_hand() -> None:
    # batch norm like: the only basis path is b / a, a is fixed by walking its edge backwards
    problem = PathProblem(*ends([(0, 1), (0, 1)], 1), [("0.weight", 0), ("0.weight", 1)], [0], [0])
    assert problem.rows.tolist() == [[-1, 1]]
    weights = torch.tensor([-2.0, 6.0], dtype=torch.float64)
    assert problem.path_values(weights).tolist() == pytest.approx([-3.0])
    moved = problem.weights(torch.tensor([4.0], dtype=torch.float64), weights[:1])
    assert moved.tolist() == pytest.approx([-2.0, -8.0])


def problem_of(model: nn.Module, args: tuple[Tensor, ...], rule: str) -> PathProblem:
    graph = ps.trace(model, *args)
    return path_problem(graph, graph.skeleton(rule, seed=5))


@pytest.mark.parametrize("name", NETWORKS)
def test_weights_come_back_from_path_values(name: str) -> None:
    model, args, _ = in_double(TRAINED[name]())
    problem = problem_of(model, args, "random")
    vector = problem.vector(dict(model.named_parameters())).detach()
    back = problem.weights(problem.path_values(vector), vector[torch.from_numpy(problem.fixed)])
    torch.testing.assert_close(back, vector, rtol=1e-11, atol=0)


@pytest.mark.parametrize("change", [0.3, 1.7])
@pytest.mark.parametrize(
    "name",
    [
        "mlp_2x4x1x3x2",
        "residual_mlp",
        "rnn_op_2_layers",
        "batchnorm_conv",
        "gated_product",
        "tied_depth",
        "transformer_block",
    ],
)
def test_the_oracle_step_is_invariant(name: str, change: float) -> None:
    """Also where a path value changes sign (`change` above 1)."""
    model, args, target = in_double(TRAINED[name]())
    problem, loss = problem_of(model, args, "modulo"), squared_error(args, target)
    lr, outcome = rate(problem, loss, model, change), []
    for twin in rescaled_copies(model, args, 2):
        outcome.append(loss(twin, gsgd_step(twin, loss, problem, lr).parameters).item())
    assert outcome[1] == pytest.approx(outcome[0], rel=1e-9)


# --- the optimizer


def rescaled_copies(model: nn.Module, args: tuple[Tensor, ...], count: int) -> list[nn.Module]:
    """The model itself and `count - 1` copies moved by random gauge transformations."""
    graph, copies = ps.trace(model, *args), [model]
    for seed in range(count - 1):
        generator = torch.Generator().manual_seed(seed)
        phi = torch.randn(graph.num_units, generator=generator, dtype=torch.float64)
        twin = copy.deepcopy(model)
        parameters = dict(twin.named_parameters())
        with torch.no_grad():
            for key, factor in graph.gauge(phi).items():
                parameters[key].mul_(factor)
        copies.append(twin)
    return copies


def check_one_step(
    model: nn.Module, args: tuple[Tensor, ...], target: Tensor, skeleton: ps.Skeleton
) -> None:
    loss, problem = squared_error(args, target), path_problem(skeleton.graph, skeleton)
    lr = rate(problem, loss, model)
    expected = gsgd_step(model, loss, problem, lr)
    before = {key: parameter.detach().clone() for key, parameter in model.named_parameters()}
    optimizer = GSGD(model.named_parameters(), lr=lr, skeleton=skeleton)
    value = loss(model, dict(model.named_parameters()))
    value.backward()
    optimizer.step()
    assert value.item() == pytest.approx(expected.loss, rel=1e-9)
    for key, parameter in model.named_parameters():
        wanted = expected.parameters[key]
        scale = float(wanted.abs().max())
        torch.testing.assert_close(parameter.detach(), wanted, rtol=1e-10, atol=1e-10 * scale)
        # the step itself, which may be small beside the weight
        moved, should = parameter.detach() - before[key], wanted - before[key]
        torch.testing.assert_close(
            moved, should, rtol=0, atol=1e-7 * float(should.abs().max()) + 1e-12 * scale
        )


@pytest.mark.parametrize("initialised", [False, True], ids=["default_init", "init_skeleton"])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", NETWORKS)
def test_one_step_is_that_of_the_oracle(name: str, rule: str, initialised: bool) -> None:
    model, args, target = in_double(TRAINED[name]())
    skeleton = ps.trace(model, *args).skeleton(rule, seed=6)
    if initialised:
        init_skeleton_(model, skeleton)
    check_one_step(model, args, target, skeleton)


@pytest.mark.parametrize(
    "name",
    [
        "mlp_2x3x5x2",
        "residual_mlp",
        "conv_gap",
        "rnn_op_2_layers",
        "batchnorm_residual",
        "transformer_block",
    ],
)
def test_five_steps_are_five_of_the_oracle(name: str) -> None:
    """One optimizer goes on from its own state, while the oracle starts from the
    weights alone every time.
    """
    model, args, target = in_double(TRAINED[name]())
    skeleton = ps.trace(model, *args).skeleton()
    init_skeleton_(model, skeleton)
    loss, problem = squared_error(args, target), path_problem(skeleton.graph, skeleton)
    lr, twin = rate(problem, loss, model, 0.1), copy.deepcopy(model)
    optimizer = GSGD(model.named_parameters(), lr=lr, skeleton=skeleton)
    for _ in range(5):
        twin.load_state_dict(gsgd_step(twin, loss, problem, lr).parameters)
        optimizer.zero_grad()
        loss(model, dict(model.named_parameters())).backward()
        optimizer.step()
    for key, parameter in model.named_parameters():
        torch.testing.assert_close(
            parameter.detach(), twin.get_parameter(key).detach(), rtol=1e-9, atol=1e-12
        )


@pytest.mark.slow
@given(dag_specs() | tied_dag_specs(), rules)
@modest
def test_one_step_on_random_dags(spec: tuple, rule: str) -> None:
    network = RandomDag(*spec)
    model, args, target = in_double((network, network.example()))
    check_one_step(model, args, target, ps.trace(model, *args).skeleton(rule, seed=7))


@pytest.mark.slow
@given(rnn_specs(), rules)
@modest
def test_one_step_on_random_recurrent_networks(spec: tuple, rule: str) -> None:
    model, args, target = in_double(random_rnn(*spec))
    check_one_step(model, args, target, ps.trace(model, *args).skeleton(rule, seed=7))


@pytest.mark.parametrize("name", ["mlp_2x3x5x2", "rnn_op", "batchnorm_residual"])
def test_weights_of_zero_outside_the_skeleton_are_ordinary(name: str) -> None:
    """Biases start at zero: the oracle, which takes logarithms, starts from 1e-200 instead."""
    model, args, target = in_double(TRAINED[name]())
    skeleton = ps.trace(model, *args).skeleton()
    loss, problem = squared_error(args, target), path_problem(skeleton.graph, skeleton)
    outside = {key: ~mask for key, mask in skeleton.masks.items() if "bias" in key}
    with torch.no_grad():
        for key, mask in outside.items():
            model.get_parameter(key)[mask] = 1e-200
    lr = rate(problem, loss, model)
    expected = gsgd_step(model, loss, problem, lr).parameters
    with torch.no_grad():
        for key, mask in outside.items():
            model.get_parameter(key)[mask] = 0.0
    optimizer = GSGD(model.named_parameters(), lr=lr, skeleton=skeleton)
    loss(model, dict(model.named_parameters())).backward()
    optimizer.step()
    for key, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.detach(), expected[key], rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize(
    "name",
    slow_names(
        [
            "mlp_2x3x5x2",
            "residual_mlp",
            "conv_gap",
            "rnn_op",
            "rnn_op_2_layers",
            "batchnorm_conv",
            "tied_transposed",
        ],
        ["residual_mlp", "conv_gap", "rnn_op", "rnn_op_2_layers", "batchnorm_conv"],
    ),
)
def test_thirty_steps_do_not_see_the_scales(name: str) -> None:
    model, args, target = in_double(TRAINED[name]())
    init_skeleton_(model, ps.trace(model, *args).skeleton())
    loss = squared_error(args, target)

    def train(twin: nn.Module, path_space: bool) -> list[float]:
        twin = copy.deepcopy(twin)
        optimizer: torch.optim.Optimizer = torch.optim.SGD(twin.parameters(), lr=0.01)
        if path_space:
            optimizer = GSGD(
                twin.named_parameters(), lr=0.01, skeleton=ps.trace(twin, *args).skeleton()
            )
        return descend(optimizer, lambda: loss(twin, dict(twin.named_parameters())), 30)

    copies = rescaled_copies(model, args, 3)
    runs = [train(twin, True) for twin in copies]
    assert runs[0][-1] < runs[0][0]
    for run in runs[1:]:
        assert run == pytest.approx(runs[0], rel=1e-9)
    plain = [train(twin, False) for twin in copies]
    assert all(
        max(abs(a - b) for a, b in zip(run, plain[0], strict=True)) > 1e-3 * plain[0][0]
        for run in plain[1:]
    )
