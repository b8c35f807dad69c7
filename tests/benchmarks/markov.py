"""The chain paper's statements on trained networks: the figures of `docs/claims-markov.md`.

``PYTHONPATH=tests python -m benchmarks.markov --json docs/data/markov.json`` trains and measures
(about an hour on one core, with the data of ``pathspace data fetch fashion-mnist``), ``--page
FILE`` writes the figures of a run into the page. ``--rows FILE`` keeps each network's figures as
soon as they are there, and finds those of an earlier run.
"""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from statistics import fmean, stdev
from typing import Annotated, Any

import torch
import typer

from benchmarks.figures import page_of, write
from benchmarks.markov_run import BATCH, NETWORKS, STEPS, TAUS, measure, summary
from pathspace.diagnostics import MarkovChain
from pathspace.training.experiments.intervals import Interval, t_interval

NAME, PAGE = "markov", "claims-markov.md"
WHAT = {
    "MLP": "an MLP",
    "CNN": "a CNN with batch norm and ReLU after the sum",
    "transformer": "a pre-norm transformer",
}
# with the penal connection, where it is compared with chains without
PENALISED = 3e-4
Rows = list[dict[str, Any]]


def column(rows: Rows, key: str) -> list[float]:
    return [row[key] for row in rows]


def percent(rows: Rows, key: str) -> str:
    return f"{100 * fmean(column(rows, key)):.0f}"


def spread(rows: Rows, key: str, sign: str = "") -> str:
    """Mean and standard deviation."""
    return f"{fmean(column(rows, key)):{sign}.3f} ± {stdev(column(rows, key)):.3f}"


def render(found: dict[str, Any]) -> str:
    """The page's tables, from the figures of a run."""

    def of(name: str, tau: float, further: bool = False) -> Rows:
        """The rows of a network, with those of the further seeds if asked."""
        rows = [*found["rows"], *(found["further"] if further else ())]
        return [row for row in rows if row["network"] == name and row["tau"] == tau]

    plain = {name: of(name, 0.0) for name in NETWORKS}
    trained = {name: [row["trained"] for row in rows] for name, rows in plain.items()}
    # each network, at the start and trained
    whens = [row[w] for rows in plain.values() for row in rows for w in ("start", "trained")]
    assert all(one["cancelling_tau_follows_product"] for one in whens)

    def by_net(key: str, when: str = "trained") -> str:
        rows = ([row[when] for row in rows] for rows in plain.values())
        return "/".join(percent(some, key) for some in rows) + " %"

    def over(key: str) -> str:
        pairs = ([row[key] for row in rows] for rows in trained.values())
        return ", ".join(f"{sum(a for a, _ in p):,} of {sum(b for _, b in p):,}" for p in pairs)

    def verdict(key: str) -> str:
        pairs = [row[key] for rows in trained.values() for row in rows]
        return "**holds**" if all(a == b for a, b in pairs) else "**fails**"

    known = [
        [row for row in rows if row["premise_on_convex"] is not None] for rows in trained.values()
    ]
    folds = [[percent(rows, "fold_at_start") for rows in plain.values()]]
    folds += [[percent(of(name, tau), "fold") for name in NETWORKS] for tau in (0.0, PENALISED)]
    before, after, strong = (sum(map(float, shares)) for shares in folds)
    won = gains({name: [of(name, t, True) for t in (0.0, PENALISED)] for name in NETWORKS})
    pairs = [[column(of(n, t), "efficiency") for t in (0.0, PENALISED)] for n in NETWORKS]
    signs = [[fmean(column(of(name, tau), key)) for key in ("efficiency", "batch")]
             for name, tau in product(NETWORKS, TAUS)]  # fmt: skip
    return page_of(
        "markov",
        found=found,
        nets=list(NETWORKS),
        kinds=WHAT,
        nodes={name: nodes(name) for name in NETWORKS},
        batch=BATCH,
        steps=STEPS,
        taus=TAUS,
        verdict=verdict,
        over=over,
        by_net=by_net,
        percent=percent,
        spread=spread,
        of=of,
        every=lambda key: column(whens, key),
        mlp=lambda key: fmean(column(trained["MLP"], key)),
        signed=lambda key: ", ".join(f"{fmean(column(r, key)):+.2f}" for r in trained.values()),
        ideal=lambda i: [fmean(row["ideal"][i] for row in rows) for rows in trained.values()],
        agreement=max(abs(one["corrected"] / one["defect"] - 1) for one in whens),
        convex=[percent(rows, "premise_on_convex") for rows in known if rows],
        raised=sum(all(b > a for a, b in zip(*pair, strict=True)) for pair in pairs),
        gains=won,
        judgement=judgement(won),
        folds=folds,
        by_training=before - after > after - strong,
        opposed=sum(efficiency * batch < 0 for efficiency, batch in signs),
    )


def nodes(name: str) -> int:
    """How many nodes the chain of a network has (two images, as 8 rows of 8 pixels)."""
    return len(MarkovChain.trace(NETWORKS[name]().double(), torch.zeros(2, 8, 8).double()))


def gains(pairs: dict[str, list[Rows]]) -> dict[str, Interval]:
    """Accuracy with the penal connection over that without, in points: 95 % intervals."""
    accuracy = {name: [column(rows, "accuracy") for rows in pair] for name, pair in pairs.items()}
    return {
        name: t_interval([100 * (b - a) for a, b in zip(*pair, strict=True)])
        for name, pair in accuracy.items()
    }


def judgement(won: dict[str, Interval]) -> str:
    """The verdict that the intervals allow."""
    better = [one.mean - one.half_width > 0 for one in won.values()]
    if any(one.mean + one.half_width < 0 for one in won.values()):
        return "depends on the network" if any(better) else "worse where a difference is found"
    return "holds here" if all(better) else "not established"


def main(
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Train, measure, and keep the figures here.")
    ] = None,
    page: Annotated[
        Path | None, typer.Option(help="Write the figures of this file into the page instead.")
    ] = None,
    rows: Annotated[
        Path | None, typer.Option(help="Keep and find each network's figures here.")
    ] = None,
    seeds: int = 5,
    steps: int = 1500,
) -> None:
    """The chain paper's statements, measured."""
    if page is not None:
        write(PAGE, NAME, render(json.loads(page.read_text())))
        return
    torch.set_num_threads(1)
    found = summary(*measure(seeds, steps, list(NETWORKS), rows), seeds, steps)
    print(render(found))
    if json_file is not None:
        json_file.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
