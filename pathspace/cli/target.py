"""Find the model that a TARGET names, and create example inputs for it.

A TARGET is ``package.module:name`` or ``path/to/file.py:name``. The name refers to one of

* a ``torch.nn.Module`` instance, used unchanged;
* a ``torch.nn.Module`` class, called without arguments;
* a function, called without arguments, that returns a model or ``(model, example)``, where
  ``example`` is a tensor (the one input), a tuple or list (the positional inputs) or a
  dict (the keyword inputs).

``transformers:path/to/config.json``, ``timm:NAME`` and ``torchvision:NAME`` name
models of these libraries.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import math
import pkgutil
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from ..errors import InputError, did_you_mean, on_one_line
from ..models.finite import check_finite
from ..models.isolation import seed_torch, torch_kept
from ..models.refusals import user_frame
from ..models.values import has_values
from . import libraries
from .errors import say

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


@dataclass(frozen=True)
class InputSpec:
    """The shape of one example input, and its dtype; ``None`` for the dtype of the model."""

    shape: tuple[int, ...]
    dtype: torch.dtype | None = None


def parse_input(text: str) -> InputSpec:
    """Read one ``--input`` value: sizes joined by ``x`` (or commas), then optionally ``:dtype``.

    Example:
        >>> parse_input("2x16:int64")
        InputSpec(shape=(2, 16), dtype=torch.int64)
    """
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
    return InputSpec(shape, _DTYPES[dtype] if colon else None)


def load_target(
    spec: str,
    inputs: Sequence[str] = (),
    *,
    seed: int = 0,
    train: bool | None = None,
    need_inputs: bool = True,
    warn: bool = True,
) -> Target:
    """Load the model that ``spec`` names, with example inputs that its ``forward`` accepts.

    Inputs are drawn from the standard normal distribution; integers and booleans are zeros and
    ones, which are valid indices of any embedding. An input without a dtype has that of the model's
    first floating-point parameter. The global random state does not change.

    Args:
        spec: ``package.module:name``, ``path/to/file.py:name``, or a model of a library
            (:mod:`pathspace.cli.libraries`).
        inputs: one text per positional input, see `parse_input`; they replace
            the target's own example.
        seed: seeds both the weights of a model that the target builds and the inputs.
        train: put the model in training mode, or in evaluation mode; ``None``
            does not change its mode.
        need_inputs: refuse a target without example inputs; ``False`` if inputs come from data.
        warn: warn on standard error about NaN or infinite weights; not needed by
            commands that refuse them.

    Example:
        >>> target = load_target("torch.nn:Identity", ["2x3"])
        >>> target.model, target.args[0].shape
        (Identity(), torch.Size([2, 3]))
    """
    specs = [parse_input(text) for text in inputs]
    with torch_kept(seed):
        of_library = spec.partition(":")[0] in libraries.LIBRARIES
        found = None if of_library else find_object(spec)
        # again, because the first import of a module may draw random numbers
        seed_torch(seed)
        model, example = libraries.build_library_model(spec) if of_library else _build(spec, found)
    if specs:
        target = Target(spec, model, _make_inputs(model, specs, seed))
    elif example is None:
        target = Target(spec, model)
    elif isinstance(example, dict):
        target = Target(spec, model, kwargs=example)
    else:
        target = Target(
            spec, model, (example,) if isinstance(example, torch.Tensor) else tuple(example)
        )
    if need_inputs or specs or example is not None:
        _check_call(target, given=bool(specs) or example is not None)
    if train is not None:
        target.model.train(train)
    if warn:
        _warn_of_bad_numbers(target.model)
    return target


def _warn_of_bad_numbers(model: nn.Module) -> None:
    """A structure can be analysed whatever the numbers are."""
    if all(map(has_values, (*model.parameters(), *model.buffers()))):
        try:
            check_finite(model, ())
        except InputError as error:
            say("Warning", "yellow", str(error))


def find_object(spec: str) -> Any:
    """Import the module or file in ``package.module:name`` or ``path/to/file.py:name``, and return
    the object that it names.

    Example:
        >>> find_object("torch.nn:Identity").__name__
        'Identity'
    """
    place, colon, name = spec.rpartition(":")
    if not colon or not place.strip() or not name.strip():
        file = Path(spec) / "config.json" if Path(spec).is_dir() else Path(spec)
        found_one = file.suffix == ".json" and file.is_file()
        form = f"transformers:{spec} for the model of a configuration" if found_one else _FORM
        raise InputError(f"The target '{spec}' has no 'place:name': give {form}.")
    is_file = place.endswith(".py")
    if not is_file and ("/" in place or "\\" in place):
        raise InputError(f"The target '{spec}' names no Python file: give {_FORM}.")
    module = _load_file(Path(place)) if is_file else _load_module(place)
    found: Any = module
    for part in name.split("."):
        try:
            found = getattr(found, part)
        except AttributeError:
            names = [other for other in dir(found) if not other.startswith("_")]
            hint = did_you_mean(part, names)
            owner = f"'{place}'" if found is module else f"'{name.rpartition('.')[0]}' in '{place}'"
            way_out = "" if hint else "; check the name after the colon"
            raise InputError(f"There is no '{part}' in {owner}{hint}{way_out}.") from None
    return found


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
        package = missing.rpartition(".")[0]
        folders = getattr(sys.modules.get(package), "__path__", []) if package else [Path.cwd()]
        names = [entry.name for entry in pkgutil.iter_modules(map(str, folders))]
        names = [f"{package}.{entry}" for entry in names] if package else names
        raise InputError(
            f"There is no module '{missing}'{did_you_mean(missing, [*names, *libraries.LIBRARIES])}"
            ": install it, run from the folder that contains it, or give the file as"
            " path/to/file.py:name."
        ) from None


def _load_file(path: Path) -> ModuleType:
    if not path.is_file():
        what = "is a folder" if path.is_dir() else "does not exist"
        near = did_you_mean(str(path), map(str, path.parent.glob("*.py")))
        raise InputError(
            f"The file '{path}' {what}{near}: give a Python file, as in path/to/file.py:name, from"
            f" the current folder, '{Path.cwd()}'."
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
    if needed := _required_parameters(found):
        raise InputError(
            f"The target '{spec}' needs the arguments {', '.join(needed)}: name a function without"
            " arguments that builds the model."
        )
    try:
        made = found()
    except (Exception, SystemExit) as error:
        raise _user_error(f"The target '{spec}' failed when it was called", error) from error
    if isinstance(made, nn.Module):
        return made, None
    if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module)):
        raise InputError(
            f"The target '{spec}' returned {_kind(made)}: return a torch.nn.Module or (model,"
            " example inputs)."
        )
    model, example = made
    by_name = isinstance(example, dict) and all(isinstance(key, str) for key in example)
    if not by_name and not isinstance(example, torch.Tensor | tuple | list):
        raise InputError(
            f"The target '{spec}' returned {_kind(example)} as example inputs: return a tensor, a"
            " tuple or list of positional inputs, or a dict of keyword inputs by name."
        )
    return model, example


def _kind(value: Any) -> str:
    return f"an object of type {type(value).__name__}"


def _make_inputs(
    model: nn.Module, specs: Sequence[InputSpec], seed: int
) -> tuple[torch.Tensor, ...]:
    own = next((p for p in model.parameters() if p.is_floating_point()), None)
    own_dtype = torch.get_default_dtype() if own is None else own.dtype
    device = torch.device("cpu") if own is None else own.device
    generator = torch.Generator().manual_seed(seed)
    tensors = []
    for spec in specs:
        dtype = spec.dtype or own_dtype
        try:
            if dtype.is_floating_point or dtype.is_complex:
                wide = dtype in (torch.float64, torch.complex128)
                drawn = torch.float64 if wide else torch.float32
                tensor = torch.randn(spec.shape, dtype=drawn, generator=generator)
            else:
                tensor = torch.randint(0, 2, spec.shape, generator=generator)
            tensors.append(tensor.to(device, dtype))
        except (RuntimeError, TypeError, MemoryError) as error:
            text, size = "x".join(map(str, spec.shape)), math.prod(spec.shape) * dtype.itemsize
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


def _required_parameters(function: Callable[..., Any]) -> list[str]:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return []
    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p.name for p in parameters if p.default is p.empty and p.kind not in optional]


def _user_error(what: str, error: BaseException) -> InputError:
    """The error for an exception in the user's code, with its name, message, file and line."""
    way_out = "correct it there"
    if isinstance(error, SystemExit):
        way_out = "put what only a script should run under if __name__ == '__main__'"
    elif isinstance(error, ImportError):
        way_out = "install what is missing, or give the target as package.module:name"
    kind = type(error).__name__
    return InputError(f"{what}, {kind} ({on_one_line(str(error))}) {user_frame(error)}: {way_out}.")
