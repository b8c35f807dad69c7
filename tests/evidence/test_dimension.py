"""The dimension of path space against the exact rank of all paths, and
against the Jacobian's rank.
"""

from __future__ import annotations

import copy
import functools

import numpy as np
import pytest
import torch
from cases import CASES, NORMALISED, OP_AND_LOOP, mlp
from hypothesis import given
from oracles.alignment import aligned, edge_slots, incidence
from oracles.exact import exact_rank, fraction_rank, integer_inverse
from oracles.jacobian import jacobian_rank
from oracles.networks import Case, RandomConv, RandomDag, random_rnn
from oracles.pathsets import Enumeration, enumerate_paths
from oracles.strategies import conv_specs, dag_specs, modest, rnn_specs, seeds, tied_dag_specs
from torch import nn

import pathspace as ps
from pathspace.inference.unrolled import unroll

pytestmark = pytest.mark.usefixtures("no_rule_fails")

ENUMERABLE = [name for name in CASES if name not in NORMALISED]


@functools.cache
def enumerated(name: str) -> Enumeration:
    model, args = CASES[name]()
    return enumerate_paths(model, *args)


@functools.cache
def traced(name: str) -> ps.ReductionGraph:
    model, args = CASES[name]()
    return ps.trace(model, *args, sizes="given")


# --- the oracles themselves, against values computed by hand


def test_paths_of_the_smallest_stack_by_hand() -> None:
    paths = enumerated("mlp_2x1x2x1_nobias")
    # columns: x1a x2a, ab ac, by cy
    by_hand = [[1, 0, 1, 0, 1, 0], [1, 0, 0, 1, 0, 1], [0, 1, 1, 0, 1, 0], [0, 1, 0, 1, 0, 1]]
    assert sorted(paths.matrix.tolist()) == sorted(by_hand)
    assert exact_rank(paths.matrix) == fraction_rank(paths.matrix) == 3


def test_paths_of_a_scalar_rnn_by_hand() -> None:
    model = nn.RNN(1, 1, nonlinearity="relu", bias=False)
    paths = enumerate_paths(model, torch.zeros(3, 1, 1))
    assert paths.matrix.tolist() == [[1, 0], [1, 1], [1, 2]]


@pytest.mark.parametrize("units", [1, 2, 3])
def test_paths_grow_exponentially_with_the_steps_from_two_units_on(units: int) -> None:
    model = nn.RNN(1, units, nonlinearity="relu", bias=False)
    counts = []
    for steps in (1, 2, 3, 4, 5):
        graph = ps.trace(model, torch.zeros(steps, 1, 1), sizes="given")
        counts.append(len(list(unroll(graph).walks())))
    assert counts == [sum(units ** (s + 1) for s in range(steps)) for steps in (1, 2, 3, 4, 5)]


def test_paths_of_a_convolution_by_hand() -> None:
    # one channel, three taps, padding 1, then a sum: every tap meets the image;
    # bias and taps are the paths
    paths = enumerate_paths(nn.Conv1d(1, 1, 3, padding=1), torch.zeros(1, 1, 2))
    assert paths.matrix.tolist() == [[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]]
    # without the second pixel the outer taps only ever meet padding
    assert enumerate_paths(nn.Conv1d(1, 1, 3, padding=1), torch.zeros(1, 1, 1)).used().tolist() == [
        False,
        True,
        False,
        True,
    ]


def test_a_function_that_is_not_homogeneous_ends_paths_by_hand() -> None:
    paths = enumerate_paths(mlp(1, 1, 1, bias=False, act=nn.Tanh), torch.zeros(1, 1))
    assert paths.matrix.tolist() == [[1, 0], [0, 1]]


@pytest.mark.parametrize("name", ["rnn_op", "rnn_op_2_layers_time_first", "rnn_op_bidirectional"])
def test_the_unrolled_rnn_of_the_oracle_is_the_recurrence(name: str) -> None:
    """In the all-ones network a weight lies on a path exactly where it has a gradient."""
    model, args = CASES[name]()
    for parameter in model.parameters():
        nn.init.ones_(parameter)
    x = torch.ones_like(args[0])
    value = model(x).sum()
    gradients = torch.autograd.grad(value, list(model.parameters()))
    used = torch.cat([(gradient != 0).flatten() for gradient in gradients]).numpy()
    assert (used == enumerated(name).used()).all()


@given(seeds)
@modest
def test_rank_by_gram_matrix_is_rank_by_elimination(seed: int) -> None:
    generator = np.random.default_rng(seed)
    shape = generator.integers(1, 8, 2)
    low = generator.integers(-2, 3, (shape[0], 3)) @ generator.integers(-2, 3, (3, shape[1]))
    assert exact_rank(low) == fraction_rank(low)


def test_integer_inverse_refuses_a_matrix_that_is_not_unimodular() -> None:
    assert integer_inverse(np.array([[2, 1], [1, 1]])).tolist() == [[1, -1], [-1, 2]]
    with pytest.raises(ValueError, match="fractions"):
        integer_inverse(np.array([[2, 0], [0, 1]]))


# --- the library against the oracles

BY_HAND = {
    "mlp_2x1x2x1_nobias": (6, 3),
    "mlp_3x4x2": (26, 4),
    "conv_depthwise": (136, 15),
    "rnn_op_2_layers": (30, 4),
    "gated_product": (42, 8),
    "tied_depth": (26, 4),
    "rnn_first_input": (18, 2),
    "batchnorm_conv": (155, 12),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_weights_and_units_counted_by_hand(name: str) -> None:
    graph = traced(name)
    assert (graph.num_weights, graph.num_units) == BY_HAND[name]
    assert graph.dimension == graph.num_weights - graph.num_units


@pytest.mark.parametrize("name", ENUMERABLE)
def test_dimension_is_the_exact_rank_of_all_paths(name: str) -> None:
    graph = traced(name)
    paths = aligned(graph, enumerated(name))
    assert paths.any(0).all(), "every edge lies on a path"
    assert exact_rank(paths) == graph.dimension


@pytest.mark.parametrize("name", ENUMERABLE)
def test_every_path_is_a_circulation_of_the_reduction_graph(name: str) -> None:
    graph = traced(name)
    assert not (aligned(graph, enumerated(name)) @ incidence(graph)).any()


@pytest.mark.parametrize("name", ENUMERABLE)
def test_the_library_enumerates_the_same_paths(name: str) -> None:
    graph = traced(name)
    theirs = np.array([path.counting_vector for path in graph.paths()]).reshape(
        -1, graph.num_weights
    )
    ours = {tuple(row) for row in aligned(graph, enumerated(name)).tolist()}
    found = {tuple(row) for row in theirs.tolist()}
    assert found == ours


EXACT_JACOBIAN = (
    "mlp_3x4x2 mlp_3x4x2_nobias mlp_4x3x2x1_nobias mlp_3x3x3x3 mlp_leaky mlp_prelu "
    "mlp_prelu_channels mlp_gelu mlp_tanh_then_relu residual_on_input dense_conv conv_gap "
    "conv_flatten conv_depthwise conv_fully conv1d conv1d_dilated_groups residual_cnn "
    "channel_shuffle split_branches chunk_add permute_tokens slices_and_flip rnn_op_nobias "
    "rnn_loop_none_state rnn_first_input_nobias_all tied_depth_injected tied_autoencoder "
    "unused_parameter frozen_parameter conv_dead_taps batchnorm_conv batchnorm_residual"
).split()
"""Networks without other symmetries than rescaling (a linear residual stream, twin biases of `nn.RNN` and
softmax outputs, biases that cancel have more) whose units all have kinks among the inputs: there the
Jacobian's rank is the dimension."""  # noqa: E501


@pytest.mark.slow
@pytest.mark.parametrize("name", EXACT_JACOBIAN)
def test_dimension_is_the_rank_of_the_jacobian(name: str) -> None:
    model, args = CASES[name]()
    assert jacobian_rank(model, *args) == traced(name).dimension


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CASES if name not in EXACT_JACOBIAN])
def test_dimension_bounds_the_rank_of_the_jacobian(name: str) -> None:
    (model, args), graph = CASES[name](), traced(name)
    pinned = {key for pin in graph.pinned for key in pin.parameters}
    constants = sum(
        parameter.numel() for key, parameter in model.named_parameters() if key in pinned
    )
    assert jacobian_rank(model, *args) <= graph.dimension + constants


def check_rank(model: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
    graph = ps.trace(model, *args)
    paths = aligned(graph, enumerate_paths(model, *args))
    assert paths.any(0).all(), "every edge lies on a path"
    assert exact_rank(paths) == graph.dimension


@pytest.mark.slow
@given(dag_specs())
@modest
def test_dimension_of_random_dags(spec: tuple) -> None:
    model = RandomDag(*spec)
    check_rank(model, model.example())


@pytest.mark.slow
@given(tied_dag_specs())
@modest
def test_dimension_of_random_dags_with_products_and_shared_matrices(spec: tuple) -> None:
    model = RandomDag(*spec)
    check_rank(model, model.example())


@pytest.mark.slow
@given(conv_specs())
@modest
def test_dimension_of_random_convolutional_networks(spec: tuple) -> None:
    model = RandomConv(*spec)
    check_rank(model, model.example())


@pytest.mark.slow
@given(rnn_specs())
@modest
def test_dimension_of_random_recurrent_networks(spec: tuple) -> None:
    check_rank(*random_rnn(*spec))


@pytest.mark.parametrize(("op", "loop"), OP_AND_LOOP)
def test_a_recurrent_operation_and_its_loop_have_the_same_graph(op: str, loop: str) -> None:
    a, b = traced(op), traced(loop)
    assert (a.num_weights, a.num_units, a.dimension) == (b.num_weights, b.num_units, b.dimension)


# --- metamorphic


def rescaled(name: str, seed: int = 0) -> tuple[Case, nn.Module, ps.ReductionGraph]:
    """A case in float64, and a copy of it moved by a random gauge transformation."""
    model, args = CASES[name]()
    model, args = model.double(), tuple(arg.double() for arg in args)
    graph = ps.trace(model, *args)
    phi = torch.randn(
        graph.num_units, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )
    twin = copy.deepcopy(model)
    parameters = dict(twin.named_parameters())
    with torch.no_grad():
        for key, factor in graph.gauge(phi).items():
            parameters[key].mul_(factor)
    return (model, args), twin, graph


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", CASES)
def test_a_gauge_transformation_changes_weights_and_nothing_else(name: str) -> None:
    (model, args), twin, graph = rescaled(name)
    torch.testing.assert_close(twin(*args), model(*args), rtol=1e-10, atol=1e-12)
    again = ps.trace(twin, *args)
    assert (again.num_weights, again.num_units) == (graph.num_weights, graph.num_units)
    if graph.num_units:
        moved = dict(twin.named_parameters())
        assert any(not torch.allclose(moved[key], value) for key, value in model.named_parameters())


def test_permuted_units_have_the_same_graph_up_to_names() -> None:
    model, args = CASES["mlp_2x3x5x2"]()
    order = torch.randperm(5, generator=torch.Generator().manual_seed(0))
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for key in ("2.weight", "2.bias"):
            twin.get_parameter(key).copy_(model.get_parameter(key)[order])
        twin.get_parameter("4.weight").copy_(model.get_parameter("4.weight")[:, order])
    torch.testing.assert_close(twin(*args), model(*args))
    first, second = ps.trace(model, *args), ps.trace(twin, *args)
    assert edge_slots(first) == edge_slots(second)
    values, moved = (graph.skeleton("magnitude").basis().values() for graph in (first, second))
    torch.testing.assert_close(values.sort().values, moved.sort().values)


@pytest.mark.parametrize(
    "name", ["mlp_2x3x5x2", "residual_mlp", "conv_groups", "rnn_op_2_layers", "batchnorm_conv"]
)
def test_basis_path_values_are_invariant(name: str) -> None:
    (_, args), twin, graph = rescaled(name)
    again = ps.trace(twin, *args)
    torch.testing.assert_close(
        again.skeleton("modulo").basis().values(),
        graph.skeleton("modulo").basis().values(),
        rtol=1e-10,
        atol=0,
    )
