"""Find the model that a TARGET names (see ``pathspace --help``), and make example inputs for it."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import math
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from ..errors import InputError, did_you_mean, on_one_line
from ..models.inputs import batch_inputs
from ..models.isolation import seed_torch, torch_kept
from ..models.refusals import user_frame
from . import libraries

_DTYPES = {
    name: getattr(torch, name)
    for name in (
        "float16 bfloat16 float32 float64 complex64 complex128 bool uint8 int8 int16 int32 int64"
    ).split()
}
_FORM = "package.module:name or path/to/file.py:name"
_INPUT_FORM = "sizes joined by x, and a dtype if need be, such as 2x3x224x224 or 2x16:int64"


@dataclass(frozen=True)
class Target:
    """A model and the example inputs it is traced with: ``model(*args, **kwargs)``."""

    spec: str
    model: nn.Module
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)

    def call(self, function: Callable[..., Any], **options: Any) -> Any:
        """Call a function of a model and its example inputs, such as :func:`pathspace.trace`."""
        return function(self.model, *self.args, kwargs=self.kwargs, **options)

    def of(self, model: nn.Module) -> Target:
        """Another model with the same inputs."""
        return replace(self, model=model)


def parse_input(text: str) -> tuple[tuple[int, ...], torch.dtype | None]:
    """The shape and dtype of an ``--input``: sizes joined by ``x`` or commas, then ``:dtype``."""
    sizes, colon, dtype = text.strip().partition(":")
    sizes = re.sub("[X,]", "x", sizes)
    if not re.fullmatch(r"[0-9]{1,18}(x[0-9]{1,18})*", sizes):
        raise InputError(f"The input '{text}' cannot be read: give {_INPUT_FORM}.")
    shape = tuple(int(size) for size in sizes.split("x"))
    if 0 in shape:
        raise InputError(f"The input '{text}' has a size of zero: every size must be at least 1.")
    if colon and dtype not in _DTYPES:
        raise InputError(
            f"The input '{text}' has the unknown dtype '{dtype}'"
            f"{did_you_mean(dtype, _DTYPES)}: choose one of {', '.join(_DTYPES)}."
        )
    return shape, _DTYPES[dtype] if colon else None


def load_target(
    spec: str,
    inputs: Sequence[str] = (),
    *,
    seed: int = 0,
    train: bool | None = None,
    need_inputs: bool = True,
) -> Target:
    """Load the model that ``spec`` names, with example inputs that its ``forward`` accepts.

    Inputs are drawn from the standard normal distribution; integers and booleans are zeros and
    ones, which are valid indices of any embedding. An input without a dtype has that of the model's
    first floating-point parameter. The global random state does not change.
    """
    specs = [parse_input(text) for text in inputs]
    with torch_kept(seed):
        of_library = spec.partition(":")[0] in libraries.LIBRARIES
        found = None if of_library else find_object(spec)
        # again, because the first import of a module may draw random numbers
        seed_torch(seed)
        model, example = libraries.build_library_model(spec) if of_library else _build(spec, found)
    if specs:
        example = _make_inputs(model, specs, seed)
    target = Target(spec, model, *batch_inputs(() if example is None else example))
    if need_inputs or example is not None:
        _check_call(target, given=example is not None)
    if train is not None:
        target.model.train(train)
    return target


def find_object(spec: str) -> Any:
    """Import a module or file, and return the object that is named after the colon."""
    place, colon, name = spec.rpartition(":")
    if not colon or not place.strip() or not name.strip():
        form = f"{_FORM}, or transformers:path/to/config.json"
        raise InputError(f"The target '{spec}' has no 'place:name': give {form}.")
    module = _load_file(Path(place)) if place.endswith(".py") else _load_module(place)
    try:
        return attrgetter(name)(module)
    except AttributeError:
        hint = did_you_mean(name, dir(module))
        raise InputError(
            f"There is no '{name}' in '{place}'{hint}; check the name after the colon."
        ) from None


def _load_module(name: str) -> ModuleType:
    if not all(part.isidentifier() for part in name.split(".")):
        raise InputError(f"'{name}' is not the name of a Python module: give {_FORM}.")
    # A console script has its own folder, not the user's, at the front of the search path.
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    importlib.invalidate_caches()
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        missing = error.name or "" if isinstance(error, ModuleNotFoundError) else ""
        if not missing or not f"{name}.".startswith(f"{missing}."):
            raise _user_error(f"The module '{name}' cannot be imported", error) from error
        hint = did_you_mean(missing, libraries.LIBRARIES)
        raise InputError(
            f"There is no module '{missing}'{hint}: install it, run from the folder that contains"
            " it, or give the file as path/to/file.py:name."
        ) from None


def _load_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise InputError(
            f"There is no file '{path}': give a Python file, as in path/to/file.py:name, from the"
            f" current folder, '{Path.cwd()}'."
        )
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    # With the prefix, a user's torch.py or random.py does not replace the real module.
    name = f"_pathspace_target_{path.stem}"
    module_spec = importlib.util.spec_from_file_location(name, path.resolve())
    assert module_spec is not None and module_spec.loader is not None  # the suffix is .py
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[name] = module
    try:
        module_spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        sys.modules.pop(name, None)
        raise _user_error(f"The file '{path}' cannot be loaded", error) from error
    return module


def _build(spec: str, found: Any) -> tuple[nn.Module, Any]:
    """Return the model that ``found`` is or builds, and its example inputs, or ``None``."""
    if isinstance(found, nn.Module):
        return found, None
    wrong = not callable(found) or (isinstance(found, type) and not issubclass(found, nn.Module))
    if wrong or isinstance(found, ModuleType):
        what = f"the class {found.__name__}" if isinstance(found, type) else _kind(found)
        raise InputError(
            f"The target '{spec}' is {what}: name a torch.nn.Module, its class, or a function that"
            " returns a model or (model, example inputs)."
        )
    try:
        inspect.signature(found).bind()
    except TypeError as error:
        raise InputError(
            f"The target '{spec}' needs arguments ({error}): name a function without arguments"
            " that builds the model."
        ) from None
    except ValueError:  # (it has no signature)
        pass
    try:
        made = found()
    except (Exception, SystemExit) as error:
        raise _user_error(f"The target '{spec}' failed when it was called", error) from error
    model, example = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(model, nn.Module):
        raise InputError(
            f"The target '{spec}' returned {_kind(made)}: return a torch.nn.Module or (model,"
            " example inputs)."
        )
    by_name = isinstance(example, dict) and all(isinstance(key, str) for key in example)
    if not by_name and not isinstance(example, torch.Tensor | tuple | list | None):
        raise InputError(
            f"The target '{spec}' returned {_kind(example)} as example inputs: return a tensor, a"
            " tuple or list of positional inputs, or a dict of keyword inputs by name."
        )
    return model, example


def _kind(value: Any) -> str:
    return f"an object of type {type(value).__name__}"


def _make_inputs(
    model: nn.Module, specs: Sequence[tuple[tuple[int, ...], torch.dtype | None]], seed: int
) -> tuple[torch.Tensor, ...]:
    own = next((p for p in model.parameters() if p.is_floating_point()), None)
    own_dtype = torch.get_default_dtype() if own is None else own.dtype
    device = torch.device("cpu") if own is None else own.device
    generator = torch.Generator().manual_seed(seed)
    tensors = []
    for shape, dtype in specs:
        dtype = dtype or own_dtype
        try:
            if dtype.is_floating_point or dtype.is_complex:
                tensor = torch.randn(shape, dtype=dtype, generator=generator)
            else:
                tensor = torch.randint(0, 2, shape, generator=generator)
            tensors.append(tensor.to(device, dtype))
        except (RuntimeError, TypeError, MemoryError) as error:
            text, size = "x".join(map(str, shape)), math.prod(shape) * dtype.itemsize
            raise InputError(
                f"The input '{text}' of {size / 2**30:.3g} GiB cannot be created on {device} "
                f"({type(error).__name__}): give smaller sizes."
            ) from error
    return tuple(tensors)


def _check_call(target: Target, given: bool) -> None:
    """Compare the inputs with what ``forward`` takes: torch's own message is harder to read."""
    try:
        signature = inspect.signature(target.model.forward)
    except (TypeError, ValueError):  # a compiled forward may have none
        return
    why = "" if given or not signature.parameters else "the target has no example inputs"
    try:
        signature.bind(*target.args, **target.kwargs)
    except TypeError as error:
        why = why or f"{error}, given {len(target.args) + len(target.kwargs)}"
    if why:
        raise InputError(
            f"{type(target.model).__name__}.forward takes {signature} ({why}): give --input once"
            f" per tensor, {_INPUT_FORM}, or name a function that returns (model, example inputs)."
        )


def _user_error(what: str, error: BaseException) -> InputError:
    """The error for an exception in the user's code, with its name, message, file and line."""
    way_out = "correct it there"
    if isinstance(error, SystemExit):
        way_out = "put what only a script should run under if __name__ == '__main__'"
    elif isinstance(error, ImportError):
        way_out = "install what is missing, or give the target as package.module:name"
    kind = type(error).__name__
    return InputError(f"{what}, {kind} ({on_one_line(str(error))}) {user_frame(error)}: {way_out}.")
