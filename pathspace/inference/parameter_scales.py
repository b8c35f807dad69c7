"""Parameters that are used as data: the ids of their scalars, rows that data selects, and constants
added to them.

A scalar used as an activation is an edge from the root, and has one id in all such uses. An index
that data determines makes a virtual weight of the rows that it selects.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
from torch import Tensor

from .flows import Flows, use_of
from .parameter_layout import layout
from .relations import Relations
from .semantics import Semantics
from .values import Value, Weight, constant, reshaped

UNLIKE = "different constants are added to this parameter"
# if data selects more scalars of a table than this, all of its rows are treated as one
MOST_GATHERED = 4_000_000


@dataclass(frozen=True)
class Gather:
    """A virtual weight: the rows of a table that an index selects.

    Attributes:
        table: name of the parameter.
        index: number of the index; one index selects the same rows of different tables.
    """

    table: str
    index: int


class ParameterScales(Semantics):
    """The primitives of :class:`~pathspace.inference.units.Scales` that concern parameters."""

    def __init__(self, offsets: dict[str, int], shapes: dict[str, tuple[int, ...]]) -> None:
        super().__init__(offsets, shapes)
        self.equations = Relations()
        self.flows = Flows()
        # ids of the scalars of parameters used as activations, laid out like the parameter
        self._tables: dict[str, Tensor] = {}
        # parameter -> the constant that is added to it in every use
        self.shifts: dict[str, float] = {}
        # virtual weight -> its table and index
        self.gathers: dict[str, Gather] = {}
        # run and node of an index -> its number
        self._indices: dict[tuple[int, object], int] = {}

    def gathered(self, weight: Weight, rows: Sequence[int], node: object) -> Weight | None:
        """A virtual weight with one row for each position of an index."""
        table = weight.name
        if table is None or weight.kept is not None or weight.shift or table in self.gathers:
            return None
        shape, step = self.shapes[table], prod(self.shapes[table][1:])
        # the view must keep the rows separate
        whole = (
            weight.shape[:1] == shape[:1]
            and weight.index.stride(0) == step > weight.index.storage_offset()
        )
        # with a single position, operations over several positions are not visible
        alone = len(rows) > 0 and (prod(rows) < 2 or 1 in rows[1:])
        # products with matrices need only ids of their rows and columns
        many = prod(rows) * (step if len(shape) < 3 else sum(shape[1:]))
        if not whole or alone or many > MOST_GATHERED:
            return None
        number = self._indices.setdefault((self.place.run, node), len(self._indices))
        name = f"{table}[{number}]"
        if name not in self.gathers:
            last = max(self.offsets, key=self.offsets.__getitem__)
            self.offsets[name] = self.offsets[last] + prod(self.shapes[last])
            self.shapes[name] = (prod(rows), *shape[1:])
            self.gathers[name] = Gather(table, number)
            self.virtual[name] = table
        virtual = Weight.of(name, self.shapes[name])
        for function in weight.moves:
            virtual = virtual.moved(function, self.offsets)
        if virtual.name is None or virtual.index.stride() != weight.index.stride():
            return None
        return virtual.moved(lambda t: reshaped(t, (*rows, *t.shape[1:])), self.offsets)

    def attach(self, weight: Weight) -> Tensor:
        """Edges from the root to new ids, one per scalar; a scalar has the
        same id in all such uses.
        """
        self._note_shift(weight)
        if weight.name in self.gathers and prod(self.shapes[weight.name]) > MOST_GATHERED:
            self.pin([weight], "more scalars picked by data than can be followed")
            return constant(weight.shape)
        return self.laid_out(weight, self._table)

    def _note_shift(self, weight: Weight) -> None:
        """Record the constant added to a parameter; if its uses have different constants,
        the parameter is pinned.
        """
        for name in dict.fromkeys(
            self.virtual.get(name, name) for name in self.parameters_of(weight)
        ):
            if (
                self.shifts.setdefault(name, weight.shift) != weight.shift
                and name not in self.pinned_parameters
            ):
                self.pin([Weight.of(name, self.shapes[name])], UNLIKE)

    def _table(self, name: str, ids: Tensor | None = None) -> Tensor:
        """Ids of a whole parameter, created at its first use as an activation."""
        if name not in self._tables:
            shape = self.shapes[name]
            head = self.equations.fresh(shape) if ids is None else ids
            self.flows.use(use_of(Weight.of(name, shape), constant([1] * len(shape)), head))
            self._tables[name] = head.expand(shape)
        return self._tables[name]

    def _coarse(self, value: Value, dims: Iterable[int]) -> Tensor:
        """An activation; a parameter whose first use is a reduction gets one id
        along the reduced dimensions.
        """
        if isinstance(value, Weight) and value.kept is None and value.name is not None:
            shape = self.shapes[value.name]
            strided = all(
                stride
                for stride, size in zip(value.index.stride(), value.shape, strict=True)
                if size > 1
            )
            if (
                value.name not in self._tables
                and strided
                and value.index.numel() == np.prod(shape, dtype=np.int64)
            ):
                wanted = {dim % max(len(value.shape), 1) for dim in dims}
                ids = self.equations.fresh(
                    [1 if dim in wanted else size for dim, size in enumerate(value.shape)]
                )
                found = layout(value.index, [ids], shape)
                if found is not None and all(
                    part == slice(0, n, 1) for part, n in zip(found[0], shape, strict=True)
                ):
                    self._table(value.name, found[1][0])
        return self.activation(value)
