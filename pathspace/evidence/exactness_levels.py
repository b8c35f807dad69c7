"""Two levels of exactness, measured: units that are exact as the model stands, and units
exact at ``eps = 0`` only.

Each level is put to the test on the model as it stands, every ``eps`` included: its units
are rescaled by ``phi ~ N(0, 1)`` and by something larger, and the outputs are compared.
At the exact level nothing but rounding may change; at the other one reads how much
``eps`` matters to this model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..models.running import LARGE, difference, rounding_decides, run_forward, seen
from ..reduction import ReductionGraph
from .bench import resolution
from .invariance import TOLERANCE, largest_power, rounding_tolerance, run_rescaled

# standard deviations of log-scales; what is coarser than float64 rounds sums with a
# constant too much for the larger
DEVIATIONS = (1.0, 3.0)
# the power of a scale that a weight meets has at most this standard deviation of its logarithm
WIDEST = 16.0


def measure_levels(
    graph: ReductionGraph,
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    seed: int = 0,
) -> dict[str, Any]:
    """How much the outputs of a model as it stands change when the units of
    each level are rescaled.

    Args:
        graph: the model's reduction graph.
        model: the model, which is left exactly as it was.
        args: inputs.
        kwargs: inputs by keyword.
        seed: seed of the random rescalings.

    Returns:
        ``exact`` and ``all``, each ``{"units": H, "dimension": m - H, "changes": [...]}``, where a
        change ``{"deviation": d, "change": c}`` is the largest change of the outputs, relative to
        the largest output, after a rescaling by ``phi ~ N(0, d^2)`` (d is 1 and 3, or less where
        weights meet high powers of scales); ``holds``, whether the exact level changes within
        ``tolerance`` (``None`` where it has no units, no output could be seen to change, or
        rounding decides the outputs).

    Example:
        >>> import torch, pathspace as ps
        >>> model = torch.nn.Sequential(
        ...     torch.nn.Linear(2, 3), torch.nn.LayerNorm(3), torch.nn.Linear(3, 1)
        ... ).double()
        >>> x = torch.randn(4, 2).double()
        >>> levels = measure_levels(ps.trace(model, x), model, (x,), {})
        >>> levels["exact"]["units"], levels["all"]["units"], levels["holds"]
        (3, 4, True)
    """
    before = run_forward(model, args, kwargs, seed=seed)
    dtype = resolution(graph, model, before, any_factor=True)
    # scales that are not powers of two are rounded to the coarsest type that the model computes in
    coarsest = max(TOLERANCE.get(each, 1e-3) for each in (dtype, *before.types))
    tolerance = rounding_tolerance(graph, dtype, coarsest)
    wanted = DEVIATIONS if dtype == torch.float64 else DEVIATIONS[:1]
    # weights that meet a high power of a scale stay within the floats
    deviations = sorted({min(deviation, WIDEST / largest_power(graph)) for deviation in wanted})
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(graph.num_units, generator=generator, dtype=torch.float64)

    def change(phi: Tensor) -> float:
        return difference(before, run_rescaled(model, graph, (args, kwargs), phi, seed))

    def level(direction: Tensor, units: int) -> dict[str, Any]:
        changes = (
            [{"deviation": d, "change": change(d * direction)} for d in deviations] if units else []
        )
        return {"units": units, "dimension": graph.num_weights - units, "changes": changes}

    exact = level(graph.exact_part(normal), graph.num_exact_units)
    every = exact if graph.num_exact_units == graph.num_units else level(normal, graph.num_units)
    worst = max((entry["change"] for entry in exact["changes"]), default=0.0)
    holds = worst <= tolerance if exact["changes"] and seen(before) else None
    if (
        holds is False
        and graph.num_weights <= LARGE
        and rounding_decides(model, args, kwargs, seed, before, tolerance)
    ):
        holds = None
    return {
        "exact": exact,
        "all": every,
        "holds": holds,
        "tolerance": tolerance,
    }


def levels_in_words(levels: Mapping[str, Any]) -> str:
    """Both levels with their measured changes, in one sentence.

    Example:
        >>> one = {"units": 3, "dimension": 8, "changes": [{"deviation": 1.0, "change": 2e-16}]}
        >>> print(levels_in_words({"exact": one, "all": one, "holds": True, "tolerance": 1e-8}))
        in the unchanged model, eps included: outputs change by 2.0e-16 (phi ~ N(0, 1)) when its 3 units are rescaled
    """  # noqa: E501

    def changes(level: Mapping[str, Any]) -> str:
        return ", ".join(
            f"{entry['change']:.1e} (phi ~ N(0, {entry['deviation'] ** 2:g}))"
            for entry in level["changes"]
        )

    exact, every = levels["exact"], levels["all"]
    words = "in the unchanged model, eps included: "
    if not every["units"]:
        return words + "there are no units to rescale"
    if not every["changes"]:
        return "nothing was measured, as tensors have no values"
    if exact["units"] == every["units"]:
        return (
            f"{words}outputs change by {changes(every)} when its {every['units']:,} units are"
            " rescaled"
        )
    if exact["units"]:
        words += (
            f"outputs change by {changes(exact)} when its {exact['units']:,} exact units are"
            " rescaled, "
        )
    return (
        f"{words}by {changes(every)} when all {every['units']:,} units are rescaled (exact only at"
        " eps = 0)"
    )
