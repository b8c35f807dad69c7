"""Spaces of features, as a document states them.

Dimensions are counted again; they are added, so no position of a tensor may belong to two spaces.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from .document import integers, require

# group -> its dimension for matrices of n rows
DIMENSIONS: dict[str, Callable[[int], int]] = {
    "GL": lambda n: n * n,
    "O": lambda n: n * (n - 1) // 2,
    "O1": lambda n: (n - 1) * (n - 2) // 2,
    "complex": lambda n: n * n // 2,
    "unitary": lambda n: n * n // 4,
    "scales": lambda n: n,
}


class MovedGain(NamedTuple):
    """A power of gains by which the scalars of a slice are multiplied; position -1: by none."""

    parameter: str
    power: int
    positions: np.ndarray


class BasisSlice(NamedTuple):
    """Positions ``(count, size)`` along a dimension on which ``A``, or ``A^-T``, acts."""

    parameter: str
    dim: int
    dual: bool
    positions: np.ndarray
    gains: tuple[MovedGain, ...]


@dataclass(frozen=True)
class FreeSpace:
    """A space as a document states it; ``turn`` has the partner and the sign of every row."""

    name: str
    group: str
    size: int
    count: int
    slices: tuple[BasisSlice, ...]
    shifts: Mapping[str, float]
    turn: tuple[np.ndarray, np.ndarray] | None

    @property
    def dimension(self) -> int:
        """Dimension of the group."""
        return self.count * DIMENSIONS[self.group](self.size)


def read_spaces(document: Mapping[str, Any]) -> tuple[list[FreeSpace], list[str]]:
    """The spaces of a document, and the names of tensors whose ties are cut."""
    if "spaces" not in document:
        return [], []
    section = document["spaces"]
    whole = set(section) == {"dimension", "ties", "free", "rigid"}
    require(whole, "the list of spaces is malformed")
    named = [*section["ties"], *(line["name"] for line in section["rigid"])]
    require(all(isinstance(name, str) for name in named), "a name is not a text")
    found = [_read_space(line) for line in section["free"]]
    total = sum(space.dimension for space in found)
    told = f"the spaces have the dimension {total:,}, not as stated"
    require(section["dimension"] == total, told)
    return found, section["ties"]


def _read_space(line: Mapping[str, Any]) -> FreeSpace:
    name, group, size, count = (line[key] for key in ("name", "group", "size", "count"))
    require(group in DIMENSIONS, f"the group {group!r} of the space {name} is not known")
    some = type(size) is type(count) is int and min(size, count) >= 1 and line["slices"]
    require(some, f"the space {name} is empty")
    shifts = {gain["parameter"]: float(gain["shift"]) for gain in line["gains"]}
    slices = tuple(_read_slice(part, (count, size), name, shifts) for part in line["slices"])
    turn = None
    if group in ("complex", "unitary"):
        partners, signs = (
            integers(line[key], f"the turn of {name}") for key in ("partners", "signs")
        )
        rows = np.arange(size)
        turns = np.array_equal(np.sort(partners), rows) and len(signs) == size
        pairs = turns and np.array_equal(partners[partners], rows)
        opposite = pairs and (signs * signs[partners] == -1).all()
        require(opposite, f"the turn of the space {name} is not by pairs")
        turn = partners, signs
    require(group != "scales" or size == 1, f"the scales of {name} are not one for each feature")
    space = FreeSpace(str(name), group, size, count, slices, shifts, turn)
    stated, told = line["dimension"], f"the space {name} has the dimension {space.dimension:,}"
    require(stated == space.dimension and type(stated) is int, f"{told}, not as stated")
    return space


def _read_slice(
    part: Mapping[str, Any], shape: tuple[int, int], name: str, shifts: Mapping[str, float]
) -> BasisSlice:
    total = shape[0] * shape[1]

    def positions(line: Mapping[str, Any], least: int) -> np.ndarray:
        at = integers(line["positions"], f"the positions of {name}", total)
        require(len(at) == total, f"the space {name} has {len(at):,} positions, not {total:,}")
        require(at.min() >= least, f"the space {name} has a position that does not exist")
        return at.reshape(shape)

    gains = []
    for line in part["gains"]:
        gain, power = line["parameter"], line["power"]
        require(gain in shifts and type(power) is int, f"a gain of the space {name} is not known")
        gains.append(MovedGain(gain, power, positions(line, -1)))
    whole = type(part["dim"]) is int and part["dim"] >= 0 and type(part["dual"]) is bool
    require(whole, f"a slice of the space {name} is malformed")
    at = positions(part, 0)
    return BasisSlice(str(part["parameter"]), part["dim"], part["dual"], at, tuple(gains))


def check_places(
    spaces: Sequence[FreeSpace], tensors: Mapping[str, Any], ties: Sequence[str]
) -> None:
    """Check that all positions exist, and that none is taken twice, under whichever names: by two
    spaces, or by one that acts on gains which become 1. Names of ``ties`` stand for tensors of
    their own.
    """
    taken: dict[tuple[int | str, int], list[np.ndarray]] = {}
    folded: set[int | str] = set()

    def tensor(name: str, positions: np.ndarray, dim: int | None) -> int | str:
        require(name in tensors, f"the model has no parameter {name}")
        shape = tuple(tensors[name].shape)
        sizes = (math.prod(shape),) if dim is None else shape[dim : dim + 1]
        inside = sizes and positions.max() < sizes[0]
        require(inside, f"the space {space.name} leaves the parameter {name}")
        return name if name in ties else id(tensors[name])

    for space in spaces:
        for part in space.slices:
            place = tensor(part.parameter, part.positions, part.dim), part.dim
            taken.setdefault(place, []).append(part.positions.reshape(-1))
            folded |= {tensor(gain.parameter, gain.positions, None) for gain in part.gains}
    for (one, _), positions in taken.items():
        at = np.concatenate(positions)
        name = next(name for name in tensors if one in (name, id(tensors[name])))
        require(len(np.unique(at)) == len(at), f"two spaces have positions of {name} in common")
        require(one not in folded, f"a space has the gains {name}, which become 1")
