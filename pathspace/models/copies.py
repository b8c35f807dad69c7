"""Copies of models that ``copy.deepcopy`` cannot copy: after a run, with locks, with
hooks that refer to the model.
"""

from __future__ import annotations

import copy
import sys
import types
import weakref
from collections import OrderedDict, deque
from collections.abc import Mapping
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from ..errors import InputError
from .walk import REGISTERED, SIMPLE, is_simple

M = TypeVar("M", bound=nn.Module)
# nothing to copy, and nothing in it
_ATOMS = (type, str, int, float, types.ModuleType)
_CONTAINERS = (OrderedDict, dict, list, set)
# what no two modules share
_OWN = frozenset([*REGISTERED, "_non_persistent_buffers_set"])
# what torch does to restore these changes only files of earlier versions
_RESTORES = (nn.Module.__setstate__, nn.modules.conv._ConvNd.__setstate__)


def safe_deepcopy(model: M, share_tensors: bool = False) -> M:
    """An independent copy of ``model``.

    Tensors with a gradient history, which a forward pass can leave in a model
    (``torch.nn.utils.prune`` does), are detached. Objects that cannot be copied (a lock, an open
    file) are shared. Functions in the model, such as hooks, are copied too: their references to the
    model, lists and objects become references to the copies. Hooks of objects with a true attribute
    ``stays_behind`` measure the model from outside, and are left out.

    Args:
        model: any module.
        share_tensors: let the copy have the same tensors as the model, so that it costs no memory.

    Returns:
        The copy.

    Raises:
        InputError: an object in the model cannot be copied.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(2, 2)
        >>> model.seen = model(torch.ones(1, 2))
        >>> safe_deepcopy(model).seen.requires_grad
        False
    """
    try:
        try:
            return _copied(model, share_tensors, insist=False)
        except Exception:
            return _copied(model, share_tensors, insist=True)
    except Exception as error:
        reason = str(error).strip().splitlines() or [""]
        raise InputError(
            f"{type(model).__name__} cannot be copied ({type(error).__name__}: {reason[0]}),"
            " expected a module that copy.deepcopy can copy; remove the objects that cannot be"
            " copied."
        ) from error


def _copied(model: M, share_tensors: bool, insist: bool) -> M:
    memo, functions, own = _memo(model, share_tensors)
    if insist:
        # modules with a failing __deepcopy__ are rebuilt from their attributes
        refusing = [module for module in own if "__deepcopy__" in dir(type(module))]
        for module in refusing:
            memo[id(module)] = type(module).__new__(type(module))
        for module in refusing:
            memo[id(module)].__dict__.update(copy.deepcopy(module.__dict__, memo))
    plain = [module for module in own if _is_plain(type(module)) and id(module) not in memo]
    # (what copy.deepcopy does to a module, without a copy of each number and key)
    for module in plain:
        shell: nn.Module = type(module).__new__(type(module))
        memo[id(module)] = shell
        # (first: what rebuilds another object, such as a compiled module, can read them)
        shell.__dict__.update(
            {
                key: value if kind in SIMPLE else kind()
                for key, value in vars(module).items()
                if (kind := type(value)) in SIMPLE
                or ((kind is OrderedDict or key in _OWN) and not value)
            }
        )
    # inner modules were found last
    for module in reversed(plain):
        twin = memo[id(module)].__dict__
        twin.update(
            {
                key: _copied_attribute(value, memo)
                for key, value in vars(module).items()
                if key not in twin
            }
        )
    result = copy.deepcopy(model, memo)
    for old, new in functions:
        for before, after in zip(old.__closure__ or (), new.__closure__ or (), strict=True):
            if is_bound(before):
                held = before.cell_contents
                # (copy.deepcopy copies no modules of Python)
                after.cell_contents = (
                    held if isinstance(held, types.ModuleType) else copy.deepcopy(held, memo)
                )
        new.__dict__.update(copy.deepcopy(old.__dict__, memo))
        new.__defaults__ = copy.deepcopy(old.__defaults__, memo)
        new.__kwdefaults__ = copy.deepcopy(old.__kwdefaults__, memo)
    for module in own:
        if id(module) in memo:
            _complete(module.__dict__, memo[id(module)].__dict__, memo)
    return result


def _complete(held: dict[str, Any], twin: dict[str, Any], memo: dict[int, Any]) -> None:
    """Replace weak references of a module by those to the copies, and
    remove hooks that stay behind.
    """
    for key, value in held.items():
        if isinstance(value, weakref.ref) and id(value()) in memo:
            twin[key] = weakref.ref(memo[id(value())])
        elif type(value) is OrderedDict and value and key.endswith("_hooks"):
            for number in [number for number, hook in value.items() if stays_behind(hook)]:
                twin[key].pop(number, None)


def _copied_attribute(value: Any, memo: dict[int, Any]) -> Any:
    """``copy.deepcopy(value, memo)``, quicker for what most attributes of modules are."""
    kind = type(value)
    if id(value) in memo:
        return memo[id(value)]
    if kind is tuple and is_simple(value):
        return value
    if (
        kind is dict
        and all(type(held) in SIMPLE or id(held) in memo for held in value.values())
        and is_simple(value)
    ):
        made = memo[id(value)] = {
            key: held if type(held) in SIMPLE else memo[id(held)] for key, held in value.items()
        }
        return made
    return copy.deepcopy(value, memo)


def _is_plain(kind: type[nn.Module]) -> bool:
    """Whether a module is copied as its attributes are."""
    own = any(
        hasattr(kind, name) for name in ("__deepcopy__", "__getnewargs__", "__getnewargs_ex__")
    )
    return (
        not own
        and kind.__setstate__ in _RESTORES
        and kind.__reduce_ex__ is object.__reduce_ex__
        and kind.__reduce__ is object.__reduce__
        and kind.__getstate__ is nn.Module.__getstate__
    )


def stays_behind(hook: Any) -> bool:
    """Whether a hook belongs to what measures a model from outside.

    Example:
        >>> stays_behind(print)
        False
    """
    while type(hook) is partial:
        hook = hook.func
    return type(hook) is types.MethodType and getattr(hook.__self__, "stays_behind", False) is True


def is_bound(cell: types.CellType) -> bool:
    """Whether the variable of a closure has a value yet."""
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        # the variable is not bound yet
        return False
    return True


def _memo(
    model: nn.Module, share_tensors: bool
) -> tuple[dict[int, Any], list[tuple[types.FunctionType, types.FunctionType]], list[nn.Module]]:
    """Replacements for the objects in ``model`` that ``copy.deepcopy`` cannot copy or would share.

    Returns:
        The memo for ``copy.deepcopy``; the functions with state, each with an
        empty copy; the modules.
    """
    memo: dict[int, Any] = {}
    functions: list[tuple[types.FunctionType, types.FunctionType]] = []
    modules: list[nn.Module] = []
    seen: dict[int, Any] = {}
    waiting: list[Any] = [model]
    while waiting:
        value = waiting.pop()
        kind = type(value)
        simple = kind in SIMPLE or isinstance(value, _ATOMS) or (kind is tuple and is_simple(value))
        if simple or id(value) in seen:
            continue
        seen[id(value)] = value
        if kind is dict:
            waiting += value.values()
        elif isinstance(value, Tensor):
            tensor = _tensor(value, share_tensors)
            if tensor is not None:
                memo[id(value)] = tensor
        elif isinstance(value, types.FunctionType):
            twin = _twin(value)
            if twin is not None:
                memo[id(value)] = twin
                functions.append((value, twin))
                waiting += _held(value)
        elif isinstance(value, nn.Module):
            modules.append(value)
            # (a module has a dozen dictionaries without hooks, which take longer than all the rest)
            held = [(type(each), each) for each in vars(value).values()]
            waiting += [
                each
                for kind, each in held
                if kind not in SIMPLE and (kind not in _CONTAINERS or each)
            ]
        elif kind in (partial, types.MethodType) and stays_behind(value):
            # (what it refers to is not copied; the copy of the module loses it)
            memo[id(value)] = value
        elif _can_be_copied(value):
            waiting += _held(value)
        else:
            memo[id(value)] = (
                _copy_of_generator(value) if isinstance(value, torch.Generator) else value
            )
    # keep all objects alive, so that no id is used twice
    memo[id(memo)] = list(seen.values())
    return memo, functions, modules


def _held(value: Any) -> list[Any]:
    """The objects inside an object that are copied with it."""
    if isinstance(value, types.FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or () if is_bound(cell)]
        return [
            *cells,
            *(value.__defaults__ or ()),
            *(value.__kwdefaults__ or {}).values(),
            *value.__dict__.values(),
        ]
    if isinstance(value, types.MethodType):
        return [value.__self__]
    if isinstance(value, partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, list | tuple | set | frozenset | deque):
        return list(value)
    entries = value.values() if isinstance(value, Mapping) else ()
    return [*entries, *getattr(value, "__dict__", {}).values()]


def _can_be_copied(value: Any) -> bool:
    """Whether an object can be copied if its contents can."""
    if isinstance(
        value, Mapping | list | tuple | set | frozenset | deque | types.MethodType | partial
    ):
        return True
    try:
        value.__reduce_ex__(4)
    except Exception:
        return False
    return True


def _copy_of_generator(value: torch.Generator) -> torch.Generator:
    generator = torch.Generator(value.device)
    generator.set_state(value.get_state())
    return generator


def _tensor(value: Tensor, share: bool) -> Tensor | None:
    """The replacement for a tensor; ``None`` for an ordinary copy."""
    fake = isinstance(value, FakeTensor) and not share
    if fake or (value.is_inference() and not torch.is_inference_mode_enabled()):
        # (inference tensors take no part in autograd; copy.deepcopy would read memory that
        # fake tensors do not have)
        clone = value.detach().clone()
        return (
            nn.Parameter(clone, value.requires_grad) if isinstance(value, nn.Parameter) else clone
        )
    if not value.is_leaf:
        return value.detach() if share else value.detach().clone()
    return value if share else None


def _twin(function: types.FunctionType) -> types.FunctionType | None:
    """A function with the same code and empty cells; ``None`` if the function
    cannot refer to the model.
    """
    cells = function.__closure__
    if not (
        cells or function.__defaults__ or function.__kwdefaults__ or function.__dict__
    ) or _importable(function):
        return None
    empty = None if cells is None else tuple(types.CellType() for _ in cells)
    twin = types.FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, empty
    )
    twin.__kwdefaults__, twin.__qualname__, twin.__doc__ = (
        function.__kwdefaults__,
        function.__qualname__,
        function.__doc__,
    )
    twin.__module__, twin.__annotations__ = function.__module__, function.__annotations__
    return twin


def _importable(function: types.FunctionType) -> bool:
    """Whether a function is a global of its Python module, so that it must not be copied."""
    return getattr(sys.modules.get(function.__module__), function.__qualname__, None) is function
