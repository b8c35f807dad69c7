"""Errors for models that cannot be traced: one sentence each, without torch's internal terms."""

from __future__ import annotations

import itertools

from torch import nn

from ..errors import CaptureError, InputError, first_line
from ..models.refusals import user_frame
from ..models.walk import every_tensor
from .aliasing import memory_of

# (by name: some are slow to import)
_BY_VALUES = (
    "DataDependentOutputException DynamicOutputShapeException GuardOnDataDependentSymNode".split()
)
# the message for a tensor that no recorded operation has made
UNRECORDED = (
    "it takes gradients inside forward, writes into its weights there, or maps a function over a"
    " dimension"
)
# the message for a tensor that a branch or a loop of torch reads from outside
FROM_OUTSIDE = "a branch or a loop of torch in it reads tensors that are not among its operands"


def check_memory(model: nn.Module) -> None:
    """Refuse different parameters that share memory, because rescaling one would change the other.

    Raises:
        InputError: two parameters share memory.
    """
    held, named = [], every_tensor(model, "_parameters", repeated=False)
    for parameter, name in {id(p): (p, name) for name, p in reversed(named.items())}.values():
        start, end, filled = memory_of(parameter)
        if start:
            # first and last byte are enough if the parameter fills all memory between them
            held.append((start, end if filled else start, name))
    held.sort()
    for (_, end, name), (start, _, other) in itertools.pairwise(held):
        if start < end:
            raise InputError(
                f"{type(model).__name__} has parameters {name!r} and {other!r} in the same memory;"
                " make them one parameter, by assigning the parameter itself instead of its data."
            )


def failed_capture(model: nn.Module, error: BaseException) -> CaptureError:
    """The error for a model that runs but cannot be captured.

    Args:
        model: the model.
        error: the exception that the capture raised.
    """
    what, advice = first_line(error), "write this step with plain operations of torch"
    if decides_by_values(error):
        what = "a branch, a number or a size in its code depends on the values of tensors"
        advice = "write this step with torch.where or torch.cond"
    return CaptureError(
        f"{type(model).__name__} runs but cannot be captured as a graph: {what}"
        f" ({user_frame(error)}); {advice}, or pass the part of the model around it."
    )


def decides_by_values(error: BaseException | None) -> bool:
    """Whether an error without values, or its cause, is about code that depends on them."""
    while error is not None:
        if type(error).__name__ in _BY_VALUES:
            return True
        error = error.__cause__ or error.__context__
    return False
