"""Log-scales per row and per column of every tensor: the family among which symmetries
are looked for from above.

``P`` maps one number per row and one per column of each tensor to a log-scale for every scalar
weight. Every gauge transformation that was found is of that form; where a tensor of the reduction
graph has another pattern of units, the pattern is added as a side of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from scipy.sparse import coo_array, csr_array
from scipy.sparse.csgraph import connected_components
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from ..graph.structure import Structure
from .null_space import MOST_DENSE


@dataclass(frozen=True, eq=False)
class ScaleClasses:
    """One log-scale for each class of scalars of a tensor: its rows, its
    columns, or another pattern.

    Attributes:
        index: number of the class, from 0, broadcastable to the tensor.
        count: how many classes there are.
        start: position of the first class among all log-scales.
    """

    index: Tensor
    count: int
    start: int

    def sums(self, values: Tensor) -> Tensor:
        """``P^T``: sums of the values of each class, shape ``(count,)``."""
        dims = [d for d in range(values.dim()) if self.index.shape[d] == 1 and values.shape[d] > 1]
        total = values.sum(dims, keepdim=True) if dims else values
        index = self.index.expand(total.shape).reshape(-1)
        return total.new_zeros(self.count).index_add_(0, index, total.reshape(-1))


@dataclass(frozen=True, eq=False)
class ScaledTensor:
    """A parameter, or the running statistics of a normalisation, with the sides of its scales.

    Attributes:
        name: name of the parameter, or of the statistic's variance (mean).
        shape: its shape.
        sides: what has a log-scale of its own.
        factors: tensors that scale with these numbers, how often (a mean once, a variance twice),
            and the constant ``c`` where ``w + c`` is what scales.
    """

    name: str
    shape: tuple[int, ...]
    sides: tuple[ScaleClasses, ...]
    factors: tuple[tuple[str, int, float], ...]

    def products(self, weights: Mapping[str, Tensor], grads: Mapping[str, Tensor]) -> Tensor:
        """``(w + c) dL/dw``, elementwise."""
        total = torch.zeros(self.shape, dtype=torch.float64)
        for name, times, shift in self.factors:
            if name in grads:
                total = total + times * (
                    (weights[name].detach() + shift) * grads[name]
                ).double().reshape(self.shape)
        return total

    def exchanged(self, alive: Tensor) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
        """Log-scales on classes with scalars that are alive, which move none of these scalars.

        Args:
            alive: which scalars have an effect.

        Returns:
            Rows, columns and entries of a matrix whose columns span them, and
            how many columns it has.
        """
        nothing = (np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0), 0)
        if len(self.sides) < 2 or not bool(alive.any()):
            return nothing
        if len(self.sides) == 2:
            one, other = self.sides
            met = _met(one, other, alive)
            # rows and columns that share a scalar hang together: scale one against the other
            _, label = connected_components(
                coo_array(
                    (np.ones(len(met), bool), (met[:, 0], one.count + met[:, 1])),
                    shape=(one.count + other.count,) * 2,
                ),
                directed=False,
            )
            first, second = np.unique(met[:, 0]), np.unique(met[:, 1])
            number, column = np.unique(
                label[np.concatenate([first, one.count + second])], return_inverse=True
            )
            rows = np.concatenate([one.start + first, other.start + second])
            return (
                rows,
                column,
                np.concatenate([np.ones(len(first)), -np.ones(len(second))]),
                len(number),
            )
        flat = alive.reshape(-1)
        starts = np.cumsum([0, *(side.count for side in self.sides)])
        places = [
            side.index.expand(self.shape).reshape(-1)[flat].numpy() + int(start)
            for side, start in zip(self.sides, starts, strict=False)
        ]
        edges = np.arange(len(places[0]))
        table = csr_array(
            coo_array(
                (
                    np.ones(len(edges) * len(places)),
                    (np.tile(edges, len(places)), np.concatenate(places)),
                ),
                shape=(len(edges), int(starts[-1])),
            )
        )
        own = np.concatenate([side.start + np.arange(side.count) for side in self.sides])
        gram = csr_array(table.T @ table)
        used = np.flatnonzero(gram.diagonal() > 0)
        _, label = connected_components(gram[used][:, used], directed=False)
        found, width = [nothing[:3]], 0
        # (what has no scalar in common, as the channels of a depthwise
        # kernel, is taken by itself)
        for part in np.split(
            used[np.argsort(label, kind="stable")], np.cumsum(np.bincount(label))[:-1]
        ):
            if len(part) > MOST_DENSE:
                raise ValueError(
                    f"{len(part):,} log-scales of {self.name} are linked by more than two index"
                    " dimensions"
                )
            dense = gram[part][:, part].toarray()
            values, vectors = np.linalg.eigh(dense)
            null = vectors[:, values <= 1e-9 * max(1.0, float(dense.max()))]
            place = np.indices(null.shape)
            found.append(
                (own[part][place[0].reshape(-1)], width + place[1].reshape(-1), null.reshape(-1))
            )
            width += null.shape[1]
        rows, columns, entries = (np.concatenate([held[k] for held in found]) for k in range(3))
        return rows, columns, entries, width


def _met(one: ScaleClasses, other: ScaleClasses, alive: Tensor) -> np.ndarray:
    """Pairs of classes of two sides that share a scalar that is alive."""
    dims = [
        d
        for d in range(alive.dim())
        if one.index.shape[d] == 1 and other.index.shape[d] == 1 and alive.shape[d] > 1
    ]
    some = alive.any(dims[0], keepdim=True) if dims else alive
    for d in dims[1:]:
        some = some.any(d, keepdim=True)
    key = (one.index * other.count + other.index).expand(some.shape)[some]
    key = torch.unique(key).numpy()
    return np.stack([key // other.count, key % other.count], 1)


@dataclass(frozen=True, eq=False)
class Family:
    """All log-scales of a model.

    Attributes:
        entries: parameters and running statistics.
        size: ``R``, the number of log-scales.
        units: what every unit that was found moves, sparse ``(R, H)``.
    """

    entries: tuple[ScaledTensor, ...]
    size: int
    units: csr_array

    def sums(self, products: Sequence[Tensor]) -> Tensor:
        """``P^T`` of all products, shape ``(R,)``."""
        parts = [
            side.sums(value)
            for entry, value in zip(self.entries, products, strict=True)
            for side in entry.sides
        ]
        return torch.cat([torch.zeros(0, dtype=torch.float64), *parts])

    def exchanged(self, alive: Sequence[Tensor]) -> csr_array:
        """What moves no scalar that is alive: columns that span the null space of
        ``P``, sparse ``(R, d)``.
        """
        parts, width = [], 0
        for entry, mask in zip(self.entries, alive, strict=True):
            rows, columns, values, count = entry.exchanged(mask)
            parts.append((rows, columns + width, values))
            width += count
        rows, columns, values = (
            np.concatenate([np.zeros(0, np.int64), *(p[k] for p in parts)]) for k in range(3)
        )
        return csr_array(coo_array((values, (rows, columns)), shape=(self.size, width)))


def family(graph: Structure, model: nn.Module, statistics: bool) -> Family:
    """The log-scales of a traced model's tensors.

    Args:
        graph: the reduction graph.
        model: the model, for the groups of its convolutions.
        statistics: whether running statistics are used, and move along with their channels.
    """
    grouped: dict[int, int] = {}
    kernels: set[int] = set()
    for module in model.modules():
        if isinstance(module, _ConvNd):
            kernels.add(id(module.weight))
            grouped[id(module.weight)] = module.groups
    named = dict(model.named_parameters(remove_duplicate=False))
    entries: list[ScaledTensor] = []
    start = 0
    units: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
    blocks = {block.name: block for block in graph.blocks}
    for name, parameter in graph.captured.parameters.items():
        if not parameter.is_floating_point() or not parameter.numel():
            continue
        shape = tuple(parameter.shape)
        own = named.get(name, parameter)
        indices = _usual(shape, id(own) in kernels, grouped.get(id(own), 1))
        block = blocks.get(name)
        ends = () if block is None else ((block.head, 1), (block.tail, -1))
        for ids, _ in ends:
            if not any(_fits(index, ids) is not None for index in indices):
                wide = [n if ids.shape[d] > 1 else 1 for d, n in enumerate(shape)]
                indices.append(torch.arange(int(np.prod(wide))).reshape(wide))
        sides = []
        for index in indices:
            sides.append(ScaleClasses(index, int(index.max()) + 1, start))
            start += sides[-1].count
        for ids, sign in ends:
            side, values = next((s, v) for s in sides if (v := _fits(s.index, ids)) is not None)
            units.append(
                (side.start + np.arange(side.count), np.abs(values), sign * np.sign(values))
            )
        entries.append(
            ScaledTensor(name, shape, tuple(sides), ((name, 1, graph.shifts.get(name, 0.0)),))
        )
    for statistic in graph.statistics if statistics else ():
        factors = tuple((n, k, graph.shifts.get(n, 0.0)) for n, k in statistic.powers.items())
        channels = statistic.units.reshape(-1).numpy()
        side = ScaleClasses(torch.arange(len(channels)), len(channels), start)
        start += len(channels)
        units.append((side.start + np.arange(len(channels)), np.abs(channels), np.sign(channels)))
        entries.append(ScaledTensor(factors[-1][0], (len(channels),), (side,), factors))
    rows, columns, signs = (
        np.concatenate([np.zeros(0, np.int64), *(u[k] for u in units)]) for k in range(3)
    )
    table = csr_array(coo_array((signs, (rows, columns)), shape=(start, graph.expand.shape[0])))
    return Family(tuple(entries), start, csr_array((table @ graph.expand)[:, 1:]))


def _usual(shape: tuple[int, ...], kernel: bool, groups: int) -> list[Tensor]:
    """Classes that a tensor usually has: entries, rows and columns, channels."""

    def along(*dims: int) -> Tensor:
        wide = [n if d in dims else 1 for d, n in enumerate(shape)]
        return torch.arange(int(np.prod(wide, dtype=np.int64))).reshape(wide)

    long = [d for d, n in enumerate(shape) if n > 1]
    if kernel:
        if groups == 1:
            return [along(0), along(1)]
        group = torch.arange(shape[0]) // (shape[0] // groups)
        second = group[:, None] * shape[1] + torch.arange(shape[1])[None, :]
        return [along(0), second.reshape(*second.shape, *[1] * (len(shape) - 2))]
    if len(long) == 3:
        # a stack of matrices, each with rows and columns of its own
        return [along(long[0], long[1]), along(long[0], long[2])]
    return [along(d) for d in long] or [torch.zeros([1] * len(shape), dtype=torch.int64)]


def _fits(index: Tensor, ids: Tensor) -> np.ndarray | None:
    """The id of each class, or ``None`` where ids differ within one."""
    index, wide = torch.broadcast_tensors(index, ids)
    values = torch.zeros(int(index.max()) + 1, dtype=torch.int64)
    values[index.reshape(-1)] = wide.reshape(-1)
    return values.numpy() if bool((values[index] == wide).all()) else None
