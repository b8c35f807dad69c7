"""A copy of a model for experiments: without epsilons, in float64, with redrawn weights."""

from __future__ import annotations

import copy
import inspect
import math
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from .document import Rejected, require

# factors of the inputs, and manners of drawing weights, one after the other
SIZES = (1.0, 1.0, 100.0, 1.0, 0.01)
MANNERS = ("near", "new", "signs", "new")
# models of more weights than this are compared in their own precision, smaller ones in float64
LARGE = 30_000_000


def duplicate(model: Any) -> Any:
    """A copy without gradient histories; objects that cannot be copied are shared."""
    memo: dict[int, Any] = {}
    parts = (vars(module).items() for module in model.modules())
    held = [value for part in parts for key, value in part if key != "_modules"]
    for value in {id(leaf): leaf for leaf in tree_leaves(held)}.values():
        if not isinstance(value, Tensor):
            try:
                copy.deepcopy(value, dict(memo))
            except (TypeError, pickle.PickleError):
                memo[id(value)] = value
        elif not value.is_leaf:
            memo[id(value)] = value.detach().clone()
    return copy.deepcopy(model, memo)


def call_arguments(
    model: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Inputs of a model; a single mapping from names to inputs gives all of them by keyword."""
    if len(args) == 1 and not kwargs and isinstance(args[0], Mapping):
        try:
            inspect.signature(model.forward).bind(**args[0])
        except (TypeError, ValueError):
            return tuple(args), {}
        return (), dict(args[0])
    return tuple(args), dict(kwargs)


@contextmanager
def states_kept(seed: int | None = None) -> Iterator[None]:
    """A context that may begin with a seed, and leaves torch's random states as they were."""
    used = torch.cuda.is_initialized()
    with torch.random.fork_rng(devices=range(torch.cuda.device_count()) if used else ()):
        # (torch.manual_seed would also replace the user's seed for GPUs not in use yet)
        if seed is not None:
            torch.default_generator.manual_seed(seed)
            if used:
                torch.cuda.manual_seed_all(seed)
        yield


def with_tiny_eps(bench: Any, args: Any, kwargs: Any) -> tuple[Any, Any, Any]:
    """A copy of a model whose normalisations have almost no epsilon, in float64 if it runs so.

    The symmetry of a normalisation is exact without its epsilon, which torch requires to be
    positive. Normalisations by running statistics keep it, because the variance can be changed so
    that its sum with the epsilon is rescaled.
    """
    for module in bench.modules():
        if isinstance(module, torch.nn.GroupNorm):
            module.register_forward_pre_hook(_alone)
        if getattr(module, "running_var", None) is not None and not module.training:
            continue
        for name in ("eps", "variance_epsilon"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 1e-30)
    if sum(parameter.numel() for parameter in bench.parameters()) > LARGE:
        return bench, args, kwargs
    try:
        fine = duplicate(bench).double()
        inputs = _mapped(lambda leaf: leaf.double() if _is_real(leaf) else leaf, (args, kwargs))
        with torch.no_grad(), states_kept():
            duplicate(fine)(*inputs[0], **inputs[1])
    except Exception:
        # the model runs only in its own precision
        return bench, args, kwargs
    return fine, *inputs


def _alone(module: Any, args: tuple[Any, ...]) -> None:
    """Set the epsilon to 1 for groups of one number: their result is 0, up to rounding."""
    module.eps = 1.0 if args[0][:1].numel() == module.num_groups else 1e-30


def _mapped(function: Callable[[Any], Any], value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _mapped(function, entry) for key, entry in value.items()}
    if type(value) in (tuple, list):
        return type(value)(_mapped(function, entry) for entry in value)
    return function(value)


def _is_real(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _redrawn_input(value: Any, size: float, generator: torch.Generator, drawn: bool) -> Any:
    """An input with finite floating-point numbers times a size.

    With ``drawn`` they are random numbers of the same magnitude, and whole numbers are others in
    their range. Masks (booleans, tensors with infinite entries) stay.
    """
    if not isinstance(value, Tensor) or value.layout != torch.strided or not value.numel():
        return value
    if value.is_floating_point():
        if not bool(value.isfinite().all()):
            return value
        if drawn:
            spread = float(value.double().square().mean().sqrt()) or 1.0
            value = spread * torch.randn(value.shape, generator=generator).to(value)
        return value * size
    if drawn and value.dtype in (torch.int32, torch.int64):
        low, high = int(value.min()), int(value.max())
        return torch.randint(low, high + 1, value.shape, generator=generator).to(value)
    return value


def has_scale(value: Any) -> bool:
    """Whether a tensor holds real or complex numbers."""
    return bool(value.is_floating_point() or value.is_complex())


def numbers_of(model: Any) -> list[tuple[str, Any]]:
    """Parameters and running statistics of a model, which can be redrawn."""
    found = [("", parameter) for parameter in model.parameters()]
    buffers = ((name.rpartition(".")[2], value) for name, value in model.named_buffers())
    found += [pair for pair in buffers if pair[0] in ("running_mean", "running_var")]
    return [(name, value) for name, value in found if has_scale(value) and value.numel()]


def redrawn_values(name: str, value: Any, seed: int, manner: str) -> Any:
    """Random values of the same magnitude: ``"near"`` the model's own; ``"new"``, which turns on
    what is always off in the model; or with its ``"signs"``, as running variances always are.
    Those of ``"unit"`` variance let every part of a network matter, also one that starts small.
    """
    generator = torch.Generator().manual_seed(1_000 * seed + value.numel())
    noise = torch.randn(value.shape, generator=generator, dtype=torch.float64).to(value)
    spread = float(value.abs().double().square().mean().sqrt()) or 0.1
    if name == "running_var" or manner == "signs":
        return torch.where(value == 0, 0.1 * spread * noise.abs(), value * (0.5 * noise).exp())
    if name == "running_mean":
        return value + 0.3 * noise
    if manner == "unit":
        return noise / (value[0].numel() if value.dim() > 1 else 1) ** 0.5
    return spread * noise if manner == "new" else value + 0.5 * spread * noise


def scale_exponents(
    products: list[dict[int, int]], units: int, generator: np.random.Generator, largest: int
) -> np.ndarray:
    """Exponents of two for all ids; smaller ones for units with high powers."""
    phi = np.concatenate([[0.0], generator.integers(-largest, largest + 1, units)])
    most = np.ones(units + 1)
    for factors in products:
        total = float(sum(abs(times) for times in factors.values()))
        for unit in factors:
            most[unit] = max(most[unit], total)
    room = 64 / most
    fraction = generator.uniform(-1, 1, units + 1)
    closer = np.where(room < 1, fraction * room, np.round(fraction * np.floor(room)))
    phi = np.where(room < largest, closer, phi)
    derived = [sum(times * phi[unit] for unit, times in factors.items()) for factors in products]
    return np.concatenate([phi, np.array(derived, float)])


class Runner:
    """A copy of a model and its inputs, which runs at numbers that are drawn for both."""

    def __init__(
        self, model: Any, args: Sequence[Any], kwargs: Mapping[str, Any], tolerance: float
    ) -> None:
        try:
            twin = duplicate(model)
        except Exception as error:
            kind = type(error).__name__
            raise Rejected(f"the model cannot be copied: {kind} ({error})") from error
        given = call_arguments(model, args, kwargs)
        self.model, self.args, self.kwargs = with_tiny_eps(twin, *given)
        self.named = dict(self.model.named_parameters(remove_duplicate=False))
        self.generator = torch.Generator().manual_seed(0)
        self.tolerance = tolerance

    def begin(self) -> Tensor:
        """The outputs at the numbers that are given, which those of all draws resemble.

        Parameters that are 0 are filled if all outputs are 0, because a head of zeros hides
        everything before it.
        """
        first = self.run()
        if not first.any():
            for parameter in self.model.parameters():
                if parameter.is_floating_point() and not parameter.any():
                    drawn = torch.randn(parameter.shape, generator=self.generator)
                    parameter.data.copy_(0.1 * drawn)
            first = self.run()
        require(not first.isnan().any(), "some outputs of the model are not numbers")
        self._inputs = self.args, self.kwargs
        self._own = [(name, each, each.detach().clone()) for name, each in numbers_of(self.model)]
        return first

    def run(self, new: Sequence[tuple[Tensor, Tensor]] = ()) -> Tensor:
        """All outputs in one vector, at other values of some tensors, which are undone."""
        kept = [(tensor, tensor.detach().clone()) for tensor, _ in new]
        with torch.no_grad():
            for tensor, value in new:
                tensor.copy_(value)
            found = self.outputs()
            for tensor, value in kept:
                tensor.copy_(value)
        return found

    def outputs(self) -> Tensor:
        """All outputs in one vector, with gradients where they are wanted."""
        try:
            with states_kept(0):
                outputs = self.model(*self.args, **self.kwargs)
        except Exception as error:
            # (whatever the model's own code raises)
            kind = type(error).__name__
            raise Rejected(f"the model fails on these inputs: {kind} ({error})") from error
        found = [leaf.double().reshape(-1) for leaf in _leaves(outputs) if leaf.is_floating_point()]
        return torch.cat(found) if found else torch.zeros(0)

    def draw(self, number: int, manner: str = "") -> Tensor | None:
        """Other weights and inputs, and the outputs; ``None`` if none is a number other than 0."""
        size = SIZES[number % len(SIZES)]
        # zeros hide differences: no scale changes a bias or a running mean of 0
        for each in (manner or MANNERS[number % len(MANNERS)], "signs"):
            for name, value, own in self._own:
                value.data.copy_(redrawn_values(name, own, number, each))
            for factor, drawn in ((size, number % 4 != 0), (size, False), (1.0, False)):
                other = partial(_redrawn_input, size=factor, generator=self.generator, drawn=drawn)
                self.args, self.kwargs = _mapped(other, self._inputs)
                try:
                    found = self.run()
                except Rejected:
                    continue
                if not found.isnan().any() and could_change(found):
                    return found
        return None

    def rounds(self, before: Tensor, eps: float = 0.0) -> bool:
        """Whether last digits of weights, or ``eps``, change the outputs more than is tolerated."""
        new = []
        for _, value in numbers_of(self.model):
            noise = torch.randn(value.shape, generator=self.generator).to(value)
            factor = 1 + 4 * max(eps, torch.finfo(value.dtype).eps) * noise
            new.append((value, value.detach() * factor))
        return relative_change(before, self.run(new)) > self.tolerance


def could_change(outputs: Tensor) -> bool:
    """Whether any output is a number other than 0, which could change."""
    return bool(outputs[outputs.isfinite()].any())


def relative_change(before: Tensor, after: Tensor) -> float:
    """Largest change of outputs, relative to the largest of them."""
    # masked entries may be infinite, and must remain so
    gap = float((after - before).abs().masked_fill(after == before, 0).max())
    return gap / float(before[before.isfinite()].abs().max()) if not math.isnan(gap) else math.inf


def _leaves(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping | tuple | list):
        for entry in value.values() if isinstance(value, Mapping) else value:
            yield from _leaves(entry)
