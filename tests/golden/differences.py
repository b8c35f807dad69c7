"""What has changed between two sets of rows, and how grave it is."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

TOLERANCE = 1e-6
GROUPS = ("unsound-suspect", "weaker", "other")
MISSING = "missing"


@dataclass(frozen=True)
class Difference:
    """A row that has changed: how grave it is, and each changed field in words."""

    name: str
    group: str
    fields: tuple[str, ...]

    def __str__(self) -> str:
        return "\n".join([f"  {self.name}", *(f"    {line}" for line in self.fields)])


def differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[Difference]:
    """Rows that differ, by name."""
    found = []
    for name in sorted(before.keys() | after.keys()):
        old, new = before.get(name), after.get(name)
        if old is None or new is None:
            words = "new row" if old is None else "no such model any more"
            found.append(Difference(name, "other", (words,)))
            continue
        keys = [key for key in dict.fromkeys([*old, *new]) if not _same(old.get(key), new.get(key))]
        if keys:
            lines = tuple(line for key in keys for line in _words(key, old.get(key), new.get(key)))
            found.append(Difference(name, _group(old, new, set(keys)), lines))
    return found


def report(found: Iterable[Difference], compared: int) -> str:
    """The changed rows by group, and their number."""
    found = list(found)
    parts = []
    for group in GROUPS:
        mine = [each for each in found if each.group == group]
        if mine:
            parts.append("\n".join([f"{group} ({len(mine)})", *map(str, mine)]))
    parts.append(f"{compared:,} rows compared, {len(found):,} changed")
    return "\n\n".join(parts)


def _same(one: Any, other: Any) -> bool:
    """Equality; numbers that are not whole up to rounding."""
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=TOLERANCE)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_same, one, other))
    return bool(one == other)


def _group(old: Mapping[str, Any], new: Mapping[str, Any], keys: set[str]) -> str:
    """More units, other ends or a failed verdict are suspect; less is weaker."""
    if "error" in keys:
        return "weaker" if "error" in new else "other"
    if any(new[key] > old[key] for key in ("units", "exact")) or _refuted(new) > _refuted(old):
        return GROUPS[0]
    if any(new[key] < old[key] for key in ("units", "exact")):
        return "weaker"
    if keys & {"ends", "exact_ends"}:
        return GROUPS[0]
    failed = [key for key in ("basis", "balanced", "channels") if _lost(old.get(key), new.get(key))]
    return "weaker" if failed else "other"


def _refuted(row: Mapping[str, Any]) -> int:
    """Verdicts that fail, and units above their bound."""
    found = row.get("verify")
    if not isinstance(found, dict):
        return 0
    bound = found.get("at_most")
    return found["verdicts"].count(False) + (bound is not None and bound < found["units"])


def _lost(old: Any, new: Any) -> bool:
    """Whether there was an answer, and is an error instead."""
    return isinstance(new, str) and not isinstance(old, str)


def _words(key: str, old: Any, new: Any) -> list[str]:
    """A changed field, one line for each changed entry."""
    if isinstance(old, dict) and isinstance(new, dict):
        return [
            f"{key}, {entry}: {old.get(entry, MISSING)} -> {new.get(entry, MISSING)}"
            for entry in sorted(old.keys() | new.keys())
            if not _same(old.get(entry), new.get(entry))
        ]
    return [f"{key}: {MISSING if old is None else old} -> {MISSING if new is None else new}"]
