"""Work done by two processes that talk through gloo."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from pathspace.training.launch import shutdown


def two_processes(work: Callable[[int, Path], None], folder: Path) -> None:
    """Call ``work(rank, folder)``, a function of a module, in each of two processes of one group.

    Args:
        work: what each process does, told its rank.
        folder: where the processes find each other, and leave what they found.
    """
    mp.spawn(_join, args=(work, folder), nprocs=2, join=True)


def _join(rank: int, work: Callable[[int, Path], None], folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2, timeout=timedelta(seconds=60)
    )
    try:
        work(rank, folder)
    finally:
        shutdown()
