"""``optimizers``: a leaderboard from default starts, from rescaled copies of them, and from unit skeletons."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pathspace.files import make_folder
from pathspace.training.experiments.reproduce.leaderboard_run import ARMS, ONLY, TASKS, Result, Run, carry_out, rates

TUNING_SEEDS = (1000,)


class Journal:
    """Results of runs in a file of one line each, so that an interrupted contest goes on where it was.

    Args:
        path: the file; ``None`` keeps nothing.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.known: dict[Run, Result] = {}
        if path is not None and path.exists():
            for line in path.read_text(encoding="utf-8").splitlines():
                entry = json.loads(line)
                values: dict[str, Any] = {
                    key: math.nan if value is None else value for key, value in entry["result"].items()
                }
                self.known[Run(**entry["run"])] = Result(**values)

    def result(self, run: Run) -> Result:
        """The result of a run, which is carried out unless it is known."""
        if run not in self.known:
            self.known[run] = carry_out(run)
            if self.path is not None:
                make_folder(str(self.path.parent))
                line = json.dumps({"run": asdict(run), "result": self.known[run].to_dict()})
                with self.path.open("a", encoding="utf-8") as file:
                    file.write(line + "\n")
        return self.known[run]


def contest(
    result: Callable[[Run], Result],
    starts: Sequence[str],
    seeds: Sequence[int],
    steps: int,
    tasks: Sequence[str] = tuple(TASKS),
    arms: Sequence[str] = tuple(ARMS),
) -> Iterator[tuple[str, str, str, float, list[Result]]]:
    """Tune and test every contender on every task from every start.

    The rate is that of the least validation loss of the tuning seed; the other seeds are new.

    Args:
        result: carries out a run.
        starts: where to start.
        seeds: seeds that are reported.
        steps: steps of a run.
        tasks: which tasks.
        arms: which contenders.

    Yields:
        Start, task, contender, rate, and one result by seed.
    """
    for start in starts:
        for task in tasks:
            for arm in arms:
                if task not in ONLY.get(arm, TASKS):
                    continue
                table = {}
                for rate in rates(arm):
                    tried = [result(Run(task, start, arm, rate, seed, steps)) for seed in TUNING_SEEDS]
                    table[rate] = math.inf if any(one.failed for one in tried) else sum(one.valid for one in tried)
                best = min(table, key=lambda rate: (table[rate], rate))
                yield start, task, arm, best, [result(Run(task, start, arm, best, seed, steps)) for seed in seeds]


__all__ = ["TUNING_SEEDS", "Journal", "contest"]
