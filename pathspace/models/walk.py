"""A model's modules and tensors by name, as lists.

``nn.Module.named_modules`` passes each module through one generator per level above it;
tracing asks fifteen times.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

from torch import Tensor, nn
from torch.utils import _pytree as pytree

Kind = Literal["_parameters", "_buffers"]
# where a module keeps what it has registered
REGISTERED = ("_parameters", "_buffers", "_modules")
# immutable types of numbers, names and nothing
SIMPLE = frozenset([type(None), bool, int, float, str])


def is_simple(values: Iterable[Any]) -> bool:
    """Whether all that one meets in a collection are numbers, names or nothing."""
    return all(type(value) in SIMPLE for value in values)


def may_hold(value: Any) -> bool:
    """Whether a tensor may be in an attribute; most are numbers, or empty dictionaries of hooks."""
    return type(value) not in SIMPLE and not (isinstance(value, dict) and not value)


def has_hooks(module: nn.Module) -> bool:
    """Whether a hook may change what enters or leaves a module."""
    return any(vars(module).get(name) for name in ("_forward_hooks", "_forward_pre_hooks"))


def every_module(model: nn.Module) -> list[nn.Module]:
    """All modules of a model, each once, in the order of ``model.modules()``."""
    return [module for _, module in every_path(model, repeated=False)]


def every_path(model: nn.Module, repeated: bool = True) -> list[tuple[str, nn.Module]]:
    """All paths and their modules as ``named_modules`` gives them; repeated, none holds itself."""
    found: list[tuple[str, nn.Module]] = []
    seen: set[int] = set()

    def walk(module: nn.Module, path: str) -> None:
        found.append((path, module))
        seen.add(id(module))
        start = f"{path}." if path else ""
        for name, inner in module._modules.items():
            if inner is not None and (repeated or id(inner) not in seen):
                walk(inner, start + name)

    walk(model, "")
    return found


def unregistered_attributes(module: nn.Module) -> list[tuple[str, Any]]:
    """Attributes that a module has not registered and that can hold tensors or modules."""
    return [
        (key, value)
        for key, value in vars(module).items()
        if key not in REGISTERED
        and may_hold(value)
        and (
            isinstance(value, Tensor | nn.Module)
            or (isinstance(value, list | tuple) and not is_simple(value))
            or (isinstance(value, dict) and not is_simple(value.values()))
        )
    ]


def holders(model: nn.Module) -> list[tuple[str, nn.Module, list[tuple[str, Any]]]]:
    """All modules by place, those in lists and other attributes included, which torch does not
    register, each with its :func:`unregistered_attributes`.
    """
    waiting = every_path(model, repeated=False)
    known = {id(module) for _, module in waiting}
    found = []
    # (the list grows while it is read)
    for path, module in waiting:
        found.append((path, module, unregistered_attributes(module)))
        for key, value in found[-1][2]:
            for where, leaf in pytree.tree_leaves_with_path(value):
                if isinstance(leaf, nn.Module) and id(leaf) not in known:
                    place = (f"{path}.{key}" if path else key) + pytree.keystr(where)
                    for name, part in every_path(leaf, repeated=False):
                        known.add(id(part))
                        waiting.append((f"{place}.{name}" if name else place, part))
    return found


def unregistered_modules(model: nn.Module) -> dict[str, nn.Module]:
    """The :func:`holders` that torch does not register, by the place where they are."""
    registered = set(map(id, every_module(model)))
    return {place: module for place, module, _ in holders(model) if id(module) not in registered}


def every_tensor(model: nn.Module, kind: Kind, repeated: bool = True) -> dict[str, Tensor]:
    """All names of parameters or buffers and their tensors, those of shared ones included."""
    return {
        f"{path}.{key}" if path else key: tensor
        for path, module in every_path(model, repeated)
        for key, tensor in getattr(module, kind).items()
        if tensor is not None
    }


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter and buffer, by each of its names."""
    return every_tensor(model, "_parameters") | every_tensor(model, "_buffers")
