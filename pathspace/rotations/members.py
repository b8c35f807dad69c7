"""From blocks of coordinates to positions along dimensions of parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..inference.channels import Side
from .blocks import MixedBlock, SolvedDemands
from .coordinates import Array, mixed
from .space import FeatureSlice, Space


def space_name(space: Space, shapes: Mapping[str, tuple[int, ...]], taken: set[str]) -> str:
    """The first writer, with the positions there if they are only some."""
    first = next((part for part in space.slices if not part.reads), space.slices[0])
    place = (first.parameter, first.dim, first.reads)
    alike = [part for part in space.slices if (part.parameter, part.dim, part.reads) == place]
    at = torch.unique(torch.cat([part.positions.reshape(-1) for part in alike]))
    low, high = int(at[0]), int(at[-1]) + 1
    whole = len(at) == shapes[first.parameter][first.dim]
    name = first.parameter if whole else f"{first.parameter}[{low}:{high}]"
    number = 1
    while (unique := name if number == 1 else f"{name} ({number})") in taken:
        number += 1
    return unique


class Members:
    """Positions along dimensions of parameters, by class."""

    def __init__(
        self,
        sides: Mapping[Side, Tensor],
        solution: SolvedDemands,
        reads: frozenset[Side] | set[Side],
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

    def spaces_of(self, block: MixedBlock) -> list[Space]:
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
                MixedBlock("rigid", block.classes, reason=("", "", "", why)), rows, numbers
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
        dual: Array = self.solution.dual[self.ids[rows]]
        return dual

    def _single(self, block: MixedBlock, rows: Array, numbers: Array) -> list[Space]:
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

    def _space(self, block: MixedBlock, parts: Array, size: int, own: Array | None = None) -> Space:
        count = parts.shape[1] // size
        dual = self._dual(parts[:, 0])
        writes = [k for k in range(len(parts)) if not self.reads[self.side[parts[k, 0]]]]
        flip = bool(dual[writes[0]] if writes else not dual[0])
        slices = []
        for row, turned in zip(parts, dual, strict=True):
            side = self.side[row[0]]
            name, dim = self.names[side]
            positions = torch.from_numpy(self.position[row]).reshape(count, size)
            coordinates = self.ids[row].reshape(count, size)
            reads = bool(self.reads[side])
            slices.append(
                FeatureSlice(name, dim, positions, bool(turned) ^ flip, reads, coordinates)
            )
        first = slices[writes[0]] if writes else slices[0]
        op, module, line, why = block.reason
        told = "; ".join(filter(None, (f"{op}: {why}" if op else why, module, line)))
        classes = block.classes if own is None else block.classes[own]
        return Space(
            first.parameter, block.group, size, count, tuple(slices), (), told,
            block.partners, block.signs, classes,
        )  # fmt: skip


def merged(found: list[Space]) -> list[Space]:
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
                replace(
                    part,
                    positions=torch.cat([space.slices[k].positions for space in group]),
                    coordinates=np.concatenate([space.slices[k].coordinates for space in group]),
                )
                for k, part in enumerate(first.slices)
            )
            first = replace(
                first,
                count=sum(space.count for space in group),
                slices=slices,
                classes=np.concatenate([space.classes for space in group]),
            )
        result.append(first)
    return result
