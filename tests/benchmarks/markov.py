"""The chain paper's statements on trained networks: the figures of `docs/claims-markov.md`.

``PYTHONPATH=tests python -m benchmarks.markov --json docs/data/markov.json`` trains and measures
(about an hour on one core, with the data of ``pathspace data fetch fashion-mnist``), ``--page
FILE`` writes the figures of a run into the page. ``--rows FILE`` keeps each network's figures as
soon as they are there, and finds those of an earlier run.
"""

# ruff: noqa: E501

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from benchmarks.figures import write
from benchmarks.markov_run import BATCH, LENGTHS, NETWORKS, STEPS, TAUS, measure, summary
from pathspace.diagnostics import MarkovChain
from pathspace.training.experiments.intervals import Interval, t_interval

NAME, PAGE = "markov", "claims-markov.md"
WHAT = {
    "MLP": "an MLP",
    "CNN": "a CNN with batch norm and ReLU after the sum",
    "transformer": "a pre-norm transformer",
}


def spread(values: list[float], form: str = ".3f", factor: float = 1.0) -> str:
    """Mean and standard deviation."""
    mean, error = factor * statistics.fmean(values), factor * statistics.stdev(values)
    return f"{mean:{form}} ± {error:{form.removeprefix('+')}}"


def percent(values: list[float]) -> str:
    return f"{100 * statistics.fmean(values):.0f}"


def render(found: dict[str, Any]) -> str:
    """The page's tables, from the figures of a run."""
    plain = {name: of(found, name, 0.0) for name in NETWORKS}

    def by_net(key: str, when: str = "trained") -> str:
        return "/".join(percent([row[when][key] for row in rows]) for rows in plain.values()) + " %"

    def over(key: str) -> str:
        pairs = [[row["trained"][key] for row in rows] for rows in plain.values()]
        return ", ".join(f"{sum(a for a, _ in p):,} of {sum(b for _, b in p):,}" for p in pairs)

    def signed(key: str) -> str:
        return ", ".join(
            f"{statistics.fmean([row['trained'][key] for row in rows]):+.2f}"
            for rows in plain.values()
        )

    def verdict(key: str) -> str:
        pairs = [row["trained"][key] for rows in plain.values() for row in rows]
        return "**holds**" if all(a == b for a, b in pairs) else "**fails**"

    def largest(key: str) -> float:
        return max(one[key] for one in whens)

    def fold(tau: float) -> list[str]:
        return [percent(column(of(found, name, tau), "fold")) for name in NETWORKS]

    v, three = found["vectors"], found["vectors"]["lemma3"]
    mlp_defect = [
        statistics.fmean([row["trained"][key] for row in plain["MLP"]])
        for key in ("defect", "printed", "corrected")
    ]
    # each network, at the start and trained
    whens = [row[w] for rows in plain.values() for row in rows for w in ("start", "trained")]
    agreement = max(abs(one["corrected"] / one["defect"] - 1) for one in whens)
    convex = []
    for rows in plain.values():
        known = [row["trained"]["premise_on_convex"] for row in rows]
        known = [value for value in known if value is not None]
        convex += [percent(known)] if known else []
    kept = [one["kept_over_ignored"] for one in whens]
    assert all(one["cancelling_tau_follows_product"] for one in whens)
    before = [percent(column(rows, "fold_at_start")) for rows in plain.values()]
    after, strong = fold(0.0), fold(3e-4)
    lines = [*settings(found), "", "| statement | verdict | measured |", "| --- | --- | --- |"]

    def add(statement: str, verdict: str, measured: str) -> None:
        lines.append(f"| {statement} | {verdict} | {measured} |")

    mixed = {mu: f"{100 * value:.3g} %" for mu, value in v["lemma1"].items()}
    add("Lemma 1: mixtures with `mu >= 0` stay ideal", "**needs mu <= 1**",
        f"squared distance in four dimensions, 10,000 random pairs: {mixed['0.3']} at mu = 0.3, {mixed['1']} at mu = 1, {mixed['3']} at mu = 3")  # fmt: skip
    add("Definition 2 asks for both inequalities of the distance", "**no distance has the lower one**",
        f"squared norm violates it for {100 * v['definition2_lower_violated']:.0f} % of these pairs at mu = 1/2")  # fmt: skip
    add(
        "Lemma 2: delta-convex implies efficient",
        verdict("lemma2"),
        f"samples, eta = 1000: {over('lemma2')}",
    )
    add(
        "its converse",
        "fails, as the paper says",
        f"efficient samples that are delta-convex: {over('converse')}",
    )
    add("(10): `eps ~ 1 + eta eps'`", "**wrong order**",
        f"eta = 1e-3, trained MLP: eps - 1 = {mlp_defect[0]:.1e}, printed {mlp_defect[1]:+.1e}; `1 - eta^2/2 mean((1-c^2)/\\|\\|z\\|\\|^2)` gives {mlp_defect[2]:.1e}; the two agree to {100 * agreement:.1g} % on every network")  # fmt: skip
    small = min(one["convex_small"] for one in whens)
    add("Definition 4 with `d = z - eta g^` selects good chains", "**vacuous for small eta**",
        f"eta = 1e-3: delta-convex are at least {100 * small:.0f} % of the samples of every network, trained or not; eta = 1000: {by_net('convex_large')}")  # fmt: skip
    add("\"Assume `\\|\\|g\\|\\| >= 1`\"", "**rarely true**",
        f"share of (node, sample) pairs: {by_net('gradient_above_one', 'start')} at the start, {by_net('gradient_above_one')} trained")  # fmt: skip
    add("(6): the penalty makes chains efficient", "**the reverse**",
        f"a step against the exact gradient lowers the cosine in {v['cosine_lowered']} of 200 random pairs")  # fmt: skip
    add("(11), (22): `tau z` approximates the penalty's gradient", "**no tau does**",
        f"exact gradient orthogonal to z (cosine at most {largest('orthogonality'):.0e}), least-squares tau at most {largest('best_tau'):.0e}")  # fmt: skip
    add("Appendix C: the ignored term is small", "**it is the larger one**",
        f"kept over ignored term = abs cos(z, g): {min(kept):.2f}-{max(kept):.2f} on average")  # fmt: skip
    add("Appendix C: a positive tau cancels the other term", "**negative on efficient nodes**",
        "the cancelling tau has the sign of <z, g>, for every sample of every network")  # fmt: skip

    def numbers(key: str) -> str:
        return ", ".join(f"{three[str(length)][key]:.2g}" for length in LENGTHS)

    add("Lemma 3, printed (full steps)", "**false**",
        f"error {numbers('printed_error')} over bounds {numbers('printed_bound')} at L = 50, 200, 1000; and a delta-convex chain that oscillates")  # fmt: skip
    add("Lemma 3, corrected (step `(1+a) log L/(delta L)`, one-point convexity)", "**holds**",
        f"error {numbers('error')} under bounds {numbers('bound')}")  # fmt: skip
    add(
        "Appendix D: `l(x - eta g) < l(x)` in most situations", "**a statement about eta**", "below"
    )
    add(
        "Lemma 4 with inner products, given (24)",
        verdict("lemma4_products"),
        f"pairs: {over('lemma4_products')}",
    )
    add("Lemma 4 with cosines, as stated", verdict("lemma4_cosines"),
        f"pairs with (24): {over('lemma4_cosines')}; {100 * v['lemma4_cosines']:.0f} % of random vectors")  # fmt: skip
    add("premise (24) follows from delta-convexity", "**no**",
        f"holds for {'/'.join(convex)} % of the nodes of convex chains (networks that have some)")  # fmt: skip
    add("image models are efficient without help (3.2)", "**depends on the network**",
        f"mean eps' trained: {signed('efficiency')}; share with every cosine positive: {by_net('all_positive')}")  # fmt: skip
    raised = raises(found)
    add("the penal connection raises eps' (3.1, Fig. 4)", f"**{'holds here' if raised == len(NETWORKS) else 'not always'}**",
        f"below: on {raised} of {len(NETWORKS)} networks at tau = 3e-4; at a stationary point a positive batch eps' is shrinkage, `sum <z, -g> = tau \\|\\|Z\\|\\|^2` and what later penalties pull, which a test confirms to 1e-6")  # fmt: skip
    add("it improves generalisation", f"**{judgement(found)}**", "below: " + generalises(found))
    by_training = sum(map(float, before)) - sum(map(float, after)) > sum(map(float, after)) - sum(
        map(float, strong)
    )
    add("random chains fold, penalised ones do not (F)", f"**{'training does most of it' if by_training else 'holds here'}**",
        f"steps that turn back, one sample: {'/'.join(before)} % at the start, {'/'.join(after)} % trained, {'/'.join(strong)} % trained with tau = 3e-4")  # fmt: skip
    lines += ["", f"Logistic regression on the same pixels is right on {100 * found['logistic']:.1f} % of the held-out samples.",
              "", "Share of (node, sample) pairs with a lower loss, trained networks, averaged over nodes and seeds (Appendix D; the rest",
              "of the chain run again):", "", "| step | MLP | CNN | transformer |", "| --- | --- | --- | --- |"]  # fmt: skip
    for i, (eta, relative) in enumerate(STEPS):
        label = f"length {eta:g}" if relative else f"`{eta:g} g`"
        cells = [
            f"{100 * statistics.fmean([row['trained']['ideal'][i] for row in rows]):.1f} %"
            for rows in plain.values()
        ]
        lines.append(f"| {label} | {' | '.join(cells)} |")
    lines += ["", "Shares below 100 % at `0.0001 g` are rounding: samples classified so well that the step changes the loss by less than",
              "float64 shows.", "",
              f"The penal connection, {found['seeds']} seeds, {found['held_out']:,} held-out samples, means and standard deviations. `eps'` is the mean over samples,",
              "\"batch\" is one cosine for the whole batch:", "",
              "| network | tau | test loss | accuracy | eps' | batch | all positive |",
              "| --- | --- | --- | --- | --- | --- | --- |"]  # fmt: skip
    for name in NETWORKS:
        for tau in TAUS:
            mine = of(found, name, tau)
            cells = [spread(column(mine, key), form) for key, form in
                     (("loss", ".3f"), ("accuracy", ".3f"), ("efficiency", "+.3f"), ("batch", "+.3f"))]  # fmt: skip
            lines.append(
                f"| {name if not tau else ''} | {tau:g} | {' | '.join(cells)} |"
                f" {percent(column(mine, 'all_positive'))} % |"
            )
    opposed = [
        (name, tau) for name in NETWORKS for tau in TAUS
        if statistics.fmean(column(of(found, name, tau), "efficiency")) * statistics.fmean(column(of(found, name, tau), "batch")) < 0
    ]  # fmt: skip
    lines += ["", f"Per sample and per batch disagree in sign in {len(opposed)} of {len(NETWORKS) * len(TAUS)} rows: say which one is plotted. A short run on a small",
              "task says nothing about ImageNet or WMT16; those tables were not rerun."]  # fmt: skip
    return "\n".join(lines) + "\n"


def settings(found: dict[str, Any]) -> list[str]:
    """What was trained, and on what."""
    name, size = found["data"].split(", ")
    # (two images, as 8 rows of 8 pixels)
    networks = ", ".join(
        f"{WHAT[key]} ({len(MarkovChain.trace(make().double(), torch.zeros(2, 8, 8).double()))} nodes)"
        for key, make in NETWORKS.items()
    )
    return [
        f"{len(NETWORKS)} residual networks were trained on {found['trained_on']:,} images of {name} at {size}, in float64:",
        f"{networks}. Training takes",
        f"{found['steps']:,} Adam steps with batches of {BATCH}, for {found['seeds']} seeds. The statements are checked on {found['checked']:,} test images for each seed, and",
        f"counts are summed over seeds. Lists have the order {', '.join(NETWORKS)}.",
    ]


def of(found: dict[str, Any], name: str, tau: float, further: bool = False) -> list[dict[str, Any]]:
    """The rows of a network, with those of the further seeds if asked."""
    rows = [*found["rows"], *(found["further"] if further else ())]
    return [row for row in rows if row["network"] == name and row["tau"] == tau]


def column(rows: list[dict[str, Any]], key: str) -> list[float]:
    return [row[key] for row in rows]


def raises(found: dict[str, Any]) -> int:
    """On how many networks eps' at tau = 3e-4 is above that of tau = 0 for every seed."""
    return sum(
        all(b > a for a, b in zip(column(of(found, n, 0.0), "efficiency"), column(of(found, n, 3e-4), "efficiency"), strict=True))
        for n in NETWORKS
    )  # fmt: skip


def gains(found: dict[str, Any]) -> dict[str, Interval]:
    """Accuracy at tau = 3e-4 over that at 0, in points, paired by seed: 95 % intervals."""
    result = {}
    for name in NETWORKS:
        without, having = (
            column(of(found, name, tau, further=True), "accuracy") for tau in (0.0, 3e-4)
        )
        result[name] = t_interval([100 * (b - a) for a, b in zip(without, having, strict=True)])
    return result


def judgement(found: dict[str, Any]) -> str:
    """The verdict that the intervals allow."""
    better = [one.mean - one.half_width > 0 for one in gains(found).values()]
    worse = [one.mean + one.half_width < 0 for one in gains(found).values()]
    if any(worse):
        return "depends on the network" if any(better) else "worse where a difference is found"
    return "holds here" if all(better) else "not established"


def generalises(found: dict[str, Any]) -> str:
    """The intervals, in words."""
    said = [
        f"{name} {one.mean:+.2f} ± {one.half_width:.2f} ({one.count} seeds)"
        for name, one in gains(found).items()
    ]
    return "accuracy at tau = 3e-4 over that at 0, in points, paired by seed, 95 %: " + ", ".join(
        said
    )


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
    only: Annotated[
        list[str] | None, typer.Option(help="Measure these networks only, and write no record.")
    ] = None,
    seeds: int = 5,
    steps: int = 1500,
) -> None:
    """The chain paper's statements, measured."""
    if page is not None:
        write(PAGE, NAME, f"\n{render(json.loads(page.read_text()))}")
        return
    torch.set_num_threads(1)
    measured = measure(seeds, steps, only or list(NETWORKS), rows)
    if only:
        return
    found = summary(*measured, seeds, steps)
    print(render(found))
    if json_file is not None:
        json_file.parent.mkdir(parents=True, exist_ok=True)
        json_file.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
