"""Sizes of weights in matrices, so that the sums over the edges of all units
are matrix-vector products.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from scipy.sparse import csr_array
from torch import Tensor

from ..graph.parts import WeightBlock
from ..graph.structure import Structure
from ..models.values import require_values

# when exponents exceed this, they are multiplied into the sizes
FAR = 200.0


@dataclass(eq=False)
class Table:
    """Edges as a matrix: the row of an edge gives its head, the column its tail.

    Attributes:
        sizes: sums of ``|w|^p`` over the weights of each entry, ``(heads, tails)``.
        head: ids of the rows, with their signs.
        tail: ids of the columns.
    """

    sizes: Tensor
    head: Tensor
    tail: Tensor

    def by_row(self, factors: Tensor) -> Tensor:
        """Sums over each row, with a factor for each column."""
        return self.sizes @ factors

    def by_column(self, factors: Tensor) -> Tensor:
        """Sums over each column, with a factor for each row."""
        return factors @ self.sizes

    def scale(self, up: Tensor, down: Tensor) -> None:
        """Multiply by ``exp(up - down)`` of rows and columns."""
        _scale(self.sizes, up[:, None] - down[None, :])

    def sample(self) -> tuple[np.ndarray, np.ndarray]:
        """Rows and columns of a few entries other than 0: one for every row and every column
        that has any, ``(2, entries)``.
        """
        some = (self.sizes > 0).numpy()
        if some.all():
            across = np.arange(max(some.shape))
            return across % some.shape[0], across % some.shape[1]
        rows, columns = np.flatnonzero(some.any(1)), np.flatnonzero(some.any(0))
        return (
            np.concatenate([rows, some.argmax(0)[columns]]),
            np.concatenate([some.argmax(1)[rows], columns]),
        )


def edge_values(graph: Structure, block: WeightBlock, parameters: Mapping[str, Tensor]) -> Tensor:
    """Values of a tensor's edges in float64, with 0 for scalars that are on no path."""
    require_values("balance", [(block.name, parameters[block.name])])
    value = parameters[block.name].detach().double().cpu() + graph.shifts.get(block.name, 0.0)
    return value if block.unused is None else value.masked_fill(block.unused.expand(block.shape), 0)


class Pairs:
    """``|w_e|^p`` for all edges of a graph, summed where edges have the same ends.

    A gauge transformation multiplies each by ``exp(p (A phi)_e)``. Weights whose ends follow
    from rows and columns are stored as matrices, without lists of ends; a sum over all edges
    reads every weight once.

    Args:
        graph: the reduction graph.
        p: the exponent.
        parameters: parameters by name, of the traced model or a copy; the graph's own by default.
    """

    def __init__(
        self, graph: Structure, p: float, parameters: Mapping[str, Tensor] | None = None
    ) -> None:
        self.graph, self.p = graph, p
        own = graph.parameters if parameters is None else parameters
        values = (
            (edge_values(graph, block, own), block.head, block.tail) for block in graph.blocks
        )
        self._lay_out(values)

    def _lay_out(self, values: Iterable[tuple[Tensor, Tensor, Tensor]]) -> None:
        """Store values with the ids of their ends."""
        graph = self.graph
        self.tables: list[Table] = []
        lists: list[tuple[Tensor, Tensor, Tensor]] = []
        self.constant = 0.0
        for value, heads, tails in values:
            table = self.table(value, heads, tails)
            if isinstance(table, Table):
                self.constant += self._drop_loops(
                    table.sizes, table.head[:, None], table.tail[None, :]
                )
                self.tables.append(self.held(table))
            else:
                self.constant += self._drop_loops(*table)
                lists.append(table)
        self.listed = tuple(torch.cat(parts) for parts in zip(*lists, strict=True)) if lists else ()
        self.origin = np.zeros(graph.num_units)
        unit = csr_array(graph.expand[:, 1:].astype(np.float64))
        self._turn = None
        if graph.forms.shape[0]:
            positive = csr_array(unit.multiply(unit > 0))
            self._turn = (positive.T.tocsr(), csr_array(positive - unit).T.tocsr())
        # most units that the value of one edge depends on: the exponent in the
        # bound that separates them
        widths = np.asarray(abs(unit).sum(1)).reshape(-1)
        self.width = 2.0 * max(1.0, float(widths.max(initial=1.0)))

    def held(self, table: Table) -> Table:
        """What is kept of a table."""
        return table

    def whole(self) -> Iterable[Table]:
        """The tables with every entry."""
        return self.tables

    def table(
        self, value: Tensor, heads: Tensor, tails: Tensor
    ) -> Table | tuple[Tensor, Tensor, Tensor]:
        """Sizes of values, which are overwritten, as a matrix if their ends allow it, else as a
        list with heads and tails.
        """
        value = value.square_() if self.p == 2 else value.abs_().pow_(self.p)
        dims = range(value.dim())
        alike = [d for d in dims if tails.shape[d] == heads.shape[d] == 1 < value.shape[d]]
        if alike:
            value = value.sum(alike, keepdim=True)
        rows = [d for d in dims if heads.shape[d] > 1]
        columns = [d for d in dims if tails.shape[d] > 1]
        if rows and columns and not set(rows) & set(columns):
            rest = [d for d in dims if d not in rows and d not in columns]
            head, tail = heads.reshape(-1), tails.reshape(-1)
            sizes = (
                value.permute([*rows, *columns, *rest]).reshape(len(head), len(tail)).contiguous()
            )
            return Table(sizes, head, tail)
        head, tail = (ids.expand(value.shape).reshape(-1) for ids in (heads, tails))
        return value.double().reshape(-1), head, tail

    def _drop_loops(self, sizes: Tensor, head: Tensor, tail: Tensor) -> float:
        """Set weights with the same scale at both ends to 0, because no gauge
        changes them; return their sum.
        """
        if not bool(torch.isin(head.reshape(-1), tail.reshape(-1)).any()):
            return 0.0
        loops = (head == tail).expand(sizes.shape)
        total = float(sizes[loops].sum())
        sizes.masked_fill_(loops, 0)
        return total

    def _logs(self, phi: np.ndarray) -> Tensor:
        table = np.concatenate([np.zeros(1), phi])
        return torch.from_numpy(self.graph.expand @ table if self.graph.forms.shape[0] else table)

    def sides(self, phi: np.ndarray) -> tuple[np.ndarray, np.ndarray, float]:
        """Sums over the edges that enter each unit and over those that leave it, and the
        sum over all, at ``phi``.
        """
        shift = phi - self.origin
        if self.p * float(np.abs(shift).max(initial=0.0)) * self.width > FAR:
            self._rebase(phi)
            shift = np.zeros_like(phi)
        factors = self._logs(shift).mul_(self.p)
        entering, leaving = (torch.zeros(len(factors), dtype=torch.float64) for _ in range(2))
        total = self.constant

        def add(ids: Tensor, values: Tensor, into: Tensor, against: Tensor) -> None:
            into.index_add_(0, ids.abs(), values * (ids > 0))
            against.index_add_(0, ids.abs(), values * (ids < 0))

        for table in self.tables:
            up, down = _exp(factors, table.head), _exp(-factors, table.tail)
            by_row, by_column = up * table.by_row(down), down * table.by_column(up)
            add(table.head, by_row, entering, leaving)
            add(table.tail, by_column, leaving, entering)
            total += float(by_row.sum())
        if self.listed:
            sizes, head, tail = self.listed
            values = sizes * _exp(factors, head) * _exp(-factors, tail)
            add(head, values, entering, leaving)
            add(tail, values, leaving, entering)
            total += float(values.sum())
        return (*self.to_units(entering.numpy(), leaving.numpy()), total)

    def curvature(self, phi: np.ndarray) -> Curvature:
        """The second derivative at ``phi``, as a linear operator."""
        return Curvature(self, self._logs(phi - self.origin).mul_(self.p))

    def to_units(self, entering: np.ndarray, leaving: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Convert sums by id to sums by unit: the sum of a product of units counts
        for each of its factors.
        """
        if self._turn is None:
            return entering[1:], leaving[1:]
        plus, minus = self._turn
        return plus @ entering + minus @ leaving, plus @ leaving + minus @ entering

    def _rebase(self, phi: np.ndarray) -> None:
        """Multiply the rescaling by ``phi`` into the sizes, so that later exponents are small."""
        factors = self._logs(phi - self.origin).mul_(self.p)
        for table in self.tables:
            table.scale(_log(factors, table.head), _log(factors, table.tail))
        if self.listed:
            sizes, head, tail = self.listed
            _scale(sizes, _log(factors, head) - _log(factors, tail))
        self.origin = phi.copy()

    def ends(self, most: int) -> tuple[np.ndarray, np.ndarray] | None:
        """Distinct pairs of ids ``(tails, heads)`` with a weight other than 0; ``None`` for
        more than ``most`` pairs.

        Args:
            most: limit on the number of pairs: a large matrix can have as many as it has weights.
        """
        both = np.zeros((2, 0), np.int64)
        for table in self.whole():
            some = table.sizes > 0
            # ids can repeat along rows and columns, so the same pair can occur several times
            often = [
                int(ids.unique(return_counts=True)[1].max()) for ids in (table.head, table.tail)
            ]
            if int(some.sum()) > most * often[0] * often[1]:
                return None
            row, column = some.nonzero(as_tuple=True)
            found = np.stack([table.tail[column].numpy(), table.head[row].numpy()])
            both = np.unique(np.concatenate([both, found], axis=1), axis=1)
            if both.shape[1] > most:
                return None
        if self.listed:
            sizes, head, tail = self.listed
            found = np.stack([tail[sizes > 0].numpy(), head[sizes > 0].numpy()])
            both = np.unique(np.concatenate([both, found], axis=1), axis=1)
        return None if both.shape[1] > most else (both[0], both[1])

    def counts(self) -> tuple[np.ndarray, np.ndarray]:
        """How many sizes other than 0 enter each unit, and how many leave it."""
        ones = Pairs.__new__(Pairs)
        ones.__dict__.update(self.__dict__)
        ones.tables = [Table((t.sizes > 0).double(), t.head, t.tail) for t in self.tables]
        ones.listed = ((self.listed[0] > 0).double(), *self.listed[1:]) if self.listed else ()
        ones.origin = np.zeros_like(self.origin)
        entering, leaving, _ = ones.sides(ones.origin)
        return entering, leaving


class Curvature:
    """``A^T diag(value) A`` at one point.

    Args:
        pairs: the sizes.
        factors: ``p`` times the log-scales of all ids.
    """

    def __init__(self, pairs: Pairs, factors: Tensor) -> None:
        self.pairs = pairs
        self._parts = []
        for table in pairs.tables:
            up, down = _exp(factors, table.head), _exp(-factors, table.tail)
            sums = up * table.by_row(down), down * table.by_column(up)
            self._parts.append((table, up, down, *sums))
        self._values = None
        if pairs.listed:
            sizes, head, tail = pairs.listed
            self._values = sizes * _exp(factors, head) * _exp(-factors, tail)

    def __matmul__(self, direction: np.ndarray) -> np.ndarray:
        """Multiply a vector over units."""
        logs = self.pairs._logs(direction)
        result = torch.zeros(len(logs), dtype=torch.float64)
        for table, up, down, by_row, by_column in self._parts:
            head, tail = _log(logs, table.head), _log(logs, table.tail)
            result.index_add_(
                0,
                table.head.abs(),
                (by_row * head - up * table.by_row(down * tail)) * table.head.sign(),
            )
            result.index_add_(
                0,
                table.tail.abs(),
                (by_column * tail - down * table.by_column(up * head)) * table.tail.sign(),
            )
        if self._values is not None:
            _, head, tail = self.pairs.listed
            moved = self._values * (_log(logs, head) - _log(logs, tail))
            result.index_add_(0, head.abs(), moved * head.sign())
            result.index_add_(0, tail.abs(), -moved * tail.sign())
        entering, leaving = self.pairs.to_units(result.numpy(), np.zeros(len(logs)))
        out: np.ndarray = entering - leaving
        return out


def _log(table: Tensor, ids: Tensor) -> Tensor:
    return table[ids.abs()] * ids.sign()


def _exp(table: Tensor, ids: Tensor) -> Tensor:
    return _log(table, ids).exp()


def _scale(sizes: Tensor, logs: Tensor) -> None:
    """Multiply by ``exp(logs)`` in two steps, because ``exp(logs)`` itself can overflow."""
    sizes.mul_((logs / 2).exp()).mul_((logs / 2).exp())
