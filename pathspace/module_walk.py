"""A model's modules and tensors by name, as lists.

``nn.Module.named_modules`` passes each module through one generator per level above it;
tracing asks fifteen times.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor, nn

Kind = Literal["_parameters", "_buffers"]
# where a module keeps what it has registered
REGISTERED = ("_parameters", "_buffers", "_modules")


def every_module(model: nn.Module) -> list[nn.Module]:
    """All modules of a model, each once, in the order of ``model.modules()``.

    Example:
        >>> shared = nn.ReLU()
        >>> len(every_module(nn.Sequential(shared, shared)))
        2
    """
    found: dict[int, nn.Module] = {}

    def walk(module: nn.Module) -> None:
        found[id(module)] = module
        for inner in module._modules.values():
            if inner is not None and id(inner) not in found:
                walk(inner)

    walk(model)
    return list(found.values())


def every_path(model: nn.Module, repeated: bool = True) -> list[tuple[str, nn.Module]]:
    """All paths and their modules, as
    ``model.named_modules(remove_duplicate=not repeated)`` gives them.

    Args:
        model: any module; with ``repeated``, no module may hold itself.
        repeated: list a module of several paths under each of them.

    Example:
        >>> shared = nn.ReLU()
        >>> [path for path, _ in every_path(nn.Sequential(shared, shared))]
        ['', '0', '1']
    """
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


def every_tensor(model: nn.Module, kind: Kind, repeated: bool = True) -> dict[str, Tensor]:
    """All names of parameters or buffers and their tensors; a tensor of several names
    stands there several times.

    Example:
        >>> list(every_tensor(nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(1)), "_buffers"))
        ['1.running_mean', '1.running_var', '1.num_batches_tracked']
    """
    return {
        f"{path}.{key}" if path else key: tensor
        for path, module in every_path(model, repeated)
        for key, tensor in getattr(module, kind).items()
        if tensor is not None
    }


__all__ = ["REGISTERED", "every_module", "every_path", "every_tensor"]
