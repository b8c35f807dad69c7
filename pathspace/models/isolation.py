"""What must be as before when the library has run a model: random states, attributes, warnings."""

from __future__ import annotations

import io
import logging
import random
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr

import numpy as np
import torch


@contextmanager
def torch_kept(seed: int | None = None) -> Iterator[None]:
    """A context at whose end torch's random states are as before, on all devices in use; it
    begins with a seed if one is given.
    """
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with torch.random.fork_rng(devices=devices):
        if seed is not None:
            seed_torch(seed)
        yield


@contextmanager
def random_kept() -> Iterator[None]:
    """A context at whose end the random states of torch, Python and numpy are as before."""
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


@contextmanager
def quiet() -> Iterator[None]:
    """Silence torch's own tracing (warnings, logs, graphs printed on errors), and keep
    the global random states of torch, Python and numpy.
    """
    level = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with (
            warnings.catch_warnings(),
            random_kept(),
            redirect_stderr(io.StringIO()),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)
