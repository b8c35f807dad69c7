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
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from ..errors import InputError, did_you_mean
from ..models.finite import check_finite
from ..models.isolation import seed_torch, torch_kept
from . import libraries
from .errors import say

_DTYPES = {
    name: getattr(torch, name)
    for name in (
        *("float16", "bfloat16", "float32", "float64", "complex64", "complex128"),
        *("bool", "uint8", "int8", "int16", "int32", "int64"),
    )
}
_FORM = "package.module:name or path/to/file.py:name"
_INPUT_FORM = "sizes joined by x, and a dtype if need be, such as 2x3x224x224 or 2x16:int64"
_OWN_FOLDER = Path(__file__).parent
_LIBRARY_FOLDERS = (Path(torch.__file__).parent, Path(inspect.__file__).parent)


@dataclass(frozen=True)
class Target:
    """A model and the example inputs it is traced with: ``model(*args, **kwargs)``."""

    spec: str
    model: nn.Module
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class InputSpec:
    """The shape of one example input, and its dtype; ``None`` for the dtype of the model."""

    shape: tuple[int, ...]
    dtype: torch.dtype | None = None


def parse_input(text: str) -> InputSpec:
    """Read one ``--input`` value: sizes joined by ``x`` (or commas), then optionally ``:dtype``.

    Args:
        text: for instance ``"2x3x224x224"`` or ``"2x16:int64"``.

    Returns:
        The shape and the dtype; the dtype is ``None`` if the text has none.

    Raises:
        InputError: the text has another form, a size is zero, or the dtype is unknown.

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

    Returns:
        The model and its inputs.

    Raises:
        InputError: the target cannot be found, loaded or built, or the inputs do not fit it.

    Example:
        >>> target = load_target("torch.nn:Identity", ["2x3"])
        >>> target.model, target.args[0].shape
        (Identity(), torch.Size([2, 3]))
    """
    specs = [parse_input(text) for text in inputs]
    with torch_kept(seed):
        found = None if libraries.is_library(spec) else find_object(spec)
        # again, because the first import of a module may draw random numbers
        seed_torch(seed)
        model, example = (
            libraries.build_library_model(spec) if found is None else _build(spec, found)
        )
    if specs:
        target = Target(spec, model, _make_inputs(model, specs, seed))
    elif example is None:
        target = Target(spec, model)
        if need_inputs:
            _require_no_inputs(target)
    elif isinstance(example, dict):
        target = Target(spec, model, kwargs=example)
    else:
        target = Target(
            spec, model, (example,) if isinstance(example, torch.Tensor) else tuple(example)
        )
    if need_inputs or specs or example is not None:
        _check_call(target)
    if train is not None:
        target.model.train(train)
    if warn:
        _mark_bad_numbers(target.model)
    return target


def _mark_bad_numbers(model: nn.Module) -> None:
    """Warn once if a model has NaN or infinite values; its structure can
    be analysed nevertheless.
    """
    if any(
        tensor.is_meta for tensor in model.state_dict().values() if isinstance(tensor, torch.Tensor)
    ):
        return
    try:
        check_finite(model, ())
    except InputError as error:
        say("Warning", "yellow", str(error))


def find_object(spec: str) -> Any:
    """Import the module or file in ``spec`` and return the object that it names.

    Args:
        spec: ``package.module:name`` or ``path/to/file.py:name``.

    Returns:
        The object, of any type.

    Raises:
        InputError: there is no such module, file or name.

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
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if name != missing and not name.startswith(missing + "."):
            raise _user_error(f"The module '{name}' cannot be imported", error) from error
        package = missing.rpartition(".")[0]
        where = (
            getattr(sys.modules.get(package), "__path__", None) if package else [str(Path.cwd())]
        )
        names = [
            package + "." * bool(package) + module.name
            for module in pkgutil.iter_modules(where or [])
        ]
        names += libraries.LIBRARIES if not package else []
        raise InputError(
            f"There is no module '{missing}'{did_you_mean(missing, names)}: install it, run from"
            " the folder that contains it, or give the file as path/to/file.py:name."
        ) from None
    except (Exception, SystemExit) as error:
        raise _user_error(f"The module '{name}' cannot be imported", error) from error


def _load_file(path: Path) -> ModuleType:
    if path.is_dir():
        raise InputError(f"'{path}' is a folder: give a Python file, as in path/to/file.py:name.")
    if not path.is_file():
        neighbours = (
            [str(other) for other in path.parent.glob("*.py")] if path.parent.is_dir() else []
        )
        raise InputError(
            f"There is no file '{path}'{did_you_mean(str(path), neighbours)}: paths start from the"
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
    expected = (
        "a torch.nn.Module, its class, or a function that returns a model or (model, example"
        " inputs)"
    )
    if isinstance(found, ModuleType) or not callable(found):
        raise InputError(f"The target '{spec}' is {_kind(found)}: name {expected}.")
    is_class = isinstance(found, type)
    if isinstance(found, type) and not issubclass(found, nn.Module):
        raise InputError(
            f"The target '{spec}' is a class but not a torch.nn.Module: name {expected}."
        )
    needed = _required_parameters(found)
    if needed:
        raise InputError(
            f"The target '{spec}' needs the argument{'s' * (len(needed) > 1)} {', '.join(needed)}: "
            "name a function without arguments that builds the model."
        )
    try:
        made = found()
    except (Exception, SystemExit) as error:
        action = "building the model" if is_class else "calling the function"
        raise _user_error(f"The target '{spec}' failed while {action}", error) from error
    if isinstance(made, nn.Module):
        return made, None
    if isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module):
        example = made[1]
        if isinstance(example, torch.Tensor | tuple | list):
            return made[0], example
        if isinstance(example, dict) and all(isinstance(key, str) for key in example):
            return made[0], example
        raise InputError(
            f"The target '{spec}' returned {_kind(example)} as example inputs: return a tensor, a"
            " tuple or list of positional inputs, or a dict of keyword inputs by name."
        )
    raise InputError(
        f"The target '{spec}' returned {_kind(made)}: return a torch.nn.Module or (model, example"
        " inputs)."
    )


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
                drawn = (
                    torch.float64 if dtype in (torch.float64, torch.complex128) else torch.float32
                )
                tensor = torch.randn(spec.shape, dtype=drawn, generator=generator)
            else:
                tensor = torch.randint(0, 2, spec.shape, generator=generator)
            tensors.append(tensor.to(device, dtype))
        except (RuntimeError, TypeError, MemoryError) as error:
            text, size = (
                "x".join(map(str, spec.shape)),
                math.prod(spec.shape) * dtype.itemsize / 2**30,
            )
            raise InputError(
                f"The input '{text}' of {size:.3g} GiB cannot be created on {device} "
                f"({type(error).__name__}): give smaller sizes."
            ) from error
    return tuple(tensors)


def _require_no_inputs(target: Target) -> None:
    names = [*_forward_parameters(target)]
    if names:
        raise InputError(
            f"The target '{target.spec}' has no example inputs, and"
            f" {type(target.model).__name__}.forward takes {', '.join(names)}: give --input once"
            f" per tensor, {_INPUT_FORM}, or name a function that returns (model, example inputs)."
        )


def _check_call(target: Target) -> None:
    """Compare the inputs with the signature of ``forward``, because torch's own
    message is harder to read.
    """
    parameters = _forward_parameters(target)
    try:
        inspect.Signature(list(parameters.values())).bind(*target.args, **target.kwargs)
    except TypeError as error:
        given = [f"{len(target.args)} positional"] if target.args or not target.kwargs else []
        given += [f"the keyword {name}" for name in target.kwargs]
        takes = ", ".join(map(str, parameters.values())) or "none"
        raise InputError(
            f"The inputs do not fit {type(target.model).__name__}.forward, which takes {takes}"
            f" ({error}; given: {', '.join(given)}): give one input per argument, in order."
        ) from None


def _forward_parameters(target: Target) -> dict[str, inspect.Parameter]:
    try:
        return dict(inspect.signature(target.model.forward).parameters)
    except (TypeError, ValueError):  # a compiled forward may have no signature: accept all inputs
        anything = [
            ("args", inspect.Parameter.VAR_POSITIONAL),
            ("kwargs", inspect.Parameter.VAR_KEYWORD),
        ]
        return {name: inspect.Parameter(name, kind) for name, kind in anything}


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
    elif isinstance(error, ImportError) and "relative import" in str(error):
        way_out = "give the target as package.module:name"
    elif isinstance(error, ModuleNotFoundError):
        way_out = "install the missing module"
    return InputError(f"{what}, {_described(error)}{_place(error)}: {way_out}.")


def _described(error: BaseException) -> str:
    """Return the exception on one line; a long message is cut."""
    message = " ".join(
        (error.msg if isinstance(error, SyntaxError) else str(error)).split()
    ).rstrip(".")
    if len(message) > 240:
        message = message[:240].rsplit(" ", 1)[0] + " ..."
    return type(error).__name__ + (f" ({message})" if message else "")


def _place(error: BaseException) -> str:
    """Return the innermost line of the user's code, outside libraries and pathspace."""
    if isinstance(error, SyntaxError) and error.filename:
        return f" in '{_shown(error.filename)}', line {error.lineno}"
    frames = [
        frame for frame in traceback.extract_tb(error.__traceback__) if _is_users(frame.filename)
    ]
    return f" in '{_shown(frames[-1].filename)}', line {frames[-1].lineno}" if frames else ""


def _is_users(filename: str) -> bool:
    if filename.startswith("<"):
        return False
    path = Path(filename)
    if _OWN_FOLDER in path.parents or "site-packages" in path.parts:
        return False
    return not any(folder in path.parents for folder in _LIBRARY_FOLDERS)


def _shown(filename: str) -> str:
    path = Path(filename)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else filename


def _kind(value: Any) -> str:
    if isinstance(value, ModuleType):
        return f"the module {value.__name__}"
    if value is None:
        return "None"
    if isinstance(value, type):
        return f"the class {value.__name__}"
    name = type(value).__name__
    return f"a{'n' * (name[0] in 'aeiouAEIOU')} {name}"
