"""Elements of the groups of spaces: random ones, Hadamard rotations, and checks of given ones."""

from __future__ import annotations

import scipy.linalg
import torch
from torch import Tensor

from ..errors import InputError
from .space import GROUPS, Space

# largest departure of a given matrix from its group
TOLERANCE = 1e-6


def orthogonal(size: int, generator: torch.Generator) -> Tensor:
    """A random orthogonal matrix, uniformly distributed; float64."""
    normal = torch.randn(size, size, dtype=torch.float64, generator=generator)
    q, r = torch.linalg.qr(normal)
    signed: Tensor = q * r.diagonal().sign()
    return signed


def hadamard(size: int, generator: torch.Generator) -> Tensor:
    """A Hadamard matrix with random signs, over the largest power of 2 that divides the size.

    The rest ``m`` of the size is mixed by a random orthogonal matrix: ``H kron Q``, so that a
    vector with one entry is spread over all others.
    """
    power = size & -size
    matrix = torch.from_numpy(scipy.linalg.hadamard(power)).double() / power**0.5
    rest = size // power
    signs = torch.randint(0, 2, (size,), generator=generator).double() * 2 - 1
    return torch.kron(matrix, orthogonal(rest, generator).contiguous()) * signs


def random_element(space: Space, generator: torch.Generator) -> Tensor:
    """A random element of the group of a space, shape ``(count, size, size)``, float64."""
    return torch.stack([_random(space, generator) for _ in range(space.count)])


def _random(space: Space, generator: torch.Generator) -> Tensor:
    size = space.size
    if space.group == "scales":
        sign = torch.randint(0, 2, (1, 1), generator=generator).double() * 2 - 1
        return sign * torch.exp(0.5 * torch.randn(1, 1, dtype=torch.float64, generator=generator))
    if space.group in ("complex", "unitary"):
        return _complex(space, generator)
    first = orthogonal(size, generator)
    if space.group == "O1":
        # a rotation of what is orthogonal to the vector of ones
        basis, _ = torch.linalg.qr(
            torch.cat([torch.ones(size, 1, dtype=torch.float64), first[:, 1:]], 1)
        )
        inner = torch.block_diag(torch.ones(1, 1).double(), orthogonal(size - 1, generator))
        kept: Tensor = basis @ inner @ basis.T
        return kept
    if space.group == "GL":
        stretch = torch.exp(0.5 * torch.randn(size, dtype=torch.float64, generator=generator))
        return (first * stretch) @ orthogonal(size, generator)
    return first


def turn_of(space: Space) -> Tensor:
    """The turn ``P`` of the pairs of a complex space, ``P^2 = -1``; shape ``(size, size)``."""
    assert space.partners is not None and space.signs is not None
    turn = torch.zeros(space.size, space.size, dtype=torch.float64)
    turn[torch.arange(space.size), torch.from_numpy(space.partners)] = torch.from_numpy(
        space.signs
    ).double()
    return turn


def tangent(space: Space, matrix: Tensor) -> Tensor:
    """The nearest element of the Lie algebra of a group: what ``exp`` takes to the group."""
    if space.keeps_length:
        matrix = (matrix - matrix.mT) / 2
    if space.group == "O1":
        matrix = matrix - matrix.mean(-1, keepdim=True)
        matrix = matrix - matrix.mean(-2, keepdim=True)
    if space.group in ("complex", "unitary"):
        turn = turn_of(space)
        matrix = (matrix - turn @ matrix @ turn) / 2
    return matrix


def _complex(space: Space, generator: torch.Generator) -> Tensor:
    normal = torch.randn(space.size, space.size, dtype=torch.float64, generator=generator)
    scale = 2.0 if space.group == "unitary" else space.size**-0.5
    element: Tensor = torch.linalg.matrix_exp(tangent(space, normal * scale))
    return element


def checked(space: Space, given: Tensor) -> Tensor:
    """A given element as ``(count, size, size)`` in float64.

    Raises:
        InputError: the shape is wrong, or the matrix is not an element of the group.
    """
    count, size = space.count, space.size
    matrix = given.detach().to("cpu")
    if matrix.is_complex():
        matrix = _as_real(space, matrix)
    matrix = matrix.double()
    if size == 1 and matrix.shape in ((count,), (count, 1)):
        matrix = matrix.reshape(count, 1, 1)
    if matrix.shape == (size, size):
        matrix = matrix.expand(count, size, size)
    if matrix.shape != (count, size, size):
        raise InputError(
            f"rotate_ found a matrix of shape {tuple(given.shape)} for {space.name!r}, expected"
            f" {(count, size, size)}, or {(size, size)} for all of its {count} blocks."
        )
    if not _belongs(space, matrix):
        raise InputError(
            f"rotate_ found a matrix for {space.name!r} that is not in its group {space.group},"
            f" expected {GROUPS[space.group]}; see ps.spaces(model, x)[{space.name!r}]."
        )
    return matrix


def _as_real(space: Space, matrix: Tensor) -> Tensor:
    """Complex numbers, one for each pair of features, as real matrices."""
    if space.size != 2 or matrix.shape != (space.count,):
        raise InputError(
            f"rotate_ found complex numbers of shape {tuple(matrix.shape)} for {space.name!r},"
            f" expected one for each of {space.count} pairs of features."
        )
    one, turn = torch.eye(2, dtype=torch.float64), turn_of(space)
    real, imaginary = (part.double()[:, None, None] for part in (matrix.real, matrix.imag))
    return real * one + imaginary * turn


def _belongs(space: Space, matrix: Tensor) -> bool:
    one = torch.eye(space.size, dtype=torch.float64)

    def small(difference: Tensor) -> bool:
        return bool(difference.abs().max() <= TOLERANCE * max(1.0, float(matrix.abs().max())))

    if not bool(torch.isfinite(matrix).all()) or bool((torch.linalg.det(matrix) == 0).any()):
        return False
    if space.keeps_length and not small(matrix @ matrix.mT - one):
        return False
    if space.group == "O1" and not small(matrix.sum(-1) - 1):
        return False
    if space.group in ("complex", "unitary"):
        turn = turn_of(space)
        return small(matrix @ turn - turn @ matrix)
    return space.group != "rigid" or small(matrix - one)
