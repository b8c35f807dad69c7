"""Log-scales per row and per column of every tensor: the family among which symmetries are
looked for from above.

``P`` maps one number per row and one per column of each tensor to a log-scale for every scalar
weight. Every gauge transformation that was found is of that form: where the reduction graph has
another pattern of units in a tensor, the pattern is a side of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from scipy.sparse import block_diag, coo_array, csr_array, eye_array, hstack, vstack
from scipy.sparse.csgraph import connected_components
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from ..graph.structure import Structure


@dataclass(frozen=True, eq=False)
class ScaledTensor:
    """A parameter, or a running mean or variance of a normalisation.

    Attributes:
        name: of the parameter or buffer.
        scalars: which scalars of the model it holds, in the order of ``P``.
        columns: its log-scales; a running mean shares those of its variance.
        rows: how many of these, from the first, are log-scales of rows.
        shift: the constant ``c`` where ``w + c`` is what scales.
        statistic: whether it is no parameter.
    """

    name: str
    scalars: slice
    columns: slice
    rows: int
    shift: float
    statistic: bool


@dataclass(frozen=True, eq=False)
class Family:
    """All log-scales of a model.

    Attributes:
        tensors: what holds the scalars, in order.
        matrix: ``P``, sparse ``(scalars, R)``; 2 in the rows of a variance.
        units: what every unit that was found moves, sparse ``(R, H)``.
    """

    tensors: tuple[ScaledTensor, ...]
    matrix: csr_array
    units: csr_array

    def products(self, weights: Mapping[str, Tensor], grads: Mapping[str, Tensor]) -> np.ndarray:
        """``(w + c) dL/dw`` of every scalar, for gradients with a batch dimension in front.

        Of a complex weight its size is scaled: the product is ``Re(conj(w) dL/dw)``.
        """
        count = len(next(iter(grads.values())))
        table = np.zeros((count, self.matrix.shape[0]))
        for tensor in self.tensors:
            if tensor.name in grads:
                weight = weights[tensor.name].detach() + tensor.shift
                product = weight.conj() * grads[tensor.name]
                table[:, tensor.scalars] = torch.real(product).reshape(count, -1).numpy()
        return table


def family(graph: Structure, model: nn.Module, most: int | None = None) -> Family:
    """The log-scales of a traced model's tensors.

    Args:
        graph: the reduction graph.
        model: the model, for the groups of its convolutions.
        most: largest number of log-scales.

    Raises:
        ValueError: there are more.

    Example:
        >>> import torch, pathspace as ps
        >>> model = torch.nn.Sequential(
        ...     torch.nn.Linear(2, 3), torch.nn.ReLU(), torch.nn.Linear(3, 1)
        ... )
        >>> scales = family(ps.trace(model, torch.randn(1, 2)), model)
        >>> scales.matrix.shape, scales.units.shape
        ((13, 12), (12, 3))
    """
    groups = {id(m.weight): m.groups for m in model.modules() if isinstance(m, _ConvNd)}
    named = dict(model.named_parameters(remove_duplicate=False))
    blocks = {block.name: block for block in graph.blocks}
    tensors: list[ScaledTensor] = []
    parts: list[csr_array] = []
    moves: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
    scalars = columns = 0

    def add(name: str, part: csr_array, start: int, rows: int) -> None:
        nonlocal scalars
        here = slice(scalars, scalars + part.shape[0])
        shift, statistic = graph.shifts.get(name, 0.0), name not in graph.parameters
        columns_of = slice(start, start + part.shape[1])
        tensors.append(ScaledTensor(name, here, columns_of, rows, shift, statistic))
        scalars = here.stop

    for name, parameter in graph.captured.parameters.items():
        if not (parameter.is_floating_point() or parameter.is_complex()) or not parameter.numel():
            continue
        shape = tuple(parameter.shape)
        sides = list(_sides(shape, groups.get(id(named.get(name, parameter)))))
        block = blocks.get(name)
        ends = () if block is None else ((block.head, 1), (block.tail, -1))
        for ids, _ in ends:
            if all(_by_class(side, ids) is None for side in sides):
                sides.append(_along(shape, *(d for d, n in enumerate(ids.shape) if n > 1)))
        counts = [int(side.max()) + 1 for side in sides]
        starts = columns + np.cumsum([0, *counts])
        for ids, sign in ends:
            start, units = next(
                (start, units)
                for start, side in zip(starts, sides, strict=False)
                if (units := _by_class(side, ids)) is not None
            )
            moves.append((start + np.arange(len(units)), np.abs(units), sign * np.sign(units)))
        if most is not None and starts[-1] > most:
            raise ValueError(
                f"it has more than {most:,} rows and columns, and a factorisation is made for at"
                " most as many; test parts of the model"
            )
        part = csr_array(hstack([_incidence(side, shape) for side in sides]))
        parts.append(part)
        add(name, part, columns, counts[0])
        columns = int(starts[-1])
    for statistic in graph.statistics:
        channels = statistic.units.reshape(-1).numpy()
        width = len(channels)
        for name, power in statistic.powers.items():
            add(name, power * eye_array(width, format="csr"), columns, width)
        stacked = [power * eye_array(width) for power in statistic.powers.values()]
        parts.append(csr_array(vstack(stacked)))
        moves.append((columns + np.arange(width), np.abs(channels), np.sign(channels)))
        columns += width
    places, moved, signs = (
        np.concatenate([np.zeros(0, int), *(m[k] for m in moves)]) for k in range(3)
    )
    ends_of = csr_array(coo_array((signs, (places, moved)), shape=(columns, graph.expand.shape[0])))
    matrix = csr_array(block_diag(parts)) if parts else csr_array((0, 0))
    return Family(tuple(tensors), matrix, csr_array((ends_of @ graph.expand)[:, 1:]))


def _along(shape: tuple[int, ...], *dims: int) -> Tensor:
    """A class for each index in some dimensions, in a shape that broadcasts to the tensor's."""
    wide = [n if d in dims else 1 for d, n in enumerate(shape)]
    return torch.arange(int(np.prod(wide, dtype=np.int64))).reshape(wide)


def _sides(shape: tuple[int, ...], groups: int | None) -> Iterator[Tensor]:
    """Classes that a tensor usually has: its rows and columns; the channels of a kernel, those
    that enter group by group; rows and columns of each matrix in a stack.
    """
    long = [d for d, n in enumerate(shape) if n > 1]
    if groups is not None:
        yield _along(shape, 0)
        group = torch.arange(shape[0]) // max(1, shape[0] // groups)
        entering = group[:, None] * shape[1] + torch.arange(shape[1]) if groups > 1 else None
        yield (
            _along(shape, 1)
            if entering is None
            else entering.reshape(*shape[:2], *[1] * (len(shape) - 2))
        )
    elif len(long) == 3:
        yield _along(shape, long[0], long[1])
        yield _along(shape, long[0], long[2])
    else:
        yield from (_along(shape, d) for d in long)
        if not long:
            yield _along(shape)


def _incidence(side: Tensor, shape: tuple[int, ...]) -> csr_array:
    """Scalars of a tensor and their classes, as a sparse matrix."""
    index = side.expand(shape).reshape(-1).numpy()
    entries = (np.ones(len(index)), (np.arange(len(index)), index))
    return csr_array(coo_array(entries, shape=(len(index), int(side.max()) + 1)))


def _by_class(side: Tensor, ids: Tensor) -> np.ndarray | None:
    """The unit of each class, or ``None`` where units differ within one."""
    side, ids = torch.broadcast_tensors(side, ids)
    units = torch.zeros(int(side.max()) + 1, dtype=torch.int64)
    units[side.reshape(-1)] = ids.reshape(-1)
    return units.numpy() if bool((units[side] == ids).all()) else None


def redundant(gram: csr_array) -> int:
    """``dim ker P``, from ``P^T P``: log-scales that move no scalar.

    What shares no scalar is taken by itself: a matrix has one such combination, its rows against
    its columns.

    Example:
        >>> redundant(csr_array([[2.0, 1.0, 1.0], [1.0, 1.0, 0.0], [1.0, 0.0, 1.0]]))
        1
    """
    count, label = connected_components(gram, directed=False)
    order = np.argsort(label, kind="stable")
    total = 0
    for part in np.split(order, np.cumsum(np.bincount(label, minlength=count))[:-1]):
        if len(part) > 1:
            table = gram[part][:, part].toarray()
            values = np.linalg.eigvalsh(table)
            total += int((values <= 1e-9 * values.max()).sum())
    return total
