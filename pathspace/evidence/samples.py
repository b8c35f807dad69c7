"""Derivatives of outputs by log-scales of tensors, at random inputs, weights and cotangents.

``P`` maps one number per row and one per column of each tensor to a log-scale for every scalar
weight. Every gauge transformation that was found is of that form: where the reduction graph has
another pattern of units in a tensor, the pattern is a side of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import product

import numpy as np
import torch
from scipy.sparse import block_diag, csr_array, eye_array, hstack, vstack
from torch import Tensor

from ..graph.parts import signed_rows
from ..graph.structure import Structure
from ..models.isolation import quiet, seed_torch
from ..models.modes import IgnoreDetach, InDouble
from ..models.nested import real_leaves
from ..models.refusals import no_derivative
from ..models.running import computing_in, evaluate
from ..models.walk import tensors_of
from .bench import Workbench, other_inputs, redrawn, scaled

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
    """A parameter, or a running mean or variance of a normalisation: which scalars of the model it
    holds, in the order of ``P``, and its log-scales (a running mean shares those of its variance),
    of which the first ``rows`` are those of rows.
    """

    name: str
    scalars: slice
    columns: slice
    rows: int


@dataclass(frozen=True, eq=False)
class Family:
    """All log-scales of a model: ``matrix`` is ``P``, sparse ``(scalars, R)``, with 2 in the rows
    of a variance; ``units`` has the log-scale of every scalar as a sum of those of the units that
    were found, sparse ``(scalars, H)``.
    """

    tensors: tuple[ScaledTensor, ...]
    matrix: csr_array
    units: csr_array


def family(graph: Structure, most: int | None = None) -> Family:
    """The log-scales of a traced model's tensors, at most so many."""
    blocks = {block.name: block for block in graph.blocks}
    tensors: list[ScaledTensor] = []
    parts, moves = [], [csr_array((0, graph.expand.shape[1]))]
    scalars = columns = 0
    for name, parameter in graph.captured.parameters.items():
        if not (parameter.is_floating_point() or parameter.is_complex()) or not parameter.numel():
            continue
        shape, block = tuple(parameter.shape), blocks.get(name)
        # rows and columns: the taps of a kernel have no scales of their own
        sides = [_along(shape, d) for d, n in enumerate(shape[:2]) if n > 1] or [_along(shape)]
        move = csr_array((parameter.numel(), graph.expand.shape[1]))
        for ids, sign in () if block is None else ((block.head, 1), (block.tail, -1)):
            if not any(_is_constant(ids, side) for side in sides):
                sides.append(_along(shape, *(d for d, n in enumerate(ids.shape) if n > 1)))
            every = ids.expand(shape).reshape(-1).numpy()
            move = move + sign * signed_rows(graph.expand, every)
        width = sum(side.numel() for side in sides)
        if most is not None and columns + width > most:
            raise Untested(
                f"it has more than {most:,} rows and columns, and a factorisation is made for at"
                " most as many; test parts of the model"
            )
        parts.append(hstack([_incidence(side, shape) for side in sides]))
        moves.append(move)
        here, of = (slice(a, a + n) for a, n in ((scalars, move.shape[0]), (columns, width)))
        tensors.append(ScaledTensor(name, here, of, sides[0].numel()))
        scalars, columns = here.stop, of.stop
    for statistic in graph.statistics:
        width = statistic.units.numel()
        for name, power in statistic.powers.items():
            units = statistic.units.reshape(-1).numpy()
            moves.append(power * signed_rows(graph.expand, units))
            here, of = (slice(a, a + width) for a in (scalars, columns))
            tensors.append(ScaledTensor(name, here, of, width))
            scalars = here.stop
        parts.append(vstack([power * eye_array(width) for power in statistic.powers.values()]))
        columns += width
    matrix = csr_array(block_diag(parts)) if parts else csr_array((0, 0))
    return Family(tuple(tensors), matrix, csr_array(csr_array(vstack(moves))[:, 1:]))


def _along(shape: tuple[int, ...], *dims: int) -> Tensor:
    """A class for each index in some dimensions, in a shape that broadcasts to the tensor's."""
    wide = [n if d in dims else 1 for d, n in enumerate(shape)]
    return torch.arange(int(np.prod(wide, dtype=np.int64))).reshape(wide)


def _incidence(side: Tensor, shape: tuple[int, ...]) -> csr_array:
    """Scalars of a tensor and their classes, as a sparse matrix."""
    index = side.expand(shape).reshape(-1).numpy()
    return csr_array(eye_array(side.numel(), format="csr")[index])


def _is_constant(ids: Tensor, side: Tensor) -> bool:
    """Whether ids are the same within each class of a side."""
    ids, wide = torch.broadcast_tensors(ids, side)
    units = torch.zeros(side.numel(), dtype=torch.int64)
    units[wide.reshape(-1)] = ids.reshape(-1)
    return bool((units[wide] == ids).all())


class Untested(Exception):
    """Why nothing is tested."""


def _not_differentiable(error: Exception) -> Untested:
    return Untested(f"the model cannot be differentiated ({no_derivative(error)})")


class Sampler:
    """Samples of the derivatives of a model by the log-scales of a family: which scalars have had
    an effect (``alive``), and how many samples contradict a found unit (``wrong``).
    """

    def __init__(self, bench: Workbench, scales: Family, units: csr_array) -> None:
        self.bench, self.scales, self.units, model = bench, scales, units, bench.model
        self.generator = torch.Generator().manual_seed(bench.seed)
        held = tensors_of(model)
        self.weights = {tensor.name: held[tensor.name].detach() for tensor in scales.tensors}
        self.alive = np.zeros(scales.matrix.shape[0], bool)
        self.runs = self.taken = self.wrong = 0
        self.problem = ""

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
                products = self._products(joined, weights, cotangents)
        except Exception as error:
            # (torch's engine and backward passes of the model's own, which may raise anything)
            raise _not_differentiable(error) from error
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
        along = np.abs((self.units.T @ products.T).T)
        terms = (abs(self.units).T @ np.abs(products).T).T
        self.wrong += int((along > WRONG * (1 + terms)).any(1).sum())
        return np.asarray(rows[(along <= NOISE * terms + 1e-13).all(1)])

    def _products(
        self, joined: Tensor, weights: Mapping[str, Tensor], cotangents: Tensor
    ) -> np.ndarray:
        """``(w + c) dL/dw`` of all scalars, of sizes if complex; a row for each cotangent."""
        leaves, shifts, rows = list(weights.values()), self.bench.graph.shifts, []
        scaling = [w.detach().conj() + shifts.get(name, 0.0) for name, w in weights.items()]
        for each in cotangents:
            grads = torch.autograd.grad(
                joined, leaves, each, retain_graph=True, materialize_grads=True
            )
            pairs = zip(scaling, grads, strict=True)
            rows.append(torch.cat([torch.real(w * g.to_dense()).reshape(-1) for w, g in pairs]))
        return torch.stack(rows).numpy()

    def _outputs(self) -> tuple[dict[str, Tensor], Tensor | None]:
        """Run at the model's own weights twice, then at others: weights as leaves, and outputs."""
        model, given, seed = self.bench.model, self.bench.inputs, self.bench.seed + self.runs
        weights = self._drawn()
        self.runs += 1
        buffers = dict(model.named_buffers(remove_duplicate=False))
        tensors = {name: buffer.detach() for name, buffer in buffers.items()} | weights
        exponent = 4 * float(torch.rand((), generator=self.generator)) - 2
        inputs = scaled(other_inputs(given, seed, seed % 2 == 1) or given, 10**exponent)
        # (without detaching anything the derivatives are those of the function, but the model may
        # not run that way, or not take inputs that were drawn)
        for args, way in product((inputs, given), (IgnoreDetach, nullcontext)):
            try:
                with quiet(), computing_in(torch.float64), InDouble(), torch.enable_grad(), way():
                    seed_torch(seed)
                    # (of copies, because models write into buffers, and some into weights)
                    copies = {name: tensor.clone() for name, tensor in tensors.items()}
                    outputs = evaluate(model, copies, *args)
                break
            except Exception as error:
                # (whatever the model's code raises)
                reason = error
        else:
            raise _not_differentiable(reason) from reason
        found = [leaf.reshape(-1) for leaf in real_leaves(outputs) if leaf.requires_grad]
        if not found:
            self.problem = "no output has a derivative with respect to the weights"
            return weights, None
        joined = torch.cat([leaf.double() for leaf in found])
        return weights, joined[torch.isfinite(joined)]

    def _drawn(self) -> dict[str, Tensor]:
        """The model's own weights twice, then near ones, new ones, and mostly positive ones."""
        found, kind = {}, self.runs % 3
        fresh = redrawn(self.bench.model, self.bench.seed + self.runs, unit=kind > 0)
        for name, own in self.weights.items():
            value = fresh.get(name, own)
            if self.runs < 2 and bool(own.any()):
                value = own
            elif kind == 2 and own.dim() > 1 and not own.is_complex():
                # with mostly positive weights, several ReLUs in sequence pass a signal
                flipped = torch.rand(own.shape, generator=self.generator) < 0.2
                value = torch.where(flipped, value, value.abs())
            found[name] = value.clone().requires_grad_()
        return found
