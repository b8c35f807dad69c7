"""Rows selected by data: embeddings indexed by tokens, experts chosen by routers.

Every position of an index may select any row, so the interpretation treats the selected rows as a
*virtual* weight: a table of shape ``(rows, ...)`` gathered at ``n`` positions is a parameter of
shape ``(n, ...)``. A rescaling of the table is a symmetry if it is one for every selection. All
equations are linear, so there are two conditions:

* it is a symmetry if every position selects row 0 (the *base*), and
* the difference between a row and row 0 is a symmetry at each position alone, with all else
  fixed (the *differences*).

The differences form the same space for every row, so each unit in it exists once per row: for
example, one scale per token before a normalisation, or the hidden units of each expert.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from .relations import Relations, Solution
from .scales import Scales
from .union_find import class_index, lookup
from .values import NEUTRAL, ROOT, broadcast_shape, distinct

Ends = tuple[Tensor, Tensor]
# table -> differences of one row at its tails, and at its heads
Cells = Mapping[str, list[Tensor]]
# a number above those of all positions
MANY = 2**62


def _looked_up(solution: Solution, ids: Tensor) -> Tensor:
    return lookup(torch.from_numpy(solution.classes), ids)


def _row(ids: Tensor) -> Tensor:
    place = (ids == NEUTRAL).to(torch.uint8).argmin(0, keepdim=True)
    return ids.gather(0, place)


def _differences(
    scales: Scales, virtual: Mapping[str, Ends], fixed: Sequence[Tensor]
) -> tuple[Solution, np.ndarray]:
    """Scales of single positions, everything else fixed; and which a normalisation removes."""
    system = scales.equations.copy()
    for ids in fixed:
        present = system.present(ids)
        system.unify(present, torch.zeros_like(present))
    solution = system.resolve()
    # the first and the last position at which a scale is met, where each index has its own
    low, high = np.full(solution.units + 1, MANY), np.full(solution.units + 1, -1)
    start, starts = 0, dict[int, int]()
    for name, ends in virtual.items():
        rows = scales.shapes[name][0]
        first = starts.setdefault(scales.gathers[name], start)
        start = max(start, first + rows)
        for ids in ends:
            number = _looked_up(solution, ids).abs().numpy()
            # (with one scale for all positions: at more than one of them)
            places = first + np.arange(rows) if len(number) == rows else np.array([0, MANY])
            places = places.reshape(-1, *[1] * (number.ndim - 1))
            met, where = (entry.reshape(-1) for entry in np.broadcast_arrays(number, places))
            plain = met <= solution.units
            # (scales in sums of several are fixed, which is sound)
            low[solution.sums[np.unique(met[~plain])].indices] = -1
            np.minimum.at(low, met[plain], where[plain])
            np.maximum.at(high, met[plain], where[plain])
    solution = solution.fixed(1 + np.flatnonzero(low[1:] < np.maximum(high, 0)[1:]))
    normed = np.zeros(solution.units + 1, bool)
    for ids in (*scales.cuts, *scales.approximate):
        normed |= solution.units_in(_looked_up(solution, distinct(ids)).numpy())
    return solution, normed


def _template(
    scales: Scales, virtual: Mapping[str, Ends], fixed: Sequence[Tensor]
) -> tuple[Cells, np.ndarray]:
    """Differences of one row, and which of them a normalisation removes."""
    solution, taken = _differences(scales, virtual, fixed)
    system = Relations()
    units = torch.cat([torch.zeros(1, dtype=torch.long), system.fresh((solution.units,))])
    uses: dict[str, list[Ends]] = {}
    for name, ends in virtual.items():
        uses.setdefault(scales.virtual[name], []).append(ends)
    cells: dict[str, list[Tensor]] = {}
    every = [(table, side) for table in uses for side in zip(*uses[table], strict=True)]
    for table, sides in every:
        cell = system.fresh((1, *broadcast_shape(*(ids.shape[1:] for ids in sides))))
        cells.setdefault(table, []).append(cell)
        for ids in sides:
            number = _looked_up(solution, ids)
            wanted = units[number.abs()] * number.sign()
            # cells that are on no path impose nothing
            wanted = torch.where(ids == NEUTRAL, NEUTRAL, wanted)
            system.unify(cell, wanted)
            unasked = (ids == NEUTRAL).all(0, keepdim=True).expand(cell.shape)
            system.unify(torch.where(unasked, cell, ROOT), torch.zeros_like(cell))
    differences = system.resolve()
    numbers = {table: [_looked_up(differences, ids) for ids in own] for table, own in cells.items()}
    return numbers, differences.units_in(differences.classes[units.numpy()[taken]])


def fold(scales: Scales, raw: Mapping[str, Ends]) -> dict[str, list[Ends]]:
    """Replace virtual weights by their tables: the ends of each, once for every index."""
    virtual = {name: raw[name] for name in scales.gathers if name in raw}
    if not virtual:
        return {}
    fixed = [ids for name, ends in raw.items() if name not in virtual for ids in ends]
    fixed += [entry[2] for entry in scales.running()]
    cells, normed = _template(scales, virtual, fixed)
    base = {name: (_row(ends[0]), _row(ends[1])) for name, ends in virtual.items()}
    for name, ends in virtual.items():
        for ids, row in zip(ends, base[name], strict=True):
            scales.equations.unify(ids, row.expand(ids.shape))
    _anchor(scales, cells, base)
    known = torch.from_numpy(scales.equations.solve())
    every = _fresh(scales, cells, normed)
    result: dict[str, list[Ends]] = {}
    for name in virtual:
        table = scales.virtual[name]
        numbers, fresh = every[table]
        tails, heads = (torch.searchsorted(numbers, ids.abs()) * ids.sign() for ids in cells[table])
        tail, head = base[name]
        first = heads.reshape(-1)[0]
        if (
            first
            and not tails.any()
            and bool((heads == first).all())
            and not bool(known[class_index(tail)].any())
        ):
            # one difference for a whole row: put it at the tail, which needs no id per scalar
            tail = -(fresh[first.abs()] * first.sign()).reshape(-1, *[1] * (tail.dim() - 1))
        else:
            tail, head = (
                _with_rows(scales, known, tail, tails, fresh),
                _with_rows(scales, known, head, heads, fresh),
            )
        result.setdefault(table, []).append((tail, head))
    return result


def _anchor(scales: Scales, cells: Cells, base: Mapping[str, Ends]) -> None:
    """Make the base unique, which is row 0 up to differences: fix one cell for each."""
    anchored = np.zeros(1, np.int64)
    for name, own in base.items():
        for ids, row in zip(cells[scales.virtual[name]], own, strict=True):
            wide = row.expand(ids.shape).reshape(-1)
            number = torch.where(wide == NEUTRAL, 0, ids.abs().reshape(-1))
            values, places = np.unique(number.numpy(), return_index=True)
            first = wide[torch.from_numpy(places[~np.isin(values, anchored)])]
            anchored = np.union1d(anchored, values)
            scales.equations.unify(first, torch.zeros_like(first))


def _fresh(scales: Scales, cells: Cells, normed: np.ndarray) -> dict[str, tuple[Tensor, Tensor]]:
    """Table -> its differences, and the ids of each, one for every row."""
    found: dict[str, tuple[Tensor, Tensor]] = {}
    zero = torch.zeros(1, dtype=torch.long)
    for table, sides in cells.items():
        rows = scales.shapes[table][0]
        numbers = torch.cat([zero, *(ids.reshape(-1).abs() for ids in sides)]).unique()
        ids = scales.equations.fresh((len(numbers) - 1, rows))
        ids = torch.cat([zero.expand(1, rows), ids])
        for others, known in found.values():
            # (an index selects the same rows of all its tables)
            _, own, other = np.intersect1d(numbers.numpy(), others.numpy(), return_indices=True)
            few = min(rows, known.shape[1])
            scales.equations.unify(ids[own, :few], known[other, :few])
        scales.approximate.append(ids[torch.from_numpy(normed)[numbers] & (numbers > 0)])
        found[table] = numbers, ids
    return found


def _with_rows(scales: Scales, known: Tensor, base: Tensor, side: Tensor, fresh: Tensor) -> Tensor:
    if not side.any():
        return base
    differs = (fresh[side[0].abs()] * side[0].sign().unsqueeze(-1)).movedim(-1, 0)
    wide = base.expand(1, *side.shape[1:])
    result = torch.where((side != 0) & (wide != NEUTRAL), differs, wide)
    if bool(((side != 0) & (wide != NEUTRAL) & (known[class_index(wide)] != 0)).any()):
        # (all rows share scales that would be sums)
        scales.equations.unify(differs, torch.zeros_like(differs))
        return base
    return result
