"""The copy of a model on which theorems are measured: its weights are moved and redrawn in
place, and its outputs compared within one tolerance for each type.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..errors import UnsupportedError
from ..gauge.moves import move_
from ..gauge.rescale import rescale_
from ..graph.structure import Structure
from ..models.isolation import values_kept
from ..models.modes import precision, without_eps
from ..models.nested import mapped
from ..models.refusals import check_runs
from ..models.running import LARGE, ForwardRun, cast, rounding_decides, run_forward
from ..models.stand_in import stand_in
from ..models.walk import holders, tensors_of
from ..reduction import ReductionGraph

Inputs = tuple[Sequence[Any], Mapping[str, Any]]
# largest change of the outputs, relative to the largest output, that counts as rounding
TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-3, torch.bfloat16: 3e-1, torch.float16: 1e-1}
# powers of two by which units are rescaled at most; of sums with a constant, a type has only so
# many digits
LARGEST = {torch.float64: 12, torch.float32: 4}


def bench_copy(
    model: nn.Module, graph: Structure, inputs: tuple[Any, Any]
) -> tuple[nn.Module, torch.dtype]:
    """A module to measure on: a float64 copy, or one that shares the tensors of a large model. A
    model that insists on another precision (in its forward) is measured on a copy in its own.
    """
    own = precision(model)
    if graph.num_weights > LARGE:
        if graph.captured.written:
            raise UnsupportedError(
                f"verify found a {type(model).__name__} of {graph.num_weights:,} weights that"
                f" writes into its own, expected at most {LARGE:,} for it; verify a smaller one."
            )
        return stand_in(model), own
    bench = in_double(stand_in(model, share_tensors=False))
    try:
        run_forward(bench, *cast(inputs, torch.float64))
    except (RuntimeError, ValueError):
        # what can be captured need not run: then one sentence says so
        check_runs(model, *inputs)
        return stand_in(model, share_tensors=False), own
    return bench, torch.float64


def in_double(model: nn.Module) -> nn.Module:
    """A copy with all tensors in double precision, complex ones and plain attributes too."""

    def wide(value: Any) -> Any:
        if not isinstance(value, Tensor) or not (value.is_floating_point() or value.is_complex()):
            return value
        return value.to(torch.complex128 if value.is_complex() else torch.float64)

    for tensor in tensors_of(model).values():
        tensor.data = wide(tensor.data)
    for _, module, attributes in holders(model):
        for key, value in attributes:
            if any(wide(leaf) is not leaf for leaf in pytree.tree_leaves(value)):
                vars(module)[key] = pytree.tree_map(wide, value)
    return model


@contextmanager
def holding(model: nn.Module, values: Mapping[str, Tensor]) -> Iterator[None]:
    """A context in which tensors of a model have other values, in place."""
    tensors = {name: tensor for name, tensor in tensors_of(model).items() if name in values}
    with values_kept(tensors.values()):
        with torch.no_grad():
            for name, tensor in tensors.items():
                tensor.copy_(values[name])
        yield


@contextmanager
def rescaled_in_place(model: nn.Module, graph: Structure, phi: Tensor) -> Iterator[None]:
    """A context in which a model is rescaled.

    A large one is rescaled by powers of two, and back, which is exact in floating point and needs
    no second copy of the weights.
    """
    tensors, large = tensors_of(model), graph.num_weights > LARGE
    if large:
        phi = (phi / math.log(2)).round() * math.log(2)
    factors = graph.gauge_factors(phi)
    # (of a large model only what is shifted is rounded, which is small)
    with values_kept([tensors[name] for name in (graph.shifts if large else factors)]):
        with torch.no_grad():
            for name, pair in factors.items():
                move_(tensors[name], *pair, graph.shifts.get(name, 0.0))
        try:
            yield
        finally:
            if large:
                rescale_(model, graph, -phi)


@dataclass(frozen=True, eq=False)
class Workbench:
    """A model to measure on, which afterwards is as before, with its graph and inputs."""

    graph: ReductionGraph
    model: nn.Module
    inputs: Inputs
    seed: int = 0

    @property
    def large(self) -> bool:
        """Whether a second copy of the weights would be too much."""
        return self.graph.num_weights > LARGE

    @property
    def largest_power(self) -> float:
        """The largest power of scales that a weight meets: 1 without products."""
        forms = self.graph.forms
        return float(abs(forms).sum(1).max()) if forms.shape[0] else 1.0

    def powers(self, dtype: torch.dtype, seed: int) -> Tensor:
        """Log-scales to measure with, as large as rounding beside constants allows."""
        return self.graph.random_powers(seed, LARGEST.get(dtype, 1) if self.graph.shifts else 12)

    def run(self) -> ForwardRun:
        """A run of the model as it stands; random operations draw the same numbers every time."""
        return run_forward(self.model, *self.inputs, seed=self.seed)

    def rescaled(self, phi: Tensor) -> ForwardRun:
        """A run of the rescaled model."""
        with rescaled_in_place(self.model, self.graph, phi):
            return self.run()

    def without_eps(self) -> AbstractContextManager[int]:
        """A context in which normalisations have next to no ``eps``."""
        return without_eps(self.model, self.graph.folded_eps)

    def depends_on_eps(self, layers: int) -> bool:
        """Whether a run without ``eps``, which ``layers`` normalisations have, is another run."""
        return bool(layers or self.graph.folded_eps or self.graph.has_cuts)

    def resolution(self, before: ForwardRun, any_factor: bool = False) -> tuple[torch.dtype, float]:
        """The type to whose precision a rescaling can be seen, and the largest change that counts
        as rounding: the model's, or a coarser one of its steps, which round sums and other factors
        than powers of two (``any_factor``). Powers of scales multiply rounding errors.
        """
        coarser = before.types if self.graph.shifts or any_factor else ()
        types = [precision(self.model), *coarser]
        dtype = max(types, key=lambda each: TOLERANCE.get(each, 1e-3))
        rounding = 16 * self.largest_power * torch.finfo(dtype).eps
        return dtype, max(TOLERANCE.get(dtype, 1e-3), rounding)

    def rounding_decides(self, before: ForwardRun, tolerance: float) -> bool:
        """Whether other last digits of the weights change as much."""
        own = (self.model, *self.inputs, self.seed)
        return not self.large and rounding_decides(*own, before, tolerance)


def redrawn(
    model: nn.Module, seed: int, gentle: bool = False, unit: bool = False
) -> dict[str, Tensor]:
    """Other values for all parameters and running statistics; ``gentle`` ones keep their signs, and
    are small positive numbers for zeros. With parameters of ``unit`` variance for each row every
    part of a network matters, also one that starts small.
    """
    generator = torch.Generator().manual_seed(seed)
    parameters = dict(model.named_parameters())
    result = {}
    for name, tensor in (*parameters.items(), *model.named_buffers()):
        kind = "" if name in parameters else name.rpartition(".")[2]
        real = tensor.is_floating_point() or tensor.is_complex()
        whole = real and tensor.numel() and tensor.layout == torch.strided
        if not whole or kind not in ("", "running_mean", "running_var"):
            continue
        noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float64).to(tensor)
        spread = float(tensor.detach().abs().double().square().mean().sqrt()) or 0.1
        if unit and not kind:
            result[name] = noise / (tensor[0].numel() if tensor.dim() > 1 else 1) ** 0.5
        elif gentle or kind == "running_var":
            fresh = tensor * (0.5 * noise).exp()
            result[name] = torch.where(tensor == 0, 0.1 * spread * noise.abs(), fresh)
        else:
            result[name] = tensor + (0.3 if kind else 0.5 * spread) * noise
    return {name: value.detach() for name, value in result.items()}


@torch.no_grad()
def draw_zeros(model: nn.Module, seed: int) -> int:
    """Fill parameters that are 0 throughout with small random numbers, and count these."""
    fresh, count = redrawn(model, seed), 0
    for name, parameter in model.named_parameters():
        if name in fresh and not parameter.any():
            parameter.copy_(fresh[name])
            count += parameter.numel()
    return count


def scaled(tree: Any, size: float) -> Any:
    """Nested inputs with floating-point tensors multiplied, but for masks (infinite entries)."""

    def times(leaf: Tensor) -> Tensor:
        plain = leaf.is_floating_point() and leaf.layout == torch.strided
        return leaf * size if plain and size != 1 and bool(leaf.isfinite().all()) else leaf

    return mapped(times, tree)


def other_inputs(inputs: Any, seed: int, near: bool = True) -> Any | None:
    """Nested inputs with other numbers, ``near`` these or of the same size, and whole numbers in
    another order where they are not to be near or there are no others; ``None`` if nothing can be
    changed.
    """
    generator = torch.Generator().manual_seed(seed)
    tensors = [leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, Tensor)]
    real = any(leaf.is_floating_point() for leaf in tensors)
    changed = False

    def other(leaf: Tensor) -> Tensor:
        nonlocal changed
        kept = leaf.is_floating_point() != real and (near or leaf.dtype == torch.bool)
        if leaf.layout != torch.strided or kept:
            return leaf
        if not leaf.is_floating_point():
            order = torch.randperm(leaf.numel(), generator=generator).to(leaf.device)
            fresh = leaf.reshape(-1)[order].reshape(leaf.shape)
        elif bool(leaf.isfinite().all()):
            noise = torch.randn(leaf.shape, generator=generator, dtype=torch.float64).to(leaf)
            spread = float(leaf.double().square().mean().sqrt()) or 1.0
            fresh = leaf * (1 + 0.3 * noise) + 0.1 * noise if near else spread * noise
        else:
            return leaf
        changed |= not torch.equal(fresh, leaf)
        return fresh

    result = mapped(other, inputs)
    return result if changed else None
