"""Trials on the workers of a Dask cluster.

Records travel back over the wire: workers need the library and the data, but no folder in common
with the caller. Each keeps its trials, with their checkpoints, in ``runs/trials`` of the folder in
which it was started.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import CancelledError, Executor
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from pathspace.errors import InputError

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
