"""``regularisers``: does the penal connection do more for a residual network
than what people use already?
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from .convolutions import FASHION, clothes, digits
from .experiment import Setting, experiment
from .paired_comparison import PairedComparison, draw_paired_comparison, hold
from .recipes import table_cells
from .recipes.compare import show
from .record import Record
from .trial import Trial
from .tuning import Arm, best_rate, measure

RATES = (0.03, 0.1, 0.3)
PENAL, NOTHING = "penal connection", "nothing"
# what -> three strengths, each with all rates; without any, three other sets of rates, so
# that all have nine points
STRENGTHS: dict[str, tuple[dict[str, Any], ...]] = {
    PENAL: tuple({"tau": tau} for tau in (3e-8, 3e-7, 3e-6)),
    "weight decay": tuple({"decay": decay} for decay in (1e-4, 5e-4, 2e-3)),
    "squares of activations": tuple({"activity": activity} for activity in (3e-8, 3e-7, 3e-6)),
    "LayerScale": tuple({"scale": scale} for scale in (0.1, 0.3, 1.0)),
    "stochastic depth": tuple({"drop": drop} for drop in (0.05, 0.1, 0.2)),
}
PLAIN_RATES = (RATES, (0.02, 0.07, 0.2), (0.015, 0.05, 0.15))


def _with(base: Trial, settings: dict[str, Any]) -> Trial:
    """A run with fields of its own, or with options of its task."""
    fields = {key: value for key, value in settings.items() if key in ("tau", "decay")}
    options = tuple((key, value) for key, value in settings.items() if key not in fields)
    return replace(base, options=(*base.options, *options), **fields)


def chosen(arms: Sequence[Arm], setting: Setting) -> tuple[Arm, float]:
    """The arm whose best rate has the lowest validation metric of the tuning seeds, and
    the seconds of the others.
    """
    tuned = measure(arms, setting.run, setting.tuning_seeds, ())
    place = int(best_rate({float(i): one.tuning[one.lr] for i, one in enumerate(tuned)}))
    return arms[place], sum(one.seconds for i, one in enumerate(tuned) if i != place)


def regularisers(setting: Setting) -> Record:
    """A residual network with the penal connection, with other regularisers, and with none."""
    cells = table_cells("markov-chain-table-2")
    if setting.scale == "fetched":
        base = clothes(setting, "momentum", "resnet", 8, 8, FASHION)
    else:
        base = digits(setting, "momentum", 12, "resnet", 8, 8)
    families = [[Arm(NOTHING, base, rates) for rates in PLAIN_RATES]]
    for name, strengths in STRENGTHS.items():
        labels = [f"{name}, {value:g}" for one in strengths for value in one.values()]
        families.append(
            [
                Arm(label, _with(base, one), RATES)
                for label, one in zip(labels, strengths, strict=True)
            ]
        )
    arms, seconds = zip(*(chosen(family, setting) for family in families), strict=True)
    plain, ours, *others = (arm.label for arm in arms)
    record, _ = hold(
        setting,
        [(cells["ResNet50", "tau 3e-7" if arm.base.tau else "baseline"], arm) for arm in arms],
        [
            PairedComparison("the penal connection errs less than no regulariser", ours, plain),
            *(
                PairedComparison(
                    f"the penal connection errs less than {other.rpartition(', ')[0]}", ours, other
                )
                for other in others
            ),
        ],
        name="regularisers",
        figures={
            "strengths": len(STRENGTHS[PENAL]),
            "rates": len(RATES),
            "points": len(STRENGTHS[PENAL]) * len(RATES),
            "by_name": "; ".join(
                f"{name} {show([value for one in strengths for value in one.values()])}"
                for name, strengths in STRENGTHS.items()
            ),
        },
    )
    return replace(record, seconds=record.seconds + sum(seconds))


REGULARISERS = experiment("regularisers", regularisers, draw_paired_comparison)
