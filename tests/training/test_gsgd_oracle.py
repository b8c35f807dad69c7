"""G-SGD against gradient descent on path values, differentiated through
the weights they determine.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from oracles.gsgd import PathProblem, ends, gsgd_step
from oracles.networks import RandomDag, random_rnn
from oracles.strategies import dag_specs, modest, rnn_specs, rules, tied_dag_specs
from slow_names import slow_names
from torch import Tensor, nn
from training_pairs import Problem, largest_difference

from pathspace.training import GSGD

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


def rate(case: Problem, change: float = 0.3) -> float:
    """A learning rate at which the skeleton path values move by at most the fraction `change`."""
    problem = case.oracle()
    probe = gsgd_step(case.model, case.loss, problem, 0.0)
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

    def loss(model: nn.Module, parameters: dict[str, Tensor]) -> Tensor:
        return (torch.func.functional_call(model, parameters, (x,)) - 5 * x).square().mean()

    step = gsgd_step(model, loss, problem, 0.1)
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


@pytest.mark.parametrize("name", NETWORKS)
def test_weights_come_back_from_path_values(name: str) -> None:
    case = Problem(name, "random")
    problem = case.oracle()
    vector = problem.vector(dict(case.model.named_parameters())).detach()
    back = problem.weights(problem.path_values(vector), vector[torch.from_numpy(problem.fixed)])
    torch.testing.assert_close(back, vector, rtol=1e-11, atol=0)


@pytest.mark.sampled(3)
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
    case = Problem(name)
    problem, lr = case.oracle(), rate(case, change)
    one, other = (
        case.loss(twin, gsgd_step(twin, case.loss, problem, lr).parameters).item()
        for twin in case.twins(2)
    )
    assert other == pytest.approx(one, rel=1e-9)


# --- the optimizer


def check_one_step(case: Problem, lr: float) -> None:
    expected = gsgd_step(case.model, case.loss, case.oracle(), lr)
    before = {key: p.detach().clone() for key, p in case.model.named_parameters()}
    optimizer = GSGD(case.model.named_parameters(), lr=lr, skeleton=case.skeleton(case.model))
    assert case.step(case.model, optimizer) == pytest.approx(expected.loss, rel=1e-9)
    assert largest_difference(case.model, expected.parameters) < 1e-10
    # the step itself, which may be small beside the weight
    for key, parameter in case.model.named_parameters():
        wanted = expected.parameters[key] - before[key]
        allowed = 1e-7 * float(wanted.abs().max()) + 1e-12 * float(before[key].abs().max())
        torch.testing.assert_close(parameter.detach() - before[key], wanted, rtol=0, atol=allowed)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("initialised", [False, True])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", NETWORKS)
def test_one_step_is_that_of_the_oracle(name: str, rule: str, initialised: bool) -> None:
    case = Problem(name, rule, initialised)
    check_one_step(case, rate(case))


@pytest.mark.slow
@given(dag_specs() | tied_dag_specs(), rules)
@modest
def test_one_step_on_random_dags(spec: tuple, rule: str) -> None:
    network = RandomDag(*spec)
    case = Problem((network, network.example()), rule)
    check_one_step(case, rate(case))


@pytest.mark.slow
@given(rnn_specs(), rules)
@modest
def test_one_step_on_random_recurrent_networks(spec: tuple, rule: str) -> None:
    case = Problem(random_rnn(*spec), rule)
    check_one_step(case, rate(case))


@pytest.mark.parametrize("name", ["mlp_2x3x5x2", "rnn_op", "batchnorm_residual"])
def test_weights_of_zero_outside_the_skeleton_are_ordinary(name: str) -> None:
    """Biases start at zero: the oracle, which takes logarithms, starts from 1e-200 instead."""
    case = Problem(name)
    skeleton = case.skeleton(case.model)
    outside = {key: ~mask for key, mask in skeleton.masks.items() if "bias" in key}

    def fill(value: float) -> None:
        with torch.no_grad():
            for key, mask in outside.items():
                case.model.get_parameter(key)[mask] = value

    fill(1e-200)
    lr = rate(case)
    expected = gsgd_step(case.model, case.loss, case.oracle(), lr).parameters
    fill(0.0)
    case.step(case.model, GSGD(case.model.named_parameters(), lr=lr, skeleton=skeleton))
    for key, parameter in case.model.named_parameters():
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
    case = Problem(name, unit=True)
    first, *rest = (
        case.train(
            twin,
            lambda m: GSGD(m.named_parameters(), lr=0.01, skeleton=case.skeleton(m)),
            30,
        )
        for twin in case.twins(3)
    )
    assert first[-1] < first[0]
    for run in rest:
        assert run == pytest.approx(first, rel=1e-9)
    plain, *others = (
        case.train(twin, lambda m: torch.optim.SGD(m.parameters(), lr=0.01), 30)
        for twin in case.twins(3)
    )
    for run in others:
        assert max(abs(a - b) for a, b in zip(run, plain, strict=True)) > 1e-3 * plain[0]
