"""Ways to run a model other than as it stands: without `eps`, in float64, uncompiled, or with
`detach` ignored.

A scale that a normalisation takes away is exact only for ``eps = 0``, so that is how a model is
measured at that level. Torch refuses 0 itself in training mode; the smallest positive number is
lost beside any variance. Normalisations by running statistics keep their ``eps``: the variance
moves so that its sum with ``eps`` scales.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from traceback import StackSummary, walk_stack
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

# where the functional normalisations take their eps
EPS_POSITION = {
    "layer_norm": 4,
    "group_norm": 4,
    "rms_norm": 3,
    "batch_norm": 7,
    "instance_norm": 7,
}
# normalisations that may read running statistics
FROZEN = {
    norm: inspect.signature(norm)
    for norm in (nn.functional.batch_norm, nn.functional.instance_norm)
}


def precision(model: nn.Module) -> torch.dtype:
    """The floating point type of a model's parameters, or of the parts of complex ones."""
    real = (p.dtype for p in model.parameters() if p.is_floating_point() and p.element_size() > 1)
    parts = (p.dtype.to_real() for p in model.parameters() if p.is_complex())
    return next(real, None) or next(parts, torch.float64)


def _frozen_batch_norm(given: Mapping[str, Any]) -> Tensor:
    """Batch norm in evaluation mode, which torch cannot differentiate by the statistics."""
    x, mean, weight, bias = (given[key] for key in ("input", "running_mean", "weight", "bias"))
    scale = (1 if weight is None else weight) * (given["running_var"] + given["eps"]).rsqrt()
    shift = -mean * scale if bias is None else bias - mean * scale
    shape = [-1, *[1] * (x.dim() - 2)]
    # in one operation, which keeps no more for its backward pass than the layer does
    return torch.addcmul(shift.reshape(shape), x, scale.reshape(shape))


def _alone(input: Tensor, num_groups: int, *_: Any, **__: Any) -> bool:
    """Whether groups have one number each: less its mean it is 0, but for rounding errors."""
    return input.dim() > 1 and input[:1].numel() == num_groups


class NoEps(TorchFunctionMode):
    """Run normalisations with another ``eps`` (``None``: their own), those by running statistics as
    they are; ``folded_eps`` are source lines and constants there that were taken for an ``eps``.
    """

    def __init__(self, eps: float | None, folded_eps: Collection[tuple[str, float]] = ()) -> None:
        super().__init__()
        self.eps = eps
        self.folded_eps = frozenset(folded_eps)
        self.constants = frozenset(value for _, value in folded_eps)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in FROZEN:
            given = FROZEN[func].bind(*args, **kwargs)
            given.apply_defaults()
            named = given.arguments
            if not named.get("training", named.get("use_input_stats")):
                return _frozen_batch_norm(named)
            # (what it only writes into is no operand of the function)
            args, kwargs = (), named | {"running_mean": None, "running_var": None}
        if self.eps is None:
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        position = EPS_POSITION.get(name)
        if position is not None:
            eps = 1.0 if name == "group_norm" and _alone(*args, **kwargs) else self.eps
            if len(args) > position:
                args = (*args[:position], eps, *args[position + 1 :])
            else:
                kwargs["eps"] = eps
        elif self.constants:
            args = tuple(self._without(value) for value in args)
            kwargs = {key: self._without(value) for key, value in kwargs.items()}
        return func(*args, **kwargs)

    def _without(self, value: Any) -> Any:
        """A constant, or ``eps`` where the analysis took the constant on this line for one."""
        if self.eps is None or not isinstance(value, float) or value not in self.constants:
            return value
        stack = StackSummary.extract(walk_stack(None), lookup_lines=False)
        # (code without a source file, a notebook or exec, has no lines to tell its constants by)
        lines = ["", *(f"{frame.filename}:{frame.lineno}" for frame in stack)]
        if not any((line, value) in self.folded_eps for line in lines):
            return value
        return self.eps if value > 0 else -self.eps


@contextmanager
def without_eps(model: nn.Module, folded_eps: Collection[tuple[str, float]] = ()) -> Iterator[int]:
    """Set the ``eps`` of every normalisation by data to (next to) 0 for a while.

    Layers that are norms by name lose the value of their attribute, and get it back; those in
    evaluation mode that hold a running variance keep it, as their scales are free whatever it is.
    Yields how many layers there are.
    """
    tiny = torch.finfo(precision(model)).tiny
    changed = [
        (module, attribute)
        for module in model.modules()
        if module.training or getattr(module, "running_var", None) is None
        for attribute in ("eps", "variance_epsilon")
        if isinstance(getattr(module, attribute, None), float) and "Norm" in type(module).__name__
    ]
    with ExitStack() as stack, NoEps(tiny, folded_eps):
        for module, attribute in changed:
            stack.enter_context(patch.object(module, attribute, tiny))
        yield len(changed)


DETACH = frozenset({torch.Tensor.detach, torch.detach})


class IgnoreDetach(TorchFunctionMode):
    """A context in which ``detach`` returns its operand, and ``no_grad`` has no effect.

    Enter it with gradients enabled, because it also ignores attempts to enable them.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in DETACH:
            return args[0].view_as(args[0])
        if getattr(func, "__name__", "") == "_set_grad_enabled":
            return None
        return func(*args, **(kwargs or {}))


LOWER = frozenset({torch.float32, torch.float16, torch.bfloat16})
CASTS = frozenset({torch.Tensor.float, torch.Tensor.half, torch.Tensor.bfloat16})


class InDouble(TorchFunctionMode):
    """Within: every cast to a lower floating point type is one to float64.

    Norms and softmaxes of language models are written so. Their rounding errors are larger than the
    derivatives that a null-space test has to tell from zero.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args = tuple(
            torch.float64 if isinstance(value, torch.dtype) and value in LOWER else value
            for value in args
        )
        kwargs = dict(kwargs or {})
        if kwargs.get("dtype") in LOWER:
            kwargs["dtype"] = torch.float64
        return func(*args, **kwargs) if func not in CASTS else torch.Tensor.double(*args, **kwargs)


class _Loops(TorchFunctionMode):
    """``scan`` as a loop: without its compiler, torch's own returns results in another form."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") != "scan":
            return func(*args, **(kwargs or {}))
        step, passed, sequences = args[:3]
        outputs = []
        for number in range(len(sequences[0])):
            parts = [sequence[number] for sequence in sequences]
            passed, output = step(*pytree.tree_leaves(passed), *parts)
            outputs.append(output)
        return passed, pytree.tree_map(lambda *parts: torch.stack(parts), *outputs)


@contextmanager
def as_written() -> Iterator[None]:
    """Nothing is compiled, and what is always compiled is a loop."""
    with torch.compiler.set_stance("force_eager"), _Loops():
        yield
