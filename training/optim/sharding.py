"""Sharded weights: whole on every device, or split along any dimension over
the dimensions of a mesh.

A step needs only sums over all edges of a unit from other devices. Each device sums over its
own edges; edges on several devices are counted by the first of them. Then, for each
dimension of the mesh along which tensors are split, one ``all_reduce`` over a vector with
one entry per chain sums over the devices, and all values by unit are equal on all devices.
Weights and gradients are not sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from pathspace.errors import InputError, UnsupportedError

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor
    from typing_extensions import TypeIs

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


def sharded(tensor: Tensor) -> TypeIs[DTensor]:
    """Whether a tensor is sharded over several devices."""
    if type(tensor) in (Tensor, torch.nn.Parameter):
        return False
    # (this import takes half a second)
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)


def local(tensor: Tensor) -> Tensor:
    """The part of a tensor on this device: the tensor itself, or its shard (the same memory)."""
    if not sharded(tensor):
        return tensor
    with torch.no_grad():
        return tensor.to_local()


def local_gradient(parameter: Tensor) -> Tensor | None:
    """The gradient of the local part of a parameter, after pending sums over devices."""
    grad = parameter.grad
    if grad is None or not sharded(grad):
        return grad
    if sharded(parameter) and grad.placements != parameter.placements:
        grad = grad.redistribute(placements=parameter.placements)
    return local(grad)


def whole(tensor: Tensor) -> Tensor:
    """The whole tensor; shards are gathered from all devices."""
    return tensor.full_tensor() if sharded(tensor) else tensor


def version(tensor: Tensor) -> int:
    """Number of in-place changes of a tensor, as a whole or on this device."""
    return tensor._version + local(tensor)._version if sharded(tensor) else tensor._version


def refuse_shards(owner: str, tensors: Sequence[Tensor], why: str) -> None:
    """Refuse sharded tensors.

    Args:
        owner: name of the optimizer.
        tensors: the tensors.
        why: the end of the sentence: the reason, and what to do.

    Raises:
        UnsupportedError: a tensor is sharded.
    """
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
    """How the parameters of an optimizer are sharded.

    Args:
        owner: name of the optimizer.
        named: all its parameters, in the same order on all devices.

    Raises:
        UnsupportedError: they are sharded in a way that is not supported.
        InputError: the local part of a tensor does not match its mesh.
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
                    f"{owner} found parameter {name!r} cut over processes {list(one)} and another"
                    f" over {list(other)}, expected dimensions of one mesh; give all modules the"
                    " same mesh, or dimensions of it."
                )
    counted = tuple(
        all(one in cut or dist.get_rank(groups[one]) == 0 for one in found) for cut in cuts
    )
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
