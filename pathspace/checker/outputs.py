"""Whether the outputs of a model are unchanged after the rescalings of a document."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from .bench import Runner, could_change, has_scale, numbers_of, relative_change, scale_exponents
from .document import Rejected, Tensor, read_products, require

# draws of weights and inputs, and for how many seconds more than the least are taken
LEAST_DRAWS, MOST_DRAWS, SECONDS = 12, 400, 30.0
# how often every weight must have an effect: two units may have equal random scales once
TIMES = 4
# an effect is seen if it is so many times the tolerance
CLEAR = 16
# draws without anything new, after which the rest counts as unseen
PATIENCE = 40


def rescale_copy(
    document: Mapping[str, Any], blocks: list[Tensor], *given: Any
) -> tuple[str, list[str]]:
    """Check that random combinations of all generators, by powers of two, do not change the
    outputs of a copy.

    First the unchanged model at the given inputs, then other weights and inputs, until every
    weight has had an effect several times: what a network does not show at some numbers, it shows
    at others. It returns why no change could be visible, or ``""``, and what was never seen.
    """
    bench = _Bench(document, blocks, *given)
    first = bench.begin()
    if not len(first):
        return "there are no floating point outputs", []
    # two units may have equal random scales once, but hardly three times
    compared = could_change(first) and bench.compare(first, times=3)
    counts = {block.name: np.zeros(block.shape, np.int8) for block in blocks}
    for block in blocks:
        if block.unused is not None:
            # (which have no effect to be seen)
            counts[block.name][np.broadcast_to(block.unused, block.shape)] = TIMES
    start, known, idle = time.perf_counter(), 0, 0
    for number in range(1, MOST_DRAWS + 1):
        before = bench.draw(number)
        if before is not None:
            effects = bench.derivatives()
            if bench.compare(bench.run(), times=1):
                compared = True
                for name in effects.keys() & counts.keys():
                    clear = effects[name] > CLEAR * bench.tolerance
                    seen = clear.cpu().numpy().reshape(counts[name].shape)
                    counts[name] += seen & (counts[name] < TIMES)
        total = sum(int(each.sum()) for each in counts.values())
        known, idle = total, 0 if total > known else idle + 1
        missing = {name: int((each < TIMES).sum()) for name, each in counts.items()}
        late = time.perf_counter() - start > SECONDS or idle >= PATIENCE
        if number >= LEAST_DRAWS and (late or not any(missing.values())):
            break
    if not compared:
        return "all outputs are 0, or rounding errors", []
    return "", [
        f"the effect of {few:,} of {counts[name].size:,} scalars of {name}"
        for name, few in missing.items()
        if few
    ]


class _Bench(Runner):
    """A copy of a model, its inputs, and the entries of a document for its tensors."""

    def __init__(self, document: Mapping[str, Any], blocks: list[Tensor], *given: Any) -> None:
        super().__init__(*given)
        self.named |= dict(self.model.named_buffers())
        # (name, units, power): the tensor is multiplied by this power of the factors of these units
        self.sides: list[tuple[str, np.ndarray, int]] = []
        for block in blocks:
            require(block.name in self.named, f"the model has no parameter {block.name}")
            same = tuple(self.named[block.name].shape) == block.shape
            require(same, f"{block.name} has another shape in the model")
            self.sides += [(block.name, block.head, 1), (block.name, block.tail, -1)]
        for entry in document["statistics"]:
            ids = np.array(entry["units"], np.int64)
            for name, power in ((entry["mean"], 1), (entry["var"], 2)):
                if name is not None:
                    fits = name in self.named and self.named[name].numel() == len(ids)
                    require(fits, f"the model has no buffer {name} like that")
                    self.sides.append((name, ids, power))
        for name, _, _ in self.sides:
            real = has_scale(self.named[name])
            require(real, f"{name} holds whole numbers in the model, which have no scale")
        listed = [*(block.name for block in blocks), *document["pinned"], *document["unused"]]
        told = {id(self.named[name]) for name in listed if name in self.named}
        for name, parameter in self.model.named_parameters():
            said = id(parameter) in told or not has_scale(parameter)
            require(said, f"the document says nothing of the parameter {name}")
        unused = {block.name: block.unused for block in blocks if block.unused is not None}
        whole = {name: np.ones(1, bool) for name in document["unused"] if name in self.named}
        self.masks = {name: torch.from_numpy(mask) for name, mask in (unused | whole).items()}
        self.products, self.units = read_products(document), document["units"]
        # a normalisation divides by the running variance plus its epsilon: the sum is rescaled
        shifts = {block.name: block.shift for block in blocks}
        shifts |= {entry["var"]: entry.get("eps", 0.0) for entry in document["statistics"]}
        self.shifts = {name: shift for name, shift in shifts.items() if name and shift}
        self.differentiable = True
        self.exponents = np.random.default_rng(0)
        # sums with a constant are rounded; powers of two alone are not
        short = any(value.element_size() < 8 for _, value in numbers_of(self.model))
        self.largest = 8
        if self.shifts and short:
            self.largest, self.tolerance = 2, max(self.tolerance, 1e-4)

    def derivatives(self) -> dict[str, torch.Tensor]:
        """``|w df/dw|`` of every weight for a random sum of outputs, beside the largest output."""
        if not self.differentiable:
            return {}
        held = {name: self.named[name] for name, _, _ in self.sides}
        parameters = {n: v for n, v in held.items() if isinstance(v, torch.nn.Parameter)}
        try:
            with torch.enable_grad():
                outputs = self.outputs()
                fine = outputs[outputs.isfinite()]
                signs = torch.randn(len(fine), generator=self.generator).sign().to(fine)
                total, leaves = (fine * signs).sum(), list(parameters.values())
                grads = torch.autograd.grad(total, leaves, allow_unused=True)
        except (Rejected, RuntimeError):
            self.differentiable = False
            return {}
        size = float(fine.detach().abs().max())
        return {
            name: ((value.detach() + self.shifts.get(name, 0.0)) * grad.to_dense()).abs() / size
            for (name, value), grad in zip(parameters.items(), grads, strict=True)
            if grad is not None
        }

    def compare(self, before: torch.Tensor, times: int) -> bool:
        """Whether the outputs stay when unused scalars are redrawn, and units rescaled at random.

        Where they change as much by the last digits of every weight, nothing can be said.
        """
        for what, new in self._changes(times):
            pairs = [(self.named[name], value) for name, value in new.items()]
            gap = relative_change(before, self.run(pairs))
            if gap > self.tolerance:
                said = f"{what} the model's outputs by {gap:.1e}"
                require(self.rounds(before), said)
                return False
        return True

    def _changes(self, times: int) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
        """What is changed, and the new values of tensors."""
        unused = {}
        for name, mask in self.masks.items():
            own = self.named[name].detach()
            drawn = torch.randn(own.shape, generator=self.generator).to(own)
            unused[name] = torch.where(mask.to(own.device), drawn, own)
        if unused:
            yield "scalars said to be unused change", unused
        for _ in range(times):
            phi = scale_exponents(self.products, self.units, self.exponents, self.largest)
            new: dict[str, torch.Tensor] = {}
            for name, ids, power in self.sides:
                own, shift = self.named[name].detach(), self.shifts.get(name, 0.0)
                factor = torch.as_tensor(np.exp2(power * np.sign(ids) * phi[np.abs(ids)]))
                new[name] = (new.get(name, own) + shift) * factor.to(own) - shift
            yield "rescaling changes", new
