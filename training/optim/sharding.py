"""Where the weights are: whole on every device, or cut along any dimension over the dimensions of a mesh.

A step needs one thing from other devices: sums over all edges of a unit. Each device adds up the edges it holds; those
that several hold are counted by the first of them. One ``all_reduce`` over a vector of one entry per chain then adds
the devices up, for each dimension of the mesh along which something is cut, and everything that is kept by unit is the
same everywhere. Weights and gradients never travel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from pathspace import InputError, UnsupportedError

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor
    from typing_extensions import TypeIs

# by dimension of a tensor, the indices that are held
Indices = tuple[np.ndarray, ...]


@dataclass(frozen=True)
class Spread:
    """How the tensors of an optimizer are spread over devices.

    Attributes:
        groups: the processes along each dimension of the mesh over which a tensor is cut; none: all are whole.
        indices: what this device holds of each tensor; ``None``: all.
        counted: whether this device counts each tensor where several hold the same of it.
    """

    groups: tuple[dist.ProcessGroup, ...]
    indices: tuple[Indices | None, ...]
    counted: tuple[bool, ...]

    def sum(self, values: Tensor) -> Tensor:
        """The sum over all devices, in place."""
        for group in self.groups:
            dist.all_reduce(values, group=group)
        return values


def sharded(tensor: Tensor) -> TypeIs[DTensor]:
    """Tell whether a tensor is spread over several devices."""
    if type(tensor) in (Tensor, torch.nn.Parameter):
        return False
    # importing this takes half a second, which only those pay who have such tensors
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)


def local(tensor: Tensor) -> Tensor:
    """What this device holds of a tensor: itself, or its shard (the same memory)."""
    if not sharded(tensor):
        return tensor
    with torch.no_grad():
        return tensor.to_local()


def local_gradient(parameter: Tensor) -> Tensor | None:
    """The gradient of what this device holds of a parameter; sums that are still to be made over devices are made."""
    grad = parameter.grad
    if grad is not None and sharded(grad) and sharded(parameter) and grad.placements != parameter.placements:
        grad = grad.redistribute(placements=parameter.placements)
    return None if grad is None else local(grad)


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor; of shards, gathered from all devices."""
    return tensor.full_tensor() if sharded(tensor) else tensor


def version(tensor: Tensor) -> int:
    """How often a tensor was written to, as a whole or on this device alone."""
    return tensor._version + local(tensor)._version if sharded(tensor) else tensor._version


def refuse_shards(owner: str, tensors: Sequence[Tensor], why: str) -> None:
    """Refuse sharded tensors where they make no sense.

    Args:
        owner: who is asking.
        tensors: what was given.
        why: the rest of the sentence: the reason, and what to do.

    Raises:
        UnsupportedError: one of them is sharded.
    """
    if any(sharded(tensor) for tensor in tensors):
        raise UnsupportedError(f"{owner} found parameters sharded over several devices, expected whole tensors: {why}")


def piece(held: np.ndarray, parts: int, number: int) -> np.ndarray:
    """One of the parts into which a device mesh cuts indices; the last ones may be shorter, or empty."""
    size = -(-len(held) // parts)
    return held[number * size : (number + 1) * size]


def find_indices(owner: str, name: str | None, tensor: Tensor) -> Indices | None:
    """What this device holds of a tensor; ``None``: all of it.

    Raises:
        UnsupportedError: the device holds terms of a sum, or is not in the mesh.
        InputError: the device holds another part than its place in the mesh says.
    """
    if not sharded(tensor):
        return None
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        raise UnsupportedError(
            f"{owner} found parameter {name!r} on a mesh that this process is not in, expected one with a part on "
            "every process; make the optimizer on the processes of the mesh."
        )
    indices = [np.arange(size) for size in tensor.shape]
    for place, size, placement in zip(coordinate, tensor.device_mesh.shape, tensor.placements, strict=True):
        if placement.is_partial():
            raise UnsupportedError(
                f"{owner} found parameter {name!r} placed as {tensor.placements}, terms of a sum over devices, "
                "expected shards or whole tensors; redistribute it first."
            )
        if not placement.is_replicate():
            # what tensor parallelism has cut before, fully_shard cuts piece by piece
            before: int = getattr(placement, "split_factor", 1)
            dim: int = getattr(placement, "dim")  # noqa: B009 (shards have it, placements in general do not)
            pieces = [piece(piece(indices[dim], before, number), size, place) for number in range(before)]
            indices[dim] = np.concatenate(pieces)
    shape, held_shape = tuple(map(len, indices)), tuple(local(tensor).shape)
    if shape != held_shape:
        raise InputError(
            f"{owner} found a part of shape {held_shape} of parameter {name!r} on this device, expected {shape}; build "
            "the optimizer after sharding, from model.named_parameters()."
        )
    return None if shape == tuple(tensor.shape) else tuple(indices)


def find_spread(owner: str, named: Sequence[tuple[str | None, Tensor]]) -> Spread:
    """How the parameters of an optimizer are spread over devices.

    Args:
        owner: the class that is asking.
        named: all its parameters, in the same order on all devices.

    Raises:
        UnsupportedError: they are cut in a way that is not supported.
        InputError: a device does not hold what it should.
    """
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
                    f"{owner} found parameter {name!r} cut over processes {list(one)} and another over {list(other)}, "
                    "expected dimensions of one mesh; give all modules the same mesh, or dimensions of it."
                )
    counted = tuple(all(one in cut or dist.get_rank(groups[one]) == 0 for one in found) for cut in cuts)
    return Spread(tuple(groups.values()), indices, counted)


__all__ = [
    "Indices",
    "Spread",
    "find_indices",
    "find_spread",
    "local",
    "local_gradient",
    "refuse_shards",
    "sharded",
    "version",
]
