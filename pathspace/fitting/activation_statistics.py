"""Sizes of the activations of every unit, and of their gradients, measured on calibration batches.

The unit of each activation is measured too: the model is rescaled with a different factor for each
unit, and each activation changes by the factor of its unit. This needs no knowledge of the
operation that computed it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ..gauge.moves import moved
from ..graph.structure import Structure
from ..models.isolation import quiet
from ..models.modes import InDouble, never_recomputed
from ..models.running import cast, computing_in
from .calibration import Calibrated, cotangent
from .largest_entries import Logs

# range of the log-scales that identify units
LOWEST, HIGHEST = 0.5, 2.0
FIXED = 1e-9
# the largest numbers of types, which masks of attention are made of
ENDS = torch.tensor(
    [
        torch.finfo(kind).max
        for kind in (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    ],
    dtype=torch.float64,
)
# operations whose results have no values yet
UNWRITTEN = frozenset(
    ["empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"]
)


@dataclass(frozen=True, eq=False)
class Sizes:
    """Sizes of activations, one entry for each scale that at least one activation has.

    Attributes:
        ids: signed ids; 0 means all activations of a module whose scale is fixed.
        largest: largest absolute value of the activations with this scale.
        rms: root of the mean square of those activations that are not 0.
        gradient: largest absolute derivative of the outputs, summed with random signs, with respect
            to these activations; NaN if gradients were not requested.
        places: path of the module, for activations whose scale is fixed.
    """

    ids: np.ndarray
    largest: np.ndarray
    rms: np.ndarray
    gradient: np.ndarray
    places: np.ndarray


# a result of an operation: the module, the operation, the shape, and which of these in order
Key = tuple[str, str, tuple[int, ...], int]


class Record(TorchDispatchMode):
    """Records the results of operations, except views, copies of the model's own tensors and memory
    that nothing has been written into.

    Args:
        own: the model's own tensors.
        model: its modules are named in the keys.
    """

    supports_higher_order_operators = True

    def __init__(self, own: Iterable[Tensor], model: nn.Module | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.own = {tensor.untyped_storage()._cdata for tensor in own}
        self.values: list[Tensor] = []
        self.live: list[Tensor] = []
        self.keys: list[Key] = []
        self._times: Counter[tuple[str, str, tuple[int, ...]]] = Counter()
        self._inside, self._hooks, self.model = [""], ExitStack(), model

    def __enter__(self) -> Record:
        for name, module in () if self.model is None else self.model.named_modules():
            before = module.register_forward_pre_hook(lambda *_, n=name: self._inside.append(n))
            after = module.register_forward_hook(
                lambda *_: (self._inside.pop(), None)[1], always_call=True
            )
            self._hooks.callback(before.remove)
            self._hooks.callback(after.remove)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)  # type: ignore[no-untyped-call]
        self._hooks.close()

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
                self.live.append(leaf)
                what = (self._inside[-1], name, tuple(leaf.shape))
                self.keys.append((*what, self._times[what]))
                self._times[what] += 1
        return result


def activation_sizes(
    graph: Structure,
    calibrated: Calibrated,
    gradients: bool = False,
    exact: bool = True,
    left_out: frozenset[Key] = frozenset(),
) -> Sizes:
    """Measure the activations of every scale.

    Args:
        graph: the reduction graph.
        calibrated: the model and its batches.
        gradients: measure derivatives as well.
        exact: units that are free only at ``eps = 0`` count as fixed.
        left_out: results that do not count.

    Returns:
        The sizes. Activations whose scale is a product of scales that no weight block has as an end
        count as fixed.
    """
    scales = Logs(graph, exact)
    places = np.random.default_rng(0).permutation(scales.count)
    codes = LOWEST + (HIGHEST - LOWEST) * (places + 0.5) / max(scales.count, 1)
    logs = scales(torch.from_numpy(codes)).numpy()
    phi = torch.from_numpy(scales.basis @ codes)
    names, table = _codes(logs)
    near = (HIGHEST - LOWEST) / max(scales.count, 1) / 8
    model = calibrated.twin
    own = {n: t.detach() for n, t in (*model.named_parameters(), *model.named_buffers())}
    wide = {n: t.double() if t.is_floating_point() else t for n, t in own.items()}
    other = dict(wide)
    for name, (head, tail) in graph.gauge_factors(phi).items():
        other[name] = moved(
            wide[name], head.to(wide[name]), tail.to(wide[name]), graph.shifts.get(name, 0.0)
        )
    modules = {name: len(names) + i for i, (name, _) in enumerate(model.named_modules())}
    found = {
        key: torch.zeros(len(names) + len(modules), dtype=torch.float64)
        for key in ("largest", "square", "count", "gradient")
    }
    for batch in calibrated.batches:
        batch = cast(batch, torch.float64)
        given = {
            n: t.clone().requires_grad_(gradients and n in calibrated.parameters)
            for n, t in wide.items()
        }
        first, second = Record(given.values(), model), Record(other.values())
        # (both runs draw the same random numbers)
        with (
            quiet(),
            computing_in(torch.float64),
            never_recomputed(),
            InDouble(),
            torch.set_grad_enabled(gradients),
            first,
        ):
            outputs = calibrated.outputs(batch, given)
        with quiet(), computing_in(torch.float64), InDouble(), torch.no_grad(), second:
            calibrated.outputs(batch, other)
        slopes = (
            _slopes(outputs, first.live, calibrated.totals)
            if gradients
            else [None] * len(first.values)
        )
        # (strict: both runs perform the same operations)
        for key, a, b, slope in zip(first.keys, first.values, second.values, slopes, strict=True):
            if key not in left_out:
                felt = None if slope is None else slope.cpu()
                _note(a.cpu(), b.cpu(), felt, table, near, modules[key[0]], found)
    ids = np.concatenate([names, np.zeros(len(modules), np.int64)])
    places = np.array([""] * len(names) + list(modules), dtype=object)
    met = np.flatnonzero(found["count"].numpy() > 0)
    count = found["count"][met]
    gradient = found["gradient"][met] if gradients else torch.full((len(met),), torch.nan)
    largest, rms = found["largest"][met], (found["square"][met] / count).sqrt()
    return Sizes(ids[met], largest.numpy(), rms.numpy(), gradient.numpy(), places[met])


def _codes(logs: np.ndarray) -> tuple[np.ndarray, Tensor]:
    """Signed ids and the log-scales that identify them, sorted by log-scale; ids with a
    fixed scale are left out.
    """
    moving = np.flatnonzero(np.abs(logs) > FIXED)
    ids = np.concatenate([[0], moving, -moving])
    code = np.concatenate([[0.0], logs[moving], -logs[moving]])
    # (for equal log-scales, units come before derived ids)
    order = np.lexsort((np.abs(ids), code))
    return ids[order], torch.from_numpy(code[order])


def _slopes(
    outputs: list[Tensor], live: list[Tensor], totals: Sequence[tuple[float, int]]
) -> list[Tensor | None]:
    """Derivatives of the outputs, summed with random signs, with respect to
    the recorded activations.
    """
    generator = torch.Generator().manual_seed(0)
    wanted = [leaf for leaf in live if leaf.requires_grad]
    kept = [(out, total) for out, total in zip(outputs, totals, strict=False) if out.requires_grad]
    if not kept or not wanted:
        return [None] * len(live)
    signs = [cotangent(out.detach(), False, generator, *total) for out, total in kept]
    with quiet():
        found = iter(
            torch.autograd.grad([out for out, _ in kept], wanted, signs, allow_unused=True)
        )
    return [next(found) if leaf.requires_grad else None for leaf in live]


def _note(
    a: Tensor,
    b: Tensor,
    slope: Tensor | None,
    table: Tensor,
    near: float,
    fixed: int,
    found: dict[str, Tensor],
) -> None:
    """Add the entries of an activation ``a`` to the totals of their scales, or to those of
    ``fixed``; ``b`` is it in the rescaled model.
    """
    if a.shape != b.shape:
        return
    a, b = a.reshape(-1), b.reshape(-1)
    # (entries that are not finite, or the ends of a type, come from masks)
    keep = (a != 0) & (b != 0) & a.isfinite() & b.isfinite() & ~torch.isin(a.abs(), ENDS.to(a))
    a, b = a[keep].abs().double(), b[keep].abs().double()
    change = (b / a).log()
    place = (
        torch.searchsorted(table, change).clamp(1, max(len(table) - 1, 1))
        if len(table) > 1
        else change.long() * 0
    )
    if len(table) > 1:
        place -= ((change - table[place - 1]) < (table[place] - change)).long()
    known = ((change - table[place]).abs() < near) & (table[place] != 0)
    place = torch.where(known, place, fixed)
    found["largest"].scatter_reduce_(0, place, a, "amax")
    found["square"].index_add_(0, place, a.square())
    found["count"].index_add_(0, place, torch.ones_like(a))
    if slope is not None:
        steep = slope.reshape(-1)[keep].abs().double()
        found["gradient"].scatter_reduce_(0, place, steep, "amax")
