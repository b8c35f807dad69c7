"""The network unrolled over time and depth, for enumerating its paths.

A node is a *set of arrivals*, pairs (edge, previous node). Elements with the same set are one node,
so copies over the batch, over space and over calls are merged, while the time steps of a recurrent
network are separate nodes. A path goes from the root to a fixed scale (mostly an output) and is the
sequence of scalar weights on it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from fractions import Fraction
from functools import partial
from math import lcm, prod

import numpy as np
import torch
from torch import Tensor

from ..errors import UnsupportedError
from ..graph.structure import Structure
from .interpreter import interpret
from .semantics import Semantics
from .values import NEUTRAL, ROOT, Value, Weight, compress, constant, distinct

START = -1
PRODUCT = -2
Arrivals = frozenset[tuple[int, int]]

MAX_EDGES = 2_000_000


class Unrolled(Semantics):
    """The interpretation whose nodes are those of the network, over ``max_steps`` at most."""

    uniform = False

    def __init__(
        self,
        offsets: dict[str, int],
        shapes: dict[str, tuple[int, ...]],
        max_steps: int | None = None,
    ) -> None:
        super().__init__(offsets, shapes)
        self.max_steps = max_steps
        # node 0 is the root, where paths start
        self.arrivals: list[Arrivals] = [frozenset({(START, ROOT)})]
        self._known: dict[Arrivals, int] = {self.arrivals[0]: ROOT}
        self.sinks: dict[int, None] = {}
        self._edges = 0
        self.has_quotients = False
        # index -> its table, for indices with fewer positions than rows
        self._few: dict[tuple[int, object], str | None] = {}
        # place of an index, or of a column of it -> the rows it chooses from
        self._choices: dict[tuple[object, ...], int] = {}
        # whether the rows that one index chooses meet those of all others
        self.rows_meet = True
        # position of a scalar -> the number of its edge in the reduction graph, or -1
        self.number = np.zeros(0, np.int64)
        # factors of products, by the number in their arrival
        self.pairs: list[tuple[int, ...]] = []

    def node(self, arrivals: Arrivals) -> int:
        """The node with exactly these arrivals."""
        if not arrivals:
            return NEUTRAL
        if arrivals not in self._known:
            self._edges += len(arrivals)
            if self._edges > MAX_EDGES:
                raise UnsupportedError(
                    f"The unrolled network has more than {MAX_EDGES:,} scalar edges, too many to"
                    " enumerate paths; use smaller example inputs, or use the certificate, which"
                    " needs no enumeration."
                )
            self._known[arrivals] = len(self.arrivals)
            self.arrivals.append(arrivals)
        return self._known[arrivals]

    def _union(self, nodes: Iterable[int]) -> int:
        kept = {node for node in nodes if node != NEUTRAL}
        if len(kept) == 1:
            return kept.pop()
        return self.node(frozenset().union(*(self.arrivals[node] for node in kept)))

    def join(self, *values: Value) -> Tensor:
        """Elementwise union of the arrivals."""
        ids = torch.broadcast_tensors(*(self.activation(value) for value in values))
        table = torch.stack(list(ids), -1)
        return self._map(table, self._union)

    def _map(self, table: Tensor, function: object) -> Tensor:
        """Apply a function of rows to the last dimension, once for each distinct row."""
        shape = table.shape[:-1]
        small = distinct(compress(table).movedim(-1, 0)).movedim(0, -1)
        small = small.expand(*small.shape[:-1], table.shape[-1])
        rows, inverse = torch.unique(small.reshape(-1, table.shape[-1]), dim=0, return_inverse=True)
        new = torch.tensor([function(row) for row in rows.tolist()], dtype=torch.int64)  # type: ignore[operator]
        return new[inverse].reshape(small.shape[:-1]).expand(shape)

    def _together(self, rows: Tensor, dims: Iterable[int], function: object) -> Tensor:
        """Apply a function to all rows along some dimensions together; of none it is zero."""
        rank = rows.dim() - 1
        wanted = {dim % rank for dim in dims}
        kept = [dim for dim in range(rank) if dim not in wanted]
        if not rows.numel():
            return constant([rows.shape[dim] for dim in kept], NEUTRAL)
        rows = rows.permute(*kept, *sorted(wanted), rank)
        return self._map(rows.reshape(*rows.shape[: len(kept)], -1), function)

    def merged(self, ids: Tensor, dims: Sequence[int]) -> Tensor:
        """Union over dimensions."""
        result = self._together(distinct(ids).unsqueeze(-1), dims, self._union)
        return result[tuple(None if dim in dims else slice(None) for dim in range(ids.dim()))]

    def contract(self, weight: Weight, value: Value, dims: Sequence[int]) -> Tensor:
        """Every scalar weight is an edge from its operand's node."""
        both = torch.broadcast_tensors(weight.positions(self.offsets), self.activation(value))

        def arrive(row: list[int]) -> int:
            pairs = zip(row[0::2], row[1::2], strict=True)
            return self.node(frozenset((edge, node) for edge, node in pairs if node != NEUTRAL))

        return self._together(torch.stack(both, -1), dims, arrive)

    def attach(self, weight: Weight) -> Tensor:
        """Edges from the root."""
        return self.contract(weight, constant(weight.shape), ())

    def gathered(self, weight: Weight, rows: Sequence[int], node: object) -> Weight | None:
        """All rows in turn, those of several tables against each other, or any at any position."""
        shape = tuple(rows)
        count = prod(shape)
        if count >= weight.shape[0]:
            columns = count // shape[0] if shape[0] >= weight.shape[0] else 1
            turns = [
                self._turn((self.place.run, node, column), count // columns, weight.shape[0])
                for column in range(columns)
            ]
            picked = torch.stack(turns, 1).reshape(shape)
            return Weight(None, weight.positions(self.offsets)[picked])
        if self._few.setdefault((self.place.run, node), weight.name) != weight.name:
            raise UnsupportedError(
                f"Paths through the {weight.shape[0]} rows of {weight.name!r} cannot be enumerated"
                f" with an index of {prod(shape)} positions that reads several tables; use larger"
                " example inputs, or use the certificate, which needs no enumeration."
            )
        return None

    def _turn(self, place: tuple[object, ...], count: int, rows: int) -> Tensor:
        """The rows that an index chooses at its positions, one turn after the other."""
        self._choices.setdefault(place, rows)
        number, every = [*self._choices].index(place), [*self._choices.values()]
        before = prod(every[:number])
        if len(every) > 1 and count < prod(every):
            self.rows_meet = False
        position = torch.arange(count)
        # every combination of rows, or else every pair of them
        exact = number and count >= before * rows
        shift = position // lcm(before, rows) if exact else number * (position // rows)
        return (position + shift) % rows

    def fix(self, value: Tensor) -> None:
        """End paths in these elements."""
        for node in distinct(value).unique().tolist():
            if node not in (ROOT, NEUTRAL):
                self.sinks[node] = None

    def product(self, *factors: tuple[int | Fraction, Tensor]) -> Tensor:
        """A path passes all factors of a product; a quotient has no paths."""
        ids = torch.broadcast_tensors(*(entry for _, entry in factors))
        if any(power < 1 for power, entry in factors if not bool((distinct(entry) == ROOT).all())):
            self.has_quotients = True
            for entry in ids:
                self.fix(entry)
            return constant(ids[0].shape)
        powers = [int(power) for power, _ in factors]
        if sum(powers) > MAX_EDGES:
            raise UnsupportedError(
                f"The unrolled network has a product with {sum(powers):,} factors, too many to"
                " enumerate paths; use the certificate, which needs no enumeration."
            )

        def together(row: list[int]) -> int:
            if NEUTRAL in row:
                return NEUTRAL
            nodes = sorted(
                node
                for node, power in zip(row, powers, strict=True)
                for _ in range(power)
                if node != ROOT
            )
            if len(nodes) < 2:
                return nodes[0] if nodes else ROOT
            self.pairs.append(tuple(nodes))
            return self.node(frozenset({(PRODUCT, len(self.pairs) - 1)}))

        return self._map(torch.stack(list(ids), -1), together)

    def cut(self, value: Value, dims: Sequence[int], exact: bool = False) -> Tensor:
        """No path passes a normalisation: paths start again after it."""
        return constant(self.activation(value).shape)

    def observe(self, value: Tensor) -> Tensor:
        """No path ends in an operand of which only the sign is used."""
        return constant(value.shape)

    def steps(self, sequence: Tensor, dim: int) -> tuple[list[Tensor], bool]:
        """The requested number of steps, which have nodes of their own."""
        return list(sequence.unbind(dim)[: self.max_steps]), False

    def edges(self, walk: tuple[int, ...]) -> list[int]:
        """Edge numbers of a walk in the reduction graph."""
        return [int(self.number[position]) for position in walk]

    def longest(self) -> int:
        """Number of weights on the longest path, with repetitions."""
        length = [0] * len(self.arrivals)
        for node in range(1, len(self.arrivals)):
            for edge, before in self.arrivals[node]:
                if edge == PRODUCT:
                    passed = sum(length[factor] for factor in self.pairs[before])
                else:
                    passed = 0 if edge == START else 1 + length[before]
                length[node] = max(length[node], passed)
        return max((length[node] for node in self.sinks), default=0)

    def walks(self) -> Iterator[tuple[int, ...]]:
        """Every distinct sequence of scalar weights from the root to a fixed scale."""
        seen: set[tuple[int, ...]] = set()
        stack: list[tuple[tuple[int, ...], tuple[int, ...]]] = [
            ((node,), ()) for node in self.sinks
        ]
        while stack:
            pending, tail = stack.pop()
            if not pending:
                if tail and tail not in seen:
                    seen.add(tail)
                    yield tail
                continue
            node, rest = pending[-1], pending[:-1]
            for edge, before in sorted(self.arrivals[node], reverse=True):
                if edge == START:
                    stack.append((rest, tail))
                elif edge == PRODUCT:
                    stack.append((rest + self.pairs[before], tail))
                else:
                    # the only arrival of the root is the start
                    stack.append((rest if before == ROOT else (*rest, before), (edge, *tail)))


def unroll(graph: Structure, max_steps: int | None = None) -> Unrolled:
    """Interpret the graph again, with separate nodes for time steps and repeated calls."""
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
    semantics.number = number
    return semantics
