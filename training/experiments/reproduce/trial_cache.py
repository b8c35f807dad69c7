"""Runs as data, shared by several processes, with one file per outcome, so that none runs twice."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

import torch
from filelock import FileLock, Timeout

from pathspace.errors import InputError, PathspaceError
from pathspace.files.writing import make_folder, write_text
from pathspace.training.experiments.json_lines import append_lines, read_lines

from .provenance import provenance, run_key

FORMAT = 3
# Where commands keep trials, in the folder in which they are started.
TRIALS = Path("runs") / "trials"
# Seconds between two checks of other processes.
PAUSE = 0.2


class Runnable(Protocol):
    """A run, named completely by plain values: a dataclass."""

    @property
    def data(self) -> str:
        """A digest of its data."""

    @property
    def key(self) -> str:
        """A name that no other run has, made of its settings and its data."""

    def carry_out(self, folder: Path | None = None) -> Any:
        """Carry it out, with checkpoints in the folder, and return its outcome."""

    def outcome(self, values: dict[str, Any]) -> Any:
        """Read the plain values of an outcome."""

    @property
    def unknown(self) -> Any:
        """What stands for the outcome of a run that has not ended: no rate that was tried is
        worse.
        """


# Carries out runs somewhere, keeps them in a cache, and yields them with outcomes as they end.
Spread = Callable[[Sequence[Any], "TrialCache"], Iterator[tuple[Any, Any]]]


class TrialCache:
    """Outcomes on disk, one JSON file per trial, written aside and renamed.

    A run that is killed at any moment keeps every trial that had ended and the checkpoints of
    the others; the next one goes on from there. Processes that share the folder, on one
    machine or on several, share the trials: each is locked by whoever runs it, and the lock of
    a process that died is free. Files that cannot be read are treated as not there, because
    the trial can be run again. A trial of earlier code is known, until its file and its lines in
    the journal are deleted; its provenance says what computed it.

    Args:
        folder: where the files are; ``None`` keeps outcomes in memory alone.
        journal: a file that gets a line for every trial, and knows those that are
            in it, of several lines of one trial the last; ``None`` for none.

    Example:
        >>> from pathspace.training.experiments.reproduce.trial import Trial
        >>> TrialCache(None).find(Trial("digits-rows", "sgd", 0.1, 0, 1)) is None
        True
    """

    def __init__(self, folder: str | os.PathLike[str] | None, journal: Path | None = None) -> None:
        self.folder = None if folder is None else make_folder(folder)
        self.journal = journal
        self._noted: dict[str, dict[str, str]] = {}
        self._here: dict[str, dict[str, Any]] = {}
        self._known = {record["key"]: record for record in journal_lines(journal)}

    def find(self, trial: Runnable) -> Any:
        """Return the outcome of a trial, ``None`` if it has not been run."""
        record = self.record(trial)
        return None if record is None else trial.outcome(record["outcome"])

    def record(self, trial: Runnable) -> dict[str, Any] | None:
        """Return what is kept of a trial: its outcome and its provenance;
        ``None`` if it has not been run.
        """
        try:
            record = self._known.get(trial.key) or self._here.get(trial.key)
            if record is None:
                if self.folder is None:
                    return None
                record = json.loads(self._path(trial).read_text(encoding="utf-8"))
            trial.outcome(record["outcome"])
            return dict(record) if record["format"] == FORMAT else None
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def keep(self, trial: Any, outcome: Any) -> None:
        """Write the outcome of a trial that this process has run, and its provenance.

        Args:
            trial: what was run.
            outcome: what it led to.

        Raises:
            InputError: the file cannot be written.
        """
        record = {
            "format": FORMAT,
            "key": trial.key,
            "trial": asdict(trial),
            "data": trial.data,
            "outcome": outcome.to_dict(),
            "provenance": provenance(),
        }
        self.store(trial, record)

    def store(self, trial: Runnable, record: dict[str, Any]) -> None:
        """Write the record of a trial, which may have been run elsewhere.

        Args:
            trial: what was run.
            record: what :meth:`record` returned where it was run.

        Raises:
            InputError: the file cannot be written.
        """
        if self.folder is None:
            self._here[trial.key] = record
        else:
            write_text(json.dumps(record), str(self._path(trial)))

    def carry_out(self, trial: Runnable) -> Any:
        """Run a trial unless its outcome is known, from its checkpoint if it has one.

        Args:
            trial: what to run.

        Returns:
            The outcome, ``None`` if another process is at it.

        Raises:
            InputError: the trial cannot be run, or a file cannot be written.
        """
        known = self.find(trial)
        if known is not None:
            return known
        if self.folder is None:
            outcome = trial.carry_out()
            self.keep(trial, outcome)
            return outcome
        begun = make_folder(self.folder / f"{trial.key}.begun")
        try:
            with FileLock(begun / "lock", blocking=False):
                # another process may have ended it in between
                outcome = self.find(trial)
                if outcome is None:
                    outcome = trial.carry_out(begun)
                    self.keep(trial, outcome)
                shutil.rmtree(begun, ignore_errors=True)
        except Timeout:
            return None
        return outcome

    def note(self, trial: Runnable) -> None:
        """Note what computed a trial that has ended, and append the trial to the
        journal, unless it is there.

        Args:
            trial: what was run.

        Raises:
            InputError: the journal cannot be written.
        """
        record = self.record(trial)
        if record is None:
            return
        self._noted[trial.key] = record["provenance"]
        if self.journal is None or trial.key in self._known:
            return
        self._known[trial.key] = record
        try:
            append_lines(self.journal, [record])
        except OSError as error:
            raise InputError(
                f"The journal '{self.journal}' cannot be written ({error.strerror})."
            ) from error

    @property
    def origins(self) -> list[dict[str, str]]:
        """What computed the trials that were noted, in the order of the journal."""
        keys = dict.fromkeys((*self._known, *self._noted))
        return [self._noted[key] for key in keys if key in self._noted]

    def _path(self, trial: Runnable) -> Path:
        assert self.folder is not None
        return self.folder / f"{trial.key}.json"


def journal_lines(journal: Path | None) -> Iterator[dict[str, Any]]:
    """Read the lines of a journal. In older ones of ``optimizers``, a line before those of another
    commit or computer says what computed them.

    Args:
        journal: the file; ``None``, or one that is not there, has no lines.
    """
    computed: dict[str, str] = {}
    for line in read_lines(journal) if journal is not None else ():
        computed = line.get("computed", computed)
        if "key" in line:
            yield line
        elif "run" in line:
            key = run_key(line["run"], line["data"])
            yield {"key": key, "outcome": line["result"], "provenance": computed, "format": FORMAT}


def run_all(
    trials: Sequence[Any],
    cache: TrialCache,
    jobs: int = 1,
    done: Callable[[Any, Any], None] | None = None,
    elsewhere: Spread | None = None,
    until: float = math.inf,
) -> list[Any]:
    """Run every trial that the cache does not know, and return all outcomes in order.

    Args:
        trials: what to run; equal trials are run once.
        cache: what is known already, and where results go as soon as they are there.
        jobs: processes; each computes on one thread, so the outcomes do not depend on their number.
            The others do the work of one that is killed.
        done: called after each trial, known ones included.
        elsewhere: runs the unknown trials in place of processes of this machine, keeps them in the
            cache and yields them as they end.
        until: no trial begins after this reading of ``time.time``.

    Returns:
        One outcome per trial, ``None`` for one that time did not suffice for.

    Raises:
        InputError: ``jobs`` is not positive, or a trial cannot be run.

    Example:
        >>> from pathspace.training.experiments.reproduce.trial import Trial
        >>> trial = Trial("digits-rows", "sgd", 0.1, 0, 1, options=(("hidden", 4),))
        >>> first, second = run_all([trial, trial], TrialCache(None))
        >>> first is second
        True
    """
    if jobs < 1:
        raise InputError(
            f"Trials need a positive number of processes, found {jobs}; give --jobs 1 or more."
        )
    found: dict[Any, Any] = {}
    unique = list(dict.fromkeys(trials))
    with tempfile.TemporaryDirectory() as temporary:
        if cache.folder is None and jobs > 1:
            cache = TrialCache(temporary, cache.journal)
        known = {trial: outcome for trial in unique if (outcome := cache.find(trial)) is not None}
        unknown = [trial for trial in unique if trial not in known]
        ended = elsewhere(unknown, cache) if elsewhere else _processes(unknown, cache, jobs, until)
        for trial, outcome in chain(known.items(), ended):
            found[trial] = outcome
            cache.note(trial)
            if done is not None:
                done(trial, outcome)
    return [found.get(trial) for trial in trials]


def _processes(
    waiting: Sequence[Runnable], cache: TrialCache, jobs: int, until: float
) -> Iterator[tuple[Runnable, Any]]:
    """Yield what other processes find, then what is left for this one."""
    # A forked process would inherit the state of torch's threads.
    context = multiprocessing.get_context("spawn")
    workers = [
        context.Process(target=_work, args=(waiting, cache.folder, until), daemon=True)
        for _ in range(min(jobs, len(waiting)) if jobs > 1 else 0)
    ]
    try:
        for worker in workers:
            worker.start()
        while any(worker.is_alive() for worker in workers):
            time.sleep(PAUSE)
            ended = {
                trial: outcome for trial in waiting if (outcome := cache.find(trial)) is not None
            }
            waiting = [trial for trial in waiting if trial not in ended]
            yield from ended.items()
    finally:
        # After an error or an interrupt no process continues in the background.
        for worker in workers:
            worker.terminate()
            worker.join()
    # All trials without processes, and otherwise those that none of them could end:
    # here their errors are seen.
    yield from _turns(waiting, cache, until)


def _turns(
    waiting: Sequence[Runnable], cache: TrialCache, until: float
) -> Iterator[tuple[Runnable, Any]]:
    """Run trials until time is up; those that run in other processes come last."""
    while waiting:
        busy = []
        for trial in waiting:
            if time.time() >= until:
                return
            outcome = cache.carry_out(trial)
            if outcome is None:
                busy.append(trial)
            else:
                yield trial, outcome
        waiting = busy
        if waiting:
            time.sleep(PAUSE)


def _work(trials: Sequence[Runnable], folder: Path, until: float) -> None:
    """The work of one of several processes; the parent process raises its error."""
    torch.set_num_threads(1)
    try:
        for _ in _turns(trials, TrialCache(folder), until):
            pass
    except PathspaceError:
        raise SystemExit(1) from None
