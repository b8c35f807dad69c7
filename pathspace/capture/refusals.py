"""Errors for models that cannot be traced: one sentence each, without torch's internal terms."""

from __future__ import annotations

import itertools
import os
import re
import sysconfig
import traceback
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any

import torch
from torch import nn

from ..errors import CaptureError, InputError
from ..models.inputs import describe_inputs, mistaken_input
from ..models.walk import every_path, every_tensor
from .aliasing import memory_of
from .captured import TORCH

# folders whose code is not the user's: torch and this package, where they are installed
LIBRARIES = (TORCH, f"{Path(__file__).parents[1]}{os.sep}")
_STANDARD = sysconfig.get_paths()["stdlib"] + os.sep
_PACKAGES = tuple(sysconfig.get_paths()[key] + os.sep for key in ("purelib", "platlib"))
# internal terms of torch, which users do not know
_INTERNAL = re.compile(
    r"aten|prims::|torch\._|torch\.fx|torch\.export|torch\.classes|__torch__|_export|Fake|Sym(Int|Float|Bool|Node)|Proxy"
    r"|pytree|[Ff]unctor|[Dd]ynamo|unhinted|\bz?u[f]?\d+\b|[Gg]uard|github\.com|\bc10\b|C10|[Dd]ispatch|backend"
    r"|tensor"
    r" subclass|\bmeta\b|_impl|_cpu\b|_cuda\b|HigherOrder|autograd\.Function|tracing|Unsupported"
)
_MADE = re.compile(r"Creating a new Tensor subclass (\w+)")
_LONGEST = 240
# the message for a tensor that no recorded operation has made
UNRECORDED = "a tensor without values comes from nowhere"
# the message for a tensor that a branch or a loop of torch reads from outside
FROM_OUTSIDE = "a graph inside of the graph reads a tensor from outside"
# parts of messages about derivatives inside forward
WITHOUT_GRADIENTS = ("is_gradtrackingtensor=True", "does not require grad")


def first_line(error: BaseException) -> str:
    r"""The first line of an error's message without its full stop; a general phrase if it has
    internal terms of torch.

    Example:
        >>> (
        ...     first_line(RuntimeError("boom.\nmore")),
        ...     first_line(RuntimeError("aten::copy_ has no kernel")),
        ... )
        ('boom', 'a step inside torch fails')
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    line = (lines[0] if lines else type(error).__name__).rstrip(".")
    if _INTERNAL.search(line):
        return "a step inside torch fails"
    return line if len(line) <= _LONGEST else line[:_LONGEST].rsplit(" ", 1)[0] + " ..."


def no_derivative(error: BaseException) -> str:
    """Why a model could not be differentiated.

    Example:
        >>> no_derivative(RuntimeError("expected scalar type Float but found Double"))
        'one of its operations takes no float64, as those of fake quantisation do not'
    """
    said = str(error)
    if "found Double" in said or "to have the same dtype" in said:
        return "one of its operations takes no float64, as those of fake quantisation do not"
    if any(
        words in said
        for words in (
            "returned an invalid gradient",
            "incorrect number of gradients",
            "expected Variable",
        )
    ):
        return (
            "the backward pass of one of its autograd functions returns gradients of another number"
            " or shape"
        )
    if not isinstance(error, RuntimeError):
        return (
            f"its backward pass raises {type(error).__name__} {user_frame(error)}:"
            f" {first_line(error)}"
        )
    return first_line(error)


def user_frame(error: BaseException) -> str:
    """``at file:line`` of the innermost frame outside torch, or ``in torch``."""
    place = "in torch"
    for frame in traceback.extract_tb(error.__traceback__):
        name = frame.filename
        if not (name.startswith(LIBRARIES) or "<" in name or _is_standard(name)):
            place = f"at {name}:{frame.lineno}"
    return place


def _is_standard(name: str) -> bool:
    return name.startswith(_STANDARD) and not name.startswith(_PACKAGES)


def check_capturable(model: nn.Module) -> None:
    """Refuse modules with special parameters or without a Python ``forward``.

    Raises:
        InputError: the module is scripted, wraps a model for several devices, or has parameters
            that are sparse, without a shape or flattened.
    """
    name = type(model).__name__
    if type(model).__hash__ is None:
        raise InputError(
            f"{name} has no hash, because it is a dataclass, so torch cannot list its parameters;"
            " write @dataclass(eq=False)."
        )
    if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
        raise InputError(
            f"{name} wraps a model for several devices; pass the inner model, model.module."
        )
    if isinstance(model, torch.jit.ScriptModule):
        raise InputError(
            f"{name} is a scripted module, which has no Python code; pass the original module."
        )
    for path, module in every_path(model, repeated=False):
        if isinstance(module, torch.jit.ScriptModule):
            raise InputError(
                f"{name} holds a scripted module {path!r}, which has no Python code; replace it by"
                " the original module."
            )
        if "_packed_params" in vars(module):
            raise InputError(
                f"{name} holds {path or name!r}, whose weights are packed for integer arithmetic;"
                " trace the model before it was quantised."
            )
        if type(module).__name__ in ("FullyShardedDataParallel", "FlatParamHandle"):
            raise InputError(
                f"{name} holds {path or name!r}, whose parameters FullyShardedDataParallel has"
                " flattened and sharded; trace the model before it is wrapped, or shard it with"
                " torch.distributed.fsdp.fully_shard."
            )
    tensors = [
        ("parameter", *item) for item in every_tensor(model, "_parameters", repeated=False).items()
    ]
    tensors += [
        ("buffer", *item) for item in every_tensor(model, "_buffers", repeated=False).items()
    ]
    for kind, key, tensor in tensors:
        if isinstance(
            tensor, nn.parameter.UninitializedParameter | nn.parameter.UninitializedBuffer
        ):
            raise InputError(
                f"{name} has a {kind} {key!r} without a shape yet; run the model once on a batch,"
                " then trace it."
            )
        if kind == "parameter" and tensor.layout != torch.strided:
            raise InputError(
                f"{name} has a sparse parameter {key!r}, expected a dense one; keep its values as a"
                " parameter and build the sparse tensor from them in forward."
            )


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


def failed_run(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], error: BaseException
) -> CaptureError:
    """The error for a model that does not run on its inputs.

    Args:
        model: the model.
        args: positional inputs.
        kwargs: inputs by keyword.
        error: the exception that the model raised.
    """
    name = type(model).__name__
    if isinstance(error, SystemExit):
        return CaptureError(
            f"{name}.forward ended the program, SystemExit ({error.code}), {user_frame(error)};"
            " raise an exception there."
        )
    small = next(
        (
            n
            for n, p in model.named_parameters()
            if "float8" in str(p.dtype) or "float4" in str(p.dtype)
        ),
        None,
    )
    if small is not None and isinstance(error, RuntimeError | NotImplementedError | ValueError):
        kind = str(dict(model.named_parameters())[small].dtype).removeprefix("torch.")
        return CaptureError(
            f"{name}.forward computes with {small!r} in {kind} {user_frame(error)}, which the"
            " operations there do not support; convert it in forward, weight.to(x.dtype) * scale,"
            " or trace the model before it was quantised."
        )
    if not kwargs and (mistake := mistaken_input(args)):
        return CaptureError(f"{name}.forward fails on {mistake}.")
    advice = "check the shapes and dtypes of the example inputs"
    if len(args) == 1 and not kwargs and hasattr(args[0], "keys"):
        advice = "pass named inputs as kwargs="
    return CaptureError(
        f"{name}.forward raised {_kind(error)} {user_frame(error)} on inputs"
        f" ({describe_inputs(args, kwargs)}): {first_line(error)}; {advice}."
    )


def _kind(error: BaseException) -> str:
    """The name of an exception's class; for classes of torch, of its first built-in base class."""
    own = type(error).__module__
    name = next(
        kind.__name__
        for kind in type(error).__mro__
        if not own.startswith("torch.") or kind.__module__ == "builtins"
    )
    return "an error" if name == "Exception" else name


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
