"""Many trials: parallel over processes, each result kept in a file of its own, so that nothing is done twice."""

from __future__ import annotations

import json
import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import asdict
from pathlib import Path

import torch

from pathspace.errors import InputError
from pathspace.files import make_folder, replacing
from pathspace.training.experiments.reproduce.trial import Outcome, Trial, run_trial

FORMAT = 1


class TrialCache:
    """Outcomes on disk, one JSON file per trial, written aside and renamed.

    A run that is killed at any moment keeps every trial that had ended; the next one goes on from there. Files that
    cannot be read are treated as not there, because the trial can be run again.

    Args:
        folder: where the files are; ``None`` keeps nothing.

    Example:
        >>> TrialCache(None).find(Trial("digits-rows", "sgd", 0.1, 0, 1)) is None
        True
    """

    def __init__(self, folder: str | os.PathLike[str] | None) -> None:
        self.folder = None if folder is None else make_folder(folder)

    def find(self, trial: Trial) -> Outcome | None:
        """Return the outcome of a trial, ``None`` if it has not been run."""
        if self.folder is None:
            return None
        try:
            record = json.loads(self._path(trial).read_text(encoding="utf-8"))
            if record["format"] != FORMAT:
                return None
            return Outcome.from_dict(record["outcome"])
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def keep(self, trial: Trial, outcome: Outcome) -> None:
        """Write the outcome of a trial.

        Args:
            trial: what was run.
            outcome: what it led to.

        Raises:
            InputError: the file cannot be written.
        """
        if self.folder is not None:
            record = {"format": FORMAT, "trial": asdict(trial), "outcome": outcome.to_dict()}
            with replacing(self._path(trial)) as temporary:
                temporary.write_text(json.dumps(record) + "\n", encoding="utf-8")

    def _path(self, trial: Trial) -> Path:
        assert self.folder is not None
        return self.folder / f"{trial.key}.json"


def run_all(
    trials: Sequence[Trial],
    cache: TrialCache,
    jobs: int = 1,
    done: Callable[[Trial, Outcome], None] | None = None,
) -> list[Outcome]:
    """Run every trial that the journal does not know, and return all outcomes in order.

    Args:
        trials: what to run; equal trials are run once.
        cache: what is known already, and where results go as soon as they are there.
        jobs: processes; each computes on one thread, so the outcomes do not depend on their number.
        done: called after each trial, known ones included.

    Returns:
        One outcome per trial.

    Raises:
        InputError: ``jobs`` is not positive, or a trial cannot be run.

    Example:
        >>> trial = Trial("digits-rows", "sgd", 0.1, 0, 1, options=(("hidden", 4),))
        >>> first, second = run_all([trial, trial], TrialCache(None))
        >>> first is second
        True
    """
    if jobs < 1:
        raise InputError(f"Trials need a positive number of processes, found {jobs}; give --jobs 1 or more.")
    found: dict[Trial, Outcome] = {}
    missing = []
    for trial in dict.fromkeys(trials):
        outcome = cache.find(trial)
        if outcome is None:
            missing.append(trial)
        else:
            found[trial] = outcome
            if done is not None:
                done(trial, outcome)
    for trial, outcome in _run(missing, jobs):
        cache.keep(trial, outcome)
        found[trial] = outcome
        if done is not None:
            done(trial, outcome)
    return [found[trial] for trial in trials]


def _run(trials: Sequence[Trial], jobs: int) -> Iterator[tuple[Trial, Outcome]]:
    if jobs == 1 or len(trials) < 2:
        for trial in trials:
            yield trial, run_trial(trial)
        return
    # A forked process would inherit torch's threads in the state they happen to be in.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(jobs, len(trials)), context, torch.set_num_threads, (1,)) as pool:
        waiting: dict[Future[Outcome], Trial] = {pool.submit(run_trial, trial): trial for trial in trials}
        try:
            for future in as_completed(waiting):
                yield waiting[future], future.result()
        finally:
            # After an error or an interrupt nothing new is begun.
            pool.shutdown(wait=True, cancel_futures=True)
