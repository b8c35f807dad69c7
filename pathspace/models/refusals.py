"""A model that does not run: one sentence each, without torch's internal terms."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Mapping, Sequence
from typing import Any, get_args

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ..errors import CaptureError, InputError, first_line
from .inputs import describe_inputs, mistaken_input
from .isolation import quiet
from .nested import mapped
from .stand_in import stand_in
from .walk import Kind, every_path, every_tensor

# packages whose code is not the user's
LIBRARIES = frozenset(["torch", "pathspace", *sys.stdlib_module_names])
# modules without code or whole weights of their own
WRAPPERS = (torch.jit.ScriptModule, nn.DataParallel, nn.parallel.DistributedDataParallel)
FLAT = ("FullyShardedDataParallel", "FlatParamHandle")


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
    for path, module in every_path(model, repeated=False):
        kind = type(module).__name__
        if isinstance(module, WRAPPERS) or kind in FLAT or "_packed_params" in vars(module):
            raise InputError(
                f"{name} holds {path or name!r}, and code or weights of a {kind} cannot be read;"
                " pass the model that it was made of."
            )
    for kind in get_args(Kind):
        for key, tensor in every_tensor(model, kind, repeated=False).items():
            if is_lazy(tensor):
                raise InputError(
                    f"{name} has {key!r} without a shape yet; run the model once on a batch, then"
                    " trace it."
                )
            if kind == "_parameters" and tensor.layout != torch.strided:
                raise InputError(
                    f"{name} has a sparse parameter {key!r}, expected a dense one; keep its values"
                    " as a parameter and build the sparse tensor from them in forward."
                )


def check_runs(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Run a copy of a model once, and turn whatever it raises into one sentence."""
    copy = stand_in(model, share_tensors=False)
    args, kwargs = mapped(torch.Tensor.clone, (tuple(args), dict(kwargs)))
    known = {name for name, _ in copy.named_parameters()}
    try:
        # (models may differentiate in forward)
        with quiet(), torch.enable_grad():
            copy(*args, **kwargs)
    except (Exception, SystemExit) as error:
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
    if not kwargs and (mistake := mistaken_input(args)):
        return CaptureError(f"{name}.forward fails on {mistake}.")
    return CaptureError(
        f"{name}.forward raised {type(error).__name__} {user_frame(error)} on inputs"
        f" ({describe_inputs(args, kwargs)}): {first_line(error)}; check the shapes and dtypes of"
        " the example inputs."
    )
