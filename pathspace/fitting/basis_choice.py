"""Choose a basis of the features of a model in which rounding costs least, by descent."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
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
from .calibration import HOLD, Batch, Calibrated, is_safely_less
from .objectives import Noise
from .quantise import check_format, decibels, quantised, quantised_weights, weight_axes
from .weight_inputs import Look

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
    descent = BasisDescent(model, spaces, noise, fit.batches, first)
    chosen = descent.minimum(STEPS if steps is None else steps)

    def costs(elements: Mapping[str, Tensor], on: Calibrated) -> Tensor:
        turned = Calibrated(rotate_(safe_deepcopy(model), spaces, elements), on.batches)
        # (a rotation rounds, too)
        turned.reference = on.reference
        return turned.noise(*_rounding(turned.model, noise))

    best = min((first, chosen), key=lambda elements: float(costs(elements, fit).mean()))
    before, after = (costs(elements, held) for elements in ({}, best))
    other = after if best is first else costs(first, held)
    helped = is_safely_less(after, before)
    found = before, after if helped else before, other
    trained, now, hadamard = (decibels(float(each.mean())) for each in found)
    taken = best if helped else {}
    return ChosenBasis(taken, str(noise), trained, now, hadamard, helped, len(held.batches))


def _rounding(model: nn.Module, noise: Noise) -> tuple[dict[str, Tensor], Look | None]:
    """The rounded weights of a model, and what rounds the inputs of weights."""
    own, weights = {name: p.detach() for name, p in model.named_parameters()}, {}
    if noise.bits is not None:
        weights = quantised_weights(own, weight_axes(model), noise.bits, noise.per)
    bits = noise.activations
    if bits is None:
        return weights, None

    def rounded(_name: str, _dim: int, given: Tensor) -> Tensor:
        return quantised(given.reshape(-1, given.shape[-1]), bits, 0).reshape(given.shape)

    return weights, rounded


# name of a space -> its matrices ``A``, and ``A^-T``
Current = Mapping[str, tuple[Tensor, Tensor]]
# what a space mixes of some values, by ``A`` or by its dual
Mixing = tuple[Space, FeatureSlice]


def in_basis(values: Tensor, mixing: Mixing, current: Current, derivatives: bool = False) -> Tensor:
    """Values, or the derivatives by them, in the current basis."""
    space, part = mixing
    rows, at = values.movedim(part.dim, 0), part.positions.reshape(-1)
    matrices = current[space.name][part.dual != derivatives]
    block = matrices @ rows[at].reshape(*part.positions.shape, -1)
    new = rows.index_copy(0, at, block.reshape(len(at), *rows.shape[1:]))
    return new.movedim(0, part.dim)


@dataclass(eq=False)
class RoundedValues:
    """Numbers that are rounded (or those among which the largest is) and the derivatives of the
    outputs by them, with one step for each group: all, or each place along an axis; ``share`` is
    the square of the step where the largest number is 1.
    """

    values: Tensor
    slopes: Tensor
    mixings: list[Mixing]
    axis: int | None
    share: float

    def cost(self, current: Current, sharpness: float) -> Tensor:
        """``sum over groups of step^2 |slopes|^2``, with a mean of powers for the largest."""
        values, slopes = self.values, self.slopes
        for mixing in self.mixings:
            space, part = mixing
            values = in_basis(values, mixing, current)
            # (their length stays, unless several groups are mixed)
            if not space.keeps_length or part.dim == self.axis:
                slopes = in_basis(slopes, mixing, current, derivatives=True)
        rows, own = (
            each.reshape(1, -1) if self.axis is None else each.movedim(self.axis, 0).flatten(1)
            for each in (values, slopes)
        )
        return self.share * (largest(rows, sharpness).square() * own.square().sum(1)).sum()


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
        self._mixings: dict[str, list[Mixing]] = {}
        for space in spaces.free:
            for part in space.slices:
                self._mixings.setdefault(part.parameter, []).append((space, part))
        folded = rotate_(safe_deepcopy(model), spaces, still)
        self._calibrated, self._noise = Calibrated(folded, batches), noise
        slopes, inputs = self._measured()
        self._weights = [
            self._weight(name, axis, slopes[name], _squared_step(noise.bits))
            for name, axis in weight_axes(folded).items()
            if noise.bits is not None and name in self._mixings
        ]
        self._inputs = []
        for (name, dim), found in inputs.items():
            values, felt = map(torch.cat, zip(*found, strict=True))
            own = [
                (space, replace(part, dim=1, dual=not part.dual))
                for space, part in self._mixings[name]
                if part.dim == dim
            ]
            if own:
                share = _squared_step(noise.activations)
                self._inputs.append(RoundedValues(values, felt, own, 0, share))

    def _measured(
        self,
    ) -> tuple[dict[str, Tensor], dict[tuple[str, int], list[tuple[Tensor, Tensor]]]]:
        """Derivatives by the weights, and inputs of each weight with the derivatives by them."""
        held = self._calibrated
        slopes = {name: torch.zeros(p.shape) for name, p in held.parameters.items()}
        inputs: dict[tuple[str, int], list[tuple[Tensor, Tensor]]] = {}
        share = math.ceil(INPUTS / len(held.batches))
        for batch in held.batches:
            own = {name: p.clone().requires_grad_() for name, p in held.parameters.items()}
            seen: list[tuple[tuple[str, int], Tensor]] = []

            def look(name: str, dim: int, given: Tensor) -> Tensor:
                felt = given.requires_grad
                given = given.view_as(given) if felt else given.detach().requires_grad_()
                if name in self._mixings:
                    seen.append(((name, dim), given))  # noqa: B023
                return given

            with quiet(), torch.enable_grad():
                outputs = held.outputs(batch, own, look if self._noise.activations else None)
                tensors = [*own.values(), *(given for _, given in seen)]
                found = held.slopes(outputs, tensors, self._random)
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

    def _weight(self, name: str, axis: int, slopes: Tensor, share: float) -> RoundedValues:
        mixings, values = self._mixings[name], self._calibrated.parameters[name].float().cpu()
        own = axis if self._noise.per == "channel" else None
        for dim in set(range(values.dim())) - {part.dim for _, part in mixings}:
            sizes = values.movedim(dim, 0).flatten(1).square().sum(1)
            rows = sizes.topk(min(ROWS, len(sizes))).indices
            values = values.index_select(dim, rows)
            if own == dim:
                slopes = slopes.index_select(dim, rows)
        if own is None and all(space.keeps_length for space, _ in mixings):
            slopes = slopes.norm().reshape([1] * slopes.dim())
        return RoundedValues(values, slopes, mixings, own, share)

    def minimum(self, steps: int) -> dict[str, Tensor]:
        """Name of a space -> its matrices after so many steps, or the first if they cost less."""
        first, before = dict(self._matrices), self.total(SHARPNESS[1])
        # directions as Adam takes them, but of whole matrices, so that no basis is preferred
        means = {name: torch.zeros_like(one) for name, one in first.items()}
        squares = {name: torch.zeros(len(one), 1, 1).double() for name, one in first.items()}
        for step in range(steps):
            done, known = step / steps, 1 - MOMENTUM ** (step + 1)
            sharpness = SHARPNESS[0] + (SHARPNESS[1] - SHARPNESS[0]) * done
            for name, slope in self._slopes(sharpness).items():
                down = tangent(self._free[name], slope.double()).nan_to_num(0.0, 0.0, 0.0)
                means[name].lerp_(down, 1 - MOMENTUM)
                squares[name].lerp_(down.square().sum((1, 2), keepdim=True), 1 - MOMENTUM)
                length = (squares[name] / known).sqrt().clamp_min(1e-300)
                size = self._free[name].size
                half = means[name] / known / length * (STEP * (1 - done) * math.sqrt(size) / 2)
                one = torch.eye(size, dtype=torch.float64)
                # (Cayley's map takes the Lie algebra to the group, as exp does)
                turned = (one - half) @ self._matrices[name]
                self._matrices[name] = torch.linalg.solve(one + half, turned)
        return dict(self._matrices) if self.total(SHARPNESS[1]) < before else first

    @torch.no_grad()
    def total(self, sharpness: float) -> float:
        """The cost of everything that is rounded, up to a factor."""
        current = self._current()
        rounded = [*self._weights, *self._inputs]
        return sum(float(one.cost(current, sharpness)) for one in rounded)

    def _current(self) -> dict[str, tuple[Tensor, Tensor]]:
        """``A`` and ``A^-T`` of each space in single precision."""
        found = {}
        for name, matrix in self._matrices.items():
            dual = matrix if self._free[name].keeps_length else torch.linalg.inv(matrix).mT
            found[name] = matrix.float(), dual.float()
        return found

    def _slopes(self, sharpness: float) -> dict[str, Tensor]:
        """Derivatives of the cost on a part of what is rounded, by ``Z`` of ``exp(Z) A``."""
        moves, current = {}, {}
        for name, (own, other) in self._current().items():
            move = torch.zeros_like(own, requires_grad=True)
            moves[name], current[name] = move, (own + move @ own, other - move.mT @ other)
        with torch.enable_grad():
            for kind in (self._weights, self._inputs):
                some = self._part(kind)
                for rounded in some:
                    cost = rounded.cost(current, sharpness) * (len(kind) / len(some))
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


def _squared_step(bits: int | None) -> float:
    return 0.0 if bits is None else (2 ** (bits - 1) - 1) ** -2
