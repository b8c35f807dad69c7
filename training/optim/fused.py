"""A step on path values in four kernel launches, with tables that describe all tensors."""

from __future__ import annotations

import importlib.util
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pathspace.errors import UnsupportedError

from .layout import DYNAMIC, PLAIN, STATIC, Part
from .sharding import local_gradient
from .slots import Groups, Slot
from .space import PathSpace

State = Mapping[Tensor, dict[str, Any]]
TYPES = {torch.float64: 0, torch.float32: 1, torch.bfloat16: 2, torch.float16: 3}
KINDS = {PLAIN: 0, DYNAMIC: 1, STATIC: 2}
# (of a sweep of the gauge:) rows of a program, rows processed together, and columns of a program
ROWS, AT_ONCE, BLOCK = 64, 4, 128


def kernels_for(owner: str, device: torch.device) -> Any:
    """The module of kernels for a device: Triton's for a CUDA device, Numba's for a processor.

    Raises:
        UnsupportedError: the compiler is not installed, or there is none for the device.
    """
    # (both are slow to import)
    if device.type != "cpu" or os.environ.get("TRITON_INTERPRET") == "1":
        check_device(owner, device)
        from . import triton_kernels

        return triton_kernels
    if importlib.util.find_spec("numba") is None:
        raise UnsupportedError(
            f"{owner} found fused=True without Numba; install pathspace[cpu], or leave fused out."
        )
    from . import numba_kernels

    return numba_kernels


def check_device(owner: str, device: torch.device) -> None:
    """Check that Triton's kernels can run.

    Raises:
        UnsupportedError: Triton is not installed, or the weights are not on a CUDA device.
    """
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        raise UnsupportedError(
            f"{owner} found fused=True for weights on {device.type}, expected a CUDA device; leave"
            " fused out, or set TRITON_INTERPRET=1 to run the kernels slowly on a processor."
        )
    if importlib.util.find_spec("triton") is None:
        raise UnsupportedError(
            f"{owner} found fused=True without Triton; install pathspace[gpu], or leave fused out."
        )


class Table:
    """Numbers on a device, which the host updates only if they change, without waiting.

    Args:
        tensor: the memory of the table.
    """

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self._rows: list[Any] | None = None
        self._captured: list[Tensor] = []

    def put(self, rows: list[Any]) -> Tensor:
        """The table with these rows."""
        if rows != self._rows:
            host = torch.tensor(rows, dtype=self.tensor.dtype).view(self.tensor.shape)
            if self.tensor.is_cuda:
                host = host.pin_memory()
                if torch.cuda.is_current_stream_capturing():
                    # a captured copy reads this memory again at every replay
                    self._captured.append(host)
            self.tensor.copy_(host, non_blocking=True)
            self._rows = rows
        return self.tensor


def address(ids: Tensor, part: Part, taps: int = 1) -> tuple[int, int, int] | None:
    """Position of ids from row and column: ``row * stride + column // taps %
    period``; ``None`` if impossible.

    Args:
        ids: ids that broadcast to the part's view after repetition over the taps.
        part: layout of the tensor.
        taps: number of consecutive columns with the same id.
    """
    shape, view = ids.shape, part.view
    if ids.numel() == 1:
        return 0, 1, 1
    if part.by_rows and shape[0] == 1:
        return 0, taps, shape[1]
    varying = [d for d in range(1, len(shape)) if shape[d] > 1]
    stride = math.prod(shape[1:]) if shape[0] > 1 else 0
    if not varying:
        return stride, 1, 1
    first, last = varying[0], varying[-1]
    if any(shape[d] == 1 < view[d] for d in range(first, last)):
        return None
    return stride, math.prod(view[last + 1 :]), math.prod(view[first : last + 1])


class Fused:
    """The tables of an optimizer, and its step.

    Args:
        space: the path space.
        kept: the stored vectors by chain, and by tensor.
        chains: names of those vectors that are moments of chains.
        buffers: names of the moments of tensors.

    Raises:
        UnsupportedError: the kernels cannot address a tensor.

    Attributes:
        launches: how many kernels have been started.
    """

    def __init__(
        self,
        space: PathSpace,
        kept: Mapping[str, Tensor],
        chains: Sequence[str],
        buffers: Sequence[str],
    ) -> None:
        if space.manner.relative:
            raise UnsupportedError(
                f"{space.owner} found fused=True with relative=True, expected one; leave one out."
            )
        self.kernels, self.space, self.kept, self.buffers = (
            kernels_for(space.owner, space.device),
            space,
            kept,
            buffers,
        )
        self.height, self.block = self.kernels.HEIGHT, self.kernels.BLOCK
        self._memory: dict[int, Any] = {}
        self.launches = 0
        self._constants = -1
        self._tables: dict[str, Table] = {}
        self._describe()
        layout, device, count = space.layout, space.device, space.layout.count
        vectors = space.vectors
        self.total = torch.zeros(count, dtype=torch.float64, device=device)
        # (not read if all signs are +1)
        self.signs = self.total if layout.signs is None else layout.signs
        alike = torch.full((count,), space.one_group or 0, device=device)
        self.groups = (alike if space.group_index is None else space.group_index).to(torch.int32)
        self.ages = kept.get("steps", self.total)
        # 0 where there is none
        by_chain = [
            self.total,
            vectors.value,
            vectors.kept.least,
            None,
            *(kept[name] for name in chains),
        ]
        self._by_chain = [0 if vector is None else vector.data_ptr() for vector in by_chain] + [
            0,
            0,
        ]
        self._held: Tensor | None = None

    def _describe(self) -> None:
        """Build the table of numbers, the programs of each kernel, and the positions of
        factors by head and by tail.
        """
        numbers, tiles, sums, edges = [], [], [], []
        heads = tails = 1
        self._head_slots: list[tuple[Slot, slice]] = []
        self._tail_slots: list[tuple[Slot, slice]] = []
        for i, slot in enumerate(self.space.slots):
            part, by_head = slot.part, self._by_head(slot)
            tail, head = (
                address(part.tail, part, part.taps),
                address(part.head, part) if by_head else (0, 1, 1),
            )
            if (
                slot.held.dtype not in self.kernels.SUPPORTED
                or tail is None
                or head is None
                or slot.flat is None
            ):
                name = self.space.names[i]
                raise UnsupportedError(
                    f"{self.space.owner} found fused=True for parameter {name!r} of shape"
                    f" {tuple(slot.held.shape)} and type {slot.held.dtype}, whose memory the"
                    " kernels cannot walk; leave fused out."
                )
            rows, columns = (part.view[0], math.prod(part.view[1:])) if part.view else (1, 1)
            kind = KINDS[part.kind] if part.kind == DYNAMIC or slot.tail is not None else 0
            tail = tail if kind else (0, 1, 1)
            if columns == 1 or (
                columns < self.kernels.SHORT and tail[0] == head[0] == 0 and tail[2] == head[2] == 1
            ):
                # one long row
                tail, head = ((0, 1, rows if stride else 1) for stride, _, _ in (tail, head))
                rows, columns = 1, rows * columns
            start = part.span.start if part.span is not None else 0
            if kind == KINDS[STATIC]:
                start, tails = tails, tails + part.tail.numel()
                self._tail_slots.append((slot, slice(start, tails)))
            first = 0
            if by_head:
                first, heads = heads, heads + part.head.numel()
                self._head_slots.append((slot, slice(first, heads)))
            numbers.append(
                [
                    TYPES[slot.held.dtype],
                    rows,
                    columns,
                    slot.group,
                    start,
                    *tail,
                    first,
                    *head,
                    part.edges.start,
                    kind,
                ]
            )
            mine = [
                [i, row, min(row + self.height, rows), column]
                for row in range(0, rows, self.height)
                for column in range(0, columns, self.block)
            ]
            tiles += mine
            sums += mine if part.span is not None else []
            count = part.edges.stop - part.edges.start
            edges += [[i, 0, -count, first] for first in range(0, count, self.block)]
        device = self.space.device
        # the type of all tensors, or -1
        types = {row[0] for row in numbers}
        self.types = types.pop() if len(types) == 1 else -1
        # whether factors by tail depend on the row, or those by head on row and column
        self.mixed = any(row[5] or (row[9] and row[11] > 1) for row in numbers)
        self.numbers = torch.tensor(numbers, dtype=torch.int32, device=device)
        self.tiles, self.sums, self.edges = (
            torch.tensor(programs or [[0, 0, -1, 1]], dtype=torch.int32, device=device)
            for programs in (tiles, sums + edges, edges)
        )
        self.grids = len(tiles), len(sums) + len(edges), len(edges)
        self.heads = torch.ones(heads, dtype=torch.float64, device=device)
        self.static = torch.ones(tails, dtype=torch.float64, device=device)
        shares = [self.space.share(i) for i in range(len(self.space.slots))]
        self.shares = torch.tensor(shares, dtype=torch.float64, device=device)

    def _by_head(self, slot: Slot) -> bool:
        """Whether a tensor has factors by head."""
        return slot.part.kind != PLAIN and (
            slot.head is not None or self.space.manner.cap is not None
        )

    # --- values that can change between steps

    def _upload(self, name: str, rows: list[Any], dtype: torch.dtype = torch.int64) -> Tensor:
        """A table of this name with these rows."""
        shape = (len(rows), len(rows[0])) if isinstance(rows[0], list) else (len(rows),)
        if name not in self._tables or self._tables[name].tensor.shape != shape:
            self._tables[name] = Table(torch.zeros(shape, dtype=dtype, device=self.space.device))
        return self._tables[name].put(rows)

    def _settings(self, groups: Groups, started: bool) -> list[list[float]]:
        result = []
        for group in groups:
            lr, betas = group["lr"], group.get("betas", (0.0, 0.0))
            result.append(
                [
                    # (on a device the first kernel reads a learning rate that is a tensor)
                    0.0 if isinstance(lr, Tensor) and lr.is_cuda else float(lr),
                    float(group["weight_decay"]),
                    float(group["maximize"]),
                    float(group.get("momentum", 0.0)),
                    float(group.get("dampening", 0.0)),
                    float(group.get("nesterov", False)),
                    float(started),
                    *(float(beta) for beta in betas),
                    *(math.log(beta) if beta else -math.inf for beta in betas),
                    float(group.get("eps", 0.0)),
                    self.space.manner.cap or 0.0,
                ]
            )
        return result

    def _rates(self, groups: Groups) -> list[list[int]]:
        lrs = [group["lr"] for group in groups]
        return [
            [lr.data_ptr(), TYPES[lr.dtype]] if isinstance(lr, Tensor) else [0, 0] for lr in lrs
        ]

    def _prepare(self) -> None:
        """Update constants of a step and the mask of constant chains if they have changed."""
        space = self.space
        if self._constants != space.constants:
            self.limits = self.space.vectors.factor if space.limits is None else space.limits
            for slot, place in self._head_slots:
                self.heads[place] = 1.0 if slot.head is None else slot.head.reshape(-1).double()
            for slot, place in self._tail_slots:
                assert slot.tail is not None
                self.static[place] = slot.tail.reshape(-1).double()
            self._constants = space.constants
        if space.held is not self._held:
            self._held = space.held
            self._held_numbers = None if space.held is None else space.held.double()
            self._by_chain[3] = 0 if self._held_numbers is None else self._held_numbers.data_ptr()

    def _pointers(
        self, groups: Groups, state: State, grads: Sequence[Tensor | None]
    ) -> list[list[int]]:
        """Addresses of weights, gradients and moments, which are created if needed; 0 for
        tensors that do not move.
        """
        rows = []
        for slot, grad in zip(self.space.slots, grads, strict=True):
            if slot.idle:
                rows.append([0, 0, 0, 0, 0])
                continue
            mine, fresh = state[slot.parameter], 0
            wanted = groups[slot.group].get("momentum", 1.0) or self.buffers[0] in mine
            for name in self.buffers if wanted else ():
                if name not in mine:
                    mine[name], fresh = torch.zeros_like(slot.parameter), 1
            moments = [
                self.space.moments(slot, mine, name).data_ptr() if wanted else 0
                for name in self.buffers
            ]
            gradient = 0 if grad is None else grad.data_ptr()
            # (a device that holds no part of a tensor still counts its steps)
            held = slot.held.data_ptr() or self.total.data_ptr()
            rows.append([held, gradient, *moments, *[0] * (2 - len(moments)), fresh])
        return rows

    def step(self, groups: Groups, state: State) -> None:
        """One step.

        Args:
            groups: the parameter groups.
            state: the state of every parameter.
        """
        space, layout, vectors, k = self.space, self.space.layout, self.space.vectors, self.kernels
        found = [local_gradient(s.parameter) if s.given else None for s in space.slots]
        grads = [
            None if g is None else s.part.shaped(g).contiguous()
            for s, g in zip(space.slots, found, strict=True)
        ]
        inside = [slot.parameter for slot in space.slots if slot.block is not None]
        started = any(self.buffers[0] in state.get(parameter, {}) for parameter in inside)
        self._prepare()
        pointers = self._upload("pointers", self._pointers(groups, state, grads))
        settings = self._upload("settings", self._settings(groups, started), torch.float64)
        rates = self._upload("rates", self._rates(groups))
        chains, parts, adam = (
            self._upload("chains", list(self._by_chain[:7])),
            vectors.kept,
            space.manner.linear,
        )
        tiles, sums, edges = self.grids
        before = vectors.value.clone() if space.cut else vectors.value
        target, tails, count = layout.target, layout.tails, layout.count
        by_chain = (chains, count, settings, self.groups)
        self._launch(
            k.reduce, max(sums, 1), pointers, self.numbers, self.sums, self.total, target,
            self.signs, parts.tree,
            layout.places, tails, settings, rates, len(groups), SIGNED=layout.signs is not None,
            KINDS=self.types,
        )  # fmt: skip
        space.spread.sum(self.total)
        self._launch(
            k.pass_on, -(-(tails + layout.edges) // self.block), *by_chain, vectors.factor,
            self.limits, parts.step,
            parts.keep, parts.tree, layout.of_tails, layout.of_edges, tails, layout.edges,
            OTHERS=len(layout.of_edges) > layout.edges, ADAM=adam,
        )  # fmt: skip
        self._launch(
            k.update, tiles, pointers, self.numbers, self.tiles, settings, parts.step, parts.keep,
            self.static, self.heads, self.shares, self.ages, ADAM=adam, KINDS=self.types,
            MIXED=self.mixed,
        )  # fmt: skip
        blocks = -(-count // self.block)
        self._launch(
            k.finish, blocks + edges, pointers, self.numbers, self.edges, *by_chain, space.counts,
            layout.places, parts.tree, self.ages, len(space.slots), blocks, ADAM=adam,
        )  # fmt: skip
        for slot in space.slots:
            if not slot.idle:
                torch.autograd.graph.increment_version(slot.held)
        if space.cut:
            # the kernels do not store ratios
            ratio = vectors.value.div(before).nan_to_num_(1.0)
            space.record.follow(torch.cat([ratio, ratio.reciprocal()]), adam)
        space.versions.note_step()

    def _launch(self, kernel: Any, programs: int, *args: Any, **options: int) -> None:
        if programs:
            self.launches += 1
            self.kernels.launch(self._memory, kernel, programs, args, options)


__all__ = ["Fused", "check_device"]
