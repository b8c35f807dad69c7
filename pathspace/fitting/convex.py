"""Convex functions of log-scales and of largest entries: minimised, with a lower bound."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from scipy.optimize import minimize
from scipy.sparse import coo_array, csr_array, eye_array
from torch import Tensor

from ..gauge.pairs import MatrixLayout, at
from ..graph.structure import Structure

SHARPNESS = (8.0, 64.0, 512.0, 4096.0)
ROUNDS = 2
# steps for each problem: as many as look at so many entries together, within bounds
WORK, FEWEST, MOST = 300_000_000, 4, 600

Total = Callable[[Tensor, Tensor], Tensor]


class Logs:
    """Log-scales of all ids as linear functions of exact directions, or of all units."""

    def __init__(self, graph: Structure, exact: bool = True) -> None:
        every = csr_array(graph.expand[:, 1:].astype(np.float64))
        own = graph.exact.astype(np.float64) if exact else eye_array(graph.num_units)
        self.basis = csr_array(own)
        table = coo_array(every @ self.basis)
        places = torch.from_numpy(np.stack(table.coords).astype(np.int64))
        self.table = torch.sparse_coo_tensor(
            places, torch.from_numpy(table.data), table.shape, check_invariants=False
        ).coalesce()
        self.ids, self.count = int(table.shape[0]), int(self.basis.shape[1])

    def __call__(self, variables: Tensor) -> Tensor:
        """Log-scales of all ids."""
        result: Tensor = torch.sparse.mm(self.table, variables[:, None])[:, 0]
        return result


@dataclass(eq=False)
class LogTensor:
    """One tensor: logarithms of its entries, weights of their squares, the number of its first
    group, and the places of the entries that are selected.
    """

    layout: MatrixLayout
    logs: Tensor
    start: int
    weights: Tensor | None
    known: Tensor

    def moved(self, logs: Tensor) -> Tensor:
        """Logarithms of the entries at log-scales of all ids."""
        up, down = self.layout.ends(logs)
        return self.logs + up[:, None] - down[None, :]

    @property
    def groups(self) -> Tensor:
        """The group of each row, or of each column."""
        own = self.layout.groups
        return self.start + (torch.zeros_like(self.layout.head) if own is None else own)


class Peaks:
    """The largest entry of every group: smooth of a few entries, or exact of all."""

    def __init__(self, scales: Logs) -> None:
        self.scales, self.count = scales, 0
        self.entries: list[LogTensor] = []
        # of the selected entries: log value, group, and head, side, tail
        self.values = torch.zeros(0, dtype=torch.float64)
        self.group = torch.zeros(0, dtype=torch.int64)
        self.ids = torch.zeros((3, 0), dtype=torch.int64)

    def add(
        self,
        layout: MatrixLayout,
        sizes: Tensor,
        weights: Tensor | None = None,
        shared: bool = False,
    ) -> None:
        """Add a tensor; those that share groups have them numbered by the ids of the graph."""
        start = 0 if shared else self.count
        self.entries.append(LogTensor(layout, sizes.log(), start, weights, self.group[:0]))
        self.count = self.scales.ids if shared else self.count + layout.count

    def grow(self, phi: Tensor) -> bool:
        """Select the largest entries of all rows and columns; whether any is new."""
        logs, before = self.scales(phi), len(self.values)
        for entry in self.entries:
            now, layout = entry.moved(logs), entry.layout
            height, width = now.shape
            of_rows = now.argmax(1) + torch.arange(height) * width
            of_columns = now.argmax(0) * width + torch.arange(width)
            flat = torch.cat([of_rows, of_columns]).unique()
            flat = flat[(now.reshape(-1)[flat] > -torch.inf) & ~torch.isin(flat, entry.known)]
            entry.known = torch.cat([entry.known, flat])
            row, column = flat // width, flat % width
            own = torch.stack([layout.head[row], layout.side[row], layout.tail[column]])
            self.values = torch.cat([self.values, entry.logs.reshape(-1)[flat]])
            self.group = torch.cat([self.group, layout.group_of(row, column) + entry.start])
            self.ids = torch.cat([self.ids, own], 1)
        return len(self.values) > before

    def few(self, logs: Tensor) -> Tensor:
        """Logarithms of the entries selected so far."""
        head, side, tail = self.ids
        return self.values + at(logs, head) - at(logs, side) - at(logs, tail)

    def exact(self, logs: Tensor) -> Tensor:
        """Logarithm of the largest entry of every group, ``-inf`` for groups without entries."""
        found = torch.full((self.count,), -torch.inf, dtype=torch.float64)
        for entry in self.entries:
            best = entry.moved(logs).amax(1 if entry.layout.by_row else 0)
            found.scatter_reduce_(0, entry.groups, best, "amax")
        return found

    def sums(self, logs: Tensor, power: float) -> Tensor:
        """Logarithms of the sums of ``weight * exp(power * change)`` over every group."""
        parts = []
        for entry in self.entries:
            assert entry.weights is not None
            up, down = entry.layout.ends(logs)
            high, low = (power * up).max().detach(), (-power * down).max().detach()
            left, right = (power * up - high).exp(), (-power * down - low).exp()
            layout = entry.layout
            terms = (
                left * (entry.weights @ right) if layout.by_row else right * (left @ entry.weights)
            )
            own = entry.groups - entry.start
            total = terms.new_zeros(layout.count).index_add(0, own, terms)
            parts.append(total.clamp_min(1e-300).log() + high + low)
        return torch.cat([logs.new_zeros(0), *parts])


def grouped(values: Tensor, group: Tensor, count: int, sharpness: float) -> tuple[Tensor, Tensor]:
    """``log sum exp(s a) / s`` of every group, and its distance to the mean by these weights."""
    scaled = sharpness * values
    top = torch.full((count,), -torch.inf, dtype=values.dtype).scatter_reduce(
        0, group, scaled.detach(), "amax"
    )
    # (groups with zeros only)
    top = torch.where(top.isfinite(), top, 0)
    shares = (scaled - top[group]).exp()
    total = values.new_zeros(count).index_add(0, group, shares).clamp_min(1e-300)
    smooth = (total.log() + top) / sharpness
    mean = values.new_zeros(count).index_add(0, group, (shares / total[group] * values).detach())
    return smooth, smooth.detach() - mean


@dataclass(eq=False)
class Programme:
    """``total(peaks(phi), logs(phi))``, convex in both arguments and growing in the first.

    An evaluation of ``total`` costs as much as so many ``passes`` over all entries.
    """

    peaks: Peaks
    total: Total
    passes: int = 1

    def value(self, phi: np.ndarray) -> float:
        """The value with the true largest entries."""
        logs = self.peaks.scales(torch.from_numpy(phi))
        return float(self.total(self.peaks.exact(logs), logs))

    def smooth(self, phi: np.ndarray, sharpness: float) -> tuple[float, np.ndarray, float]:
        """A smooth value, its gradient, and by how much the tangent there may lie too high.

        A largest entry is at least any mean of the entries, which is affine in the log-scales.
        """
        with torch.enable_grad():
            point = torch.from_numpy(phi).requires_grad_()
            peaks, logs = self.peaks, self.peaks.scales(point)
            top, above = grouped(peaks.few(logs), peaks.group, peaks.count, sharpness)
            value = self.total(top, logs)
            # (nothing may depend on the log-scales, or on the largest entries)
            slope, share = torch.autograd.grad(
                value, [point, top], allow_unused=True, materialize_grads=True
            )
        return float(value.detach()), slope.numpy(), float((share * above).sum())


def minimise_convex(
    programme: Programme, limit: float, floor: np.ndarray, tolerance: float, steps: int | None
) -> tuple[np.ndarray, float, float, float, int]:
    """The minimum over ``|phi| <= limit`` and above the floor, by smooth problems of growing
    sharpness: the log-scales, the value before and there, a lower bound of it, the evaluations.
    """
    phi = np.zeros(programme.peaks.scales.count)
    before = programme.value(phi)
    if not len(phi):
        return phi, before, before, before, 0
    peaks, least = programme.peaks, np.maximum(floor, -limit)
    best, bound, spent = (before, phi), -np.inf, 0
    seen = len(phi) + programme.passes * sum(entry.logs.numel() for entry in peaks.entries)
    each = max(FEWEST, min(steps or (MOST if peaks.count else 10 * MOST), WORK // seen))
    for sharpness in SHARPNESS if peaks.count else SHARPNESS[:1]:
        for again in range(ROUNDS):
            if not peaks.grow(torch.from_numpy(phi)) and again:
                break
            found = minimize(
                lambda at: programme.smooth(at, sharpness)[:2],  # noqa: B023
                phi,
                jac=True,
                method="L-BFGS-B",
                bounds=[(low, limit) for low in least.tolist()],
                options={"maxiter": each, "maxcor": 10, "ftol": 1e-14, "gtol": 1e-9},
            )
            phi, spent = found.x, spent + int(found.nfev)
            value, gradient, high = programme.smooth(phi, sharpness)
            lowest = np.minimum(gradient * (limit - phi), gradient * (least - phi)).sum()
            bound = max(bound, value - high + float(lowest))
            best = min(best, (programme.value(phi), phi), key=lambda pair: pair[0])
        if best[0] - bound <= tolerance:
            break
    return best[1], before, best[0], min(bound, best[0]), spent
