"""One run of a model: its outputs, how its rectifiers are switched, the types it computes in."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from .copies import safe_deepcopy
from .isolation import quiet, seed_torch, torch_kept
from .modes import as_written, precision
from .nested import leaves, mapped, real_leaves
from .values import with_numbers
from .walk import holders, tensors_of

# above this many weights a float64 copy with gradients would cost more memory than the model itself
LARGE = 30_000_000
# a sum is told from 0 where it is this many times larger than its rounding error
ROUNDED = 64
GATES = frozenset(
    f"aten.{name}" for name in "relu relu_ leaky_relu leaky_relu_ _prelu_kernel threshold".split()
)


class Activations(TorchDispatchMode):
    """Record which way every rectifier is switched while a model runs."""

    # branches of torch.cond run without being looked into
    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[Tensor] = []
        self.types: set[torch.dtype] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if str(getattr(func, "overloadpacket", "")) in GATES and isinstance(args[0], Tensor):
            # signs, with 0 where rounding alone could decide
            value = args[0].detach()
            size = value.abs().amax() if value.numel() else 0
            # relative to the largest, in the types seen so far
            rounding = max([1e-9, *(ROUNDED * torch.finfo(dtype).eps for dtype in self.types)])
            known = value.abs() > rounding * size
            self.seen.append(torch.where(known, value.sign(), 0).to(torch.int8))
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.is_floating_point():
            self.types.add(result.dtype)
        return result


@dataclass(frozen=True)
class ForwardRun:
    """Outputs of one run, joined, the activations on the way, and the types it computed in."""

    outputs: Tensor
    activations: list[Tensor]
    types: frozenset[torch.dtype] = frozenset()


@contextmanager
def computing_in(dtype: torch.dtype) -> Iterator[None]:
    """Let the tensors that a model makes while it runs (zero states, masks) have its own type."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(default)


def cast(tree: Any, dtype: torch.dtype) -> Any:
    """Nested inputs with floating point tensors converted."""
    return mapped(lambda leaf: leaf.to(dtype) if leaf.is_floating_point() else leaf, tree)


def run_forward(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    weights: Mapping[str, Tensor] | None = None,
    seed: int = 0,
) -> ForwardRun:
    """Run a model with some parameters replaced, and the same random numbers every time."""
    recorder = Activations()
    own = {name: buffer.clone() for name, buffer in model.named_buffers()}
    if sum(parameter.numel() for parameter in model.parameters()) <= LARGE:
        # (some models write into their weights, as those with a constraint of their norm)
        own |= {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    # models that differentiate in their forward ask for gradients by their parameters
    named = model.named_parameters(remove_duplicate=False)
    wanted = {name for name, parameter in named if parameter.requires_grad}
    given = {
        name: tensor.detach().requires_grad_() if name in wanted else tensor
        for name, tensor in (own | dict(weights or {})).items()
    }
    with quiet(), computing_in(precision(model)), torch.no_grad(), as_written(), recorder:
        seed_torch(seed)
        outputs = evaluate(model, given, args, kwargs)
    parts = [leaf.detach().reshape(-1).double() for leaf in real_leaves(outputs)]
    joined = torch.cat(parts) if parts else torch.zeros(0, dtype=torch.float64)
    return ForwardRun(joined, recorder.seen, frozenset(recorder.types))


def difference(before: ForwardRun, after: ForwardRun) -> float:
    """Largest difference of outputs, relative to the largest finite output."""
    worst, size = _gap(before.outputs, after.outputs)
    return worst / size if size else worst


def _gap(before: Tensor, after: Tensor) -> tuple[float, float]:
    """Largest difference, and largest finite entry; what is infinite or NaN has to stay so."""
    if not before.numel():
        return 0.0, 0.0
    same = (before == after) | (before.isnan() & after.isnan())
    worst = float(torch.where(same, 0, (before - after).abs()).max())
    size = float(torch.where(before.isfinite(), before.abs(), 0).max())
    return math.inf if math.isnan(worst) else worst, size


def seen(run: ForwardRun) -> bool:
    """Whether any output is a number other than 0, which could change."""
    return bool((run.outputs.isfinite() & (run.outputs != 0)).any())


def switched(before: ForwardRun, after: ForwardRun) -> tuple[int, int]:
    """Rectifiers switched differently, and rectifiers seen."""
    wrong = total = 0
    for one, other in zip(before.activations, after.activations, strict=True):
        wrong += int(((one != other) & (one != 0) & (other != 0)).sum())
        total += one.numel()
    return wrong, total


def rounding_decides(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    seed: int,
    before: ForwardRun,
    tolerance: float,
) -> bool:
    """Whether as much changes when every weight changes in its last digits only.

    Outputs that are 0 in exact arithmetic (the mean of what an instance norm has centred) are
    rounding errors, and nothing can be said about their changes.
    """
    generator, weights = torch.Generator().manual_seed(seed), {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.is_floating_point() and parameter.layout == torch.strided:
            digits = torch.randint(-8, 9, parameter.shape, generator=generator).to(parameter)
            weights[name] = parameter.detach() * (1 + digits * torch.finfo(parameter.dtype).eps)
    after = run_forward(model, args, kwargs, weights, seed)
    return difference(before, after) > tolerance or switched(before, after)[0] > 0


def outputs(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], seed: int | None = None
) -> list[Tensor]:
    """All tensors that a model returns in evaluation mode, with random numbers from a seed."""
    before = {module: module.training for module in model.modules()}
    kept = nullcontext() if seed is None else torch_kept(seed)
    try:
        with quiet(), torch.no_grad(), kept:
            found = model.eval()(*args, **kwargs)
        return [leaf for leaf in leaves(found) if isinstance(leaf, Tensor)]
    finally:
        for module, training in before.items():
            module.training = training


def distance(one: Sequence[Tensor], two: Sequence[Tensor]) -> float:
    """Largest difference, relative to the largest entry; infinite for other shapes."""
    if [part.shape for part in one] != [part.shape for part in two]:
        return math.inf
    pairs = [(a, b) for a, b in zip(one, two, strict=True) if a.dtype.is_floating_point]
    gaps = (_gap(b, a) for a, b in pairs)
    return max((worst / max(size, 1e-30) for worst, size in gaps), default=0.0)


def evaluate(
    model: nn.Module,
    tensors: Mapping[str, Tensor],
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
) -> Any:
    """Run a copy of a model with the model's tensors, or others in their place: neither attributes,
    hooks and generators of its modules nor the inputs are changed.

    A shared tensor is replaced everywhere, also in lists, whichever of its names is given.
    """
    own = tensors_of(model)
    held = {id(tensor): tensor for tensor in own.values()}
    held |= {id(tensor): tensors[name] for name, tensor in own.items() if name in tensors}
    # (modes would see how the tensors of attributes are copied)
    with with_numbers(), torch._C.DisableTorchFunction():
        copy = safe_deepcopy(model, replaced=held)
    args, kwargs = mapped(Tensor.clone, (tuple(args), dict(kwargs or {})))
    return copy(*args, **kwargs)


def replacements(
    model: nn.Module, given: Mapping[int, Tensor]
) -> list[tuple[dict[str, Any], str, Any]]:
    """Every place in a model where tensors are held that are to be replaced, by their ids: the
    dictionary, the key, and the value to put there, a tensor or a container with tensors in it.
    """
    found: list[tuple[dict[str, Any], str, Any]] = []
    for _, module, attributes in holders(model):
        for held in (module._parameters, module._buffers):
            found += [(held, key, given[id(v)]) for key, v in held.items() if id(v) in given]
        found += [
            (vars(module), key, pytree.tree_map(lambda leaf: given.get(id(leaf), leaf), value))
            for key, value in attributes
            if any(id(leaf) in given for leaf in pytree.tree_leaves(value))
        ]
    return found
