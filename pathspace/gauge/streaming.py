"""Gauge transformations of checkpoints larger than the memory: tensors are read,
changed and written in pieces.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..errors import InputError, expect_arguments, expect_numbers
from ..files.checkpoints import Change, Checkpoint
from ..files.saved_names import as_saved, conversions
from ..files.tensor_files import StoredTensor
from ..graph.parts import idle
from ..graph.structure import LOG_2, Structure
from ..models.finite import count_nonfinite, expect_finite, expect_scales
from .attained import attained
from .balance import Balancing
from .moves import moved
from .pairs import Pairs, Table
from .programme import Minimum, minimise

# the default tolerance up to so many scalars between units, for more, and where scales are
# rounded to powers of two
FEW, EXACT, CLOSE, COARSE = 1 << 23, 1e-12, 1e-3, 0.1
ROUNDS = 200
NONE, NO_SUMS = torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.float64)
APPROXIMATE = "its scale is free at eps = 0 only"

Path = str | os.PathLike[str]


def rescale_files(
    graph: Structure, phi: Tensor, source: Path, destination: Path, exact: bool = False
) -> None:
    """Apply a gauge transformation to a checkpoint, as :func:`pathspace.rescale_`
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
            :func:`pathspace.rescale_`.

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
    changes: dict[str, Change] = {}
    for keys, name, (head, tail) in _located(
        graph, checkpoint, graph.gauge_factors(phi), "rescale_files"
    ):
        change = _change(name, head, tail, graph.shifts.get(name, 0.0))
        changes.update(dict.fromkeys(keys, change))
    job = hashlib.sha256(phi.numpy().tobytes()).hexdigest()
    checkpoint.rewrite(destination, changes, job)


class _Held(NamedTuple):
    """A tensor of a checkpoint under all its names, and numbers for its entries."""

    keys: list[str]
    name: str
    numbers: tuple[Tensor, ...]


def _located(
    graph: Structure, checkpoint: Checkpoint, wanted: Mapping[str, tuple[Tensor, ...]], who: str
) -> list[_Held]:
    """Where a checkpoint holds the graph's tensors, after a check of their shapes."""
    names = {block.name: (block.name, *block.aliases) for block in graph.blocks}
    shapes = {block.name: block.shape for block in graph.blocks}
    try:
        found = checkpoint.named({name: names.get(name, (name,)) for name in wanted}, who)
        held = [_Held(keys, name, wanted[name]) for name, keys in found.items()]
    except InputError:
        folder = checkpoint.path if checkpoint.path.is_dir() else checkpoint.path.parent
        if not (other := conversions(folder)):
            raise
        whole = {
            name: tuple(each.expand(shapes.get(name, each.shape)) for each in numbers)
            for name, numbers in wanted.items()
        }
        saved = as_saved(other, whole)
        found = checkpoint.named({name: (name,) for name in saved}, who)
        held = [_Held(keys, *saved[name][:2]) for name, keys in found.items()]
        shapes = {keys[0]: saved[name][2] for name, keys in found.items()}
    places = checkpoint.places()
    for keys, name, _ in held:
        for key in keys:
            entry = places[key].entries[key]
            shape = shapes.get(keys[0], shapes.get(name, entry.shape))
            floating = entry.dtype is not None and entry.dtype.is_floating_point
            if entry.shape != shape or not floating:
                raise InputError(
                    f"{who} found {key!r} of shape {entry.shape} and type {entry.kind}, expected"
                    f" {tuple(shape)} in floating point; pass the checkpoint of the traced model."
                )
    return held


def _change(name: str, head: Tensor, tail: Tensor, shift: float) -> Change:
    powers = not shift and all(bool((ends.frexp()[0] == 0.5).all()) for ends in (head, tail))

    def change(place: slice, piece: Tensor) -> Tensor:
        # types with few digits are computed in float32 and rounded once; powers of two round
        # nothing where the exponents are those of float32
        own = piece.element_size() > 2 or (powers and piece.dtype == torch.bfloat16)
        wide = piece if own else piece.float()
        after = moved(wide, _cut(head, place), _cut(tail, place), shift).to(piece.dtype)
        if count_nonfinite(after):
            expect_finite("rescale_files", name, piece)
            raise InputError(
                f"rescale_files found log-scales that take {name!r} beyond the range of"
                f" {piece.dtype}, expected finite entries; use smaller ones, or convert the"
                " checkpoint first."
            )
        return after

    return change


def _cut(ids: Tensor, place: slice) -> Tensor:
    return ids[place] if ids.dim() and ids.shape[0] > 1 else ids


class _Sums(Table):
    """Tables side by side of which only the sums of rows and columns are kept.

    ``rows columns / sum`` stands in place of the sizes of each: the same value and derivatives
    where it was measured, and everywhere for a table of one row or column.
    """

    def __init__(self, tables: Iterable[Table]) -> None:
        parts, samples = [(NONE,) * 3 + (NO_SUMS,) * 2], [np.zeros((2, 0), np.int64)]
        self.loops = 0.0
        for table in tables:
            self.loops += table.loops
            samples.append(np.stack(table.sample()))
            zeros = [torch.zeros(size, dtype=torch.float64) for size in table.sizes.shape]
            parts.append((table.head, table.side, table.tail, *_sums(table, *zeros)))
        self._sample = np.concatenate(samples, 1)
        self.head, self.side, self.tail, self.rows, self.columns = map(
            torch.cat, zip(*parts, strict=True)
        )
        heights, widths = ([len(part[end]) for part in parts] for end in (0, 2))
        self._of_row, self._of_column = (
            torch.arange(len(parts)).repeat_interleave(torch.tensor(each))
            for each in (heights, widths)
        )
        views = zip(self.rows.split(heights), self.columns.split(widths), strict=True)
        # those of several rows and columns
        self.wide = [pair for pair in views if min(map(len, pair)) > 1]
        self._nothing = torch.zeros(len(parts), dtype=torch.float64)

    def measure(self, tables: Iterable[Table], logs: Tensor) -> None:
        """Measure the sums of the tables with several rows and columns again."""
        for (rows, columns), table in zip(self.wide, tables, strict=True):
            by_row, by_column = _sums(table, *table.ends(logs))
            rows.copy_(by_row)
            columns.copy_(by_column)

    def scale(self, up: Tensor, down: Tensor) -> None:
        rows, columns = self.by_row(down.exp()), self.by_column(up.exp())
        self.rows.copy_(up.exp() * rows)
        self.columns.copy_(down.exp() * columns)

    def _shares(self, values: Tensor, table: Tensor) -> Tensor:
        """Sums over each table, over that of its sizes."""
        totals = self._nothing.index_add(0, self._of_row, self.rows)
        sums = self._nothing.index_add(0, table, values)
        return sums / totals.clamp_min_(1e-300)

    def by_row(self, factors: Tensor) -> Tensor:
        return self.rows * self._shares(self.columns * factors, self._of_column)[self._of_row]

    def by_column(self, factors: Tensor) -> Tensor:
        return self.columns * self._shares(self.rows * factors, self._of_row)[self._of_column]

    def sample(self) -> tuple[np.ndarray, np.ndarray]:
        tail, head = self._sample
        return tail, head


def _sums(table: Table, up: Tensor, down: Tensor) -> tuple[Tensor, Tensor]:
    """Sums of rows and columns, with log-scales of both."""
    # (largest factors are taken out, so that sums in float32 do not overflow)
    high, low = up.max(), down.max()
    left, right = ((up - high).exp(), (down - low).exp())
    sizes = table.sizes.double() if 1 in table.sizes.shape else table.sizes
    rows, columns = sizes @ right.to(sizes.dtype), left.to(sizes.dtype) @ sizes
    return up.exp() * rows.double() * low.exp(), down.exp() * columns.double() * high.exp()


class StreamedPairs(Pairs):
    """Sizes that are read from a checkpoint when they are needed, the large ones as sums."""

    def __init__(
        self,
        graph: Structure,
        p: float,
        checkpoint: Checkpoint,
        tensors: Iterable[_Held],
        kept: np.ndarray,
        tolerance: float | None,
    ) -> None:
        self.graph, self.p, self.places = graph, p, checkpoint.places()
        root = torch.zeros(graph.expand.shape[0], dtype=torch.bool)
        root[1 : graph.num_units + 1] = torch.from_numpy(kept)

        def ends(ids: Tensor) -> Tensor:
            ids = torch.where(root[ids.abs()], 0, ids)
            return ids if bool(ids.any()) else ids.new_zeros([1] * ids.dim())

        self.tensors = [
            _Held(keys, name, (ends(head), ends(tail), unused))
            for keys, name, (head, tail, unused) in tensors
        ]
        self.between = [held for held in self.tensors if _between(*held.numbers[:2])]
        between = sum(math.prod(self._entries(held)[0].shape) for held in self.between)
        types = (entry.itemsize for held in self.tensors for entry in self._entries(held))
        self.coarse = min(types, default=4) < 4
        usual = EXACT if between <= FEW else COARSE if self.coarse else CLOSE
        self.tolerance = tolerance or usual
        self.wide = p > 2 or self.tolerance < CLOSE
        self._lay_out(self._values(self.tensors))

    def _entries(self, held: _Held) -> list[StoredTensor]:
        return [self.places[key].entries[key] for key in held.keys]

    def _values(self, tensors: Iterable[_Held]) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        for held in tensors:
            head, tail, unused = held.numbers
            wide = self.wide or self._entries(held)[0].dtype == torch.float64
            shift = self.graph.shifts.get(held.name, 0.0)
            for place, piece in self.places[held.keys[0]].pieces(held.keys[0]):
                if not piece.numel():
                    continue
                expect_finite("balance_files", held.name, piece)
                value = piece.double() if wide else piece.float()
                value = value + shift if shift else value
                if bool(unused.any()):
                    value = value.masked_fill(_cut(unused, place).expand(value.shape), 0)
                yield value, _cut(head, place), _cut(tail, place)

    def held(self, tables: Iterable[Table]) -> list[Table]:
        """The sums of all tables."""
        self.sums = _Sums(tables)
        return [self.sums]

    def whole(self) -> Iterator[Table]:
        """The tables, read again."""
        return map(self.table, self._values(self.tensors))

    def move(self, phi: np.ndarray) -> None:
        """Measure the sums of all tables at ``phi``."""
        super()._rebase(phi)
        tables = map(self.table, self._values(self.between))
        wide = (table for table in tables if 1 not in table.sizes.shape)
        self.sums.measure(wide, self._logs(phi).mul_(self.p))


def _between(head: Tensor, tail: Tensor) -> bool:
    rows = {d for d, size in enumerate(head.shape) if size > 1}
    columns = {d for d, size in enumerate(tail.shape) if size > 1}
    return bool(rows and columns and not rows & columns)


def balance_files(
    graph: Structure,
    source: Path,
    destination: Path,
    p: float = 2,
    tolerance: float | None = None,
    exact: bool = True,
) -> Balancing:
    """Balance a checkpoint, as :func:`pathspace.balance_` does to a model in memory.

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
            by default 1e-12 for up to 8 million weights between units, else 1e-3, or 0.1 if scales
            are rounded.
        exact: do not move units that are free only at ``eps = 0``, so that the function of the
            unchanged model is preserved; with ``False`` they move too, as under
            :func:`pathspace.balance_`.

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
    ends = {block.name: (block.head, block.tail, idle(block)) for block in graph.blocks}
    tensors = _located(graph, checkpoint, ends, "balance_files")
    kept = np.zeros(graph.num_units, bool)
    kept[graph.approximate - 1] = exact
    pairs = StreamedPairs(graph, p, checkpoint, tensors, kept, tolerance)
    start = np.zeros(graph.num_units)
    before = pairs.sides(start)[2]
    found = attained(pairs, {APPROXIMATE: np.flatnonzero(kept)})
    in_rounds = _in_powers_of_two if pairs.coarse else _in_rounds
    best = in_rounds(pairs, found.free, start)
    phi = torch.from_numpy(best.phi)
    rescale_files(graph, phi, source, destination)
    return Balancing(phi, before, best.value, best.imbalance, found.reasons, best.steps)


def _state(pairs: StreamedPairs, free: np.ndarray, phi: np.ndarray, steps: int) -> Minimum:
    entering, leaving, total = pairs.sides(phi)
    both = entering + leaving
    uneven = np.where(free, entering - leaving, 0.0) / np.where(both > 0, both, 1.0)
    return Minimum(phi, total, float(np.abs(uneven).max(initial=0.0)), steps)


def _in_rounds(pairs: StreamedPairs, free: np.ndarray, phi: np.ndarray) -> Minimum:
    """The minimum, where matrices are read again in each round: that of their sums is nearly it."""
    best = now = _state(pairs, free, phi, 0)
    while now.imbalance > pairs.tolerance:
        if now.steps == ROUNDS:
            raise InputError(
                f"balance_files found norms that still differ by {now.imbalance:.0e} after"
                f" {ROUNDS} rounds, expected {pairs.tolerance:.0e}; pass a larger tolerance."
            )
        if now.value > best.value * (1 + 1e-12):
            phi = (best.phi + now.phi) / 2
        else:
            best, phi = now, _minimum_of_sums(pairs, free, now.phi)
        pairs.move(phi)
        now = _state(pairs, free, phi, now.steps + 1)
    return now


def _minimum_of_sums(pairs: StreamedPairs, free: np.ndarray, start: np.ndarray) -> np.ndarray:
    return minimise(pairs, free, np.zeros(len(free)), pairs.tolerance / 10, start).phi


def _in_powers_of_two(pairs: StreamedPairs, free: np.ndarray, start: np.ndarray) -> Minimum:
    """The minimum, rounded: at once, if the sums there are those that were expected."""

    def rounded(phi: np.ndarray) -> np.ndarray:
        return np.round(phi / LOG_2) * LOG_2

    phi = rounded(_minimum_of_sums(pairs, free, start))
    expected = pairs.sides(phi)[:2]
    pairs.move(phi)
    steps = 1
    if not np.allclose(pairs.sides(phi)[:2], expected, pairs.tolerance, 0):
        best = _in_rounds(pairs, free, phi)
        phi, steps = rounded(best.phi), 1 + best.steps
        pairs.move(phi)
    return _state(pairs, free, phi, steps)
