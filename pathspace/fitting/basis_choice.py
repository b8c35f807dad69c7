"""Choose a basis of the features of a model in which rounding costs least, by descent."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import InputError
from ..models.copies import safe_deepcopy
from ..models.isolation import quiet
from ..rotations.elements import tangent
from ..rotations.rotate import matrices, rotate_
from ..rotations.space import FeatureSlice, FeatureSpaces, Space
from ..shown import Shown
from .calibration import HOLD, Batch, Calibrated, cotangent, is_safely_less
from .objectives import Noise
from .quantise import check_format, decibels, quantised, quantised_weights, weight_axes
from .weight_inputs import WeightInputs

STEPS = 100
# how far the first step turns the features of each matrix (radians), and how much of the direction
# and of its mean square is kept
STEP, MOMENTUM = 0.015, 0.9
# powers whose means stand for largest entries, at the first and the last step
SHARPNESS = (8.0, 16.0)
# inputs kept of each weight, rows kept of one that nothing mixes, and numbers looked at in a step
INPUTS, ROWS, NUMBERS = 128, 128, 4_000_000


@dataclass(frozen=True, eq=False)
class ChosenBasis(Shown, Mapping[str, Tensor]):
    """The elements of a change of basis, for :func:`pathspace.rotate_`; none if none is better.

    Attributes:
        elements: name of a space -> its matrices, ``(count, size, size)``.
        objective: what was to be small.
        before: signal over noise of the outputs as trained, in decibels, on held-out batches.
        after: the same in the chosen basis.
        hadamard: the same with Hadamard matrices.
        helped: whether the basis is changed.
        held_out: how many batches the choice was judged on that it had not seen.
    """

    elements: Mapping[str, Tensor] = field(repr=False)
    objective: str
    before: float
    after: float
    hadamard: float
    helped: bool
    held_out: int

    def __getitem__(self, name: str) -> Tensor:
        return self.elements[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.elements)

    def __len__(self) -> int:
        return len(self.elements)

    def __str__(self) -> str:
        if not self.helped:
            return (
                f"{self.objective}: {self.before:.1f} dB as trained; no basis is safely better, the"
                " model stays as it is"
            )
        return (
            f"{self.objective}: {self.before:.1f} dB as trained, {self.hadamard:.1f} dB with"
            f" Hadamard matrices, {self.after:.1f} dB in the chosen basis"
        )


def choose_basis(
    model: nn.Module, spaces: FeatureSpaces, noise: Noise, calibration: Any, steps: int | None
) -> ChosenBasis:
    """The change of basis after which rounding costs least: Hadamard matrices or what a descent
    from them finds, if the model is then safely better on batches that were held out.
    """
    if noise.bits is None and noise.activations is None:
        raise InputError(
            "Noise found bits=None and activations=None, expected a number of bits for one of them"
            " at least."
        )
    for bits in (noise.bits, noise.activations):
        if bits is not None:
            check_format(bits, noise.per)
    batches = [] if calibration is None else Calibrated(model, calibration).batches
    if len(batches) < 2:
        raise InputError(
            f"choose_gauge found too few calibration batches ({len(batches)}), expected two at"
            " least, because every third is held out to judge what is chosen; pass calibration=."
        )
    held, fit = (
        Calibrated(model, [b for number, b in enumerate(batches) if (number % HOLD == 1) == kept])
        for kept in (True, False)
    )
    first = matrices(spaces, "hadamard")
    chosen = BasisDescent(model, spaces, noise, fit.batches, first).minimum(
        STEPS if steps is None else steps
    )

    def costs(elements: Mapping[str, Tensor], on: Calibrated) -> Tensor:
        turned = Calibrated(rotate_(safe_deepcopy(model), spaces, elements), on.batches)
        # (a rotation rounds, too)
        turned.reference = on.reference
        return turned.noise(*_rounding(turned.model, noise))

    seen: dict[str, Mapping[str, Tensor]] = {"hadamard": first, "chosen": chosen}
    best = min(seen.values(), key=lambda elements: float(costs(elements, fit).mean()))
    before, after = (costs(elements, held) for elements in ({}, best))
    other = after if best is first else costs(first, held)
    helped = is_safely_less(after, before)
    return ChosenBasis(
        best if helped else {},
        str(noise),
        decibels(float(before.mean())),
        decibels(float((after if helped else before).mean())),
        decibels(float(other.mean())),
        helped,
        len(held.batches),
    )


def _rounding(model: nn.Module, noise: Noise) -> tuple[dict[str, Tensor], Any]:
    """The rounded weights of a model, and a context in which inputs of weights are rounded."""
    own = {name: parameter.detach() for name, parameter in model.named_parameters()}
    weights, around = {}, None
    if noise.bits is not None:
        weights = quantised_weights(own, weight_axes(model), noise.bits, noise.per)
    if noise.activations is not None:
        bits = noise.activations

        def rounded(_name: str, _dim: int, given: Tensor) -> Tensor:
            rows = given.reshape(-1, given.shape[-1])
            return quantised(rows, bits, 0).reshape(given.shape)

        around = partial(WeightInputs, look=rounded)
    return weights, around


# name of a space -> its matrices ``A``, and ``A^-T``
Current = Mapping[str, tuple[Tensor, Tensor]]


@dataclass(frozen=True, eq=False)
class Mixing:
    """Positions along a dimension of some values that a space mixes, by ``A`` or by its dual."""

    space: Space
    dim: int
    positions: Tensor
    dual: bool

    def __call__(self, values: Tensor, current: Current, derivatives: bool = False) -> Tensor:
        """The values, or the derivatives by them, in the current basis."""
        count, size = self.positions.shape
        rows, at = values.movedim(self.dim, 0), self.positions.reshape(-1)
        block = current[self.space.name][self.dual != derivatives] @ rows[at].reshape(
            count, size, -1
        )
        new = rows.index_copy(0, at, block.reshape(len(at), *rows.shape[1:]))
        return new.movedim(0, self.dim)


@dataclass(eq=False)
class RoundedValues:
    """Numbers that are rounded (or those among which the largest is) and the derivatives of the
    outputs by them, with one step for each group: all, or each place along an axis.
    """

    values: Tensor
    slopes: Tensor
    mixings: list[Mixing]
    axis: int | None

    def cost(self, current: Current, sharpness: float) -> Tensor:
        """``sum over groups of max |values|^2 |slopes|^2``, with a mean of powers for ``max``."""
        values, slopes = self.values, self.slopes
        for mixed in self.mixings:
            values = mixed(values, current)
            # (their length stays, unless several groups are mixed)
            if not mixed.space.keeps_length or mixed.dim == self.axis:
                slopes = mixed(slopes, current, derivatives=True)
        axis = 0 if self.axis is None else self.axis
        rows, own = (t.movedim(axis, 0).flatten(1) for t in (values, slopes))
        if self.axis is None:
            rows, own = rows.reshape(1, -1), own.reshape(1, -1)
        return (largest(rows, sharpness).square() * own.square().sum(1)).sum()


def largest(rows: Tensor, sharpness: float) -> Tensor:
    """``(sum |x|^p)^(1/p)`` of each row: between its largest entry and a multiple of it."""
    size = rows.abs()
    top = size.detach().amax(1, keepdim=True).clamp_min(1e-30)
    return top[:, 0] * (size / top).pow(sharpness).sum(1).pow(1 / sharpness)


class BasisDescent:
    """Descent of the noise of rounded weights and inputs over all changes of basis.

    ``sum over weights of step_W^2 |B^-T G A^T|^2 + sum over inputs x of step_x^2 |A^-T h|^2`` with
    derivatives ``G`` and ``h`` of the outputs by a weight ``W' = B W A^-1`` and its input
    ``x' = A x``, and steps in proportion to the largest entries of ``W'`` and ``x'``. The gradient
    by every matrix is projected to the Lie algebra of its group. It begins with the elements
    ``first``, and does not change the model.
    """

    def __init__(
        self,
        model: nn.Module,
        spaces: FeatureSpaces,
        noise: Noise,
        batches: Sequence[Batch],
        first: Mapping[str, Tensor],
    ) -> None:
        self._free = {space.name: space for space in spaces.free}
        still = {
            name: torch.eye(space.size).double().expand(space.count, -1, -1)
            for name, space in self._free.items()
        }
        self._matrices = {name: first.get(name, one).double() for name, one in still.items()}
        self._random = torch.Generator().manual_seed(0)
        self._parts: dict[str, list[tuple[Space, FeatureSlice]]] = {}
        for space in spaces.free:
            for part in space.slices:
                self._parts.setdefault(part.parameter, []).append((space, part))
        folded = rotate_(safe_deepcopy(model), spaces, still)
        self._calibrated, self._noise = Calibrated(folded, batches), noise
        slopes, inputs = self._measured()
        self._weights = [
            self._weight(name, axis, slopes[name])
            for name, axis in weight_axes(folded).items()
            if noise.bits is not None and name in self._parts
        ]
        every = (
            self._input(*key, *map(torch.cat, zip(*found, strict=True)))
            for key, found in inputs.items()
        )
        self._inputs = [rounded for rounded in every if rounded.mixings]

    def _measured(
        self,
    ) -> tuple[dict[str, Tensor], dict[tuple[str, int], list[tuple[Tensor, Tensor]]]]:
        """Derivatives by the weights, and inputs of each weight with the derivatives by them."""
        held, noise = self._calibrated, self._noise
        slopes = {name: torch.zeros(p.shape) for name, p in held.parameters.items()}
        inputs: dict[tuple[str, int], list[tuple[Tensor, Tensor]]] = {}
        share = math.ceil(INPUTS / len(held.batches))
        for batch in held.batches:
            own = {name: p.clone().requires_grad_() for name, p in held.parameters.items()}
            seen: list[tuple[tuple[str, int], Tensor]] = []

            def look(name: str, dim: int, given: Tensor) -> Tensor:
                given = (
                    given.view_as(given) if given.requires_grad else given.detach().requires_grad_()
                )
                if name in self._parts:
                    seen.append(((name, dim), given))  # noqa: B023
                return given

            around = partial(WeightInputs, look=look) if noise.activations is not None else None
            with quiet(), torch.enable_grad():
                outputs = held.outputs(batch, own, around)
                some = [place for place, out in enumerate(outputs) if out.requires_grad]
                found = torch.autograd.grad(
                    [outputs[place] for place in some],
                    [*own.values(), *(given for _, given in seen)],
                    [
                        cotangent(outputs[place].detach(), self._random, held.totals[place])
                        for place in some
                    ],
                    allow_unused=True,
                )
            for name, slope in zip(own, found, strict=False):
                if slope is not None:
                    slopes[name] += slope.float().cpu()
            for (key, given), slope in zip(seen, found[len(own) :], strict=True):
                if slope is not None:
                    pair = [t.detach().reshape(-1, t.shape[-1]) for t in (given, slope)]
                    rows = torch.randperm(len(pair[0]), generator=self._random)[:share]
                    values, felt = (t[rows].float().cpu() for t in pair)
                    # (they stand for all rows)
                    felt *= math.sqrt(len(pair[0]) / len(rows))
                    inputs.setdefault(key, []).append((values, felt))
        return slopes, inputs

    def _weight(self, name: str, axis: int, slopes: Tensor) -> RoundedValues:
        mixings = [
            Mixing(space, part.dim, part.positions, part.dual) for space, part in self._parts[name]
        ]
        values = self._calibrated.parameters[name].float().cpu()
        own = axis if self._noise.per == "channel" else None
        mixed = {one.dim for one in mixings}
        for dim in set(range(values.dim())) - mixed:
            rows = (
                values.movedim(dim, 0).flatten(1).square().sum(1).topk(min(ROWS, values.shape[dim]))
            )
            values = values.index_select(dim, rows.indices)
            if own == dim:
                slopes = slopes.index_select(dim, rows.indices)
        if own is None and all(one.space.keeps_length for one in mixings):
            slopes = slopes.norm().reshape([1] * slopes.dim())
        return RoundedValues(values, slopes, mixings, own)

    def _input(self, name: str, dim: int, values: Tensor, slopes: Tensor) -> RoundedValues:
        mixings = [
            Mixing(space, 1, part.positions, not part.dual)
            for space, part in self._parts[name]
            if part.dim == dim
        ]
        return RoundedValues(values, slopes, mixings, 0)

    def minimum(self, steps: int) -> dict[str, Tensor]:
        """Name of a space -> its matrices after so many steps, or the first if they cost less."""
        first, before = dict(self._matrices), self.total(SHARPNESS[1])
        paces = {name: _Pace(one) for name, one in first.items()}
        for step in range(steps):
            done = step / steps
            sharpness = SHARPNESS[0] + (SHARPNESS[1] - SHARPNESS[0]) * done
            for name, slope in self._slopes(sharpness).items():
                size = self._free[name].size
                move = paces[name].step(tangent(self._free[name], slope.double()))
                half = move * (STEP * (1 - done) * math.sqrt(size) / 2)
                one = torch.eye(size, dtype=torch.float64)
                # (Cayley's map takes the Lie algebra to the group, as exp does)
                turned = (one - half) @ self._matrices[name]
                self._matrices[name] = torch.linalg.solve(one + half, turned)
        return dict(self._matrices) if self.total(SHARPNESS[1]) < before else first

    @torch.no_grad()
    def total(self, sharpness: float) -> float:
        """The cost of everything that is rounded, up to a factor."""
        current = {name: (own, dual) for name, own, dual in self._pairs()}
        parts = [
            weight * float(rounded.cost(current, sharpness))
            for kind, weight in self._kinds()
            for rounded in kind
        ]
        return sum(parts)

    def _pairs(self) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Each space with ``A`` and ``A^-T`` in single precision."""
        for name, matrix in self._matrices.items():
            dual = matrix if self._free[name].keeps_length else torch.linalg.inv(matrix).mT
            yield name, matrix.float(), dual.float()

    def _kinds(self) -> Iterator[tuple[Sequence[RoundedValues], float]]:
        """Weights, and their inputs, with the squares of their steps for a largest entry of 1."""
        levels = (self._noise.bits, self._noise.activations)
        for kind, bits in zip((self._weights, self._inputs), levels, strict=True):
            if bits is not None:
                yield kind, (2 ** (bits - 1) - 1) ** -2

    def _slopes(self, sharpness: float) -> dict[str, Tensor]:
        """Derivatives of the cost on a part of what is rounded, by ``Z`` of ``exp(Z) A``."""
        moves, current = {}, {}
        for name, own, other in self._pairs():
            move = torch.zeros_like(own, requires_grad=True)
            moves[name], current[name] = move, (own + move @ own, other - move.mT @ other)
        with torch.enable_grad():
            for kind, weight in self._kinds():
                some = self._part(kind)
                for rounded in some:
                    cost = rounded.cost(current, sharpness) * (weight * len(kind) / len(some))
                    cost.backward(retain_graph=True)
        return {name: move.grad for name, move in moves.items() if move.grad is not None}

    def _part(self, kind: Sequence[RoundedValues]) -> list[RoundedValues]:
        """Some at random, of so many numbers together."""
        found, left = [], NUMBERS
        for place in torch.randperm(len(kind), generator=self._random).tolist():
            if left > 0:
                found.append(kind[place])
                left -= kind[place].values.numel()
        return found


class _Pace:
    """Directions as Adam takes them, but of whole matrices, so that no basis is preferred."""

    def __init__(self, like: Tensor) -> None:
        self._mean, self._square = torch.zeros_like(like), torch.zeros(len(like), 1, 1).double()
        self._weight = 1.0

    def step(self, slope: Tensor) -> Tensor:
        """The direction after another slope, of length 1 at most for each matrix."""
        slope = slope.nan_to_num(0.0, 0.0, 0.0)
        self._mean.lerp_(slope, 1 - MOMENTUM)
        self._square.lerp_(slope.square().sum((1, 2), keepdim=True), 1 - MOMENTUM)
        self._weight *= MOMENTUM
        known = 1 - self._weight
        length = (self._square / known).sqrt()
        return torch.where(length > 0, self._mean / known / length.clamp_min(1e-300), 0.0)
