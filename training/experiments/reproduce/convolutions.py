"""``image``, ``depth``, ``rcnn`` and ``regularisers``: convolutional networks on small images.

The Markov-chain paper's Tables 2 and 3 (penal connection or not), the path-space paper's Table 2
(G-SGD or SGD), and whether the penal connection does more than what people use already.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from .paired_comparison import PairedComparison, hold, of_table
from .recipes import table_cells
from .recipes.compare import show
from .record import Record, Table
from .trial import Trial
from .tuning import Arm, Setting, best_rate, measure

BATCH = 64
RATES, ADAM_RATES = (0.01, 0.03, 0.1), (0.003, 0.01, 0.03)
DEPTH_RATES = (0.003, 0.01, 0.03, 0.1, 0.3)
# strengths of the penal connection; the last is meant to be too large
TAUS = {"embedded": (3e-7, 3e-5, 3e-3), "fetched": (3e-7, 3e-6, 1e-4)}
# 10,000 images of Fashion-MNIST at half the size; all validation and test images
FASHION = (("limit", 10_000), ("pool", 2))
CHAIN, PLAIN = "Markov chain", "ResNet"
RCNNS = {"MNIST": (32, 64, 96), "CIFAR-10": (96, 128, 160), "CIFAR-100": (96, 128, 160)}


def image(setting: Setting) -> Record:
    """A residual network without the penal connection, and with several strengths."""
    cells = table_cells("markov-chain-table-2")
    if setting.scale == "full":
        claims = [
            (f"{row}: {column} errs less than the baseline", (row, column), (row, "baseline"))
            for row, column in cells
            if column != "baseline"
        ]
        contest = of_table("markov-chain-table-2", setting, claims, lambda cell: cell.error)
        return hold(setting, **contest, name="image")[0]
    if setting.scale == "fetched":
        base, rates = clothes(setting, "momentum", "resnet", 8, 8, FASHION), RATES
    else:
        base, rates = digits(setting, "adam", 10, "residual", 8, 3), ADAM_RATES
    *small, large = taus = TAUS[setting.scale]
    pairs = [
        (
            cells["ResNet50", "tau 3e-7" if tau else "baseline"],
            Arm(_label("baseline", tau), replace(base, tau=tau), rates),
        )
        for tau in (0.0, *taus)
    ]
    named = {f"tau = {tau:g}": tau for tau in small} | {f"a large tau ({large:g})": large}
    # the best of the paper's values, so that no value has to do more than that
    effect = min(cell.error for (row, _), cell in cells.items() if row == "ResNet50")
    effects = effect, cells["ResNet50", "baseline"].error
    duels = [
        PairedComparison(
            f"{what} errs less than the baseline",
            _label("baseline", tau),
            "baseline",
            None if tau == large else effects,
        )
        for what, tau in named.items()
    ]
    return hold(setting, pairs, duels, name="image")[0]


def depth(setting: Setting) -> Record:
    """Residual networks of growing depth, without and with the penal connection."""
    cells = table_cells("markov-chain-table-3")
    if setting.scale == "full":
        rows = dict.fromkeys(row for row, _ in cells)
        paper = Table(
            ("accuracy in %", CHAIN, PLAIN),
            tuple((row, cells[row, CHAIN].printed, cells[row, PLAIN].printed) for row in rows),
        )
        claims = [
            (f"{row}: the penal connection errs less", (row, CHAIN), (row, PLAIN)) for row in rows
        ]
        contest = of_table("markov-chain-table-3", setting, claims, lambda cell: cell.error)
        return hold(setting, **contest, name="depth", paper=paper)[0]
    pairs, duels = [], []
    fetched, first = setting.scale == "fetched", "CIFAR-10, 20 layers"
    tau, rates = (3e-7, RATES) if fetched else (3e-4, DEPTH_RATES)
    printed = cells[first, CHAIN].error, cells[first, PLAIN].error
    for layers in (8, 20):
        plain = f"{layers} layers"
        if fetched:
            base = clothes(setting, "momentum", "resnet", 8, layers, FASHION)
        else:
            base = digits(setting, "momentum", 8, "resnet", 4, layers)
        for strength, column in ((0.0, PLAIN), (tau, CHAIN)):
            arm = Arm(_label(plain, strength), replace(base, tau=strength), rates)
            pairs.append((cells[first, column], arm))
        statement = f"{plain}: the penal connection errs less"
        effects = printed if layers == 20 else None
        duels.append(PairedComparison(statement, _label(plain, tau), plain, effects))
    remarks = () if fetched else ("Smaller values of tau were not tried here.",)
    return hold(setting, pairs, duels, name="depth", remarks=remarks)[0]


def rcnn(setting: Setting) -> Record:
    """A recurrent convolutional network with G-SGD and with SGD, both with momentum."""
    cells = table_cells("path-space-table-2")
    columns = [f"{data} RCNN-{width}" for data, widths in RCNNS.items() for width in widths]
    paper = Table(
        ("error in %", *(column.replace("RCNN-", "") for column in columns)),
        tuple((row, *(cells[row, one].printed for one in columns)) for row in ("G-SGD", "SGD")),
    )
    if setting.scale == "full":
        claims = [
            (f"{column}: G-SGD errs less than SGD", ("G-SGD", column), ("SGD", column))
            for column in columns
        ]
        contest = of_table("path-space-table-2", setting, claims, lambda cell: float(cell.printed))
        return hold(setting, **contest, name="rcnn", paper=paper)[0]
    if setting.scale == "fetched":
        base = replace(clothes(setting, "sgd", "recurrent", 16, 4), epochs=setting.budget(8))
    else:
        base = digits(setting, "sgd", 10, "recurrent", 8, 2)
    base = replace(base, init="unit-skeleton")
    pairs = [
        (cells[label, "MNIST RCNN-32"], Arm(label, replace(base, optimizer=kind), RATES))
        for label, kind in (("G-SGD", "gmomentum"), ("SGD", "momentum"))
    ]
    duels = [PairedComparison("G-SGD errs less than SGD", "G-SGD", "SGD", (0.36, 0.38))]
    return hold(setting, pairs, duels, name="rcnn", paper=paper)[0]


RATES_BESIDES = (0.03, 0.1, 0.3)
NOTHING = "nothing"
# what -> three strengths, each with all rates; without any, three other sets of rates, so
# that all have nine points
STRENGTHS: dict[str, tuple[str, tuple[float, ...]]] = {
    "penal connection": ("tau", (3e-8, 3e-7, 3e-6)),
    "weight decay": ("decay", (1e-4, 5e-4, 2e-3)),
    "squares of activations": ("activity", (3e-8, 3e-7, 3e-6)),
    "LayerScale": ("scale", (0.1, 0.3, 1.0)),
    "stochastic depth": ("drop", (0.05, 0.1, 0.2)),
}
PLAIN_RATES = (RATES_BESIDES, (0.02, 0.07, 0.2), (0.015, 0.05, 0.15))


def regularisers(setting: Setting) -> Record:
    """A residual network with the penal connection, with other regularisers, and with none."""
    cells = table_cells("markov-chain-table-2")
    if setting.scale == "fetched":
        base = clothes(setting, "momentum", "resnet", 8, 8, FASHION)
    else:
        base = digits(setting, "momentum", 12, "resnet", 8, 8)
    families = [[Arm(NOTHING, base, rates) for rates in PLAIN_RATES]]
    for name, (key, values) in STRENGTHS.items():
        families.append(
            [Arm(f"{name}, {one:g}", _with(base, key, one), RATES_BESIDES) for one in values]
        )
    arms, seconds = zip(*(_chosen(family, setting) for family in families), strict=True)
    plain, ours, *others = (arm.label for arm in arms)
    less = "the penal connection errs less than"
    duels = [PairedComparison(f"{less} no regulariser", ours, plain)]
    duels += [PairedComparison(f"{less} {one.rpartition(', ')[0]}", ours, one) for one in others]
    figures = {
        "strengths": len(PLAIN_RATES),
        "rates": len(RATES_BESIDES),
        "points": len(PLAIN_RATES) * len(RATES_BESIDES),
        "by_name": "; ".join(f"{name} {show(values)}" for name, (_, values) in STRENGTHS.items()),
    }
    pairs = [(cells["ResNet50", "tau 3e-7" if arm.base.tau else "baseline"], arm) for arm in arms]
    record, _ = hold(setting, pairs, duels, name="regularisers", figures=figures)
    return replace(record, seconds=record.seconds + sum(seconds))


def _with(base: Trial, key: str, value: float) -> Trial:
    """A run with a field of its own, or with an option of its task."""
    if key in ("tau", "decay"):
        return replace(base, **{key: value})  # type: ignore[arg-type]
    return replace(base, options=(*base.options, (key, value)))


def _chosen(arms: Sequence[Arm], setting: Setting) -> tuple[Arm, float]:
    """The arm that the tuning seeds like best, and the seconds of the others."""
    tuned = measure(arms, setting.run, setting.tuning_seeds, ())
    place = int(best_rate({float(i): one.tuning[one.lr] for i, one in enumerate(tuned)}))
    return arms[place], sum(one.seconds for i, one in enumerate(tuned) if i != place)


def digits(
    setting: Setting, optimizer: str, epochs: int, network: str, width: int, depth: int
) -> Trial:
    """Return a run on the embedded digits."""
    options = (("hidden", width), ("network", network), ("depth", depth))
    return Trial("digits-images", optimizer, 0, 0, setting.budget(epochs), BATCH, options=options)


def clothes(
    setting: Setting,
    optimizer: str,
    network: str,
    width: int,
    depth: int,
    data: tuple[tuple[str, Any], ...] = (),
) -> Trial:
    """Return a run of 6 epochs on Fashion-MNIST whose learning rate falls linearly to 0."""
    run = digits(setting, optimizer, 6, network, width, depth)
    return replace(run, task="fashion-images", schedule="linear", options=(*run.options, *data))


def _label(plain: str, tau: float) -> str:
    return f"{plain}, tau {tau:g}" if tau else plain
