"""``language`` and ``translation``: the path-space paper's Figure 4; the Markov-chain
paper's Table 1 and Figure 4.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from matplotlib.figure import Figure

from .experiment import Setting
from .holm import judge, positive
from .paired_comparison import PairedComparison, Show, hold, of_table
from .pictures import draw_curves, legend, panels
from .recipes import Cell, table_cells
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
    cells, show = table_cells("path-space-figure-4"), Show("bits per character", 1.0, ".3f")
    if setting.scale == "full":
        claims = [
            (f"{data}: G-SGD needs fewer bits than {other}", (data, "G-SGD"), (data, other))
            for data in dict.fromkeys(row for row, _ in cells)
            for other in ("SGD", "Path-SGD")
        ]
        contest = of_table("path-space-figure-4", setting, claims)
        return hold(setting, **contest, name="language", show=show)[0]
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
    return hold(setting, pairs, duels, name="language", show=show)[0]


def translation(setting: Setting) -> Record:
    """A transformer that translates, and the efficiency of its chain."""
    cells, quick = table_cells("markov-chain-table-1"), "WMT-16 EN/DE (Q)"
    plain, penal = columns = "transformer", "Markov chain"
    less = "the penal connection errs less"
    if setting.scale == "full":
        claims = [
            (f"{row}: {less}", (row, penal), (row, plain))
            for row in dict.fromkeys(row for row, _ in cells)
        ]
        contest = of_table("markov-chain-table-1", setting, claims, _error)
        pairs, duels, remarks = contest["pairs"], contest["duels"], contest["remarks"]
    else:
        task, epochs, batch, options = TRANSLATION_SCALES[setting.scale]
        base = Trial(task, "adam", 0, 0, setting.budget(epochs), batch, options=options)
        if setting.scale == "fetched":
            base = replace(base, schedule="linear")
        rates = (0.001, 0.002, 0.005, 0.01)
        pairs = [
            (cells[quick, label], Arm(label, replace(base, tau=tau), rates))
            for label, tau in zip(columns, (0.0, TAU), strict=True)
        ]
        printed = _error(cells[quick, penal]), _error(cells[quick, plain])
        duels, remarks = [PairedComparison(less, penal, plain, printed)], ()
    record, by = hold(
        setting,
        [(cell, replace(arm, base=replace(arm.base, efficiency=True))) for cell, arm in pairs],
        # (they decide on the number of seeds, and are judged below together with the efficiency)
        duels,
        name="translation",
        remarks=remarks,
        figures={"observed": OBSERVED},
    )
    final = {label: [o.test_efficiency or 0.0 for o in m.outcomes] for label, m in by.items()}
    judgements = []
    for duel in duels:
        row, ours, rival = duel.statement.removesuffix(less), by[duel.ours], by[duel.rival]
        bars = setting.bars(rival.arm.base.task, rival.arm.base.options)
        # (the curve begins before the first epoch)
        curves = [outcome.efficiencies[1:] for outcome in rival.outcomes]
        gains = [b - a for a, b in zip(final[duel.rival], final[duel.ours], strict=True)]
        judgements += [
            versus(duel.statement, ours, rival, duel.printed, bars),
            positive(
                f"{row}the penal connection makes the chain more efficient (difference after the"
                " last epoch)",
                gains,
                pattern="+.3f",
            ),
            positive(
                f"{row}without it the efficiency is negative after every epoch (the largest, sign"
                " changed)",
                [-max(curve, default=math.nan) for curve in curves],
                pattern="+.3f",
            ),
        ]
    record.data["final_efficiency"] = final
    return replace(record, claims=judged(judge(judgements)))


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
