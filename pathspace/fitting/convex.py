"""Convex functions of log-scales with largest entries in them: minimised, with a
lower bound on the minimum.
"""

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
        self.basis = (
            csr_array(graph.exact.astype(np.float64))
            if exact
            else eye_array(graph.num_units, format="csr")
        )
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
    """One tensor: logarithms of its entries, and weights of their squares."""

    layout: MatrixLayout
    logs: Tensor
    start: int
    weights: Tensor | None = None

    def moved(self, logs: Tensor) -> Tensor:
        """Logarithms of the entries at log-scales of all ids."""
        up, down = self.layout.ends(logs)
        return self.logs + up[:, None] - down[None, :]

    def tops(self, top: Tensor) -> Tensor:
        """The value of the group of each entry, in a shape that broadcasts to the entries."""
        layout = self.layout
        if layout.groups is None:
            return top[self.start]
        own = top[self.start + layout.groups]
        return own[:, None] if layout.by_row else own[None, :]


class Peaks:
    """The largest entry of every group: smooth of a few entries, or exact of all."""

    def __init__(self, scales: Logs) -> None:
        self.scales, self.count = scales, 0
        self.known: list[set[int]] = []
        # log value, head, side, tail, group
        self.values = torch.zeros(0, dtype=torch.float64)
        self.ids = torch.zeros((3, 0), dtype=torch.int64)
        self.group = torch.zeros(0, dtype=torch.int64)
        self.entries: list[LogTensor] = []

    def add(
        self,
        layout: MatrixLayout,
        sizes: Tensor,
        weights: Tensor | None = None,
        shared: bool = False,
    ) -> None:
        """Add a tensor; those that share groups have them numbered by the ids of the graph."""
        self.entries.append(LogTensor(layout, sizes.log(), 0 if shared else self.count, weights))
        self.known.append(set())
        self.count = self.scales.ids if shared else self.count + layout.count

    def grow(self, phi: Tensor) -> bool:
        """Select the largest entries of all rows and columns; whether any is new."""
        logs, new = self.scales(phi), False
        for entry, known in zip(self.entries, self.known, strict=True):
            now = entry.moved(logs)
            width = now.shape[1]
            most = (
                now.argmax(1) + torch.arange(len(now)) * width,
                now.argmax(0) * width + torch.arange(width),
            )
            flat = torch.cat(most).unique()
            flat = flat[now.reshape(-1)[flat] > -torch.inf]
            flat = torch.tensor(sorted(set(flat.tolist()) - known), dtype=torch.int64)
            known.update(flat.tolist())
            if len(flat):
                new = True
                row, column = flat // width, flat % width
                layout = entry.layout
                self.values = torch.cat([self.values, entry.logs.reshape(-1)[flat]])
                own = torch.stack([layout.head[row], layout.side[row], layout.tail[column]])
                self.ids = torch.cat([self.ids, own], 1)
                self.group = torch.cat([self.group, layout.group_of(row, column) + entry.start])
        return new

    def few(self, logs: Tensor) -> Tensor:
        """Logarithms of the entries selected so far."""
        head, side, tail = self.ids
        return self.values + at(logs, head) - at(logs, side) - at(logs, tail)

    def exact(self, phi: Tensor) -> Tensor:
        """Logarithm of the largest entry of every group, ``-inf`` for groups without entries."""
        logs, found = self.scales(phi), torch.full((self.count,), -torch.inf, dtype=torch.float64)
        for entry in self.entries:
            now, layout = entry.moved(logs), entry.layout
            if layout.groups is None:
                found[entry.start] = now.max()
            else:
                best = now.amax(1 if layout.by_row else 0)
                found.scatter_reduce_(0, layout.groups + entry.start, best, "amax")
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
            if layout.groups is None:
                total = terms.sum().reshape(1)
            else:
                total = terms.new_zeros(layout.count).index_add(0, layout.groups, terms)
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
        point = torch.from_numpy(phi)
        return float(self.total(self.peaks.exact(point), self.peaks.scales(point)))

    def smooth(self, phi: np.ndarray, sharpness: float) -> tuple[float, np.ndarray, float]:
        """A smooth value, its gradient, and by how much the tangent there may lie too high.

        A largest entry is at least any mean of the entries, which is affine in the log-scales.
        """
        with torch.enable_grad():
            point = torch.from_numpy(phi).requires_grad_()
            logs = self.peaks.scales(point)
            top, above = grouped(
                self.peaks.few(logs), self.peaks.group, self.peaks.count, sharpness
            )
            value = self.total(top, logs)
            # (nothing may depend on the log-scales, or on the largest entries)
            slope, share = torch.autograd.grad(value, [point, top], allow_unused=True)
        gradient = torch.zeros_like(point) if slope is None else slope
        return (
            float(value.detach()),
            gradient.numpy(),
            0.0 if share is None else float((share * above).sum()),
        )


def minimise_convex(
    programme: Programme,
    limit: float,
    tolerance: float,
    steps: int | None = None,
    floor: np.ndarray | None = None,
) -> tuple[np.ndarray, float, float, float, int]:
    """The minimum over ``|phi| <= limit``, by smooth problems of growing sharpness: the log-scales,
    the value before and there, a lower bound of it, and the evaluations.
    """
    phi = np.zeros(programme.peaks.scales.count)
    before = programme.value(phi)
    if not len(phi):
        return phi, before, before, before, 0
    best, bound, spent = (before, phi), -np.inf, 0
    least = np.full(len(phi), -limit) if floor is None else np.maximum(floor, -limit)
    most = MOST if programme.peaks.count else 10 * MOST
    entries = sum(entry.logs.numel() for entry in programme.peaks.entries)
    seen = len(phi) + programme.passes * entries
    each = max(FEWEST, min(steps or most, WORK // seen))
    for sharpness in SHARPNESS if programme.peaks.count else SHARPNESS[:1]:
        for again in range(ROUNDS):
            if not programme.peaks.grow(torch.from_numpy(phi)) and again:
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
