"""The tensors of a step: their parts on this device, and index vectors over all of them.

Weights are whole on every device, or split along any dimension over the dimensions of a mesh.

A step needs only sums over all edges of a unit from other devices. Each device sums over its
own edges; edges on several devices are counted by the first of them. Then, for each
dimension of the mesh along which tensors are split, one ``all_reduce`` over a vector with
one entry per chain sums over the devices, and all values by unit are equal on all devices.
Weights and gradients are not sent.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from pathspace.errors import InputError, UnsupportedError
from pathspace.models.values import sharded

HALF = (torch.float16, torch.bfloat16)
# number of elements that, with intermediate results, fit into the cache of a processor
CACHED = 1 << 17
# number of elements of a gradient whose copy costs more than to multiply it back
LENT = 1 << 19
# where the factors of a tensor stand among those of all, and the shape in which they broadcast
Place = tuple[int, tuple[int, ...] | None] | None
# the local indices for each dimension of a tensor
Indices = tuple[np.ndarray, ...]


@dataclass(frozen=True)
class Spread:
    """How the tensors of an optimizer are sharded.

    Attributes:
        groups: the processes along each dimension of the mesh over which a tensor is
            split; empty without sharding.
        indices: local indices of each tensor; ``None`` for all.
        counted: for each tensor, whether this device counts it if several
            devices hold the same part.
    """

    groups: tuple[dist.ProcessGroup, ...]
    indices: tuple[Indices | None, ...]
    counted: tuple[bool, ...]

    def sum(self, values: Tensor) -> Tensor:
        """The sum over all devices, in place."""
        for group in self.groups:
            dist.all_reduce(values, group=group)
        return values


def local(tensor: Tensor) -> Tensor:
    """The part of a tensor on this device: the tensor itself, or its shard (the same memory)."""
    if not sharded(tensor):
        return tensor
    with torch.no_grad():
        return tensor.to_local()


def fusible(parameter: Tensor) -> bool:
    """Whether fused kernels of torch, which ignore strides on a processor, can take it."""
    own, grad = parameter, parameter.grad
    return not own.is_cpu or (own.is_contiguous() and (grad is None or grad.is_contiguous()))


def local_gradient(parameter: Tensor, grad: Tensor) -> Tensor:
    """The gradient of the local part of a parameter, after pending sums over devices."""
    if not sharded(grad):
        return grad
    if sharded(parameter) and grad.placements != parameter.placements:
        grad = grad.redistribute(placements=parameter.placements)
    return local(grad)


def whole(tensor: Tensor) -> Tensor:
    """The whole tensor; shards are gathered from all devices."""
    return tensor.full_tensor() if sharded(tensor) else tensor


def refuse_shards(owner: str, tensors: Sequence[Tensor], why: str) -> None:
    """Refuse sharded tensors; ``why`` ends the sentence, with what to do."""
    if any(sharded(tensor) for tensor in tensors):
        raise UnsupportedError(
            f"{owner} found parameters sharded over several devices, expected whole tensors: {why}"
        )


def piece(held: np.ndarray, parts: int, number: int) -> np.ndarray:
    """One of the parts into which a device mesh splits indices; the last ones
    may be shorter, or empty.
    """
    size = -(-len(held) // parts)
    return held[number * size : (number + 1) * size]


def find_indices(owner: str, name: str | None, tensor: Tensor) -> Indices | None:
    """The local indices of a tensor by dimension; ``None`` for all.

    Raises:
        UnsupportedError: the device holds terms of a sum, or is not in the mesh.
        InputError: the local part does not match the device's position in the mesh.
    """
    if not sharded(tensor):
        return None
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        raise UnsupportedError(
            f"{owner} found parameter {name!r} on a mesh that this process is not in, expected one"
            " with a part on every process; make the optimizer on the processes of the mesh."
        )
    indices = [np.arange(size) for size in tensor.shape]
    for place, size, placement in zip(
        coordinate, tensor.device_mesh.shape, tensor.placements, strict=True
    ):
        if placement.is_partial():
            raise UnsupportedError(
                f"{owner} found parameter {name!r} placed as {tensor.placements}, terms of a sum"
                " over devices, expected shards or whole tensors; redistribute it first."
            )
        if not placement.is_replicate():
            # fully_shard splits each piece of a tensor that tensor parallelism has split before
            before: int = getattr(placement, "split_factor", 1)
            dim: int = getattr(placement, "dim")  # noqa: B009 (shards have it, placements in general do not)
            pieces = [
                piece(piece(indices[dim], before, number), size, place) for number in range(before)
            ]
            indices[dim] = np.concatenate(pieces)
    shape, held_shape = tuple(map(len, indices)), tuple(local(tensor).shape)
    if shape != held_shape:
        raise InputError(
            f"{owner} found a part of shape {held_shape} of parameter {name!r} on this device,"
            f" expected {shape}; build the optimizer after sharding, from model.named_parameters()."
        )
    return None if shape == tuple(tensor.shape) else tuple(indices)


def find_spread(owner: str, named: Sequence[tuple[str | None, Tensor]]) -> Spread:
    """How the parameters of an optimizer are sharded; their order is the same on all devices."""
    indices = tuple(find_indices(owner, name, tensor) for name, tensor in named)
    groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
    cuts: list[set[tuple[int, ...]]] = []
    for _, tensor in named:
        cuts.append(set())
        if not sharded(tensor):
            continue
        for number, placement in enumerate(tensor.placements):
            if not placement.is_replicate() and tensor.device_mesh.size(number) > 1:
                group = tensor.device_mesh.get_group(number)
                ranks = tuple(dist.get_process_group_ranks(group))
                groups.setdefault(ranks, group)
                cuts[-1].add(ranks)
    found = list(groups)
    for i, one in enumerate(found):
        for other in found[:i]:
            if len(set(one) & set(other)) > 1:
                name = next(name for (name, _), cut in zip(named, cuts, strict=True) if one in cut)
                raise UnsupportedError(
                    f"{owner} found parameter {name!r} cut over processes {list(one)} and another"
                    f" over {list(other)}, expected dimensions of one mesh; give all modules the"
                    " same mesh, or dimensions of it."
                )
    counted = tuple(
        all(one in cut or dist.get_rank(groups[one]) == 0 for one in found) for cut in cuts
    )
    return Spread(tuple(groups.values()), indices, counted)


@dataclass(eq=False)
class PathTensor:
    """One tensor in a step.

    Attributes:
        name: its name, if it has one.
        parameter: the parameter.
        group: the position of its group.
        block: its block of the graph; ``None`` outside path space.
        given: whether the optimizer has it; otherwise it is a constant weight of the traced model.
        factors: its factors by tail and by head, without those that are 1.
        taps: the shape of one factor by tail for each column of a matrix, where it has less.
        turn: the ratios by tail that divide its weights after a step; ``None`` if no tail is in a
            chain.
        tree: its weights on the trees after a step.
        sums: number of its sums by tail; 0 if no tail is in a chain.
        reduced: dimensions along which tails are constant.
        where: flat positions of the edges on the trees.
        count: their number.
        nothing: as many zeros (in the memory of one).
        dead: mask of the edges that belong to dead units, and are constant; ``None``: there are
            none.
        still: whether it is frozen.
    """

    name: str | None
    parameter: Tensor
    group: int
    block: int | None
    given: bool = True
    factors: list[Tensor] = field(default_factory=list)
    taps: tuple[int, ...] | None = None
    turn: Tensor | None = None
    tree: Tensor = field(default_factory=lambda: torch.zeros(0))
    sums: int = 0
    reduced: tuple[int, ...] = ()
    where: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    count: int = 0
    nothing: Tensor = field(default_factory=lambda: torch.zeros(0))
    dead: Tensor | None = None
    still: bool = False

    @property
    def grad(self) -> Tensor | None:
        """Its gradient, if the optimizer has it."""
        return self.parameter.grad if self.given else None

    @property
    def seen(self) -> tuple[object, ...]:
        """What decides how a step treats it; the layout depends on the first two."""
        own, grad = self.parameter, self.grad
        kind = None if grad is None else (grad.layout, grad.dtype)
        return own.dtype, own.device, own.requires_grad, kind, fusible(own)


@dataclass(eq=False, slots=True)
class Entered:
    """One tensor inside a step.

    Attributes:
        entry: the tensor.
        weight: its local part.
        before: its weights before the step, where they are needed.
        factors: its factors by tail and by head.
        lent: its gradient, if it is divided in place, and that at the edges on the trees.
    """

    entry: PathTensor
    weight: Tensor
    before: Tensor | None
    factors: list[Tensor]
    lent: tuple[Tensor, Tensor | None] | None = None


class Guest(NamedTuple):
    """The path values of a group's chains in an inner optimizer, for one step; ``rests`` are
    buffers before it, where some path values are constant.
    """

    optimizer: Optimizer
    group: dict[str, Any]
    value: Tensor
    number: int
    rests: dict[str, Tensor]


class Factors:
    """Factors of all tensors, in a memory for each type; views of them are created once.

    Args:
        sizes: their numbers.
        kinds: the types.
        device: the device.
    """

    def __init__(self, sizes: list[int], kinds: set[torch.dtype], device: torch.device) -> None:
        self._memory = [torch.empty(sum(sizes), dtype=kind, device=device) for kind in kinds]
        self._views = {values.dtype: values.split_with_sizes(sizes) for values in self._memory}

    def fill(self, values: Tensor) -> None:
        """Set the factors; those of all tensors follow each other."""
        for memory in self._memory:
            memory.copy_(values)

    def at(self, place: Place, kind: torch.dtype) -> list[Tensor]:
        """The factors in one place, of a type; none if all are 1."""
        if place is None:
            return []
        number, shape = place
        found = self._views[kind][number]
        return [found if shape is None else found.view(shape)]


def factor_type(dtype: torch.dtype) -> torch.dtype:
    """The type of factors: in half precision, they would be rounded more than weights."""
    return torch.promote_types(dtype, torch.float32)


def by_column(entry: PathTensor, factor: Tensor) -> Tensor:
    """A factor by tail for each column of a matrix: inner loops run over rows then, not taps."""
    return factor if entry.taps is None else factor.expand(entry.taps).contiguous()


def factors_of(entry: PathTensor, half: bool) -> list[Tensor]:
    """The factors of a tensor; one in half precision, where each may be beyond the range."""
    found = entry.factors
    if entry.taps is not None:
        found = [by_column(entry, found[0]), *found[1:]]
    return [found[0] * found[1]] if half and len(found) == 2 else found


def by_tail(entry: PathTensor, products: Tensor) -> Tensor:
    """Numbers of all edges, summed over those with the same tail, flat."""
    found = products.sum(entry.reduced) if entry.reduced else products
    return found if found.dim() == 1 else found.reshape(-1)


def summed(entry: PathTensor, weight: Tensor, grad: Tensor) -> Tensor:
    """Products of weights and gradients, summed over edges with the same tail, flat; of large
    tensors for a group of rows at a time, which remains in the cache.
    """
    if weight.numel() <= CACHED or entry.reduced[:1] != (0,):
        return by_tail(entry, weight * grad)
    rows = max(1, CACHED * len(weight) // weight.numel())
    parts = zip(weight.split(rows), grad.split(rows), strict=True)
    first, *others = (by_tail(entry, some * other) for some, other in parts)
    for other in others:
        first += other
    return first


def as_gradient(entry: PathTensor, gradient: Tensor) -> Tensor:
    """A local tensor as the gradient of a parameter, which may be sharded."""
    whole_one = entry.parameter
    if not sharded(whole_one):
        return gradient
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        gradient,
        whole_one.device_mesh,
        whole_one.placements,
        run_check=False,
        shape=whole_one.shape,
        stride=whole_one.stride(),
    )


def known(value: Tensor) -> float:
    """A number, as far as one can see without waiting for a device; else NaN."""
    return float(value.numpy()) if value.is_cpu else math.nan
