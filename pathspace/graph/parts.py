"""Parts of a reduction graph: what fixes scales, edges of a tensor, running
statistics, slices of tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from scipy.sparse import csr_array, eye_array, vstack
from torch import Tensor

from ..models.values import require_values
from ..shown import Shown


@dataclass(frozen=True)
class Pin(Shown):
    """An operation that fixes scales.

    Attributes:
        op: name of the operation.
        module: path of the module that runs it ("" for the model itself).
        source: file and line, if known.
        reason: one sentence.
        elements: number of distinct activations whose scale it fixes.
        parameters: parameters that it uses, which are therefore outside path space.
    """

    op: str
    module: str
    source: str
    reason: str
    elements: int
    parameters: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class WeightBlock(Shown):
    """The edges of one parameter tensor: scalar ``w[i]`` is an edge ``tail[i] -> head[i]``.

    Attributes:
        name: name of the parameter (the first, if it has several).
        shape: shape of the parameter.
        tail: ids of the units that the edges leave, ``int64``; each size is 1 or that of the
            parameter; 0 is the root; ``-k`` is unit ``k`` with the opposite scale.
        head: ids of the units that the edges enter, in the same layout.
        unused: mask of the scalars that are on no path (rows of a table that are not read, taps
            that read only padding), or ``None``.
        aliases: further names of the same parameter.
        shift: the constant that the model adds to the parameter in every use: the
            edges are ``w + shift``.
    """

    name: str
    shape: tuple[int, ...]
    tail: Tensor
    head: Tensor
    unused: Tensor | None = None
    aliases: tuple[str, ...] = ()
    shift: float = 0.0

    def values(self, parameter: Tensor) -> Tensor:
        """The values of the edges: the parameter plus ``shift``."""
        require_values("a computation with weights", [(self.name, parameter)])
        value = parameter.detach()
        return value + self.shift if self.shift else value

    @property
    def numel(self) -> int:
        """Number of scalars of the tensor."""
        return int(np.prod(self.shape, dtype=np.int64))

    @cached_property
    def num_edges(self) -> int:
        """Number of scalars that are edges."""
        return self.numel - (
            0 if self.unused is None else int(self.unused.expand(self.shape).sum())
        )

    @property
    def used(self) -> slice | np.ndarray:
        """Index of the edges among all scalars of the tensor in C order."""
        if self.unused is None:
            return slice(None)
        return ~self.unused.expand(self.shape).reshape(-1).numpy()

    @property
    def places(self) -> np.ndarray:
        """Positions of the edges among all scalars of the tensor in C order."""
        return np.arange(self.numel)[self.used]

    def ends_at(self, flat: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Ids of the tails and of the heads of scalars at flat positions in C order."""
        index = np.unravel_index(flat, self.shape) if self.shape else ()
        tail, head = (
            np.broadcast_to(np.broadcast_to(ids.numpy(), self.shape)[index], np.shape(flat))
            for ids in (self.tail, self.head)
        )
        return tail, head


def idle(block: WeightBlock) -> Tensor:
    """The mask of the scalars on no path, also where there are none, laid out as the ends."""
    none = block.tail.new_zeros([1] * len(block.shape), dtype=torch.bool)
    return none if block.unused is None else block.unused


@dataclass(frozen=True, eq=False)
class Statistic:
    """Running statistics of a normalisation: ``mean`` scales with its channel, ``var + eps``
    with the channel's square. ``units`` are ids of the channels.
    """

    mean: str | None
    var: str | None
    units: Tensor
    eps: float = 0.0

    @property
    def powers(self) -> dict[str, int]:
        """Name of each buffer that there is -> the power of the channel's scale in it."""
        pairs = ((self.mean, 1), (self.var, 2))
        return {name: power for name, power in pairs if name is not None}

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the buffers that there are."""
        return tuple(self.powers)


@dataclass(frozen=True, eq=False)
class Slice:
    """Scalars of one tensor that are multiplied by the same power of a unit's scale.

    Attributes:
        name: name of a parameter or a buffer.
        index: index of the scalars in the tensor.
        power: the scalars are multiplied by ``exp(power * phi)``.
    """

    name: str
    index: tuple[slice | Tensor, ...]
    power: int


def owner(name: str) -> str:
    """Path of the module of a parameter; for parametrised weights, of the module that uses them."""
    path = f".{name}".rpartition(".")[0]
    return path.partition(".parametrizations.")[0].removeprefix(".")


def sums_of(forms: csr_array) -> csr_array:
    """Log-scales of root, units and derived ids as sums of those of root and units."""
    derived, count = forms.shape[0], forms.shape[1] + 1
    wide = csr_array((forms.data, forms.indices + 1, forms.indptr), shape=(derived, count))
    return csr_array(vstack([eye_array(count, dtype=np.int64, format="csr"), wide]))


def signed_rows(matrix: csr_array, ids: np.ndarray) -> csr_array:
    """Rows of a matrix by signed ids: of log-scales as sums, those of the ids."""
    return csr_array(matrix[np.abs(ids)].multiply(np.sign(ids)[:, None]))
