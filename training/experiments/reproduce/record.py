"""The record of an experiment: committed as JSON, and the only source of page and pictures."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

from pathspace.diagnostics.shared.tables import plain
from pathspace.errors import InputError
from pathspace.files.writing import replacing

from ..names import texts
from .holm import Claim, judge
from .trial import provenance

FORMAT = 1


@dataclass(frozen=True)
class Table:
    """A table as it is printed: texts only."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Table:
        """Read a table from JSON or TOML."""
        return cls(tuple(values["columns"]), tuple(map(tuple, values["rows"])))


@dataclass(frozen=True)
class Record:
    """Everything about one experiment: the paper's figures and ours, how the setting ``differs``,
    the ``protocol`` (one sentence each), judged claims, the numbers behind table and picture
    (``data``), the time of all runs on one thread each, and the ``versions`` of what computed it.
    """

    name: str
    title: str
    source: str
    scale: str
    paper: Table
    ours: Table
    differs: tuple[str, ...]
    protocol: tuple[str, ...]
    claims: tuple[dict[str, Any], ...]
    caption: str
    data: dict[str, Any]
    seconds: float
    versions: dict[str, str] = field(default_factory=provenance)

    @property
    def command(self) -> str:
        """The command that computes it."""
        scales = {"embedded": "", "fetched": " --scale fetched"}
        return (
            f"pathspace reproduce {self.name}{scales.get(self.scale, ' --scale full --data DIR')}"
        )

    def write(self, path: Path) -> None:
        """Write the record as JSON, aside and renamed."""
        with replacing(path) as temporary:
            text = json.dumps(
                {"format": FORMAT, **asdict(self)}, indent=1, ensure_ascii=False, allow_nan=False
            )
            temporary.write_text(_flat_lists(text) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Record:
        """Read what :meth:`write` wrote."""
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
            if record.pop("format") != FORMAT:
                raise ValueError
            for key in ("paper", "ours"):
                record[key] = Table.of(record[key])
            for key in ("differs", "protocol", "claims"):
                record[key] = tuple(record[key])
            return cls(**record)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise InputError(
                f"The file '{path}' is not a record of an experiment; delete it and run pathspace"
                " reproduce again."
            ) from error


def about(name: str) -> dict[str, Any]:
    """Return what the texts say of an experiment, as arguments of a record."""
    entry = texts()[name]
    found = {"name": name, **{key: entry[key] for key in ("title", "source", "caption")}}
    return found | ({"paper": Table.of(entry["paper"])} if "paper" in entry else {})


def remarks(name: str, **figures: object) -> tuple[str, ...]:
    """Return what else differs from the paper, with figures of the code."""
    return tuple(remark.format(**figures) for remark in texts()[name].get("remarks", ()))


def percent(share: float) -> str:
    """Write a share as pages do."""
    return f"{100 * share:g} %"


def judged_again(record: Record) -> Record:
    """Return a record with today's verdicts on its figures, if it says its families."""
    sizes = record.data.get("families", [len(record.claims)])
    if isinstance(sizes, int):
        return record
    claims = iter([Claim.from_dict(claim) for claim in record.claims])
    families = [judge(list(islice(claims, size))) for size in sizes]
    return replace(record, claims=judged([claim for family in families for claim in family]))


def judged(claims: Iterable[Claim]) -> tuple[dict[str, Any], ...]:
    """Return judged claims as plain values."""
    return tuple(plain(asdict(claim)) for claim in claims)


def on_these_items(claim: Mapping[str, Any]) -> bool:
    """Whether other test items might turn a verdict: their interval contains zero."""
    return (
        claim["verdict"] in ("better", "worse")
        and claim.get("items_low") is not None
        and bool(claim["items_low"] <= 0 <= claim["items_high"])
    )


def _flat_lists(text: str) -> str:
    """Put lists of numbers on one line each: a curve is one line of the file, not sixty."""
    return re.sub(
        r"\[\s+((?:(?:-?[\d.eE+-]+|null),?\s+)+)\]",
        lambda found: "[" + " ".join(found[1].split()) + "]",
        text,
    )
