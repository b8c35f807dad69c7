"""The page of all experiments, written from their records alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from pathspace.files import replacing
from pathspace.training.experiments.reproduce.holm import LEVEL
from pathspace.training.experiments.reproduce.record import Record, Table

HEAD = """# The papers' experiments, rerun

`pathspace reproduce` writes this page from the records in `{folder}/*.json`; `pathspace reproduce page` writes it
again. All numbers and verdicts are computed from the records:

* An *arm* is a method with its options. All arms of an experiment have the same data, budget and batches, and equally
  many learning rates to choose from. Rates are chosen on validation data, with seeds of their own; the seeds reported
  here had no part in the choice.
* Figures are means over the reported seeds with a 95 % t-interval. Arms are compared seed by seed.
* A claim states that a quantity is positive. The verdict is **better** or **worse** if the quantity differs from zero
  (paired t-test, column *p, zero*), **no difference that matters** if it lies within a margin on both sides of zero
  (two one-sided tests, column *p, margin*), and **undecided** otherwise. The margin is the effect that the paper
  prints, or 5 % (0.05) if the paper prints none. A difference can exist and be smaller than the margin; then the
  verdict says so.
* The p-values of both tests are corrected for the number of claims of the experiment (Holm). At most one experiment in
  twenty finds a difference where there is none; at most one in twenty misses a difference as large as the margin.
* For an undecided claim, the page says how many repetitions would decide it with a probability of 80 %. The number
  follows from the measured spread. It is enough for an effect as large as the margin and for no effect.
* A run that diverged counts with the error of a useless model, which the task defines. If an arm is no better than a
  simple method (logistic regression, a table of pairs of characters), claims about it are undecided.
* If other data replaces the paper's, a verdict is about the direction of the effect on this data, not about its size.
* The intervals describe the chance in initialisation and in the order of batches. All seeds share one test set, so the
  intervals leave out the chance in its choice. With fewer than 10,000 test items, this matters. Newer records cut the
  test set into 20 parts. The column *other items* is the 95 % interval for other seeds and other test items: the
  variance over the parts is added to that over the seeds. The verdict is that of the seeds; it ends with *on these test
  items* if the second interval contains zero.
* Another processor adds numbers in another order. Its results differ as much as those of another seed. Records name
  their versions, and newer records also commit and processor.

Some choices were made after test results had been seen. They weaken the conclusions that depend on them:

* translation: the claim about efficiency is the paper's own, but it was added after its curves had been seen. The
  penalty shrinks the directions. This alone makes efficiencies positive, so the claim says little about the theory.
* image: the smallest tau was added after the results of the two larger ones. Validation data chose Adam over momentum.
* optimizers: gauge-fixed AdamW first ended 7 % higher than AdamW on the adapters. Then weights before zeros were made 4
  times as large in the gauge, and all gauge-fixed runs on adapters were repeated. Other tasks have no such weights.
  Networks were widened and runs made longer after some of them had ended above the linear model; all of these runs were
  repeated, for every contender.
* rcnn: two recurrent layers became four, and 6 passes became 8, after a test result of the smaller setting (11 %) had
  been seen. Both arms have the new setting.
* smnist, race, toy, language, translation and depth: one or two learning rates were added to a grid if the choice lay
  at its edge. A choice at the edge of a grid (marked *) weakens a comparison.

The default scale fits on one thread of a small computer. `--scale fetched` takes hours and uses data that
`pathspace data fetch` downloads; an interrupted run continues where it stopped. `--scale full` runs the paper's own
setting on the paper's data, in the folder that `--data` names; its options are tested, but it has not been run to the
end. Minutes depend on the other programs on the computer; only the runs of `time` had it to themselves.
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
    columns: tuple[str, ...] = (
        "claim",
        "paper",
        "ours",
        "95 % interval",
        "repetitions",
        "p, zero",
        "p, margin",
        "verdict",
    )
    rows = tuple(_claim(claim) for claim in record.claims)
    if any(_with_items(claim) for claim in record.claims):
        columns = (*columns[:4], "other items", *columns[4:])
        rows = tuple(
            (*row[:4], _interval(claim, "items_low", "items_high"), *row[4:])
            for row, claim in zip(rows, record.claims, strict=True)
        )
    claims = Table(columns, rows)
    pieces = [
        f"## {record.name}\n",
        f"{record.title}. {record.source}.\n",
        f"```console\n$ pathspace reproduce {record.name}{scale}\n```\n",
        f"All runs together took {record.seconds / 60:.1f} minutes on one thread.\n",
        *([f"Computed with {_named(record.versions)}.\n"] if "processor" in record.versions else []),
        "**The paper**\n",
        markdown_table(record.paper),
        "**Ours**\n",
        markdown_table(record.ours),
        "**Claims**\n",
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
    kept = {key: [one[:12] if key == "commit" else one for one in value.split(", ")] for key, value in versions.items()}
    return ", ".join(f"{key} {' and '.join(values)}" for key, values in kept.items())


def _claim(claim: dict[str, Any]) -> tuple[str, ...]:
    tests = (_p(claim["corrected"]), _p(claim["equivalence"]))
    return (
        *(claim["statement"], _show(claim, "printed"), _show(claim, "mean"), _interval(claim, "low", "high")),
        *(f"{claim['count']}", *tests, _verdict(claim)),
    )


def _show(claim: dict[str, Any], key: str) -> str:
    value = claim.get(key)
    return "–" if value is None else format(value, claim["pattern"])


def _interval(claim: dict[str, Any], low: str, high: str) -> str:
    return "–" if claim.get(low) is None else f"{_show(claim, low)} to {_show(claim, high)}"


def _with_items(claim: dict[str, Any]) -> bool:
    return claim.get("items_low") is not None


def _p(value: float | None) -> str:
    return "–" if value is None else "< 0.001" if value < 0.001 else f"{value:.3f}"


def _verdict(claim: dict[str, Any]) -> str:
    why = ""
    if claim["verdict"] == "undecided":
        why = (
            f": {claim['nothing']}"
            if claim["nothing"]
            else f", needs about {claim['needed']} repetitions" * bool(claim["needed"])
        )
    elif claim["verdict"] in ("better", "worse") and (claim["equivalence"] or 0) < LEVEL:
        why = ", by less than the margin"
    if (
        claim["verdict"] in ("better", "worse")
        and _with_items(claim)
        and claim["items_low"] <= 0 <= claim["items_high"]
    ):
        why += ", on these test items"
    return f"**{claim['verdict']}**{why}"


def markdown_table(table: Table) -> str:
    """A table in Markdown; columns of numbers are aligned right, unless they come first.

    Example:
        >>> print(markdown_table(Table(("a", "b", "c"), (("1", "2", "two"),))))
        | a | b | c |
        | --- | ---: | --- |
        | 1 | 2 | two |
        <BLANKLINE>
    """

    def line(cells: Iterable[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

    def numbers(cells: Iterable[str]) -> bool:
        return not any(cell[:1].isalpha() or cell[:1] in ("*", "[") for cell in cells)

    columns = list(zip(*table.rows, strict=True))
    rule = line(["---", *("---:" if numbers(cells) else "---" for cells in columns[1:])])
    return "\n".join([line(table.columns), rule, *(line(row) for row in table.rows), ""])
