"""Estimates of how long experiments take that are not made of trials: the contest of optimizers,
times of steps, and toy networks.
"""

from __future__ import annotations

import math
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import torch
from torch.nn import functional

from pathspace.errors import PathspaceError

from ...launch import make_fabric
from ...task import Split
from ...threads import one_thread
from . import toys
from .estimate import STEPS, Estimate, Part
from .experiment import TUNING_SEEDS, Setting
from .leaderboard_contest import PILOT_SEEDS, Journal, cases, contest
from .leaderboard_run import ARMS, Result, Run, prepared, rates, score
from .leaderboard_tasks import BATCH, TASKS
from .timing import CASES, LEAST, MOST, alternate, contenders_of, rounds_needed
from .timing import STEPS as TIMED

# rounds and steps that are taken to time them
ROUNDS, TOY_STEPS = 5, 200
# a validation loss above all that runs end with
FAR = 1e9


class Plan(Journal):
    """A journal that carries out no run, and lists those that are asked for.

    A run that is not known gets the mean test loss of its other seeds. Rates that are not known
    are worse than all others, and the middle one is the best of them.

    Args:
        path: the journal of the contest.

    Attributes:
        asked: run -> its result, ``None`` for one that is not known.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.asked: dict[Run, Result | None] = {}
        self.tests: defaultdict[Run, list[float]] = defaultdict(list)
        for run, result in self.known.items():
            if not result.failed:
                self.tests[replace(run, seed=0)].append(result.test)

    def carry_out(self, runs: Iterable[Run]) -> None:
        """List the runs, and pretend results of those that are not known."""
        for run in runs:
            if run not in self.asked:
                self.asked[run] = self.known[run] if self.has(run) else None
                test = fmean(self.tests.get(replace(run, seed=0), [1.0]))
                tried = rates(run.arm, run.start)
                valid = FAR + abs(math.log(run.lr / tried[len(tried) // 2]))
                self.known.setdefault(run, Result(valid, test, 0.5, False, "", 0.0))


def of_contest(setting: Setting) -> Estimate:
    """Estimate the missing runs of the contest of optimizers.

    Args:
        setting: how it would be run; its folder has the journal. Runs of the same kind take as long
            as those in it.
    """
    plan = Plan((setting.folder or Path("runs")) / "optimizers.jsonl")
    contest(plan, list(cases()), setting)
    took: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
    missing: dict[tuple[str, str], list[Run]] = {}
    for run, result in plan.asked.items():
        if result is None:
            missing.setdefault((run.task, run.arm), []).append(run)
        elif not result.failed:
            took[run.task, run.arm].append(result.seconds)
    parts = [
        Part(place, len(runs), fmean(took[place]) if place in took else seconds_of_run(runs[0]))
        for place, runs in missing.items()
    ]
    pilots = [run for run in plan.asked if run.seed in PILOT_SEEDS]
    fresh = Counter(
        (run.task, run.start, run.arm)
        for run in plan.asked
        if run.seed not in (*PILOT_SEEDS, *TUNING_SEEDS)
    )
    seeds = f" with up to {max(fresh.values())} seeds"
    if pilots:
        whole = all(plan.asked[run] for run in pilots)
        seeds += ", by the spread of the pilots" if whole else ", and more where pilots ask for it"
    known = len(plan.asked) - sum(part.count for part in parts)
    return Estimate(("task", "contender", "runs"), tuple(parts), known, seeds)


def seconds_of_run(run: Run) -> float:
    """Return about how long a run of the contest takes: it is prepared, takes a few steps, and some
    examples are evaluated.

    Example:
        >>> seconds_of_run(Run("MLP", "default", "AdamW", 0.003, seed=0)) > 0
        True
    """
    train, valid, test = TASKS[run.task][1](run.scale)
    some = Split(valid.inputs[:1000], valid.targets[:1000])
    with one_thread(), warnings.catch_warnings(action="ignore"), torch.random.fork_rng(devices=[]):
        started = time.process_time()
        model, graph = prepared(run)
        try:
            optimizer = ARMS[run.arm][1](model, graph, 1e-6)
        except PathspaceError:
            return time.process_time() - started
        times = [time.process_time()]
        for _ in range(1 + STEPS):
            optimizer.zero_grad()
            drawn = torch.randint(0, len(train), (BATCH[run.scale],))
            scores, targets = model(train.inputs[drawn]), train.targets[drawn]
            functional.cross_entropy(
                scores.flatten(0, -2), targets.flatten(), ignore_index=-1
            ).backward()
            optimizer.step()
            times.append(time.process_time())
        score(model.eval(), some)
        of_example = (time.process_time() - times[-1]) / len(some)
    # (the first step is a warm-up)
    of_step = (times[-1] - times[1]) / STEPS
    return times[1] - started + run.steps * of_step + (2 * len(valid) + len(test)) * of_example


def of_time(setting: Setting) -> Estimate:
    """Estimate the rounds of ``time``, by the times and the spread of a few.

    Args:
        setting: how it would be run.
    """
    parts, most = [], max(LEAST, setting.budget(MOST))
    with one_thread(), torch.random.fork_rng(devices=[]):
        for name, make, shape, _, path_sgd in CASES:
            batch = torch.randn(shape).to(make_fabric(setting.device, 1).device)
            steps = setting.budget(TIMED)
            times = alternate(contenders_of(make, batch, steps, path_sgd), ROUNDS)
            seconds = steps * sum(fmean(values) for values in times.values())
            # (one more round is a warm-up)
            parts.append(Part((name,), 1 + min(most, rounds_needed(times)), seconds))
    return Estimate(("model", "rounds"), tuple(parts))


def of_toy(setting: Setting) -> Estimate:
    """Estimate the steps of ``toy``: networks side by side, first at all rates, then at the best.

    Args:
        setting: how it would be run.
    """
    steps, parts = setting.budget(toys.STEPS), []
    arms = len(toys.ARMS)
    for what, networks in (
        ("tuning", arms * len(toys.RATES) * len(toys.TUNING_SEEDS)),
        ("fresh seeds", arms * len(toys.SEEDS)),
    ):
        same = [0.0] * networks
        with one_thread():
            # (the first step is a warm-up)
            toys.errors_of(toys.train_toys(range(networks), same, same, same, 1), same, 0)
            started = time.perf_counter()
            made = toys.train_toys(range(networks), same, same, same, TOY_STEPS)
            middle = time.perf_counter()
            toys.errors_of(made, same, 0)
        of_look = time.perf_counter() - middle
        looks = min(steps, toys.LOOKS) + 3
        each = (middle - started) / TOY_STEPS + looks * of_look / steps
        parts.append(Part((what, f"{networks}"), steps, each))
    return Estimate(("what", "networks", "steps"), tuple(parts))


def of_directions(setting: Setting) -> Estimate:
    """Estimate the steps of ``ideal-direction``, by some of them.

    Args:
        setting: how it would be run.
    """
    # (one step is a warm-up)
    for steps in (1, TOY_STEPS):
        started = time.perf_counter()
        toys.ideal_direction(replace(setting, shrink=toys.STEPS // steps))
        each = (time.perf_counter() - started) / steps
    return Estimate(("what", "steps"), (Part(("training",), setting.budget(toys.STEPS), each),))


OTHERS: dict[str, Callable[[Setting], Estimate]] = {
    "optimizers": of_contest,
    "time": of_time,
    "toy": of_toy,
    "ideal-direction": of_directions,
}
