"""The page of all experiments, written from their records alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from pathspace.files import replacing
from pathspace.training.experiments.reproduce.holm import LEVEL
from pathspace.training.experiments.reproduce.record import Record, Table

HEAD = """# The papers' experiments, rerun

This page is written by `pathspace reproduce` from the records in `{folder}/*.json`; `pathspace reproduce page` writes
it again. No number on it is typed by hand, and no verdict is a matter of taste:

* All arms of an experiment have the same data, budget, batches and number of learning rates to choose from. Rates are
  chosen on validation data with seeds of their own; the seeds reported here had no part in the choice.
* Figures are means over those seeds with a 95 % t-interval. Arms are compared seed by seed.
* A claim says that a quantity is positive. The verdict is **better** or **worse** where it differs from zero (paired
  t-test), **no difference that matters** where it lies within a margin on both sides of zero (two one-sided tests), and
  **undecided** otherwise. The margin is the effect that the paper prints, and 5 % (or 0.05) where it prints none. A
  difference can be there and be smaller than the margin; the verdict then says so.
* Both kinds of p-values are corrected for the number of claims of the experiment (Holm). At most one experiment in
  twenty finds a difference where there is none; at most one in twenty misses one as large as the margin.
* An undecided claim says how many repetitions decide it with a probability of 80 %. They follow from the spread that
  was found, for an effect of the size of the margin as well as for none.
* A run that diverged counts with the error that its task calls hopeless. An arm that is no better than simple means
  (logistic regression, a table of pairs of characters) decides nothing: such claims are undecided.
* Where the data is a stand-in for the paper's, a verdict is about the direction on this data, and not about the size.
* The intervals describe the chance in initialisation and in the order of batches. Test sets are the same for all seeds,
  which no number of seeds makes up for; where there are fewer than 10,000 test items, that weighs.
* Runs on another processor end apart, as those of another seed do, because sums are taken in another order. There is no
  determinism across processors. Every record names commit, processor and libraries.

Some choices were made after test results had been seen, and weigh on what they touch:

* translation: the claim about efficiency, the paper's own, was added when its curves were known. The penalty shrinks
  the directions, and shrinking alone makes efficiencies positive, so it says little about the theory.
* image: the smallest tau was added after the results of the larger two. Adam in place of momentum came from validation.
* smnist, toy, language and depth: the grids were widened by a rate or two where choices lay at their edge. A choice at
  the edge of a grid (marked *) makes a comparison weaker.

The scale is what fits on one thread of a small computer. `--scale fetched` takes hours, and data that
`pathspace data fetch` brings; an interrupted run goes on where it was. `--scale full` runs the paper's own setting
where its data is given with `--data`; its options are tested, its length has not been run. Minutes vary with what else
a machine does: all runs but those of `time` shared theirs.
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
        (f"[{record.name}](#{record.name})", claim["statement"], _verdict(claim))
        for record in records
        for claim in record.claims
    ]
    table = markdown_table(Table(("experiment", "claim", "verdict"), tuple(rows)))
    open_claims = sum(claim["verdict"] == "undecided" for record in records for claim in record.claims)
    return f"{table}\n{len(rows)} claims, {open_claims} of them undecided.\n"


def _section(record: Record, folder: str) -> str:
    scale = {"embedded": "", "fetched": " --scale fetched"}.get(record.scale, " --scale full --data DIR")
    claims = Table(
        ("claim", "paper", "ours", "95 % interval", "repetitions", "p, zero", "p, margin", "verdict"),
        tuple(_claim(claim) for claim in record.claims),
    )
    pieces = [
        f"## {record.name}\n",
        f"{record.title}. {record.source}.\n",
        f"```console\n$ pathspace reproduce {record.name}{scale}\n```\n",
        f"All runs together took {record.seconds / 60:.1f} minutes by the clock, on one thread.\n",
        *([f"Computed with {_named(record.versions)}.\n"] if "processor" in record.versions else []),
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


def _named(versions: dict[str, str]) -> str:
    kept = {key: value[:12] if key == "commit" else value for key, value in versions.items()}
    return ", ".join(f"{key} {value}" for key, value in kept.items())


def _claim(claim: dict[str, Any]) -> tuple[str, ...]:
    def show(key: str) -> str:
        value = claim[key]
        return "–" if value is None else format(value, claim["pattern"])

    interval = "–" if claim["low"] is None else f"{show('low')} to {show('high')}"
    tests = (_p(claim["corrected"]), _p(claim["equivalence"]))
    return (
        *(claim["statement"], show("printed"), show("mean"), interval, f"{claim['count']}"),
        *(*tests, _verdict(claim)),
    )


def _p(value: float | None) -> str:
    return "–" if value is None else "< 0.001" if value < 0.001 else f"{value:.3f}"


def _verdict(claim: dict[str, Any]) -> str:
    why = ""
    if claim["verdict"] == "undecided":
        why = (
            f": {claim['nothing']}" if claim["nothing"] else f", needs about {claim['needed']}" * bool(claim["needed"])
        )
    elif claim["verdict"] in ("better", "worse") and (claim["equivalence"] or 0) < LEVEL:
        why = ", by less than the margin"
    return f"**{claim['verdict']}**{why}"


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
