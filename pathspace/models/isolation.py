"""What must be as before when the library has run a model: random states, attributes, warnings."""

from __future__ import annotations

import functools
import gc
import io
import logging
import random
import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, redirect_stderr
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from .values import has_values
from .walk import every_module


@contextmanager
def torch_kept(seed: int | None = None) -> Iterator[None]:
    """A context that keeps torch's random states, and begins with a seed if one is given."""
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
    """Silence torch's tracing (warnings, logs, graphs that it prints), and keep random states."""
    level = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), random_kept(), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)


@contextmanager
def values_kept(tensors: Iterable[Tensor]) -> Iterator[None]:
    """A context at whose end tensors have the values that they had."""
    held = [(tensor, tensor.detach().clone()) for tensor in tensors]
    try:
        yield
    finally:
        for tensor, value in held:
            # through .data, because autograd checks the version of tensors that it needs
            with torch.inference_mode(tensor.is_inference()), torch.no_grad():
                tensor.data.copy_(value)


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """A context at whose end random states, torch's settings, and the tensors that the modules of
    a model hold as ordinary attributes are as before; cached functions forget what they computed.
    """
    differentiating, default = torch.is_grad_enabled(), torch.get_default_dtype()
    caches = _cached_functions(len(sys.modules))
    before = [(cached, cached.cache_info().misses) for cached in caches]
    held = [value for module in every_module(model) for value in vars(module).values()]
    plain = [value for value in held if isinstance(value, Tensor) and has_values(value)]
    try:
        with random_kept(), values_kept(plain):
            yield
    finally:
        for cached, misses in before:
            if cached.cache_info().misses != misses:
                # (a tensor without values would be found by the model's next call)
                cached.cache_clear()
        torch.set_grad_enabled(differentiating)
        torch.set_default_dtype(default)


# no cache of these packages holds a tensor of a model
WITHOUT_TENSORS = frozenset(["torch", "triton", "sympy", __package__.partition(".")[0]])


@functools.lru_cache(maxsize=1)
def _cached_functions(_: int) -> list[Any]:
    """All functions with a ``functools.lru_cache``, found once for a number of imported modules."""
    kind = type(functools.lru_cache(len))
    found = (each for each in gc.get_objects() if type(each) is kind)
    return [f for f in found if (f.__module__ or "").partition(".")[0] not in WITHOUT_TENSORS]
