"""Choose a basis of the features of a model in which rounding costs least."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor, nn

from ..errors import InputError
from ..models.copies import safe_deepcopy
from ..rotations.rotate import matrices, rotate_
from ..rotations.space import FeatureSpaces
from ..shown import Shown
from .basis_descent import BasisDescent
from .calibration import HOLD, Calibrated, is_safely_less
from .objectives import Noise
from .quantise import check_format, decibels, quantised, quantised_weights, weight_axes
from .weight_inputs import WeightInputs

STEPS = 100


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
