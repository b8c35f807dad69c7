"""Errors for models that cannot be traced: one sentence each, without torch's internal terms."""

from __future__ import annotations

import itertools
import re
import traceback
from collections.abc import Collection, Iterable, Iterator
from pathlib import PurePath

from torch import nn

from ..errors import CaptureError, InputError, first_line
from ..models.refusals import WITHOUT_GRADIENTS, user_frame
from ..models.walk import every_tensor
from .aliasing import memory_of
from .captured import TORCH

_MADE = re.compile(r"Creating a new Tensor subclass (\w+)")
# the message for a tensor that no recorded operation has made
UNRECORDED = "a tensor without values comes from nowhere"
# the message for a tensor that a branch or a loop of torch reads from outside
FROM_OUTSIDE = "a graph inside of the graph reads a tensor from outside"


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
    chain = list(_chain(error))
    said = " ".join(str(each) for each in chain)
    frames = [
        frame
        for each in chain
        for frame in traceback.extract_tb(each.__traceback__)
        if frame.filename.startswith(TORCH)
    ]
    files = {PurePath(frame.filename).parent.name for frame in frames}
    special = _special_tensor(chain, files)
    observing = any(hasattr(module, "calculate_qparams") for module in model.modules())
    if observing:
        what = "it observes ranges for quantisation while it runs"
        advice = (
            "trace the model before it was prepared, or call"
            " model.apply(torch.ao.quantization.disable_observer) first"
        )
    elif special is not None:
        what, advice = special
    elif any(
        words in said for words in (UNRECORDED, "Cannot access storage of", *WITHOUT_GRADIENTS)
    ) or any(PurePath(frame.filename).name == "eager_transforms.py" for frame in frames):
        what = (
            "it takes gradients inside forward, writes into its weights there, or maps a function"
            " over a dimension (torch.vmap)"
        )
        advice = "pass the module that is differentiated or mapped, or write this step out"
    elif FROM_OUTSIDE in said:
        what = "a branch or a loop of torch in it reads tensors that are not among its operands"
        advice = "pass them as operands"
    elif "DynamicOutputShape" in type(error).__name__:
        what = "the size of a tensor depends on the values of tensors there"
        advice = (
            "select by torch.where or a mask of fixed size, or pass the part of the model around it"
        )
    elif any(isinstance(each, RecursionError) for each in chain):
        what = "its modules hold one another in a circle"
        advice = "keep the outer module in a list of one, [module], which does not make it a child"
    elif "numpy" in said:
        what = "it computes in numpy, whose operations cannot be recorded"
        advice = "write this step with torch"
    elif (
        type(error).__name__ == "DataDependentOutputException" and "_local_scalar_dense" not in said
    ):
        what = "a function of torch compares the values of tensors there, as torch.cov does"
        advice = (
            "write this step with other operations of torch, or pass the part of the model"
            " around it"
        )
    elif decides_by_values(error):
        what = "a branch, a number or a size in its code depends on the values of tensors"
        advice = (
            "write this step with torch.where or torch.cond, or pass the part of the model"
            " around it"
        )
    else:
        what = first_line(error)
        advice = (
            "write this step with plain torch operations, or pass the part of the model around it"
        )
    return CaptureError(
        f"{type(model).__name__} runs but cannot be captured as a graph: {what}"
        f" ({user_frame(error)}); {advice}."
    )


def _special_tensor(
    chain: Iterable[BaseException], files: Collection[str]
) -> tuple[str, str] | None:
    """What is special about the tensors of a model, and what to do; ``None`` if nothing is.

    Args:
        chain: the errors that a capture raised.
        files: folders of torch that it went through.
    """
    # (further lines may list all kinds of tensors that torch has)
    said = " ".join(
        str(each).partition("\n")[0].partition(" is only available")[0] for each in chain
    )
    if "Quantized" in said:
        return (
            "it computes with a quantised tensor",
            "hold the tensor as floats, by calling dequantize() once outside of forward",
        )
    if (made := _MADE.search(said)) is not None:
        return (
            f"it makes a tensor of a class of its own, {made[1]}",
            "use a plain tensor there (a mask of truth values instead of a bias object)",
        )
    if "nested" in files or "NestedTensor" in said or "cast NotImplemented" in said:
        return (
            "it computes on nested tensors, whose lengths are data",
            "trace it on a padded batch",
        )
    return None


def decides_by_values(error: BaseException) -> bool:
    """Whether an error without values is about control flow that depends on them."""
    words = ("data-dependent", ".item()", "_local_scalar_dense", "tolist", "__format__")
    return any(
        type(each).__name__ == "GuardOnDataDependentSymNode"
        or any(word in str(each) for word in words)
        for each in _chain(error)
    )


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error and its causes."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
