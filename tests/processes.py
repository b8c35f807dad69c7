"""Work done by several processes that talk through gloo."""

from __future__ import annotations

import gc
import multiprocessing
import os
import shutil
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from filelock import FileLock

Work = Callable[[int, Path], None]


def several_processes(work: Work, folder: Path, count: int) -> None:
    """Call ``work(rank, folder)``, a function of a module, in each of some processes of one group.

    Args:
        work: what each process does, told its rank.
        folder: where the processes find each other, and leave what they found.
        count: number of processes.
    """
    # all of them come from one process that has imported everything once
    distributed = ("fsdp", "tensor.parallel", "checkpoint.state_dict")
    modules = [f"torch.distributed.{name}" for name in distributed]
    multiprocessing.set_forkserver_preload(
        [*modules, "torch._functorch.aot_autograd", "pathspace.training"]
    )
    mp.start_processes(
        _join, args=(work, folder, count), nprocs=count, join=True, start_method="forkserver"
    )


def once(factory: pytest.TempPathFactory, name: str, fill: Callable[[Path], None]) -> Path:
    """A folder that one worker of pytest fills for all of them.

    Args:
        factory: pytest's, whose base has a folder for each worker.
        name: of the folder.
        fill: writes into it.
    """
    base = factory.getbasetemp()
    place = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / name
    with FileLock(f"{place}.lock"):
        if not (place / "filled").exists():
            # (nothing stays of a worker that failed)
            shutil.rmtree(place, ignore_errors=True)
            place.mkdir()
            fill(place)
            (place / "filled").touch()
    return place


def two_processes(work: Work, folder: Path) -> None:
    """Call ``work(rank, folder)`` in each of two processes of one group."""
    several_processes(work, folder, 2)


def _join(rank: int, work: Work, folder: Path, count: int) -> None:
    torch.set_num_threads(1)
    store = f"file://{folder}/store{count}"
    dist.init_process_group(
        "gloo", init_method=store, rank=rank, world_size=count, timeout=timedelta(seconds=120)
    )
    try:
        work(rank, folder)
    finally:
        # The threads of a group end with the last object that refers to it, such as a wrapped
        # model; one that frees a tensor while the interpreter ends aborts the process.
        gc.collect()
        dist.destroy_process_group()
