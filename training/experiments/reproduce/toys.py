"""``toy`` and ``ideal-direction``: the Markov-chain paper's 28 parameters (Figure 2(b)) and its
Figure 5. Many networks are trained side by side as one tensor program: network n is a ``Toy`` with
its own weights, rate, penal strength and data, and the sum of all losses gives each its own
gradient.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor

from pathspace.diagnostics.shared.tables import plain

from ..intervals import t_interval
from ..models.resnet import Toy
from ..task import one_thread
from .holm import judge, positive
from .markdown import sentences
from .pictures import draw_curves, legend, look, panels
from .record import Record, Table, about, judged, percent, remarks
from .tuning import Setting, best_rate

STEPS, BATCH, TESTED, LOOKS = 10_000, 64, 10_000, 50
RATES = (0.02, 0.05, 0.15, 0.4)
TAUS = (1e-4, 3e-4, 1e-3)
# label, skip connection, penal strength
ARMS = (
    ("plain", 0.0, 0.0),
    ("skip", 1.0, 0.0),
    *((f"Markov, tau {tau:g}", 1.0, tau) for tau in TAUS),
)
SEEDS, TUNING_SEEDS = tuple(range(20)), tuple(range(1000, 1005))
ETAS = (0.01, 0.1, 1.0)
# An error above this counts as failed.
FAILED = 0.02
# Of the ideal direction: rate, steps between two measurements, and the share that the paper gives.
RATE, EVERY, SHARE = 0.05, 100, 0.7


class Net(NamedTuple):
    """One of the networks: seed of weights and points, skip (1 or 0), penal strength, rate."""

    seed: int
    skip: float
    tau: float
    lr: float


class Toys:
    """Networks side by side, each of which starts as a ``Toy`` of its seed."""

    def __init__(self, nets: Sequence[Net]) -> None:
        made = []
        with torch.random.fork_rng(devices=[]):
            for net in nets:
                torch.manual_seed(net.seed)
                made.append(Toy())
        self.weights = [
            torch.stack([weight.detach() for weight in weights]).requires_grad_()
            for weights in zip(*(model.parameters() for model in made), strict=True)
        ]
        self.skip = _column([net.skip for net in nets])

    def chain(self, points: Tensor) -> tuple[Tensor, Tensor]:
        """Return ``z_1`` and ``x_1`` of every network at points (N, B, 2), each (N, B, 4)."""
        enter, middle, _ = self.weights
        state = points @ enter.mT
        branch = state.relu() @ middle.mT
        return branch, self.skip * state + branch

    def read(self, state: Tensor) -> Tensor:
        """Return the outputs that follow from ``x_1``, shape (N, B)."""
        return (state.relu() @ self.weights[2].mT).squeeze(-1)

    @torch.no_grad()
    def errors(self, points: Tensor) -> Tensor:
        """Return the mean squared error of every network on the same points."""
        _, state = self.chain(points.expand(len(self.skip), -1, -1))
        return (self.read(state) - target(points)).square().mean(1)


def _column(values: Sequence[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float32).view(-1, 1, 1)


def widths() -> str:
    """Name the sizes of the layers of a toy, such as 2-4-4-1."""
    shapes = [tuple(weight.shape) for weight in Toy().parameters()]
    return "-".join(str(size) for size in (shapes[0][1], *(shape[0] for shape in shapes)))


def target(points: Tensor) -> Tensor:
    """Return the paper's target ``x^2 - y^2``."""
    return points[..., 0] ** 2 - points[..., 1] ** 2


def square(count: int, seed: int) -> Tensor:
    """Return points of the square [-1, 1]^2 that no training run meets."""
    return torch.rand(count, 2, generator=torch.Generator().manual_seed(seed)) * 2 - 1


def train_toys(
    nets: Sequence[Net], steps: int, look_at: Callable[[Toys], None] | None = None, every: int = 100
) -> Toys:
    """Train networks side by side with SGD on fresh points of the square; those of one seed meet
    the same. ``look_at`` is called before the first step and after every ``every`` steps.
    """
    toys = Toys(nets)
    seeds = sorted({net.seed for net in nets})
    place = torch.tensor([seeds.index(net.seed) for net in nets])
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    rates = _column([net.lr for net in nets])
    strength = torch.tensor([net.tau for net in nets], dtype=torch.float32)
    block: list[Tensor] = []
    for step in range(steps + 1):
        if look_at is not None and step % every == 0:
            look_at(toys)
        if step == steps:
            break
        if step % every == 0:
            # Points of many steps at once: one call per seed and block.
            drawn = [torch.rand(every, BATCH, 2, generator=one) for one in generators]
            block = list(torch.stack(drawn, 1) * 2 - 1)
        points = block[step % every][place]
        branch, state = toys.chain(points)
        errors = (toys.read(state) - target(points)).square().mean(1)
        penalty = 0.5 * strength * branch.square().sum((1, 2))
        gradients = torch.autograd.grad((errors + penalty).sum(), toys.weights)
        with torch.no_grad():
            for weight, gradient in zip(toys.weights, gradients, strict=True):
                weight.sub_(rates * gradient)
    return toys


# seeds of the points that tune, and of those that test
VALID_POINTS, TEST_POINTS = 10**6, 10**6 + 1


def toy(setting: Setting) -> Record:
    """Train the toy without skip, with skip, and with three penal strengths."""
    started = time.perf_counter()
    steps = setting.budget(STEPS)
    with one_thread():
        tuned = iter(_train([(*arm, lr) for arm in ARMS for lr in RATES], TUNING_SEEDS, steps))
        tables = {label: {lr: float(np.mean(next(tuned)[0])) for lr in RATES} for label, *_ in ARMS}
        best = {label: best_rate(table) for label, table in tables.items()}
        fresh = _train([(*arm, best[arm[0]]) for arm in ARMS], SEEDS, steps)
    test = {arm[0]: errors for arm, (_, errors, _) in zip(ARMS, fresh, strict=True)}
    curves = {arm[0]: lines for arm, (*_, lines) in zip(ARMS, fresh, strict=True)}
    pairs = [("the skip connection lowers the error of the plain net", "skip", "plain")]
    for label, _, tau in ARMS:
        if tau:
            pairs.append((f"{label} lowers the error of the skip net", label, "skip"))
    claims = []
    for statement, ours, rival in pairs:
        sound = [(a, b) for a, b in zip(test[ours], test[rival], strict=True) if max(a, b) < np.inf]
        gains = [float(np.log10(b / a)) for a, b in sound]
        claims.append(positive(f"{statement} (log10 of the ratio)", gains, pattern="+.2f"))
    rows = []
    for label, errors in test.items():
        edge = "*" if best[label] in (min(RATES), max(RATES)) else ""
        logs = t_interval([float(np.log10(v)) for v in errors if np.isfinite(v)])
        failed = f"{sum(v > FAILED for v in errors)} of {len(errors)}"
        median = f"{float(np.median(errors)):.2e}"
        rows.append((label, f"{best[label]:g}{edge}", median, logs.show(".2f"), failed))
    failing = f"failed (error above {FAILED:g})"
    columns = ("arm", "learning rate", "median test error", "log10 of test error", failing)
    return Record(
        **about("toy"),
        scale=setting.scale,
        ours=Table(columns, tuple(rows)),
        differs=(
            *remarks("toy", widths=widths(), batch=BATCH, taus=len(TAUS)),
            f"{steps} SGD steps{', as in the paper' if steps == STEPS else ''}.",
        ),
        protocol=sentences(
            "toy",
            rates=", ".join(f"{lr:g}" for lr in RATES),
            tuning=len(TUNING_SEEDS),
            seeds=len(SEEDS),
        ),
        claims=judged(judge(claims)),
        data={
            "rates": list(RATES),
            "best": best,
            "tuning": {label: plain(list(table.items())) for label, table in tables.items()},
            "test": test,
            "curves": curves,
        },
        seconds=time.perf_counter() - started,
    )


Ended = tuple[list[float], list[float], list[list[float | None]]]


def _train(
    runs: Sequence[tuple[str, float, float, float]], seeds: Sequence[int], steps: int
) -> list[Ended]:
    """Train every run with every seed; return validation errors, test errors and curves."""
    nets = [Net(seed, skip, tau, lr) for _, skip, tau, lr in runs for seed in seeds]
    points, seen = square(TESTED, VALID_POINTS), []
    toys = train_toys(
        nets, steps, lambda toys: seen.append(toys.errors(points)), max(1, steps // LOOKS)
    )
    # A network that overflowed has no error; it counts as infinitely bad.
    valid, test = (
        toys.errors(some).nan_to_num(nan=torch.inf).tolist()
        for some in (points, square(TESTED, TEST_POINTS))
    )
    lines = [
        [float(f"{v:.4g}") if np.isfinite(v) else None for v in line]
        for line in torch.stack(seen, 1).tolist()
    ]
    parts = [slice(i, i + len(seeds)) for i in range(0, len(nets), len(seeds))]
    return [(valid[part], test[part], lines[part]) for part in parts]


def draw_toy(record: Record) -> Figure:
    """Draw the error against steps."""
    with panels(1, width=6.0) as (figure, axes):
        for place, (label, lines) in enumerate(record.data["curves"].items()):
            logs = np.log10(np.array(lines, dtype=float)).tolist()
            draw_curves(axes[0], place, label, logs, first=0)
        axes[0].set(xlabel="fiftieths of the run", ylabel="log10 of the error on held-out points")
        legend(figure, axes[0], 3)
        return figure


def ideal_direction(setting: Setting) -> Record:
    """Measure how often a step along ``-g`` from a chain state lowers the loss."""
    started = time.perf_counter()
    steps, seeds = setting.budget(STEPS), SEEDS[:10]
    points = square(TESTED, VALID_POINTS)
    wanted = target(points)
    shares: dict[float, list[list[float]]] = {eta: [] for eta in ETAS}
    changes: dict[float, list[float]] = {eta: [] for eta in ETAS}

    def measure(toys: Toys) -> None:
        with torch.no_grad():
            _, state = toys.chain(points.expand(len(seeds), -1, -1))
        state.requires_grad_()
        before = (toys.read(state) - wanted).square()
        (gradient,) = torch.autograd.grad(before.sum(), state)
        with torch.no_grad():
            # Where the gradient is zero there is no direction to speak of.
            counted = gradient.norm(dim=2) > 0
            for eta in ETAS:
                after = (toys.read(state - eta * gradient) - wanted).square()
                lower = ((after < before) & counted).sum(1) / counted.sum(1).clamp(min=1)
                shares[eta].append(lower.tolist())
                changes[eta].append(float((after - before).mean()))

    with one_thread():
        train_toys([Net(seed, 1.0, 0.0, RATE) for seed in seeds], steps, measure, EVERY)
    means = {eta: np.array(shares[eta]).mean(0).tolist() for eta in ETAS}
    claims = [
        positive(
            f"eta = {eta:g}: the loss falls in more than {percent(SHARE)} of situations"
            f" (share above {percent(SHARE)})",
            [share - SHARE for share in values],
        )
        for eta, values in means.items()
    ]
    rows = [
        (f"{eta:g}", t_interval(values).show(".1%"), f"{min(values):.1%}")
        for eta, values in means.items()
    ]
    return Record(
        **about("ideal-direction"),
        scale=setting.scale,
        ours=Table(("eta", "share of situations", "lowest over seeds"), tuple(rows)),
        differs=remarks("ideal-direction", etas=len(ETAS), widths=widths(), rate=RATE),
        protocol=sentences(
            "ideal_direction", seeds=len(seeds), points=TESTED, every=EVERY, steps=steps
        ),
        claims=judged(judge(claims)),
        data={
            "shares": {f"{eta:g}": np.array(shares[eta]).T.round(4).tolist() for eta in ETAS},
            "changes": {f"{eta:g}": [float(f"{v:.4g}") for v in changes[eta]] for eta in ETAS},
        },
        seconds=time.perf_counter() - started,
    )


def draw_directions(record: Record) -> Figure:
    """Draw shares and mean changes of the loss against training steps."""
    with panels(2) as (figure, axes):
        for place, (eta, lines) in enumerate(record.data["shares"].items()):
            draw_curves(axes[0], place, f"eta = {eta}", lines, first=0)
            axes[1].plot(record.data["changes"][eta], markevery=10, markersize=4, **look(place))
        axes[0].axhline(SHARE, color="black", linewidth=0.6)
        axes[0].set(title="share of points whose loss falls", xlabel="hundreds of steps")
        axes[1].set(title="mean change of the loss", xlabel="hundreds of steps")
        axes[1].set_yscale("symlog", linthresh=1e-4)
        legend(figure, axes[0])
        return figure
