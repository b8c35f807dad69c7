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
UNDIFFERENTIABLE = "the model cannot be differentiated: "


@dataclass(frozen=True, eq=False)
class ScaledTensor:
    """A parameter, or a running mean or variance of a normalisation: its log-scales (a running mean
    shares those of its variance), of which the first ``rows`` are those of rows.
    """

    name: str
    columns: slice
    rows: int


class Family:
    """All log-scales of a model: ``matrix`` is ``P``, sparse ``(scalars, R)``, with 2 in the rows
    of a variance; ``units`` has the log-scale of every scalar as a sum of those of the units that
    were found, sparse ``(scalars, H)``. Scalars go by ``tensors``, ``weights`` of parameters first.
    """

    def __init__(self, graph: Structure, most: int) -> None:
        blocks = {block.name: block for block in graph.blocks}
        self.tensors: list[ScaledTensor] = []
        parts, moves, width = [], [csr_array((0, graph.expand.shape[1]))], 0
        for name, parameter in graph.captured.parameters.items():
            real = parameter.is_floating_point() or parameter.is_complex()
            if not real or not parameter.numel():
                continue
            shape, block = tuple(parameter.shape), blocks.get(name)
            # rows and columns: the taps of a kernel have no scales of their own
            sides = [[d] for d, n in enumerate(shape[:2]) if n > 1] or [[]]
            move = csr_array((parameter.numel(), graph.expand.shape[1]))
            for ids, sign in () if block is None else ((block.head, 1), (block.tail, -1)):
                own = [d for d, n in enumerate(ids.shape) if n > 1]
                if not any({*own} <= {*side} for side in sides):
                    sides.append(own)
                every = ids.expand(shape).reshape(-1).numpy()
                move = move + sign * signed_rows(graph.expand, every)
            classes = [_classes(shape, side) for side in sides]
            columns = slice(width, width + sum(one.shape[1] for one in classes))
            if columns.stop > most:
                raise Untested(
                    f"it has more than {most:,} rows and columns, and a factorisation is made for"
                    " at most as many; test parts of the model"
                )
            self.tensors.append(ScaledTensor(name, columns, classes[0].shape[1]))
            parts.append(hstack(classes))
            moves.append(move)
            width = columns.stop
        self.weights = sum(move.shape[0] for move in moves)
        for statistic in graph.statistics:
            units, powers = statistic.units.reshape(-1).numpy(), statistic.powers
            columns = slice(width, width + len(units))
            self.tensors += [ScaledTensor(name, columns, len(units)) for name in powers]
            moves += [power * signed_rows(graph.expand, units) for power in powers.values()]
            parts.append(vstack([power * eye_array(len(units)) for power in powers.values()]))
            width = columns.stop
        self.matrix = csr_array(block_diag(parts)) if parts else csr_array((0, 0))
        self.units = csr_array(csr_array(vstack(moves))[:, 1:])


def _classes(shape: tuple[int, ...], dims: list[int]) -> csr_array:
    """Scalars of a tensor and their classes, one for each index in some dimensions."""
    wide = [n if d in dims else 1 for d, n in enumerate(shape)]
    number = np.arange(np.prod(wide, dtype=np.int64))
    index = np.broadcast_to(number.reshape(wide), shape).reshape(-1)
    return csr_array(eye_array(len(number), format="csr")[index])


class Untested(Exception):
    """Why nothing is tested."""


class Sampler:
    """Samples of the derivatives of a model by the log-scales of a family: which scalars have had
    an effect (``alive``), and how many samples contradict a found unit (``wrong``).
    """

    def __init__(self, bench: Workbench, scales: Family) -> None:
        self.bench, self.scales, held = bench, scales, tensors_of(bench.model)
        self.generator = torch.Generator().manual_seed(bench.seed)
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
            raise Untested(UNDIFFERENTIABLE + no_derivative(error)) from error
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
        along = np.abs((self.scales.units.T @ products.T).T)
        terms = (abs(self.scales.units).T @ np.abs(products).T).T
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
        named = model.named_buffers(remove_duplicate=False)
        tensors = {name: buffer.detach() for name, buffer in named} | weights
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
            raise Untested(UNDIFFERENTIABLE + no_derivative(reason)) from reason
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
