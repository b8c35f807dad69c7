"""Coordinates for weights ``g v / |v|`` in which causes can be found: the weight
itself, and the length of ``v``.

A direction of the null space that changes a weight by ``A W`` is not linear in ``g`` or ``v``. In
the coordinates ``(W, log |v|)`` it is linear in ``W``, and the length, on which no output depends,
is a separate coordinate.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from torch import Tensor

_PAIRS = ((".original0", ".original1"), ("_g", "_v"))


@dataclass(frozen=True)
class Straight:
    """Directions in the coordinates ``(W, log |v|)``: ``W`` is at the position of ``v``, the
    length at that of ``g``.

    Attributes:
        parameters: values by name, without the lengths.
        turns: for each normalised unit the positions of ``g`` and ``v``, and the derivative of the
            new coordinates by the old ones.
    """

    parameters: dict[str, Tensor]
    turns: list[tuple[np.ndarray, np.ndarray]]

    @staticmethod
    def of(
        parameters: Mapping[str, Tensor], places: Mapping[str, int], live: np.ndarray
    ) -> Straight:
        """Find the normalised weights.

        Args:
            parameters: trainable parameters.
            places: position of the first scalar of each among all.
            live: which scalars are live; a tensor with a unit that is only partly
                live keeps its coordinates.
        """
        values, turns = dict(parameters), []
        for first, second in _pairs(parameters):
            g, v = (parameters[name].detach() for name in (first, second))
            where = [
                places[n] + np.arange(x.numel()).reshape(x.shape)
                for n, x in ((first, g), (second, v))
            ]
            dims = [dim for dim in range(v.ndim) if g.shape[dim] == 1]
            length = v.norm(dim=dims, keepdim=True)
            units = np.moveaxis(where[1], dims, range(-len(dims), 0)).reshape(g.numel(), -1)
            rows = v.movedim(dims, list(range(-len(dims), 0))).reshape(g.numel(), -1).numpy()
            good = live[units].all(1) & live[where[0].reshape(-1)] & (g.reshape(-1) != 0).numpy()
            if (~good & (live[units].any(1) | live[where[0].reshape(-1)])).any():
                continue
            values[second] = g * v / length
            del values[first]
            turns += [
                (np.concatenate([[at], unit]), _derivative(size, row))
                for at, unit, size, row in zip(
                    where[0].reshape(-1)[good],
                    units[good],
                    g.reshape(-1).numpy()[good],
                    rows[good],
                    strict=True,
                )
            ]
        return Straight(values, turns)

    def turned(self, vectors: np.ndarray, live: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """An orthonormal basis of directions in the new coordinates.

        Args:
            vectors: directions as columns, in live coordinates scaled by ``lengths``.
            live: which scalars are live.
            lengths: the factors of live coordinates.
        """
        if not self.turns or not vectors.shape[1]:
            return vectors
        whole = np.zeros((len(live), vectors.shape[1]))
        whole[live] = vectors
        whole /= lengths[:, None]
        for where, derivative in self.turns:
            whole[where] = derivative @ whole[where]
        return np.asarray(np.linalg.qr((whole * lengths[:, None])[live])[0])


def _pairs(parameters: Mapping[str, Tensor]) -> Iterator[tuple[str, str]]:
    for name, v in parameters.items():
        for first, second in _PAIRS:
            other = name.removesuffix(second) + first
            g = parameters.get(other) if name.endswith(second) else None
            fits = g is not None and g.ndim == v.ndim > 1 and g.numel() < v.numel()
            if (
                fits
                and g is not None
                and all(a in (1, b) for a, b in zip(g.shape, v.shape, strict=True))
            ):
                yield other, name


def _derivative(size: float, row: np.ndarray) -> np.ndarray:
    """The derivative of ``(log |v|, g v / |v|)`` by ``(g, v)``."""
    length = float(np.linalg.norm(row))
    unit = row / length
    found = np.zeros((len(row) + 1, len(row) + 1))
    found[0, 1:] = unit / length
    found[1:, 0] = unit
    found[1:, 1:] = size / length * (np.eye(len(row)) - np.outer(unit, unit))
    return found
