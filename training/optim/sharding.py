"""Where the weights are: whole on every device, or cut along dimension 0 by ``fully_shard``.

A step needs one thing from other devices: sums over all edges of a unit. Each device adds up the edges it holds, one
``all_reduce`` over a vector of one entry per chain adds the devices up, and everything that is kept by unit is then the
same everywhere. Weights and gradients never travel.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from pathspace import InputError, UnsupportedError

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor
    from typing_extensions import TypeIs


class Whole:
    """Every device holds all weights: nothing is cut, and sums are complete."""

    rank, world = 0, 1

    def rows(self, size: int) -> tuple[int, int]:
        """First row held of a tensor of ``size`` rows, and the one after the last."""
        return 0, size

    def sum(self, values: Tensor) -> Tensor:
        """The sum over all devices, in place."""
        return values


class RowShards(Whole):
    """Each device holds some consecutive rows of every tensor, as ``fully_shard`` cuts them; some may hold none.

    Args:
        group: the processes that share the weights.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank, self.world = dist.get_rank(group), dist.get_world_size(group)

    def rows(self, size: int) -> tuple[int, int]:
        """First row held of a tensor of ``size`` rows, and the one after the last."""
        chunk = -(-size // self.world)
        return min(self.rank * chunk, size), min((self.rank + 1) * chunk, size)

    def sum(self, values: Tensor) -> Tensor:
        """The sum over all devices, in place."""
        dist.all_reduce(values, group=self.group)
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


def find_shards(owner: str, named: Sequence[tuple[str | None, Tensor]]) -> Whole:
    """How the parameters of an optimizer are spread over devices.

    Args:
        owner: the class that is asking.
        named: all its parameters.

    Raises:
        UnsupportedError: they are cut in a way that is not supported.
        InputError: a shard does not hold the rows it should.
    """
    cut = [(name, p) for name, p in named if sharded(p)]
    if not cut:
        return Whole()
    if len(cut) < len(named):
        whole = next(name for name, p in named if not sharded(p))
        raise UnsupportedError(
            f"{owner} found parameter {whole!r} whole and {cut[0][0]!r} sharded over several devices, expected all "
            "of one kind; call fully_shard on the whole model."
        )
    from torch.distributed.tensor import Shard

    for name, parameter in cut:
        mesh, placements = parameter.device_mesh, parameter.placements
        if mesh.ndim != 1 or len(placements) != 1 or type(placements[0]) is not Shard or placements[0].dim != 0:
            raise UnsupportedError(
                f"{owner} found parameter {name!r} placed as {placements} on a mesh of {mesh.ndim} dimensions, "
                "expected shards of dimension 0 on a mesh of one dimension, as fully_shard makes them."
            )
        if mesh != cut[0][1].device_mesh:
            raise UnsupportedError(
                f"{owner} found parameters {cut[0][0]!r} and {name!r} sharded over different devices, expected one "
                "mesh; give fully_shard the same mesh for all modules."
            )
    shards = RowShards(cut[0][1].device_mesh.get_group())
    for name, parameter in cut:
        first, after = shards.rows(parameter.shape[0])
        held = local(parameter).shape[0]
        if held != after - first:
            raise InputError(
                f"{owner} found {held} rows of parameter {name!r} on device {shards.rank}, expected {after - first}; "
                "build the optimizer after fully_shard, from model.named_parameters()."
            )
    return shards
