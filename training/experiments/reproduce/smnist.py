"""``smnist``: sequential digits with G-SGD, SGD, Path-SGD, G-Adam and Adam (path-space paper, Tables 1 and 7)."""

from __future__ import annotations

from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from pathspace.training.experiments.reproduce.experiment import Experiment, Setting
from pathspace.training.experiments.reproduce.holm import Claim, gain, judge
from pathspace.training.experiments.reproduce.pictures import draw_curves, legend, panels
from pathspace.training.experiments.reproduce.record import Record, Table, judged
from pathspace.training.experiments.reproduce.trial import Trial
from pathspace.training.experiments.reproduce.tuning import Arm, Measured, measure
from pathspace.training.recipe import Init

EPOCHS, BATCH = 25, 64
SLOW, FAST = (0.02, 0.05, 0.12, 0.3, 0.7), (0.0007, 0.002, 0.005, 0.015, 0.04)
# label, optimizer, starting point, learning rates: as many for everybody
ARMS: tuple[tuple[str, str, Init, tuple[float, ...]], ...] = (
    ("G-SGD", "gsgd", "unit-skeleton", SLOW),
    ("SGD", "sgd", "unit-skeleton", SLOW),
    ("SGD, default start", "sgd", "default", SLOW),
    ("Path-SGD", "path-sgd", "unit-skeleton", (0.1, 0.25, 0.6, 1.5, 4.0)),
    ("G-Adam", "gadam", "unit-skeleton", FAST),
    ("Adam", "adam", "unit-skeleton", FAST),
    ("Adam, default start", "adam", "default", FAST),
)
# our task -> the paper's name and its errors in percent: G-SGD, SGD, Path-SGD, G-Adam, Adam
EMBEDDED = {"digits-rows": "sMNIST-28", "digits-rows-permuted": "permuted sMNIST-28"}
PRINTED = {
    "sMNIST-28": (1.50, 1.59, 1.75, 1.50, 1.72),
    "sMNIST-98": (2.70, 3.07, 2.99, 2.49, 3.10),
    "permuted sMNIST-28": (3.80, 4.19, 4.12, 3.73, 4.06),
    "permuted sMNIST-98": (5.42, 5.70, 5.47, 5.42, 5.57),
}
FULL = {
    "mnist-28": "sMNIST-28",
    "mnist-98": "sMNIST-98",
    "mnist-28-permuted": "permuted sMNIST-28",
    "mnist-98-permuted": "permuted sMNIST-98",
}
FULL_RATES = (0.1, 0.05, 0.01, 0.005, 0.001, 0.0005, 0.0001)
# ours, its rival, and their places in PRINTED
DUELS = (("G-SGD", "SGD", 0, 1), ("G-SGD", "Path-SGD", 0, 2), ("G-Adam", "Adam", 3, 4))


def run(setting: Setting) -> Record:
    """Tune and test seven arms on each data set.

    Args:
        setting: how.

    Returns:
        The record.
    """
    full = setting.scale == "full"
    names = FULL if full else EMBEDDED
    epochs = setting.budget(400 if full else EPOCHS)
    options: tuple[tuple[str, Any], ...] = (
        (("hidden", 100), ("data", str(setting.data))) if full else (("hidden", 100),)
    )
    arms = [
        Arm(
            label,
            Trial(task, optimizer, 0.0, 0, epochs, BATCH, init=init, options=options),
            FULL_RATES if full and optimizer != "path-sgd" else rates,
        )
        for task in names
        for label, optimizer, init, rates in _arms(task)
    ]
    measured = measure(arms, setting.run, setting.tuning_seeds, setting.seeds)
    by = {(m.arm.base.task, m.arm.label): m for m in measured}
    return Record(
        name="smnist",
        title="Test error of a ReLU RNN that reads images of digits row by row",
        source="Path space for recurrent neural networks with ReLU activations, Tables 1 and 7",
        scale=setting.scale,
        paper=Table(
            ("error in %", "G-SGD", "SGD", "Path-SGD", "G-Adam", "Adam"),
            tuple((name, *(f"{value:.2f}" for value in PRINTED[name])) for name in names.values()),
        ),
        ours=_ours(names, by),
        differs=(
            *(
                ()
                if full
                else (
                    "Data: the 1797 digits of scikit-learn, 8 × 8 pixels in 8 steps, in place of MNIST's 70 000 of "
                    "28 × 28. Errors are not comparable in size, only the order of the optimizers is.",
                    f"{epochs} epochs in place of 400.",
                )
            ),
            "Starting point: the skeleton's weights are set to ±1 for every arm, because the step of G-SGD needs "
            "it and the paper does not say how it starts; SGD and Adam are also run from torch's own start.",
            "G-SGD is the corrected step (see the page on G-SGD), with the skeleton of Algorithm 1.",
            "Path-SGD uses the first term of the scaling of Neyshabur et al., as their published code means to; run "
            "today that code leaves the gradient unchanged, and whether the paper's authors noticed is unknown.",
        ),
        protocol=setting.protocol,
        claims=judged(judge(_claims(names, by))),
        caption="Validation error against epochs at the chosen learning rates: mean over seeds and range",
        data={"tasks": dict(names), "arms": [m.to_dict() for m in measured]},
        seconds=sum(m.seconds for m in measured),
    )


def _arms(task: str) -> list[tuple[str, str, Init, tuple[float, ...]]]:
    """Return the arms of a data set; torch's own start is tried on the first only, where it says what it can say."""
    return [arm for arm in ARMS if arm[2] == "unit-skeleton" or task in (next(iter(EMBEDDED)), next(iter(FULL)))]


def _ours(names: dict[str, str], by: dict[tuple[str, str], Measured]) -> Table:
    rows = []
    for task in names:
        for label, *_ in _arms(task):
            m = by[task, label]
            rows.append(
                (
                    f"{task}: {label}",
                    f"{m.lr:g}{'*' if m.edge else ''}",
                    "–" if m.tuning[m.lr] != m.tuning[m.lr] else f"{100 * m.tuning[m.lr]:.2f}",
                    _percent(m),
                    f"{sum(o.diverged for o in m.outcomes)} of {len(m.outcomes)}",
                )
            )
    return Table(("arm", "learning rate", "validation error in %", "test error in %", "diverged"), tuple(rows))


def _percent(m: Measured) -> str:
    interval = m.interval
    return f"{100 * interval.mean:.2f} ± {100 * interval.half_width:.2f}" if interval.count else "–"


def _claims(names: dict[str, str], by: dict[tuple[str, str], Measured]) -> list[Claim]:
    return [
        gain(
            f"{task}: {ours} errs less than {rival}",
            by[task, ours].tests,
            by[task, rival].tests,
            (PRINTED[printed][first], PRINTED[printed][second]),
        )
        for task, printed in names.items()
        for ours, rival, first, second in DUELS
    ]


def draw(record: Record) -> Figure:
    """Draw the validation error of every arm against epochs, one panel per data set, as in the paper's Figure 6."""
    tasks = record.data["tasks"]
    with panels(len(tasks), height=4.0) as (figure, axes):
        for panel, task in zip(axes, tasks, strict=True):
            for place, (label, *_) in enumerate(ARMS):
                if label not in {entry[0] for entry in _arms(task)}:
                    continue
                arm = next(arm for arm in record.data["arms"] if arm["task"] == task and arm["label"] == label)
                draw_curves(
                    panel, place, f"{label}, lr {arm['lr']:g}" if len(tasks) == 1 else label, arm["valid_metrics"]
                )
            panel.set(title=task, xlabel="epoch", ylabel="validation error", yscale="log")
            panel.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:g}%"))
            panel.yaxis.set_minor_formatter(FuncFormatter(lambda _value, _: ""))
        legend(figure, axes[0])
        return figure


SMNIST = Experiment(
    name="smnist",
    summary="G-SGD, SGD, Path-SGD, G-Adam, Adam on sequential digits",
    minutes=10,
    needs="MNIST's four idx files",
    run=run,
    draw=draw,
)
