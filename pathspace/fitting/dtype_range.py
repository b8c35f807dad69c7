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
from .objectives import running_variances, weight_peaks

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
        >>> from torch.nn import Linear, ReLU, Sequential
        >>> model = Sequential(Linear(4, 8), ReLU(), Linear(8, 2))
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
    graph, kind = trace(model, *args, kwargs=kwargs), torch.finfo(dtype)
    most, least = kind.max / headroom, kind.tiny * headroom

    def tried(moved: nn.Module, phi: Tensor, on: Calibrated) -> _Try:
        error, wide = _error(held, moved, dtype)
        sizes = activation_sizes(graph, on, exact=False, left_out=wide)
        fits = _within(sizes, _tensors(moved), most, least) and not error > ROUNDINGS * kind.eps
        return _Try(moved, phi, sizes, fits, error)

    zero = torch.zeros(graph.num_units, dtype=torch.float64)
    before = best = tried(safe_deepcopy(model), zero, held)
    for phi in () if before.fits else _candidates(model, graph, before.sizes, most, least):
        if torch.equal(phi, best.phi):
            continue
        try:
            moved = rescale_(safe_deepcopy(model), graph, phi)
        except InputError:
            # (scales beyond the model's own type)
            continue
        again = Calibrated(moved, held.batches)
        if max(map(distance, again.reference, held.reference)) > MOVED:
            # (a norm whose variance comes near its eps)
            continue
        found = tried(moved, phi, again)
        if found.fits or found.error < best.error / 2:
            best = found
        if found.fits:
            break
    return Fitted(
        model=best.model,
        phi=best.phi,
        dtype=dtype,
        headroom=float(headroom),
        table=_table(graph, before, best),
        fitted_before=before.fits,
        fits=best.fits,
        error_before=before.error,
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
    model: nn.Module, graph: Structure, sizes: Sizes, most: float, least: float
) -> Iterator[Tensor]:
    """Balanced weights, or those of the model, moved into the range; all units, or exact ones."""
    starts = [torch.zeros(graph.num_units, dtype=torch.float64)]
    with suppress(InputError):
        # (weights may have no balance)
        starts.insert(0, graph.exact_part(balancing(model, graph).phi))
    peaks, every = weight_peaks(model, graph, False, "moved"), graph.expand[:, 1:]
    moving, top = sizes.ids != 0, math.log2(most)
    channels, spread, _ = (part.numpy() for part in running_variances(model, graph))
    free = vstack([signed_rows(every, sizes.ids[moving]), 2 * signed_rows(every, channels)])
    high = top - np.concatenate([np.log2(sizes.largest[moving]), spread / LOG_2])
    low = np.full(len(high), -np.inf)
    low[: moving.sum()] = math.log2(least) - np.log2(sizes.rms[moving])
    for start in starts:
        # powers of two that bring all sizes into the range, as far as it goes
        phi = np.round(start.numpy() / LOG_2)
        for _ in range(ROUNDS):
            peaks.grow(torch.from_numpy(phi) * LOG_2)
            head, side, tail = (signed_rows(every, ids.numpy()) for ids in peaks.ids)
            rows = vstack([free, head - side - tail]).tocsr()
            upper = np.floor(np.concatenate([high, top - peaks.values.numpy() / LOG_2]))
            lower = np.concatenate([low, np.full(len(peaks.values), -np.inf)])
            value = rows @ phi
            wrong = value - np.clip(value, np.minimum(np.ceil(lower), upper), upper)
            if not wrong.any():
                break
            share = wrong / np.maximum(np.asarray(abs(rows).sum(1)).reshape(-1), 1)
            pull = csc_array(rows.multiply(share[:, None]))
            # (of several, the strongest each way)
            up, down = (each.toarray().reshape(-1) for each in (pull.min(0), pull.max(0)))
            phi = phi - np.floor(up) - np.ceil(down)
        all_units = torch.from_numpy(phi) * LOG_2
        yield from (all_units, graph.exact_part(all_units))


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    found = (*model.named_parameters(), *model.named_buffers())
    return {name: tensor.detach() for name, tensor in found if tensor.is_floating_point()}


def _within(sizes: Sizes, tensors: dict[str, Tensor], most: float, least: float) -> bool:
    weights = max((float(p.abs().max()) for p in tensors.values() if p.numel()), default=0.0)
    matrices = [p.double() for p in tensors.values() if p.dim() > 1 and bool(p.any())]
    typical = min((float(p.square().mean().sqrt()) for p in matrices), default=math.inf)
    smallest = min(typical, float(sizes.rms[sizes.ids != 0].min(initial=math.inf)))
    return max(float(sizes.largest.max(initial=0.0)), weights) <= most and smallest >= least


def _table(graph: Structure, before: _Try, after: _Try) -> tuple[RangeRow, ...]:
    owners: dict[int, str] = {}
    for name, (_, head) in graph.whole_ends.items():
        owners = dict.fromkeys(head.unique().tolist(), owner(name) or "model") | owners

    def rows_of(one: _Try) -> dict[tuple[str, str], tuple[float, float]]:
        found: dict[tuple[str, str], tuple[float, float]] = {}
        sizes = one.sizes
        columns = (np.abs(sizes.ids), sizes.places, sizes.largest, sizes.rms)
        for unit, place, largest, rms in zip(*(c.tolist() for c in columns), strict=True):
            kind = "activations" if unit else "fixed scales"
            if unit == 0:
                name = place or type(one.model).__name__
            elif unit > graph.num_units:
                name = "products of units"
            else:
                name = owners.get(unit) or graph.activation(unit).partition("[")[0]
            most, least = found.get((name, kind), (0.0, math.inf))
            found[name, kind] = max(most, largest), min(least, rms)
        for name, tensor in _tensors(one.model).items():
            if tensor.numel():
                wide = tensor.double()
                found[name, "weights"] = float(wide.abs().max()), float(wide.square().mean().sqrt())
        return found

    then, rows = rows_of(after), []
    for key, (largest, typical) in rows_of(before).items():
        last = then.get(key, (largest, typical))
        rows.append(RangeRow(*key, largest, last[0], typical, last[1]))
    return tuple(rows)


@torch.no_grad()
def _error(held: Calibrated, model: nn.Module, dtype: torch.dtype) -> tuple[float, frozenset[Key]]:
    """Largest change of the outputs by computing in a type, also in wider operations."""
    small, reference = stand_in(model, share_tensors=False).to(dtype), held.reference
    worst, wide = 0.0, set()
    # (both runs draw the same random numbers)
    with quiet():
        for batch, wanted in zip(held.batches, reference, strict=True):
            args, kwargs = cast(batch, dtype)
            own = _tensors(small).values()
            try:
                with computing_in(dtype), ModuleTracker() as running, Record(own, running) as seen:
                    found = evaluate(small, {}, args, kwargs)
            except Exception:
                return math.nan, frozenset()
            pairs = zip(seen.keys, seen.values, strict=True)
            wide |= {key for key, value in pairs if value.itemsize > dtype.itemsize}
            worst = max(worst, distance(real_leaves(found), wanted))
    return worst, frozenset(wide)
