"""Derivatives of outputs by log-scales of tensors, at random inputs, weights and cotangents."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from scipy.sparse import csr_array
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..capture.traceable import experts_at_once
from ..models.isolation import quiet, seed_torch
from ..models.modes import IgnoreDetach, InDouble
from ..models.nested import mapped, real_leaves
from ..models.running import computing_in, evaluate, run_forward
from ..models.walk import tensors_of
from ..reduction import ReductionGraph
from .bench import Inputs
from .logscales import Family

# products w dL/dw below this, relative to the largest of a sample, are rounding errors
NOTHING = 1e-11
# a sample is left out where its derivative along a found unit, relative to its terms, exceeds
# this, or where none of its products reaches this share of the output
NOISE = 1e-9
# the same, where it is no rounding error: the gradients are not those of the function
WRONG = 1e-6
# largest number of cotangents per run, and of products at once
AT_ONCE, AT_ONCE_NUMBERS = 64, 2**25
# batch statistics normalise any two numbers to 1 and -1, so that batches are larger; large ones
# where their inputs are few
BATCH, LARGE_BATCH, FREE = 4, 32, 2_000


class Sampler:
    """Samples of the derivatives of a model by the log-scales of a family.

    Args:
        graph: the reduction graph.
        scales: its log-scales.
        units: symmetries that were found, sparse ``(R, H)``.
        model: a float64 copy.
        inputs: example inputs.
        seed: seed of inputs, weights and cotangents.

    Attributes:
        alive: which scalars have had an effect.
        wrong: how many samples contradict a found unit.
        problem: why the last run gave no sample.
    """

    def __init__(
        self,
        graph: ReductionGraph,
        scales: Family,
        units: csr_array,
        model: nn.Module,
        inputs: Inputs,
        seed: int,
    ) -> None:
        self.scales, self.units, self.model = scales, units, model
        self.generator = torch.Generator().manual_seed(seed)
        held = tensors_of(model)
        self.weights = {tensor.name: held[tensor.name].detach() for tensor in scales.tensors}
        self.buffers = {
            name: buffer.detach()
            for name, buffer in model.named_buffers(remove_duplicate=False)
            if name not in self.weights
        }
        self.positive = {s.var for s in graph.statistics if s.var is not None}
        self.terms = abs(scales.matrix) @ abs(units)
        self.alive = np.zeros(scales.matrix.shape[0], bool)
        self.runs = self.taken = self.wrong = 0
        self.problem = ""
        # whether backward passes can be batched (some batching rules of torch are missing or
        # wrong); None: not tested
        self.together: bool | None = None
        # whether the model runs without detaching anything, so that its derivatives are those
        # of its function
        self.through = True
        self.example = inputs

    def draw(self, most: int) -> np.ndarray:
        """Rows of ``G``, at most ``most``, from one run with other weights and inputs."""
        weights, joined = self._outputs()
        nothing = np.zeros((0, self.scales.matrix.shape[1]))
        if joined is None:
            return nothing
        count = min(most, AT_ONCE, max(1, AT_ONCE_NUMBERS // len(self.alive)))
        cotangents = torch.randn(count, len(joined), generator=self.generator, dtype=torch.float64)
        # every other cotangent selects one output: in a sum, almost saturated outputs vanish in
        # rounding errors
        alone = torch.randperm(len(joined), generator=self.generator)[: count // 2]
        cotangents[: len(alone)] = 0
        cotangents[torch.arange(len(alone)), alone] = 1
        with quiet(), torch.enable_grad():
            grads = self._gradients(joined, weights, cotangents)
        products = self.scales.products(weights, grads)
        size = np.abs(products).max(1, initial=0)
        output = (cotangents.abs() @ joined.detach().abs()).numpy()
        fine = np.isfinite(products).all(1) & (size > NOISE * output)
        self.taken += len(products)
        if not fine.any():
            self.problem = "its derivatives are not finite, or are rounding errors: no output"
            self.problem += " depends on the size of a weight"
            return nothing
        products = products[fine] / size[fine, None]
        self.alive |= (np.abs(products) > NOTHING).any(0)
        rows = (self.scales.matrix.T @ products.T).T
        along = np.abs(rows @ self.units)
        terms = (self.terms.T @ np.abs(products).T).T
        self.wrong += int((along > WRONG * (1 + terms)).any(1).sum())
        return np.asarray(rows[(along <= NOISE * terms + 1e-13).all(1)])

    def _gradients(
        self, joined: Tensor, weights: Mapping[str, Tensor], cotangents: Tensor
    ) -> dict[str, Tensor]:
        """Gradients by the name of a tensor, one row for each cotangent; batched where that
        gives the same result.
        """
        leaves = list(weights.values())

        def derivatives(cotangent: Tensor, batched: bool) -> list[Tensor]:
            found = torch.autograd.grad(
                joined,
                leaves,
                cotangent,
                retain_graph=True,
                allow_unused=True,
                is_grads_batched=batched,
            )
            empty = cotangent.shape[:1] if batched else ()
            return [
                torch.zeros(*empty, *leaf.shape, dtype=leaf.dtype) if g is None else g.to_dense()
                for leaf, g in zip(leaves, found, strict=True)
            ]

        if len(cotangents) > 1 and self.together is not False:
            try:
                rows = derivatives(cotangents, True)
            except RuntimeError:
                self.together = False
            else:
                if self.together is None:
                    pairs = list(zip(rows, derivatives(cotangents[-1], False), strict=True))
                    largest = max(float(one.abs().max()) for _, one in pairs if one.numel())
                    self.together = all(
                        torch.allclose(row[-1], one, 1e-6, NOISE * largest, True)
                        for row, one in pairs
                    )
                if self.together:
                    return dict(zip(weights, rows, strict=True))
        each = [derivatives(cotangent, False) for cotangent in cotangents]
        return {
            name: torch.stack(rows)
            for name, rows in zip(weights, zip(*each, strict=True), strict=True)
        }

    def _outputs(self) -> tuple[dict[str, Tensor], Tensor | None]:
        """Run the model: its weights as leaves, and all finite outputs as one vector."""
        number, self.runs = self.runs, self.runs + 1
        weights = {
            name: self._weight(name, weight, number).requires_grad_()
            for name, weight in self.weights.items()
        }
        tensors = {name: buffer.clone() for name, buffer in self.buffers.items()} | weights
        inputs = self._inputs(number)
        # (the model may not take inputs that were drawn: then it runs at the example)
        tries = [(inputs, True), (inputs, False), (self.example, self.through)]
        for given, through in tries if self.through else tries[1:]:
            try:
                outputs = self._run(tensors, given, through, number)
                break
            except (RuntimeError, IndexError, ValueError):
                if given is self.example and given is not inputs:
                    raise
        self.through = through
        found = [leaf.reshape(-1) for leaf in real_leaves(outputs) if leaf.requires_grad]
        if not found:
            self.problem = "no output has a derivative with respect to the weights"
            return weights, None
        joined = torch.cat([leaf.double() for leaf in found])
        return weights, joined[torch.isfinite(joined)]

    def _run(
        self, tensors: Mapping[str, Tensor], inputs: Inputs, through: bool, number: int
    ) -> Any:
        with (
            quiet(),
            computing_in(torch.float64),
            InDouble(),
            experts_at_once(self.model),
            torch.enable_grad(),
        ):
            seed_torch(number)
            with IgnoreDetach() if through else nullcontext():
                return evaluate(self.model, tensors, *inputs)

    def _weight(self, name: str, weight: Tensor, number: int) -> Tensor:
        """The model's weights twice, then in turn: weights near them, new ones, and new ones
        with few dead units.
        """
        if number < 2 and bool(weight.any()):
            return weight.clone()
        noise = torch.randn(weight.shape, generator=self.generator, dtype=weight.dtype)
        if name in self.positive:
            return weight.abs().clamp_min(1e-6) * (0.5 * noise).exp()
        spread = float(weight.abs().square().mean().sqrt())
        kind = number % 3
        if kind == 1 and weight.dim() > 1:
            # with very small weights, nonlinear functions are almost linear
            spread = max(spread, (weight[0].numel() or 1) ** -0.5)
        noise = (spread or 0.1) * noise
        if kind == 2 and weight.dim() > 1 and not weight.is_complex():
            # with mostly positive weights, several ReLUs in sequence pass a signal
            flipped = torch.rand(noise.shape, generator=self.generator) < 0.2
            noise = torch.where(flipped, noise, noise.abs())
        return 0.7 * weight + 0.5 * noise if kind == 0 else noise

    def _inputs(self, number: int) -> Inputs:
        """Inputs of many magnitudes: floats 0.01 to 100 times the example's or near it, integers
        of the example in another order or as they are.
        """
        exponent = 4 * float(torch.rand((), generator=self.generator)) - 2
        as_given = number % 2 == 1

        def draw(leaf: Tensor) -> Tensor:
            if not leaf.numel() or leaf.layout != torch.strided:
                return leaf
            if leaf.is_floating_point():
                if not bool(torch.isfinite(leaf).all()):
                    return leaf
                noise = torch.randn(leaf.shape, generator=self.generator, dtype=leaf.dtype)
                if as_given:
                    # (what is repeated in a larger batch becomes different)
                    return leaf * (1 + 0.3 * noise) * 10**exponent
                spread = float(leaf.square().mean().sqrt()) or 1.0
                return noise * spread * 10**exponent
            if leaf.dtype == torch.bool or as_given or leaf.is_complex():
                return leaf
            order = torch.randint(leaf.numel(), leaf.shape, generator=self.generator)
            return leaf.reshape(-1)[order]

        drawn: Inputs = mapped(draw, self.example)
        return drawn


def larger_batches(model: nn.Module, inputs: Inputs) -> list[Inputs]:
    """The same inputs in a larger batch, if the model takes it."""
    batched = [
        leaf
        for leaf in pytree.tree_leaves(inputs)
        if isinstance(leaf, Tensor) and leaf.dim() and leaf.layout == torch.strided
    ]
    if len({len(leaf) for leaf in batched}) != 1 or not len(batched[0]):
        return []
    free = FREE // max(1, sum(leaf[:1].numel() for leaf in batched))
    count = max(BATCH, 2 * len(batched[0]), min(free, LARGE_BATCH))

    def repeated(leaf: Tensor) -> Tensor:
        if not leaf.dim() or leaf.layout != torch.strided:
            return leaf
        return leaf[torch.arange(count) % len(leaf)]

    larger: Inputs = mapped(repeated, inputs)
    try:
        with InDouble(), experts_at_once(model):
            run_forward(model, *larger)
    except (RuntimeError, IndexError, ValueError, AssertionError, TypeError):
        return []
    return [larger]
