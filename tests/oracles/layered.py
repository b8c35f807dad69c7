"""Layered networks by their widths: the paths that the printed rule selects, and every network by
its number of weights.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np


@dataclass(frozen=True)
class LayeredMLP:
    """A fully connected network without biases, possibly with recurrent
    matrices on all hidden layers.

    Attributes:
        widths: inputs, hidden layers, outputs.
        recurrent: whether every hidden layer feeds itself at the next time step.
    """

    widths: tuple[int, ...]
    recurrent: bool = False

    @cached_property
    def edges(self) -> tuple[tuple[tuple[int, int], tuple[int, int]], ...]:
        """Edges as pairs of nodes (layer, position); recurrent ones stay within a layer."""
        found = []
        for layer, (n, k) in enumerate(itertools.pairwise(self.widths)):
            found += [((layer, i), (layer + 1, j)) for j in range(k) for i in range(n)]
            if self.recurrent and layer + 2 < len(self.widths):
                found += [((layer + 1, i), (layer + 1, j)) for j in range(k) for i in range(k)]
        return tuple(found)

    @property
    def num_weights(self) -> int:
        """``m``."""
        return len(self.edges)

    @property
    def num_units(self) -> int:
        """``H``: the hidden units."""
        return sum(self.widths[1:-1])

    def modulo(self) -> frozenset[int]:
        """Algorithm 1's union skeleton: unit ``j`` is entered from ``j mod n_before``,
        left to ``j mod n_after``.
        """
        chosen = set()
        for layer in range(1, len(self.widths) - 1):
            for j in range(self.widths[layer]):
                chosen.add(((layer - 1, j % self.widths[layer - 1]), (layer, j)))
                chosen.add(((layer, j), (layer + 1, j % self.widths[layer + 1])))
        return frozenset(i for i, edge in enumerate(self.edges) if edge in chosen)

    def selections(self) -> Iterator[frozenset[int]]:
        """Every union skeleton that picking one entering and one leaving edge per hidden unit can
        give.
        """
        choices: list[list[int]] = []
        forward = [(i, e) for i, e in enumerate(self.edges) if e[0][0] != e[1][0]]
        for unit in ((n, j) for n, width in enumerate(self.widths[1:-1], 1) for j in range(width)):
            choices.append([i for i, (_, head) in forward if head == unit])
            choices.append([i for i, (tail, _) in forward if tail == unit])
        return iter(dict.fromkeys(map(frozenset, itertools.product(*choices))))

    def selected(self, skeleton: frozenset[int]) -> list[list[int]]:
        """The paths that pass at most one edge outside the skeleton, as
        sequences of edge numbers.
        """
        leaving: dict[tuple[int, int], list[int]] = {}
        for i, (tail, _) in enumerate(self.edges):
            leaving.setdefault(tail, []).append(i)
        found = []
        stack: list[tuple[tuple[int, int], list[int], int]] = [
            ((0, i), [], 0) for i in range(self.widths[0])
        ]
        while stack:
            node, walk, outside = stack.pop()
            if node[0] == len(self.widths) - 1:
                found.append(walk)
                continue
            for i in leaving[node]:
                more = outside + (i not in skeleton)
                if more <= 1:
                    stack.append((self.edges[i][1], [*walk, i], more))
        return found

    def count(self, skeleton: frozenset[int]) -> int:
        """How many paths the rule selects, from prefixes and suffixes, without listing one."""
        last = len(self.widths) - 1
        before = Counter((0, j) for j in range(self.widths[0]))
        after = Counter((last, j) for j in range(self.widths[last]))
        # (layer by layer, as the edges are listed)
        chosen = [(t, h) for i, (t, h) in enumerate(self.edges) if i in skeleton and t[0] != h[0]]
        for tail, head in chosen:
            before[head] += before[tail]
        for tail, head in reversed(chosen):
            after[tail] += after[head]
        others = (edge for i, edge in enumerate(self.edges) if i not in skeleton)
        alone = sum(after[0, j] for j in range(self.widths[0]))
        return alone + sum(before[tail] * after[head] for tail, head in others)

    def vectors(self, walks: Sequence[Sequence[int]]) -> np.ndarray:
        """Counting vectors of walks, one row each."""
        rows = np.zeros((len(walks), self.num_weights), np.int64)
        for row, walk in zip(rows, walks, strict=True):
            np.add.at(row, walk, 1)
        return rows

    def __str__(self) -> str:
        return ("RNN " if self.recurrent else "MLP ") + "-".join(map(str, self.widths))


def by_width(recurrent: bool, most_weights: int) -> Iterator[LayeredMLP]:
    """Networks with up to ``most_weights`` weights, smallest first, then
    fewest layers and units.
    """
    found = []
    for depth in range(3, most_weights + 2):
        stack: list[tuple[int, ...]] = [()]
        while stack:
            widths = stack.pop()
            for width in range(1, most_weights + 1):
                grown = (*widths, width)
                least = LayeredMLP(grown + (1,) * (depth - len(grown)), recurrent).num_weights
                if least > most_weights:
                    break
                if len(grown) == depth:
                    found.append(LayeredMLP(grown, recurrent))
                else:
                    stack.append(grown)
    yield from sorted(
        found,
        key=lambda net: (
            net.num_weights,
            len(net.widths),
            sum(net.widths),
            [-w for w in net.widths],
        ),
    )
