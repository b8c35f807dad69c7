"""A model whose activations and weights are within the range of a smaller floating-point type."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from ..errors import InputError, expect_arguments, expect_numbers
from ..gauge.balance import balancing
from ..gauge.rescale import rescale
from ..models.copies import safe_deepcopy
from ..models.isolation import quiet
from ..models.nested import real_leaves
from ..models.running import cast, computing_in
from ..models.stand_in import repeatable, stand_in
from ..reduction import ReductionGraph
from ..tracing import trace
from .activation_statistics import Sizes, activation_sizes
from .calibration import Calibrated
from .choice import choose_gauge
from .equalisation import Known
from .objectives import ActivationRange

if TYPE_CHECKING:
    from rich.table import Table

# the largest factor of a unit: activations may lie far outside of the type
FARTHEST = 2.0**64


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
class Fitted:
    """A model rescaled for a floating-point type, with its table of sizes.

    Attributes:
        model: the rescaled copy, still in its own type; convert it with ``fitted.model.to(dtype)``.
        phi: log-scales that lead to it, ``(H,)``.
        dtype: the type.
        headroom: the required factor between the largest values and the limit of the type.
        table: sizes by module and parameter, before and after.
        fitted_before: whether everything was within the range, with its
            headroom, as the model stood.
        fits: whether it is now.
        error_before: largest change of the outputs in that type, over the largest output, as the
            model stood; NaN where it gives no numbers, or the type cannot compute the model here.
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
        from rich import box
        from rich.markup import escape
        from rich.table import Table

        title = (
            f"{str(self.dtype).removeprefix('torch.')}: fits"
            f" {'yes' if self.fitted_before else 'no'} -> {'yes' if self.fits else 'no'}, change of"
            f" the outputs {self.error_before:.1e} -> {self.error:.1e}"
        )
        table = Table(box=box.SIMPLE, title=title, title_justify="left")
        for column in ("name", "what"):
            table.add_column(column, overflow="fold")
        for column in ("largest", "then", "smallest unit", "then"):
            table.add_column(column, justify="right")
        for row in self.table:
            figures = (row.largest_before, row.largest_after, row.typical_before, row.typical_after)
            table.add_row(escape(row.name), row.kind, *(f"{figure:.2g}" for figure in figures))
        return table


def fit_dtype(
    model: nn.Module, x: Any, dtype: torch.dtype = torch.float16, headroom: float = 4
) -> Fitted:
    """Rescale a model so that its activations and weights are within the range
    of a floating-point type.

    Every unit is moved to where ``headroom`` times its largest activation is below the largest
    number of the type and its root mean square above ``headroom`` times the smallest normal one
    (:class:`pathspace.ActivationRange`), matrices of weights as well; where that is not enough, to
    the balanced gauge. A model that already fits does not change, and neither does one that cannot
    be made to fit and is more exact as it is. Activations with a fixed scale cannot be rescaled;
    the table shows them.

    Args:
        model: any module; it is not changed.
        x: typical inputs: a tensor, a tuple of inputs, a mapping of keyword inputs,
            or an iterable of these.
        dtype: the type.
        headroom: factor between the largest values and the limit of the type.

    Returns:
        The rescaled copy in its own type, and a table.

    Raises:
        InputError: no floating point type, or the model does not run on ``x``.

    Example:
        >>> import torch, pathspace as ps
        >>> model = torch.nn.Sequential(
        ...     torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2)
        ... )
        >>> graph, x = ps.trace(model, torch.randn(1, 4)), torch.randn(16, 4)
        >>> scrambled = ps.rescale(model, graph, torch.linspace(9, 14, 8))
        >>> fitted = ps.fit_dtype(scrambled, x)
        >>> fitted.fitted_before, fitted.fits, fitted.error < 0.01
        (False, True, True)
    """
    expect_arguments("fit_dtype", model=model)
    expect_numbers("fit_dtype", "a number of at least 1", headroom=headroom)
    held = Calibrated(model, x)
    args, kwargs = held.batches[0]
    objective = ActivationRange(dtype, float(headroom))
    graph = trace(model, *args, kwargs=kwargs)
    before = activation_sizes(graph, held)
    known = Known(objective.programme_of(model, graph, before), str(objective))
    tensors, zero = _tensors(model), torch.zeros(graph.num_units, dtype=torch.float64)
    started = _within(before, tensors, objective)
    # (the model as it is, which a unit that is nothing but rounding errors may leave best)
    tries = [_Try(safe_deepcopy(model), zero, before, started, _error(held, model, dtype))]
    choices: list[Callable[[], Tensor]] = [
        lambda: choose_gauge(model, graph, known, limit=FARTHEST).phi,
        lambda: balancing(model, graph).phi,
    ]
    for choose in [] if started else choices:
        try:
            phi = choose()
            moved = rescale(safe_deepcopy(model), graph, phi)
        except InputError:
            # (weights without a balance, or scales beyond the model's own type)
            continue
        sizes = _measured(before, graph, phi, moved, held)
        fit = _within(sizes, _tensors(moved), objective)
        tries.append(_Try(moved, phi, sizes, fit, _error(held, moved, dtype)))
        if fit:
            break
    # (of two that are alike, the last)
    result, phi, after, fits, error = min(reversed(tries), key=_Try.rank)
    own = _tensors(result)
    return Fitted(
        model=result,
        phi=phi,
        dtype=dtype,
        headroom=float(headroom),
        table=_table(graph, before, after, tensors, own),
        fitted_before=started,
        fits=fits,
        error_before=tries[0].error,
        error=error,
    )


class _Try(NamedTuple):
    """A gauge, and what the model is in it."""

    model: nn.Module
    phi: Tensor
    sizes: Sizes
    fits: bool
    error: float

    def rank(self) -> tuple[bool, float]:
        """A gauge that fits comes first, then the smallest error."""
        return not self.fits, math.inf if math.isnan(self.error) else self.error


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers that the type is to hold."""
    found = (*model.named_parameters(), *model.named_buffers())
    return {name: tensor.detach() for name, tensor in found if tensor.is_floating_point()}


def _measured(
    before: Sizes, graph: ReductionGraph, phi: Tensor, result: nn.Module, held: Calibrated
) -> Sizes:
    """Sizes in the new gauge: known for the units, measured for activations without a scale of
    their own, some of which are products of scales.
    """
    sizes = _moved(before, graph, phi)
    batches = [kwargs or args for args, kwargs in held.batches]
    again = activation_sizes(graph, Calibrated(result, batches))
    for old, new in zip((sizes.largest, sizes.rms), (again.largest, again.rms), strict=True):
        old[sizes.ids == 0] = new[again.ids == 0]
    return sizes


def _moved(sizes: Sizes, graph: ReductionGraph, phi: Tensor) -> Sizes:
    """Sizes in another gauge."""
    logs = graph.expand @ np.concatenate([np.zeros(1), phi.numpy()])
    factor = np.exp(logs[np.abs(sizes.ids)] * np.sign(sizes.ids))
    return Sizes(sizes.ids, sizes.largest * factor, sizes.rms * factor, sizes.gradient / factor)


def _within(sizes: Sizes, tensors: dict[str, Tensor], objective: ActivationRange) -> bool:
    kind, margin = torch.finfo(objective.dtype), objective.headroom
    weights = max((float(p.abs().max()) for p in tensors.values() if p.numel()), default=0.0)
    matrices = [p.double() for p in tensors.values() if p.dim() > 1 and bool(p.any())]
    typical = min((float(p.square().mean().sqrt()) for p in matrices), default=math.inf)
    moving = sizes.ids != 0
    high = max(float(sizes.largest.max(initial=0.0)), weights) * margin <= kind.max
    low = typical >= margin * kind.tiny
    return high and low and bool((sizes.rms[moving] >= margin * kind.tiny).all())


def _table(
    graph: ReductionGraph,
    before: Sizes,
    after: Sizes,
    old: dict[str, Tensor],
    new: dict[str, Tensor],
) -> tuple[RangeRow, ...]:
    groups: dict[tuple[str, str], list[int]] = {}
    for place, identity in enumerate(np.abs(before.ids).tolist()):
        if identity == 0:
            key = ("", "fixed scales")
        elif identity > graph.num_units:
            key = ("products of units", "activations")
        else:
            key = (graph.activation(identity).rpartition("[")[0], "activations")
        groups.setdefault(key, []).append(place)
    rows = [
        RangeRow(
            *key,
            *(float(sizes.largest[places].max()) for sizes in (before, after)),
            *(float(sizes.rms[places].min()) for sizes in (before, after)),
        )
        for key, places in groups.items()
    ]
    for name, tensor in old.items():
        if tensor.numel():
            both = [each.double().abs() for each in (tensor, new[name])]
            figures = [
                *(float(each.max()) for each in both),
                *(float(each.square().mean().sqrt()) for each in both),
            ]
            rows.append(RangeRow(name, "weights", *figures))
    return tuple(rows)


@torch.no_grad()
def _error(held: Calibrated, model: nn.Module, dtype: torch.dtype) -> float:
    """Largest change of the outputs by computing in a type."""
    small = repeatable(stand_in(model, share_tensors=False).to(dtype))
    worst = 0.0
    for batch in held.batches:
        # (both runs draw the same random numbers)
        with quiet():
            wanted = held.outputs(batch, {})
        args, kwargs = cast(batch, dtype)
        try:
            with quiet(), computing_in(dtype):
                found = small(*args, **kwargs)
        except Exception:
            return math.nan
        for old, new in zip(wanted, real_leaves(found), strict=True):
            # (what a mask made infinite stays so)
            keep = old.isfinite()
            if not bool(keep.any()):
                continue
            one, other = old[keep].double(), new[keep].double()
            change = (other - one).abs().max() / one.abs().max().clamp_min(1e-300)
            if not bool(change.isfinite()):
                return math.nan
            worst = max(worst, float(change))
    return worst
