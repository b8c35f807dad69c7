"""The spaces of features of a model, each with the group of matrices that may mix it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from ..capture.capture import capture
from ..errors import InputError
from ..inference.interpreter import interpret, scalar_offsets
from ..models.values import has_values
from ..shown import Shown
from .blocks import Block, Solution
from .coordinates import Array, mixed
from .reading import Side, Spaces
from .ties import cut_ties

if TYPE_CHECKING:
    from rich.table import Table

# group -> what a matrix of it is, and its dimension from the number of rows
GROUPS: dict[str, str] = {
    "GL": "any invertible matrix",
    "O": "any orthogonal matrix",
    "O1": "any orthogonal matrix that keeps the vector of ones",
    "complex": "any invertible matrix that is complex linear on pairs of features",
    "unitary": "any orthogonal matrix that is complex linear on pairs of features",
    "scales": "a factor for each feature",
    "rigid": "no matrix but the identity",
}


class Slice(NamedTuple):
    """Positions along a dimension of a parameter that one space writes or reads.

    Attributes:
        parameter: name of the parameter.
        dim: the dimension.
        positions: shape ``(count, size)``, one row for each matrix.
        dual: whether it is multiplied by ``A^-T`` (as readers are), not by ``A``.
        reads: whether a weight reads the features there.
        coordinates: the coordinates there.
        flipped: whether the basis of the solution is dual to that of the space.
    """

    parameter: str
    dim: int
    positions: Tensor
    dual: bool
    reads: bool
    coordinates: Array
    flipped: bool


@dataclass(frozen=True, eq=False)
class Space(Shown):
    """Features that a matrix may mix: ``count`` blocks of ``size`` features each.

    Attributes:
        name: the parameter that writes them (or the first that has them).
        group: one of :data:`GROUPS`.
        size: rows of each matrix.
        count: number of matrices, independent of each other.
        slices: what writes and reads the features.
        gains: parameters that have to be folded into readers.
        reason: for a rigid space, why: operation, module, line.
    """

    name: str
    group: str
    size: int
    count: int
    slices: tuple[Slice, ...]
    gains: tuple[str, ...] = ()
    reason: str = ""
    partners: Array | None = field(default=None, repr=False)
    signs: Array | None = field(default=None, repr=False)
    classes: Array = field(default_factory=lambda: np.zeros(0, np.int64), repr=False)

    @property
    def dimension(self) -> int:
        """Dimension of the group: how many numbers choose a matrix.

        ``n^2`` for GL(n), ``n (n - 1) / 2`` for O(n), ``(n - 1) (n - 2) / 2`` if ones are kept,
        ``n^2 / 2`` for complex matrices on ``n / 2`` pairs, ``n^2 / 4`` for unitary ones.
        """
        n = self.size
        each = {
            "GL": n * n,
            "O": n * (n - 1) // 2,
            "O1": (n - 1) * (n - 2) // 2,
            "complex": n * n // 2,
            "unitary": n * n // 4,
            "scales": 1,
        }.get(self.group, 0)
        return each * self.count

    @property
    def writers(self) -> list[str]:
        """Parameters whose outputs are the features."""
        return list(dict.fromkeys(part.parameter for part in self.slices if not part.reads))

    @property
    def readers(self) -> list[str]:
        """Parameters that read the features."""
        return list(dict.fromkeys(part.parameter for part in self.slices if part.reads))

    def __repr__(self) -> str:
        times = f" x {self.count}" if self.count > 1 else ""
        label = (
            f"{self.group}({self.size})" if self.group not in ("scales", "rigid") else self.group
        )
        return f"Space({self.name!r}, {label}{times})"


@dataclass(frozen=True, eq=False, repr=False)
class FeatureSpaces(Shown):
    """All spaces of a model.

    Attributes:
        spaces: those with a group first.
        dimension: dimension of the group of all changes of basis.
    """

    spaces: tuple[Space, ...]
    solution: Solution = field(repr=False)
    offsets: Mapping[str, int] = field(repr=False)
    sizes: Mapping[str, int] = field(repr=False)
    shifts: Mapping[str, float] = field(repr=False)

    @property
    def free(self) -> list[Space]:
        """The spaces that are not rigid."""
        return [space for space in self.spaces if space.group != "rigid"]

    @property
    def rigid(self) -> list[Space]:
        """The rigid spaces, with reasons."""
        return [space for space in self.spaces if space.group == "rigid"]

    @property
    def dimension(self) -> int:
        """Dimension of the group of all changes of basis."""
        return sum(space.dimension for space in self.spaces)

    def gains_of(self, space: Space, name: str) -> Array:
        """Positions in a parameter of the gains that the basis of a space takes in."""
        at = self.solution.gains_of(space.classes) - self.offsets[name]
        return at[(at >= 0) & (at < self.sizes[name])]

    def factors(self, read: Callable[[str], Tensor]) -> Array:
        """How many times each coordinate is that of its basis, by the values of the gains.

        Raises:
            InputError: a gain is 0.
        """
        values = np.ones(len(self.solution.gains))
        for name, shift in self.shifts.items():
            at = self.solution.gains - self.offsets[name]
            own = (at >= 0) & (at < self.sizes[name])
            if own.any():
                flat = read(name).detach().to("cpu", torch.float64).reshape(-1).numpy()
                values[own] = flat[at[own]] + shift
        if (values == 0).any():
            raise InputError(
                "rotate_ found a gain of a norm that is 0, expected others, because the bias beside"
                " it is divided by it; remove the feature first (ps.channels)."
            )
        return self.solution.factors(values)

    def __len__(self) -> int:
        return len(self.spaces)

    def __iter__(self) -> Iterator[Space]:
        return iter(self.spaces)

    def __getitem__(self, key: int | str) -> Space:
        if isinstance(key, int):
            return self.spaces[key]
        for space in self.spaces:
            if space.name == key:
                return space
        raise KeyError(key)

    def __repr__(self) -> str:
        return (
            f"FeatureSpaces({len(self.free)} free, {len(self.rigid)} rigid,"
            f" dimension {self.dimension:,})"
        )

    def __rich__(self) -> Table:
        from rich.table import Table

        table = Table(title=repr(self), title_justify="left")
        for column in ("space", "group", "matrices", "writers", "readers", "reason or gains"):
            table.add_column(column, overflow="fold")
        for space in self.spaces:
            label = space.group if space.size == 1 else f"{space.group}({space.size})"
            table.add_row(
                space.name, label, f"{space.count:,}", f"{len(space.writers)}",
                f"{len(space.readers)}", space.reason or ", ".join(space.gains),
            )  # fmt: skip
        return table


def spaces(model: nn.Module, *args: Any, kwargs: Mapping[str, Any] | None = None) -> FeatureSpaces:
    """Find every space of features, and which matrices may mix it without changing the function.

    For an invertible ``A``, weights that write the features become ``A w``, those that read them
    ``w A^-1``. What lies between decides which ``A`` are allowed: any (GL) between linear maps,
    orthogonal ones if a length is taken (RMS norms, whose gains move into the readers; layer norms
    keep the vector of ones, too), complex ones behind a rotary embedding, and none where an
    operation acts on each feature alone or has no rule.

    Args:
        model: any module that :func:`pathspace.trace` can capture; it needs no values.
        *args: example inputs, positional.
        kwargs: example inputs by keyword.

    Returns:
        The spaces, and for the rigid ones the reason.

    Raises:
        CaptureError: the model fails on these inputs or cannot be captured.

    Example:
        >>> import torch, pathspace as ps
        >>> model = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Linear(8, 2))
        >>> ps.spaces(model, torch.randn(4, 3)).free
        [Space('0.weight', GL(8))]
    """
    twin = cut_ties(model)
    captured = capture(twin, args, kwargs)
    known = {
        name: buffer
        for name, buffer in captured.buffers.items()
        if name not in captured.overwritten and has_values(buffer)
    }
    reading, _ = interpret(captured, lambda *layout: Spaces(*layout, known))
    reading.fix_unused()
    offsets, shapes = scalar_offsets(captured)
    used_twice = [
        np.arange(offsets[name], offsets[name] + prod(shapes[name]))
        for name in reading.shifts
        if any(side[0] == name for side in reading.sides)
    ]
    solution = Solution(
        reading.demands, np.concatenate(used_twice) if used_twice else np.zeros(0, np.int64)
    )
    members = _Members(reading.sides, solution, reading.reads)
    found = _merged([space for block in solution.blocks for space in members.spaces_of(block)])
    order = {name: number for number, name in enumerate(captured.parameters)}
    found.sort(key=lambda space: (space.group == "rigid", order[space.slices[0].parameter]))
    starts, names = np.array(list(offsets.values())), list(offsets)
    taken: set[str] = set()
    for number, space in enumerate(found):
        at = np.searchsorted(starts, solution.gains_of(space.classes), side="right") - 1
        gains = tuple(names[index] for index in np.unique(at)) if space.group != "rigid" else ()
        name = _name(space, shapes, taken)
        taken.add(name)
        found[number] = replace(space, name=name, gains=gains)
    sizes = {name: prod(shape) for name, shape in shapes.items()}
    return FeatureSpaces(tuple(found), solution, offsets, sizes, reading.shifts)


def _name(space: Space, shapes: Mapping[str, tuple[int, ...]], taken: set[str]) -> str:
    """The first writer, with the positions there if they are only some."""
    first = next((part for part in space.slices if not part.reads), space.slices[0])
    alike = [p for p in space.slices if p[:2] == first[:2] and p.reads == first.reads]
    at = torch.unique(torch.cat([part.positions.reshape(-1) for part in alike]))
    low, high = int(at[0]), int(at[-1]) + 1
    whole = len(at) == shapes[first.parameter][first.dim]
    name = first.parameter if whole else f"{first.parameter}[{low}:{high}]"
    number = 1
    while (unique := name if number == 1 else f"{name} ({number})") in taken:
        number += 1
    return unique


class _Members:
    """Positions along dimensions of parameters, by class."""

    def __init__(
        self, sides: Mapping[Side, Tensor], solution: Solution, reads: frozenset[Side] | set[Side]
    ) -> None:
        self.solution, self.names = solution, list(sides)
        self.reads = np.array([side in reads for side in self.names], bool)
        lengths = [len(ids) for ids in sides.values()]
        ids = np.concatenate([ids.numpy() for ids in sides.values()]) if sides else np.zeros(0, int)
        side = np.repeat(np.arange(len(lengths)), lengths)
        position = np.concatenate([np.arange(n) for n in lengths]) if sides else ids
        classes = solution.classes[ids]
        order = np.argsort(classes, kind="stable")
        self.ids, self.side, self.position = ids[order], side[order], position[order]
        self.classes = classes[order]
        self.marks = solution.demands.marks_with_neighbours()

    def spaces_of(self, block: Block) -> list[Space]:
        """The spaces of a block: one, or several if each feature has a group of its own."""
        rows, numbers = self._rows(block.classes)
        if not len(rows):
            return []
        if block.group in ("scales", "rigid"):
            return self._single(block, rows, numbers)
        marks = self.marks[self.ids[rows]]
        order = np.lexsort((numbers, marks, self.side[rows]))
        rows, numbers, marks = rows[order], numbers[order], marks[order]
        size = len(block.classes)
        whole = len(rows) % size == 0 and bool((numbers.reshape(-1, size) == np.arange(size)).all())
        parts = rows.reshape(-1, size) if whole else rows.reshape(1, -1)
        for numbered in (self.side[parts], marks.reshape(parts.shape), self._dual(parts)):
            whole = whole and bool((numbered == numbered[:, :1]).all())
        if not whole:
            why = "copies of its features cannot be told apart"
            return self._single(
                Block("rigid", block.classes, reason=("", "", "", why)), rows, numbers
            )
        order = np.lexsort((self.position[parts].min(1), self.side[parts[:, 0]]))
        return [self._space(block, parts[order], size)]

    def _rows(self, classes: Array) -> tuple[Array, Array]:
        """Members of classes, and the number of the class of each."""
        start = np.searchsorted(self.classes, classes, side="left")
        count = np.searchsorted(self.classes, classes, side="right") - start
        numbers = np.repeat(np.arange(len(classes)), count)
        first = np.repeat(start - (np.cumsum(count) - count), count)
        return first + np.arange(len(numbers)), numbers

    def _dual(self, rows: Array) -> Array:
        return self.solution.dual[self.ids[rows]]

    def _single(self, block: Block, rows: Array, numbers: Array) -> list[Space]:
        """Features with the same slices together."""
        with np.errstate(over="ignore"):
            kinds = np.zeros(len(block.classes), np.uint64)
            np.add.at(kinds, numbers, mixed(2 * self.side[rows] + self._dual(rows)))
        found = []
        for kind in np.unique(kinds[np.unique(numbers)]):
            own = np.flatnonzero(kinds == kind)
            inside = np.isin(numbers, own)
            order = np.lexsort(
                (self.position[rows[inside]], numbers[inside], self.side[rows[inside]])
            )
            mine = rows[inside][order]
            parts = []
            for side in np.unique(self.side[mine]):
                here = mine[self.side[mine] == side].reshape(len(own), -1)
                parts += [here[:, column] for column in range(here.shape[1])]
            found.append(self._space(block, np.stack(parts), 1, own))
        return found

    def _space(self, block: Block, parts: Array, size: int, own: Array | None = None) -> Space:
        count = parts.shape[1] // size
        dual = self._dual(parts[:, 0])
        writes = [k for k in range(len(parts)) if not self.reads[self.side[parts[k, 0]]]]
        flip = bool(dual[writes[0]] if writes else not dual[0])
        slices = []
        for row, turned in zip(parts, dual, strict=True):
            name, dim = self.names[self.side[row[0]]]
            positions = torch.from_numpy(self.position[row]).reshape(count, size)
            slices.append(
                Slice(name, dim, positions, bool(turned) ^ flip, bool(self.reads[self.side[row[0]]]),
                      self.ids[row].reshape(count, size), flip)
            )  # fmt: skip
        first = slices[writes[0]] if writes else slices[0]
        op, module, line, why = block.reason
        told = "; ".join(filter(None, (f"{op}: {why}" if op else why, module, line)))
        classes = block.classes if own is None else block.classes[own]
        return Space(
            first.parameter, block.group, size, count, tuple(slices), (), told,
            block.partners, block.signs, classes,
        )  # fmt: skip


def _merged(found: list[Space]) -> list[Space]:
    """Spaces of equal size in the same slices as one with several matrices."""
    alike: dict[Any, list[Space]] = {}
    for space in found:
        places = tuple((part.parameter, part.dim, part.dual) for part in space.slices)
        turn = None if space.partners is None else (*space.partners, *space.signs)  # type: ignore[misc]
        alone = space.reason if space.group in ("rigid", "scales") else ""
        alike.setdefault((space.group, space.size, places, turn, alone), []).append(space)
    result = []
    for group in alike.values():
        first = group[0]
        if len(group) > 1:
            slices = tuple(
                part._replace(
                    positions=torch.cat([space.slices[k].positions for space in group]),
                    coordinates=np.concatenate([space.slices[k].coordinates for space in group]),
                )
                for k, part in enumerate(first.slices)
            )
            first = Space(
                first.name, first.group, first.size, sum(space.count for space in group), slices,
                (), first.reason, first.partners, first.signs,
                np.concatenate([space.classes for space in group]),
            )  # fmt: skip
        result.append(first)
    return result
