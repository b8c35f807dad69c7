"""Causes of degenerate directions other than rescaling: unused weights,
cancellation, and changes of basis.

Each cause is a family of directions. Counted are its directions in the null space of the
Jacobian that are independent of the causes before it. All of them may include biases,
which compensate constants.

* shift: biases alone, and tables that are added to each other; one subtracts what another adds.
* translation: all units of a layer move by the same amount, which a layer norm or a
  softmax after it subtracts.
* normal: the weights of a unit move along the direction that is orthogonal to all
  outputs of a layer norm.
* kernel: the weights of one unit, or those that read one feature, move along a direction that is
  absent from the inputs, or that no later layer reads.
* redundant: every change of one tensor can be compensated by another, as where two are added.
* scaling: features are scaled in a way that is not in the reduction graph: against the weights of a
  norm whose statistics fix the scale, or where a function is homogeneous on these data, such as a
  clip that changes no value.
* rotation: the input of a layer or RMS norm is rotated, and the weights after the
  norm reverse the rotation.
* linear map: the weights that write a feature space are multiplied by a matrix, and those
  that read it by its inverse: ``W2 W1 = (W2 A^-1)(A W1)``, and ``q^T k = (A q)^T (A^-T k)``
  in the heads of attention.

Feature spaces (:mod:`pathspace.diagnostics.parameters.feature_spaces`) determine
which tensors belong together.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.linalg import orth
from torch import Tensor, nn

from .feature_spaces import FeatureSpace

_INSIDE = 1e-6


@dataclass(frozen=True)
class Symmetry:
    """Directions with one cause.

    Attributes:
        cause: ``"shift"``, ``"translation"``, ``"normal"``, ``"kernel"``, ``"scaling"``,
            ``"rotation"``, ``"linear map"`` or ``"redundant"``.
        place: the tensors between which it acts.
        directions: number of directions that are independent of the causes before.
    """

    cause: str
    place: str
    directions: int


class Attribution:
    """Removes one family after the other from a null space.

    Args:
        null: orthonormal basis of the null space, in live coordinates scaled by
            ``lengths``, shape (live, k).
        known: orthonormal basis of the part with a known cause.
        live: which scalars are live.
        lengths: the factors of live coordinates.
    """

    def __init__(
        self, null: np.ndarray, known: np.ndarray, live: np.ndarray, lengths: np.ndarray
    ) -> None:
        self.live, self.lengths = live, lengths
        self.whole = np.zeros((len(live), null.shape[1]))
        self.whole[live] = null
        self.null, self.known = self.whole, null.T @ known
        self.found: list[Symmetry] = []

    @property
    def left(self) -> int:
        """Directions without a cause."""
        return len(self.known) - len(self.known.T)

    @property
    def unexplained(self) -> np.ndarray:
        """Orthonormal basis of the directions without a cause, in scaled
        coordinates of all scalars.
        """
        return np.asarray(self.whole @ kernel(self.known.T, 0.5))

    def free(self, positions: np.ndarray) -> None:
        """From now on, count directions without a condition on these positions."""
        self.null = self.whole.copy()
        self.null[positions] = 0

    def inside(self, positions: np.ndarray) -> np.ndarray:
        """Orthonormal coefficients of the directions in the null space that are zero
        elsewhere, shape (k, d).
        """
        chosen = np.zeros(len(self.live), bool)
        chosen[positions] = True
        outside = self.null[~chosen & self.live]
        if len(outside) > outside.shape[1]:
            # the triangle has the same null space, and is square
            outside = np.asarray(np.linalg.qr(outside, mode="r"))
        return kernel(outside, _INSIDE * 0.1)

    def directions(self, coefficients: np.ndarray) -> np.ndarray:
        """Directions with given coefficients, in unscaled coordinates, shape (all, d)."""
        return np.asarray((self.whole @ coefficients) / self.lengths[:, None])

    def covers(self, wanted: np.ndarray, given: np.ndarray) -> bool:
        """Whether directions lie in the span of others and of the directions with a cause."""
        span = orth(np.concatenate([self.known, _unit(given)], axis=1), rcond=_INSIDE)
        return bool(np.abs(_unit(wanted) - span @ (span.T @ _unit(wanted))).max(initial=0.0) < 1e-5)

    def take(self, cause: str, place: str, coefficients: np.ndarray) -> None:
        """Count directions of the null space that are independent of those with a cause."""
        fresh = coefficients - self.known @ (self.known.T @ coefficients)
        fresh, sizes, _ = np.linalg.svd(fresh, full_matrices=False)
        fresh = fresh[:, sizes > 1e-5]
        if count := fresh.shape[1]:
            self.known = np.linalg.qr(np.concatenate([self.known, fresh], axis=1))[0]
            if self.found and (self.found[-1].cause, self.found[-1].place) == (cause, place):
                count += self.found.pop().directions
            self.found.append(Symmetry(cause, place, count))


def kernel(matrix: np.ndarray, tolerance: float) -> np.ndarray:
    """Orthonormal vectors, as columns, whose images under a matrix are smaller than a tolerance."""
    _, sizes, right = np.linalg.svd(matrix, full_matrices=True)
    return np.asarray(right[int((sizes > tolerance).sum()) :].T)


def attribute(
    model: nn.Module,
    parameters: Mapping[str, Tensor],
    places: Mapping[str, int],
    spaces: Sequence[FeatureSpace],
    added: set[str],
    work: Attribution,
) -> None:
    """Search for all causes.

    Args:
        model: the model.
        parameters: its trainable parameters, in float64.
        places: position of the first scalar of each among all.
        spaces: feature spaces, whose tensors have the names of ``parameters``.
        added: parameters that are only added; vectors among them, and any
            named ``bias``, are biases.
        work: the rest of the null space; the symmetries are added to it.
    """
    positions = {
        n: places[n] + np.arange(p.numel()).reshape(p.shape) for n, p in parameters.items()
    }
    added = {
        n
        for n, p in parameters.items()
        if p.ndim == 1 and (n in added or "bias" in n.rpartition(".")[2])
    }
    biases = np.concatenate([np.zeros(0, int), *(positions[n] for n in added)])
    work.take("shift", "biases", work.inside(biases))
    work.free(biases)
    factors = {n: where for n, where in positions.items() if n not in added}
    normals = [1 / weight for weight in _norms(model) if (weight != 0).all()]
    reads, writes = (
        {side for space in spaces for side in space.slices if (side in space.readers) is way}
        for way in (True, False)
    )
    for name, where in factors.items():
        if work.left and where.ndim > 1:
            # the dimension of the units that are written; the first one for a tensor in no space
            _slices(name, where, int((name, 0) in reads or (name, 1) in writes), normals, work)
    # heads before the stream that they read, because its tensors contain those of the heads
    spaces = sorted(spaces, key=lambda space: (not space.mixed, len(space.slices)))
    held = [Block.of(space, parameters, factors) for space in spaces]
    for block in held:
        block.shifts(work)
    for block in held:
        block.changes(work)
    _left_over(parameters, factors, work)


def _left_over(
    parameters: Mapping[str, Tensor], factors: Mapping[str, np.ndarray], work: Attribution
) -> None:
    """Symmetries between the tensors of directions without a cause: sums,
    and unknown feature spaces.
    """
    rest = work.unexplained
    names = [name for name, where in factors.items() if (rest[where] ** 2).sum() > 1e-2]
    pairs = list(itertools.combinations(names, 2))
    for pair in pairs:
        where = np.concatenate([factors[name].reshape(-1) for name in pair])
        if not work.left:
            return
        inside = work.inside(where)
        for name in pair:
            own = factors[name].reshape(-1)
            reach = work.null[own[work.live[own]]] @ inside
            # every change of one tensor can be compensated by the other
            if (
                inside.shape[1] >= len(reach) > 1
                and np.linalg.svd(reach, compute_uv=False)[len(reach) - 1] > 1e-6
            ):
                work.take("redundant", " and ".join(pair), inside)
    for chosen in (*pairs, *itertools.combinations(names, 3)):
        for sizes in itertools.product(*(enumerate(factors[name].shape) for name in chosen)):
            if work.left and len({size for _, size in sizes}) == 1 and sizes[0][1] > 1:
                sides = {
                    (n, d): np.arange(size) for n, (d, size) in zip(chosen, sizes, strict=True)
                }
                Block.of(FeatureSpace(sides, frozenset(sides)), parameters, factors).changes(work)


def _norms(model: nn.Module) -> list[np.ndarray]:
    """The weights of all layer norms, 1 where one has none."""
    norms = [
        m for m in model.modules() if isinstance(m, nn.LayerNorm) and len(m.normalized_shape) == 1
    ]
    return [
        np.ones(m.normalized_shape) if m.weight is None else m.weight.detach().numpy()
        for m in norms
    ]


def _slices(
    name: str, where: np.ndarray, written: int, normals: Sequence[np.ndarray], work: Attribution
) -> None:
    """Directions inside the weights of one unit, or inside those that read one feature."""
    causes = ("shift", "translation", "normal", "kernel")
    found: dict[str, list[np.ndarray]] = {cause: [] for cause in causes}
    whole = work.inside(where.reshape(-1))
    if not whole.shape[1]:
        return
    tensor = work.null[where.reshape(-1)] @ whole
    for dim in range(where.ndim):
        index = np.moveaxis(np.arange(where.size).reshape(where.shape), dim, 0)
        along = (
            [("normal", n) for n in normals] + [("shift", None)]
            if dim == written
            else [("translation", None)]
        )
        for here in index.reshape(len(index), -1):
            outside = np.ones(where.size, bool)
            outside[here] = False
            alone = kernel(tensor[outside], _INSIDE)
            if not alone.shape[1]:
                continue
            own = whole @ alone
            found["kernel"].append(own)
            for cause, vector in along:
                coefficients = _along(vector, where.reshape(-1)[here], own, work)
                if coefficients is not None:
                    found[cause].append(coefficients)
                    break
    for cause, parts in found.items():
        if parts:
            work.take(cause, name, orth(np.concatenate(parts, axis=1), rcond=_INSIDE))


def _along(
    vector: np.ndarray | None, where: np.ndarray, own: np.ndarray, work: Attribution
) -> np.ndarray | None:
    """Coefficients of a direction in the null space that equals a vector (or 1) at the
    live ones of some positions.
    """
    vector = np.ones(len(where)) if vector is None else vector
    if len(vector) != len(where) or not work.live[where].any():
        return None
    wanted = vector[work.live[where]]
    reach = work.directions(own)[where][work.live[where]]
    answer = np.linalg.lstsq(reach, wanted, rcond=None)[0]
    if np.linalg.norm(reach @ answer - wanted) > _INSIDE * np.linalg.norm(wanted):
        return None
    return np.asarray(own @ answer / np.linalg.norm(answer))[:, None]


def _unit(vectors: np.ndarray) -> np.ndarray:
    return np.asarray(vectors / np.maximum(np.linalg.norm(vectors, axis=0), 1e-300))


@dataclass(frozen=True)
class _Share:
    """A tensor's share of a feature space: values (features, rest), and the positions
    of its scalars among all.
    """

    value: np.ndarray
    where: np.ndarray
    reads: bool


@dataclass(frozen=True)
class Block:
    """A feature space with the values of its tensors.

    Attributes:
        place: their names.
        sides: shares of tensors with several dimensions.
        vectors: positions of vectors that multiply features, such as the weights of norms.
        mixed: see :class:`~pathspace.diagnostics.parameters.feature_spaces.FeatureSpace`.
    """

    place: str
    sides: tuple[_Share, ...]
    vectors: np.ndarray
    mixed: bool

    @staticmethod
    def of(
        space: FeatureSpace, parameters: Mapping[str, Tensor], factors: Mapping[str, np.ndarray]
    ) -> Block:
        """The trainable tensors of a feature space; separate features in one tensor (q,
        k, v) are separate shares.
        """
        names: list[str] = []
        sides, vectors = [], [np.zeros(0, int)]
        for (name, dim), numbers in space.slices.items():
            if name not in factors:
                continue
            names.append(name)
            where = np.moveaxis(factors[name], dim, 0)
            if where.ndim == 1:
                vectors.append(where[numbers])
                continue
            value = np.moveaxis(parameters[name].detach().numpy(), dim, 0)
            for run in _runs(numbers) if _apart(numbers) else [numbers]:
                flat = (len(run), -1)
                sides.append(
                    _Share(
                        value[run].reshape(flat),
                        where[run].reshape(flat),
                        (name, dim) in space.readers,
                    )
                )
        return Block(
            ", ".join(dict.fromkeys(names)), tuple(sides), np.concatenate(vectors), space.mixed
        )

    def _within(self, sides: Sequence[_Share], work: Attribution) -> tuple[np.ndarray, np.ndarray]:
        """Coefficients of the null directions in these tensors only, such that the
        directions are orthonormal.
        """
        where = np.concatenate([self.vectors, *(side.where.reshape(-1) for side in sides)])
        coefficients = work.inside(where)
        _, sizes, turn = np.linalg.svd(work.directions(coefficients)[where], full_matrices=False)
        keep = sizes > 1e-9 * sizes.max(initial=1e-300)
        coefficients = coefficients @ (turn[keep].T / sizes[keep])
        return coefficients, work.directions(coefficients)

    def shifts(self, work: Attribution) -> None:
        """Take shifts: the same amount is added to all entries of one table and
        subtracted from other tables.
        """
        writers = [side for side in self.sides if not side.reads]
        if len(writers) < 2 or not work.left:
            return
        coefficients, moved = self._within(writers, work)
        rest = [np.zeros((0, moved.shape[1]))]
        for side in writers:
            for row in side.where:
                live = moved[row[work.live[row]]]
                rest.append(live - live.mean(0, keepdims=True) if len(live) else live)
        self._take("shift", coefficients @ kernel(np.concatenate(rest), _INSIDE), work)

    def changes(self, work: Attribution) -> None:
        """Take linear maps, rotations and scalings: writers and readers of the space
        are multiplied by matrices.
        """
        if not work.left or not self.sides:
            return
        coefficients, moved = self._within(self.sides, work)
        if not moved.shape[1]:
            return
        tied = len({len(side.value) for side in self.sides}) == 1
        apart = [_multiplied(side, moved, work.live) for side in self.sides]
        every = coefficients @ kernel(np.concatenate(apart), _INSIDE)
        writers = [side for side in self.sides if not side.reads]
        if tied and writers:
            size = len(writers[0].value)
            unit = np.eye(size**2).reshape(size, size, size, size)
            diagonal = unit[np.arange(size), np.arange(size)]
            upper = unit[np.triu_indices(size, 1)]
            apart = [rest for side, rest in zip(self.sides, apart, strict=True) if side.reads]
            alike = (
                coefficients
                @ kernel(
                    np.concatenate([_spanned(some, writers, moved, work.live), *apart]), _INSIDE
                )
                for some in (diagonal, upper - upper.swapaxes(1, 2), upper + upper.swapaxes(1, 2))
            )
            scaled, odd, even = alike
            if not self.mixed:
                self._take("scaling", scaled, work)
            if work.covers(every, odd) and not work.covers(every, even):
                self._take("rotation", odd, work)
        self._take("linear map", every, work)

    def _take(self, cause: str, coefficients: np.ndarray, work: Attribution) -> None:
        if coefficients.shape[1]:
            work.take(cause, self.place, orth(_unit(coefficients), rcond=_INSIDE))


def _multiplied(side: _Share, moved: np.ndarray, live: np.ndarray) -> np.ndarray:
    """The part of directions that is not ``A W`` with a matrix A."""
    rest = [_beside(side.value[:, live[row]].T, moved[row[live[row]]]) for row in side.where]
    return np.concatenate([np.zeros((0, moved.shape[1])), *rest])


def _spanned(
    matrices: np.ndarray, sides: Sequence[_Share], moved: np.ndarray, live: np.ndarray
) -> np.ndarray:
    """The part of directions that is not ``A W`` with one combination A
    of some matrices for all.
    """
    value = np.concatenate([side.value for side in sides], axis=1)
    where = np.concatenate([side.where for side in sides], axis=1)
    seen = live[where]
    return _beside((matrices @ value)[:, seen].T, moved[where[seen]])


def _beside(family: np.ndarray, directions: np.ndarray) -> np.ndarray:
    """The part of directions orthogonal to the span of a family."""
    return np.asarray(directions - family @ np.linalg.lstsq(family, directions, rcond=1e-10)[0])


def _runs(numbers: np.ndarray) -> list[np.ndarray]:
    return np.split(numbers, np.flatnonzero(np.diff(numbers) != 1) + 1)


def _apart(numbers: np.ndarray) -> bool:
    """Whether positions are several runs of the same length."""
    lengths = {len(run) for run in _runs(numbers)}
    return len(lengths) == 1 and lengths != {1}


__all__ = ["Attribution", "Block", "Symmetry", "attribute"]
