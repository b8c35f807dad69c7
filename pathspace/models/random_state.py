"""Keeps the states of random generators, and seeds those of torch."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


@contextmanager
def torch_kept(seed: int | None = None) -> Iterator[None]:
    """A context at whose end torch's random states are as before, on all devices in use.

    Args:
        seed: seed inside the context; ``None`` goes on with the present states.

    Example:
        >>> state = torch.get_rng_state()
        >>> with torch_kept(0):
        ...     _ = torch.rand(1)
        >>> torch.equal(torch.get_rng_state(), state)
        True
    """
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with torch.random.fork_rng(devices=devices):
        if seed is not None:
            seed_torch(seed)
        yield


@contextmanager
def random_kept() -> Iterator[None]:
    """A context at whose end the random states of torch, Python and numpy are as before.

    Example:
        >>> import random
        >>> state = random.getstate()
        >>> with random_kept():
        ...     _ = random.random()
        >>> random.getstate() == state
        True
    """
    drawn, state = random.getstate(), np.random.get_state()
    try:
        with torch_kept():
            yield
    finally:
        random.setstate(drawn)
        np.random.set_state(state)


def seed_torch(seed: int) -> None:
    """Seed the generators of the processor and of the GPUs in use.

    ``torch.manual_seed`` also keeps the seed for GPUs that are not in use yet; there, the user's
    own seed would be lost.
    """
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)
