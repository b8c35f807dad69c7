"""What a capture runs in place of the model: a stand-in, and contexts in which its code
asks for no data.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributions import Distribution
from torch.nn.modules import transformer

from ..models.inputs import equal_lengths, opened
from ..models.isolation import quiet, replaced
from ..models.stand_in import stand_in
from ..models.values import give_shapes
from ..models.walk import every_module, every_tensor


def stand_in_and_inputs(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], mode: FakeTensorMode
) -> tuple[nn.Module, dict[str, torch.Tensor] | None, tuple[tuple[Any, ...], dict[str, Any]]]:
    """A stand-in, its buffers where tensors of the model have no numbers, and
    the inputs that it takes.
    """
    twin = stand_in(model)
    made = every_tensor(twin, "_buffers") if give_shapes(twin, mode) else None
    tensors = opened(twin, args, kwargs)
    return twin, made, (args, dict(kwargs)) if tensors is None else (tensors, {})


@contextmanager
def traceable(twin: nn.Module) -> Iterator[None]:
    """Torch's own tracing is silent, and code that would look at data does without."""
    without_looks = replaced(
        (transformer, "_detect_is_causal_mask", _told_to_be_causal),
        # (distributions check the values of their parameters)
        (Distribution, "_validate_args", False),
    )
    with quiet(), experts_at_once(twin), without_looks, equal_lengths():
        yield


@contextmanager
def experts_at_once(model: nn.Module) -> Iterator[None]:
    """Let mixtures of experts of transformers compute all experts at once: the same function
    without a loop over data.

    Args:
        model: a model whose configurations say how experts are computed; they
            say so again afterwards.
    """
    configs = {
        id(c): c
        for module in every_module(model)
        if (c := getattr(module, "config", None)) is not None
    }
    before = {
        key: own
        for key, c in configs.items()
        if (own := getattr(c, "_experts_implementation", None)) is not None
    }
    for key in before:
        configs[key]._experts_implementation = "batched_mm"
    try:
        yield
    finally:
        for key, own in before.items():
            configs[key]._experts_implementation = own


def _told_to_be_causal(mask: Any, is_causal: bool | None = None, size: int | None = None) -> bool:  # noqa: ARG001
    """Whether a mask was said to be causal; torch would compare its values, and uses
    the mask itself otherwise.
    """
    return bool(is_causal)
