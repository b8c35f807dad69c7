"""Relations between scales: against the null space over the rationals."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from flint import fmpz_mat
from hypothesis import given, settings
from hypothesis import strategies as st

from pathspace.inference import union_find
from pathspace.inference.relations import Relations, Solution
from pathspace.inference.union_find import UnionFind

Row = dict[int, int]


def solved(count: int, rows: list[Row]) -> Solution:
    """The solution of relations between ids 1 to ``count``."""
    system = Relations()
    system.fresh((count,))
    for row in rows:
        system.relate(*((c, torch.tensor([v])) for v, c in row.items()))
    return system.resolve()


def values(solution: Solution, count: int) -> np.ndarray:
    """What each id is in terms of base units: integer matrix, a row per id."""
    basis = np.concatenate(
        [np.zeros((1, solution.units)), np.eye(solution.units), solution.forms.toarray()]
    ).astype(np.int64)
    return basis[np.abs(solution.classes)] * np.sign(solution.classes)[:, None]


def nullity(count: int, rows: list[Row]) -> int:
    """Dimension of the space of solutions, by exact rank."""
    if not rows:
        return count
    matrix = fmpz_mat([[row.get(v, 0) for v in range(1, count + 1)] for row in rows])
    return count - int(matrix.rank())


def residues(solution: Solution, count: int, rows: list[Row]) -> int:
    """How many relations the solution violates."""
    table = values(solution, count)
    return sum(bool(np.any(sum(c * table[v] for v, c in row.items()))) for row in rows)


COUNT = 9
TERMS = st.dictionaries(
    st.integers(1, COUNT), st.sampled_from([-2, -1, -1, 1, 1, 2]), min_size=1, max_size=4
)


@pytest.mark.slow
@given(st.lists(TERMS, max_size=12))
@settings(max_examples=300)
def test_a_solution_satisfies_every_relation(rows: list[Row]) -> None:
    solution = solved(COUNT, rows)
    assert residues(solution, COUNT, rows) == 0
    # (fewer where two scales are fractions of each other)
    assert solution.units <= nullity(COUNT, rows)
    assert np.linalg.matrix_rank(values(solution, COUNT)) == solution.units


@pytest.mark.slow
@given(st.lists(st.lists(st.integers(1, COUNT), min_size=2, max_size=3), max_size=14), st.data())
@settings(max_examples=300)
def test_products_leave_no_more_scales_than_the_null_space(
    products: list[list[int]], data: st.DataObject
) -> None:
    # each product makes an id of its own, and products are multiplied again
    rows: list[Row] = []
    for made, factors in enumerate(products, COUNT + 1):
        row: Row = {made: 1}
        for factor in factors:
            factor = data.draw(st.sampled_from([factor, *range(COUNT + 1, made)]))
            row[factor] = row.get(factor, 0) - 1
        rows.append(row)
    count = COUNT + len(products)
    # and some of them meet
    for left, right in data.draw(
        st.lists(st.tuples(st.integers(1, count), st.integers(1, count)), max_size=4)
    ):
        if left != right:
            rows.append({left: 1, right: -1})
    solution = solved(count, rows)
    assert residues(solution, count, rows) == 0
    assert solution.units <= nullity(count, rows)


def outer(channels: int) -> tuple[Relations, list[torch.Tensor]]:
    """Linear attention: ``kv_ij = k_i v_j`` and ``o_j = q_i kv_ij``."""
    system = Relations()
    k, q, v, o = (system.fresh((channels,)) for _ in range(4))
    inner = system.fresh((channels, channels))
    system.relate((1, inner), (-1, k[:, None]), (-1, v[None]))
    system.relate((1, o[None].expand(channels, channels)), (-1, q[:, None]), (-1, inner))
    return system, [k, q, v, o]


@pytest.mark.parametrize("channels", [3, 20, 200])
def test_linear_attention_keeps_its_scales_at_any_width(channels: int) -> None:
    system, (k, q, v, o) = outer(channels)
    solution = system.resolve()
    # k_i + q_i = o_j - v_j is one number: 4 n scales, 2 n - 1 conditions
    assert solution.units == 2 * channels + 1
    table = values(solution, 4 * channels)
    key, query, value, out = (table[ids.numpy()] for ids in (k, q, v, o))
    assert np.array_equal(key + query, np.broadcast_to(key[0] + query[0], key.shape))
    assert np.array_equal(out - value, key + query)


def test_equal_factors_make_equal_products() -> None:
    # y_j = 2 x_j, y_j + s = b: all x_j are equal, whatever s and b are
    system = Relations()
    x, y, (s, b) = system.fresh((50,)), system.fresh((50,)), system.fresh((2,))
    system.relate((1, y), (-2, x))
    system.relate((1, y), (1, s.expand(50)), (-1, b.expand(50)))
    solution = system.resolve()
    assert solution.units == 2
    assert len({int(solution.classes[i]) for i in x}) == 1


def test_scales_that_are_fractions_of_each_other_are_fixed() -> None:
    assert solved(2, [{1: 3, 2: -4}]).units == 0
    assert solved(3, [{1: 3, 2: -4}, {3: 1, 2: -2}]).units == 0
    assert solved(2, [{1: 1, 2: -4}]).units == 1


@given(st.lists(TERMS, max_size=8), st.data())
@settings(max_examples=100)
def test_fixing_a_unit_is_one_more_equation(rows: list[Row], data: st.DataObject) -> None:
    solution = solved(COUNT, rows)
    own = [i for i in range(1, COUNT + 1) if 0 < abs(solution.classes[i]) <= solution.units]
    if not own:
        return
    chosen = data.draw(st.sampled_from(own))
    fixed = solution.fixed(np.abs(solution.classes[[chosen]]))
    more = [*rows, {chosen: 1}]
    assert residues(fixed, COUNT, more) == 0
    assert fixed.units == solution.units - 1 <= nullity(COUNT, more)
    assert np.linalg.matrix_rank(values(fixed, COUNT)) == fixed.units


PAIR = st.tuples(st.integers(-COUNT, COUNT), st.integers(-COUNT, COUNT))


@pytest.mark.slow
@given(st.lists(st.lists(PAIR, max_size=8), max_size=4), st.integers(1, 9))
@settings(max_examples=300)
def test_equations_solved_in_portions_are_those_of_single_steps(
    said: list[list[tuple[int, int]]], portion: int
) -> None:
    """One signed class after the other is renamed, equation by equation."""
    expected = list(range(COUNT + 1))
    for left, right in (pair for pairs in said for pair in pairs):
        a, b = (expected[abs(v)] * (1 if v > 0 else -1) for v in (left, right))
        if a == -b:
            low, high = 0, abs(a)
        else:
            low, high = sorted((a, b), key=abs)
            low, high = (low, high) if high > 0 else (-low, -high)
        expected = [low * (1 if v > 0 else -1) if high and abs(v) == high else v for v in expected]
    numbers = {v: i for i, v in enumerate(sorted({abs(v) for v in expected}))}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(union_find, "AT_ONCE", portion)
        scales = UnionFind()
        scales.fresh((COUNT,))
        for pairs in said:
            table = torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2)
            scales.unify(table[:, 0], table[:, 1])
        twin = scales.copy()
        twin.unify(torch.tensor([1]), torch.tensor([0]))
        found = scales.solve().tolist()
        assert twin.solve()[1] == 0
    assert found == [numbers[abs(v)] * (1 if v > 0 else -1) for v in expected]
