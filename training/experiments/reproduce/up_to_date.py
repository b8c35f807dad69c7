"""Records as today's code describes them, from the journals of their runs.

The list of differences from the paper's recipe and the published figures that arms have to beat
follow from the runs. Both are read again, so that what was overlooked when the runs ended is not
missing for ever. Figures stay as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from pathspace.errors import InputError

from ..json_lines import read_lines
from .baselines import published
from .experiment import TUNING_SEEDS, Experiment, Setting, fresh_seeds
from .record import Record, Table
from .trial import Outcome, Trial


def up_to_date(record: Record, experiment: Experiment, journal: Path) -> Record:
    """Return a record with today's list of differences and today's published baselines.

    The experiment is carried out with outcomes from the journal. Where that lacks one, or where
    the arms end with other figures, the record is of another setting and stays as it is.
    """
    if not experiment.trials or record.scale != "fetched" or not journal.is_file():
        return record
    # (of several lines of one trial, the last)
    known = {
        trial_of(line["trial"]): Outcome.from_dict(line["outcome"]) for line in read_lines(journal)
    }
    setting = Setting(
        run=lambda trials: [known[trial] for trial in trials],
        scale=record.scale,
        seeds=fresh_seeds(max(len(arm["tests"]) for arm in record.data["arms"])),
        tuning_seeds=TUNING_SEEDS[:1],
        bars=published,
    )
    try:
        today = experiment.run(setting)
    except (KeyError, InputError):
        return record
    if _results(today) != _results(record):
        return record
    return replace(
        record,
        differs=today.differs,
        ours=_with_published(record.ours, today.ours),
        claims=tuple(
            old | {"nothing": new["nothing"] or old["nothing"]}
            for old, new in zip(record.claims, today.claims, strict=True)
        ),
    )


def trial_of(values: Mapping[str, Any]) -> Trial:
    """Return a trial from the plain values of a journal."""
    # (some lines name a precision, which is the same for all)
    told = {key: value for key, value in values.items() if key != "precision"}
    told["options"] = tuple((key, value) for key, value in told.get("options", ()))
    betas = told.get("betas")
    return Trial(**(told | {"betas": betas and tuple(betas)}))


def _results(record: Record) -> list[object]:
    arms = [(arm["label"], arm["task"], arm["lr"], arm["tests"]) for arm in record.data["arms"]]
    return [*arms, *(claim["statement"] for claim in record.claims)]


def _with_published(ours: Table, today: Table) -> Table:
    """The table with those published rows that stand today."""
    told = {row[0]: row for row in today.rows if "published: " in row[0]}
    kept = [row for row in ours.rows if "published: " not in row[0] or row[0] in told]
    names = {row[0] for row in kept}
    return Table(ours.columns, (*kept, *(row for name, row in told.items() if name not in names)))
