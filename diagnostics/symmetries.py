"""Causes of degenerate directions beside rescaling: shifts, translations that norms and softmax ignore, linear maps.

Each cause is a family of directions written down from the shapes of tensors alone. A family counts if all of it lies in
the null space of the Jacobian (with the help of biases), numerically: one that does not apply counts nothing, and what
lies in both by coincidence is not a symmetry.

* shift: biases alone; what one adds another takes away, through the linear map between them.
* translation: all units of a layer move by the same amount, which a layer norm or a softmax behind it subtracts.
* scaling: rows of a matrix against the elementwise weights of a norm behind it, with a shift.
* normal: the weights of a unit move along the direction in which a layer norm's output never points.
* linear map: two adjacent linear maps ``W2 W1 = (W2 A^-1)(A W1)``, or the bilinear form ``q^T k`` of attention; and
  what one of two adjacent maps ignores or never yields, added to the other.
* rotation: what a layer or RMS norm takes in turns, and what reads the norm turns back.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from torch import Tensor, nn

# a family with more directions than this is not tried: its factorisation costs their square
MOST_DIRECTIONS = 1500
_INSIDE = 1e-7


@dataclass(frozen=True)
class Symmetry:
    """Directions with one cause.

    Attributes:
        cause: ``"shift"``, ``"scaling"``, ``"translation"``, ``"normal"``, ``"linear map"`` or
            ``"rotation"``.
        place: the tensors between which it acts.
        directions: how many independent ones, beyond those of the causes before.
    """

    cause: str
    place: str
    directions: int


@dataclass(frozen=True)
class _Matrix:
    """A weight, or a part of its units: values (out, in, rest) and the positions of its scalars among all."""

    name: str
    value: np.ndarray
    where: np.ndarray


class Attribution:
    """Takes one family after the other out of a null space.

    Args:
        null: orthonormal basis of the null space, in live coordinates scaled by ``lengths``, shape (live, k).
        known: orthonormal basis of the part that is explained already.
        live: which scalars are live.
        lengths: by what live coordinates are multiplied.
    """

    def __init__(self, null: np.ndarray, known: np.ndarray, live: np.ndarray, lengths: np.ndarray) -> None:
        self.null, self.known, self.live, self.lengths = null, known, live, lengths[live]
        self.found: list[Symmetry] = []

    @property
    def left(self) -> int:
        """Directions without a cause."""
        result: int = self.null.shape[1] - self.known.shape[1]
        return result

    def _scaled(self, family: np.ndarray) -> np.ndarray:
        scaled = family[self.live] * self.lengths[:, None]
        sizes = np.linalg.norm(scaled, axis=0)
        return np.asarray(scaled[:, sizes > 0] / sizes[sizes > 0])

    def take(self, cause: str, place: str, family: np.ndarray, biases: np.ndarray, whole: bool = True) -> bool:
        """Count the directions of the null space that lie in the span of a family and of biases.

        Args:
            cause: what the family is.
            place: where it acts.
            family: its directions as columns, all scalars long.
            biases: directions that may help.
            whole: count nothing unless every direction of the family is null with the help of biases: what lies in
                both by coincidence is not a symmetry.

        Returns:
            Whether the family applies.
        """
        if self.left <= 0 or not 0 < family.shape[1] <= MOST_DIRECTIONS:
            return False
        scaled, helping = self._scaled(family), self._scaled(biases)
        if whole:
            allowed = _orthonormal(np.concatenate([self.null, helping], axis=1), 1e-10)
            if not scaled.size or np.linalg.norm(scaled - allowed @ (allowed.T @ scaled), axis=0).max() > _INSIDE:
                return False
        basis = _orthonormal(np.concatenate([scaled, helping], axis=1), 1e-10)
        # sines rather than cosines, which are 1 to the square of the angle
        _, sines, turn = np.linalg.svd(basis - self.null @ (self.null.T @ basis), full_matrices=False)
        inside = basis @ turn[sines < _INSIDE].T
        fresh = _orthonormal(inside - self.known @ (self.known.T @ inside), 1e-5)
        if fresh.shape[1]:
            self.known = np.concatenate([self.known, fresh], axis=1)
            count = fresh.shape[1]
            if self.found and (self.found[-1].cause, self.found[-1].place) == (cause, place):
                count += self.found.pop().directions
            self.found.append(Symmetry(cause, place, count))
        return True


def _orthonormal(vectors: np.ndarray, tolerance: float) -> np.ndarray:
    left, sizes, _ = np.linalg.svd(vectors, full_matrices=False)
    return np.asarray(left[:, sizes > tolerance * max(1.0, sizes.max(initial=0.0))])


def attribute(model: nn.Module, parameters: Mapping[str, Tensor], places: Mapping[str, int], work: Attribution) -> None:
    """Try all families that the shapes of a model's tensors allow.

    Args:
        model: the model.
        parameters: its trainable parameters, in float64.
        places: position of the first scalar of each among all.
        work: what is left of the null space; gets what is found.
    """
    total = len(work.live)
    positions = {n: places[n] + np.arange(p.numel()).reshape(p.shape) for n, p in parameters.items()}
    vectors = {n: p.detach().numpy() for n, p in parameters.items() if p.ndim == 1}
    # a vector called weight or gamma multiplies what a norm hands on
    added = [n for n in vectors if n.rpartition(".")[2] not in ("weight", "gamma")]
    biases = _columns(total, [(positions[n].reshape(-1, 1), np.ones((len(vectors[n]), 1))) for n in added])
    none = np.zeros((total, 0))
    work.take("shift", "biases", biases, none, whole=False)
    flipped = {
        f"{name}.weight"
        for name, module in model.named_modules()
        # tables of embeddings, transposed convolutions and the Conv1D of transformers keep inputs first
        if isinstance(module, nn.Embedding) or type(module).__name__ == "Conv1D" or getattr(module, "transposed", False)
    }
    matrices = [_matrix(n, p.detach().numpy(), positions[n], n in flipped) for n, p in parameters.items() if p.ndim > 1]
    widths = {each.value.shape[1] for each in matrices}
    parts = [part for each in matrices for part in _parts(each, widths)]
    for place, family in _scalings(total, parts, positions, vectors):
        work.take("scaling", place, family, biases, whole=False)
    for each in matrices:
        ones = np.ones((1, len(each.where)))
        work.take("translation", each.name, _spread_over(total, each.where, ones), biases)
    for each, weight in itertools.product(matrices, _layer_norms(model)):
        if weight.shape == (each.where.shape[1],) and (weight != 0).all():
            work.take("normal", each.name, _spread_over(total, each.where.transpose(1, 0, 2), 1 / weight[None]), biases)
    _linear_maps(total, parts, matrices, biases, work)
    _rotations(total, model, matrices, biases, work)


def _columns(total: int, blocks: list[tuple[np.ndarray, np.ndarray]]) -> np.ndarray:
    """One direction for each row of the blocks: entries at positions."""
    result = np.zeros((total, sum(len(where) for where, _ in blocks)))
    at = 0
    for where, values in blocks:
        for row, entries in zip(where, values, strict=True):
            result[row, at] += entries
            at += 1
    return result


def _matrix(name: str, value: np.ndarray, where: np.ndarray, flipped: bool) -> _Matrix:
    if flipped:
        value, where = value.swapaxes(0, 1), where.swapaxes(0, 1)
    shape = (*value.shape[:2], -1)
    return _Matrix(name, value.reshape(shape), where.reshape(shape))


def _parts(matrix: _Matrix, widths: set[int]) -> Iterator[_Matrix]:
    """The matrix, and where it packs several (queries, keys, values), each of them."""
    yield matrix
    for count in (2, 3):
        size, rest = divmod(len(matrix.value), count)
        if not rest and size in widths:
            for i in range(count):
                rows = slice(i * size, (i + 1) * size)
                yield _Matrix(f"{matrix.name}[{rows.start}:{rows.stop}]", matrix.value[rows], matrix.where[rows])


def _linear_maps(
    total: int, parts: list[_Matrix], matrices: list[_Matrix], biases: np.ndarray, work: Attribution
) -> None:
    """Adjacent maps, ``dW1 = A W1`` with ``dW2 = -W2 A``, and queries and keys, with ``dW2 = -A^T W2``.

    What the second map ignores (the kernel of W2), and what the first never yields (the kernel of its transpose),
    may be added to the other one.
    """
    for first, second in itertools.product(parts, matrices):
        size = len(first.value)
        if first.name.split("[")[0] == second.name or second.value.shape[1] != size or size * size > MOST_DIRECTIONS:
            continue
        place = f"{first.name} and {second.name}"
        if _by_blocks(place, _left(total, first) - _right(total, second), size, biases, work) == 1:
            ignored = _kernel(second.value.transpose(0, 2, 1).reshape(-1, size))
            work.take("linear map", place, _spread_over(total, first.where, ignored), biases)
            unseen = _kernel(first.value.reshape(size, -1).T)
            work.take("linear map", place, _spread_over(total, second.where.transpose(1, 0, 2), unseen), biases)
    for first, second in itertools.combinations(parts, 2):
        size = len(first.value)
        apart = not np.intersect1d(first.where, second.where).size
        if len(second.value) == size and size * size <= MOST_DIRECTIONS and apart:
            swapped = np.arange(size * size).reshape(size, size).T.reshape(-1)
            family = _left(total, first) - _left(total, second)[:, swapped]
            _by_blocks(f"{first.name} and {second.name}", family, size, biases, work)


def _by_blocks(place: str, family: np.ndarray, size: int, biases: np.ndarray, work: Attribution) -> int:
    """Try all matrices A, and if these are too many those of 2, 3, ... blocks (heads); how many blocks, 0 for none."""
    rows = np.arange(size)
    for blocks in range(1, size):
        if size % blocks == 0:
            block = rows // (size // blocks)
            inside = (block[:, None] == block[None, :]).reshape(-1)
            if work.take("linear map", place, family[:, inside], biases):
                return blocks
    return 0


def _rotations(total: int, model: nn.Module, matrices: list[_Matrix], biases: np.ndarray, work: Attribution) -> None:
    """``dW1 = S W1`` with ``dW2 = -W2 g S g^-1`` for a norm of weights g between them, S antisymmetric.

    For a layer norm S leaves the vector of ones alone. All that writes to the norm's input turns, and all that reads
    its output turns back: one map each, or all maps of fitting width (a residual stream).
    """
    for module in model.modules():
        centred = isinstance(module, nn.LayerNorm)
        weight = getattr(module, "weight", None)
        if not (centred or "RMSNorm" in type(module).__name__) or not isinstance(weight, Tensor) or weight.ndim != 1:
            continue
        size, scale = len(weight), weight.detach().numpy()
        if size * size > MOST_DIRECTIONS or not (scale != 0).all():
            continue
        frame = _kernel(np.ones((1, size))) if centred else np.eye(size)
        if len(frame) < 2:
            continue
        skew = [frame.T @ s @ frame for s in _antisymmetric(len(frame))]
        writers = {m.name: _left(total, m) @ _flat(skew) for m in matrices if len(m.value) == size}
        turned = _flat([scale[:, None] * s / scale for s in skew])
        readers = {m.name: _right(total, m) @ turned for m in matrices if m.value.shape[1] == size}
        for first, second in itertools.product(writers, readers):
            if first != second:
                work.take("rotation", f"{first} and {second}", writers[first] - readers[second], biases)
        if len(writers) * len(readers) > 1 and not writers.keys() & readers.keys():
            stream = sum(writers.values()) - sum(readers.values())
            work.take("rotation", f"{', '.join(writers)} and {', '.join(readers)}", np.asarray(stream), biases)


def _antisymmetric(size: int) -> list[np.ndarray]:
    found = []
    for i, j in itertools.combinations(range(size), 2):
        matrix = np.zeros((size, size))
        matrix[i, j], matrix[j, i] = 1, -1
        found.append(matrix)
    return found


def _flat(matrices: list[np.ndarray]) -> np.ndarray:
    """Matrices as the columns that multiply :func:`_left` and :func:`_right`."""
    return np.stack([m.reshape(-1) for m in matrices], axis=1) if matrices else np.zeros((0, 0))


def _kernel(matrix: np.ndarray) -> np.ndarray:
    """Orthonormal vectors that a matrix takes to 0, one in each row."""
    _, sizes, right = np.linalg.svd(matrix, full_matrices=True)
    return np.asarray(right[int((sizes > 1e-10 * sizes.max(initial=1e-300)).sum()) :])


def _spread_over(total: int, where: np.ndarray, vectors: np.ndarray) -> np.ndarray:
    """Each vector over the first dimension of the positions, at each place of the others."""
    flat = where.reshape(len(where), -1).T
    return _columns(total, [(flat, np.broadcast_to(vector, flat.shape)) for vector in vectors])


def _scalings(
    total: int, parts: list[_Matrix], positions: Mapping[str, np.ndarray], vectors: Mapping[str, np.ndarray]
) -> Iterator[tuple[str, np.ndarray]]:
    """Units of a matrix scaled, and the weights of a norm behind it: by the inverse, or to make up for its eps."""
    for first, (name, value) in itertools.product(parts, vectors.items()):
        size = len(value)
        if size == len(first.value):
            rows = (first.where.reshape(size, -1), first.value.reshape(size, -1))
            entries = (positions[name][:, None], value[:, None])
            yield f"{first.name} and {name}", _columns(total, [rows, entries])


def _layer_norms(model: nn.Module) -> list[np.ndarray]:
    """The weights of all layer norms, 1 where one has none."""
    norms = [module for module in model.modules() if isinstance(module, nn.LayerNorm)]
    return [np.ones(m.normalized_shape) if m.weight is None else m.weight.detach().numpy() for m in norms]


def _left(total: int, each: _Matrix) -> np.ndarray:
    """``A W`` for each unit matrix ``A = e_i e_j^T``: row i gets row j."""
    size = len(each.value)
    result = np.zeros((total, size * size))
    for i, j in itertools.product(range(size), repeat=2):
        result[each.where[i].reshape(-1), i * size + j] = each.value[j].reshape(-1)
    return result


def _right(total: int, each: _Matrix) -> np.ndarray:
    """``W A`` for each unit matrix ``A = e_i e_j^T``: column j gets column i."""
    size = each.value.shape[1]
    result = np.zeros((total, size * size))
    for i, j in itertools.product(range(size), repeat=2):
        result[each.where[:, j].reshape(-1), i * size + j] = each.value[:, i].reshape(-1)
    return result


__all__ = ["Attribution", "Symmetry", "attribute"]
