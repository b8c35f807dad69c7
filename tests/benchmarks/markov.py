"""The chain paper's statements on trained networks: the figures of `docs/claims-markov.md`.

``PYTHONPATH=tests python -m benchmarks.markov --json docs/data/markov.json`` trains and measures (about an
hour on one core, with the data of ``pathspace data fetch fashion-mnist``), ``--page FILE`` writes the figures of a run into the page.
``--rows FILE`` keeps each network's figures as soon as they are there, and finds those of an earlier run.
"""

# ruff: noqa: E501

from __future__ import annotations

import itertools
import json
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.progress import track
from sklearn.linear_model import LogisticRegression
from torch import Tensor, nn
from torch.nn import functional as F

from pathspace.diagnostics import MarkovChain
from pathspace.diagnostics.efficiency import ChainRecord, NodeTensors, observe, tensors
from pathspace.diagnostics.lemmas import ideal_share, lemma1, lemma2, lemma4, penalty_gradient, simulate_lemma3, walk
from pathspace.files import replacing
from pathspace.training import penalize
from pathspace.training.experiments.intervals import Interval, t_interval
from pathspace.training.experiments.tasks.fetched import fashion_splits

PAGE = Path(__file__).parent.parent.parent / "docs" / "claims-markov.md"
DATA = PAGE.parent / "data" / "markov.json"
START, END = "<!-- measured -->\n", "<!-- end -->"
TAUS = (0.0, 1e-5, 3e-4, 3e-3)
DATA_NAME, TRAINED, LOOKED, AT_A_TIME = "Fashion-MNIST, 8 x 8 pixels", 5000, 10_000, 200
LARGE, TINY = 1000.0, 1e-3
STEPS = ((1e-4, False), (1e-2, False), (1.0, False), (10.0, False), (1e-4, True), (1.0, True), (10.0, True))
LENGTHS = (50, 200, 1000)


class Branches(nn.Module):
    """A stem, residual blocks and a head; `after` follows each sum."""

    def __init__(self, stem: nn.Module, blocks: Iterable[nn.Module], after: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.stem, self.blocks, self.after, self.head = stem, nn.ModuleList(blocks), after, head

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = self.after(x + block(x))
        return self.head(x)


def mlp() -> nn.Module:
    """Four blocks of width 32."""
    blocks = [nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32)) for _ in range(4)]
    return Branches(nn.Sequential(nn.Flatten(), nn.Linear(64, 32)), blocks, nn.Identity(), nn.Linear(32, 10))


def cnn() -> nn.Module:
    """Three blocks of 16 channels with batch norm, ReLU after the sum."""

    def block() -> nn.Module:
        first, second = (nn.Conv2d(16, 16, 3, padding=1, bias=False) for _ in range(2))
        return nn.Sequential(first, nn.BatchNorm2d(16), nn.ReLU(), second, nn.BatchNorm2d(16))

    stem = nn.Sequential(nn.Unflatten(1, (1, 8)), nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16))
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))
    return Branches(stem.append(nn.ReLU()), [block() for _ in range(3)], nn.ReLU(), head)


class Positions(nn.Module):
    """What tells one row of the picture from another."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(8, 32) / 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table


class Mean(nn.Module):
    """Mean over tokens."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1)


def transformer() -> nn.Module:
    """Two pre-norm blocks of width 32 over the rows of the picture: four nodes."""
    layers = [nn.TransformerEncoderLayer(32, 4, 64, 0.0, batch_first=True, norm_first=True) for _ in range(2)]
    return nn.Sequential(nn.Linear(8, 32), Positions(), *layers, nn.LayerNorm(32), Mean(), nn.Linear(32, 10))


NETWORKS: dict[str, Callable[[], nn.Module]] = {"MLP": mlp, "CNN": cnn, "transformer": transformer}


def each(outputs: Tensor, targets: Tensor) -> Tensor:
    """One loss per sample."""
    return F.cross_entropy(outputs, targets, reduction="none")


@cache
def data() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Fashion-MNIST at 8 x 8 pixels in float64: the first images to train on, and the whole test set."""
    train, _, test = fashion_splits("markov", limit=TRAINED)
    x, held_out = (F.adaptive_avg_pool2d(part.inputs, 8).squeeze(1).double() for part in (train, test))
    return x, train.targets, held_out, test.targets


def train(name: str, tau: float, seed: int, steps: int, batch: int = 64) -> nn.Module:
    """Adam on the mean loss; the paper's hook adds `tau z`. Returned in evaluation mode, without the penalty."""
    x, y, *_ = data()
    torch.manual_seed(seed)
    model = NETWORKS[name]().double()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    order = torch.Generator().manual_seed(seed)
    if tau:
        penalize(model, x[:batch], tau=tau)
    for _ in range(steps):
        chosen = torch.randint(len(x), (batch,), generator=order)
        optimizer.zero_grad()
        F.cross_entropy(model(x[chosen]), y[chosen]).backward()
        optimizer.step()
    if tau:
        model.penal_connection.remove()  # type: ignore[union-attr, operator]
    return model.eval()


def parts(x: Tensor, y: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Few samples at a time: convolutions in float64 are twice as fast where they stay in the processor's cache."""
    return zip(x.split(AT_A_TIME), y.split(AT_A_TIME), strict=True)


def observed(chain: MarkovChain, x: Tensor, y: Tensor) -> ChainRecord:
    """One record of all samples."""
    return ChainRecord.merge(observe(chain, each, *some) for some in parts(x, y))


def batch_cosine(record: ChainRecord) -> float:
    """One cosine for the whole batch, mean over nodes."""
    sizes = record.direction_norms.norm(dim=1) * record.gradient_norms.norm(dim=1)
    return float((-record.products.sum(1) / sizes).nanmean())


def outcome(model: nn.Module) -> dict[str, float]:
    """Test figures and efficiencies of one trained network, on all that was held out."""
    *_, x, y = data()
    with torch.no_grad():
        outputs = model(x)
    record = observed(MarkovChain.trace(model, x[:2]), x, y)
    return {
        "loss": float(F.cross_entropy(outputs, y)),
        "accuracy": float((outputs.argmax(1) == y).double().mean()),
        "efficiency": record.mean_efficiency,
        "batch": batch_cosine(record),
        "all_positive": record.convex_share,
    }


def share(top: int, bottom: int) -> float | None:
    return top / bottom if bottom else None


def ideal_shares(model: nn.Module) -> list[float]:
    """Share of (node, sample) pairs with a lower loss, for each of :data:`STEPS`."""
    *_, x, y = data()
    x, y = x[:LOOKED], y[:LOOKED]
    chain = MarkovChain.trace(model, x[:2])

    def mean(eta: float, relative: bool) -> float:
        shares = ((len(a), ideal_share(chain, each, a, b, eta=eta, relative=relative)) for a, b in parts(x, y))
        return sum(size * float(share.mean()) for size, share in shares) / len(x)

    return [mean(eta, relative) for eta, relative in STEPS]


def statements(model: nn.Module) -> dict[str, Any]:
    """What the statements say of one network, on :data:`LOOKED` held-out samples."""
    *_, x, y = data()
    x, y = x[:LOOKED], y[:LOOKED]
    chain = MarkovChain.trace(model, x[:2])
    record = observed(chain, x, y)
    nodes = tensors(chain, each, x, y)
    holds, converse = lemma2(record, LARGE)
    norms, cosines = record.direction_norms, record.cosines
    # both vectors have to be there for a cosine
    pairs = [(p.direction, p.gradient, (p.direction.norm(dim=1) > 0) & (p.gradient.norm(dim=1) > 0)) for p in nodes]
    pairs_there = [(z[there], g[there]) for z, g, there in pairs if bool(there.any())]
    appendix = [penalty_gradient(z, g, eta=0.1, lam=1.0) for z, g in pairs_there]
    signs = [
        bool(torch.equal(a.cancelling_tau > 0, (z * g).sum(1) > 0))
        for a, (z, g) in zip(appendix, pairs_there, strict=True)
    ]
    four = lemma4(nodes)
    return {
        "efficiency": record.mean_efficiency,
        "all_positive": record.convex_share,
        "convex_small": lemma2(record, TINY)[0].premise / LOOKED,
        "convex_large": holds.premise / LOOKED,
        "lemma2": [holds.conclusion, holds.premise],
        "converse": [converse.conclusion, converse.premise],
        "defect": float((record.eps(TINY) - 1).mean()),
        "printed": float((TINY * record.efficiency).mean()),
        "corrected": float((-(TINY**2) / 2 * ((1 - cosines**2) / norms**2).nanmean(0)).mean()),
        "gradient_above_one": float((record.gradient_norms >= 1).double().mean()),
        "orthogonality": max(a.orthogonality for a in appendix),
        "kept_over_ignored": float(torch.cat([a.kept_over_ignored for a in appendix]).mean()),
        "best_tau": max(float(a.best_tau.abs().max()) for a in appendix),
        "cancelling_tau_follows_product": all(signs),
        "lemma4_products": [four.products.conclusion, four.products.premise],
        "lemma4_cosines": [four.cosines.conclusion, four.cosines.premise],
        "premise_on_convex": None if math.isnan(four.premise_on_convex) else four.premise_on_convex,
        "fold": walk(chain, x)[1],
    }


def vectors() -> dict[str, Any]:
    """The statements that need no network, on random vectors."""
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(2, 10_000, 4, generator=generator, dtype=torch.float64)
    square = lambda v: v.square().sum(1)  # noqa: E731
    mixtures = {f"{mu:g}": lemma1(square, a, b, mu) for mu in (0.3, 1.0, 3.0)}
    nearer = torch.minimum(square(a), square(b))
    z, g = torch.randn(2, 200, 10, generator=generator, dtype=torch.float64)
    moved = z - 0.01 * penalty_gradient(z, g, eta=0.1, lam=1.0).exact
    cosine = lambda v: -(v * g).sum(1) / (v.norm(dim=1) * g.norm(dim=1))  # noqa: E731
    random = lemma4((NodeTensors(*torch.randn(3, 5000, 3, generator=generator, dtype=torch.float64)),))
    three = {}
    for length in LENGTHS:
        good, printed = simulate_lemma3(length, seed=length), simulate_lemma3(length, full_steps=True, seed=length)
        three[str(length)] = {"error": good.error, "bound": good.bound, "printed_error": printed.error, "printed_bound": printed.bound}  # fmt: skip
    return {
        "lemma1": {mu: share(check.conclusion, check.premise) for mu, check in mixtures.items()},
        "definition2_lower_violated": float((square((a + b) / 2) < nearer).double().mean()),
        "cosine_lowered": int((cosine(moved) < cosine(z)).sum()),
        "lemma4_cosines": share(random.cosines.conclusion, random.cosines.premise),
        "lemma3": three,
    }


def measure_one(name: str, seed: int, tau: float, steps: int) -> dict[str, Any]:
    """The figures of one trained network."""
    *_, x, _ = data()
    model = train(name, tau, seed, steps)
    row = {"network": name, "seed": seed, "tau": tau, **outcome(model)}
    if tau:
        return row | {"fold": walk(MarkovChain.trace(model, x[:2]), x[:LOOKED])[1]}
    start = statements(train(name, 0.0, seed, 0))
    return row | {"start": start, "trained": statements(model) | {"ideal": ideal_shares(model)}}


def measure(seeds: int, steps: int, names: Sequence[str], rows_file: Path | None) -> list[dict[str, Any]]:
    """The figures of all networks; those that `rows_file` holds, after as many steps, are not measured again."""
    old = rows_file.read_text().splitlines() if rows_file is not None and rows_file.exists() else []
    known = {
        (one["steps"], *(one["row"][key] for key in ("network", "seed", "tau"))): one["row"]
        for one in map(json.loads, old)
    }
    rows: list[dict[str, Any]] = []
    for name in names:
        for seed, tau in track(list(itertools.product(range(seeds), TAUS)), name):
            if (steps, name, seed, tau) in known:
                rows.append(known[steps, name, seed, tau])
                continue
            rows.append(measure_one(name, seed, tau, steps))
            if rows_file is not None:
                with rows_file.open("a") as file:
                    file.write(json.dumps({"steps": steps, "row": rows[-1]}) + "\n")
    return rows


def summary(rows: list[dict[str, Any]], seeds: int, steps: int) -> dict[str, Any]:
    """The record of a run: what was measured on what, and beside which linear model."""
    x, y, held_out, answers = data()
    bar = LogisticRegression(max_iter=300, C=0.1).fit(x.flatten(1), y).score(held_out.flatten(1), answers)
    return {
        "data": DATA_NAME,
        "seeds": seeds,
        "steps": steps,
        "trained_on": len(x),
        "held_out": len(held_out),
        "checked": LOOKED,
        "logistic": bar,
        "torch": torch.__version__,
        "vectors": vectors(),
        "rows": rows,
    }


# --- the page


def spread(values: list[float], form: str = ".3f", factor: float = 1.0) -> str:
    """Mean and standard deviation."""
    mean, error = factor * statistics.fmean(values), factor * statistics.stdev(values)
    return f"{mean:{form}} ± {error:{form.removeprefix('+')}}"


def percent(values: list[float]) -> str:
    return f"{100 * statistics.fmean(values):.0f}"


def render(found: dict[str, Any]) -> str:
    """The page's tables, from the figures of a run."""
    plain = {name: [row for row in found["rows"] if row["network"] == name and not row["tau"]] for name in NETWORKS}

    def by_net(key: str, when: str = "trained") -> str:
        return "/".join(percent([row[when][key] for row in rows]) for rows in plain.values()) + " %"

    def over(key: str) -> str:
        pairs = [[row["trained"][key] for row in rows] for rows in plain.values()]
        return ", ".join(f"{sum(a for a, _ in p):,} of {sum(b for _, b in p):,}" for p in pairs)

    def signed(key: str) -> str:
        return ", ".join(f"{statistics.fmean([row['trained'][key] for row in rows]):+.2f}" for rows in plain.values())

    def verdict(key: str) -> str:
        pairs = [row["trained"][key] for rows in plain.values() for row in rows]
        return "**holds**" if all(a == b for a, b in pairs) else "**fails**"

    def largest(key: str) -> float:
        return max(row[when][key] for rows in plain.values() for row in rows for when in ("start", "trained"))

    def fold(tau: float) -> list[str]:
        rows = {name: [r for r in found["rows"] if r["network"] == name and r["tau"] == tau] for name in NETWORKS}
        key = (lambda r: r["trained"]["fold"]) if not tau else (lambda r: r["fold"])
        return [percent([key(r) for r in mine]) for mine in rows.values()]

    v, three = found["vectors"], found["vectors"]["lemma3"]
    mlp_defect = [
        statistics.fmean([row["trained"][key] for row in plain["MLP"]]) for key in ("defect", "printed", "corrected")
    ]
    agreement = max(
        abs(row[when]["corrected"] / row[when]["defect"] - 1)
        for rows in plain.values() for row in rows for when in ("start", "trained")
    )  # fmt: skip
    convex = [
        percent(known)
        for rows in plain.values()
        if (
            known := [
                row["trained"]["premise_on_convex"] for row in rows if row["trained"]["premise_on_convex"] is not None
            ]
        )
    ]
    kept = [row[when]["kept_over_ignored"] for rows in plain.values() for row in rows for when in ("start", "trained")]
    assert all(
        row[w]["cancelling_tau_follows_product"]
        for rows in plain.values()
        for row in rows
        for w in ("start", "trained")
    )
    before = [percent([row["start"]["fold"] for row in rows]) for rows in plain.values()]
    after, strong = fold(0.0), fold(3e-4)
    lines = ["| statement | verdict | measured |", "| --- | --- | --- |"]

    def add(statement: str, verdict: str, measured: str) -> None:
        lines.append(f"| {statement} | {verdict} | {measured} |")

    mixed = {mu: f"{100 * value:.3g} %" for mu, value in v["lemma1"].items()}
    add("Lemma 1: mixtures with `mu >= 0` stay ideal", "**needs mu <= 1**",
        f"squared distance in four dimensions, 10,000 random pairs: {mixed['0.3']} at mu = 0.3, {mixed['1']} at mu = 1, {mixed['3']} at mu = 3")  # fmt: skip
    add("Definition 2 asks for both inequalities of the distance", "**no distance has the lower one**",
        f"squared norm violates it for {100 * v['definition2_lower_violated']:.0f} % of these pairs at mu = 1/2")  # fmt: skip
    add("Lemma 2: delta-convex implies efficient", verdict("lemma2"), f"samples, eta = 1000: {over('lemma2')}")
    add("its converse", "fails, as the paper says", f"efficient samples that are delta-convex: {over('converse')}")
    add("(10): `eps ~ 1 + eta eps'`", "**wrong order**",
        f"eta = 1e-3, trained MLP: eps - 1 = {mlp_defect[0]:.1e}, printed {mlp_defect[1]:+.1e}; `1 - eta^2/2 mean((1-c^2)/\\|\\|z\\|\\|^2)` gives {mlp_defect[2]:.1e}; the two agree to {100 * agreement:.1g} % on every network")  # fmt: skip
    small = min(row[w]["convex_small"] for rows in plain.values() for row in rows for w in ("start", "trained"))
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
    add("Appendix D: `l(x - eta g) < l(x)` in most situations", "**a statement about eta**", "below")
    add("Lemma 4 with inner products, given (24)", verdict("lemma4_products"), f"pairs: {over('lemma4_products')}")
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
    by_training = sum(map(float, before)) - sum(map(float, after)) > sum(map(float, after)) - sum(map(float, strong))
    add("random chains fold, penalised ones do not (F)", f"**{'training does most of it' if by_training else 'holds here'}**",
        f"steps that turn back, one sample: {'/'.join(before)} % at the start, {'/'.join(after)} % trained, {'/'.join(strong)} % trained with tau = 3e-4")  # fmt: skip
    lines += ["", f"Logistic regression on the same pixels is right on {100 * found['logistic']:.1f} % of the held-out samples.",
              "", "Share of (node, sample) pairs with a lower loss, trained networks, averaged over nodes and seeds (Appendix D; the rest",
              "of the chain run again):", "", "| step | MLP | CNN | transformer |", "| --- | --- | --- | --- |"]  # fmt: skip
    for i, (eta, relative) in enumerate(STEPS):
        label = f"length {eta:g}" if relative else f"`{eta:g} g`"
        cells = [
            f"{100 * statistics.fmean([row['trained']['ideal'][i] for row in rows]):.1f} %" for rows in plain.values()
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
                f"| {name if not tau else ''} | {tau:g} | {' | '.join(cells)} | {percent(column(mine, 'all_positive'))} % |"
            )
    opposed = [
        (name, tau) for name in NETWORKS for tau in TAUS
        if statistics.fmean(column(of(found, name, tau), "efficiency")) * statistics.fmean(column(of(found, name, tau), "batch")) < 0
    ]  # fmt: skip
    lines += ["", f"Per sample and per batch disagree in sign in {len(opposed)} of {len(NETWORKS) * len(TAUS)} rows: say which one is plotted. A short run on a small",
              "task says nothing about ImageNet or WMT16; those tables were not rerun."]  # fmt: skip
    return "\n".join(lines) + "\n"


def of(found: dict[str, Any], name: str, tau: float) -> list[dict[str, Any]]:
    return [row for row in found["rows"] if row["network"] == name and row["tau"] == tau]


def column(rows: list[dict[str, Any]], key: str) -> list[float]:
    return [row[key] for row in rows]


def raises(found: dict[str, Any]) -> int:
    """On how many networks eps' at tau = 3e-4 is above that of tau = 0 for every seed."""
    return sum(
        all(b > a for a, b in zip(column(of(found, n, 0.0), "efficiency"), column(of(found, n, 3e-4), "efficiency"), strict=True))
        for n in NETWORKS
    )  # fmt: skip


def gains(found: dict[str, Any]) -> dict[str, Interval]:
    """Accuracy at tau = 3e-4 over that at 0, in points, paired by seed, with 95 % intervals of the mean."""
    result = {}
    for name in NETWORKS:
        pairs = zip(column(of(found, name, 0.0), "accuracy"), column(of(found, name, 3e-4), "accuracy"), strict=True)
        result[name] = t_interval([100 * (b - a) for a, b in pairs])
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
    said = [f"{name} {one.mean:+.2f} ± {one.half_width:.2f}" for name, one in gains(found).items()]
    return "accuracy at tau = 3e-4 over that at 0, in points, paired by seed, 95 %: " + ", ".join(said)


def write(found: dict[str, Any], page: Path = PAGE) -> None:
    """Put the tables between the marks of the page."""
    text = page.read_text()
    with replacing(page) as temporary:
        temporary.write_text(
            text[: text.index(START) + len(START)] + "\n" + render(found) + "\n" + text[text.index(END) :]
        )


def main(
    json_file: Annotated[Path | None, typer.Option("--json", help="Train, measure, and keep the figures here.")] = None,
    page: Annotated[Path | None, typer.Option(help="Write the figures of this file into the page instead.")] = None,
    rows: Annotated[Path | None, typer.Option(help="Keep and find each network's figures here.")] = None,
    only: Annotated[list[str] | None, typer.Option(help="Measure these networks only, and write no record.")] = None,
    seeds: int = 5,
    steps: int = 1500,
) -> None:
    """The chain paper's statements, measured."""
    if page is not None:
        write(json.loads(page.read_text()))
        return
    torch.set_num_threads(1)
    measured = measure(seeds, steps, only or list(NETWORKS), rows)
    if only:
        return
    found = summary(measured, seeds, steps)
    print(render(found))
    if json_file is not None:
        json_file.parent.mkdir(parents=True, exist_ok=True)
        json_file.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
