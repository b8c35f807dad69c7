"""Recomputation of the outputs of normalisations from the tensors that autograd keeps anyway."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.weak import WeakTensorKeyDictionary

Recipe = tuple[Callable[..., Tensor], list[Tensor]]

NORMS = frozenset([F.batch_norm, F.layer_norm, F.group_norm, F.instance_norm, F.rms_norm])


class NormsAgain:
    """Records which existing tensors are outputs of a normalisation.

    Example:
        >>> norms, x = NormsAgain(), torch.tensor([[1.0, 3.0]], requires_grad=True)
        >>> result = norms.run(F.layer_norm, (x, (2,)), {})
        >>> again, kept = norms.recipe(result)
        >>> torch.equal(again(*kept), result), kept[0] is x
        (True, True)
        >>> norms.recipe(result + 1)
    """

    def __init__(self) -> None:
        self.known = WeakTensorKeyDictionary()

    def run(self, norm: Callable[..., Tensor], args: tuple[Any, ...], kwargs: Any) -> Tensor:
        """Call one of :data:`NORMS` and record its arguments."""
        result = norm(*args, **kwargs)
        if not torch.compiler.is_compiling() and result.requires_grad:
            values = inspect.signature(norm).bind(*args, **kwargs).arguments
            self.known[result] = norm, values, result._version
        return result

    def recipe(self, value: Tensor) -> Recipe | None:
        """A function and tensors that recompute a value; ``None`` if it is
        not the output of a norm.

        Args:
            value: any tensor.
        """
        norm, values, version = self.known.get(value, (None, {}, 0))
        # (autocast computes some norms in float32, but is not active when gradients are computed)
        if norm is None or value._version != version or value.dtype != values["input"].dtype:
            return None
        settings = dict(values)
        if settings.get("training") or settings.get("use_input_stats"):
            settings |= dict.fromkeys(("running_mean", "running_var"))
        tensors = {
            name: settings.pop(name) for name in values if isinstance(settings[name], Tensor)
        }
        return partial(_named, norm, settings, tuple(tensors)), list(tensors.values())

    def __reduce__(self) -> tuple[type[NormsAgain], tuple[()]]:
        """Copies, also those in files, remember nothing."""
        return NormsAgain, ()


def _named(
    norm: Callable[..., Tensor], settings: dict[str, Any], names: tuple[str, ...], *tensors: Tensor
) -> Tensor:
    return norm(**settings, **dict(zip(names, tensors, strict=True)))
