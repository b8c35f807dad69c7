"""Spaces of features: whether random elements of their groups leave the outputs unchanged.

A matrix ``A`` of the group of a space acts on positions along dimensions of parameters: by ``A`` on
those that write the features, by ``A^-T`` on those that read them (``dual``), after gains moved
there and became 1. Random elements of all spaces act at once: where one group changes outputs, so
do almost all products of elements. A document that claims too large a group, forgets a reader or a
gain, or takes the wrong matrix is rejected. Dimensions are counted again; they are added, so no
position of a tensor may belong to two spaces.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .bench import Runner, could_change, relative_change
from .document import Rejected, integers, require

# group -> its dimension for matrices of n rows
DIMENSIONS: dict[str, Callable[[int], int]] = {
    "GL": lambda n: n * n,
    "O": lambda n: n * (n - 1) // 2,
    "O1": lambda n: (n - 1) * (n - 2) // 2,
    "complex": lambda n: n * n // 2,
    "unitary": lambda n: n * n // 4,
    "scales": lambda n: n,
}
# draws of weights and inputs, each with other elements
DRAWS = 4
# changes of the outputs up to so many times the precision of their coarsest type count as rounding
ROUNDING, LOOSEST = 1e3, 0.1


@dataclass(frozen=True)
class MovedGain:
    """A power of gains by which the scalars of a slice are multiplied; position -1: by none."""

    parameter: str
    power: int
    positions: np.ndarray


@dataclass(frozen=True)
class BasisSlice:
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
    require(
        set(section) == {"dimension", "ties", "free", "rigid"}, "the list of spaces is malformed"
    )
    named = [*section["ties"], *(line["name"] for line in section["rigid"])]
    require(all(isinstance(name, str) for name in named), "a name is not a text")
    found = [_read_space(line) for line in section["free"]]
    total = sum(space.dimension for space in found)
    require(
        section["dimension"] == total, f"the spaces have the dimension {total:,}, not as stated"
    )
    return found, section["ties"]


def _read_space(line: Mapping[str, Any]) -> FreeSpace:
    name, group, size, count = (line[key] for key in ("name", "group", "size", "count"))
    require(group in DIMENSIONS, f"the group {group!r} of the space {name} is not known")
    require(
        type(size) is type(count) is int and min(size, count) >= 1 and line["slices"],
        f"the space {name} is empty",
    )
    shifts = {gain["parameter"]: float(gain["shift"]) for gain in line["gains"]}
    slices = tuple(_read_slice(part, (count, size), name, shifts) for part in line["slices"])
    turn = None
    if group in ("complex", "unitary"):
        partners, signs = (
            integers(line[key], f"the turn of {name}") for key in ("partners", "signs")
        )
        rows = np.arange(size)
        turns = np.array_equal(np.sort(partners), rows) and len(signs) == size
        require(
            turns and (partners[partners] == rows).all() and (signs * signs[partners] == -1).all(),
            f"the turn of the space {name} is not by pairs",
        )
        turn = partners, signs
    require(group != "scales" or size == 1, f"the scales of {name} are not one for each feature")
    space = FreeSpace(str(name), group, size, count, slices, shifts, turn)
    stated = line["dimension"]
    require(
        stated == space.dimension and type(stated) is int,
        f"the space {name} has the dimension {space.dimension:,}, not as stated",
    )
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
    require(
        type(part["dim"]) is int and part["dim"] >= 0 and type(part["dual"]) is bool,
        f"a slice of the space {name} is malformed",
    )
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


def rotate_copy(
    spaces: Sequence[FreeSpace],
    ties: Sequence[str],
    model: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    tolerance: float,
) -> str:
    """Check that random elements of all groups do not change the outputs of a copy, at the model's
    own weights and inputs and at others; why no change could be visible, or ``""``.
    """
    bench = _Bases(spaces, ties, model, args, kwargs)
    before, eps = bench.begin(), bench.coarsest_eps()
    limit = max(tolerance, min(ROUNDING * eps, LOOSEST))
    compared = could_change(before) and bench.compare(before, limit, eps)
    for number in range(1, DRAWS + 1):
        drawn = bench.draw(number, "unit")
        if drawn is not None:
            compared = bench.compare(drawn, limit, eps) or compared
    return "" if compared else "all outputs are 0, or rounding errors"


class _Bases(Runner):
    """A copy of a model whose ties are cut, and the spaces of a document."""

    def __init__(
        self,
        spaces: Sequence[FreeSpace],
        ties: Sequence[str],
        model: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> None:
        import torch

        super().__init__(model, args, kwargs)
        self.spaces = spaces
        for name in ties:
            path, _, key = name.rpartition(".")
            own = dict(self.model.named_parameters(remove_duplicate=False))
            require(name in own, f"the model has no parameter {name}")
            twin = torch.nn.Parameter(own[name].detach().clone(), own[name].requires_grad)
            self.model.get_submodule(path)._parameters[key] = twin
        self.named = dict(self.model.named_parameters(remove_duplicate=False))
        check_places(spaces, self.named, ())

    def coarsest_eps(self) -> float:
        """The ``eps`` of the coarsest type of numbers that the model computes with."""
        import torch
        from torch.utils._python_dispatch import TorchDispatchMode

        types = {torch.float64}

        class Recorder(TorchDispatchMode):
            supports_higher_order_operators = True

            def __torch_dispatch__(self, func, _types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
                result = func(*args, **(kwargs or {}))
                if getattr(result, "dtype", torch.int64).is_floating_point:
                    types.add(result.dtype)
                return result

        with Recorder():  # type: ignore[no-untyped-call]
            self.run()
        return max(torch.finfo(kind).eps for kind in types)

    def compare(self, before: Any, tolerance: float, eps: float) -> bool:
        """Let random elements of all groups act: whether the outputs do not change.

        Nothing can be said where a gain is 0, or the last digits of weights change as much.
        """
        import torch

        of_slices = (
            (space, gain) for space in self.spaces for p in space.slices for gain in p.gains
        )
        divisors = (self._gains(space, gain) for space, gain in of_slices if gain.power < 0)
        if any(bool((gains == 0).any()) for gains in divisors):
            return False
        drawn = [self._element(space) for space in self.spaces]
        if self._gap(before, drawn) <= tolerance:
            return True
        if relative_change(before, self.rounded_otherwise(eps)) > tolerance:
            return False
        # the one to blame
        still = [torch.eye(space.size).double()[None] for space in self.spaces]
        alone = [[*still[:k], each, *still[k + 1 :]] for k, each in enumerate(drawn)]
        gaps = [self._gap(before, elements) for elements in alone]
        space, gap = max(zip(self.spaces, gaps, strict=True), key=lambda pair: pair[1])
        raise Rejected(
            f"random elements of {space.group}({space.size}) on the space {space.name} change the"
            f" model's outputs by {gap:.1e}"
        )

    def _element(self, space: FreeSpace) -> Any:
        """A random matrix for each block: orthogonal, and more for groups without a length."""
        import torch

        n, count = space.size, space.count
        x = torch.randn(count, n, n, generator=self.generator, dtype=torch.float64)
        if space.turn is not None:
            turn = torch.zeros(n, n, dtype=torch.float64)
            partners, signs = map(torch.from_numpy, space.turn)
            turn[torch.arange(n), partners] = signs.double()
            x = x - turn @ x @ turn
        if space.group == "O1":
            ones = torch.full((n, n), 1 / n, dtype=torch.float64)
            centre = torch.eye(n, dtype=torch.float64) - ones
            x = centre @ x @ centre + ones
        left, sizes, right = torch.linalg.svd(x)
        element = left @ right
        if space.group in ("GL", "complex", "scales"):
            size = torch.randn(count, 1, 1, generator=self.generator, dtype=torch.float64)
            element = (size / 2).exp() * (element + 0.5 * x / sizes[:, :1, None])
        return element

    def _doubles(self, name: str) -> Any:
        import torch

        return self.named[name].detach().to("cpu", torch.float64, copy=True).contiguous()

    def _gains(self, space: FreeSpace, gain: MovedGain) -> Any:
        """What a gain is in the model's sum, for every position of a slice; 1 for none."""
        import torch

        where = torch.from_numpy(gain.positions)
        gains = self._doubles(gain.parameter).reshape(-1) + space.shifts[gain.parameter]
        return torch.where(where < 0, 1.0, gains[where])

    def _changed(self, elements: Sequence[Any]) -> dict[str, Any]:
        """All parameters that elements change, one for each space."""
        import torch

        new: dict[str, Any] = {}
        for space, matrix in zip(self.spaces, elements, strict=True):
            dual = torch.linalg.inv(matrix).mT
            for part in space.slices:
                for name in (part.parameter, *(gain.parameter for gain in part.gains)):
                    if name not in new:
                        new[name] = self._doubles(name)
                rows = new[part.parameter].movedim(part.dim, 0)
                at = torch.from_numpy(part.positions.reshape(-1))
                values = rows[at].reshape(*part.positions.shape, -1)
                for gain in part.gains:
                    values = values * self._gains(space, gain)[..., None] ** gain.power
                    used = torch.from_numpy(gain.positions[gain.positions >= 0])
                    new[gain.parameter].view(-1)[used] = 1.0 - space.shifts[gain.parameter]
                rows[at] = ((dual if part.dual else matrix) @ values).reshape(rows[at].shape)
        return new

    def _gap(self, before: Any, elements: Sequence[Any]) -> float:
        """How much elements change the outputs; they are undone."""
        new = self._changed(elements)
        kept = {name: self.named[name].detach().clone() for name in new}
        for values in (new, kept):
            for name, value in values.items():
                self.named[name].data.copy_(value)
            if values is new:
                gap = relative_change(before, self.run())
        return gap
