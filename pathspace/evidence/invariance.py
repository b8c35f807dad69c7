"""Check that rescaling does not change the function, by measurements on the running model.

* *Rescaling*: the units are scaled by random powers of two up to 4096, which floating point
  arithmetic carries out without rounding, and the outputs are compared.
* *Levels*: units that are exact as the model stands, every ``eps`` included, and units exact at
  ``eps = 0`` only, each rescaled by ``phi ~ N(0, 1)`` and by something larger. At the exact level
  nothing but rounding may change; at the other one reads how much ``eps`` matters to this model.
* *Trials*: zeros in a model (biases, running means) can hide a wrong graph. Therefore all
  parameters and running statistics are redrawn several times, inputs are multiplied by 100 and by
  0.01, and scalars that count as unused are redrawn.
* *Spaces*: a random element of the group of each space of features, for models that have some.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..errors import InputError
from ..models.copies import safe_deepcopy
from ..models.modes import precision
from ..models.running import (
    ForwardRun,
    difference,
    rounding_decides,
    seen,
    switched,
)
from ..rotations.rotate import rotate_
from ..rotations.space import FeatureSpaces
from .bench import (
    LARGEST,
    TOLERANCE,
    Workbench,
    draw_zeros,
    holding,
    largest_power,
    other_inputs,
    powers_for,
    redrawn,
    rounding_tolerance,
    scaled,
)
from .proof import space_lines

# factors of the inputs, one trial each
SIZES = (1.0, 100.0, 0.01)
# standard deviations of log-scales; what is coarser than float64 rounds sums with a
# constant too much for the larger
DEVIATIONS = (1.0, 3.0)
# the power of a scale that a weight meets has at most this standard deviation of its logarithm
WIDEST = 16.0


def measure_invariance(bench: Workbench) -> tuple[dict[str, Any], tuple[int, int]]:
    """Evidence for the certificate, and how many rectifiers switched of how many seen."""
    graph, (before, drawn) = bench.graph, (bench.run(), 0)
    dtype = bench.resolution(before)
    tolerance = rounding_tolerance(graph, dtype, TOLERANCE.get(dtype, 1e-3))
    if not seen(before) and not bench.large:
        # a head that starts at zero hides everything behind it
        drawn = draw_zeros(bench.model, bench.seed)
        before = bench.run()
    silent, undefined = not seen(before), int(before.outputs.isnan().sum())
    constant = not silent and _ignores(bench, before)
    largest = LARGEST.get(dtype, 1) if graph.shifts else 12
    phi = powers_for(graph, dtype, bench.seed)

    def rescaled(before: ForwardRun) -> tuple[float, tuple[int, int]]:
        after = bench.rescaled(phi)
        return difference(before, after), switched(before, after)

    as_it_stands, switches = rescaled(before)
    exact = as_it_stands
    with bench.without_eps() as layers:
        if bench.depends_on_eps(layers):
            exact, switches = rescaled(bench.run())
    words = f"outputs differ by {exact:.1e} after random rescaling by up to {2**largest}"
    further = (
        (
            bench.depends_on_eps(layers),
            f" (with eps = 0 in normalisation layers; {as_it_stands:.1e} as the model stands)",
        ),
        (
            drawn,
            f"; {drawn:,} weights of tensors that are all 0 were drawn at random, as the outputs"
            " are 0",
        ),
        (undefined, f"; {undefined:,} of {len(before.outputs):,} outputs are NaN, and stay so"),
        (
            silent,
            "; no output is a number other than 0, so that nothing could have been seen to change",
        ),
        (constant, "; other inputs give the same outputs: the model ignores its inputs"),
    )
    words += "".join(text for said, text in further if said)
    if not len(before.outputs):
        words = "the model returns no tensor in floating point, which could change"
    evidence = {
        # (a model without outputs in floating point has nothing that could change)
        "holds": exact <= tolerance if len(before.outputs) else None,
        "evidence": f"{words}; tolerance {tolerance:.0e} in {str(dtype).removeprefix('torch.')}",
        "max_relative_violation": exact,
        "tolerance": tolerance,
        "rescaling": exact,
        "rescaling_as_it_stands": as_it_stands,
        "normalisation_layers": layers,
        "weights_drawn": drawn,
        "vacuous": silent or constant,
        "dtype": str(dtype).removeprefix("torch."),
    }
    return evidence, switches


def _ignores(bench: Workbench, before: ForwardRun) -> bool:
    """Whether a model gives the same outputs for other inputs, up to rounding."""
    other = other_inputs((tuple(bench.inputs[0]), dict(bench.inputs[1])), bench.seed)
    after = None if other is None else _run(replace(bench, inputs=other))
    if after is None or after.outputs.shape != before.outputs.shape:
        return False
    return difference(before, after) <= 64 * torch.finfo(precision(bench.model)).eps


def measure_levels(bench: Workbench) -> dict[str, Any]:
    """How much the outputs of a model as it stands change when the units of
    each level are rescaled.

    Returns:
        ``exact`` and ``all``, each ``{"units": H, "dimension": m - H, "changes": [...]}``, where a
        change ``{"deviation": d, "change": c}`` is the largest change of the outputs, relative to
        the largest output, after a rescaling by ``phi ~ N(0, d^2)`` (d is 1 and 3, or less where
        weights meet high powers of scales); ``holds``, whether the exact level changes within
        ``tolerance`` (``None`` where it has no units, no output could be seen to change, or
        rounding decides the outputs).
    """
    graph, before = bench.graph, bench.run()
    dtype = bench.resolution(before, any_factor=True)
    # scales that are not powers of two are rounded to the coarsest type that the model computes in
    coarsest = max(TOLERANCE.get(each, 1e-3) for each in (dtype, *before.types))
    tolerance = rounding_tolerance(graph, dtype, coarsest)
    wanted = DEVIATIONS if dtype == torch.float64 else DEVIATIONS[:1]
    # weights that meet a high power of a scale stay within the floats
    deviations = sorted({min(deviation, WIDEST / largest_power(graph)) for deviation in wanted})
    generator = torch.Generator().manual_seed(bench.seed)
    normal = torch.randn(graph.num_units, generator=generator, dtype=torch.float64)

    def level(direction: Tensor, units: int) -> dict[str, Any]:
        changes = [
            {"deviation": d, "change": difference(before, bench.rescaled(d * direction))}
            for d in (deviations if units else ())
        ]
        return {"units": units, "dimension": graph.num_weights - units, "changes": changes}

    exact = level(graph.exact_part(normal), graph.num_exact_units)
    every = exact if graph.num_exact_units == graph.num_units else level(normal, graph.num_units)
    worst = max((entry["change"] for entry in exact["changes"]), default=0.0)
    holds = worst <= tolerance if exact["changes"] and seen(before) else None
    rounded = (bench.model, *bench.inputs, bench.seed, before, tolerance)
    if holds is False and not bench.large and rounding_decides(*rounded):
        holds = None
    return {
        "exact": exact,
        "all": every,
        "holds": holds,
        "tolerance": tolerance,
    }


def levels_in_words(levels: Mapping[str, Any]) -> str:
    """Both levels with their measured changes, in one sentence."""

    def told(level: Mapping[str, Any], units: str) -> str:
        changes = (
            f"{entry['change']:.1e} (phi ~ N(0, {entry['deviation'] ** 2:g}))"
            for entry in level["changes"]
        )
        return f"by {', '.join(changes)} when {level['units']:,} {units} are rescaled"

    exact, every = levels["exact"], levels["all"]
    words = "in the unchanged model, eps included: "
    if not every["units"]:
        return words + "there are no units to rescale"
    if not every["changes"]:
        return "nothing was measured, as tensors have no values"
    parts = [told(exact, "exact units")] if exact["units"] else []
    if exact["units"] < every["units"]:
        parts.append(told(every, "units, exact at eps = 0 only,"))
    return f"{words}outputs change {', '.join(parts)}"


def trials(bench: Workbench) -> dict[str, Any]:
    """Rescale redrawn models at inputs of several magnitudes, and redraw
    scalars that count as unused.

    Returns:
        ``rescaling`` and ``unused``, the largest relative changes of the outputs (``None`` without
        such a trial), and ``tried``, the number of trials whose outputs are finite and not all 0.
    """
    result: dict[str, Any] = {"tried": 0, "rescaling": None, "unused": None, "sizes": list(SIZES)}
    if bench.large:
        return result
    args, kwargs = bench.inputs
    with bench.without_eps():
        for number, size in enumerate(SIZES):
            here = replace(bench, inputs=(scaled(args, size), scaled(dict(kwargs), size)))
            for gentle in (False, True):
                with holding(bench.model, redrawn(bench.model, bench.seed + number, gentle)):
                    before = _run(here)
                    fine = before is not None and bool(before.outputs.isfinite().any())
                    if before is not None and fine:
                        _try(here, before, number, result)
                if fine:
                    break
    return result


def trials_in_words(found: Mapping[str, Any]) -> str:
    """The result of :func:`trials` as the end of a sentence."""
    if found["rescaling"] is None and found["unused"] is None:
        return ""
    words = (
        f"; with all weights redrawn, in {found['tried']} trials at inputs of several sizes, by "
    )
    words += f"{found['rescaling']:.1e}" if found["rescaling"] is not None else "nothing (no units)"
    return words + (
        f", by {found['unused']:.1e} when unused scalars change"
        if found["unused"] is not None
        else ""
    )


def measure_spaces(bench: Workbench, found: FeatureSpaces) -> dict[str, Any]:
    """How much a random element of the group of each space changes the outputs of a copy.

    It acts on the model as it stands and, unless that is too large, on one with all weights
    redrawn: gains of 1, biases of 0 and small weights hide what a change of basis forgets.

    Returns:
        :func:`pathspace.evidence.proof.space_lines`, each free space with ``change``, the largest
        one relative to the largest output (``None`` if nothing was measured); ``holds``, whether
        all are within ``tolerance``, and ``evidence``.
    """
    lines, whole = space_lines(found), bench.run()
    types = (bench.resolution(whole, any_factor=True), *whole.types)
    dtype = max(types, key=lambda each: TOLERANCE.get(each, 1e-3))
    tolerance = TOLERANCE.get(dtype, 1e-3)
    changes: dict[str, float] = {}
    points = [{}] if bench.large else [{}, redrawn(bench.model, bench.seed, unit=True)]
    for numbers in points:
        with holding(bench.model, numbers):
            before = _run(bench)
            if before is None or not seen(before):
                continue
            for space in found.free:
                gap = _rotated(bench, found, space.name, before, tolerance)
                if gap is not None:
                    changes[space.name] = max(gap, changes.get(space.name, 0.0))
    for line in lines["free"]:
        line["change"] = changes.get(line["name"])
    worst = max(changes, key=changes.__getitem__, default="")
    words = f"no output could be seen to change by the groups of {len(found.free):,} free spaces"
    if changes:
        words = (
            f"outputs change by {changes[worst]:.1e} at most ({worst}) when random elements of the"
            f" groups of {len(changes):,} of {len(found.free):,} free spaces act"
        )
    kind = str(dtype).removeprefix("torch.")
    return {
        "holds": changes[worst] <= tolerance if changes else None,
        "evidence": f"{words}; tolerance {tolerance:.0e} in {kind}",
        "tolerance": tolerance,
        **lines,
    }


def _rotated(
    bench: Workbench, found: FeatureSpaces, name: str, before: ForwardRun, tolerance: float
) -> float | None:
    """The change by a random element; ``None`` where a gain is 0, or rounding decides."""
    try:
        turned = rotate_(safe_deepcopy(bench.model), found, {name: "random"}, bench.seed)
    except InputError:
        return None
    gap = difference(before, replace(bench, model=turned).run())
    if gap <= tolerance or bench.large:
        return gap
    rounded = (bench.model, *bench.inputs, bench.seed, before, tolerance)
    return None if rounding_decides(*rounded) else gap


def _try(bench: Workbench, before: ForwardRun, number: int, result: dict[str, Any]) -> None:
    result["tried"] += bool(seen(before))

    def note(kind: str, after: ForwardRun) -> None:
        gap = difference(before, after)
        result[kind] = gap if result[kind] is None else max(result[kind], gap)

    # (with the same random numbers as before)
    if bench.graph.num_units:
        phi = powers_for(bench.graph, precision(bench.model), bench.seed + number + 1)
        note("rescaling", bench.rescaled(phi))
    unused = _unused(bench, number)
    if unused:
        with holding(bench.model, unused):
            note("unused", bench.run())


def _run(bench: Workbench) -> ForwardRun | None:
    """A run, or ``None`` if the model raises an error on these values."""
    try:
        return bench.run()
    except (RuntimeError, ValueError, IndexError, ArithmeticError, AssertionError):
        return None


def _unused(bench: Workbench, number: int) -> dict[str, Tensor]:
    """Parameters with unused scalars, in which these are redrawn."""
    masks = {block.name: block.unused for block in bench.graph.blocks if block.unused is not None}
    masks |= dict.fromkeys(bench.graph.unused, torch.ones((), dtype=torch.bool))
    held = dict(bench.model.named_parameters(remove_duplicate=False))
    return {
        name: torch.where(masks[name].to(value.device), value, held[name].detach())
        for name, value in redrawn(bench.model, bench.seed + number).items()
        if name in masks
    }
