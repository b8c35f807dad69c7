"""A model that does not run: one sentence each, without torch's internal terms."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ..errors import CaptureError, InputError, first_line
from .inputs import describe_inputs, mistaken_input
from .isolation import quiet
from .stand_in import repeatable, stand_in
from .walk import every_path, every_tensor

# packages whose code is not the user's
LIBRARIES = frozenset(["torch", "pathspace", *sys.stdlib_module_names])
# parts of messages about derivatives inside forward
WITHOUT_GRADIENTS = ("is_gradtrackingtensor=True", "does not require grad")


def no_derivative(error: BaseException) -> str:
    """Why a model could not be differentiated."""
    kind = type(error).__name__
    return f"its backward pass raises {kind} {user_frame(error)}: {first_line(error)}"


def user_frame(error: BaseException) -> str:
    """``at file:line`` of the innermost frame outside torch, or ``in torch``."""
    place = "in torch"
    if isinstance(error, SyntaxError) and error.filename:
        return f"at {error.filename}:{error.lineno}"
    lines = traceback.extract_tb(error.__traceback__)
    for (frame, _), line in zip(traceback.walk_tb(error.__traceback__), lines, strict=True):
        package = str(frame.f_globals.get("__name__")).partition(".")[0]
        if package not in LIBRARIES and "<" not in line.filename:
            place = f"at {line.filename}:{line.lineno}"
    return place


def check_capturable(model: nn.Module) -> None:
    """Refuse modules with special parameters or without a Python ``forward``."""
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


def check_runs(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    copy: nn.Module | None = None,
) -> None:
    """Run a copy of a model once, and turn whatever it raises into one sentence.

    Args:
        model: the model.
        args: positional inputs.
        kwargs: inputs by keyword.
        copy: what to run; by default a copy with the values of the model.
    """
    copy = repeatable(stand_in(model, share_tensors=False)) if copy is None else copy
    known = {name for name, _ in copy.named_parameters()}
    try:
        with quiet(), torch.no_grad():
            copy(*args, **kwargs)
    except (Exception, SystemExit) as error:
        if any(words in str(error) for words in WITHOUT_GRADIENTS):
            return  # it would run where gradients are taken
        raise failed_run(model, args, kwargs, error) from error
    made = next((name for name, _ in copy.named_parameters() if name not in known), None)
    if made is not None:
        raise InputError(
            f"{type(model).__name__} creates parameters when it runs, such as {made!r}; run the"
            " model once on a batch, then trace it."
        )


def failed_run(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], error: BaseException
) -> CaptureError:
    """The error for a model that does not run on its inputs."""
    name = type(model).__name__
    if isinstance(error, SystemExit):
        return CaptureError(
            f"{name}.forward ended the program, SystemExit ({error.code}), {user_frame(error)};"
            " raise an exception there."
        )
    types = {name: str(p.dtype).removeprefix("torch.") for name, p in model.named_parameters()}
    small = next(
        (name for name, kind in types.items() if kind.startswith(("float8", "float4"))), None
    )
    if small is not None and isinstance(error, RuntimeError | NotImplementedError | ValueError):
        return CaptureError(
            f"{name}.forward computes with {small!r} in {types[small]} {user_frame(error)}, which"
            " the operations there do not support; convert it in forward, weight.to(x.dtype) *"
            " scale, or trace the model before it was quantised."
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
