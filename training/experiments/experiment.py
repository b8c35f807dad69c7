"""A fair comparison of optimizers: the same budget, the same learning rates to choose from, the same seeds.

Every arm is trained at every learning rate with every seed. The learning rate of an arm is then chosen by the
validation split alone, and only the runs at the chosen rate are shown the test split.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from pathspace import Skeleton
from pathspace.training.experiments.intervals import Interval, t_interval
from pathspace.training.history import History
from pathspace.training.recipe import Init, Recipe, Rule, find_skeleton, prepare
from pathspace.training.task import Task
from pathspace.training.trainer import Tick, Trainer


@dataclass(frozen=True)
class Arm:
    """One contender: an optimizer and the starting point it is given."""

    label: str
    optimizer: str
    init: Init


ARMS = (
    Arm("SGD (default init)", "sgd", "default"),
    Arm("SGD (unit skeleton)", "sgd", "unit-skeleton"),
    Arm("G-SGD (unit skeleton)", "gsgd", "unit-skeleton"),
)


@dataclass(frozen=True)
class Plan:
    """What is to be compared; everything here is shared by all arms.

    Args:
        task: data, model, loss and metric.
        arms: the contenders.
        rates: learning rates each of them may choose from.
        seeds: seeds of model, order of batches and noise; seed s is the same for all arms.
        epochs: passes over the training split, for every run.
        batch_size: examples per step.
        rule: which spanning trees are the skeleton.
    """

    task: Task
    arms: tuple[Arm, ...] = ARMS
    rates: tuple[float, ...] = (0.02, 0.05, 0.1, 0.2, 0.5)
    seeds: tuple[int, ...] = (0, 1, 2)
    epochs: int = 60
    batch_size: int = 32
    rule: Rule = "modulo"

    @property
    def size(self) -> int:
        """Number of runs."""
        return len(self.arms) * len(self.rates) * len(self.seeds)


@dataclass(frozen=True)
class Run:
    """One finished run.

    Args:
        arm: the contender.
        lr: its learning rate.
        seed: its seed.
        history: its epochs.
        failed: it diverged, or ended with a validation metric that the task calls hopeless.
        test: looks at the test split and returns the metric; called for runs at the chosen rate only.
    """

    arm: Arm
    lr: float
    seed: int
    history: History
    failed: bool
    test: Callable[[], float] = field(repr=False)


@dataclass(frozen=True)
class Verdict:
    """What is reported of one arm.

    Args:
        arm: the contender.
        lr: the learning rate that the validation split chose.
        valid: metric on the validation split at that rate, over seeds; it chose the rate, so it flatters.
        test: metric on the test split at that rate, over the seeds that did not diverge.
        test_by_seed: the same, seed by seed.
        diverged: how many seeds diverged at that rate.
        failed: how many runs of this arm failed, at any rate.
    """

    arm: Arm
    lr: float
    valid: Interval
    test: Interval
    test_by_seed: dict[int, float]
    diverged: int
    failed: int


@dataclass(frozen=True)
class Comparison:
    """All runs of a plan, and the verdict on each arm."""

    plan: Plan
    runs: tuple[Run, ...]
    verdicts: tuple[Verdict, ...]

    def chosen(self, verdict: Verdict) -> tuple[Run, ...]:
        """Return the runs of an arm at its chosen learning rate."""
        return tuple(run for run in self.runs if run.arm == verdict.arm and run.lr == verdict.lr)

    def difference(self, first: Verdict, second: Verdict) -> Interval:
        """Return the interval of ``first - second`` on the test split, paired by seed."""
        pairs = first.test_by_seed.keys() & second.test_by_seed.keys()
        return t_interval([first.test_by_seed[seed] - second.test_by_seed[seed] for seed in sorted(pairs)])


def choose_rate(runs: Sequence[Run]) -> float:
    """Return the learning rate with the fewest diverged runs and then the lowest mean validation metric.

    A tie goes to the lower mean validation loss, then to the smaller rate. The test split has no say.

    Args:
        runs: the runs of one arm, at all rates.

    Returns:
        One of their rates.
    """

    def merit(rate: float) -> tuple[float, float, float, float]:
        here = [run.history for run in runs if run.lr == rate]
        sound = [history.last for history in here if history.last is not None and not history.diverged]
        if not sound:
            return (len(here), np.inf, np.inf, rate)
        metric = float(np.mean([record.valid_metric for record in sound]))
        loss = float(np.mean([record.valid_loss for record in sound]))
        return (len(here) - len(sound), metric, loss, rate)

    return min({run.lr for run in runs}, key=merit)


def judge(arm: Arm, runs: Sequence[Run]) -> Verdict:
    """Choose the learning rate of an arm, then look at the test split for the first time.

    Args:
        arm: the contender.
        runs: its runs.

    Returns:
        The verdict.
    """
    rate = choose_rate(runs)
    here = [run for run in runs if run.lr == rate]
    sound = [run for run in here if not run.history.diverged]
    by_seed = {run.seed: run.test() for run in sound}
    return Verdict(
        arm=arm,
        lr=rate,
        valid=t_interval([run.history.last.valid_metric for run in sound if run.history.last]),
        test=t_interval(list(by_seed.values())),
        test_by_seed=by_seed,
        diverged=len(here) - len(sound),
        failed=sum(run.failed for run in runs),
    )


def compare(plan: Plan, begin: Callable[[str], Callable[[Tick], None]] | None = None) -> Comparison:
    """Train every arm at every learning rate with every seed, and judge the arms.

    Args:
        plan: what to compare.
        begin: called with the name of each run before it starts; returns the run's watcher.

    Returns:
        All runs and verdicts.

    Example:
        >>> from pathspace.training.experiments.tasks import load_task
        >>> plan = Plan(load_task("digits-rows", hidden=4), ARMS[:1], rates=(0.1,), seeds=(0,), epochs=1)
        >>> [verdict.lr for verdict in compare(plan).verdicts]
        [0.1]
    """
    skeletons: dict[tuple[str, int], Skeleton] = {}
    runs: list[Run] = []
    for arm in plan.arms:
        for rate in plan.rates:
            for seed in plan.seeds:
                watch = begin(f"{arm.label} lr {rate:g} seed {seed}") if begin else None
                runs.append(_train(plan, arm, rate, seed, skeletons, watch))
    verdicts = (judge(arm, [run for run in runs if run.arm == arm]) for arm in plan.arms)
    return Comparison(plan, tuple(runs), tuple(verdicts))


def _train(
    plan: Plan,
    arm: Arm,
    rate: float,
    seed: int,
    skeletons: dict[tuple[str, int], Skeleton],
    watch: Callable[[Tick], None] | None,
) -> Run:
    recipe = Recipe(arm.optimizer, rate, arm.init, plan.rule, seed)
    skeleton = None
    if recipe.needs_skeleton:
        # All arms and rates of a seed share one skeleton: it is the architecture's, or that of its weights.
        key = (plan.rule, seed)
        if key not in skeletons:
            skeletons[key] = find_skeleton(plan.task, recipe)
        skeleton = skeletons[key]
    model, optimizer = prepare(plan.task, recipe, skeleton)
    trainer = Trainer(
        plan.task,
        model,
        optimizer,
        epochs=plan.epochs,
        batch_size=plan.batch_size,
        seed=seed,
        watch=watch,
    )
    history = trainer.fit()
    last = history.last
    failed = history.diverged or last is None or last.valid_metric > plan.task.hopeless
    return Run(arm, rate, seed, history, failed, lambda: trainer.evaluate(plan.task.test).metric)
