"""The two-tree theorem on random directed multigraphs: no network, no
library, only combinatorics.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from oracles.exact import exact_rank, integer_inverse
from oracles.gsgd import basis_rows, ends, signed_walk
from oracles.strategies import modest, rooted_multigraphs, seeds, spanning_tree


def units_of(edges: list[tuple[int, int]]) -> int:
    return max((max(edge) for edge in edges), default=0)


def numbers(tree: dict[int, tuple[int, bool]]) -> list[int]:
    return [edge for edge, _ in tree.values()]


def total(count: int, *walks: dict[int, int]) -> list[int]:
    row = [0] * count
    for walk in walks:
        for edge, times in walk.items():
            row[edge] += times
    return row


def boundary(edges: list[tuple[int, int]], units: int) -> np.ndarray:
    """`(m, H + 1)`: +1 at the head, -1 at the tail; circulations are the integer
    vectors it maps to zero.
    """
    matrix = np.zeros((len(edges), units + 1), dtype=np.int64)
    for number, (tail, head) in enumerate(edges):
        matrix[number, head] += 1
        matrix[number, tail] -= 1
    return matrix


def random_circulation(edges: list[tuple[int, int]], units: int, seed: int) -> np.ndarray:
    """Integer amounts on the edges outside a random tree, balanced by the edges of the tree."""
    generator = np.random.default_rng(seed)
    tree = spanning_tree(edges, units, generator, True)
    total = np.zeros(len(edges), dtype=np.int64)
    for number, (tail, head) in enumerate(edges):
        amount = int(generator.integers(-3, 4))
        total[number] += amount
        for unit, sign in ((tail, 1), (head, -1)):
            for edge, count in signed_walk(unit, edges, tree, False).items():
                total[edge] += sign * amount * count
    return total


def test_basis_by_hand() -> None:
    # 0 -a-> 1 -b-> 2 -c-> 0, and d: 0 -> 2; T_in = {a, b}, T_out = {b, c}: one
    # chain {1, 2}, one free edge d
    edges = [(0, 1), (1, 2), (2, 0), (0, 2)]
    rows = basis_rows(*ends(edges, 2), [0, 1], [1, 2])
    assert rows.tolist() == [[1, 1, 1, 0], [0, 0, 1, 1]]


def test_a_cycle_is_no_tree() -> None:
    with pytest.raises(ValueError, match="cycle"):
        signed_walk(1, [(1, 2), (2, 1), (0, 1)], {1: (1, True), 2: (0, True)}, False)


@given(rooted_multigraphs())
@modest
def test_two_trees_give_a_basis(drawn: tuple) -> None:
    edges, inward, outward = drawn
    units = units_of(edges)
    rows = basis_rows(*ends(edges, units), numbers(inward), numbers(outward))
    assert len(rows) == exact_rank(rows) == len(edges) - units
    assert not (rows @ boundary(edges, units)).any()


@given(rooted_multigraphs())
@modest
def test_walks_along_the_trees_give_the_same_rows(drawn: tuple) -> None:
    """The rows once more, by walking the trees edge by edge, backwards where an
    edge points the wrong way.
    """
    edges, inward, outward = drawn
    units = units_of(edges)
    pre: dict[int, dict[int, int]] = {0: {}} | {
        v: signed_walk(v, edges, inward, False) for v in range(1, units + 1)
    }
    suf: dict[int, dict[int, int]] = {0: {}} | {
        v: signed_walk(v, edges, outward, True) for v in range(1, units + 1)
    }
    walked = [total(len(edges), pre[v], suf[v]) for v in range(1, units + 1)]
    walked = [list(p) for p in dict.fromkeys(map(tuple, walked)) if any(p)]
    for e, (tail, head) in enumerate(edges):
        if e not in numbers(inward) + numbers(outward):
            walked.append(total(len(edges), pre[tail], {e: 1}, suf[head]))
    assert basis_rows(*ends(edges, units), numbers(inward), numbers(outward)).tolist() == walked


@given(rooted_multigraphs())
@modest
def test_the_square_outside_the_leaving_tree_is_unimodular(drawn: tuple) -> None:
    edges, inward, outward = drawn
    rows = basis_rows(*ends(edges, units_of(edges)), numbers(inward), numbers(outward))
    free = sorted(set(range(len(edges))) - set(numbers(outward)))
    inverse = integer_inverse(rows[:, free])
    assert np.array_equal(inverse @ rows[:, free], np.eye(len(free)))


@given(rooted_multigraphs(), seeds)
@modest
def test_every_circulation_is_an_integer_combination(drawn: tuple, seed: int) -> None:
    """`z = sum_e z_e P(e) - sum_v f_v p_v`, where f_v is the flow of z through v."""
    edges, inward, outward = drawn
    units = units_of(edges)
    z = random_circulation(edges, units, seed)
    assert not (z @ boundary(edges, units)).any()
    combined = np.zeros_like(z)

    def put(walk: dict[int, int], factor: int) -> None:
        for edge, count in walk.items():
            combined[edge] += factor * count

    for number, (tail, head) in enumerate(edges):
        put({number: 1}, z[number])
        put(signed_walk(tail, edges, inward, False) if tail else {}, z[number])
        put(signed_walk(head, edges, outward, True) if head else {}, z[number])
    for v in range(1, units + 1):
        through = sum(z[number] for number, (_, head) in enumerate(edges) if head == v)
        put(signed_walk(v, edges, inward, False), -through)
        put(signed_walk(v, edges, outward, True), -through)
    assert np.array_equal(combined, z)
