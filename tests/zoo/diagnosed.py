"""Every diagnostic on every model of the zoo: `python -m zoo.diagnosed [NAME or
FAMILY ...] [--json FILE]`.
"""

from __future__ import annotations

import argparse
import json
import time
import traceback
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from oracles.diagnosis import CHECKS, Subject, diagnose

from pathspace.errors import first_line
from pathspace.files.writing import replacing
from zoo.entry import load


def look(name: str, mode: str, checks: list[str]) -> list[dict[str, Any]]:
    """One model: a row per diagnostic."""
    model, args, kwargs = load()[name].make(mode)
    subject = Subject(model, args, kwargs)
    rows = []
    for check in checks:
        start = time.perf_counter()
        row: dict[str, Any] = {"name": name, "mode": mode, "check": check}
        try:
            row["applies"], row["found"] = diagnose(subject, check)
        except Exception as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            row["fault"] = (
                f"{type(error).__name__}: {first_line(error)}"
                f" ({Path(last.filename).name}:{last.lineno})"
            )
            subject = Subject(*load()[name].make(mode))
        rows.append({**row, "seconds": round(time.perf_counter() - start, 2)})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="names or families; all by default")
    parser.add_argument("--json", type=Path, help="keep the rows in this file")
    parser.add_argument("--only", nargs="*", choices=list(CHECKS), help="these diagnostics alone")
    parser.add_argument("--but", nargs="*", choices=list(CHECKS), default=[], help="all but these")
    parser.add_argument(
        "--most", type=int, default=30_000_000, help="leave out models with more parameters"
    )
    given = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    rows: list[dict[str, Any]] = []
    checks = given.only or [check for check in CHECKS if check not in given.but]
    for entry in load().values():
        if given.names and entry.name not in given.names and entry.family not in given.names:
            continue
        mode = entry.modes[-1]
        if sum(p.numel() for p in entry.make(mode)[0].parameters()) > given.most:
            continue
        mine = look(entry.name, mode, checks)
        rows += mine
        for row in mine:
            if "fault" in row:
                print(f"{row['name']} {row['check']}: {row['fault']}", flush=True)
        print(f"{entry.name}: {sum(row['seconds'] for row in mine):.1f} s", flush=True)
        if given.json is not None:
            with replacing(given.json) as temporary:
                temporary.write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n")
    for check in checks:
        mine = [row for row in rows if row["check"] == check]
        count = Counter(
            "fault" if "fault" in row else "applies" if row["applies"] else "declined"
            for row in mine
        )
        print(
            f"{check}: {count['applies']} apply, {count['declined']} declined, {count['fault']}"
            " faults"
        )


if __name__ == "__main__":
    main()
