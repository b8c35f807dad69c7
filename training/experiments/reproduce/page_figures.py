"""The figures in the head of the page: constants of the protocol, and counts from journals."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

from pathspace.json_lines import read_lines
from pathspace.training.experiments.intervals import CONFIDENCE
from pathspace.training.experiments.reproduce.holm import LEVEL, MARGIN, POWER
from pathspace.training.experiments.reproduce.record import Record, percent
from pathspace.training.experiments.reproduce.smnist import WIDER, WIDTH
from pathspace.training.experiments.reproduce.timing import BOUND
from pathspace.training.experiments.reproduce.trial import PARTS


def figures(records: Iterable[Record], journals: Path | None = None) -> dict[str, object]:
    """Return the values of the fields in ``page.md``.

    Args:
        records: of the page.
        journals: the folder with the journals of their runs.

    Example:
        >>> figures([])["power"]
        '80 %'
    """
    left = {record.name: list(unreported(record, journals)) for record in records if journals}
    return {
        "confidence": percent(CONFIDENCE),
        "margin": percent(MARGIN),
        "plain_margin": MARGIN,
        "one_in": round(1 / LEVEL),
        "power": percent(POWER),
        "parts": PARTS,
        "bound": percent(BOUND),
        "width": WIDTH,
        "wider": ", ".join(map(str, WIDER.values())),
        "language_runs": _count(left.get("language", [])),
        "smnist_runs": _count(left.get("smnist", [])),
        "smnist_best": _best(left.get("smnist", [])),
    }


def unreported(record: Record, journals: Path) -> Iterator[dict[str, Any]]:
    """Yield the runs of a journal that were evaluated on the test split and that the record
    does not report.

    Args:
        record: of the experiment.
        journals: the folder with its journal; an experiment without one has no such runs.
    """
    told = Counter(test for arm in record.data.get("arms", ()) for test in arm["tests"])
    for run in read_lines(journals / f"{record.name}-trials.jsonl"):
        found = run["outcome"]["test_metric"]
        if told[found] > 0:
            told[found] -= 1
        elif found is not None:
            yield run


def _count(runs: list[dict[str, Any]]) -> str:
    return f"{len(runs)} runs" if runs else "runs"


def _best(runs: list[dict[str, Any]]) -> str:
    """Say what the best contender of these runs erred."""
    arms = defaultdict(list)
    for run in runs:
        trial = run["trial"]
        arms[trial["optimizer"], trial["init"]].append(run["outcome"]["test_metric"])
    least = min(map(fmean, arms.values()), default=None)
    return "" if least is None else f" (the best arm erred {100 * least:.1f} %)"
