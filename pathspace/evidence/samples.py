"""Derivatives of outputs by log-scales of tensors, at random inputs, weights and cotangents.

``P`` maps one number per row and one per column of each tensor to a log-scale for every scalar
weight. Every gauge transformation that was found is of that form: where the reduction graph has
another pattern of units in a tensor, the pattern is a side of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy.sparse import block_diag, coo_array, csr_array, eye_array, hstack, vstack
from torch import Tensor

from ..graph.structure import Structure
from ..models.isolation import quiet, seed_torch
from ..models.modes import IgnoreDetach, InDouble
from ..models.nested import mapped, real_leaves
from ..models.refusals import no_derivative
from ..models.running import computing_in, evaluate
from ..models.walk import tensors_of
from .bench import Inputs, Workbench

# products w dL/dw below this, relative to the largest of a sample, are rounding errors
NOTHING = 1e-11
# a sample is left out where its derivative along a found unit, relative to its terms, exceeds
# this, or where none of its products reaches this share of the output
NOISE = 1e-9
# the same, where it is no rounding error: the gradients are not those of the function
WRONG = 1e-6
# largest number of cotangents per run, and of products at once
AT_ONCE, AT_ONCE_NUMBERS = 64, 2**25


@dataclass(frozen=True, eq=False)
class ScaledTensor:
    """A parameter, or a running mean or variance of a normalisation.

    Attributes:
        name: of the parameter or buffer.
        scalars: which scalars of the model it holds, in the order of ``P``.
        columns: its log-scales; a running mean shares those of its variance.
        rows: how many of these, from the first, are log-scales of rows.
        shift: the constant ``c`` where ``w + c`` is what scales.
        statistic: whether it is no parameter.
    """

    name: str
    scalars: slice
    columns: slice
    rows: int
    shift: float
    statistic: bool


@dataclass(frozen=True, eq=False)
class Family:
    """All log-scales of a model.

    Attributes:
        tensors: what holds the scalars, in order.
        matrix: ``P``, sparse ``(scalars, R)``; 2 in the rows of a variance.
        units: what every unit that was found moves, sparse ``(R, H)``.
    """

    tensors: tuple[ScaledTensor, ...]
    matrix: csr_array
    units: csr_array

    def products(self, weights: Mapping[str, Tensor], grads: Mapping[str, Tensor]) -> np.ndarray:
        """``(w + c) dL/dw`` of every scalar, for gradients with a batch dimension in front.

        Of a complex weight its size is scaled: the product is ``Re(conj(w) dL/dw)``.
        """
        count = len(next(iter(grads.values())))
        table = np.zeros((count, self.matrix.shape[0]))
        for tensor in self.tensors:
            if tensor.name in grads:
                weight = weights[tensor.name].detach() + tensor.shift
                product = weight.conj() * grads[tensor.name]
                table[:, tensor.scalars] = torch.real(product).reshape(count, -1).numpy()
        return table


def family(graph: Structure, most: int | None = None) -> Family:
    """The log-scales of a traced model's tensors.

    Example:
        >>> import torch, pathspace as ps
        >>> model = torch.nn.Sequential(
        ...     torch.nn.Linear(2, 3), torch.nn.ReLU(), torch.nn.Linear(3, 1)
        ... )
        >>> scales = family(ps.trace(model, torch.randn(1, 2)))
        >>> scales.matrix.shape, scales.units.shape
        ((13, 12), (12, 3))
    """
    blocks = {block.name: block for block in graph.blocks}
    tensors: list[ScaledTensor] = []
    parts: list[csr_array] = []
    moves: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
    scalars = columns = 0

    def add(name: str, part: csr_array, start: int, rows: int) -> None:
        nonlocal scalars
        here = slice(scalars, scalars + part.shape[0])
        shift, statistic = graph.shifts.get(name, 0.0), name not in graph.parameters
        columns_of = slice(start, start + part.shape[1])
        tensors.append(ScaledTensor(name, here, columns_of, rows, shift, statistic))
        scalars = here.stop

    for name, parameter in graph.captured.parameters.items():
        if not (parameter.is_floating_point() or parameter.is_complex()) or not parameter.numel():
            continue
        shape = tuple(parameter.shape)
        # rows and columns: the taps of a kernel have no scales of their own
        sides = [_along(shape, d) for d, n in enumerate(shape[:2]) if n > 1] or [_along(shape)]
        block = blocks.get(name)
        ends = () if block is None else ((block.head, 1), (block.tail, -1))
        for ids, _ in ends:
            if all(_by_class(side, ids) is None for side in sides):
                sides.append(_along(shape, *(d for d, n in enumerate(ids.shape) if n > 1)))
        counts = [int(side.max()) + 1 for side in sides]
        starts = columns + np.cumsum([0, *counts])
        for ids, sign in ends:
            start, units = next(
                (start, units)
                for start, side in zip(starts, sides, strict=False)
                if (units := _by_class(side, ids)) is not None
            )
            moves.append((start + np.arange(len(units)), np.abs(units), sign * np.sign(units)))
        if most is not None and starts[-1] > most:
            raise Untested(
                f"it has more than {most:,} rows and columns, and a factorisation is made for at"
                " most as many; test parts of the model"
            )
        part = csr_array(hstack([_incidence(side, shape) for side in sides]))
        parts.append(part)
        add(name, part, columns, counts[0])
        columns = int(starts[-1])
    for statistic in graph.statistics:
        channels = statistic.units.reshape(-1).numpy()
        width = len(channels)
        for name, power in statistic.powers.items():
            add(name, power * eye_array(width, format="csr"), columns, width)
        stacked = [power * eye_array(width) for power in statistic.powers.values()]
        parts.append(csr_array(vstack(stacked)))
        moves.append((columns + np.arange(width), np.abs(channels), np.sign(channels)))
        columns += width
    places, moved, signs = (
        np.concatenate([np.zeros(0, int), *(m[k] for m in moves)]) for k in range(3)
    )
    ends_of = csr_array(coo_array((signs, (places, moved)), shape=(columns, graph.expand.shape[0])))
    matrix = csr_array(block_diag(parts)) if parts else csr_array((0, 0))
    return Family(tuple(tensors), matrix, csr_array((ends_of @ graph.expand)[:, 1:]))


def _along(shape: tuple[int, ...], *dims: int) -> Tensor:
    """A class for each index in some dimensions, in a shape that broadcasts to the tensor's."""
    wide = [n if d in dims else 1 for d, n in enumerate(shape)]
    return torch.arange(int(np.prod(wide, dtype=np.int64))).reshape(wide)


def _incidence(side: Tensor, shape: tuple[int, ...]) -> csr_array:
    """Scalars of a tensor and their classes, as a sparse matrix."""
    index = side.expand(shape).reshape(-1).numpy()
    entries = (np.ones(len(index)), (np.arange(len(index)), index))
    return csr_array(coo_array(entries, shape=(len(index), int(side.max()) + 1)))


def _by_class(side: Tensor, ids: Tensor) -> np.ndarray | None:
    """The unit of each class, or ``None`` where units differ within one."""
    side, ids = torch.broadcast_tensors(side, ids)
    units = torch.zeros(int(side.max()) + 1, dtype=torch.int64)
    units[side.reshape(-1)] = ids.reshape(-1)
    return units.numpy() if bool((units[side] == ids).all()) else None


class Untested(Exception):
    """Why nothing is tested."""


def _not_differentiable(error: Exception) -> Untested:
    return Untested(f"the model cannot be differentiated ({no_derivative(error)})")


class Sampler:
    """Samples of the derivatives of a model by the log-scales of a family.

    Attributes:
        alive: which scalars have had an effect.
        wrong: how many samples contradict a found unit.
        problem: why the last run gave no sample.
    """

    def __init__(self, bench: Workbench, scales: Family, units: csr_array) -> None:
        model = bench.model
        self.scales, self.units, self.model = scales, units, model
        self.generator = torch.Generator().manual_seed(bench.seed)
        held = tensors_of(model)
        self.weights = {tensor.name: held[tensor.name].detach() for tensor in scales.tensors}
        self.buffers = {
            name: buffer.detach()
            for name, buffer in model.named_buffers(remove_duplicate=False)
            if name not in self.weights
        }
        self.positive = {s.var for s in bench.graph.statistics if s.var is not None}
        self.terms = abs(scales.matrix) @ abs(units)
        self.alive = np.zeros(scales.matrix.shape[0], bool)
        self.runs = self.taken = self.wrong = 0
        self.problem = ""
        # whether the model runs without detaching anything, so that its derivatives are those
        # of its function
        self.through = True
        self.example = bench.inputs

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
        try:
            with quiet(), torch.enable_grad():
                grads = self._gradients(joined, weights, cotangents)
        except Exception as error:
            # (torch's engine and backward passes of the model's own, which may raise anything)
            raise _not_differentiable(error) from error
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
        """Gradients by the name of a tensor, one row for each cotangent."""
        leaves = list(weights.values())
        rows = [
            torch.autograd.grad(joined, leaves, each, retain_graph=True, materialize_grads=True)
            for each in cotangents
        ]
        return {
            name: torch.stack([gradient.to_dense() for gradient in column])
            for name, column in zip(weights, zip(*rows, strict=True), strict=True)
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
            except Exception as error:
                # (whatever the model's code raises)
                reason = error
        else:
            raise _not_differentiable(reason) from reason
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
