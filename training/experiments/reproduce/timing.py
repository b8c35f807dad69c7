"""``time``: the time of a step with SGD, G-SGD and Path-SGD (path-space paper, Table 6)."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.nn import functional

import pathspace as ps

from ...init_skeleton import init_skeleton_
from ...optim import GSGD
from ...path_sgd import PathSGD
from ..intervals import CONFIDENCE, t_interval
from ..models import RecurrentCNN, ReluRNN
from ..task import one_thread
from .holm import judge, positive
from .markdown import sentences
from .pictures import look, panels
from .recipes import table_cells
from .record import Record, Table, about, judged, percent, remarks
from .tuning import Setting

STEPS = 4
# Rounds are taken until the mean ratio is known to this, but at least and at most so many.
PRECISION, LEAST, MOST = 0.01, 8, 2000
# What the paper's section 4 says of the increase, for every model.
BOUND = 0.1
# Layers of the stack and their units; maps of the recurrent network.
LAYERS, UNITS, MAPS = 4, 200, 16
# ours, the paper's column, model, inputs of a batch, the paper's increase for
# G-SGD, with Path-SGD or not
CASES: tuple[tuple[str, Callable[[], nn.Module], tuple[int, ...], float, bool], ...] = (
    ("s-MNIST-28", lambda: ReluRNN(28, 100, 10), (64, 28, 28), 0.082, True),
    ("s-MNIST-98", lambda: ReluRNN(8, 100, 10), (64, 98, 8), 0.055, True),
    (
        f"stack of {LAYERS}, as for PTB",
        lambda: ReluRNN(64, UNITS, 100, layers=LAYERS),
        (40, 35, 64),
        0.080,
        True,
    ),
    (f"C10-RCNN, {MAPS} maps", lambda: RecurrentCNN(3, MAPS, 10), (32, 3, 32, 32), 0.087, False),
)


def seconds_of_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor, steps: int
) -> float:
    """Return the processor time of one training step: forward, backward, update."""
    targets = torch.zeros(len(batch), dtype=torch.int64)
    # The time of this thread alone: what other programs do on the machine does not count.
    started = time.thread_time()
    for _ in range(steps):
        optimizer.zero_grad()
        functional.cross_entropy(model(batch), targets).backward()
        optimizer.step()
    return (time.thread_time() - started) / steps


def run(setting: Setting) -> Record:
    """Time the optimizers in turn: other load has the same effect on all."""
    started = time.perf_counter()
    steps, most = setting.budget(STEPS), max(LEAST, setting.budget(MOST))
    data, rows, claims = {}, [], []
    with one_thread(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for name, make, shape, _, path_sgd in CASES:
            times = alternate(contenders_of(make, torch.randn(shape), steps, path_sgd), most)
            data[name] = times
            increase = _more(times["G-SGD"], times["SGD"])
            claims.append(
                positive(
                    f"{name}: G-SGD costs less than {BOUND:.0%} more than SGD ({BOUND:.0%} minus"
                    " the extra time)",
                    [BOUND - v for v in increase],
                )
            )
            path = []
            if path_sgd:
                path = _more(times["Path-SGD"], times["SGD"])
                ratios = _more(times["Path-SGD"], times["G-SGD"])
                claims.append(positive(f"{name}: Path-SGD costs more than G-SGD", ratios))
            sgd = f"{1e3 * t_interval(times['SGD']).mean:.2f}"
            more = (t_interval(ratios).show("+.1%") for ratios in (increase, path))
            rows.append((name, f"{len(increase)}", sgd, *more))
    columns = ("model", "rounds", "SGD, ms per step", "G-SGD more by", "Path-SGD more by")
    cells = table_cells("path-space-table-6")
    wide = [cells["SGD", column].value("width") for column in ("PTB", "C10-RCNN96")]
    return Record(
        **about("time"),
        scale=setting.scale,
        ours=Table(columns, tuple(rows)),
        differs=(
            "One processor thread in place of a GPU; the time is the thread's processor time,"
            " without other programs.",
            *remarks("time", units=UNITS, maps=MAPS, paper_units=wide[0], paper_maps=wide[1]),
        ),
        protocol=sentences(
            "time",
            steps=steps,
            confidence=percent(CONFIDENCE),
            precision=f"{PRECISION:.0%}",
            most=most,
            unknown=", ".join(name for name, times in data.items() if not _known(times)),
        ),
        claims=judged(judge(claims)),
        data={"times": data, "printed": {name: printed for name, _, _, printed, _ in CASES}},
        seconds=time.perf_counter() - started,
    )


def alternate(
    contenders: Mapping[str, Callable[[], float]], most: int = MOST
) -> dict[str, list[float]]:
    """Let contenders take turns until ratios to the first are known, after one turn to warm up."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for measure in contenders.values():
        measure()
    for done in range(most):
        if done >= LEAST and _known(times):
            break
        for name, measure in contenders.items():
            times[name].append(float(f"{measure():.5g}"))
    return times


def _known(times: Mapping[str, Sequence[float]]) -> bool:
    """Whether the mean ratio of every contender to the first is known to one percent."""
    first, *others = times.values()
    known = [t_interval([v / one for v, one in zip(o, first, strict=True)]) for o in others]
    return all(ratio.half_width <= PRECISION * ratio.mean for ratio in known)


def _more(times: Sequence[float], base: Sequence[float]) -> list[float]:
    """Return how much longer times are than others, as shares of these, round by round."""
    return [v / b - 1 for v, b in zip(times, base, strict=True)]


def contenders_of(
    make: Callable[[], nn.Module], batch: Tensor, steps: int, path_sgd: bool
) -> dict[str, Callable[[], float]]:
    """Return what measures the steps of each optimizer, SGD first."""
    contenders: dict[str, Callable[[], float]] = {}
    for name in ("SGD", "G-SGD", *(("Path-SGD",) if path_sgd else ())):
        model = make()
        skeleton = ps.trace(model, batch[:2]).skeleton()
        init_skeleton_(model, skeleton)
        named = model.named_parameters()
        # so small a rate that no network diverges for any random targets
        optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
        if name == "G-SGD":
            optimizer = GSGD(named, lr=1e-6, skeleton=skeleton)
        elif name == "Path-SGD":
            optimizer = PathSGD(named, lr=1e-6, model=model, example=(batch[:1],), second=False)
        contenders[name] = partial(seconds_of_step, model, optimizer, batch, steps)
    return contenders


def draw(record: Record) -> Figure:
    """Draw the ratio of every round, one panel per model."""
    with panels(len(record.data["times"]), width=2.8) as (figure, axes):
        for panel, (name, times) in zip(axes, record.data["times"].items(), strict=True):
            for place, values in enumerate(times.values()):
                ratios = [v / s for v, s in zip(values, times["SGD"], strict=True)]
                style = {"linestyle": "none", "alpha": 0.6, "markersize": 4, **look(place)}
                panel.plot([place] * len(ratios), ratios, **style)
            printed = 1 + record.data["printed"][name]
            panel.axhline(printed, color="black", linewidth=0.8, linestyle="--")
            panel.set_xticks(range(len(times)), list(times))
            panel.set(title=name, ylabel="time of a step / SGD's")
        return figure
