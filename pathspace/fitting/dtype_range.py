"""A model whose activations and weights are within the range of a smaller floating-point type."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from scipy.sparse import csc_array, vstack
from torch import Tensor, nn
from torch.utils.module_tracker import ModuleTracker

from ..errors import InputError, expect_arguments, expect_numbers
from ..gauge.balance import balancing
from ..gauge.rescale import rescale_
from ..graph.parts import owner, signed_rows
from ..graph.structure import LOG_2, Structure
from ..models.copies import safe_deepcopy
from ..models.isolation import quiet
from ..models.nested import real_leaves
from ..models.running import cast, computing_in, distance, evaluate
from ..models.stand_in import stand_in
from ..reduction import trace
from ..shown import Shown, text_table
from .activation_statistics import Key, Record, Sizes, activation_sizes
from .calibration import Calibrated
from .objectives import every_peak, running_variances

if TYPE_CHECKING:
    from rich.table import Table

# largest change of the outputs in the model's own type (two roundings of float16), and roundings of
# the smaller type that the outputs of a model that fits may differ by
MOVED, ROUNDINGS = 2e-3, 16
ROUNDS = 20


@dataclass(frozen=True)
class RangeRow:
    """Activations of one module, or one tensor of weights, before and after.

    Attributes:
        name: of the module that computes them, or of the parameter.
        kind: ``"activations"``, ``"fixed scales"`` (which no unit moves) or ``"weights"``
            (and running statistics).
        largest_before: largest absolute value as the model stands.
        largest_after: the same in the chosen gauge.
        typical_before: smallest root mean square of a unit of the module, as the model stands.
        typical_after: the same in the chosen gauge.
    """

    name: str
    kind: str
    largest_before: float
    largest_after: float
    typical_before: float
    typical_after: float


@dataclass(frozen=True, eq=False)
class Fitted(Shown):
    """A model rescaled for a floating-point type, with its table of sizes.

    Attributes:
        model: the rescaled copy, still in its own type; convert it with ``fitted.model.to(dtype)``.
        phi: log-scales that lead to it, ``(H,)``.
        dtype: the type.
        headroom: the required factor between the largest values and the limit of the type.
        table: sizes by module and parameter, before and after.
        fitted_before: whether everything was within the range, with its
            headroom, and the error at most 16 roundings of the type, as the model stood.
        fits: whether it is now.
        error_before: largest change of the outputs in that type, over the largest output, as the
            model stood; infinity where it gives no numbers, NaN where the type cannot compute the
            model here.
        error: the same for ``model``.
    """

    model: nn.Module
    phi: Tensor
    dtype: torch.dtype
    headroom: float
    table: tuple[RangeRow, ...]
    fitted_before: bool
    fits: bool
    error_before: float
    error: float

    def __rich__(self) -> Table:
        title = (
            f"{str(self.dtype).removeprefix('torch.')}: fits"
            f" {'yes' if self.fitted_before else 'no'} -> {'yes' if self.fits else 'no'}, change of"
            f" the outputs {self.error_before:.1e} -> {self.error:.1e}"
        )
        rows = []
        for row in self.table:
            sizes = (row.largest_before, row.largest_after, row.typical_before, row.typical_after)
            rows.append((row.name, row.kind, *(f"{size:.2g}" for size in sizes)))
        columns = ("name", "what", "largest", "then", "smallest unit", "then")
        return text_table(title, columns, rows, right=range(2, 6))


def fit_dtype(
    model: nn.Module, x: Any, dtype: torch.dtype = torch.float16, headroom: float = 4
) -> Fitted:
    """Rescale a model so that its activations and weights are within the range
    of a floating-point type.

    The sizes of activations are measured, and weights are balanced. Then every unit is moved by a
    power of two: ``headroom`` times its largest activation shall be below the largest number of
    the type, and its root mean square above ``headroom`` times the smallest normal one. The same
    holds for matrices of weights. Units that are free only at ``eps = 0`` move too, if the outputs
    in the model's own type stay the same. A model that already fits does not change, and neither
    does one that cannot be made to fit and is about as exact as it is. Activations with a fixed
    scale cannot be rescaled; the table shows them. What the model computes in a wider type also
    when it is converted does not count.

    Args:
        model: any module; it is not changed.
        x: typical inputs: a tensor, a tuple of inputs, a mapping of keyword inputs,
            or an iterable of these.
        dtype: the type.
        headroom: factor between the largest values and the limit of the type.

    Raises:
        InputError: no floating point type, or the model does not run on ``x``.

    Example:
        >>> import torch, pathspace as ps
        >>> model = torch.nn.Sequential(
        ...     torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2)
        ... )
        >>> graph, x = ps.trace(model, torch.randn(1, 4)), torch.randn(16, 4)
        >>> scrambled = ps.rescale_(model, graph, torch.linspace(9, 14, 8))
        >>> fitted = ps.fit_dtype(scrambled, x)
        >>> fitted.fitted_before, fitted.fits, fitted.error < 0.01
        (False, True, True)
    """
    expect_arguments("fit_dtype", model=model)
    expect_numbers("fit_dtype", "a number of at least 1", headroom=headroom)
    if not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise InputError(
            f"dtype is {dtype!r}, expected a floating point type such as torch.float16."
        )
    held = Calibrated(model, x)
    args, kwargs = held.batches[0]
    graph = trace(model, *args, kwargs=kwargs)
    most = ROUNDINGS * torch.finfo(dtype).eps
    error, wide = _error(held, model, dtype)
    before = activation_sizes(graph, held, exact=False, left_out=wide)
    tensors, zero = _tensors(model), torch.zeros(graph.num_units, dtype=torch.float64)
    started = _within(before, tensors, dtype, headroom) and not error > most
    best = _Try(safe_deepcopy(model), zero, before, started, error)
    for phi in () if started else _candidates(model, graph, before, dtype, headroom):
        if torch.equal(phi, best.phi):
            continue
        try:
            moved = rescale_(safe_deepcopy(model), graph, phi)
        except InputError:
            # (scales beyond the model's own type)
            continue
        again = Calibrated(moved, [kwargs or args for args, kwargs in held.batches])
        with quiet(), torch.no_grad():
            drift = max(distance(again.outputs(b, {}), held.outputs(b, {})) for b in held.batches)
        if drift > MOVED:
            # (a norm whose variance comes near its eps)
            continue
        found = _error(held, moved, dtype)[0]
        sizes = activation_sizes(graph, again, exact=False, left_out=wide)
        fit = _within(sizes, _tensors(moved), dtype, headroom) and not found > most
        if fit or found < best.error / 2:
            best = _Try(moved, phi, sizes, fit, found)
        if fit:
            break
    return Fitted(
        model=best.model,
        phi=best.phi,
        dtype=dtype,
        headroom=float(headroom),
        table=_table(model, graph, before, best.sizes, tensors, _tensors(best.model)),
        fitted_before=started,
        fits=best.fits,
        error_before=error,
        error=best.error,
    )


class _Try(NamedTuple):
    """A gauge, and what the model is in it."""

    model: nn.Module
    phi: Tensor
    sizes: Sizes
    fits: bool
    error: float


def _candidates(
    model: nn.Module, graph: Structure, sizes: Sizes, dtype: torch.dtype, headroom: float
) -> Iterator[Tensor]:
    """Balanced weights, or those of the model, moved into the range; all units, or exact ones."""
    starts = [torch.zeros(graph.num_units, dtype=torch.float64)]
    with suppress(InputError):
        # (weights may have no balance)
        starts.insert(0, graph.exact_part(balancing(model, graph).phi))
    for start in starts:
        phi = _moved_in(model, graph, sizes, dtype, headroom, start.numpy() / LOG_2)
        every = torch.from_numpy(phi) * LOG_2
        yield from (every, graph.exact_part(every))


def _moved_in(
    model: nn.Module,
    graph: Structure,
    sizes: Sizes,
    dtype: torch.dtype,
    headroom: float,
    start: np.ndarray,
) -> np.ndarray:
    """Powers of two near ``start`` that bring all sizes into the range, as far as it goes."""
    kind, every = torch.finfo(dtype), graph.expand[:, 1:]
    most, least = math.log2(kind.max / headroom), math.log2(kind.tiny * headroom)
    moving, peaks = sizes.ids != 0, every_peak(model, graph, exact=False)
    own, high = [signed_rows(every, sizes.ids[moving])], [most - np.log2(sizes.largest[moving])]
    low = [least - np.log2(sizes.rms[moving])]
    for _, units, logs in running_variances(model, graph):
        own.append(2 * signed_rows(every, units.numpy()))
        high.append(most - logs.numpy() / LOG_2)
        low.append(np.full(len(logs), -np.inf))
    phi = np.round(start)
    for _ in range(ROUNDS):
        peaks.grow(torch.from_numpy(phi) * LOG_2)
        head, side, tail = (signed_rows(every, ids.numpy()) for ids in peaks.ids)
        rows = vstack([*own, head - side - tail]).tocsr()
        upper = np.floor(np.concatenate([*high, most - peaks.values.numpy() / LOG_2]))
        lower = np.concatenate([*low, np.full(len(peaks.values), -np.inf)])
        value = rows @ phi
        wrong = value - np.clip(value, np.minimum(np.ceil(lower), upper), upper)
        if not wrong.any():
            break
        share = wrong / np.maximum(np.asarray(abs(rows).sum(1)).reshape(-1), 1)
        pull = csc_array(rows.multiply(share[:, None]))
        # (of several, the strongest each way)
        up, down = (each.toarray().reshape(-1) for each in (pull.min(0), pull.max(0)))
        phi = phi - np.floor(up) - np.ceil(down)
    return phi


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    found = (*model.named_parameters(), *model.named_buffers())
    return {name: tensor.detach() for name, tensor in found if tensor.is_floating_point()}


def _within(sizes: Sizes, tensors: dict[str, Tensor], dtype: torch.dtype, headroom: float) -> bool:
    kind = torch.finfo(dtype)
    weights = max((float(p.abs().max()) for p in tensors.values() if p.numel()), default=0.0)
    matrices = [p.double() for p in tensors.values() if p.dim() > 1 and bool(p.any())]
    typical = min((float(p.square().mean().sqrt()) for p in matrices), default=math.inf)
    smallest = min(typical, float(sizes.rms[sizes.ids != 0].min(initial=math.inf)))
    high = max(float(sizes.largest.max(initial=0.0)), weights) * headroom <= kind.max
    return high and smallest >= headroom * kind.tiny


def _table(
    model: nn.Module,
    graph: Structure,
    before: Sizes,
    after: Sizes,
    old: dict[str, Tensor],
    new: dict[str, Tensor],
) -> tuple[RangeRow, ...]:
    owners: dict[int, str] = {}
    for name, (_, head) in graph.whole_ends.items():
        owners = dict.fromkeys(head.unique().tolist(), owner(name) or "model") | owners

    def groups(sizes: Sizes) -> dict[tuple[str, str], tuple[float, float]]:
        found: dict[tuple[str, str], list[int]] = {}
        for place, identity in enumerate(np.abs(sizes.ids).tolist()):
            if identity == 0:
                key = (sizes.places[place] or type(model).__name__, "fixed scales")
            elif identity > graph.num_units:
                key = ("products of units", "activations")
            else:
                name = owners.get(identity) or graph.activation(identity).partition("[")[0]
                key = (name, "activations")
            found.setdefault(key, []).append(place)
        return {
            key: (float(sizes.largest[places].max()), float(sizes.rms[places].min()))
            for key, places in found.items()
        }

    first, last = groups(before), groups(after)
    for name, tensor in old.items():
        if tensor.numel():
            for found, each in ((first, tensor.double()), (last, new[name].double())):
                size = float(each.abs().max()), float(each.square().mean().sqrt())
                found[name, "weights"] = size
    rows = []
    for key, (largest, typical) in first.items():
        then = last.get(key, (largest, typical))
        rows.append(RangeRow(*key, largest, then[0], typical, then[1]))
    return tuple(rows)


@torch.no_grad()
def _error(held: Calibrated, model: nn.Module, dtype: torch.dtype) -> tuple[float, frozenset[Key]]:
    """Largest change of the outputs by computing in a type, also in wider operations."""
    small = stand_in(model, share_tensors=False).to(dtype)
    worst, wide = 0.0, set()
    for batch in held.batches:
        # (both runs draw the same random numbers)
        with quiet():
            wanted = held.outputs(batch, {})
        args, kwargs = cast(batch, dtype)
        try:
            with (
                quiet(),
                computing_in(dtype),
                ModuleTracker() as running,
                Record(_tensors(small).values(), running) as record,
            ):
                found = evaluate(small, {}, args, kwargs)
        except Exception:
            return math.nan, frozenset()
        size = dtype.itemsize
        wide |= {k for k, v in zip(record.keys, record.values, strict=True) if v.itemsize > size}
        worst = max(worst, distance(real_leaves(found), wanted))
    return worst, frozenset(wide)
