"""The survey as a page: `python -m zoo.page survey-1.json ...` from `tests/` writes it."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.figures import DOCS, markdown

from pathspace.files.writing import replacing

DATA, PAGE = DOCS / "data" / "survey.json", DOCS / "survey.md"
KEPT = ("name", "family", "mode", "scalars", "weights", "units", "rescaling", "balance", "error")
SOUND = 1e-8
# outputs that rounding the weights to 16 digits changes by more than that, and by how much
ROUNDED = {("starnet_s3", "eval"): 7.3e-8}
HEAD = """# The survey

Every model is built by its library with random weights, and traced in training and in evaluation mode. *Answered* means
that every scalar is in path space, pinned or unused.

*Measured* models are also checked numerically, in float64, with the epsilon of normalisations near 0 and with fixed
dropout (convolutional models of torchvision: on images of 64 pixels). Two relative errors are measured: the change of
the outputs by a random rescaling of all units by powers of two up to 4096, and the imbalance of the gradients at every
unit. *Sound* means that both are below 1e-8. The other models are too large to be measured in reasonable time.

`python -m zoo.survey` in `tests/` repeats the survey (`--library timm` and `--library torchvision` if these are
installed); `python -m zoo.page` writes this page from [`data/survey.json`](data/survey.json).

"""  # noqa: E501


def keep(rows: Iterable[dict[str, Any]], data: Path, page: Path, text: str) -> None:
    """Write rows of data, one on each line, and the page made of them, each aside and renamed."""
    with replacing(data) as temporary:
        temporary.write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n")
    with replacing(page) as temporary:
        temporary.write_text(text)


def trim(row: dict[str, Any]) -> dict[str, Any]:
    """The figures that do not depend on the machine."""
    kept = {key: row.get(key) for key in KEPT}
    return {**kept, "error": str(kept["error"] or "").split(" (at ")[0]}


def render(rows: Iterable[dict[str, Any]]) -> str:
    """The page."""
    rows = list(rows)
    counts, families = [], sorted({row["family"] for row in rows})
    for family in families:
        mine = [row for row in rows if row["family"] == family]
        answered = [row for row in mine if not row["error"]]
        measured = [row for row in answered if row["rescaling"] is not None]
        sound = [row for row in measured if max(row["rescaling"], row["balance"] or 0) <= SOUND]
        changes = [
            max((row[key] or 0 for row in measured), default=0) for key in ("rescaling", "balance")
        ]
        counts.append([
            family, f"{len({row['name'] for row in mine})}", f"{len(answered)} of {len(mine)}",
            f"{len(measured)}", f"{len(sound)}", f"{changes[0]:.1e}", f"{changes[1]:.1e}",
        ])  # fmt: skip
    head = "models | names | answers | measured | sound | largest change of outputs"
    lines = [markdown(f"{head} | largest imbalance", counts)]
    failed = [f"* {row['name']}, {row['mode']}: {row['error']}" for row in rows if row["error"]]
    if failed:
        lines += ["", "Not answered, with the error message:", "", *failed]
    for (name, mode), noise in ROUNDED.items():
        start = f"{name} ({mode}): changing each weight by one part in 10^16 changes the outputs by"
        lines += ["", f"{start} {noise:.1e},", "so the change by the rescaling is rounding."]
    every = sorted(rows, key=lambda row: (row["family"], row["name"], row["mode"]))
    models = [
        [row["name"], row["mode"], *(f"{row[key]:,}" for key in ("scalars", "weights", "units"))]
        for row in every
        if not row["error"]
    ]
    table = markdown("model | mode | parameters | in path space | units", models, texts=2)
    return HEAD + "\n".join([*lines, "", "## Every model", "", table]) + "\n"


def main() -> None:
    found: dict[tuple[str, str, str], dict[str, Any]] = {}
    # what was measured before stays, unless there is something newer
    for file in (DATA, *map(Path, sys.argv[1:])):
        for row in map(trim, json.loads(file.read_text())):
            found[row["family"], row["name"], row["mode"]] = row
    keep(found.values(), DATA, PAGE, render(found.values()))


if __name__ == "__main__":
    main()
