"""An upper bound on the dimension of all changes of basis, by infinitesimal generators.

For each space of ``n`` features let ``X`` be any ``n x n`` matrix: writers move by ``X w``, readers
by ``-w X``. It is a symmetry if ``<grad_w <u, f>, dw(X)> = 0`` for all weights, inputs and
cotangents ``u``. Each sample is one equation for the entries of all ``X`` together, so that

    ``dimension <= number of entries - rank of the samples``

for any sample: more can only increase the rank. Spaces that the reading calls rigid are asked, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import InputError
from ..models.nested import real_leaves
from ..models.running import cast
from ..models.stand_in import stand_in
from ..rotations.rotate import rotate_
from ..rotations.space import FeatureSpaces
from ..shown import Shown
from .bench import Inputs, in_double, other_inputs, redrawn

# largest number of unknown entries: one singular value decomposition
MOST_ENTRIES = 6_000
# samples beyond the number of entries; samples in a row with equal weights and inputs
MARGIN, EACH = 16, 4
# singular values below this, relative to the largest, count as zero: errors make the bound
# larger, never smaller
SMALLEST = 1e-9


@dataclass(frozen=True)
class SpacesBound(Shown):
    """The result of the test.

    Attributes:
        found: dimension of the groups that were found.
        at_most: largest possible dimension.
        entries: number of unknown entries of all matrices.
        samples: number of equations.
    """

    found: int
    at_most: int
    entries: int
    samples: int

    @property
    def closed(self) -> bool:
        """Whether both agree: nothing was missed among these matrices."""
        return self.found == self.at_most


def spaces_bound(
    model: nn.Module,
    found: FeatureSpaces,
    *args: Any,
    kwargs: Mapping[str, Any] | None = None,
    seed: int = 0,
) -> SpacesBound:
    """Bound the dimension of the changes of basis of a small model from above.

    Args:
        model: the model, with weights; it is measured on a copy in float64 with folded gains.
        found: from :func:`pathspace.spaces`.
        *args: example inputs, positional; further ones are drawn like them.
        kwargs: example inputs by keyword.
        seed: of inputs and cotangents.

    Returns:
        The bound: it holds for matrices within the spaces that were found, rigid ones included.

    Raises:
        InputError: the spaces are too large for one singular value decomposition.

    Example:
        >>> import torch, pathspace as ps
        >>> from pathspace.evidence.spaces_bound import spaces_bound
        >>> model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
        >>> x = torch.randn(16, 3)
        >>> spaces_bound(model, ps.spaces(model, x), x).at_most
        16
    """
    entries = sum((space.count * space.size) ** 2 for space in found)
    if entries > MOST_ENTRIES:
        raise InputError(
            f"spaces_bound found {entries:,} entries of matrices, expected at most"
            f" {MOST_ENTRIES:,}; bound a smaller model of the same kind."
        )
    bench = in_double(stand_in(model, share_tensors=False)).eval()
    folded = {space.name: torch.eye(space.size).double() for space in found.free}
    rotate_(bench, found, folded)
    inputs: Inputs = cast((args, dict(kwargs or {})), torch.float64)
    rows, gains = [], {name for space in found for name in space.gains}
    for number in range(entries + MARGIN):
        if number and number % EACH == 0:
            inputs = other_inputs(inputs, seed + number, near=False) or inputs
            # other weights, but for gains that were folded
            fresh = redrawn(bench, seed + number, unit=True)
            for name, parameter in bench.named_parameters():
                if name in fresh and name not in gains:
                    parameter.data.copy_(fresh[name])
        rows.append(_equation(bench, found, inputs, seed + number))
    values = torch.linalg.svdvals(torch.stack(rows))
    rank = int((values > SMALLEST * values[0]).sum()) if len(values) else 0
    return SpacesBound(found.dimension, entries - rank, entries, len(rows))


def _equation(model: nn.Module, found: FeatureSpaces, inputs: Inputs, seed: int) -> Tensor:
    """Derivatives of a random combination of the outputs by all entries of all matrices."""
    joined = torch.cat([leaf.reshape(-1) for leaf in real_leaves(model(*inputs[0], **inputs[1]))])
    generator = torch.Generator().manual_seed(seed)
    total = joined @ torch.randn(len(joined), generator=generator, dtype=joined.dtype)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    gradients = torch.autograd.grad(total, list(parameters.values()), materialize_grads=True)
    by_name, entries = dict(zip(parameters, gradients, strict=True)), []
    for space in found:
        count = space.count * space.size
        change = torch.zeros(count, count, dtype=torch.float64)
        for part in space.slices:
            at = part.positions.reshape(-1)
            moved, own = (
                tensor.detach().movedim(part.dim, 0)[at].reshape(count, -1).double()
                for tensor in (by_name[part.parameter], parameters[part.parameter])
            )
            change += -own @ moved.T if part.dual else moved @ own.T
        entries.append(change.reshape(-1))
    return torch.cat(entries)
