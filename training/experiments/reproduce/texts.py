"""``language`` and ``translation``: the path-space paper's Figure 4; the Markov-chain
paper's Table 1 and Figure 4.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from matplotlib.figure import Figure

from .experiment import Setting, experiment
from .holm import judge, positive
from .paired_comparison import PERCENT, PairedComparison, Show, draw_paired_comparison, hold
from .pictures import draw_curves, legend, panels
from .recipes import Cell, full_arms, lacking, table_cells
from .record import Record, judged
from .trial import OBSERVED, Trial
from .tuning import Arm, versus

TAU = 3e-4
# Few words are wrong in the end, so that a difference needs many test pairs.
NUMBERS: tuple[tuple[str, Any], ...] = (("hidden", 32), ("limit", 600), ("tests", 10_000))
# task, epochs, examples per batch, learning rates, options
Options = tuple[tuple[str, Any], ...]
LANGUAGE_SCALES: dict[str, tuple[str, int, int, tuple[float, ...], Options]] = {
    "embedded": (
        "text-characters", 8, 32, (0.03, 0.1, 0.3, 1.0),
        (("hidden", 32), ("layers", 4), ("limit", 1000)),
    ),
    "fetched": ("bible-characters", 2, 32, (0.7, 2.0, 6.0), (("hidden", 128), ("layers", 2))),
}  # fmt: skip

TRANSLATION_SCALES: dict[str, tuple[str, int, int, Options]] = {
    "embedded": ("number-words", 15, 32, NUMBERS),
    "fetched": (
        "catalogues", 4, 64,
        (("hidden", 64), ("layers", 1), ("vocabulary", 4000), ("limit", 20_000)),
    ),
}  # fmt: skip

# label, column of the paper's figure, optimizer; the paper's own has the recurrent
# modules alone in path space
LANGUAGE_ARMS = (
    ("G-SGD", "G-SGD", "recurrent-gsgd"),
    ("G-SGD on all weights", "G-SGD", "gsgd"),
    ("SGD", "SGD", "sgd"),
    ("Path-SGD", "Path-SGD", "recurrent-path-sgd"),
)


def language(setting: Setting) -> Record:
    """A stacked ReLU RNN on text, with G-SGD, SGD and Path-SGD."""
    cells = table_cells("path-space-figure-4")
    remarks: tuple[str, ...] = ()
    if setting.scale == "full":
        contenders = full_arms("path-space-figure-4", setting)
        remarks = lacking("path-space-figure-4", setting)
        pairs = [(cells[place], arm) for place, arm in contenders.items()]
        duels = [
            PairedComparison(
                f"{data}: G-SGD needs fewer bits than {other}", f"{data}: G-SGD", f"{data}: {other}"
            )
            for data in dict.fromkeys(row for row, _ in contenders)
            for other in ("SGD", "Path-SGD")
        ]
    else:
        task, epochs, batch, rates, options = LANGUAGE_SCALES[setting.scale]
        base = Trial(
            task, "sgd", 0, 0, setting.budget(epochs), batch, init="unit-skeleton", options=options
        )
        if setting.scale == "fetched":
            base = replace(base, schedule="linear", clip=1.0)
        pairs = [
            (cells["PTB-c", column], Arm(label, replace(base, optimizer=kind), rates))
            for label, column, kind in LANGUAGE_ARMS
        ]
        duels = [
            PairedComparison(f"{first} needs fewer bits per character than {second}", first, second)
            for first, second in (
                ("G-SGD", "SGD"),
                ("G-SGD", "Path-SGD"),
                ("G-SGD on all weights", "SGD"),
            )
        ]
    record, _ = hold(
        setting,
        pairs,
        duels,
        name="language",
        remarks=remarks,
        show=Show("bits per character", 1.0, ".3f"),
    )
    return record


def translation(setting: Setting) -> Record:
    """A transformer that translates, without and with the penal connection, and the
    efficiency of its chain.
    """
    cells, columns = table_cells("markov-chain-table-1"), ("transformer", "Markov chain")
    if setting.scale == "full":
        contenders = full_arms("markov-chain-table-1", setting)
        pairs = [
            (cells[place], replace(arm, base=replace(arm.base, efficiency=True)))
            for place, arm in contenders.items()
        ]
        rows = [f"{row}: " for row in dict.fromkeys(row for row, _ in contenders)]
    else:
        task, epochs, batch, options = TRANSLATION_SCALES[setting.scale]
        base = Trial(task, "adam", 0, 0, setting.budget(epochs), batch, options=options)
        if setting.scale == "fetched":
            base = replace(base, schedule="linear")
        pairs, rows = [], [""]
        for label, tau in zip(columns, (0.0, TAU), strict=True):
            trial = replace(base, tau=tau, efficiency=True)
            pairs.append(
                (cells["WMT-16 EN/DE (Q)", label], Arm(label, trial, (0.001, 0.002, 0.005, 0.01)))
            )
    duels = []
    for row in rows:
        ours, rival = columns[::-1]
        named = row.removesuffix(": ") or "WMT-16 EN/DE (Q)"
        printed = _error(cells[named, ours]), _error(cells[named, rival])
        duels.append(
            PairedComparison(
                f"{row}the penal connection errs less", f"{row}{ours}", f"{row}{rival}", printed
            )
        )
    record, by = hold(
        setting,
        pairs,
        # (they decide on the number of seeds, and are judged below together with the efficiency)
        duels,
        name="translation",
        figures={"observed": OBSERVED},
        show=PERCENT,
    )
    final = {label: [o.test_efficiency or 0.0 for o in m.outcomes] for label, m in by.items()}
    claims = []
    for row, duel in zip(rows, duels, strict=True):
        plain, penal = duel.rival, duel.ours
        bars = setting.bars(by[plain].arm.base.task, by[plain].arm.base.options)
        claims.append(versus(duel.statement, by[penal], by[plain], duel.printed, bars))
        claims.append(
            positive(
                f"{row}the penal connection makes the chain more efficient (difference after the"
                " last epoch)",
                [b - a for a, b in zip(final[plain], final[penal], strict=True)],
                pattern="+.3f",
            )
        )
        # (the curve begins before the first epoch)
        curves = [outcome.efficiencies[1:] for outcome in by[plain].outcomes]
        claims.append(
            positive(
                f"{row}without it the efficiency is negative after every epoch (the largest, sign"
                " changed)",
                [-max(curve, default=math.nan) for curve in curves],
                pattern="+.3f",
            )
        )
    record.data["final_efficiency"] = final
    return replace(record, claims=judged(judge(claims)))


def _error(cell: Cell) -> float:
    """Return the error in percent that a cell of perplexity and accuracy prints."""
    return round(100 - float(cell.printed.split()[-2]), 6)


def draw_translation(record: Record) -> Figure:
    """Draw error and efficiency against epochs, as in the paper's Figure 4."""
    with panels(2) as (figure, axes):
        for place, arm in enumerate(record.data["arms"]):
            draw_curves(axes[0], place, arm["label"], arm["valid_metrics"], factor=100)
            draw_curves(axes[1], place, arm["label"], arm["efficiencies"], first=0)
        axes[0].set(title="validation error in %", xlabel="epoch")
        axes[1].set(title="efficiency of the chain", xlabel="epoch")
        axes[1].axhline(0, color="black", linewidth=0.6)
        legend(figure, axes[0])
        return figure


LANGUAGE = experiment("language", language, draw_paired_comparison)
TRANSLATION = experiment("translation", translation, draw_translation)
