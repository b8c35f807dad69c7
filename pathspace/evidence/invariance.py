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
from ..models.running import ForwardRun, difference, seen, switched
from ..rotations.rotate import rotate_
from ..rotations.space import FeatureSpaces
from .bench import LARGEST, Workbench, draw_zeros, holding, other_inputs, redrawn, scaled
from .proof import space_lines

# factors of the inputs, one trial each
SIZES = (1.0, 100.0, 0.01)
# standard deviations of log-scales; what is coarser than float64 rounds sums with a
# constant too much for the larger
DEVIATIONS = (1.0, 3.0)
# the power of a scale that a weight meets has at most this standard deviation of its logarithm
WIDEST = 16.0


def measure_invariance(
    bench: Workbench,
) -> tuple[dict[str, Any], dict[str, Any], tuple[int, int]]:
    """Evidence for the certificate, :func:`measure_levels`, and how many rectifiers switched of how
    many seen.
    """
    before, drawn = bench.run(), 0
    dtype, tolerance = bench.resolution(before)
    if not seen(before) and not bench.large:
        # a head that starts at zero hides everything behind it
        drawn = draw_zeros(bench.model, bench.seed)
        before = bench.run()
    silent, undefined = not seen(before), int(before.outputs.isnan().sum())
    constant = not silent and _ignores(bench, before)
    phi = bench.powers(dtype, bench.seed)

    def rescaled(before: ForwardRun) -> tuple[float, tuple[int, int]]:
        after = bench.rescaled(phi)
        return difference(before, after), switched(before, after)

    as_it_stands, switches = rescaled(before)
    exact = as_it_stands
    with bench.without_eps() as layers:
        eps_matters = bench.depends_on_eps(layers)
        if eps_matters:
            exact, switches = rescaled(bench.run())
    largest = LARGEST.get(dtype, 1) if bench.graph.shifts else 12
    words = f"outputs differ by {exact:.1e} after random rescaling by up to {2**largest}"
    further = (
        (eps_matters, f" (with eps = 0 in normalisations; {as_it_stands:.1e} as the model stands)"),
        (drawn, f"; {drawn:,} weights of tensors that are all 0 were drawn, as the outputs are 0"),
        (undefined, f"; {undefined:,} of {len(before.outputs):,} outputs are NaN, and stay so"),
        (silent, "; no output is a number other than 0: nothing could have been seen to change"),
        (constant, "; other inputs give the same outputs: the model ignores its inputs"),
    )
    words += "".join(text for said, text in further if said)
    if not len(before.outputs):
        words = "the model returns no tensor in floating point, which could change"
    levels, tried, kind = measure_levels(bench), trials(bench), str(dtype).removeprefix("torch.")
    words += f"; tolerance {tolerance:.0e} in {kind}"
    worst, holds = max(exact, tried["rescaling"] or 0.0, tried["unused"] or 0.0), None
    if len(before.outputs):
        words += f"; {levels_in_words(levels)}{trials_in_words(tried)}"
        holds = worst <= tolerance and levels["holds"] is not False
    evidence = {
        "holds": holds,
        "evidence": words,
        "max_relative_violation": worst,
        "tolerance": tolerance,
        "rescaling": exact,
        "rescaling_as_it_stands": as_it_stands,
        "normalisation_layers": layers,
        "weights_drawn": drawn,
        "vacuous": silent or constant,
        "dtype": kind,
        "trials": tried,
    }
    return evidence, levels, switches


def _ignores(bench: Workbench, before: ForwardRun) -> bool:
    """Whether a model gives the same outputs for other inputs, up to rounding."""
    other = other_inputs((tuple(bench.inputs[0]), dict(bench.inputs[1])), bench.seed)
    after = None if other is None else _run(replace(bench, inputs=other))
    if after is None or after.outputs.shape != before.outputs.shape:
        return False
    return difference(before, after) <= 64 * torch.finfo(precision(bench.model)).eps


def measure_levels(bench: Workbench) -> dict[str, Any]:
    """How much the outputs of a model as it stands change when units of each level are rescaled.

    ``exact`` and ``all`` are ``{"units": H, "dimension": m - H, "changes": [...]}``, where a change
    ``{"deviation": d, "change": c}`` is the largest one, relative to the largest output, after a
    rescaling by ``phi ~ N(0, d^2)`` (d is 1 and 3, or less where weights meet high powers of
    scales). ``holds`` says whether the exact level changes within ``tolerance`` (``None`` where it
    has no units, no output could be seen to change, or rounding decides the outputs).
    """
    graph, before = bench.graph, bench.run()
    dtype, tolerance = bench.resolution(before, any_factor=True)
    wanted = DEVIATIONS if dtype == torch.float64 else DEVIATIONS[:1]
    # weights that meet a high power of a scale stay within the floats
    deviations = sorted({min(deviation, WIDEST / bench.largest_power) for deviation in wanted})
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
    if holds is False and bench.rounding_decides(before, tolerance):
        holds = None
    return {"exact": exact, "all": every, "holds": holds, "tolerance": tolerance}


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
    """Rescale redrawn models at inputs of several magnitudes, and redraw scalars that count as
    unused: the largest relative changes of the outputs (``None`` without such a trial), and how
    many trials were ``tried`` whose outputs are finite and not all 0.
    """
    gaps: dict[str, list[float]] = {"rescaling": [], "unused": []}
    tried, (args, kwargs) = 0, bench.inputs
    with bench.without_eps():
        for number, size in enumerate(() if bench.large else SIZES):
            seed = bench.seed + number
            here = replace(bench, inputs=(scaled(args, size), scaled(dict(kwargs), size)))
            for gentle in (False, True):
                with holding(bench.model, redrawn(bench.model, seed, gentle)):
                    before = _run(here)
                    if before is None or not bool(before.outputs.isfinite().any()):
                        continue
                    tried += seen(before)
                    if bench.graph.num_units:
                        phi = bench.powers(precision(bench.model), seed + 1)
                        gaps["rescaling"].append(difference(before, here.rescaled(phi)))
                    if unused := _unused(here, seed):
                        with holding(bench.model, unused):
                            gaps["unused"].append(difference(before, here.run()))
                    break
    worst = {kind: max(found, default=None) for kind, found in gaps.items()}
    return {"tried": tried, **worst, "sizes": list(SIZES)}


def trials_in_words(found: Mapping[str, Any]) -> str:
    """The result of :func:`trials` as the end of a sentence."""
    scales, unused = found["rescaling"], found["unused"]
    if scales is None and unused is None:
        return ""
    parts = ["nothing (no units)" if scales is None else f"{scales:.1e}"]
    parts += [] if unused is None else [f"by {unused:.1e} when unused scalars change"]
    return (
        f"; with all weights redrawn, in {found['tried']} trials at inputs of several sizes, by"
        f" {', '.join(parts)}"
    )


def measure_spaces(bench: Workbench, found: FeatureSpaces) -> dict[str, Any]:
    """How much a random element of the group of each space changes the outputs of a copy, relative
    to the largest output (``None`` if nothing was measured), beside the lines of all spaces.

    It acts on the model as it stands and, unless that is too large, on one with all weights
    redrawn: gains of 1, biases of 0 and small weights hide what a change of basis forgets.
    """
    lines, whole = space_lines(found), bench.run()
    dtype, tolerance = bench.resolution(whole, any_factor=True)
    changes: dict[str, float] = {}
    points = [{}] if bench.large else [{}, redrawn(bench.model, bench.seed, unit=True)]
    for numbers in points:
        with holding(bench.model, numbers):
            before = _run(bench)
            if before is None or not seen(before):
                continue
            for space in found.free:
                way = {space.name: "random"}
                try:
                    turned = rotate_(safe_deepcopy(bench.model), found, way, bench.seed)
                except InputError:
                    # (a gain is 0)
                    continue
                gap = difference(before, replace(bench, model=turned).run())
                if gap <= tolerance or not bench.rounding_decides(before, tolerance):
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


def _run(bench: Workbench) -> ForwardRun | None:
    """A run, or ``None`` if the model raises an error on these values."""
    try:
        return bench.run()
    except (RuntimeError, ValueError, IndexError, ArithmeticError, AssertionError):
        return None


def _unused(bench: Workbench, seed: int) -> dict[str, Tensor]:
    """Parameters with unused scalars, in which these are redrawn."""
    masks = {block.name: block.unused for block in bench.graph.blocks if block.unused is not None}
    masks |= dict.fromkeys(bench.graph.unused, torch.ones((), dtype=torch.bool))
    held = dict(bench.model.named_parameters(remove_duplicate=False))
    return {
        name: torch.where(masks[name].to(value.device), value, held[name].detach())
        for name, value in redrawn(bench.model, seed).items()
        if name in masks
    }
