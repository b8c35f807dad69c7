"""Derivatives of outputs with respect to log-scales of tensors, at random
inputs, weights and cotangents.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from scipy.sparse import csr_array
from torch import Tensor, nn

from ..capture.sizes import Inputs
from ..models.isolation import quiet, seed_torch
from ..models.modes import IgnoreDetach, InDouble
from ..models.nested import mapped, real_leaves
from ..models.running import computing_in, evaluate
from ..models.walk import tensors_of
from ..reduction import ReductionGraph
from .logscales import Family
from .scaled_runs import ScaledRun

# products w dL/dw below this, relative to the largest of a sample, are rounding errors
NOTHING = 1e-11
# a sample is noisy, and left out, if its derivative along a found unit, relative
# to its terms, exceeds this
NOISE = 1e-9
WHOLE = 2
# largest number of cotangents per run, and of elements of one operation for all of them
AT_ONCE, AT_ONCE_NUMBERS = 64, 2**23
# one run in OTHER uses inputs of another size; RARE is the allowed share of scalars with an
# effect at given sizes only
OTHER, RARE = 4, 1e-3
# sampling stops after this many whole samples without a new scalar; half of it above DEAR scalars
PATIENCE, DEAR = 6, 1_000_000


class Sampler:
    """Samples of two kinds: whole ones with respect to all scalars, and quick ones with
    respect to log-scales only.

    Args:
        graph: the reduction graph.
        scales: its log-scales.
        model: a float64 copy.
        examples: inputs of one or several sizes; every fourth run uses one after the first.
        seed: seed of inputs, weights and cotangents.
    """

    def __init__(
        self,
        graph: ReductionGraph,
        scales: Family,
        model: nn.Module,
        examples: Sequence[Inputs],
        seed: int,
    ) -> None:
        self.scales, self.model, self.seed = scales, model, seed
        self.examples = tuple(examples)
        self.generator = torch.Generator().manual_seed(seed)
        # (not a set: random numbers are drawn in this order)
        wanted = dict.fromkeys(name for entry in scales.entries for name, _, _ in entry.factors)
        held = tensors_of(model)
        self.weights = {name: held[name].detach() for name in wanted}
        self.buffers = {
            n: b.detach() for n, b in model.named_buffers(remove_duplicate=False) if n not in wanted
        }
        self.positive = {s.var for s in graph.statistics if s.var is not None}
        self.rows: list[Tensor] = []
        # the same sums of absolute values, upper bounds of the rows
        self.sizes: list[Tensor] = []
        self.largest = [torch.zeros(entry.shape, dtype=torch.float64) for entry in scales.entries]
        self.tried = 0
        self.problem = ""
        self.quick = True
        # whether backward passes can be batched (some batching rules of torch are missing or
        # wrong); None: not tested
        self.together: bool | None = None
        # whether the model runs without detaching anything, so that its derivatives
        # are those of its function
        self.through = True
        # whether a scalar without effect in whole samples has one in quick samples
        self.surprised = False

    def look(self, seconds: float, most: int = 60) -> None:
        """Take whole samples until they show no effect of a further scalar, or the time is over."""
        start = time.thread_time()
        scalars = sum(held.numel() for held in self.largest)
        patience = PATIENCE if scalars < DEAR else PATIENCE // 2
        felt, idle = -1, 0
        for _ in range(most):
            self.whole()
            now = sum(int((held > NOTHING).sum()) for held in self.largest)
            idle = 0 if now > felt else idle + 1
            felt = max(now, felt)
            if idle >= patience or self.problem or time.thread_time() - start > seconds:
                return

    def covers(self, inputs: Inputs) -> bool:
        """Whether a run at other inputs shows almost no effect of scalars without effect so far."""
        before = [held > NOTHING for held in self.largest]
        examples, self.examples = self.examples, (inputs,)
        self.whole()
        self.examples = examples
        new = sum(
            int(((held > NOTHING) & ~old).sum())
            for held, old in zip(self.largest, before, strict=True)
        )
        return new <= RARE * sum(int(old.sum()) for old in before)

    def whole(self) -> int:
        """One run, with derivatives with respect to every scalar for two cotangents;
        return how many were finite.
        """
        leaves, joined = self._outputs(None)
        before = len(self.rows)
        if joined is None:
            return 0
        with quiet(), torch.enable_grad():
            for k in range(WHOLE):
                cotangent = torch.randn(joined.shape, generator=self.generator, dtype=torch.float64)
                grads = torch.autograd.grad(
                    joined,
                    list(leaves.values()),
                    cotangent,
                    retain_graph=k + 1 < WHOLE,
                    allow_unused=True,
                )
                known = {name: g for name, g in zip(leaves, grads, strict=True) if g is not None}
                products = [entry.products(leaves, known) for entry in self.scales.entries]
                size = float(torch.stack([p.abs().max() for p in products if p.numel()]).max())
                if not 0 < size < float("inf"):
                    continue
                products = [p.div_(size) for p in products]
                self.rows.append(self.scales.sums(products))
                products = [p.abs_() for p in products]
                for held, p in zip(self.largest, products, strict=True):
                    torch.maximum(held, p, out=held)
                self.sizes.append(self.scales.sums(products))
        return len(self.rows) - before

    def batch(self, column: Tensor, used: Tensor, units: csr_array, most: int = AT_ONCE) -> Tensor:
        """One run of the model, with derivatives with respect to log-scales for many cotangents.

        Args:
            column: size of each log-scale's derivative, ``(R,)``.
            used: which log-scales have an effect.
            units: change of the log-scales by every found unit, sparse ``(R, H)``.
            most: largest number of rows; several draws of the weights show more than one.

        Returns:
            Rows of norm 1, with columns divided by ``column`` and without noisy rows, ``(k, R)``.
        """
        if not self.quick:
            self.whole()
            rows, sizes = torch.stack(self.rows[-WHOLE:]), torch.stack(self.sizes[-WHOLE:])
            scaled: Tensor = (
                rows
                / column
                / (sizes / column)[:, used].norm(dim=1, keepdim=True).clamp_min(1e-300)
            )
            return scaled
        run, joined = self._outputs(self.scales)
        if joined is None:
            return torch.zeros(0, self.scales.size, dtype=torch.float64)
        count = max(1, min(most, joined.numel() // 2, AT_ONCE_NUMBERS // run.widest))
        cotangents = torch.randn(count, len(joined), generator=self.generator, dtype=torch.float64)
        # every other cotangent selects one output: in a sum, almost saturated outputs
        # vanish in rounding errors
        alone = torch.randperm(len(joined), generator=self.generator)[: count // 2]
        cotangents[: len(alone)] = 0
        cotangents[torch.arange(len(alone)), alone] = 1

        def derivatives(cotangent: Tensor) -> Any:
            return torch.autograd.grad(
                joined, run.leaves, cotangent, materialize_grads=True, retain_graph=True
            )

        with quiet(), torch.enable_grad():
            rows = self._derivatives(derivatives, cotangents)
        largest = (cotangents.abs() @ joined.detach().abs()).clamp_min(1e-300)
        fine = torch.isfinite(rows).all(1) & (rows.abs().amax(1) > NOISE * largest)
        rows = rows[fine]
        self.surprised |= bool((rows[:, ~used].abs() > NOISE * largest[fine, None]).any())
        rows[:, ~used] = 0
        rows = rows / column
        rows = rows / rows.abs().amax(1, keepdim=True)
        if units.shape[1] and len(rows):
            # relative to the sum of the absolute terms of each unit
            own = np.maximum(abs(units).T @ column.numpy(), 1e-300)
            along = np.abs(units.T @ (rows * column).T.numpy()) / own[:, None]
            rows = rows[torch.from_numpy(along.max(0) < NOISE)]
        result: Tensor = rows / rows.norm(dim=1, keepdim=True).clamp_min(1e-300)
        return result

    def _derivatives(self, derivatives: Callable[[Tensor], Any], cotangents: Tensor) -> Tensor:
        """One row of derivatives for each cotangent, batched if that gives the same result."""
        count = len(cotangents)
        if count > 1 and self.together is not False:
            try:
                rows = torch.cat(
                    [part.reshape(count, -1) for part in torch.vmap(derivatives)(cotangents)], 1
                )
            except RuntimeError:
                self.together = False
            else:
                if self.together is None:
                    last = torch.cat([part.reshape(-1) for part in derivatives(cotangents[-1])])
                    self.together = torch.allclose(
                        rows[-1], last, 1e-6, NOISE * float(last.abs().max()), True
                    )
                if self.together:
                    return rows
        return torch.stack(
            [torch.cat([part.reshape(-1) for part in derivatives(row)]) for row in cotangents]
        )

    def _outputs(self, scales: Family | None) -> tuple[Any, Tensor | None]:
        """Run the model: leaves (the scalars themselves, or log-scales), and all
        finite outputs as one vector.
        """
        number, self.tried = self.tried, self.tried + 1
        weights = self._weights(number)
        buffers = {name: buffer.clone() for name, buffer in self.buffers.items()}
        with (
            quiet(),
            computing_in(torch.float64),
            InDouble(),
            torch.enable_grad(),
        ):
            seed_torch(number)
            leaves: Any
            if scales is None:
                leaves = {name: value.requires_grad_() for name, value in weights.items()}
                outputs = self._run(leaves | buffers, number)
            else:
                with ScaledRun(scales, weights) as leaves:
                    outputs = self._run(weights | buffers, number)
            found = [leaf.reshape(-1) for leaf in real_leaves(outputs) if leaf.requires_grad]
            if not found:
                self.problem = "no output has a derivative with respect to the weights"
                return leaves, None
            joined = torch.cat([leaf.double() for leaf in found])
            return leaves, joined[torch.isfinite(joined)]

    def _weights(self, number: int) -> dict[str, Tensor]:
        """The model's weights twice, then in turn: weights near them, new ones, and new
        ones with few dead units.
        """
        drawn = {}
        for name, weight in self.weights.items():
            if number < 2 and bool(weight.any()):
                drawn[name] = weight.clone()
                continue
            # (float32 is drawn several times faster, and the precision of samples does not matter)
            noise = torch.randn(
                weight.shape, generator=self.generator, dtype=torch.float32
            ).double()
            if name in self.positive:
                drawn[name] = weight.abs().clamp_min(1e-6) * (0.5 * noise).exp()
            else:
                spread = float(weight.square().mean().sqrt()) if weight.numel() else 0.0
                kind = number % 3
                if kind == 1 and weight.dim() > 1:
                    # with very small weights, nonlinear functions are almost linear
                    spread = max(spread, (weight[0].numel() or 1) ** -0.5)
                noise = (spread or 0.1) * noise
                if kind == 2 and weight.dim() > 1:
                    # with mostly positive weights, several ReLUs in sequence pass a signal
                    noise = torch.where(
                        torch.rand(noise.shape, generator=self.generator) < 0.8, noise.abs(), noise
                    )
                drawn[name] = 0.7 * weight + 0.5 * noise if kind == 0 else noise
        return drawn

    def _run(self, tensors: Mapping[str, Tensor], number: int) -> Any:
        inputs = self._inputs(number)
        for through in (True, False) if self.through else (False,):
            try:
                with IgnoreDetach() if through else nullcontext():
                    outputs = evaluate(self.model, tensors, *inputs)
                self.through = through
                return outputs
            except (RuntimeError, IndexError, ValueError):
                continue
        # the drawn inputs are not valid for this model: use the example
        with IgnoreDetach() if self.through else nullcontext():
            return evaluate(self.model, tensors, *self.examples[0])

    def _inputs(self, number: int) -> Any:
        """Inputs of many magnitudes: floats 0.01 to 100 times the example's,
        integers from the example.
        """
        exponent = 4 * float(torch.rand((), generator=self.generator)) - 2
        # (a larger batch repeats the samples of the example)
        later = len(self.examples) > 1 and number % OTHER == OTHER - 1
        as_given = number % 2 == 1 and not later

        def draw(leaf: Tensor) -> Tensor:
            if not leaf.numel() or leaf.layout != torch.strided:
                return leaf
            if leaf.is_floating_point():
                if not bool(torch.isfinite(leaf).all()):
                    return leaf
                if as_given:
                    return leaf * 10**exponent
                spread = float(leaf.double().square().mean().sqrt()) or 1.0
                noise = torch.randn(leaf.shape, generator=self.generator, dtype=torch.float64)
                return (noise * spread * 10**exponent).to(leaf)
            if leaf.dtype == torch.bool or as_given or leaf.is_complex():
                return leaf
            order = torch.randint(leaf.numel(), leaf.shape, generator=self.generator)
            return leaf.reshape(-1)[order]

        return mapped(
            draw, self.examples[1 + number // OTHER % (len(self.examples) - 1) if later else 0]
        )

    def misled(self, units: csr_array) -> bool:
        """Whether a derivative along a found unit is not 0."""
        rows, sizes = torch.stack(self.rows).numpy(), torch.stack(self.sizes).numpy()
        along, most = np.abs(units.T @ rows.T), abs(units).T @ sizes.T
        return bool((along > 1e-6 * most + 1e-12).any())
