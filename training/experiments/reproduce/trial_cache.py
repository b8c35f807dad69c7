"""Runs as data, each with one file for its outcome, so that none runs twice."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import (
    BrokenExecutor,
    CancelledError,
    Executor,
    ProcessPoolExecutor,
    as_completed,
)
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from filelock import FileLock

from pathspace.diagnostics.shared.tables import plain
from pathspace.errors import InputError
from pathspace.files.writing import make_folder, write_text

from ..json_lines import append_lines, read_lines
from .trial import provenance, run_key

FORMAT = 3
# Where commands keep trials, in the folder in which they are started.
TRIALS = Path("runs") / "trials"
# torch has one random state per process: threads of a worker take turns
_TURN = threading.Lock()


class TrialCache:
    """Outcomes on disk, one JSON file per trial; without a folder they stay in memory.

    A run that is killed keeps every trial that had ended and the checkpoints of the others. Files
    that cannot be read are treated as not there. A trial of earlier code is known; its provenance
    says what computed it. The journal gets a line for every trial, and knows those in it, of
    several the last.
    """

    def __init__(self, folder: str | os.PathLike[str] | None, journal: Path | None = None) -> None:
        self.folder = None if folder is None else make_folder(folder)
        self.journal = journal
        self._known = {record["key"]: record for record in journal_lines(journal)}
        self._written, self._noted = {*self._known}, set[str]()

    def find(self, trial: Any) -> Any:
        """Return the outcome of a trial, ``None`` if it has not been run."""
        record = self.record(trial)
        return None if record is None else trial.outcome(record["outcome"])

    def record(self, trial: Any) -> dict[str, Any] | None:
        """Return what is kept of a trial, outcome and provenance, if it has been run."""
        record = self._known.get(trial.key)
        try:
            if record is None and self.folder is not None:
                record = json.loads(self._file(trial, ".json").read_text(encoding="utf-8"))
            if record is None or record["format"] != FORMAT:
                return None
            trial.outcome(record["outcome"])
            return dict(record)
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def carry_out(self, trial: Any) -> dict[str, Any]:
        """Return the record of a trial; one that is not known is run, from its checkpoint if it
        has one, and kept. Of two processes with one folder, the second one waits for the first.
        """
        if self.folder is None:
            return self.record(trial) or self._run(trial, None)
        begun, lock = self._file(trial, ".begun"), self._file(trial, ".lock")
        with FileLock(lock):
            record = self.record(trial) or self._run(trial, make_folder(begun))
            shutil.rmtree(begun, ignore_errors=True)
            # (one that waits for this file finds the record)
            lock.unlink(missing_ok=True)
        return record

    def _run(self, trial: Any, folder: Path | None) -> dict[str, Any]:
        outcome = trial.carry_out(folder)
        told = {
            "format": FORMAT,
            "key": trial.key,
            "trial": asdict(trial),
            "data": trial.data,
            "outcome": plain(asdict(outcome)),
            "provenance": provenance(),
        }
        # (as a file has it)
        record: dict[str, Any] = json.loads(json.dumps(told))
        self.keep(trial, record)
        return record

    def keep(self, trial: Any, record: dict[str, Any]) -> None:
        """Keep the record of a trial."""
        self._known[trial.key] = record
        if self.folder is not None:
            write_text(json.dumps(record), str(self._file(trial, ".json")))

    def note(self, trial: Any) -> Any:
        """Append a trial that has ended to the journal, unless it is there; return its outcome."""
        record = self.record(trial)
        assert record is not None, "a trial that has ended is known"
        self._known[trial.key] = record
        self._noted.add(trial.key)
        if self.journal is not None and trial.key not in self._written:
            self._written.add(trial.key)
            try:
                append_lines(self.journal, [record])
            except OSError as error:
                raise InputError(
                    f"The journal '{self.journal}' cannot be written ({error.strerror})."
                ) from error
        return trial.outcome(record["outcome"])

    @property
    def origins(self) -> list[dict[str, str]]:
        """What computed the trials that were noted, in the order of the journal."""
        return [one["provenance"] for key, one in self._known.items() if key in self._noted]

    def _file(self, trial: Any, ending: str) -> Path:
        assert self.folder is not None
        return self.folder / f"{trial.key}{ending}"


def journal_lines(journal: Path | None) -> Iterator[dict[str, Any]]:
    """Read a journal; in older ones a line says what computed those behind it."""
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
    done: Callable[[Any], None] | None = None,
    elsewhere: Executor | None = None,
) -> list[Any]:
    """Run every trial that the cache does not know, in so many processes of one thread each or
    ``elsewhere``, and return all outcomes in order. Equal trials are run once; ``done`` is called
    after each, known ones included.
    """
    found: dict[Any, Any] = {}

    def ended(trial: Any) -> None:
        found[trial] = cache.note(trial)
        if done is not None:
            done(trial)

    unknown = []
    for trial in dict.fromkeys(trials):
        if cache.record(trial) is None:
            unknown.append(trial)
        else:
            ended(trial)
    for trial, record in _records(unknown, cache, jobs, elsewhere):
        cache.keep(trial, record)
        ended(trial)
    return [found[trial] for trial in trials]


def _records(
    trials: Sequence[Any], cache: TrialCache, jobs: int, elsewhere: Executor | None
) -> Iterator[tuple[Any, Any]]:
    """Yield the record of each trial as it ends; with one process they run here, in turn."""
    if (jobs == 1 and elsewhere is None) or not trials:
        for trial in trials:
            yield trial, cache.carry_out(trial)
        return
    # (workers elsewhere have folders of their own)
    folder = TRIALS if elsewhere else cache.folder
    with nullcontext(elsewhere) if elsewhere else processes(jobs) as pool:
        futures = {pool.submit(run_here, trial, trial.key, folder): trial for trial in trials}
        for future in as_completed(futures):
            yield futures[future], future.result()


def run_here(trial: Any, key: str, folder: Path | None) -> dict[str, Any]:
    """The work of another process; ``key`` is the trial's name where it was asked for."""
    with _TURN:
        if trial.key != key:
            raise InputError(
                f"A worker has other data for '{trial.task}' than the machine that asks; put the"
                " same data on all machines."
            )
        return TrialCache(folder).carry_out(trial)


@contextmanager
def processes(jobs: int) -> Iterator[Executor]:
    """A context with so many processes; after an error or an interrupt none of them goes on."""
    # (a forked process would inherit the state of torch's threads)
    pool = ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn"))
    before = {*multiprocessing.active_children()}
    try:
        yield pool
    except BrokenExecutor as error:
        raise InputError(
            "A process was killed during a trial, often because memory was full; take fewer --jobs."
            " The same command goes on from what has ended."
        ) from error
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for process in {*multiprocessing.active_children()} - before:
            # (Lightning takes SIGTERM for a wish; checkpoints are whole at any moment)
            process.kill()
            process.join()


# How long to wait for the scheduler's answer, and for its first worker.
PATIENCE_SECONDS = 20.0


@contextmanager
def connected(cluster: str, patience: float = PATIENCE_SECONDS) -> Iterator[Executor]:
    """A context with the workers of a Dask scheduler, which has at least one.

    ``cluster`` is the scheduler's address, such as ``tcp://host:8786``, or the file that it wrote
    (``dask scheduler --scheduler-file``). The scheduler hands out the trials, and again those of a
    worker that died.
    """
    if not find_spec("distributed"):
        raise InputError(
            "Dask distributed is not installed; run pip install 'pathspace[cluster]', or do not"
            " pass --cluster."
        )
    from distributed import Client, KilledWorker

    try:
        address = (
            json.loads(Path(cluster).read_text())["address"] if Path(cluster).is_file() else cluster
        )
        client = Client(address, timeout=patience, set_as_default=False)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"No Dask scheduler answers at '{cluster}'; start one with dask scheduler, and give"
            " --cluster its address, such as tcp://host:8786, or the file that it wrote."
        ) from error
    with client:
        try:
            client.wait_for_workers(1, timeout=patience)
            yield client.get_executor(pure=False)
        except TimeoutError as error:
            raise InputError(
                f"The Dask scheduler at '{cluster}' has no worker; start some with dask worker"
                f" {cluster} --nthreads 1."
            ) from error
        except KilledWorker as error:
            raise InputError(
                "Several workers died during the same trial, the last one at"
                f" {error.last_worker.address}; look at their logs, often their memory was full."
                " The same command goes on from what has ended."
            ) from error
        except CancelledError as error:
            raise InputError(
                "The Dask scheduler has gone; start it again: the same command goes on from what"
                " has ended."
            ) from error
