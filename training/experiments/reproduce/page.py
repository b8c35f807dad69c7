"""The page of all experiments, written from their records alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from pathspace.files import replacing
from pathspace.training.experiments.reproduce.record import Record, Table

HEAD = """# The papers' experiments, rerun

This page is written by `pathspace reproduce` from the records in `{folder}/*.json`; `pathspace reproduce page` writes
it again. No number on it is typed by hand, and no verdict is a matter of taste:

* All arms of an experiment have the same data, budget, batches and number of learning rates to choose from. Rates are
  chosen on validation data with seeds of their own; the seeds reported here had no part in the choice.
* Figures are means over those seeds with a 95 % t-interval. Arms are compared seed by seed (paired t-test), and
  p-values are corrected for the number of claims of the experiment (Holm).
* A claim is **confirmed** if it holds with a corrected p below 0.05; **not confirmed** if the 95 % interval lies wholly
  below what the paper prints, or below zero; otherwise it is **inconclusive at this scale**.
* The intervals describe the chance in initialisation and in the order of batches. Test sets are small at this scale and
  the same for all seeds, which no number of seeds makes up for.

Some choices were made after test results had been seen, and weigh on what they touch:

* translation: the claim about efficiency, the paper's own, was added when its curves were known. The penalty shrinks
  the directions, and shrinking alone makes efficiencies positive, so it says little about the theory.
* image: the smallest tau was added after the results of the larger two. Adam in place of momentum came from validation.
* smnist, toy, language and depth: the grids were widened by a rate or two where choices lay at their edge. A choice at
  the edge of a grid (marked *) makes a comparison weaker.

The scale is what fits on one thread of a small computer. `--scale full` runs the paper's own setting where its data is
given with `--data`; its options are tested, its length has not been run. Minutes
vary with what else a machine does: all runs but those of `time` shared theirs.
"""


def render(records: Iterable[Record], folder: str = "reproduction") -> str:
    """Return the page.

    Args:
        records: in the order of the page.
        folder: where the pictures are, relative to the page.

    Returns:
        Markdown.

    Example:
        >>> render([]).startswith("# The papers' experiments, rerun")
        True
    """
    known = list(records)
    parts = [HEAD.format(folder=folder)]
    if known:
        parts.append("## Verdicts\n\n" + _verdicts(known))
    parts += [_section(record, folder) for record in known]
    return "\n".join(parts)


def write_page(records: Iterable[Record], path: Path) -> None:
    """Write the page beside the folder of its records.

    Args:
        records: in the order of the page.
        path: the page.

    Raises:
        InputError: the file cannot be written.
    """
    with replacing(path) as temporary:
        temporary.write_text(render(records, path.stem), encoding="utf-8")


def _verdicts(records: Sequence[Record]) -> str:
    rows = [
        (f"[{record.name}](#{record.name})", claim["statement"], f"**{claim['verdict']}**")
        for record in records
        for claim in record.claims
    ]
    return markdown_table(Table(("experiment", "claim", "verdict"), tuple(rows)))


def _section(record: Record, folder: str) -> str:
    scale = "" if record.scale == "embedded" else " --scale full --data DIR"
    claims = Table(
        ("claim", "paper", "ours", "95 % interval", "p (corrected)", "verdict"),
        tuple(_claim(claim) for claim in record.claims),
    )
    pieces = [
        f"## {record.name}\n",
        f"{record.title}. {record.source}.\n",
        f"```console\n$ pathspace reproduce {record.name}{scale}\n```\n",
        f"All runs together took {record.seconds / 60:.1f} minutes by the clock, on one thread.\n",
        "**The paper**\n",
        markdown_table(record.paper),
        "**Ours**\n",
        markdown_table(record.ours),
        "**Claims on trial**\n",
        markdown_table(claims),
        f"![{record.caption}]({folder}/{record.name}.png)\n",
        f"*{record.caption}*\n",
        "**Protocol**\n",
        *(f"* {sentence}" for sentence in record.protocol),
        "\n**What differs from the paper**\n",
        *(f"* {sentence}" for sentence in record.differs),
        "",
    ]
    return "\n".join(pieces)


def _claim(claim: dict[str, Any]) -> tuple[str, ...]:
    def show(key: str) -> str:
        value = claim[key]
        return "–" if value is None else format(value, claim["pattern"])

    p = claim["corrected"]
    interval = "–" if claim["low"] is None else f"{show('low')} to {show('high')}"
    told = "–" if p is None else "< 0.001" if p < 0.001 else f"{p:.3f}"
    return (claim["statement"], show("printed"), show("mean"), interval, told, f"**{claim['verdict']}**")


def markdown_table(table: Table) -> str:
    """A table in Markdown.

    Example:
        >>> print(markdown_table(Table(("a", "b"), (("1", "2"),))))
        | a | b |
        | --- | ---: |
        | 1 | 2 |
        <BLANKLINE>
    """

    def line(cells: Iterable[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

    rule = line(["---", *(["---:"] * (len(table.columns) - 1))])
    return "\n".join([line(table.columns), rule, *(line(row) for row in table.rows), ""])
