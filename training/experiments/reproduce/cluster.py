"""Trials on the workers of a Dask cluster: ``pathspace reproduce NAME --cluster ADDRESS``.

The scheduler hands out the trials, and again those of a worker that died. Records travel over the
wire: workers need the library and the data, but no folder in common with the caller. A worker keeps
its trials, with their checkpoints, in ``runs/trials`` of the folder in which it was started; one
that is started there again goes on from them.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import CancelledError
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pathspace.errors import InputError

from .trial import Outcome, Trial
from .trial_cache import TRIALS, TrialCache, run_all

if TYPE_CHECKING:
    from distributed import Client

# How long to wait for the scheduler's answer, and for its first worker.
PATIENCE_SECONDS = 20.0
# The threads of a worker take turns: the random state of torch belongs to the process.
_TURN = threading.Lock()


@contextmanager
def connected(cluster: str, patience: float = PATIENCE_SECONDS) -> Iterator[Client]:
    """A context with a connection to a scheduler that has a worker.

    Args:
        cluster: address of the scheduler, such as ``tcp://host:8786``, or the file that it wrote
            (``dask scheduler --scheduler-file``).
        patience: how many seconds to wait for an answer, and then for a worker.

    Raises:
        InputError: Dask is not installed, nobody answers, or there is no worker.
    """
    if not find_spec("distributed"):
        raise InputError(
            "Dask distributed is not installed; run pip install 'pathspace[cluster]', or do not"
            " pass --cluster."
        )
    from distributed import Client

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
        except TimeoutError as error:
            raise InputError(
                f"The Dask scheduler at '{cluster}' has no worker; start some with dask worker"
                f" {cluster} --nthreads 1."
            ) from error
        yield client


def run_on(
    client: Client, trials: Sequence[Trial], cache: TrialCache
) -> Iterator[tuple[Trial, Outcome]]:
    """Run trials on the workers of a cluster, and keep each as it ends.

    Args:
        client: a connection, see :func:`connected`.
        trials: what to run.
        cache: where records go.

    Yields:
        Each trial with its outcome, in the order in which they end.

    Raises:
        InputError: a trial cannot be run, its workers died again and again,
            or the scheduler is gone.
    """
    from distributed import KilledWorker, as_completed

    futures = {client.submit(run_here, trial, trial.key, pure=False): trial for trial in trials}
    try:
        for future in as_completed(futures, loop=client.loop):
            record = future.result()
            cache.store(futures[future], record)
            yield futures[future], Outcome.from_dict(record["outcome"])
    except KilledWorker as error:
        raise InputError(
            "Several workers died during the same trial, the last one at"
            f" {error.last_worker.address}; look at their logs, often their memory was full. The"
            " same command goes on from what has ended."
        ) from error
    except CancelledError as error:
        raise InputError(
            "The Dask scheduler has gone; start it again: the same command goes on from what has"
            " ended."
        ) from error


def run_here(trial: Trial, key: str) -> dict[str, Any]:
    """The work of a worker: run a trial, unless its outcome is known here.

    Args:
        trial: what to run.
        key: its name where it was asked for, with the data that it has there.

    Returns:
        Its record, with the provenance of this machine.

    Raises:
        InputError: the data differ here, or the trial cannot be run.
    """
    with _TURN:
        if trial.key != key:
            raise InputError(
                f"A worker has other data for '{trial.task}' than the machine that asks; put the"
                " same data on all machines."
            )
        cache = TrialCache(TRIALS)
        run_all([trial], cache)
    record = cache.record(trial)
    assert record is not None
    return record
