"""Check that rescaling does not change the function, by two measurements on the running model.

*Gradient balance* takes one backward pass. *Rescaling*: the units are scaled by random
powers of two up to 4096, which floating point arithmetic carries out without rounding, and
the outputs are compared.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..capture.refusals import no_derivative
from ..gauge.moves import moved
from ..gauge.rescale import rescale
from ..graph.structure import Structure
from ..models.modes import without_eps
from ..models.running import LARGE, ForwardRun, difference, run_forward, seen, switched
from ..models.walk import tensors_of
from .bench import resolution
from .gradient_balance import gradient_imbalance, misled, random_loss_gradients, rounded_otherwise

# scales drawn for a measurement stay within 2^-64 and 2^64, powers of them included
MOST_POWER = 64
TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-3, torch.bfloat16: 3e-1, torch.float16: 1e-1}
# powers of two by which units are rescaled at most; of sums with a constant, a
# type has only so many digits
LARGEST = {torch.float64: 12, torch.float32: 4}


def rescaled_weights(model: nn.Module, graph: Structure, phi: Tensor) -> dict[str, Tensor]:
    """Parameters and running statistics after a gauge transformation, as new tensors."""
    factors = graph.gauge_factors(phi)
    result = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if name in factors:
            result[name] = moved(tensor, *factors[name], graph.shifts.get(name, 0.0))
    return result


@contextmanager
def rescaled_in_place(model: nn.Module, graph: Structure, phi: Tensor) -> Iterator[None]:
    """Rescale by powers of two, and back: exact in floating point, and without a
    second copy of the weights.
    """
    tensors = tensors_of(model)
    # (what is shifted is rounded, but small)
    kept = {name: tensors[name].detach().clone() for name in graph.shifts}
    rescale(model, graph, phi)
    try:
        yield
    finally:
        rescale(model, graph, -phi)
        with torch.no_grad():
            for name, value in kept.items():
                tensors[name].copy_(value)


def run_rescaled(
    model: nn.Module,
    graph: Structure,
    inputs: tuple[Sequence[Any], Mapping[str, Any]],
    phi: Tensor,
    seed: int,
) -> ForwardRun:
    """A run of the rescaled model; a large one is rescaled in place, by powers of two, which can
    be taken back without a trace.
    """
    if graph.num_weights > LARGE:
        with rescaled_in_place(model, graph, (phi / math.log(2)).round() * math.log(2)):
            return run_forward(model, *inputs, seed=seed)
    return run_forward(model, *inputs, rescaled_weights(model, graph, phi), seed)


def random_powers(graph: Structure, seed: int, largest: int = 12) -> Tensor:
    """Log-scales of random powers of two between ``2^-largest`` and
    ``2^largest``, shape ``(num_units,)``.

    Scales of which weights meet high powers are drawn so much closer to 1 that these powers stay
    below ``2^64``: by fractional powers of two, which are rounded, where nothing else is left.
    """
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.randint(
        -largest, largest + 1, (graph.num_units,), generator=generator
    ).double()
    if graph.forms.shape[0]:
        sizes = abs(graph.forms.astype(np.float64))
        total = sizes.sum(1)
        # what the most demanding of the products that a unit takes part in allows it
        most = np.ones(graph.num_units)
        np.maximum.at(most, sizes.indices, np.repeat(total, np.diff(sizes.indptr)))
        room = torch.from_numpy(MOST_POWER / most)
        narrow = room < largest
        fraction = 2 * torch.rand(graph.num_units, generator=generator, dtype=torch.float64) - 1
        closer = torch.where(room < 1, fraction * room, (fraction * (room.floor() + 0.5)).round())
        exponents = torch.where(narrow, closer, exponents)
    return exponents * math.log(2)


def largest_power(graph: Structure) -> float:
    """The largest power of scales that a weight meets: 1 without products, 128 for a matrix
    used 128 times in depth.
    """
    return float(abs(graph.forms).sum(1).max()) if graph.forms.shape[0] else 1.0


def rounding_tolerance(graph: Structure, dtype: torch.dtype, tolerance: float) -> float:
    """``tolerance``, or more where a power is taken of scales, which
    multiplies their rounding errors.
    """
    return max(tolerance, 16 * largest_power(graph) * torch.finfo(dtype).eps)


def powers_for(graph: Structure, dtype: torch.dtype, seed: int) -> Tensor:
    """Log-scales to measure with: as large as rounding in a precision allows, where
    constants stand beside a scale.
    """
    return random_powers(graph, seed, LARGEST.get(dtype, 1) if graph.shifts else 12)


@torch.no_grad()
def draw_zeros(model: nn.Module, seed: int) -> int:
    """Fill parameters that are 0 throughout with small random numbers.

    Returns:
        How many numbers were drawn.
    """
    generator = torch.Generator().manual_seed(seed)
    count = 0
    for parameter in model.parameters():
        if parameter.is_floating_point() and parameter.numel() and not parameter.any():
            parameter.copy_(
                0.1 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            )
            count += parameter.numel()
    return count


def measure_invariance(
    graph: Structure, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], seed: int
) -> tuple[dict[str, Any], tuple[int, int]]:
    """Measure the invariance on ``model`` (a copy, or a model that is left exactly as it was).

    Returns:
        Evidence for the certificate, and how many rectifiers switched of how many
        seen under the rescaling.
    """
    before, drawn = run_forward(model, args, kwargs, seed=seed), 0
    dtype = resolution(graph, model, before)
    tolerance = rounding_tolerance(graph, dtype, TOLERANCE.get(dtype, 1e-3))
    if not seen(before) and graph.num_weights <= LARGE:
        # a head that starts at zero hides everything behind it
        drawn = draw_zeros(model, seed)
        before = run_forward(model, args, kwargs, seed=seed)
    silent, undefined = not seen(before), int(before.outputs.isnan().sum())
    largest = LARGEST.get(dtype, 1) if graph.shifts else 12
    phi = powers_for(graph, dtype, seed)

    def rescaled(before: ForwardRun) -> tuple[float, tuple[int, int]]:
        after = run_rescaled(model, graph, (args, kwargs), phi, seed)
        return difference(before, after), switched(before, after)

    as_it_stands, switches = rescaled(before)
    exact = as_it_stands
    unbalanced: float | None = None
    no_gradient = ""
    with without_eps(model, graph.folded_eps) as layers:
        if layers or graph.folded_eps or graph.has_cuts:
            exact, switches = rescaled(run_forward(model, args, kwargs, seed=seed))
        if graph.num_weights <= LARGE:
            weights = tensors_of(model)
            try:
                grads = random_loss_gradients(model, args, kwargs, seed)
                unbalanced = gradient_imbalance(graph, weights, grads)
                if math.isnan(unbalanced):
                    unbalanced, no_gradient = None, "gradients are not finite"
                elif unbalanced > tolerance:
                    others = list(rounded_otherwise(model, args, kwargs, seed))
                    unbalanced = gradient_imbalance(graph, weights, grads, others)
                if unbalanced is not None and exact <= tolerance < unbalanced:
                    wrong = misled(graph, model, (args, kwargs), grads, seed)
                    if wrong:
                        unbalanced = None
                        no_gradient = (
                            f"detached or of its own: the gradient of {wrong} is not the function's"
                        )
            except Exception as error:
                # a model that cannot be differentiated (it overwrites what its backward pass needs,
                # or that raises) can still be rescaled
                no_gradient = no_derivative(error)
    worst = max(exact, unbalanced or 0.0)
    words = f"outputs differ by {exact:.1e} after random rescaling by up to {2**largest}"
    words += f", gradients balance to {unbalanced:.1e} per unit" if unbalanced is not None else ""
    words += f", gradient balance not applicable ({no_gradient})" if no_gradient else ""
    if layers or graph.folded_eps or graph.has_cuts:
        words += f" (with eps = 0 in normalisation layers; {as_it_stands:.1e} as the model stands)"
    words += (
        f"; {drawn:,} weights of tensors that are all 0 were drawn at random, as the outputs are 0"
        if drawn
        else ""
    )
    words += (
        f"; {undefined:,} of {len(before.outputs):,} outputs are NaN, and stay so"
        if undefined
        else ""
    )
    words += (
        "; no output is a number other than 0, so that nothing could have been seen to change"
        if silent
        else ""
    )
    words = (
        words
        if len(before.outputs)
        else "the model returns no tensor in floating point, which could change"
    )
    evidence = {
        # (a model without outputs in floating point has nothing that could change)
        "holds": worst <= tolerance if len(before.outputs) else None,
        "evidence": f"{words}; tolerance {tolerance:.0e} in {str(dtype).removeprefix('torch.')}",
        "max_relative_violation": worst,
        "tolerance": tolerance,
        "rescaling": exact,
        "rescaling_as_it_stands": as_it_stands,
        "gradient_balance": unbalanced,
        "normalisation_layers": layers,
        "weights_drawn": drawn,
        "vacuous": bool(silent),
        "dtype": str(dtype).removeprefix("torch."),
    }
    return evidence, switches
