"""Where a bound is not met: which tensors have scales that no unit explains?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from scipy.sparse import csr_array
from torch import Tensor

from .logscales import Family

# limits: rows that are named; classes, scalars of one tensor, and columns that are examined
NAMED = 8
MOST_CLASSES = 2_000
MOST_SCALARS = 200_000
MOST_COLUMNS = 400


def rank_of(matrix: Tensor) -> int:
    """Numerical rank of a matrix whose entries are of ordinary size."""
    return int(torch.linalg.matrix_rank(matrix, rtol=1e-10)) if matrix.numel() else 0


def unexplained_tensors(
    scales: Family, more: Tensor, used: Tensor, found: csr_array, alive: Sequence[Tensor]
) -> list[dict[str, Any]]:
    """A smallest set of tensors, and their rows, whose null vectors no found unit explains.

    Args:
        scales: the log-scales.
        more: null vectors beside the found units, on the log-scales that
            have an effect, in columns.
        used: which log-scales have an effect.
        found: the found units, sparse ``(R, H)``.
        alive: which scalars have an effect, tensor by tensor.

    Returns:
        Name, size of the movement and rows, the most moved tensor first.
    """
    units = found.shape[1]
    # (where there are too many units to tell what they do of it, every tensor
    # that a null vector moves)
    small = 2 * units + more.shape[1] <= MOST_COLUMNS
    null = more / more.norm(dim=0).clamp_min(1e-300)
    if small:
        felt = torch.from_numpy(found.toarray().astype(np.float64))[used]
        both = torch.cat([felt, felt, null], 1)
    else:
        units, both = 0, null
    position = torch.full((scales.size,), -1)
    position[used] = torch.arange(int(used.sum()))
    # by how much scalars move: what two sides of a tensor exchange moves none
    moved: dict[int, Tensor] = {}
    rows: dict[int, Tensor] = {}
    for number, (entry, mask) in enumerate(zip(scales.entries, alive, strict=True)):
        index = [side.index.expand(entry.shape)[mask] for side in entry.sides]
        draw = torch.Generator().manual_seed(0)
        if len(index[0]) > MOST_SCALARS:
            some = torch.randint(len(index[0]), (MOST_SCALARS,), generator=draw)
            index = [part[some] for part in index]
        if len(index[0]):
            classes = torch.unique(torch.stack(index, 1), dim=0)
            if len(classes) > MOST_CLASSES:
                chosen = torch.randperm(len(classes), generator=draw.manual_seed(0))
                classes = classes[chosen[:MOST_CLASSES]]
            rows[number] = classes[:, 0]
            starts = [side.start for side in entry.sides]
            moved[number] = sum(
                both[position[c + start]] for c, start in zip(classes.T, starts, strict=True)
            )  # type: ignore[assignment]
    silent, free = (
        _elsewhere(moved, units)
        if small
        else (set(), torch.eye(both.shape[1], dtype=torch.float64))
    )
    result = []
    for number, table in moved.items():
        if number in silent:
            continue
        size = (table @ free).norm(dim=1)
        if float(size.max()) > 1e-6:
            strong = torch.unique(rows[number][size > 1e-6 * float(size.max())]).tolist()
            result.append(
                {
                    "tensor": scales.entries[number].name,
                    "size": float(size.max()),
                    "rows": strong[:NAMED],
                }
            )
    return sorted(result, key=lambda entry: -entry["size"])


def _elsewhere(moved: Mapping[int, Tensor], units: int) -> tuple[set[int], Tensor]:
    """Tensors that all left-over scales can leave alone, one after the other; and these
    scales, as combinations.

    Args:
        moved: for each tensor, by how much the found units (first) and the null
            vectors move its scalars.
        units: how many columns are found units.
    """
    width = next(iter(moved.values())).shape[1]
    small = {
        number: torch.linalg.qr(table, mode="r").R if len(table) > width else table
        for number, table in moved.items()
    }

    def missing(tables: Sequence[Tensor]) -> int:
        """How many null vectors more than found units leave these tensors alone."""
        here = torch.cat([nothing, *tables])
        return (rank_of(whole[:, units:]) - rank_of(here[:, units:])) - (
            rank_of(whole[:, :units]) - rank_of(here[:, :units])
        )

    nothing = torch.zeros(0, width, dtype=torch.float64)
    whole = torch.linalg.qr(torch.cat(list(small.values())), mode="r").R
    wanted = missing([])
    silent: set[int] = set()
    for number, table in small.items():
        if missing([*(small[n] for n in silent), table]) == wanted:
            silent.add(number)
    here = torch.cat([nothing, *(small[n] for n in silent)])

    def kernel(columns: slice) -> Tensor:
        """Combinations that move nothing in the tensors that are left alone."""
        part, size = here[:, columns], whole[:, columns].shape[1]
        if not len(part) or not size:
            return torch.eye(size, dtype=torch.float64)
        _, values, vectors = torch.linalg.svd(part, full_matrices=True)
        rank = int((values > 1e-9 * float(values.max().clamp_min(1e-300))).sum())
        result: Tensor = vectors[rank:].T
        return result

    found, every = kernel(slice(0, units)), kernel(slice(units, width))
    known, all_ = whole[:, :units] @ found, whole[:, units:] @ every
    shares = torch.zeros(found.shape[1], every.shape[1], dtype=torch.float64)
    if known.shape[1]:
        basis = torch.linalg.svd(known, full_matrices=False)
        keep = basis.S.div(float(basis.S.max().clamp_min(1e-300))).gt(1e-9)
        inside = basis.U[:, keep]
        # a left-over scale, less what found units do of it
        shares = torch.linalg.lstsq(known, inside @ (inside.T @ all_), driver="gelsd").solution
    return silent, torch.cat([-found @ shares, every])
