"""``image``, ``depth``, ``rcnn`` and ``regularisers``: convolutional networks on small images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from .paired_comparison import PairedComparison, base_run, effect, hold, run_comparison
from .recipes import table_cells
from .recipes.compare import show
from .record import Record, Table
from .trial import Trial
from .tuning import Arm, Setting, best_rate, measure

CHAIN, PLAIN = "Markov chain", "ResNet"
RCNNS = {"MNIST": (32, 64, 96), "CIFAR-10": (96, 128, 160), "CIFAR-100": (96, 128, 160)}


def image(setting: Setting) -> Record:
    """A residual network without the penal connection, and with several strengths."""
    if setting.scale == "full":
        return run_comparison("image", setting)[0]
    cells = table_cells("markov-chain-table-2")
    base, told = base_run("image", setting)
    *small, large = taus = told["taus"]
    rates, plain = tuple(told["rates"]), cells["ResNet50", "baseline"]
    pairs = [
        (
            cells["ResNet50", "tau 3e-7"] if tau else plain,
            Arm(_label("baseline", tau), replace(base, tau=tau), rates),
        )
        for tau in (0.0, *taus)
    ]
    # the best of the paper's values, so that no value has to do more than that
    effects = effect(cells["ResNet50", "tau 3e-8"], plain)
    named = [(f"tau = {tau:g}", tau, effects) for tau in small]
    duels = [
        PairedComparison(
            f"{what} errs less than the baseline", _label("baseline", tau), "baseline", printed
        )
        for what, tau, printed in (*named, (f"a large tau ({large:g})", large, None))
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
        return run_comparison("depth", setting, paper=paper)[0]
    pairs, duels = [], []
    first = "CIFAR-10, 20 layers"
    base, told = base_run("depth", setting)
    rates, tau = tuple(told["rates"]), told["strength"]
    for layers in (8, 20):
        plain = f"{layers} layers"
        options = tuple((dict(base.options) | {"depth": layers}).items())
        for strength, column in ((0.0, PLAIN), (tau, CHAIN)):
            arm = Arm(_label(plain, strength), replace(base, tau=strength, options=options), rates)
            pairs.append((cells[first, column], arm))
        statement = f"{plain}: the penal connection errs less"
        printed = effect(cells[first, CHAIN], cells[first, PLAIN])
        effects = printed if layers == 20 else None
        duels.append(PairedComparison(statement, _label(plain, tau), plain, effects))
    remarks = () if setting.scale == "fetched" else ("Smaller values of tau were not tried here.",)
    return hold(setting, pairs, duels, name="depth", remarks=remarks)[0]


def rcnn(setting: Setting) -> Record:
    """A recurrent convolutional network with G-SGD and with SGD, both with momentum."""
    cells = table_cells("path-space-table-2")
    columns = [f"{data} RCNN-{width}" for data, widths in RCNNS.items() for width in widths]
    paper = Table(
        ("error in %", *(column.replace("RCNN-", "") for column in columns)),
        tuple((row, *(cells[row, one].printed for one in columns)) for row in ("G-SGD", "SGD")),
    )
    return run_comparison("rcnn", setting, paper=paper)[0]


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
    base, _ = base_run("regularisers", setting)
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


def _label(plain: str, tau: float) -> str:
    return f"{plain}, tau {tau:g}" if tau else plain
