"""Parameters and running statistics of a reduction graph in the model that is trained."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any
from weakref import ref

from torch import Tensor, nn

from pathspace.errors import InputError
from pathspace.graph.parts import owner
from pathspace.graph.structure import Structure

from .matching import find_names

# where a buffer is: its module, and its name there
Place = tuple[ref[nn.Module], str]


def find_tensors(
    groups: Iterable[Mapping[str, Any]], graph: Structure, model: nn.Module | None
) -> dict[str, Tensor]:
    """Parameters and running statistics of a graph by name.

    They are those of ``model``, if it is given; otherwise those of the traced model, if
    the optimizer has them; else the optimizer's parameters with the names in the graph
    (without prefixes of wrappers).

    Args:
        groups: the parameter groups of the optimizer.
        graph: the reduction graph.
        model: the model, or ``None``.

    Raises:
        InputError: a tensor is missing, or has another shape.
    """
    statistics = [name for entry in graph.statistics for name in entry.names]
    own: dict[str, Tensor] = {**graph.captured.buffers, **graph.parameters}
    if model is not None:
        own = dict(model.named_buffers(remove_duplicate=False))
        own |= dict(model.named_parameters(remove_duplicate=False))
    else:
        known = {id(p) for p in graph.parameters.values()}
        if not any(id(p) in known for group in groups for p in group["params"]):
            given = [
                pair
                for group in groups
                for pair in zip(group.get("param_names", ()), group["params"], strict=False)
            ]
            own = dict(given)
    found: dict[str, Tensor] = {}
    wanted = [*(block.name for block in graph.blocks), *statistics]
    names = find_names(own, wanted)
    for name in wanted:
        if name not in names:
            raise InputError(
                f"GaugeFixed found no tensor {name!r} of the reduction graph; trace the model that"
                " is trained, or pass it as model=."
            )
        found[name] = own[names[name]]
    for block in graph.blocks:
        if tuple(found[block.name].shape) != block.shape:
            raise InputError(
                f"GaugeFixed found parameter {block.name!r} of shape"
                f" {tuple(found[block.name].shape)}, expected {block.shape} as traced; trace the"
                " model that is trained."
            )
    return found


def find_places(graph: Structure, model: nn.Module | None) -> dict[str, Place]:
    """The modules of running statistics: ``model.double()`` or ``model.to(device)`` gives
    them other tensors there.

    Args:
        graph: the reduction graph.
        model: the model, or ``None`` for the traced one.
    """
    wanted = [name for entry in graph.statistics for name in entry.names]
    modules: Mapping[str, nn.Module] = graph.modules
    names = dict(zip(wanted, wanted, strict=True))
    if model is not None:
        modules = dict(model.named_modules(remove_duplicate=False))
        names = find_names(
            (name for name, _ in model.named_buffers(remove_duplicate=False)), wanted
        )
    return {
        name: (ref(modules[owner(own)]), own.rpartition(".")[2])
        for name, own in names.items()
        if owner(own) in modules
    }


def moved_away(tensors: Mapping[str, Tensor], places: Mapping[str, Place]) -> dict[str, Tensor]:
    """The tensors that are others now than those known.

    Args:
        tensors: those known, by name.
        places: where to look.
    """
    found = {}
    for name, (module, own) in places.items():
        now = getattr(module(), own, None)
        if isinstance(now, Tensor) and now is not tensors[name]:
            found[name] = now
    return found


__all__ = ["Place", "find_places", "find_tensors", "moved_away"]
