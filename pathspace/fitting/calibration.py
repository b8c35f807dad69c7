"""Calibration batches, and measurements on them: outputs, and their sensitivity to every weight."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import cache, cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..errors import InputError, InputTypeError, UnsupportedError
from ..models.finite import check_finite
from ..models.inputs import arranged, batch_inputs, is_empty
from ..models.isolation import quiet
from ..models.modes import IgnoreDetach
from ..models.nested import real_leaves
from ..models.refusals import check_capturable, failed_run, no_derivative
from ..models.running import evaluate
from ..models.stand_in import stand_in
from ..models.values import require_runnable
from .weight_inputs import Look, WeightInputs


class Batch(NamedTuple):
    """Inputs of one run."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


# every how many samples or batches one is held out
HOLD = 3
# standard errors by which the noise of the samples has to fall, and by which factor at least
ERRORS, LEAST, ALONE = 2.0, 0.97, 0.8


class Calibrated:
    """A model, which is never changed, and batches to run it on, of any form."""

    def __init__(self, model: nn.Module, batches: Any) -> None:
        check_capturable(model)
        require_runnable("calibration", (*model.named_parameters(), *model.named_buffers()))
        self.model, self.twin = model, stand_in(model)
        given = [
            one if isinstance(one, Batch) else Batch(*arranged(model, *batch_inputs(one)))
            for one in _several(batches)
        ]
        self.batches = [batch for batch in given if not is_empty(batch)]
        if not self.batches:
            raise InputError(
                f"calibration holds no sample in {len(given)} batches, expected one at least; pass"
                " inputs that are not empty."
            )
        check_finite(model, self.batches)
        self.parameters = {
            name: p.detach() for name, p in model.named_parameters() if p.is_floating_point()
        }

    def outputs(
        self, batch: Batch, tensors: Mapping[str, Tensor], look: Look | None = None
    ) -> list[Tensor]:
        """Real outputs of one batch with other tensors; ``look`` sees the inputs of weights."""
        # (copies, because a model may write into what it holds)
        given = {
            name: tensors.get(name, own).clone()
            for name, own in (*self.twin.named_parameters(), *self.twin.named_buffers())
        }
        try:
            with WeightInputs(given, look) if look else nullcontext():
                found = evaluate(self.twin, given, *batch)
        except Exception as error:
            raise failed_run(self.model, *batch, error) from error
        values = real_leaves(found)
        if not values:
            raise InputError(
                f"{type(self.model).__name__} returns no real numbers, expected an output to"
                " compare."
            )
        return values

    @cached_property
    def reference(self) -> list[list[Tensor]]:
        """Outputs of the model as it stands, for all batches."""
        with quiet(), torch.no_grad():
            return [self.outputs(batch, {}) for batch in self.batches]

    @cached_property
    def totals(self) -> list[float]:
        """Energy of each output on all batches."""
        found = [0.0] * max(map(len, self.reference))
        for outputs in self.reference:
            for place, out in enumerate(outputs):
                found[place] += float(torch.where(out.isfinite(), out, 0).double().square().sum())
        return found

    @torch.no_grad()
    def noise(self, tensors: Mapping[str, Tensor], look: Look | None = None) -> Tensor:
        """Squared relative change of the outputs with other tensors, for each sample."""
        found = []
        samples = max(sum(map(_samples, self.reference)), 1)
        with quiet():
            for batch, wanted in zip(self.batches, self.reference, strict=True):
                count, parts = _samples(wanted), []
                given = zip(wanted, self.outputs(batch, tensors, look), strict=True)
                for (old, new), energy in zip(given, self.totals, strict=False):
                    change = new.double().cpu() - old.double().cpu()
                    change = torch.where(old.isfinite().cpu(), change, 0).square()
                    change = change.reshape(count, -1).sum(1) if count else change.new_zeros(0)
                    # (over the mean energy of a sample)
                    parts.append(change * samples / energy if energy > 0 else change)
                found.append(torch.stack(parts).mean(0))
        return torch.cat(found)

    @cache  # noqa: B019  (it lives as long as its model)
    def sensitivity(self, draws: int = 4) -> dict[str, Tensor]:
        """``sum over samples of |df/dw|^2`` of every parameter, over the energy of the outputs.

        Backward passes with random signs estimate the sum without bias. Outputs without a gradient
        are differentiated as if the model did not detach them.
        """
        generator = torch.Generator().manual_seed(0)
        total = {
            name: torch.zeros(p.shape, dtype=max(p.dtype, torch.float32, key=lambda t: t.itemsize))
            for name, p in self.parameters.items()
        }
        for batch in self.batches:
            own = {name: p.clone().requires_grad_() for name, p in self.parameters.items()}
            with quiet(), torch.enable_grad():
                outputs = self.outputs(batch, own)
                if not any(out.requires_grad for out in outputs):
                    with IgnoreDetach():
                        outputs = self.outputs(batch, own)
                for draw in range(draws):
                    found = self.slopes(outputs, [*own.values()], generator, draw + 1 < draws)
                    for name, gradient in zip(own, found, strict=True):
                        if gradient is not None:
                            slope = gradient.to(total[name]).nan_to_num_(0, 0, 0)
                            total[name].addcmul_(slope, slope, value=1 / draws)
        return {name: sums.double() for name, sums in total.items()}

    def slopes(
        self,
        outputs: Sequence[Tensor],
        tensors: Sequence[Tensor],
        generator: torch.Generator,
        again: bool = False,
    ) -> Sequence[Tensor | None]:
        """Derivatives of the outputs, with random signs and over their energy, by tensors."""
        roots, signs = [], []
        for out, energy in zip(outputs, self.totals, strict=False):
            if out.requires_grad:
                drawn = torch.randint(0, 2, out.shape, generator=generator).mul_(2).sub_(1)
                signs.append((drawn / max(math.sqrt(energy), 1e-30)).to(out))
                roots.append(out)
        if not roots:
            return [None] * len(tensors)
        try:
            return torch.autograd.grad(roots, tensors, signs, retain_graph=again, allow_unused=True)
        except Exception as error:
            raise UnsupportedError(
                f"{type(self.model).__name__} cannot be differentiated, expected derivatives of its"
                f" outputs: {no_derivative(error)}; call its backward pass by itself to see why."
            ) from error


def _samples(outputs: Sequence[Tensor]) -> int:
    """How many samples a batch has: the first size of its outputs, or 1 if that is not the same."""
    sizes = {out.shape[0] if out.dim() else 1 for out in outputs}
    return sizes.pop() if len(sizes) == 1 else 1


def _several(batches: Any) -> Iterable[Any]:
    if isinstance(batches, Tensor | Mapping | tuple) or hasattr(batches, "keys"):
        return [batches]
    if isinstance(batches, Iterable):
        return batches
    raise InputTypeError(
        f"calibration is of type {type(batches).__name__}, expected a tensor, a tuple of inputs, a"
        " mapping of keyword inputs, or an iterable of these."
    )


def is_safely_less(after: Tensor, before: Tensor) -> bool:
    """Whether noise falls by more than chance, sample by sample."""
    if not bool(after.isfinite().all()):
        return False
    if not bool(before.isfinite().all()):
        return True
    change = after - before
    if len(change) < 2:
        return float(after.sum()) < ALONE * float(before.sum())
    error = float(change.std()) / math.sqrt(len(change))
    by_chance = float(change.mean()) >= -ERRORS * error
    return not by_chance and float(after.mean()) < LEAST * float(before.mean())
