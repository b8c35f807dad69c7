"""The brackets as a page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from zoo.page import DOCS

DATA, PAGE = DOCS / "data" / "brackets.json", DOCS / "brackets.md"
HEAD = """# Brackets

How many units were found, and [how many there can be at most](reduction-graph.md#an-upper-bound-on-the-number-of-units), for the
models of `tests/zoo` and for [trained networks](trained.md). A bracket is *closed* where both agree: then no scale
symmetry by rows and columns was missed. Models that take images of any size are measured on small ones.

`python -m zoo.brackets` in `tests/` measures what is missing and writes this page from
[`data/brackets.json`](data/brackets.json). Seconds are those of a shared core, tracing included. A model that is not in
the table has not been measured.

*Exact* units are those that hold with every epsilon as it stands, bounded by the same test. An epsilon of 1e-12, as in
BERT, ALBERT and XLM-RoBERTa, changes derivatives by less than the test tells from zero: there that bound stays open.

"""
# why a bracket is open: name of the model -> a sentence
OPEN: dict[str, str] = {
    "hf_xlnet": "features of relative positions with the lowest frequencies are the same at all positions up to 1e-7; "
    "what is the same softmax ignores: two singular values of 8e-9 are taken for zero",
    "hf_xlstm": "the scale of a head's keys cancels in its quotient wherever the quotient's bound is not reached, "
    "as in all samples of training mode; a few of evaluation mode reach it, which closes the bracket there",
    "deeplab": "the pooled branch normalises one number per image over the batch, so that its bias matters only where "
    "a rectifier tells the images apart, which few samples show",
    "silero-vad": "loud inputs saturate the gates of its LSTM; the singular values fall without a gap, so that small "
    "derivatives cannot be told from none",
    "act_threshold_moved": "its threshold lies above 0: what it lets through is homogeneous, only the jump is not, and "
    "derivatives do not see jumps",
    "act_logit_scale": "exp(log|h|) is |h|, whose scale is free; the rules read the operations one by one, and a "
    "logarithm fixes the scale",
    "orthogonal_mlp": "the parametrisation rounds the diagonal of a parameter to whole numbers, 0 for most redrawn "
    "weights, so that only samples at its own weights reach what follows",
    "hf_levit": "in training mode its last batch norm turns the two samples of most batches into 1 and -1, so that few "
    "samples tell anything",
    "detr": "in its time fewer samples were taken than in training mode, where the bracket is closed: some singular "
    "values lie just below the threshold of 1e-8",
    "crepe-tiny": "its singular values fall through the threshold of 1e-8 without a gap, so that small derivatives "
    "cannot be told from none",
}


def closed(row: Mapping[str, Any]) -> bool:
    """Whether nothing was missed."""
    return row["at_most"] is not None and row["at_most"] <= row["found"]


def cells(row: Mapping[str, Any]) -> str:
    """One line of the table."""

    def number(value: int | None) -> str:
        return "" if value is None else f"{value:,}"

    exact = (number(row.get("exact_found")), number(row.get("exact_at_most")))
    verdict = "not attempted" if row["at_most"] is None else "closed" if closed(row) else "open"
    return (
        f"| {row['name']} | {row['mode']} | {row['scalars']:,} | {number(row['found'])} | {number(row['at_most'])} | "
        f"{exact[0]} | {exact[1]} | {row['seconds']:.1f} | {verdict} |"
    )


def render(rows: Sequence[Mapping[str, Any]]) -> str:
    """The page."""
    lines = ["| models | in all | tested | closed | open |", "| --- | ---: | ---: | ---: | ---: |"]
    families = sorted({row["family"] for row in rows})
    for family in [*families, "all"]:
        mine = [row for row in rows if family in (row["family"], "all")]
        tested = [row for row in mine if row["at_most"] is not None]
        good = sum(map(closed, tested))
        lines.append(f"| {family} | {len(mine)} | {len(tested)} | {good} | {len(tested) - good} |")
    wide = [row for row in rows if row["at_most"] is not None and not closed(row)]
    if wide:
        lines += ["", "## Open brackets", ""]
        for row in wide:
            left = [entry["tensor"] for entry in row["left_over"] or []]
            why = OPEN.get(row["name"], f"left over: {', '.join(left[:4])}" if left else "not explained yet")
            lines.append(f"* {row['name']}, {row['mode']} ({row['found']:,} found, at most {row['at_most']:,}): {why}")
    skipped = [row for row in rows if row["at_most"] is None]
    if skipped:
        lines += ["", "## Not attempted", ""]
        reasons = Counter((row["evidence"].removeprefix("not attempted: "), row["name"]) for row in skipped)
        lines += [f"* {name}: {reason}" for reason, name in sorted(reasons)]
    lines += ["", "## Every model", ""]
    lines += ["| model | mode | scalars | found | at most | exact | exact at most | seconds | bracket |"]
    lines += ["| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | --- |"]
    for row in sorted(rows, key=lambda row: (row["family"], row["name"], row["mode"])):
        lines.append(cells(row))
    return HEAD + "\n".join(lines) + "\n"
