"""What a run may change in a model beside its outputs, as it was before."""

from __future__ import annotations

import functools
import gc
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from .isolation import random_kept
from .values import has_values
from .walk import SIMPLE, every_module


def plain_tensors(model: nn.Module) -> list[Tensor]:
    """The tensors with values that modules hold as ordinary attributes."""
    return [
        value
        for module in every_module(model)
        for value in vars(module).values()
        if type(value) not in SIMPLE and isinstance(value, Tensor) and has_values(value)
    ]


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
    try:
        with random_kept(), values_kept(plain_tensors(model)):
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
