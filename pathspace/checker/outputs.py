"""Whether the outputs of a model are unchanged after the rescalings of a document."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .bench import (
    Runner,
    could_change,
    has_scale,
    is_bare,
    numbers_of,
    relative_change,
    scale_exponents,
)
from .coverage import Coverage
from .document import Rejected, Tensor, integers, read_products, require

# draws of weights and inputs, and for how many seconds more than the least are taken
LEAST_DRAWS, MOST_DRAWS, SECONDS = 12, 400, 30.0


def compare_tensors(
    document: Mapping[str, Any], blocks: list[Tensor], tensors: Mapping[str, Any]
) -> None:
    """Check shapes of a model's tensors and, with values, that no tree weight is 0."""
    sides = [document["trees"][side] for side in ("in", "out")]
    units = document["units"]
    trees = [
        tuple(integers(tree[key], "a tree", units) for key in ("tensor", "index")) for tree in sides
    ]
    for number, block in enumerate(blocks):
        require(block.name in tensors, f"the model has no tensor {block.name}")
        value = tensors[block.name]
        require(tuple(value.shape) == block.shape, f"{block.name} has another shape in the model")
        if is_bare(value):
            continue
        flat = (
            value.detach().reshape(-1)
            if hasattr(value, "detach")
            else np.asarray(value).reshape(-1)
        )
        for tensor, index in trees:
            places = index[tensor == number].tolist()
            alive = not places or bool((flat[places] + block.shift != 0).all())
            require(alive, f"a tree weight of {block.name} is zero")


def rescale_copy(
    document: Mapping[str, Any],
    blocks: list[Tensor],
    model: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    tolerance: float,
) -> tuple[str, list[str]]:
    """Check that random combinations of all generators, by powers of two, do not change the
    outputs of a copy.

    First the unchanged model at the given inputs, then other weights and inputs, until every
    weight has had an effect several times: what a network does not show at some numbers, it shows
    at others. It returns why no change could be visible, or ``""``, and what was never seen.
    """
    bench = _Bench(document, blocks, model, args, kwargs)
    first = bench.begin()
    if not len(first):
        return "there are no floating point outputs", []
    # sums with a constant are rounded; powers of two alone are not
    coarse = bool(bench.shifts) and any(
        value.element_size() < 8 for _, value in numbers_of(bench.model)
    )
    largest, tolerance = (2, max(tolerance, 1e-4)) if coarse else (8, tolerance)
    # two units may have equal random scales once, but hardly three times
    compared = could_change(first) and bench.compare(first, largest, tolerance, times=3)
    coverage = Coverage(blocks, tolerance)
    start, draw = time.perf_counter(), 0
    while not coverage.complete(draw) and draw < MOST_DRAWS:
        if draw >= LEAST_DRAWS and time.perf_counter() - start > SECONDS:
            break
        draw += 1
        if bench.draw(draw) is None:
            continue
        effects, before = bench.derivatives(), bench.run()
        if bench.compare(before, largest, tolerance, times=1):
            compared = True
            coverage.count(effects)
    if not compared:
        return "all outputs are 0, or rounding errors", []
    return "", coverage.unseen()


class _Bench(Runner):
    """A copy of a model, its inputs, and the entries of a document for its tensors."""

    def __init__(
        self,
        document: Mapping[str, Any],
        blocks: list[Tensor],
        model: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> None:
        import torch

        super().__init__(model, args, kwargs)
        self.named = {
            **dict(self.model.named_parameters(remove_duplicate=False)),
            **dict(self.model.named_buffers()),
        }
        # (name, units, power): the tensor is multiplied by this power of the factors of these units
        self.sides: list[tuple[str, np.ndarray, int]] = []
        self._take_blocks(blocks)
        self._take_statistics(document)
        self._see_all_parameters(
            [block.name for block in blocks] + document["pinned"] + document["unused"]
        )
        unused = {block.name: block.unused for block in blocks if block.unused is not None}
        whole = {name: np.ones(1, bool) for name in document["unused"] if name in self.named}
        self.masks = [(name, torch.from_numpy(mask)) for name, mask in (unused | whole).items()]
        self.products, self.units = read_products(document), document["units"]
        # a normalisation divides by the running variance plus its epsilon: the sum is rescaled
        statistics = [entry for entry in document["statistics"] if entry["var"]]
        shifts = {block.name: block.shift for block in blocks}
        shifts |= {entry["var"]: entry.get("eps", 0.0) for entry in statistics}
        self.shifts = {name: shift for name, shift in shifts.items() if shift}
        self.differentiable = True
        self.exponents = np.random.default_rng(0)

    def _take_blocks(self, blocks: list[Tensor]) -> None:
        for block in blocks:
            require(block.name in self.named, f"the model has no parameter {block.name}")
            same = tuple(self.named[block.name].shape) == block.shape
            require(same, f"{block.name} has another shape in the model")
            self.sides += [(block.name, block.head, 1), (block.name, block.tail, -1)]

    def _take_statistics(self, document: Mapping[str, Any]) -> None:
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

    def _see_all_parameters(self, listed: list[str]) -> None:
        known = {id(self.named[name]) for name in listed if name in self.named}
        for name, parameter in self.model.named_parameters():
            said = id(parameter) in known or not has_scale(parameter)
            require(said, f"the document says nothing of the parameter {name}")

    def derivatives(self) -> dict[str, Any]:
        """``|w df/dw|`` of every weight for a random sum of outputs, beside the largest output."""
        import torch

        if not self.differentiable:
            return {}
        held = {name: self.named[name] for name, _, _ in self.sides}
        parameters = {n: v for n, v in held.items() if isinstance(v, torch.nn.Parameter)}
        try:
            with torch.enable_grad():
                outputs = self.outputs()
                fine = outputs[outputs.isfinite()]
                signs = torch.randn(len(fine), generator=self.generator).sign().to(fine)
                grads = torch.autograd.grad(
                    (fine * signs).sum(), list(parameters.values()), allow_unused=True
                )
        except (Rejected, RuntimeError):
            self.differentiable = False
            return {}
        size = float(fine.detach().abs().max())
        return {
            name: ((value.detach() + self.shifts.get(name, 0.0)) * grad.to_dense()).abs() / size
            for (name, value), grad in zip(parameters.items(), grads, strict=True)
            if grad is not None
        }

    def compare(self, before: Any, largest: int, tolerance: float, times: int) -> bool:
        """Redraw unused scalars, then rescale at random: whether the outputs do not change.

        Where they change as much by the last digits of every weight, nothing can be said.
        """
        import torch

        own = {name: self.named[name].data for name, _ in self.masks}
        for name, mask in self.masks:
            drawn = torch.randn(own[name].shape, generator=self.generator).to(own[name])
            self.named[name].data = torch.where(mask.to(drawn.device), drawn, own[name])
        runs = [("scalars said to be unused change", self.run)] if self.masks else []
        runs += [("rescaling changes", lambda: self._rescaled(largest))] * times
        for what, run in runs:
            gap = relative_change(before, run())
            if gap > tolerance:
                for name, value in own.items():
                    self.named[name].data = value
                require(
                    relative_change(before, self.rounded_otherwise()) > tolerance,
                    f"{what} the model's outputs by {gap:.1e}",
                )
                return False
        return True

    def _rescaled(self, largest: int) -> Any:
        """Outputs under one random combination of all generators, which is undone."""
        import torch

        own = {name: self.named[name].data.clone() for name in self.shifts}
        phi = scale_exponents(self.products, self.units, self.exponents, largest)
        after = None
        for direction in (1, -1):
            for name, ids, power in self.sides:
                factor = torch.from_numpy(
                    np.exp2(direction * power * np.sign(ids) * phi[np.abs(ids)])
                )
                shift = self.shifts.get(name, 0.0)
                self.named[name].data.add_(shift).mul_(factor.to(self.named[name])).sub_(shift)
            if direction == 1:
                after = self.run()
        for name, value in own.items():
            self.named[name].data.copy_(value)
        return after
