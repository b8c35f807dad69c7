"""Basis paths against enumerated paths: number, exact rank, integer
coefficients, values, rebuilding.
"""

from __future__ import annotations

import functools

import numpy as np
import pytest
import sympy
import torch
from cases import CASES, NORMALISED
from hypothesis import given
from oracles.alignment import aligned, edge_slots, incidence, path_problem
from oracles.exact import exact_rank
from oracles.networks import RandomConv, RandomDag, random_rnn
from oracles.pathsets import enumerate_paths
from oracles.strategies import conv_specs, dag_specs, modest, rnn_specs, rules, tied_dag_specs
from torch import nn

import pathspace as ps
from pathspace.paths.basis import BasisPaths

RULES = ["modulo", "magnitude", "random"]


@functools.cache
def traced(name: str) -> ps.ReductionGraph:
    model, args = CASES[name]()
    return ps.trace(model, *args, sizes="given")


def basis_of(name: str, rule: str) -> BasisPaths:
    return traced(name).skeleton(rule, seed=1).basis()


def check_basis(graph: ps.ReductionGraph, basis: BasisPaths, paths: np.ndarray) -> None:
    """The basis is one, exactly, and every given path is an integer combination of it, exactly."""
    counts = basis.counting_matrix().toarray().astype(np.int64)
    assert counts.shape == (len(basis), graph.num_weights)
    assert len(basis) == graph.dimension == exact_rank(counts)
    assert not (counts @ incidence(graph)).any()
    # coefficients are linear in the path (one test below); hundreds of paths show
    # more than tens of thousands
    some = paths[:: max(1, len(paths) // 300)]
    coefficients = basis.coefficients(some)
    assert np.issubdtype(coefficients.dtype, np.integer)
    assert np.array_equal(coefficients @ counts, some)
    for path, row in zip(some[:3], coefficients, strict=False):
        assert np.array_equal(basis.coefficients(path), row)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", CASES)
def test_basis_is_exact(name: str, rule: str) -> None:
    graph, (model, args) = traced(name), CASES[name]()
    paths = np.zeros((0, graph.num_weights), np.int64)
    if name not in NORMALISED:
        paths = aligned(graph, enumerate_paths(model, *args))
    check_basis(graph, graph.skeleton(rule, seed=1).basis(), paths)


def check_random(model: nn.Module, args: tuple[torch.Tensor, ...], rule: str) -> None:
    graph = ps.trace(model, *args, sizes="given")
    check_basis(
        graph, graph.skeleton(rule, seed=2).basis(), aligned(graph, enumerate_paths(model, *args))
    )


@pytest.mark.slow
@given(dag_specs(), rules)
@modest
def test_basis_of_random_dags(spec: tuple, rule: str) -> None:
    model = RandomDag(*spec)
    check_random(model, model.example(), rule)


@given(tied_dag_specs(), rules)
@modest
def test_basis_of_random_dags_with_products_and_shared_matrices(spec: tuple, rule: str) -> None:
    model = RandomDag(*spec)
    check_random(model, model.example(), rule)


@pytest.mark.slow
@given(conv_specs(), rules)
@modest
def test_basis_of_random_convolutional_networks(spec: tuple, rule: str) -> None:
    model = RandomConv(*spec)
    check_random(model, model.example(), rule)


@pytest.mark.slow
@given(rnn_specs(), rules)
@modest
def test_basis_of_random_recurrent_networks(spec: tuple, rule: str) -> None:
    check_random(*random_rnn(*spec), rule)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", CASES)
def test_counting_matrix_is_that_of_the_oracle(name: str, rule: str) -> None:
    """The same two trees, turned into rows by exact inversion of the trees' incidence matrices."""
    graph = traced(name)
    skeleton = graph.skeleton(rule, seed=1)
    assert np.array_equal(
        skeleton.basis().counting_matrix().toarray(), path_problem(graph, skeleton).rows
    )


@pytest.mark.parametrize("name", CASES)
def test_masks_mark_the_trees(name: str) -> None:
    graph = traced(name)
    skeleton = graph.skeleton("random", seed=3)
    problem = path_problem(graph, skeleton)
    for masks, numbers in (
        (skeleton.incoming, problem.tree_in),
        (skeleton.outgoing, problem.tree_out),
        (skeleton.masks, [*problem.tree_in, *problem.tree_out]),
    ):
        marked = {
            i for i, (key, flat) in enumerate(edge_slots(graph)) if masks[key].reshape(-1)[flat]
        }
        assert marked == set(numbers)
        assert sum(int(mask.sum()) for mask in masks.values()) == len(marked)


@pytest.mark.parametrize(("name", "one_to_one"), [("rnn_op", True), ("mlp_2x3x5x2_nobias", False)])
def test_each_weight_off_the_trees_has_a_basis_path_of_its_own(name: str, one_to_one: bool) -> None:
    """The mappings of appendix B.1: a path for each weight off the trees, recurrent ones
    included, that passes no other such weight; and one for each skeleton weight of the first
    layer, but for stacks whose second layer is wider.
    """
    basis, graph = basis_of(name, "modulo"), traced(name)
    problem = path_problem(graph, basis.skeleton)
    trees = {*problem.tree_in, *problem.tree_out}
    counts = basis.counting_matrix().toarray()
    off = [i for i in range(graph.num_weights) if i not in trees]
    passed = [[i for i in off if row[i]] for row in counts]
    alone = sorted(one[0] for one in passed if one)
    assert all(len(one) <= 1 for one in passed) and alone == off
    # paths in the skeleton, and skeleton weights of the first layer
    slots = edge_slots(graph)
    first = [i for i in problem.tree_in if slots[i][0] == slots[0][0]]
    whole = [row for row, one in zip(counts, passed, strict=True) if not one]
    passing = sorted(i for row in whole for i in first if row[i])
    assert (passing == sorted(first)) is (len(whole) == len(first)) is one_to_one


def test_masks_of_the_modulo_rule_by_hand() -> None:
    # Algorithm 1 on 2-3-5-2: unit j is entered from j mod n_in and left towards j mod n_out
    skeleton = basis_of("mlp_2x3x5x2_nobias", "modulo").skeleton
    for j in range(3):
        assert skeleton.incoming["0.weight"][j].nonzero().flatten().tolist() == [j % 2]
        assert skeleton.outgoing["2.weight"][:, j].nonzero().flatten().tolist() == [j % 5]
    for j in range(5):
        assert skeleton.incoming["2.weight"][j].nonzero().flatten().tolist() == [j % 3]
        assert skeleton.outgoing["4.weight"][:, j].nonzero().flatten().tolist() == [j % 2]


@pytest.mark.parametrize(
    "name",
    ["mlp_2x4x1x3x2", "residual_cnn", "rnn_op_2_layers", "batchnorm_residual", "tied_transposed"],
)
def test_values_are_products_of_weights(name: str) -> None:
    basis, graph = basis_of(name, "random"), traced(name)
    model, _ = CASES[name]()
    weights = dict(model.named_parameters())
    vector = torch.tensor(
        [float(weights[key].detach().reshape(-1)[flat]) for key, flat in edge_slots(graph)],
        dtype=torch.float64,
    )
    counts = torch.from_numpy(basis.counting_matrix().toarray()).double()
    by_hand = torch.pow(vector, counts).prod(1)
    torch.testing.assert_close(basis.values(), by_hand, rtol=1e-12, atol=0)
    for i in range(0, len(basis), 7):
        assert basis[i].value == pytest.approx(float(by_hand[i]), rel=1e-12)
        assert np.array_equal(basis[i].counting_vector, counts[i].numpy())


@pytest.mark.parametrize("name", ["mlp_2x1x2x1", "rnn_op", "conv1d", "batchnorm_residual"])
def test_monomials_evaluate_to_the_values(name: str) -> None:
    basis, graph = basis_of(name, "modulo"), traced(name)
    model, _ = CASES[name]()
    monomials, values = basis.monomials(), basis.values()
    shapes = {key: parameter.shape for key, parameter in model.named_parameters()}
    weights = {}
    for key, parameter in model.named_parameters():
        for flat, weight in enumerate(parameter.detach().double().flatten().tolist()):
            index = ",".join(str(int(i)) for i in np.unravel_index(flat, shapes[key]))
            weights[f"{key}[{index}]"] = weight
    assert len(monomials) == len(basis) == graph.dimension
    for monomial, value in zip(monomials, values.tolist(), strict=True):
        assert {symbol.name for symbol in monomial.free_symbols} <= set(weights)
        assert all(symbol.is_real and symbol.is_nonzero for symbol in monomial.free_symbols)
        numbers = {
            symbol: sympy.Float(weights[symbol.name], 20) for symbol in monomial.free_symbols
        }
        assert float(monomial.subs(numbers)) == pytest.approx(value, rel=1e-10)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", CASES)
def test_rebuilding_from_values_and_signs_gives_the_same_function(name: str, rule: str) -> None:
    model, args = CASES[name]()
    model, args = model.double(), tuple(arg.double() for arg in args)
    graph = ps.trace(model, *args)
    skeleton = graph.skeleton(rule, seed=4)
    basis = skeleton.basis()
    rebuilt = basis.rebuild(basis.values(), skeleton.signs())
    outputs = torch.func.functional_call(model, dict(model.named_parameters()) | rebuilt, args)
    torch.testing.assert_close(outputs, model(*args), rtol=1e-8, atol=1e-10)
    for key, mask in skeleton.outgoing.items():
        assert (rebuilt[key][mask].abs() == 1).all()


def test_coefficients_refuse_what_is_no_circulation() -> None:
    basis = basis_of("mlp_3x4x2", "modulo")
    with pytest.raises(ps.InputError, match="expected"):
        basis.coefficients(np.eye(traced("mlp_3x4x2").num_weights, dtype=np.int64)[0])


@pytest.mark.parametrize("dims", [1, 2])
def test_a_tree_of_largest_weights_takes_the_largest_tap_of_a_kernel(dims: int) -> None:
    kind = nn.Conv2d if dims == 2 else nn.Conv1d
    model = nn.Sequential(kind(2, 3, 3, bias=False), nn.ReLU(), kind(3, 2, 3, bias=False))
    first, last = model[0].weight, model[2].weight
    with torch.no_grad():
        first.fill_(0.01)
        last.fill_(0.01)
        for unit in range(3):
            first[(unit, unit % 2, unit, 1)[: dims + 2]] = 5.0 + unit
            last[(unit % 2, unit, 2 - unit, unit)[: dims + 2]] = 7.0 + unit
    graph = ps.trace(
        model, torch.randn(1, 2, 7, 7)[..., 0] if dims == 1 else torch.randn(1, 2, 7, 7)
    )
    skeleton = graph.skeleton(rule="magnitude")
    assert sorted(skeleton.tree_in.gather(graph)[1:].tolist()) == [5.0, 6.0, 7.0]
    assert sorted(skeleton.tree_out.gather(graph)[1:].tolist()) == [7.0, 8.0, 9.0]


class Twice(nn.Module):
    """Units that two weights enter, one of them with few numbers or small ones."""

    def __init__(self, other: nn.Parameter | nn.Linear) -> None:
        super().__init__()
        self.a, self.other, self.last = nn.Linear(4, 4, bias=False), other, nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        second = self.other(x) if isinstance(self.other, nn.Linear) else self.other * x
        return self.last(torch.relu(second + self.a(x)))


def entered(graph: ps.ReductionGraph, rule: str) -> set[str]:
    """The parameters whose edges connect the units to the root."""
    tree = graph.skeleton(rule=rule).tree_in
    return {graph.blocks[int(block)].name for block in tree.block[1:]}


@pytest.mark.parametrize("rule", RULES)
def test_matrices_come_before_single_numbers(rule: str) -> None:
    graph = ps.trace(Twice(nn.Parameter(torch.tensor(2.0))), torch.randn(2, 4))
    assert graph.num_units == 1 and entered(graph, rule) == {"a.weight"}


@pytest.mark.parametrize("small", ["a", "other"])
def test_a_unit_waits_for_a_large_weight_whatever_comes_first(small: str) -> None:
    model = Twice(nn.Linear(4, 4, bias=False))
    with torch.no_grad():
        getattr(model, small).weight.mul_(1e-4)
    graph = ps.trace(model, torch.randn(2, 4))
    assert entered(graph, "magnitude") == {f"{'other' if small == 'a' else 'a'}.weight"}
