"""Sizes of the activations of every unit, measured on calibration batches.

The unit of each activation is measured too: the model is rescaled with a different factor for each
unit, and each activation changes by the factor of its unit. This needs no knowledge of the
operation that computed it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.module_tracker import ModuleTracker

from ..gauge.moves import moved
from ..graph.structure import Structure
from ..models.isolation import quiet
from ..models.modes import InDouble
from ..models.running import cast, computing_in
from .calibration import Calibrated
from .convex import Logs

# range of the log-scales that identify units
LOWEST, HIGHEST = 0.5, 2.0
FIXED = 1e-9
# the largest numbers of types, which masks of attention are made of
TYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
ENDS = torch.tensor([torch.finfo(kind).max for kind in TYPES], dtype=torch.float64)
# operations whose results have no values yet
UNWRITTEN = frozenset(
    "empty empty_like empty_permuted empty_strided new_empty new_empty_strided".split()
)


@dataclass(frozen=True, eq=False)
class Sizes:
    """Sizes of activations for each signed id; for fixed scales (id 0), with their modules."""

    ids: np.ndarray
    largest: np.ndarray
    rms: np.ndarray
    places: np.ndarray


# a result of an operation: the module, the operation, the shape, and which of these in order
Key = tuple[str, str, tuple[int, ...], int]


class Record(TorchDispatchMode):
    """Records results, except views and copies of the model's own tensors."""

    supports_higher_order_operators = True

    def __init__(self, own: Iterable[Tensor], running: ModuleTracker) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.own = {tensor.untyped_storage()._cdata for tensor in own}
        self.values: list[Tensor] = []
        self.keys: list[Key] = []
        self._times: Counter[tuple[str, str, tuple[int, ...]]] = Counter()
        self._running = running

    def _module(self) -> str:
        """The innermost module that runs (the tracker's names begin with the model's class)."""
        return max(self._running.parents - {"Global"}, key=len, default="").partition(".")[2]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in UNWRITTEN:
            return result
        if name == "clone" and args[0].untyped_storage()._cdata in self.own:
            return result
        known = {leaf.untyped_storage()._cdata for leaf in args if isinstance(leaf, Tensor)}
        for leaf in result if isinstance(result, tuple | list) else (result,):
            if not (isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.numel()):
                continue
            if name.endswith("_") or leaf.untyped_storage()._cdata not in known:
                self.values.append(leaf.detach().clone())
                what = (self._module(), name, tuple(leaf.shape))
                self.keys.append((*what, self._times[what]))
                self._times[what] += 1
        return result


@torch.no_grad()
def activation_sizes(
    graph: Structure,
    calibrated: Calibrated,
    exact: bool = True,
    left_out: frozenset[Key] = frozenset(),
) -> Sizes:
    """The activations of every scale; products of scales at no weight count as fixed."""
    scales = Logs(graph, exact)
    places = np.random.default_rng(0).permutation(scales.count)
    codes = LOWEST + (HIGHEST - LOWEST) * (places + 0.5) / max(scales.count, 1)
    names, table = _codes(scales(torch.from_numpy(codes)).numpy())
    near = (HIGHEST - LOWEST) / max(scales.count, 1) / 8
    model = calibrated.twin
    own = dict((*model.named_parameters(), *model.named_buffers()))
    wide = {n: (t.double() if t.is_floating_point() else t).detach() for n, t in own.items()}
    other = dict(wide)
    for name, ends in graph.gauge_factors(torch.from_numpy(scales.basis @ codes)).items():
        other[name] = moved(wide[name], *ends, graph.shifts.get(name, 0.0))
    modules = {name: len(names) + i for i, (name, _) in enumerate(model.named_modules())}
    largest, square, count = torch.zeros(3, len(names) + len(modules), dtype=torch.float64)
    for batch in calibrated.batches:
        batch, runs = cast(batch, torch.float64), []
        # (both runs draw the same random numbers, and perform the same operations)
        for given in (wide, other):
            with quiet(), computing_in(torch.float64), InDouble(), ModuleTracker() as running:
                runs.append(Record(given.values(), running))
                with runs[-1]:
                    calibrated.outputs(batch, given)
        for key, a, b in zip(runs[0].keys, runs[0].values, runs[1].values, strict=True):
            if key not in left_out and a.shape == b.shape:
                fixed = modules.get(key[0], modules[""])
                sizes, place = _places(a.cpu(), b.cpu(), table, near, fixed)
                largest.scatter_reduce_(0, place, sizes, "amax")
                square.index_add_(0, place, sizes.square())
                count.index_add_(0, place, torch.ones_like(sizes))
    ids = np.concatenate([names, np.zeros(len(modules), np.int64)])
    inside = np.array([""] * len(names) + list(modules), dtype=object)
    met = np.flatnonzero(count.numpy() > 0)
    rms = (square[met] / count[met]).sqrt()
    return Sizes(ids[met], largest[met].numpy(), rms.numpy(), inside[met])


def _codes(logs: np.ndarray) -> tuple[np.ndarray, Tensor]:
    """Signed ids that have a scale, and their log-scales, sorted by these."""
    moving = np.flatnonzero(np.abs(logs) > FIXED)
    ids, code = (np.concatenate([each, -each]) for each in (moving, logs[moving]))
    # (for equal log-scales, units come before derived ids)
    order = np.lexsort((np.abs(ids), code))
    return ids[order], torch.from_numpy(code[order])


def _places(a: Tensor, b: Tensor, table: Tensor, near: float, fixed: int) -> tuple[Tensor, Tensor]:
    """Sizes of entries of ``a``, and the place of their log-scales, which ``b / a`` tells."""
    a, b = a.reshape(-1), b.reshape(-1)
    # (entries that are not finite, or the ends of a type, come from masks)
    keep = (a != 0) & (b != 0) & a.isfinite() & b.isfinite() & ~torch.isin(a.abs(), ENDS.to(a))
    a, b = a[keep].abs().double(), b[keep].abs().double()
    if not len(table):
        return a, torch.full(a.shape, fixed)
    change = (b / a).log()
    place = torch.bucketize(change, (table[1:] + table[:-1]) / 2)
    return a, torch.where((change - table[place]).abs() < near, place, fixed)
