"""Matching of an optimizer's parameters, and of a model's tensors, with the reduction graph."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from traceback import walk_stack
from typing import Any
from weakref import ref

import numpy as np
import torch
from scipy.sparse import csr_array
from torch import Tensor, nn

from pathspace.errors import InputError, UnsupportedError
from pathspace.files.checkpoints import bare
from pathspace.graph.parts import owner as owner_of
from pathspace.graph.structure import Structure
from pathspace.inference.union_find import UnionFind
from pathspace.models.walk import tensors_of


def named(groups: Sequence[dict[str, Any]]) -> list[tuple[str | None, Tensor]]:
    """All parameters of some groups with their names, ``None`` for those without a name."""
    result: list[tuple[str | None, Tensor]] = []
    for group in groups:
        names = group.get("param_names") or [None] * len(group["params"])
        result += zip(names, group["params"], strict=True)
    return result


def find_names(given: Iterable[str], wanted: Iterable[str]) -> dict[str, str]:
    """Wanted name -> given name, which is the same without the parts that wrappers insert."""
    loose: dict[str, list[str]] = {}
    for name in given:
        loose.setdefault(bare(name), []).append(name)
    found = {}
    for name in wanted:
        alike = loose.get(bare(name), [])
        if name in alike or len(alike) == 1:
            found[name] = name if name in alike else alike[0]
    return found


def refuse_parts(owner: str, parameters: Sequence[tuple[str | None, Tensor]]) -> None:
    """Refuse parameters that a wrapper has concatenated and split.

    Raises:
        UnsupportedError: there are such parameters.
    """
    words = {part for name, _ in parameters for part in (name or "").split(".")}
    makers = {
        "FullyShardedDataParallel": (
            bool(words & {"_fsdp_wrapped_module", "_flat_param"})
            or any(hasattr(parameter, "_is_flat_param") for _, parameter in parameters)
        ),
        "DeepSpeed (ZeRO 3)": any(hasattr(parameter, "ds_id") for _, parameter in parameters),
        "ZeroRedundancyOptimizer": any(
            type(frame.f_locals.get("self")).__name__ == "ZeroRedundancyOptimizer"
            for frame, _ in walk_stack(None)
        ),
    }
    maker = next((maker for maker, found in makers.items() if found), None)
    if maker is not None:
        raise UnsupportedError(
            f"{owner} found parts of parameters, or some of them, as {maker} hands them out,"
            " expected all parameters of the model; shard it by torch.distributed.fsdp.fully_shard"
            " instead."
        )


def match(
    owner: str, parameters: Sequence[tuple[str | None, Tensor]], graph: Structure
) -> tuple[list[int | None], dict[int, Tensor]]:
    """Match parameters with blocks of the graph.

    Parameters of the traced model are matched by identity; all others by name: those of
    copies of the model, and parameters that were replaced later. Weights of the traced
    model itself may be missing.

    Returns:
        The position in ``graph.blocks`` of every parameter, ``None`` outside path space; and
        position -> weight of the traced model that is not among the parameters.
    """
    if (name := next((name for name, p in parameters if p.is_complex()), "")) != "":
        raise UnsupportedError(
            f"{owner} found parameter {name!r} with complex numbers, expected real ones: path"
            " values are real."
        )
    if shifted := [block for block in graph.blocks if block.shift]:
        raise UnsupportedError(
            f"{owner} found parameter {shifted[0].name!r}, to which the model adds"
            f" {shifted[0].shift:g},"
            " expected weights that scale themselves; take the skeleton of ps.trace(model, ...,"
            " affine=False), which keeps such parameters out of the gauge."
        )
    own = {id(p): graph.index[name] for name, p in graph.parameters.items() if name in graph.index}
    taken = {own[id(p)] for _, p in parameters if id(p) in own}
    alike = find_names((name for name, _ in parameters if name is not None), graph.index)
    index = {given: graph.index[wanted] for wanted, given in alike.items()}
    named_alike = {name: block for name, block in index.items() if block not in taken}
    result = [own.get(id(p), named_alike.get(name or "")) for name, p in parameters]
    seen: set[int] = set()
    for block, (name, parameter) in zip(result, parameters, strict=True):
        if block is None:
            continue
        if tuple(parameter.shape) != graph.blocks[block].shape:
            refuse_parts(owner, parameters)
            raise InputError(
                f"{owner} found parameter {name!r} of shape {tuple(parameter.shape)}, expected "
                f"{graph.blocks[block].shape} as traced; trace the model that is being trained."
            )
        if block in seen:
            raise InputError(
                f"{owner} found two parameters for {graph.blocks[block].name!r} of the skeleton,"
                " expected one; pass each parameter once, and name those of other modules"
                " differently."
            )
        seen.add(block)
    missing = {i: block.name for i, block in enumerate(graph.blocks) if i not in seen}
    if missing:
        refuse_parts(owner, parameters)
    # (the other weights of a copy are not known)
    own_only = (
        bool(taken) and seen <= taken and all(name in graph.parameters for name in missing.values())
    )
    if missing and not own_only:
        raise InputError(
            f"{owner} found no parameter for {len(missing)} blocks of the skeleton (first:"
            f" {next(iter(missing.values()))!r}); pass model.named_parameters() of the traced model"
            " or of a copy with the same names."
        )
    return result, {i: graph.parameters[name] for i, name in missing.items()}


def movable(graph: Structure, names: Collection[str]) -> tuple[Structure, csr_array]:
    """Merge units connected by a frozen weight, which is constant only if both
    ends have the same scale.

    Units that frozen weights connect to the root are fixed, and so are all factors of a
    product at a frozen weight.

    Returns:
        The graph of the tensors that may change over merged units; and the integer matrix
        ``(H, merged)`` from log-scales of merged units to those of units.
    """
    count = graph.num_units + 1
    scales = UnionFind()
    units = scales.fresh((graph.num_units,))
    for block in graph.blocks:
        if block.name not in names:
            plain = [
                torch.where(ids.abs() < count, ids, 0)
                for ids in torch.broadcast_tensors(block.tail, block.head)
            ]
            scales.unify(plain[0], plain[1])
            derived = torch.cat([ids.reshape(-1) for ids in (block.tail, block.head)]).abs()
            forms = graph.forms[derived[derived >= count].unique().numpy() - count]
            factors = units[np.unique(forms.nonzero()[1])]
            scales.unify(factors, torch.zeros_like(factors))
    merged = scales.solve()
    new = int(np.abs(merged).max())
    found = np.flatnonzero(merged)
    turn = csr_array(
        (np.sign(merged[found]), (found - 1, np.abs(merged[found]) - 1)),
        shape=(graph.num_units, new),
    )
    derived = new + 1 + torch.arange(graph.forms.shape[0])
    mapped = torch.cat([torch.from_numpy(merged), derived])

    def moved(ids: Tensor) -> Tensor:
        return mapped[ids.abs()] * ids.sign()

    joined = replace(
        graph,
        blocks=tuple(
            replace(block, tail=moved(block.tail), head=moved(block.head))
            for block in graph.blocks
            if block.name in names
        ),
        num_units=new,
        approximate=np.zeros(0, np.int64),
        exact=csr_array((new, 0), dtype=np.int64),
        forms=csr_array(graph.forms @ turn),
        statistics=tuple(replace(entry, units=moved(entry.units)) for entry in graph.statistics),
        beyond={
            name: (moved(tail), moved(head))
            for name, (tail, head) in graph.beyond.items()
            if name in names
        },
    )
    return joined, turn


# where a buffer is: its module, and its name there
Place = tuple[ref[nn.Module], str]


def find_tensors(
    owner: str, graph: Structure, model: nn.Module | None, groups: Sequence[dict[str, Any]] = ()
) -> dict[str, Tensor]:
    """Parameters and running statistics of a graph by name.

    They are those of ``model``, if it is given; otherwise those of the traced model, if
    the optimizer has them; else the optimizer's parameters with the names in the graph
    (without prefixes of wrappers).
    """
    own: dict[str, Tensor] = {**graph.captured.buffers, **graph.parameters}
    if model is not None:
        own = tensors_of(model)
    else:
        known = {id(p) for p in graph.parameters.values()}
        given = named(groups)
        if not any(id(p) in known for _, p in given):
            own = {name: p for name, p in given if name is not None}
    shapes = {block.name: block.shape for block in graph.blocks}
    wanted = [*shapes, *(name for entry in graph.statistics for name in entry.names)]
    names = find_names(own, wanted)
    for name in wanted:
        shape = tuple(own[names[name]].shape) if name in names else None
        if shape is None or shape != shapes.get(name, shape):
            held = f"no tensor {name!r} of the reduction graph"
            if shape is not None:
                held = f"parameter {name!r} of shape {shape}, expected {shapes[name]} as traced"
            raise InputError(f"{owner} found {held}; pass the traced model or a copy as model=.")
    return {name: own[names[name]] for name in wanted}


def find_places(graph: Structure, model: nn.Module | None) -> dict[str, Place]:
    """The modules of running statistics: ``model.double()`` or ``model.to(device)`` gives
    them other tensors there.
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
        name: (ref(modules[owner_of(own)]), own.rpartition(".")[2])
        for name, own in names.items()
        if owner_of(own) in modules
    }
