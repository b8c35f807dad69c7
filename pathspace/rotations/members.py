"""From blocks of coordinates to positions along dimensions of parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..inference.sides import Side
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
        classes = solution.classes[ids].astype(np.int64)
        order = np.argsort(classes, kind="stable")
        self.ids, self.side, self.position = ids[order], side[order], position[order]
        self.classes = classes[order]
        self.marks = solution.demands.marks_with_neighbours()

    def spaces_of(self, blocks: Sequence[MixedBlock]) -> list[Space]:
        """The spaces of blocks of one group, size and turn; one for those with equal slices."""
        first, size = blocks[0], len(blocks[0].classes)
        classes = np.concatenate([block.classes for block in blocks])
        rows, numbers = self._rows(classes)
        if not len(rows):
            return []
        if first.group in ("scales", "rigid"):
            return self._single(first, rows, numbers)
        own, inner = np.divmod(numbers, size)
        marks = self.marks[self.ids[rows]]
        order = np.lexsort((inner, marks, self.side[rows], own))
        rows, own, inner, marks = rows[order], own[order], inner[order], marks[order]
        # (a block has all its coordinates equally often, in each slice once)
        whole = np.bincount(own, minlength=len(blocks)) % size == 0
        inside = whole[own]
        parts, of_block = rows[inside].reshape(-1, size), own[inside][::size]
        alike = (inner[inside].reshape(-1, size) == np.arange(size)).all(1)
        for numbered in (self.side[parts], marks[inside].reshape(-1, size), self._dual(parts)):
            alike &= (numbered == numbered[:, :1]).all(1)
        whole[of_block[~alike]] = False
        found = self._of_families(first, classes.reshape(-1, size), parts, of_block, whole)
        if not whole.all():
            why = ("", "", "", "copies of its features cannot be told apart")
            broken = classes.reshape(-1, size)[~whole].reshape(-1)
            rigid = MixedBlock("rigid", broken, reason=why)
            found += self._single(rigid, *self._rows(broken))
        return found

    def _of_families(
        self, block: MixedBlock, classes: Array, parts: Array, of_block: Array, whole: Array
    ) -> list[Space]:
        """One space for all blocks with the same slices."""
        kept = whole[of_block]
        parts, of_block = parts[kept], of_block[kept]
        order = np.lexsort((self.position[parts].min(1), self.side[parts[:, 0]], of_block))
        parts, of_block = parts[order], of_block[order]
        keys = 2 * self.side[parts[:, 0]] + self._dual(parts[:, 0])
        blocks, start, count = np.unique(of_block, return_index=True, return_counts=True)
        found = []
        for length in np.unique(count).tolist():
            at = start[count == length, None] + np.arange(length)
            kinds, which = np.unique(keys[at], axis=0, return_inverse=True)
            for kind in range(len(kinds)):
                mine = which.reshape(-1) == kind
                family = parts[at[mine]].transpose(1, 0, 2).reshape(length, -1)
                own = classes[blocks[count == length][mine]].reshape(-1)
                found.append(self._space(block, family, classes.shape[1], own))
        return found

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
            found.append(self._space(block, np.stack(parts), 1, block.classes[own]))
        return found

    def _space(self, block: MixedBlock, parts: Array, size: int, classes: Array) -> Space:
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
