"""Selection of layers by name and type."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Sequence

from torch import nn

from pathspace.errors import InputError, InputTypeError

Names = str | Sequence[str] | None
Types = str | type | Sequence[str | type] | None


def matching(names: Names) -> Callable[[str], bool]:
    """A function that tells whether a name matches one of some patterns.

    Args:
        names: one or several, or ``None`` for all.

    Raises:
        InputTypeError: they are something else.

    Example:
        >>> chosen = matching("blocks.*")
        >>> chosen("blocks.0"), chosen("stem"), matching(None)("stem")
        (True, False, True)
    """
    patterns = "*" if names is None else names
    found = (
        list(patterns)
        if isinstance(patterns, Iterable) and not isinstance(patterns, str)
        else [patterns]
    )
    if not all(isinstance(name, str) for name in found):
        raise InputTypeError(
            f"Found names={names!r}, expected a pattern of names, such as 'blocks.*', or several."
        )
    return lambda name: any(fnmatch.fnmatchcase(name, pattern) for pattern in found)


def select(model: nn.Module, names: Names = None, types: Types = None) -> dict[str, nn.Module]:
    """Select layers by name and by type.

    Args:
        model: any module.
        names: one or several patterns with ``*`` and ``?``; a layer is chosen if one of
            them matches its full name.
        types: one or several classes, or names of classes.

    Returns:
        Name -> module, in the model's order. Without a filter: every module without children, and
        torch's own layers with children (attention). With a filter: every module that passes it,
        and the model itself only if it is named or if no other module passes.

    Raises:
        InputError: nothing passes the filters.
        InputTypeError: ``model`` is not a module, or a filter is of another kind.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
        >>> (
        ...     list(select(model)),
        ...     list(select(model, types=nn.Linear)),
        ...     list(select(model, names="[12]")),
        ... )
        (['0', '1', '2'], ['0', '2'], ['1', '2'])
    """
    if not isinstance(model, nn.Module):
        raise InputTypeError(
            f"Expected a torch.nn.Module to diagnose, found {type(model).__name__}; pass the model"
            " itself."
        )
    chosen: dict[str, nn.Module] = {}
    if names is None and types is None:
        inside: set[str] = set()
        for name, module in model.named_modules():
            parent = name.rpartition(".")[0]
            if parent in inside and name:
                inside.add(name)
                continue
            # torch's attention has a linear layer that it never calls, so it counts as one layer
            own = any(True for _ in module.parameters(recurse=False)) and type(
                module
            ).__module__.startswith("torch.nn")
            childless = not any(True for _ in module.children())
            if childless or own:
                chosen[name] = module
                inside.add(name)
        return chosen
    named = matching(names)
    kinds = [types] if isinstance(types, str | type) else types
    if not (
        kinds is None
        or (isinstance(kinds, Iterable) and all(isinstance(kind, str | type) for kind in kinds))
    ):
        raise InputTypeError(
            f"Found types={types!r}, expected a class of layers, its name, or several."
        )
    for name, module in model.named_modules():
        by_type = kinds is None or any(
            type(module).__name__ == kind if isinstance(kind, str) else isinstance(module, kind)
            for kind in kinds
        )
        if named(name) and by_type:
            chosen[name] = module
    if names is None and len(chosen) > 1:
        # the model itself only if no module inside has the type
        chosen.pop("", None)
    if not chosen:
        found = sorted({type(module).__name__ for module in model.modules()})
        raise InputError(
            f"No layer of {type(model).__name__} matches names={names!r} and types={types!r}; its"
            f" types are {', '.join(found)}, and names are those of named_modules()."
        )
    return chosen
