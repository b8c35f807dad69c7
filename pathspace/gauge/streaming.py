"""Gauge transformations of checkpoints larger than the memory: tensors are read,
changed and written in pieces.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Iterable, Iterator, Mapping

import numpy as np
import torch
from torch import Tensor

from ..errors import InputError, expect_arguments, expect_numbers
from ..files.checkpoints import Change, Checkpoint
from ..graph.parts import WeightBlock
from ..graph.structure import Structure
from ..models.finite import expect_finite, expect_scales
from .attained import attained
from .balance import Balancing
from .moves import moved
from .pairs import Pairs, Table
from .programme import Minimum, minimise, separate

# largest number of scalars between units that are kept in memory, where
# Newton's method needs few steps
IN_MEMORY = 1 << 23
EXACT, CLOSE = 1e-12, 1e-3
ROUNDS = 200
APPROXIMATE = "its scale is free at eps = 0 only"

Path = str | os.PathLike[str]


def rescale_files(
    graph: Structure, phi: Tensor, source: Path, destination: Path, exact: bool = False
) -> None:
    """Apply a gauge transformation to a checkpoint, as :func:`pathspace.rescale`
    does to a model in memory.

    It needs the memory of a few pieces of a tensor. Each file is written under a temporary name and
    then renamed; if the call is interrupted, the same call completes the folder. Tensors outside
    the graph, and other files of a folder (configuration, tokenizer), are copied.

    Args:
        graph: the reduction graph; weights need no values, see :func:`pathspace.without_weights`.
        phi: log-scales of the units, shape ``(num_units,)``. Multiples of ``log 2`` cause
            no rounding in any type, but for the smallest numbers (below 6e-5 in float16).
        source: a safetensors file, or a folder with one, or with several and their index.
        destination: a file or a folder, like the source.
        exact: apply only the part of ``phi`` that is exact for the unchanged model, see
            :func:`pathspace.rescale`.

    Raises:
        InputError: ``phi`` has a wrong shape or takes weights beyond the range of their type, a
            tensor is missing or has another shape, or files cannot be read or written.

    Example:
        >>> import tempfile, torch, pathspace as ps
        >>> from safetensors.torch import load_file, save_file
        >>> model = torch.nn.Sequential(
        ...     torch.nn.Linear(2, 3), torch.nn.ReLU(), torch.nn.Linear(3, 1)
        ... )
        >>> graph, x = ps.trace(model, torch.randn(1, 2)), torch.randn(5, 2)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_file(model.state_dict(), f"{folder}/model.safetensors")
        ...     ps.rescale_files(
        ...         graph,
        ...         torch.randn(3),
        ...         f"{folder}/model.safetensors",
        ...         f"{folder}/other.safetensors",
        ...     )
        ...     other = load_file(f"{folder}/other.safetensors")
        >>> torch.allclose(torch.func.functional_call(model, other, (x,)), model(x), atol=1e-5)
        True
    """
    expect_arguments("rescale_files", graph=graph)
    expect_scales("rescale_files", phi, graph.num_units)
    phi = phi.detach().cpu().double()
    phi = graph.exact_part(phi) if exact else phi
    checkpoint = Checkpoint.open(source)
    factors = graph.gauge_factors(phi)
    names = _located(graph, checkpoint, factors, "rescale_files")
    changes: dict[str, Change] = {}
    for name, (head, tail) in factors.items():
        change = _change(name, head, tail, graph.shifts.get(name, 0.0))
        changes.update(dict.fromkeys(names[name], change))
    job = hashlib.sha256(phi.numpy().tobytes()).hexdigest()
    checkpoint.rewrite(destination, changes, job)


def _located(
    graph: Structure, checkpoint: Checkpoint, wanted: Iterable[str], who: str
) -> dict[str, list[str]]:
    """The names of the graph's tensors in the checkpoint, after a check of their shapes."""
    aliases = {block.name: (block.name, *block.aliases) for block in graph.blocks}
    found = checkpoint.named({name: aliases.get(name, (name,)) for name in wanted}, who)
    places = checkpoint.places()
    for name, keys in found.items():
        for key in keys:
            entry = places[key].entries[key]
            expected = (
                tuple(graph.parameters[name].shape) if name in graph.parameters else entry.shape
            )
            if entry.shape != expected or entry.dtype is None or not entry.dtype.is_floating_point:
                raise InputError(
                    f"{who} found {key!r} of shape {entry.shape} and type {entry.kind}, expected"
                    f" {expected} in floating point; pass the checkpoint of the traced model."
                )
    return found


def _change(name: str, head: Tensor, tail: Tensor, shift: float) -> Change:
    def change(place: slice, piece: Tensor) -> Tensor:
        # types with few digits are computed in float32 and rounded once
        wide = piece.float() if piece.element_size() < 4 else piece
        expect_finite("rescale_files", name, wide)
        after = moved(wide, _cut(head, place), _cut(tail, place), shift).to(piece.dtype)
        if not bool(after.isfinite().all()):
            raise InputError(
                f"rescale_files found log-scales that take {name!r} beyond the range of"
                f" {piece.dtype}, expected finite entries; use smaller ones, or convert the"
                " checkpoint first."
            )
        return after

    return change


class StreamedPairs(Pairs):
    """Sizes of weights that are read from a checkpoint whenever they are needed.

    Args:
        graph: the reduction graph.
        p: the exponent.
        checkpoint: the weights.
        names: parameter -> its names in the checkpoint.
    """

    def __init__(
        self, graph: Structure, p: float, checkpoint: Checkpoint, names: Mapping[str, list[str]]
    ) -> None:
        self.graph, self.p = graph, p
        self.checkpoint, self.names = checkpoint, names
        # of other blocks, whose one end is constant, only sums over rows or columns are kept
        self._between = [block for block in graph.blocks if between(block)]
        keep = sum(block.numel for block in self._between) <= IN_MEMORY
        self._lay_out(self._values(graph.blocks), keep=keep)
        self.kept = keep
        if not keep:
            self.tables = _Again(self)

    def _values(self, blocks: Iterable[WeightBlock]) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        for block in blocks:
            for place, piece in self.checkpoint.pieces(self.names[block.name][0]):
                if not piece.numel():
                    continue
                value = piece.double() + block.shift
                expect_finite("balance_files", block.name, value)
                if block.unused is not None:
                    value = value.masked_fill(_cut(block.unused, place).expand(value.shape), 0)
                yield value, _cut(block.head, place), _cut(block.tail, place)

    def again(self) -> Iterator[Table]:
        """Read the tables again."""
        factors = self._logs(self.origin).mul_(self.p)
        for value, heads, tails in self._values(self._between):
            table = self.table(value, heads, tails)
            if isinstance(table, Table):
                self._drop_loops(table.sizes, table.head[:, None], table.tail[None, :])
                up, down = (factors[ids.abs()] * ids.sign() for ids in (table.head, table.tail))
                table.sizes.mul_(up.exp()[:, None]).mul_((-down).exp()[None, :])
                yield table

    def _rebase(self, phi: np.ndarray) -> None:
        if self.kept:
            super()._rebase(phi)
            return
        self.tables, tables = (), self.tables
        super()._rebase(phi)
        self.tables = tables


class _Again:
    """Tables that each iteration reads again from the checkpoint."""

    def __init__(self, pairs: StreamedPairs) -> None:
        self.pairs = pairs

    def __iter__(self) -> Iterator[Table]:
        return self.pairs.again()


def between(block: WeightBlock) -> bool:
    """Whether both ends of a tensor's weights vary, along different dimensions."""
    rows = {d for d, size in enumerate(block.head.shape) if size > 1}
    columns = {d for d, size in enumerate(block.tail.shape) if size > 1}
    return bool(rows and columns and not rows & columns)


def _cut(ids: Tensor, place: slice) -> Tensor:
    return ids[place] if ids.dim() and ids.shape[0] > 1 else ids


def balance_files(
    graph: Structure,
    source: Path,
    destination: Path,
    p: float = 2,
    tolerance: float | None = None,
    exact: bool = True,
) -> Balancing:
    """Balance a checkpoint, as :func:`pathspace.balance` does to a model in memory.

    Each round computes the sums over the weights that enter and leave each unit in one pass
    over the files. If a weight has less than 32 bits, scales are rounded to powers of two, so
    that no weight is rounded: units are then balanced up to such a factor, and the result
    states the remaining imbalance.

    Args:
        graph: the reduction graph; weights need no values.
        source: a safetensors file, or a folder with one, or with several and their index.
        destination: a file or a folder, like the source.
        p: exponent of the norm.
        tolerance: largest relative difference between the two sums, before any rounding of scales;
            by default 1e-12 if the weights between units fit into memory, else 1e-3.
        exact: do not move units that are free only at ``eps = 0``, so that the function of the
            unchanged model is preserved; with ``False`` they move too, as under
            :func:`pathspace.balance`.

    Returns:
        The applied log-scales, the norms, the remaining imbalance, and the
        units that were not moved.

    Raises:
        InputError: ``p`` is not positive, a tensor is missing, has another shape or is not finite,
            the tolerance is not reached, or files cannot be read or written.

    Example:
        >>> import tempfile, torch, pathspace as ps
        >>> from safetensors.torch import save_file
        >>> model = torch.nn.Sequential(
        ...     torch.nn.Linear(2, 3), torch.nn.ReLU(), torch.nn.Linear(3, 1)
        ... )
        >>> graph = ps.trace(model, torch.randn(1, 2))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_file(model.state_dict(), f"{folder}/model.safetensors")
        ...     found = ps.balance_files(
        ...         graph, f"{folder}/model.safetensors", f"{folder}/other.safetensors"
        ...     )
        >>> found.after < found.before, found.imbalance < 1e-6
        (True, True)
    """
    expect_arguments("balance_files", graph=graph)
    expect_numbers("balance_files", "a positive number", p=p)
    expect_numbers("balance_files", "a positive number", or_none=True, tolerance=tolerance)
    checkpoint = Checkpoint.open(source)
    blocks = [block.name for block in graph.blocks]
    names = _located(graph, checkpoint, blocks, "balance_files")
    pairs = StreamedPairs(graph, p, checkpoint, names)
    start = np.zeros(graph.num_units)
    before = pairs.sides(start)[2]
    found = attained(pairs)
    if exact:
        found.fix(graph.approximate - 1, APPROXIMATE)
    if pairs.kept:
        best = minimise(pairs, found.free, start, EXACT if tolerance is None else tolerance)
    else:
        best = _in_rounds(pairs, found.free, CLOSE if tolerance is None else tolerance)
    places = checkpoint.places()
    narrow = any(places[key].entries[key].itemsize < 4 for keys in names.values() for key in keys)
    phi = best.phi
    if narrow:
        phi = np.round(phi / math.log(2)) * math.log(2)
        entering, leaving, after = pairs.sides(phi)
        best = Minimum(phi, after, _imbalance(entering, leaving, found.free)[1], best.steps)
    rescale_files(graph, torch.from_numpy(phi), source, destination)
    return Balancing(
        torch.from_numpy(phi), before, best.value, best.imbalance, found.reasons, best.steps
    )


def _imbalance(
    entering: np.ndarray, leaving: np.ndarray, free: np.ndarray
) -> tuple[np.ndarray, float]:
    both = entering + leaving
    uneven = np.where(free, entering - leaving, 0.0) / np.where(both > 0, both, 1.0)
    return uneven, float(np.abs(uneven).max(initial=0.0))


def _in_rounds(pairs: Pairs, free: np.ndarray, tolerance: float) -> Minimum:
    """Balance all units at once, in rounds of one pass over the weights.

    A plain step minimises a separable upper bound, so that the norm never grows. Every other step
    is extrapolated by the ratio of the last two; if the norm grows, the last point is restored
    and plain steps continue.
    """
    p, phi = pairs.p, np.zeros(len(free))
    longer, last, lowest = 1.0, np.zeros(len(free)), math.inf
    best = phi
    for step in range(ROUNDS):
        entering, leaving, total = pairs.sides(phi)
        worst = _imbalance(entering, leaving, free)[1]
        if worst <= tolerance:
            return Minimum(phi, total, worst, step)
        if total > lowest * (1 + 1e-12):
            # the step was too long: continue from the last point with plain steps
            phi, longer, last = best, 1.0, np.zeros(len(free))
            entering, leaving, total = pairs.sides(phi)
        best, lowest = phi, total
        move = np.where(
            free, separate(entering, leaving, np.zeros(len(free))) / (p * pairs.width), 0.0
        )
        size = float(last @ last)
        if size:
            # an error that shrinks by the factor r each time is gone after a step
            # 1 / (1 - r) times as long
            ratio = float(np.clip((last @ move) / size, 0.0, 0.9))
            longer = 1 / (1 - ratio) if step % 2 else 1.0
        phi, last = phi + longer * move, move if longer == 1.0 else np.zeros(len(free))
    raise InputError(
        f"balance_files found norms that still differ by {worst:.0e} after {ROUNDS} rounds,"
        f" expected {tolerance:.0e}; pass a larger tolerance."
    )
