"""The unrolled network, with its walks as edges of the reduction graph."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np

from ..graph.structure import Structure
from .interpreter import interpret
from .unrolled import Unrolled


@dataclass(frozen=True)
class UnrolledNetwork:
    """The unrolled network of a captured model; a walk is a sequence of positions of scalars."""

    semantics: Unrolled
    number: np.ndarray

    @property
    def num_paths(self) -> int:
        """Number of paths; an upper bound if several walks pass the same weights."""
        return self.semantics.count()

    def walks(self) -> Iterator[tuple[int, ...]]:
        """Sequences of positions of scalars, from the root to a fixed scale."""
        return self.semantics.walks()

    def edges(self, walk: tuple[int, ...]) -> list[int]:
        """Edge numbers of a walk in the reduction graph."""
        return [int(self.number[position]) for position in walk]


def unroll(graph: Structure, max_steps: int | None = None) -> UnrolledNetwork:
    """Interpret the captured graph of ``graph`` again, with separate nodes for time
    steps and repeated calls.

    Args:
        graph: a result of :func:`pathspace.trace`.
        max_steps: largest number of recurrent steps to unroll; all by default.

    Returns:
        The unrolled network.

    Raises:
        UnsupportedError: the unrolled network is too large.
    """
    semantics, _ = interpret(
        graph.captured,
        partial(Unrolled, max_steps=max_steps),
        norm_eps=graph.norm_eps,
        affine=graph.affine,
    )
    total = sum(int(np.prod(shape, dtype=np.int64)) for shape in semantics.shapes.values())
    number = np.full(total, -1, np.int64)
    for i, block in enumerate(graph.blocks):
        number[semantics.offsets[block.name] + block.places] = graph.edge_numbers(i, block.places)
    return UnrolledNetwork(semantics, number)
