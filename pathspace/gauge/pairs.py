"""Sizes of weights in matrices, so that the sums over the edges of all units
are matrix-vector products.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from scipy.sparse import csr_array
from torch import Tensor

from ..graph.parts import idle
from ..graph.structure import Structure
from ..models.values import require_values

# when exponents exceed this, they are multiplied into the sizes
FAR = 200.0


def at(logs: Tensor, ids: Tensor) -> Tensor:
    """Log-scales of signed ids."""
    return logs[ids.abs()] * ids.sign()


class MatrixLayout:
    """A tensor as a matrix whose entries scale by ``exp(phi(head r) - phi(side r) - phi(tail c))``.

    If heads and tails vary along the same dimension (grouped convolutions), all entries are rows;
    ``axis``, that of the channels, is never summed over.
    """

    def __init__(
        self, tail: Tensor, head: Tensor, shape: Sequence[int], axis: int | None = None
    ) -> None:
        dims = range(len(shape))
        rows = {d for d in dims if head.shape[d] > 1}
        columns = {d for d in dims if tail.shape[d] > 1}
        mixed = bool(rows & columns)
        if mixed:
            rows, columns = rows | columns, set()
        if axis is not None and axis not in columns:
            rows.add(axis)
        self.rows, self.columns = sorted(rows), sorted(columns)
        self.rest = [d for d in dims if d not in rows and d not in columns]
        heights, widths = ([shape[d] if d in own else 1 for d in dims] for own in (rows, columns))
        root = torch.zeros([1] * len(shape), dtype=torch.int64)
        self.head = head.expand(heights).reshape(-1)
        self.side = (tail if mixed else root).expand(heights).reshape(-1)
        self.tail = (root if mixed else tail).expand(widths).reshape(-1)
        self.by_row, own = axis is None or axis in rows, root
        if axis is not None:
            own = torch.arange(shape[axis]).reshape([-1 if d == axis else 1 for d in dims])
        self.groups = own.expand(heights if self.by_row else widths).reshape(-1)

    def matrix(self, values: Tensor, largest: bool) -> Tensor:
        """Values as a matrix: the largest, or the sum, of those with the same ends."""
        if self.rest:
            combine = torch.amax if largest else torch.sum
            values = combine(values, self.rest, keepdim=True)
        order = [*self.rows, *self.columns, *self.rest]
        return values.permute(order).reshape(len(self.head), len(self.tail)).contiguous()

    def ends(self, logs: Tensor) -> tuple[Tensor, Tensor]:
        """Log-scales of rows and columns: entries scale by ``exp(up r - down c)``."""
        return at(logs, self.head) - at(logs, self.side), at(logs, self.tail)

    def group_of(self, row: Tensor, column: Tensor) -> Tensor:
        """The group (channel) of each entry; 0 if there is only one group."""
        return self.groups[row if self.by_row else column]

    def group_by_tail(self) -> None:
        """Group entries by the id of their tail."""
        self.by_row = bool((self.side != 0).any())
        self.groups = (self.side if self.by_row else self.tail).abs()

    @property
    def count(self) -> int:
        """The number of groups."""
        return int(self.groups.max()) + 1


@dataclass(eq=False)
class Table:
    """Edges as a matrix, with the ids of :class:`MatrixLayout` for its ends; ``loops`` is the sum
    of weights that no gauge changes, which stand there no more.
    """

    sizes: Tensor
    head: Tensor
    side: Tensor
    tail: Tensor
    loops: float = 0.0

    def ends(self, logs: Tensor) -> tuple[Tensor, Tensor]:
        """Log-scales of rows, and those of columns with a minus sign."""
        return at(logs, self.head) - at(logs, self.side), -at(logs, self.tail)

    def by_row(self, factors: Tensor) -> Tensor:
        """Sums over each row, with a factor for each column."""
        return self.sizes @ factors

    def by_column(self, factors: Tensor) -> Tensor:
        """Sums over each column, with a factor for each row."""
        return factors @ self.sizes

    def scale(self, up: Tensor, down: Tensor) -> None:
        """Multiply by ``exp(up + down)``, in two steps, because it can overflow."""
        half = ((up[:, None] + down[None, :]) / 2).exp()
        self.sizes.mul_(half).mul_(half)

    def arcs(self, row: np.ndarray, column: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Tails and heads of entries."""
        tail = self.side.numpy()[row] + self.tail.numpy()[column]
        return tail, self.head.numpy()[row]

    def sample(self) -> tuple[np.ndarray, np.ndarray]:
        """Tails and heads of a few entries other than 0: one for every row and every column."""
        some = (self.sizes > 0).numpy()
        if some.all():
            across = np.arange(max(some.shape))
            return self.arcs(across % some.shape[0], across % some.shape[1])
        rows, columns = np.flatnonzero(some.any(1)), np.flatnonzero(some.any(0))
        return self.arcs(
            np.concatenate([rows, some.argmax(0)[columns]]),
            np.concatenate([some.argmax(1)[rows], columns]),
        )


class Pairs:
    """``|w_e|^p`` for all edges of a graph, summed where edges have the same ends."""

    def __init__(
        self, graph: Structure, p: float, parameters: Mapping[str, Tensor] | None = None
    ) -> None:
        self.graph, self.p = graph, p
        own = graph.parameters if parameters is None else parameters
        require_values("balance", [(block.name, own[block.name]) for block in graph.blocks])
        self._lay_out(self._edges(own))

    def _edges(self, own: Mapping[str, Tensor]) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        for block in self.graph.blocks:
            # (a copy, which is overwritten)
            value = torch.where(idle(block), 0.0, block.values(own[block.name].double()).cpu())
            yield value, block.head, block.tail

    def _lay_out(self, values: Iterable[tuple[Tensor, Tensor, Tensor]]) -> None:
        self.tables = self.held(map(self.table, values))
        self.constant = sum(table.loops for table in self.tables)
        self.origin = np.zeros(self.graph.num_units)
        # log-scales of ids as sums of those of units; what is summed, and what is subtracted
        self._sums = csr_array(self.graph.expand[:, 1:].astype(np.float64))
        positive = csr_array(self._sums.multiply(self._sums > 0))
        self._turn = (positive.T.tocsr(), csr_array(positive - self._sums).T.tocsr())
        # most units that the value of one edge depends on: the exponent in the
        # bound that separates them
        widths = np.asarray(abs(self._sums).sum(1)).reshape(-1)
        self.width = 2.0 * max(1.0, float(widths.max(initial=1.0)))

    def held(self, tables: Iterable[Table]) -> list[Table]:
        """What is kept of the tables."""
        return list(tables)

    def whole(self) -> Iterable[Table]:
        """The tables with every entry."""
        return self.tables

    def table(self, edges: tuple[Tensor, Tensor, Tensor]) -> Table:
        """Sizes of edges: values, which are overwritten, heads and tails."""
        value, heads, tails = edges
        value = value.square_() if self.p == 2 else value.abs_().pow_(self.p)
        layout = MatrixLayout(tails, heads, value.shape)
        sizes, loops = layout.matrix(value, largest=False), 0.0
        # (a side or a tail is the root, whose id is 0)
        shared = layout.head - layout.side
        if bool(torch.isin(shared, layout.tail).any()):
            fixed = shared[:, None] == layout.tail[None, :]
            loops = float(sizes[fixed].sum())
            sizes.masked_fill_(fixed, 0)
        return Table(sizes, layout.head, layout.side, layout.tail, loops)

    def _logs(self, phi: np.ndarray) -> Tensor:
        return torch.from_numpy(self._sums @ phi)

    def _at(self, phi: np.ndarray) -> Iterator[tuple[Table, Tensor, Tensor, Tensor, Tensor]]:
        """Each table with the factors of its rows and columns, and the sums of both."""
        logs = self._logs(phi - self.origin).mul_(self.p)
        for table in self.tables:
            up, down = (ends.exp() for ends in table.ends(logs))
            yield table, up, down, up * table.by_row(down), down * table.by_column(up)

    def sides(self, phi: np.ndarray) -> tuple[np.ndarray, np.ndarray, float]:
        """Sums over the edges that enter and that leave each unit, and over all."""
        shift = self.p * float(np.abs(phi - self.origin).max(initial=0.0))
        if shift * self.width > FAR:
            self._rebase(phi)
        sums = torch.zeros((2, self._sums.shape[0]), dtype=torch.float64)
        total = self.constant
        for table, _, _, by_row, by_column in self._at(phi):
            for side, ids, values in (
                (0, table.head, by_row),
                (1, table.side, by_row),
                (1, table.tail, by_column),
            ):
                sums[side].index_add_(0, ids.abs(), values * (ids > 0))
                sums[1 - side].index_add_(0, ids.abs(), values * (ids < 0))
            total += float(by_row.sum())
        return (*self.to_units(*sums.numpy()), total)

    def curvature(self, phi: np.ndarray) -> Callable[[np.ndarray], np.ndarray]:
        """The second derivative at ``phi``, as a linear map."""
        parts = list(self._at(phi))

        def applied(direction: np.ndarray) -> np.ndarray:
            logs = self._logs(direction)
            result = torch.zeros(len(logs), dtype=torch.float64)
            for table, up, down, by_row, by_column in parts:
                across, along = table.ends(logs)
                rows = by_row * across + up * table.by_row(down * along)
                columns = by_column * along + down * table.by_column(up * across)
                for ids, values in (
                    (table.head, rows),
                    (table.side, -rows),
                    (table.tail, -columns),
                ):
                    result.index_add_(0, ids.abs(), values * ids.sign())
            out: np.ndarray = self._sums.T @ result.numpy()
            return out

        return applied

    def to_units(self, entering: np.ndarray, leaving: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Sums by unit: that of a product counts for each of its factors."""
        plus, minus = self._turn
        return plus @ entering + minus @ leaving, plus @ leaving + minus @ entering

    def _rebase(self, phi: np.ndarray) -> None:
        """Multiply the rescaling by ``phi`` into the sizes, so that later exponents are small."""
        factors = self._logs(phi - self.origin).mul_(self.p)
        for table in self.tables:
            table.scale(*table.ends(factors))
        self.origin = phi.copy()

    def ends(self, most: int) -> tuple[np.ndarray, np.ndarray] | None:
        """Distinct pairs of ids with a weight other than 0; ``None`` for more than ``most``."""
        both = np.zeros((2, 0), np.int64)
        for table in self.whole():
            row, column = (table.sizes > 0).nonzero(as_tuple=True)
            # ids can repeat along rows and columns, so the same pair can occur several times
            ends = torch.stack([table.head, table.side]), table.tail[None]
            often = [int(e.unique(dim=1, return_counts=True)[1].max()) for e in ends]
            if len(row) > most * often[0] * often[1]:
                return None
            found = np.stack(table.arcs(row.numpy(), column.numpy()))
            both = np.unique(np.concatenate([both, found], axis=1), axis=1)
            if both.shape[1] > most:
                return None
        return both[0], both[1]

    def counts(self) -> tuple[np.ndarray, np.ndarray]:
        """How many sizes other than 0 enter each unit, and how many leave it."""
        ones = copy.copy(self)
        ones.tables = [Table((t.sizes > 0).double(), t.head, t.side, t.tail) for t in self.tables]
        ones.origin = np.zeros_like(self.origin)
        entering, leaving, _ = ones.sides(ones.origin)
        return entering, leaving
