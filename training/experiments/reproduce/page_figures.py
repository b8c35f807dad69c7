"""The figures in the head of the page: constants of the protocol, and counts from journals."""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from pathspace.training.experiments.json_lines import read_lines

from ..intervals import CONFIDENCE
from .holm import LEVEL, MARGIN, POWER, gain, judge
from .record import Record, percent
from .sequences import WIDER, WIDTH
from .timing import BOUND
from .trial import PARTS


def figures(records: Iterable[Record], journals: Path | None = None) -> dict[str, object]:
    """Return the values of the fields in ``page.md``."""
    left: dict[str, list[dict[str, Any]]] = {}
    again: dict[str, list[dict[str, Any]]] = {}
    first = ""
    if journals is not None:
        for record in records:
            told, others = reported(record, journals)
            settings = set(map(_setting, told))
            left[record.name] = [run for run in others if _setting(run) not in settings]
            again[record.name] = [run for run in others if _setting(run) in settings]
            if record.name == "rcnn":
                first = _first_verdict(record, told, again[record.name])
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
        "rcnn_first": first,
        "again": ", ".join(
            f"{_count(runs)} of {name}" for name, runs in sorted(again.items()) if runs
        )
        or "Other runs",
    }


def reported(record: Record, journals: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the runs of a journal that were evaluated on the test split: those that the record
    reports, and the others.

    A run is known by its result on the test split and its validation curve; of equal ones, the
    last is reported.
    """
    told = Counter(
        _result(test, curve)
        for arm in record.data.get("arms", ())
        for test, curve in zip(arm["tests"], arm["valid_metrics"], strict=True)
    )
    found: tuple[list[dict[str, Any]], list[dict[str, Any]]] = [], []
    for run in reversed(list(read_lines(journals / f"{record.name}-trials.jsonl"))):
        if run["trial"]["test"]:
            outcome = run["outcome"]
            result = _result(outcome["test_metric"], outcome["valid_metrics"])
            found[told[result] <= 0].append(run)
            told[result] -= 1
    return found


def _result(test: float | None, curve: Iterable[float | None]) -> tuple[float | None, ...]:
    """Return the test metric, and the curve with the digits of records."""
    return test, *(float(f"{v:.5g}") if v is not None and math.isfinite(v) else None for v in curve)


def _setting(run: dict[str, Any]) -> str:
    """Return a run's task, network and data."""
    return json.dumps([run["trial"]["task"], run["trial"]["options"]])


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


def _first_verdict(record: Record, told: list[dict[str, Any]], others: list[dict[str, Any]]) -> str:
    """Judge the claim of two arms by other runs of its seeds, if all are there."""
    arms: dict[str, dict[int, float]] = defaultdict(dict)
    for run in others:
        arms[run["trial"]["optimizer"]][run["trial"]["seed"]] = run["outcome"]["test_metric"]
    (claim,), seeds = record.claims, {run["trial"]["seed"] for run in told}
    # (the first arm's runs are the first in the journal, and the last that were read)
    names = dict.fromkeys(run["trial"]["optimizer"] for run in reversed(told))
    if any(arms[name].keys() != seeds for name in names):
        return ""
    ours, rival = ([arms[name][seed] for seed in sorted(seeds)] for name in names)
    statement = gain(claim["statement"], ours, rival)
    (judged,) = judge([replace(statement, printed=claim["printed"])])
    low, mean, high = (format(v, claim["pattern"]) for v in (judged.low, judged.mean, judged.high))
    known = record.versions["processor"]
    elsewhere = sum(run["provenance"]["processor"] not in known for run in others)
    return (
        f" The first {_count(others)} ({elsewhere} of them on another kind of processor) gave"
        f" {mean} ({low} to {high}): **{judged.verdict}** (p = {judged.corrected:.3f})."
    )
