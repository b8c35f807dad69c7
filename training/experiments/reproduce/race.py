"""``race``: SGD and G-SGD, each from two starting points, on small images read row by row."""

from __future__ import annotations

from dataclasses import replace

from ..recipe import Init, Rule
from .experiment import Setting, experiment
from .paired_comparison import PairedComparison, draw_paired_comparison, hold
from .recipes import table_cells
from .record import Record
from .smnist import CLIP
from .trial import Trial
from .tuning import Arm

EPOCHS, RATES = 60, (0.02, 0.05, 0.1, 0.2, 0.5)
# Enough images and passes for every arm to err less than logistic regression on the same images.
FETCHED_IMAGES, FETCHED_EPOCHS, FETCHED_RATES = 10_000, 16, (*RATES, 1.2)
DEFAULT, UNIT = "SGD, default start", "SGD, unit skeleton"
PATHS, PATHS_DEFAULT = "G-SGD, unit skeleton", "G-SGD, default start"
# From the default start, path values have multipliers far above one: the rule of large weights
# keeps them low, and as many rates are tried a thousand times lower.
ARMS: tuple[tuple[str, str, Init, Rule, float], ...] = (
    (DEFAULT, "sgd", "default", "modulo", 1.0),
    (UNIT, "sgd", "unit-skeleton", "modulo", 1.0),
    (PATHS_DEFAULT, "gsgd", "default", "magnitude", 1e-3),
    (PATHS, "gsgd", "unit-skeleton", "modulo", 1.0),
)


def run(setting: Setting, rates: tuple[float, ...] | None = None) -> Record:
    """Tune and test the four arms."""
    cells = table_cells("path-space-table-1")
    if setting.scale == "fetched":
        options = (("limit", FETCHED_IMAGES),)
        epochs = setting.budget(FETCHED_EPOCHS)
        base = Trial(
            "fashion-14", "sgd", 0, 0, epochs, schedule="linear", clip=CLIP, options=options
        )
    else:
        base = Trial("digits-rows", "sgd", 0, 0, setting.budget(EPOCHS))
    rates = rates or (FETCHED_RATES if setting.scale == "fetched" else RATES)
    pairs = []
    for label, optimizer, init, rule, factor in ARMS:
        arm = Arm(
            label,
            replace(base, optimizer=optimizer, init=init, rule=rule),
            tuple(float(f"{factor * rate:.3g}") for rate in rates),
        )
        pairs.append((cells["sMNIST-28", "G-SGD" if optimizer == "gsgd" else "SGD"], arm))
    record, _ = hold(
        setting,
        pairs,
        [
            PairedComparison(
                "SGD errs less from the unit skeleton than from the default start", UNIT, DEFAULT
            ),
            PairedComparison("From the unit skeleton, G-SGD errs less than SGD", PATHS, UNIT),
        ],
        name="race",
    )
    return record


RACE = experiment("race", run, draw_paired_comparison)
