"""The contest of the leaderboard: which cases are run, with which rates and seeds."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ..intervals import t_interval
from .experiment import TUNING_SEEDS, Setting
from .holm import Claim, gain, seeds_needed
from .leaderboard_run import ARMS, ONLY, SIMPLE, STARTS, Result, Run, rates
from .leaderboard_tasks import STEPS, TASKS, chance

OURS, RIVAL = "gauge-fixed AdamW", "AdamW"
DEFAULT, SCRAMBLED = STARTS[:2]
KINDS = (RIVAL, "SGD", "Muon", "LoRA+")
ORDER = tuple(TASKS)
# these seeds say how many others a verdict needs, and are not reported
PILOT_SEEDS = range(5)
# a second tuning seed tries so many rates
FINALISTS = 3
# a search that ends at its edge goes on for so many rates
FURTHER = 6


@dataclass(frozen=True)
class Entry:
    """The results of a contender on a task from a start, one for each of the fresh seeds, at the
    rate that was chosen; ``edge``: it is the lowest or highest that was tried.
    """

    start: str
    task: str
    arm: str
    lr: float
    results: tuple[Result, ...]
    scale: str = "embedded"
    edge: bool = False

    @property
    def losses(self) -> list[float]:
        """Test loss by seed; a run that failed counts as a guess."""
        guess = chance(self.task, self.scale)
        return [guess if one.failed else one.test for one in self.results]

    def show(self) -> str:
        """Mean and interval, the rate (* at the edge of the search), failed runs."""
        failed = sum(one.failed for one in self.results)
        return (
            f"{t_interval(self.losses).show('.3f')}"
            f" ({self.lr:g}{'*' * self.edge}{f', {failed} failed' if failed else ''})"
        )


Case = tuple[str, str, str]


def cases() -> Iterator[Case]:
    """Start, task and contender of all that is compared."""
    for task in ORDER:
        for arm in ARMS:
            for start in STARTS if arm != SIMPLE else (DEFAULT,):
                if task in ONLY.get(arm, TASKS):
                    yield start, task, arm


def pairs() -> Iterator[tuple[str, str, Case, Case]]:
    """All claims: the family, the statement, the case that ends lower, and the other one."""
    for task in ORDER:
        yield (
            "better",
            statement(task, SCRAMBLED, RIVAL),
            (SCRAMBLED, task, OURS),
            (SCRAMBLED, task, RIVAL),
        )
    for arm in (RIVAL, "SGD"):
        for task in ORDER:
            yield f"{arm} hurt", hurts(task, arm), (DEFAULT, task, arm), (SCRAMBLED, task, arm)
    for task in ORDER:
        for start in (DEFAULT, SCRAMBLED):
            for kind in KINDS:
                if (start, kind) != (SCRAMBLED, RIVAL) and task in ONLY.get(kind, TASKS):
                    yield (
                        "other",
                        statement(task, start, kind),
                        (start, task, f"gauge-fixed {kind}"),
                        (start, task, kind),
                    )


def asked() -> set[Case]:
    """The cases that claims are about."""
    return {case for *_, ours, rival in pairs() for case in (ours, rival)}


def compared(what: str, ours: Entry, rival: Entry) -> Claim:
    """The claim that the first entry ends lower, not yet corrected for others."""
    losses = list(zip(ours.losses, rival.losses, strict=False))
    return gain(what, [a for a, _ in losses], [b for _, b in losses])


def statement(task: str, start: str, kind: str) -> str:
    """The claim that the gauge is better."""
    return f"{task}, {start} start: gauge-fixed {kind} ends lower than {kind}"


def hurts(task: str, arm: str) -> str:
    """The claim that rescaling hurts."""
    return f"{task}: {arm} ends lower from the {DEFAULT} start than from the {SCRAMBLED} one"


def contest(chosen: Sequence[Case], setting: Setting) -> list[Entry]:
    """Tune and test contenders.

    A tuning seed tries all rates, and further ones while the best lies at an edge or the lowest
    fails; another seed tries the best three: the rate is that of the least mean validation loss.
    With ``setting.by_power``, pilot seeds at that rate say how many fresh seeds each pair of a
    claim needs; if these spread more than the pilot's, their spread says how many more.
    """
    bench = Bench(setting)
    tried, best = bench.search(chosen)

    def entries(seeds: Mapping[Case, Iterable[int]]) -> dict[Case, Entry]:
        found = bench.results({(case, rate): list(seeds[case]) for case, rate in best.items()})
        return {
            case: Entry(
                *case, rate, ended, setting.scale, rate in (tried[case][0], tried[case][-1])
            )
            for (case, rate), ended in found.items()
            if ended
        }

    def fresh() -> dict[Case, Entry]:
        first = len(PILOT_SEEDS)
        return entries({case: range(first, first + counts[case]) for case in best})

    least, claimed = len(setting.seeds), asked()
    counts = {case: least if case in claimed else max(2, least // 2) for case in best}
    if setting.by_power:
        pilot = entries({case: PILOT_SEEDS if case in claimed else () for case in best})
        counts |= seeds_by_power(pilot, pilot, least, setting.most_seeds)
        counts |= seeds_by_power(pilot, fresh(), least, setting.most_seeds)
    return list(fresh().values())


@dataclass(frozen=True)
class Bench:
    """Runs of contenders, and the search for their rates."""

    setting: Setting

    def results(
        self, wanted: Mapping[tuple[Case, float], Sequence[int]]
    ) -> dict[tuple[Case, float], tuple[Result, ...]]:
        """Carry out runs: case and rate, with seeds."""
        runs = {key: [self._run(*key, seed) for seed in seeds] for key, seeds in wanted.items()}
        asked = list(dict.fromkeys(run for some in runs.values() for run in some))
        known = dict(zip(asked, self.setting.run(asked), strict=True))
        return {key: tuple(known[run] for run in some) for key, some in runs.items()}

    def search(
        self, chosen: Sequence[Case]
    ) -> tuple[dict[Case, tuple[float, ...]], dict[Case, float]]:
        """The rates that were tried, and the best one of each case."""
        tried = {case: rates(case[2], case[0]) for case in chosen}
        first = self._ranked(tried, TUNING_SEEDS[:1])
        for _ in range(FURTHER):
            lowest = self.results({(case, tried[case][0]): TUNING_SEEDS[:1] for case in first})
            more = {
                case: further(tried[case], ranked[0], lowest[case, tried[case][0]][0].failed)
                for case, ranked in first.items()
            }
            more = {case: some for case, some in more.items() if some != tried[case]}
            if not more:
                break
            tried |= more
            first |= self._ranked(more, TUNING_SEEDS[:1])
        few = {case: ranked[:FINALISTS] for case, ranked in first.items()}
        return tried, {case: one[0] for case, one in self._ranked(few, TUNING_SEEDS).items()}

    def _ranked(
        self, wanted: Mapping[Case, Sequence[float]], seeds: Sequence[int]
    ) -> dict[Case, list[float]]:
        """The rates of each case, the best first."""
        found = self.results({(case, lr): seeds for case, some in wanted.items() for lr in some})
        return {
            case: sorted(some, key=lambda lr: (_mean_loss(found[case, lr]), lr))
            for case, some in wanted.items()
        }

    def _run(self, case: Case, lr: float, seed: int) -> Run:
        start, task, arm = case
        steps = self.setting.budget(STEPS[self.setting.scale][task])
        return Run(task, start, arm, lr, seed, steps, self.setting.scale)


def further(tried: tuple[float, ...], best: float, fails: bool) -> tuple[float, ...]:
    """Rates with one more where the search may have ended too early."""
    # (their factors alternate)
    if fails or best == tried[0]:
        return (float(f"{tried[0] * tried[1] / tried[2]:.3g}"), *tried)
    if best == tried[-1]:
        return (*tried, float(f"{tried[-1] * tried[-2] / tried[-3]:.3g}"))
    return tried


def _mean_loss(results: Iterable[Result]) -> float:
    losses = [math.inf if one.failed else one.valid for one in results]
    return sum(losses) / len(losses)


def seeds_by_power(
    pilot: Mapping[Case, Entry], spread: Mapping[Case, Entry], least: int, most: int | None = None
) -> dict[Case, int]:
    """How many seeds decide each pair of a claim with a probability of 80 %.

    The effect to be found is the margin, or half of what the pilot shows where that is larger. The
    spread is that of the pilot's entries, or of the first fresh seeds: no number is below theirs.

    Source:
        Wittes and Brittain, The role of internal pilot studies, Statistics in Medicine 1990.
    """
    counts: dict[Case, int] = {}
    families = Counter(family for family, *_ in pairs())
    for family, what, ours, rival in pairs():
        if ours in pilot and rival in pilot and ours in spread and rival in spread:
            shown, found = (compared(what, one[ours], one[rival]) for one in (pilot, spread))
            effect = max(shown.margin, abs(shown.mean) / 2)
            needed = seeds_needed(found.error * math.sqrt(found.count), effect, families[family])
            needed = min(needed, most or needed)
            for case in (ours, rival):
                have = len(spread[case].results) if spread is not pilot else least
                counts[case] = max(counts.get(case, least), have, needed)
    return counts
