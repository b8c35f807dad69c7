"""A model's modules and tensors by name, as lists."""

from __future__ import annotations

from typing import Any, Literal

from torch import Tensor, nn
from torch.utils import _pytree as pytree

Kind = Literal["_parameters", "_buffers"]
# where a module keeps what it has registered
REGISTERED = ("_parameters", "_buffers", "_modules")
# immutable types of numbers, names and nothing
SIMPLE = frozenset([type(None), bool, int, float, str])


def may_hold(value: Any) -> bool:
    """Whether a tensor may be in an attribute; most are numbers, or empty dictionaries of hooks."""
    return type(value) not in SIMPLE and not (isinstance(value, dict) and not value)


def has_hooks(module: nn.Module) -> bool:
    """Whether a hook may change what enters or leaves a module."""
    return any(vars(module).get(name) for name in ("_forward_hooks", "_forward_pre_hooks"))


def every_module(model: nn.Module) -> list[nn.Module]:
    """All modules of a model, each once."""
    return list(model.modules())


def every_path(model: nn.Module, repeated: bool = True) -> list[tuple[str, nn.Module]]:
    """All paths and their modules; repeated, a module has each of its paths."""
    return list(model.named_modules(remove_duplicate=not repeated))


def unregistered_attributes(module: nn.Module) -> list[tuple[str, Any]]:
    """Attributes that a module has not registered and that can hold tensors or modules."""
    held = [(key, value) for key, value in vars(module).items() if key not in REGISTERED]
    kinds = (Tensor, nn.Module, list, tuple, dict)
    return [(key, value) for key, value in held if isinstance(value, kinds) and may_hold(value)]


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
