"""Substitution, comparison and compression of many short relations, without a loop over relations.

A model can have hundreds of thousands of products of activations. For example, ``k^T v`` of linear
attention has one scale for every pair of channels, ``phi(kv_ij) = phi(k_i) + phi(v_j)``, and ``q
(k^T v)`` imposes ``phi(o_j) = phi(q_i) + phi(kv_ij)``. Substitution gives ``phi(k_i) + phi(q_i) =
phi(o_j) - phi(v_j)`` for all pairs, which is equivalent to far fewer relations: all these sums are
equal. All steps are exact over the integers.
"""

from __future__ import annotations

import numpy as np
from scipy.sparse import coo_array, csr_array

from .union_find import Pairs, components, representatives

# scales with higher powers are fixed; a product of two such powers fits into 64 bits
LARGEST_POWER = 2**31
Rounds = list[tuple[np.ndarray, csr_array]]


def simplified(coefficients: np.ndarray, variables: np.ndarray) -> Pairs:
    """Combine like terms, divide by common factors, drop duplicates; zeros come last."""
    coefficients, variables = _sorted(coefficients, variables)
    twice = ((variables[:, 1:] == variables[:, :-1]) & (variables[:, 1:] > 0)).any(1)
    if twice.any():
        c, v = coefficients[twice], variables[twice]
        for i in range(v.shape[1] - 1, 0, -1):
            same = v[:, i] == v[:, i - 1]
            c[:, i - 1] += np.where(same, c[:, i], 0)
            c[:, i] = np.where(same, 0, c[:, i])
        coefficients[twice], variables[twice] = _sorted(c, v)
    # relations with a coefficient of one have no common factor
    common = (np.abs(coefficients) != 1).all(1)
    if common.any():
        factor = np.gcd.reduce(coefficients[common], axis=1)
        coefficients[common] //= np.where(factor == 0, 1, factor)[:, None]
    coefficients *= np.where(coefficients[:, :1] < 0, -1, 1)
    kept = _distinct(np.concatenate([coefficients, variables], 1)[coefficients[:, 0] != 0])
    width = variables.shape[1]
    return kept[:, :width].copy(), kept[:, width:].copy()


def _sorted(coefficients: np.ndarray, variables: np.ndarray) -> Pairs:
    order = np.argsort(np.where(coefficients == 0, 0, -variables), 1, kind="stable")
    flat = order + variables.shape[1] * np.arange(len(order))[:, None]
    variables, coefficients = variables.reshape(-1)[flat], coefficients.reshape(-1)[flat]
    empty = (coefficients == 0) | (variables == 0)
    variables[empty] = coefficients[empty] = 0
    return coefficients, variables


def _alike(rows: np.ndarray) -> Pairs:
    """Numbers of equal rows, as pairs that follow each other in the order of a hash."""
    factors = np.random.default_rng(0).integers(2**62, size=rows.shape[1], dtype=np.int64) | 1
    # integers modulo 2^64
    keys = rows @ factors
    order = np.argsort(keys, kind="stable")
    near = np.flatnonzero(keys[order][1:] == keys[order][:-1])
    one, next_one = order[near], order[near + 1]
    same = (rows[one] == rows[next_one]).all(1)
    return one[same], next_one[same]


def _distinct(rows: np.ndarray) -> np.ndarray:
    """Rows without most repetitions (``np.unique(axis=0)`` is many times slower)."""
    kept = np.ones(len(rows), bool)
    kept[_alike(rows)[1]] = False
    return rows[kept]


def equations(
    coefficients: np.ndarray, variables: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Variables and what they equal, of relations ``a = 0`` or ``a = +-b``; and their mask."""
    terms = (coefficients != 0).sum(1)
    single = terms == 1
    equal = (terms == 2) & (np.abs(coefficients[:, 0]) == np.abs(coefficients[:, 1]))
    left = np.concatenate([variables[single, 0], variables[equal, 0]])
    right = -variables[equal, 1] * np.sign(coefficients[equal, 0] * coefficients[equal, 1])
    return left, np.concatenate([np.zeros(int(single.sum()), np.int64), right]), single | equal


def implied(coefficients: np.ndarray, variables: np.ndarray, longest: int) -> Pairs:
    """Equations ``a = b`` that follow from relations with the same other terms."""
    lefts, rights = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    terms = (coefficients != 0).sum(1)
    for count in range(2, longest + 1):
        c, v = coefficients[terms == count, :count], variables[terms == count, :count]
        for own in range(count if len(c) > 1 else 0):
            others = [i for i in range(count) if i != own]
            sign = np.sign(c[:, own])
            rest = np.column_stack([np.abs(c[:, own]), c[:, others] * sign[:, None], v[:, others]])
            left, right = (v[rows, own] for rows in _alike(rest))
            lefts.append(left[left != right])
            rights.append(right[left != right])
    return np.concatenate(lefts), np.concatenate(rights)


def forms_of(
    pivots: np.ndarray, rows: np.ndarray, names: np.ndarray, total: int
) -> tuple[np.ndarray, csr_array]:
    """The pivots, each with its form as a sparse row over all variables."""
    where = np.nonzero(rows)
    form = coo_array((rows[where], (where[0], names[where])), shape=(len(rows), total + 1))
    return pivots, csr_array(form)


def multiples(
    coefficients: np.ndarray, variables: np.ndarray, total: int
) -> tuple[Rounds, np.ndarray, np.ndarray]:
    """Substitute variables that are multiples of another one, ``a = 2 b``, everywhere."""
    rounds = []
    while len(variables):
        sizes = np.abs(coefficients)
        # (no product may become too large)
        two = ((sizes != 0).sum(1) == 2) & (sizes.max(1) * sizes.max() < LARGEST_POWER)
        two &= (sizes == 1).sum(1) == 1
        if not two.any():
            break
        c, v = coefficients[two, :2], variables[two, :2]
        one = (np.abs(c[:, 0]) != 1).astype(np.int64)
        at = np.arange(len(c))
        pivots, first = np.unique(v[at, one], return_index=True)
        whole, factor = v[at, 1 - one][first], (-c[at, 1 - one] * c[at, one])[first]
        # (of a chain of multiples, the first)
        free = ~np.isin(whole, pivots)
        if not free.any():
            break
        pivots, whole, factor = pivots[free], whole[free], factor[free]
        rounds.append(forms_of(pivots, factor[:, None], whole[:, None], total))
        name, scale = np.arange(total + 1), np.ones(total + 1, np.int64)
        name[pivots], scale[pivots] = whole, factor
        coefficients, variables = simplified(coefficients * scale[variables], name[variables])
    return rounds, coefficients, variables


def peel(
    coefficients: np.ndarray, variables: np.ndarray, total: int
) -> tuple[Rounds, np.ndarray, np.ndarray]:
    """Solve relations for variables that occur in no other, in rounds; and what remains."""
    rounds = []
    while len(variables):
        uses = np.bincount(variables[coefficients != 0], minlength=total + 1)
        alone = np.abs(coefficients) == 1
        lonely = (uses[variables] == 1) & alone
        if not lonely.any():
            break
        # first those that are the last of their relation: where tied layers follow each other, what
        # enters the first one would otherwise be expressed by what leaves it, and no edge of a
        # skeleton could reach it alone
        latest = np.where(alone, variables, 0)
        last = lonely & (variables == latest.max(1, keepdims=True))
        lonely = last if last.any() else lonely
        done = lonely.any(1)
        # of several such variables take the last: later ids are expressed by earlier ones
        place = np.where(lonely[done], variables[done], -1).argmax(1)
        rows, names = coefficients[done], variables[done]
        at = np.arange(len(rows)), place
        pivots, scale = names[at], -rows[at]
        rows = rows * scale[:, None]
        rows[at] = 0
        rounds.append(forms_of(pivots, rows, names, total))
        coefficients, variables = coefficients[~done], variables[~done]
    return rounds, coefficients, variables


def eliminate_shared(
    coefficients: np.ndarray, variables: np.ndarray, total: int
) -> tuple[Rounds, np.ndarray, np.ndarray]:
    """Substitute variables that occur in exactly two relations of at most three terms."""
    rounds = []
    while len(variables):
        used = coefficients != 0
        # (large coefficients could grow in every round)
        short = (used.sum(1) <= 3) & (np.abs(coefficients).max(1) < LARGEST_POWER // 2)
        fits = used & (np.abs(coefficients) == 1) & short[:, None]
        uses, fitting = (np.bincount(variables[mask], minlength=total + 1) for mask in (used, fits))
        fits &= ((uses == 2) & (fitting == 2))[variables]
        # each relation proposes one variable, and is used if a second relation proposes the same
        offer = np.where(fits, variables, 0).max(1)
        taken = np.bincount(offer, minlength=total + 1) == 2
        taken[0] = False
        rows = np.flatnonzero(taken[offer])
        if not len(rows):
            break
        first, second = rows[np.argsort(offer[rows], kind="stable")].reshape(-1, 2).T
        pivots = offer[first]
        sides = []
        for side in (first, second):
            c, v = coefficients[side, :3], variables[side, :3]
            pivot = v == pivots[:, None]
            sides.append((c[pivot], c[~pivot].reshape(-1, 2), v[~pivot].reshape(-1, 2)))
        (c1, o1, v1), (c2, o2, v2) = sides
        form = -c1[:, None] * o1
        rounds.append(forms_of(pivots, form, v1, total))
        new = simplified(np.concatenate([form * c2[:, None], o2], 1), np.concatenate([v1, v2], 1))
        kept = np.ones(len(coefficients), bool)
        kept[rows] = False
        coefficients = np.concatenate([coefficients[kept], new[0]])
        variables = np.concatenate([variables[kept], new[1]])
    return rounds, coefficients, variables


def compress_relations(coefficients: np.ndarray, variables: np.ndarray, total: int) -> Pairs:
    """Write relations as equalities of sums, and remove those that follow from others.

    Each relation is split into the two sums that occur most often, which it makes equal; equations
    with one sum of each class are equivalent.
    """
    long = (coefficients != 0).sum(1) >= 3
    c, v = coefficients[long], variables[long]
    largest = int(np.abs(c).max(initial=1))
    base = 2 * largest + 1
    if len(c) < 2 or (total + 1) ** 2 * base**2 >= 2**63:
        return coefficients, variables
    parts = np.array([[[0, 1], [2, 3]], [[0, 2], [1, 3]], [[0, 3], [1, 2]]])
    some, names = c[:, parts], v[:, parts]
    signs = np.sign(some[..., 0])
    some = some * signs[..., None]
    keys = (
        ((names[..., 0] * (total + 1) + names[..., 1]) * base + some[..., 0]) * base
        + some[..., 1]
        + largest
    )
    _, index, node, counts = np.unique(
        keys, return_index=True, return_inverse=True, return_counts=True
    )
    node = node.reshape(keys.shape)
    best = counts[node].sum(2).argmax(1)
    rows = np.arange(len(c))
    (left, right), sign = node[rows, best].T, signs[rows, best].prod(1)
    # sums are ids from 1; those of one variable come first, and stand for others
    pair_c, pair_v = some.reshape(-1, 2)[index], names.reshape(-1, 2)[index]
    order = np.argsort(pair_v[:, 1] != 0, kind="stable")
    number = 1 + np.argsort(order)
    classes = components(number[left], -sign * number[right], 1 + len(order))
    first = representatives(classes)[np.abs(classes)] * np.sign(classes)
    pair_c, pair_v = (np.pad(pair[order], ((1, 0), (0, 0))) for pair in (pair_c, pair_v))
    own = np.flatnonzero(first != np.arange(len(first)))
    root = first[own]
    new_c = np.concatenate([pair_c[own], -np.sign(root)[:, None] * pair_c[np.abs(root)]], 1)
    new_v = np.concatenate([pair_v[own], pair_v[np.abs(root)]], 1)
    if len(new_c) >= len(c):
        return coefficients, variables
    new_c, new_v = simplified(new_c, new_v)
    return np.concatenate([coefficients[~long], new_c]), np.concatenate([variables[~long], new_v])
