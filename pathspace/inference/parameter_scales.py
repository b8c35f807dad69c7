"""Scales of stored tensors: the ids of parameters that are used as data, rows that data selects,
constants added to them, the layout of views, and channels of running statistics.

A scalar used as an activation is an edge from the root, and has one id in all such uses. An index
that data determines makes a virtual weight of the rows that it selects.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from .records import Flows, use_of
from .relations import Relations
from .semantics import Semantics
from .values import NEUTRAL, Weight, constant, reshaped

UNLIKE = "different constants are added to this parameter"
# if data selects more scalars of a table than this, all of its rows are treated as one
MOST_GATHERED = 4_000_000


class ParameterScales(Semantics):
    """The primitives of :class:`~pathspace.inference.scales.Scales` that concern parameters."""

    def __init__(self, offsets: dict[str, int], shapes: dict[str, tuple[int, ...]]) -> None:
        super().__init__(offsets, shapes)
        self.equations = Relations()
        self.flows = Flows()
        # ids of the scalars of parameters used as activations, laid out like the parameter
        self._tables: dict[str, Tensor] = {}
        # parameter -> the constant that is added to it in every use
        self.shifts: dict[str, float] = {}
        # virtual weight -> the number of its index
        self.gathers: dict[str, int] = {}
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
            self.gathers[name] = number
            self.virtual[name] = table
        virtual = Weight.of(name, self.shapes[name])
        for function in weight.moves:
            virtual = virtual.moved(function, self.offsets)
        if virtual.name is None or virtual.index.stride() != weight.index.stride():
            return None
        return virtual.moved(lambda t: reshaped(t, (*rows, *t.shape[1:])), self.offsets)

    def attach(self, weight: Weight) -> Tensor:
        """Edges from the root to one id per scalar, the same in all such uses."""
        self._note_shift(weight)
        if weight.name in self.gathers and prod(self.shapes[weight.name]) > MOST_GATHERED:
            self.pin([weight], "more scalars picked by data than can be followed")
            return constant(weight.shape)
        return self.laid_out(weight, self._table)

    def _note_shift(self, weight: Weight) -> None:
        """Record the constant added to a parameter; several constants pin it."""
        for name in dict.fromkeys(
            self.virtual.get(name, name) for name in self.parameters_of(weight)
        ):
            if (
                self.shifts.setdefault(name, weight.shift) != weight.shift
                and name not in self.pinned_parameters
            ):
                self.pin([Weight.of(name, self.shapes[name])], UNLIKE)

    def _table(self, name: str) -> Tensor:
        """Ids of a whole parameter, created at its first use as an activation."""
        if name not in self._tables:
            self._create(name, self.shapes[name])
        return self._tables[name]

    def _create(self, name: str, sizes: Sequence[int]) -> None:
        shape = self.shapes[name]
        self._tables[name] = self.equations.fresh(sizes).expand(shape)
        ends = constant([1] * len(shape)), self._tables[name]
        self.flows.use(use_of(Weight.of(name, shape), *ends))

    def attach_reduced(self, weight: Weight, dims: Sequence[int]) -> None:
        """One id for all scalars of a parameter that a reduction adds up, if it has no ids yet.

        A standardised weight has as many ids as rows then, and not as many as scalars.
        """
        name = weight.name
        if name is None or name in self._tables or weight.kept is not None:
            return
        shape, view = self.shapes[name], [*zip(weight.shape, weight.index.stride(), strict=True)]
        strides = [prod(shape[dim + 1 :]) for dim in range(len(shape))]
        rows = {view[dim] for dim in range(len(view)) if dim not in dims and view[dim][0] > 1}
        whole = prod(weight.shape) == prod(shape) and all(stride for size, stride in view)
        if whole and rows <= set(zip(shape, strides, strict=True)):
            self._create(
                name,
                [n if (n, stride) in rows else 1 for n, stride in zip(shape, strides, strict=True)],
            )


Region = tuple[slice, ...]


def layout(
    view: Tensor, ids: Iterable[Tensor], shape: tuple[int, ...]
) -> tuple[Region, list[Tensor]] | None:
    """Ids on a strided view, rearranged to the parameter's own dimensions.

    Returns the region that the view covers, and each tensor of ids (sizes 1, or those of the
    region); ``None`` if the view does not consist of the parameter's dimensions.
    """
    tensors = list(ids)
    found = _parts(view, shape)
    grouped = None if found is None else _grouped(found[1], found[0])
    if grouped is None:
        return None
    region, groups = grouped
    used = {part.dim for group in groups for part in group}
    rest = [dim for dim in range(tensors[0].dim()) if dim not in used]
    if any(tensor.shape[dim] > 1 for tensor in tensors for dim in rest):
        return None
    return region, [_laid_out(tensor, groups, rest) for tensor in tensors]


class _Part(NamedTuple):
    """A dimension of a view, and what it is in the parameter."""

    home: int
    step: int
    size: int
    dim: int


def _parts(view: Tensor, shape: tuple[int, ...]) -> tuple[list[int], list[_Part]] | None:
    """Start and parts of a view; ``None`` if it does not consist of whole dimensions."""
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    offset = view.storage_offset()
    start = [offset // stride % size for size, stride in zip(shape, strides, strict=True)]
    parts: list[_Part] = []
    for dim, (size, stride) in enumerate(zip(view.shape, view.stride(), strict=True)):
        if size < 2:
            continue
        home = next(
            (d for d in range(len(shape)) if strides[d] <= stride < strides[d] * shape[d]), None
        )
        if home is None or stride % strides[home]:
            return None
        step = stride // strides[home]
        if size > (shape[home] - start[home] - 1) // step + 1:
            return None
        parts.append(_Part(home, step, size, dim))
    return start, parts


def _grouped(parts: list[_Part], start: list[int]) -> tuple[Region, list[list[_Part]]] | None:
    region: list[slice] = []
    groups: list[list[_Part]] = []
    for home, first in enumerate(start):
        mine = sorted((part for part in parts if part.home == home), key=lambda part: -part.step)
        if any(outer.step != inner.step * inner.size for outer, inner in pairwise(mine)):
            return None
        step = mine[-1].step if mine else 1
        length = math.prod(part.size for part in mine) * step
        region.append(slice(first, first + length - step + 1, step))
        groups.append(mine)
    return tuple(region), groups


def _laid_out(tensor: Tensor, groups: list[list[_Part]], rest: list[int]) -> Tensor:
    tensor = tensor.permute([part.dim for group in groups for part in group] + rest)
    for position, group in enumerate(groups):
        end = position + len(group)
        if len(group) == 0:
            tensor = tensor.unsqueeze(position)
        elif len(group) > 1:
            if any(n > 1 for n in tensor.shape[position:end]):
                sizes = [part.size for part in group]
                tensor = tensor.expand([*tensor.shape[:position], *sizes, *tensor.shape[end:]])
            tensor = tensor.flatten(position, end - 1)
    return tensor.reshape(tensor.shape[: len(groups)])


SHARED = "norms with different eps divide by one running variance"
READ = "running statistics are read by something else than their normalisation"


class RunningStatistics:
    """Running means and variances by name, with the ids of their channels."""

    def __init__(self, equations: Relations) -> None:
        self._equations = equations
        # statistic -> (its power of the channels' scales, ids of the channels);
        # pairs of mean and variance
        self._channels: dict[str, tuple[int, Tensor]] = {}
        self._pairs: dict[tuple[str, str], None] = {}
        # running variance -> the eps that is added to it
        self._eps: dict[str, float] = {}
        self._read: set[str] = set()

    def add(self, mean: str, var: str, ids: Tensor, eps: float) -> Iterator[tuple[Tensor, str]]:
        """Record one use; yields ids that must be fixed before it goes on, and why.

        ``var + eps`` is rescaled, so all normalisations with this variance need the same ``eps``.
        """
        self._pairs[mean, var] = None
        if self._eps.setdefault(var, eps) != eps:
            yield ids, SHARED
        for power, name in ((1, mean), (2, var)):
            before, known = self._channels.get(name, (power, ids))
            self._equations.unify(known, ids)
            # (a channel can be zero in one use, and not in another)
            self._channels[name] = before, torch.where(known == NEUTRAL, ids, known)
            if before != power:
                yield from self.read(name)
            elif name in self._read:
                yield ids, READ

    def read(self, buffer: str) -> Iterator[tuple[Tensor, str]]:
        """Record that a buffer is used as data; yields ids to be fixed, and why."""
        if buffer in self._channels and buffer not in self._read:
            yield self._channels[buffer][1], READ
        self._read.add(buffer)

    def entries(self) -> list[tuple[str | None, str | None, Tensor, float]]:
        """Running mean, running variance, ids of their channels, and eps; every statistic once."""
        left, found = set(self._channels), []
        for pair in self._pairs:
            mean, var = (name if name in left else None for name in pair)
            left -= set(pair)
            if mean or var:
                found.append((mean, var, self._channels[pair[0]][1], self._eps[pair[1]]))
        return found
