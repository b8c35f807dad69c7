"""The spaces of features of a model: what writes and reads them, and their groups."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ..errors import InputError
from ..shown import Shown
from .blocks import SolvedDemands
from .coordinates import Array

if TYPE_CHECKING:
    from rich.table import Table

# group -> what a matrix of it is, and its dimension from the number of rows
GROUPS: dict[str, str] = {
    "GL": "any invertible matrix",
    "O": "any orthogonal matrix",
    "O1": "any orthogonal matrix that keeps the vector of ones",
    "complex": "any invertible matrix that is complex linear on pairs of features",
    "unitary": "any orthogonal matrix that is complex linear on pairs of features",
    "scales": "a factor for each feature",
    "rigid": "no matrix but the identity",
}


@dataclass(frozen=True, eq=False)
class FeatureSlice:
    """Positions along a dimension of a parameter that one space writes or reads.

    Attributes:
        parameter: name of the parameter.
        dim: the dimension.
        positions: shape ``(count, size)``, one row for each matrix.
        dual: whether it is multiplied by ``A^-T`` (as readers are), not by ``A``.
        reads: whether a weight reads the features there.
        coordinates: the coordinates there.
    """

    parameter: str
    dim: int
    positions: Tensor
    dual: bool
    reads: bool
    coordinates: Array


@dataclass(frozen=True, eq=False)
class Space(Shown):
    """Features that a matrix may mix: ``count`` blocks of ``size`` features each.

    Attributes:
        name: the parameter that writes them (or the first that has them).
        group: one of :data:`GROUPS`.
        size: rows of each matrix.
        count: number of matrices, independent of each other.
        slices: what writes and reads the features.
        gains: parameters that have to be folded into readers.
        reason: for a rigid space, why: operation, module, line.
    """

    name: str
    group: str
    size: int
    count: int
    slices: tuple[FeatureSlice, ...]
    gains: tuple[str, ...] = ()
    reason: str = ""
    partners: Array | None = field(default=None, repr=False)
    signs: Array | None = field(default=None, repr=False)
    classes: Array = field(default_factory=lambda: np.zeros(0, np.int64), repr=False)

    def to_dict(self) -> dict[str, Any]:
        """The facts by name, without positions."""
        told = ("name", "group", "size", "count", "dimension", "writers", "readers", "gains")
        return {name: getattr(self, name) for name in (*told, "reason")}

    @property
    def dimension(self) -> int:
        """Dimension of the group: how many numbers choose a matrix.

        ``n^2`` for GL(n), ``n (n - 1) / 2`` for O(n), ``(n - 1) (n - 2) / 2`` if ones are kept,
        ``n^2 / 2`` for complex matrices on ``n / 2`` pairs, ``n^2 / 4`` for unitary ones.
        """
        n = self.size
        each = {
            "GL": n * n,
            "O": n * (n - 1) // 2,
            "O1": (n - 1) * (n - 2) // 2,
            "complex": n * n // 2,
            "unitary": n * n // 4,
            "scales": 1,
        }.get(self.group, 0)
        return each * self.count

    @property
    def keeps_length(self) -> bool:
        """Whether all matrices of the group are orthogonal."""
        return self.group in ("O", "O1", "unitary")

    @property
    def writers(self) -> list[str]:
        """Parameters whose outputs are the features."""
        return list(dict.fromkeys(part.parameter for part in self.slices if not part.reads))

    @property
    def readers(self) -> list[str]:
        """Parameters that read the features."""
        return list(dict.fromkeys(part.parameter for part in self.slices if part.reads))

    @property
    def label(self) -> str:
        """The group with the size and number of matrices: ``GL(64) x 3``."""
        size = f"({self.size})" if self.group not in ("scales", "rigid") else ""
        times = f" x {self.count:,}" if self.count > 1 or not size else ""
        return f"{self.group}{size}{times}"

    def __repr__(self) -> str:
        return f"Space({self.name!r}, {self.label})"

    def __str__(self) -> str:
        return repr(self)


@dataclass(frozen=True, eq=False, repr=False)
class FeatureSpaces(Shown):
    """All spaces of a model.

    Attributes:
        spaces: those with a group first.
        solution: the demands of the network, solved.
        offsets: parameter -> position of its first scalar.
        sizes: parameter -> number of scalars.
        ties: name of a parameter -> the first of its names.
        shifts: gain -> the number that the model adds to it.
    """

    spaces: tuple[Space, ...]
    solution: SolvedDemands = field(repr=False)
    offsets: Mapping[str, int] = field(repr=False)
    sizes: Mapping[str, int] = field(repr=False)
    ties: Mapping[str, str] = field(repr=False)
    shifts: Mapping[str, float] = field(repr=False)

    @property
    def free(self) -> list[Space]:
        """The spaces that are not rigid."""
        return [space for space in self.spaces if space.group != "rigid"]

    @property
    def rigid(self) -> list[Space]:
        """The rigid spaces, with reasons."""
        return [space for space in self.spaces if space.group == "rigid"]

    @property
    def dimension(self) -> int:
        """Dimension of the group of all changes of basis."""
        return sum(space.dimension for space in self.spaces)

    def expect_own(self, owner: str, parameters: Mapping[str, Tensor]) -> None:
        """Refuse the parameters of another model."""
        for name in (*self.sizes, *parameters):
            first = self.ties.get(name, name)
            size = self.sizes.get(name, self.sizes.get(first, 0))
            own = parameters.get(name, parameters.get(first))
            if own is None or own.numel() != size:
                raise InputError(
                    f"{owner} found spaces with {size:,} scalars of the parameter {name!r}, and a"
                    f" model with {0 if own is None else own.numel():,}, expected the model of"
                    " these spaces; call ps.spaces on this model."
                )

    def gains_of(self, space: Space, name: str) -> Array:
        """Positions in a parameter of the gains that the basis of a space takes in."""
        at = self.solution.gains_of(space.classes) - self.offsets[name]
        return at[(at >= 0) & (at < self.sizes[name])]

    def factors(self, read: Callable[[str], Tensor]) -> Array:
        """How many times each coordinate is that of its basis, by the values of the gains.

        Raises:
            InputError: a gain is 0.
        """
        values = np.ones(len(self.solution.gains))
        for name, shift in self.shifts.items():
            at = self.solution.gains - self.offsets[name]
            own = (at >= 0) & (at < self.sizes[name])
            if own.any():
                flat = read(name).detach().to("cpu", torch.float64).reshape(-1).numpy()
                values[own] = flat[at[own]] + shift
                if (values[own] == 0).any():
                    raise InputError(
                        f"The change of basis found a gain of 0 in {name!r}, expected others,"
                        " because numbers are divided by it; remove the feature first"
                        " (ps.channels), or set the gain to a small number."
                    )
        return self.solution.factors(values)

    def __len__(self) -> int:
        return len(self.spaces)

    def __iter__(self) -> Iterator[Space]:
        return iter(self.spaces)

    def __getitem__(self, key: int | str) -> Space:
        if isinstance(key, int):
            return self.spaces[key]
        for space in self.spaces:
            if space.name == key:
                return space
        raise KeyError(key)

    def __repr__(self) -> str:
        return (
            f"FeatureSpaces({len(self.free)} free, {len(self.rigid)} rigid,"
            f" dimension {self.dimension:,})"
        )

    def __rich__(self) -> Table:
        """A row for all spaces whose names differ in the number of the layer alone."""
        from rich.table import Table

        table = Table(title=repr(self), title_justify="left")
        for column in ("space", "group", "times", "dimension", "gains to fold, or why it is rigid"):
            table.add_column(column, overflow="fold")
        alike: dict[tuple[str, str, str], list[Space]] = {}
        for space in self.spaces:
            told = space.reason.partition("; ")[0] or ", ".join(space.gains[:1])
            key = (_of_all_layers(space.name), space.label, _of_all_layers(told))
            alike.setdefault(key, []).append(space)
        for (name, label, told), group in alike.items():
            dimension = sum(space.dimension for space in group)
            more = len(group[0].gains) - 1
            told += f" and {more} more" if more > 0 else ""
            table.add_row(name, label, f"{len(group)}", f"{dimension:,}" if dimension else "", told)
        return table


def _of_all_layers(name: str) -> str:
    """A name with ``*`` for the number of a layer."""
    return re.sub(r"(?<=\.)\d+(?=\.)", "*", name)
