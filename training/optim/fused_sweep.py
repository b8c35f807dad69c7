"""A sweep of the gauge in three kernel launches for any number of tensors;
``sweeps.py`` is its reference.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pathspace.errors import UnsupportedError

from .canonical_gauge import Side
from .fused import AT_ONCE, BLOCK, ROWS, TYPES, Table, check_device
from .layout import memory_order
from .sweeps import UnitSet

Buffers = Callable[[Tensor], Iterable[tuple[Tensor, int]]]


def _walk(side: Side, tensor: Tensor) -> tuple[tuple[int, int], tuple[int, int, int]] | None:
    """Rows and columns of a tensor in memory order, and the positions of its entries from them."""
    order = memory_order(tensor) or tuple(range(tensor.dim()))
    shape, ids = tuple(tensor.shape[d] for d in order), side.ids.permute(order)
    varying = [d for d, size in enumerate(ids.shape) if size > 1]
    moved = order != tuple(range(tensor.dim()))
    if not tensor.permute(order).is_contiguous() or side.unused is not None:
        return None
    rows, columns = (shape[0], math.prod(shape[1:])) if shape else (1, 1)
    if not varying:
        return (rows, columns), (0, 1, 1)
    inner = [d for d in varying if d]
    stride = math.prod(ids.shape[1:]) if varying[0] == 0 else 0
    if not inner:
        return (rows, columns), (stride, 1, 1)
    full = all(ids.shape[d] == shape[d] for d in range(inner[0], inner[-1] + 1))
    if not full or (moved and len(varying) > 1):
        return None
    return (rows, columns), (
        stride,
        math.prod(shape[inner[-1] + 1 :]),
        math.prod(shape[inner[0] : inner[-1] + 1]),
    )


def _starts(owner: np.ndarray, count: int) -> np.ndarray:
    """The start of each owner's elements in a list sorted by owner, and the end of the list."""
    return np.searchsorted(owner, np.arange(count + 1))


class FusedSweep:
    """The tables of one set of units, and its sweep.

    Args:
        chosen: the set.
        tensors: parameters and running statistics by name.
        phi: log-scales of all units, updated by each sweep.

    Raises:
        UnsupportedError: the kernels cannot address a tensor.

    Attributes:
        launches: how many kernels have been started.
    """

    def __init__(self, chosen: UnitSet, tensors: Mapping[str, Tensor], phi: Tensor) -> None:
        check_device("GaugeFixed", phi.device)
        # (slow to import)
        from . import triton_sweep

        self.kernels, self.phi, self.launches = triton_sweep, phi, 0
        self._seen: list[tuple[Any, ...]] | None = None
        self.count, device = len(chosen.units), phi.device
        moved = [side for side in chosen.moved if side.name in tensors]
        names = sorted({side.name for side in moved})
        self.tensors = [tensors[name] for name in names]
        # buffers of the others stay as they are
        following = {side.name for side, on in zip(chosen.moved, chosen.follows, strict=True) if on}
        self.follows = [name in following for name in names]
        self._describe(chosen, names, device)

        def put(array: np.ndarray, kind: type) -> Tensor:
            return torch.from_numpy(np.ascontiguousarray(array.astype(kind))).to(device)

        entry, units, powers = (t.cpu().numpy() for t in (chosen.entry, chosen.unit, chosen.power))
        starts = _starts(entry, self.entries + 1)
        self.pairs = int(np.diff(starts).max(initial=0))
        # (no tensor may be empty, because kernels use its address)
        self.starts, self.units = put(starts, np.int64), put(np.append(units, 0), np.int64)
        self.powers = put(np.append(powers, 0.0), np.float64)
        voter, group = (t.cpu().numpy() for t in chosen.voters)
        voters = np.full(self.entries + 1, -1)
        voters[voter] = group
        self.voters = put(voters, np.int64)
        unit, deciding, weight = (t.cpu().numpy() for t in chosen.votes)
        order = np.argsort(unit, kind="stable")
        votes = _starts(unit[order], self.count)
        self.votes = int(np.diff(votes).max(initial=0))
        self.vote_starts = put(votes, np.int64)
        self.groups = put(np.append(deciding[order], 0), np.int64)
        self.weights = put(np.append(weight[order], 0.0), np.float64)
        self.target = torch.cat([chosen.target, chosen.target.new_ones(1)])
        self.balanced, self.places = chosen.balanced.to(torch.int32), chosen.units
        self.rate = torch.tensor([chosen.rate], dtype=torch.float64, device=device)
        # sums of entering squares, of leaving squares, and of squares by group
        self.sums = torch.zeros(
            2 * self.count + len(self.target), dtype=torch.float64, device=device
        )
        self.changes = torch.zeros(self.count, dtype=torch.float64, device=device)
        # of these, what buffers follow
        self.kept = torch.zeros_like(self.changes)

    def _describe(self, chosen: UnitSet, names: Sequence[str], device: torch.device) -> None:
        sizes = [side.ids.numel() for side in chosen.moved]
        first = np.concatenate([[0], np.cumsum(sizes)])
        # an entry without a pair, for tensors with one side only
        self.entries = int(first[-1])
        numbers: list[list[int]] = []
        tiles: list[list[int]] = []
        sums: list[list[int]] = []
        for i, (name, tensor) in enumerate(zip(names, self.tensors, strict=True)):
            own = [(k, side) for k, side in enumerate(chosen.moved) if side.name == name]
            walks = [_walk(side, tensor) for _, side in own]
            if tensor.dtype not in TYPES or any(walk is None for walk in walks) or len(own) > 2:
                raise UnsupportedError(
                    f"GaugeFixed found fused=True for {name!r} of shape {tuple(tensor.shape)} and"
                    f" type {tensor.dtype}, whose memory the kernels cannot walk; leave fused out."
                )
            (rows, columns), _ = walks[0] or ((1, 1), None)
            places = [
                [int(first[k]), *walk[1]]
                for (k, _), walk in zip(own, walks, strict=True)
                if walk is not None
            ]
            places += [[self.entries, 0, 1, 1]] * (2 - len(places))
            numbers.append([TYPES[tensor.dtype], rows, columns, *places[0], *places[1], 0, 0, 0])
            mine = [
                [i, row, min(row + ROWS, rows), column]
                for row in range(0, rows, ROWS)
                for column in range(0, columns, BLOCK)
            ]
            tiles += [[*program, 0] for program in mine]
            for place, (k, _) in enumerate(own):
                sums += (
                    [[*program, 3 + 4 * place] for program in mine]
                    if k < len(chosen.summed)
                    else []
                )
        self.numbers_rows = numbers
        # whether an entry depends on row and column
        self.mixed = any(row[k + 1] and row[k + 3] != 1 for row in numbers for k in (3, 7))
        self.shifts = [
            next(side.shift for side in chosen.moved if side.name == name) for name in names
        ]
        self.tiles, self.sum_tiles = (
            torch.tensor(p, dtype=torch.int32, device=device) for p in (tiles, sums)
        )
        self.numbers = Table(torch.zeros(len(numbers), 14, dtype=torch.int32, device=device))
        self.pointers = Table(torch.zeros(len(numbers), 4, dtype=torch.int64, device=device))
        self.kinds = Table(torch.zeros(len(numbers), 4, dtype=torch.float64, device=device))

    def step(self, buffers: Buffers) -> None:
        """One sweep over the tensors, their buffers and the log-scales.

        Args:
            buffers: function of a tensor that returns the optimizer's buffers for
                it, each with its power.

        Raises:
            UnsupportedError: there are more than three buffers, or one has another
                memory layout than its tensor.
        """
        found = [
            tuple(pair for pair in buffers(tensor) if pair[1]) if follows else ()
            for tensor, follows in zip(self.tensors, self.follows, strict=True)
        ]
        # (most steps find the tables as they are)
        now = [
            (tensor.data_ptr(), *((id(b), b.data_ptr(), power) for b, power in own))
            for tensor, own in zip(self.tensors, found, strict=True)
        ]
        if now != self._seen:
            self._tabulate(found)
            self._seen = now
        k, sums = self.kernels, self.sums[2 * self.count :]
        at, about, powers = self.pointers.tensor, self.numbers.tensor, self.kinds.tensor
        pairs = (self.starts, self.units, self.powers)
        sizes = {
            "KINDS": self.types, "MIXED": self.mixed, "AT_ONCE": AT_ONCE, "BLOCK": BLOCK
        }  # fmt: skip
        self._launch(
            k.squares, len(self.sum_tiles), at, about, self.sum_tiles, powers, self.sums, sums,
            *pairs, self.voters, self.count, self.pairs, **sizes,
        )  # fmt: skip
        self._launch(
            k.change_units, -(-self.count // BLOCK), self.sums, sums, self.target, self.balanced,
            self.rate, self.changes, self.kept, self.phi, self.places, self.vote_starts,
            self.groups, self.weights, self.count, self.votes, BLOCK=BLOCK,
        )  # fmt: skip
        self._launch(
            k.scale, len(self.tiles), at, about, self.tiles, powers, *pairs, self.changes,
            self.kept, self.sums, len(self.sums), self.pairs, **sizes,
        )  # fmt: skip
        torch.autograd.graph.increment_version(
            [*self.tensors, *(buffer for own in found for buffer, _ in own)]
        )

    def _tabulate(self, found: Sequence[Sequence[tuple[Tensor, int]]]) -> None:
        """Write the addresses, types and powers of tensors and buffers into the tables."""
        pointers, numbers, kinds = [], [], []
        for row, tensor, shift, own in zip(
            self.numbers_rows, self.tensors, self.shifts, found, strict=True
        ):
            if len(own) > 3 or any(
                b.stride() != tensor.stride() or b.dtype not in TYPES for b, _ in own
            ):
                raise UnsupportedError(
                    f"GaugeFixed found fused=True with {len(own)} buffers for a tensor of shape"
                    f" {tuple(tensor.shape)}, expected at most 3, each in the memory layout of its"
                    " tensor; leave fused out."
                )
            rest = [0] * (3 - len(own))
            pointers.append([tensor.data_ptr(), *(buffer.data_ptr() for buffer, _ in own), *rest])
            numbers.append([*row[:11], *(TYPES[buffer.dtype] for buffer, _ in own), *rest])
            kinds.append([*(float(power) for _, power in own), *map(float, rest), shift])
        types = {tensor.dtype for tensor in self.tensors}
        types |= {buffer.dtype for own in found for buffer, _ in own}
        # the type of all tensors, or -1
        self.types = TYPES[types.pop()] if len(types) == 1 else -1
        self.pointers.put(pointers)
        self.numbers.put(numbers)
        self.kinds.put(kinds)
        # (which keeps their ids)
        self._known = found

    def _launch(self, kernel: Any, programs: int, *args: Any, **sizes: Any) -> None:
        self.launches += 1
        kernel[(programs,)](*args, **sizes)


__all__ = ["FusedSweep"]
