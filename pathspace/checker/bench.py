"""A copy of a model for experiments: without epsilons, in float64, with redrawn weights."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from .document import Rejected, require

# factors of the inputs, and manners of drawing weights, one after the other
SIZES = (1.0, 1.0, 100.0, 1.0, 0.01)
MANNERS = ("near", "new", "signs", "new")
# models of more weights than this are compared in their own precision, smaller ones in float64
LARGE = 30_000_000


def is_bare(value: Any) -> bool:
    """Whether a tensor has a shape but no values."""
    return bool(getattr(value, "is_meta", False)) or type(value).__name__ == "FakeTensor"


def duplicate(model: Any) -> Any:
    """A copy without gradient histories; objects that cannot be copied are shared."""
    memo: dict[int, Any] = {}
    seen: set[int] = set()
    waiting = [model]
    while waiting:
        value = waiting.pop()
        if id(value) in seen or isinstance(value, type):
            continue
        seen.add(id(value))
        if hasattr(value, "is_leaf"):
            if not value.is_leaf:
                memo[id(value)] = value.detach().clone()
        elif isinstance(value, Mapping):
            waiting += value.values()
        elif isinstance(value, list | tuple | set):
            waiting += value
        else:
            try:
                value.__reduce_ex__(4)
                waiting += getattr(value, "__dict__", {}).values()
            except Exception:
                memo[id(value)] = value
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
    import torch

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
    import torch

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
        inputs = _mapped(_wide, args), _mapped(_wide, kwargs)
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


def _wide(value: Any) -> Any:
    real = hasattr(value, "is_floating_point") and value.is_floating_point()
    return value.double() if real else value


def redrawn_inputs(value: Any, size: float, generator: Any, drawn: bool) -> Any:
    """Nested inputs with finite floating-point numbers times a size.

    With ``drawn`` they are random numbers of the same magnitude, and whole numbers are others in
    their range. Masks (booleans, tensors with infinite entries) stay.
    """
    return _mapped(lambda leaf: _redrawn(leaf, size, generator, drawn), value)


def _redrawn(value: Any, size: float, generator: Any, drawn: bool) -> Any:
    import torch

    if "strided" not in str(getattr(value, "layout", "")) or not value.numel():
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
    for module in model.modules():
        held = ((name, getattr(module, name, None)) for name in ("running_mean", "running_var"))
        found += [(name, value) for name, value in held if hasattr(value, "is_floating_point")]
    return [(name, value) for name, value in found if has_scale(value) and value.numel()]


def redrawn_values(name: str, value: Any, seed: int, manner: str) -> Any:
    """Random values of the same magnitude: ``"near"`` the model's own; ``"new"``, which turns on
    what is always off in the model; or with its ``"signs"``, as running variances always are.
    Those of ``"unit"`` variance let every part of a network matter, also one that starts small.
    """
    import torch

    generator = torch.Generator().manual_seed(1_000 * seed + value.numel())
    noise = torch.randn(value.shape, generator=generator, dtype=torch.float64).to(value)
    spread = float(value.abs().double().square().mean().sqrt()) or 0.1
    if name == "running_var" or manner == "signs":
        return torch.where(value == 0, 0.1 * spread * noise.abs(), value * (0.5 * noise).exp())
    if name == "running_mean":
        return value + 0.3 * noise
    if manner == "unit":
        fan_in = value[0].numel() if value.dim() > 1 else 1
        return noise / fan_in**0.5
    return spread * noise if manner == "new" else value + 0.5 * spread * noise


def scale_exponents(
    products: list[dict[int, int]], units: int, generator: np.random.Generator, largest: int
) -> np.ndarray:
    """Exponents of two for all ids; smaller ones for units with high powers."""
    phi = np.concatenate(
        [np.zeros(1), generator.integers(-largest, largest + 1, units).astype(float)]
    )
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

    def __init__(self, model: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        import torch

        try:
            twin = duplicate(model)
        except Exception as error:
            raise Rejected(
                f"the model cannot be copied: {type(error).__name__} ({error})"
            ) from error
        self.model, self.args, self.kwargs = with_tiny_eps(
            twin, *call_arguments(model, args, kwargs)
        )
        self.generator = torch.Generator().manual_seed(0)

    def begin(self) -> Any:
        """The outputs at the numbers that are given, which those of all draws resemble.

        Parameters that are 0 are filled if all outputs are 0, because a head of zeros hides
        everything before it.
        """
        import torch

        first = self.run()
        if not first.any():
            for parameter in self.model.parameters():
                if parameter.is_floating_point() and not parameter.any():
                    drawn = torch.randn(parameter.shape, generator=self.generator)
                    parameter.data.copy_(0.1 * drawn)
            first = self.run()
        require(
            not first.isnan().any(), "some outputs of the model are not numbers on these inputs"
        )
        self._numbers, self._inputs = numbers_of(self.model), (self.args, self.kwargs)
        self._kept = [value.detach().clone() for _, value in self._numbers]
        return first

    def run(self) -> Any:
        """All outputs in one vector."""
        import torch

        with torch.no_grad():
            return self.outputs()

    def outputs(self) -> Any:
        """All outputs in one vector, with gradients where they are wanted."""
        import torch

        try:
            with states_kept(0):
                outputs = self.model(*self.args, **self.kwargs)
        except Exception as error:
            # (whatever the model's own code raises)
            raise Rejected(
                f"the model fails on these inputs: {type(error).__name__} ({error})"
            ) from error
        found = [leaf.double().reshape(-1) for leaf in _leaves(outputs) if leaf.is_floating_point()]
        return torch.cat(found) if found else torch.zeros(0)

    def draw(self, number: int, manner: str = "") -> Any:
        """Other weights and inputs; the outputs, or ``None`` if none is a number other than 0."""
        # zeros hide differences: no scale changes a bias or a running mean of 0
        for each in (manner or MANNERS[number % len(MANNERS)], "signs"):
            for (name, value), own in zip(self._numbers, self._kept, strict=True):
                value.data.copy_(redrawn_values(name, own, number, each))
            before = self._redraw_inputs(SIZES[number % len(SIZES)], number)
            if before is not None:
                return before
        return None

    def _redraw_inputs(self, size: float, number: int) -> Any:
        """Change the inputs, or leave them where the model does not take others."""
        for factor, drawn in ((size, number % 4 != 0), (size, False), (1.0, False)):
            self.args, self.kwargs = redrawn_inputs(self._inputs, factor, self.generator, drawn)
            try:
                found = self.run()
            except Rejected:
                continue
            if not found.isnan().any() and could_change(found):
                return found
        return None

    def rounded_otherwise(self, eps: float = 0.0) -> Any:
        """Outputs of weights that are other in their last digits, or by ``eps`` if that is more."""
        import torch

        numbers = numbers_of(self.model)
        kept = [value.detach().clone() for _, value in numbers]
        for _, value in numbers:
            noise = torch.randn(value.shape, generator=self.generator).to(value)
            value.data.mul_(1 + 4 * max(eps, torch.finfo(value.dtype).eps) * noise)
        after = self.run()
        for (_, value), own in zip(numbers, kept, strict=True):
            value.data.copy_(own)
        return after


def could_change(outputs: Any) -> bool:
    """Whether any output is a number other than 0, which could change."""
    return bool(outputs[outputs.isfinite()].any())


def relative_change(before: Any, after: Any) -> float:
    """Largest change of outputs, relative to the largest of them."""
    # masked entries may be infinite, and must remain so
    gap = float((after - before).abs().masked_fill(after == before, 0).max())
    return gap / float(before[before.isfinite()].abs().max()) if not math.isnan(gap) else math.inf


def _leaves(value: Any) -> Iterator[Any]:
    if hasattr(value, "is_floating_point"):
        yield value
    elif isinstance(value, Mapping):
        yield from _leaves(list(value.values()))
    elif isinstance(value, tuple | list):
        for entry in value:
            yield from _leaves(entry)
