"""The brackets as a page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.figures import DOCS, markdown

DATA, PAGE = DOCS / "data" / "brackets.json", DOCS / "brackets.md"
HEAD = """# Brackets

A bracket says how many units were found, and how many can exist at most (an
[upper bound](reduction-graph.md#an-upper-bound-on-units)). This page lists the brackets of the models of
`tests/zoo` and of [trained networks](trained.md). A bracket is *closed* if both numbers are equal: then the rules
missed no scale symmetry of rows and columns. Models that accept images of any size are measured on small images.

`python -m zoo.brackets` in `tests/` measures the models that are missing and writes this page from
[`data/brackets.json`](data/brackets.json). Times are seconds on a shared core, tracing included. Every model
of the zoo is in the table. The time for the samples of one model is limited (`--seconds`): the test is not attempted if
they would take longer.

*Exact* units hold with every epsilon unchanged; the same test bounds their number. An epsilon of 1e-12, as in
BERT, ALBERT and XLM-RoBERTa, changes derivatives by less than the test can distinguish from zero: there this bracket is
open.

"""  # noqa: E501
# why a bracket is open: name of the model -> a sentence
OPEN: dict[str, str] = {
    "hf_xlnet": (
        "features of relative positions with the lowest frequencies are equal at all positions up"
        " to 1e-7, and softmax ignores equal terms: the test counts two singular values of 8e-9 as"
        " zero"
    ),
    "hf_xlstm": (
        "the scale of a head's keys cancels in its quotient unless the quotient reaches its bound;"
        " no sample reaches it in training mode, a few reach it in evaluation mode, where the"
        " bracket is closed"
    ),
    "deeplab": (
        "the pooled branch normalises one number per image over the batch, so its bias has an"
        " effect only where a rectifier separates the images, which happens in few samples"
    ),
    "silero-vad": (
        "loud inputs saturate the gates of its LSTM; the singular values decrease without a gap, so"
        " the test cannot distinguish small derivatives from zero"
    ),
    "act_threshold_moved": (
        "its threshold is above 0: the values that pass are homogeneous, only the jump is not, "
        "and derivatives do not show jumps"
    ),
    "act_logit_scale": (
        "exp(log|h|) is |h|, whose scale is free; the rules read the operations one by one, and a "
        "logarithm fixes the scale"
    ),
    "orthogonal_mlp": (
        "the parametrisation rounds the diagonal of a parameter to whole numbers, 0 for most random"
        " weights, so only samples at its own weights reach the following layers"
    ),
    "hf_levit": (
        "in training mode its last batch norm maps the two samples of most batches to 1 and -1, so"
        " few samples give information"
    ),
    "detr": (
        "its time limit allowed fewer samples than in training mode, where the bracket is closed:"
        " some singular values are just below the threshold of 1e-8"
    ),
    "hf_levit eval": (
        "its singular values cross the threshold of 1e-8 without a gap, so the test cannot"
        " distinguish small derivatives from zero"
    ),
    "hf_glpn": (
        "its singular values cross the threshold of 1e-8 without a gap, at queries and keys of the"
        " last stages, so the test cannot distinguish small derivatives from zero"
    ),
    "crepe-tiny": (
        "its singular values cross the threshold of 1e-8 without a gap, so the test cannot"
        " distinguish small derivatives from zero"
    ),
}


def closed(row: Mapping[str, Any]) -> bool:
    """Whether nothing was missed."""
    return row["at_most"] is not None and row["at_most"] <= row["found"]


def cells(row: Mapping[str, Any]) -> list[str]:
    """One line of the table."""
    keys = ("scalars", "found", "at_most", "exact_found", "exact_at_most")
    numbers = ["" if row.get(key) is None else f"{row[key]:,}" for key in keys]
    verdict = "not attempted" if row["at_most"] is None else "closed" if closed(row) else "open"
    return [row["name"], row["mode"], *numbers, f"{row['seconds']:.1f}", verdict]


def render(rows: Sequence[Mapping[str, Any]]) -> str:
    """The page."""
    counts, families = [], sorted({row["family"] for row in rows})
    for family in [*families, "all"]:
        mine = [row for row in rows if family in (row["family"], "all")]
        tested = [row for row in mine if row["at_most"] is not None]
        good = sum(map(closed, tested))
        numbers = (len(mine), len(tested), good, len(tested) - good)
        counts.append([family, *map(str, numbers)])
    lines = [markdown("models | in all | tested | closed | open", counts)]
    wide = [row for row in rows if row["at_most"] is not None and not closed(row)]
    if wide:
        lines += ["", "## Open brackets", ""]
        for row in wide:
            left = [entry["tensor"] for entry in row["left_over"] or []]
            why = OPEN.get(f"{row['name']} {row['mode']}") or OPEN.get(
                row["name"], f"left over: {', '.join(left[:4])}" if left else "not explained yet"
            )
            lines.append(
                f"* {row['name']}, {row['mode']} ({row['found']:,} found, at most"
                f" {row['at_most']:,}): {why}"
            )
    skipped = [row for row in rows if row["at_most"] is None]
    if skipped:
        lines += ["", "## Not attempted", ""]
        reasons = Counter(
            (row["evidence"].removeprefix("not attempted: "), row["name"]) for row in skipped
        )
        lines += [f"* {name}: {reason}" for reason, name in sorted(reasons)]
    lines += [
        "",
        "## Every model",
        "",
        "| model | mode | scalars | found | at most | exact | exact at most | seconds | bracket |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | --- |",
    ]
    every = sorted(rows, key=lambda row: (row["family"], row["name"], row["mode"]))
    lines += [f"| {' | '.join(cells(row))} |" for row in every]
    return HEAD + "\n".join(lines) + "\n"
