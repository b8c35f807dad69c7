"""``race``: SGD from two starting points and G-SGD, on 8 x 8 digits read row by row."""

from __future__ import annotations

from pathspace.training.experiments.reproduce.experiment import Experiment, Setting
from pathspace.training.experiments.reproduce.paired_comparison import PairedComparison, draw_paired_comparison, hold
from pathspace.training.experiments.reproduce.recipes import table_cells
from pathspace.training.experiments.reproduce.record import Record, Table
from pathspace.training.experiments.reproduce.trial import Trial
from pathspace.training.experiments.reproduce.tuning import Arm
from pathspace.training.recipe import Init

EPOCHS, RATES = 60, (0.02, 0.05, 0.1, 0.2, 0.5)
DEFAULT, UNIT, PATHS = "SGD, default start", "SGD, unit skeleton", "G-SGD, unit skeleton"
ARMS: tuple[tuple[str, str, Init], ...] = (
    (DEFAULT, "sgd", "default"),
    (UNIT, "sgd", "unit-skeleton"),
    (PATHS, "gsgd", "unit-skeleton"),
)


def run(setting: Setting, rates: tuple[float, ...] = RATES) -> Record:
    """Tune and test the three arms.

    Args:
        setting: how.
        rates: learning rates that each arm may choose from.

    Returns:
        The record.
    """
    epochs, cells = setting.budget(EPOCHS), table_cells("path-space-table-1")
    record, _ = hold(
        setting,
        [
            Arm(label, Trial("digits-rows", optimizer, 0, 0, epochs, init=init), rates)
            for label, optimizer, init in ARMS
        ],
        [
            PairedComparison("SGD errs less from the unit skeleton than from the default start", UNIT, DEFAULT),
            PairedComparison("From the same start, G-SGD errs less than SGD", PATHS, UNIT),
        ],
        name="race",
        title="A ReLU RNN reads digits row by row: the effects of the start and of the optimizer",
        source="Path space for recurrent neural networks with ReLU activations, section 5.1, at a small scale",
        paper=Table(("error in %", "G-SGD", "SGD"), (("sMNIST-28", "1.50", "1.59"),)),
        cells=[cells["sMNIST-28", "G-SGD" if optimizer == "gsgd" else "SGD"] for _, optimizer, _ in ARMS],
        caption="Training loss and validation error at the chosen learning rates: mean over seeds and range",
    )
    return record


RACE = Experiment(
    name="race",
    summary="effects of the start and of the optimizer, on 8 x 8 digits",
    minutes=3,
    needs="",
    run=run,
    draw=draw_paired_comparison,
)
