"""Check that rescaling does not change the function, by two measurements on the running model.

*Gradient balance*: differentiating ``L(w) = L(gauge(phi) w)`` at ``phi = 0`` gives, for every unit, ``sum_in w g =
sum_out w g`` exactly; one backward pass in float64 tests
the whole analysis. *Rescaling*: the units are scaled by random powers of two up to 4096, which floating point
arithmetic carries out without rounding, and the outputs are compared.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from pathspace.capture import check_runs, quiet
from pathspace.eps import precision, without_eps
from pathspace.functional_call import evaluate
from pathspace.moves import moved
from pathspace.nested import leaves as leaves_of
from pathspace.nested import mapped
from pathspace.refusals import no_derivative
from pathspace.rescale import rescale
from pathspace.stand_in import repeatable, stand_in
from pathspace.structure import Structure

# above this many weights a float64 copy with gradients would cost more memory than the model itself
LARGE = 30_000_000
# scales drawn for a measurement stay within 2^-64 and 2^64, powers of them included
MOST_POWER = 64
TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-3, torch.bfloat16: 3e-1, torch.float16: 1e-1}
# powers of two by which units are rescaled at most; of sums with a constant, a type has only so many digits
LARGEST = {torch.float64: 12, torch.float32: 4}
# a sum is told from 0 where it is this many times larger than its rounding error
ROUNDED = 64
GATES = (
    "aten.relu",
    "aten.relu_",
    "aten.leaky_relu",
    "aten.leaky_relu_",
    "aten._prelu_kernel",
    "aten.threshold",
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
            self.seen.append(torch.where(value.abs() > self._rounding() * size, value.sign(), 0).to(torch.int8))
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.is_floating_point():
            self.types.add(result.dtype)
        return result

    def _rounding(self) -> float:
        """The error of a value, relative to the largest, that rounding may leave in the types seen so far."""
        return max([1e-9, *(ROUNDED * torch.finfo(dtype).eps for dtype in self.types)])


class Disturbed(Activations):
    """Change the results of some rectifiers, to see whether an output reads them.

    Args:
        chosen: for every call of a rectifier, a mask of what to change.
    """

    def __init__(self, chosen: Sequence[Tensor]) -> None:
        super().__init__()
        self._chosen = iter(chosen)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = len(self.seen)
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if len(self.seen) > known:
            result.copy_(torch.where(next(self._chosen), 2 * result.abs() + 1, result))
        return result


@dataclass(frozen=True)
class Run:
    """Outputs of one run, flattened and joined, the activations passed on the way, and the types it computed in."""

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


def bench_copy(model: nn.Module, graph: Structure, inputs: tuple[Any, Any]) -> tuple[nn.Module, torch.dtype]:
    """A module to measure on: a float64 copy, or where that is too large one that shares the model's tensors.

    A model that insists on another precision (it names one in its forward) is measured on a copy in its own.
    """
    own, written = precision(model), graph.captured.written.values()
    if graph.num_weights > LARGE:
        return repeatable(stand_in(model), written), own
    bench = repeatable(stand_in(model, share_tensors=False).double(), written)
    try:
        run(bench, *cast(inputs, torch.float64))
    except (RuntimeError, ValueError):
        # what can be captured need not run: then one sentence says so
        check_runs(model, *inputs)
        return repeatable(stand_in(model, share_tensors=False), written), own
    return bench, torch.float64


def cast(tree: Any, dtype: torch.dtype) -> Any:
    """Nested inputs with floating point tensors converted."""
    return mapped(lambda leaf: leaf.to(dtype) if leaf.is_floating_point() else leaf, tree)


def run(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    weights: Mapping[str, Tensor] | None = None,
    seed: int = 0,
    recorder: Activations | None = None,
) -> Run:
    """Run a model with some parameters replaced; random operations draw the same numbers every time."""
    recorder = Activations() if recorder is None else recorder
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    # models that differentiate in their forward ask for gradients by their parameters
    wanted = {name for name, parameter in model.named_parameters(remove_duplicate=False) if parameter.requires_grad}
    given = {n: w.detach().requires_grad_() if n in wanted else w for n, w in (weights or {}).items()}
    # torch.cond compiles its branches, and what is compiled while operations are recorded fails from then on (a model
    # with branches has been captured by now, and its capture has imported the compiler)
    compiler = "torch._dynamo" in sys.modules
    as_written = torch.compiler.set_stance("force_eager") if compiler else nullcontext()
    with quiet(), computing_in(precision(model)), torch.no_grad(), as_written, recorder:
        torch.manual_seed(seed)
        outputs = evaluate(model, {**buffers, **given}, args, kwargs)
    leaves = [
        leaf.detach().reshape(-1)
        for leaf in leaves_of(outputs)
        if isinstance(leaf, Tensor) and leaf.is_floating_point()
    ]
    joined = torch.cat([leaf.double() for leaf in leaves]) if leaves else torch.zeros(0, dtype=torch.float64)
    return Run(joined, recorder.seen, frozenset(recorder.types))


def resolution(graph: Structure, model: nn.Module, before: Run, any_factor: bool = False) -> torch.dtype:
    """The type to whose precision a rescaling can be seen: the model's, or a coarser one that it computes in.

    Powers of two pass through any type without rounding; other factors (``any_factor``) and sums do not.
    """
    own = precision(model)
    result: torch.dtype = max(
        {own, *(before.types if graph.shifts or any_factor else ())}, key=lambda dtype: torch.finfo(dtype).eps
    )
    return result


def difference(before: Run, after: Run) -> float:
    """Largest difference of outputs, relative to the largest finite output."""
    one, other = before.outputs, after.outputs
    size = float(torch.where(torch.isfinite(one), one.abs(), 0).max()) if len(one) else 0.0
    # masked outputs may be infinite or no numbers, and have to stay so
    same = (one == other) | (one.isnan() & other.isnan())
    worst = float(torch.where(same, 0, (one - other).abs()).max()) if len(one) else 0.0
    if math.isnan(worst):
        return math.inf
    return worst / size if size else worst


def seen(run: Run) -> bool:
    """Whether any output is a number other than 0, which could change."""
    return bool((run.outputs.isfinite() & (run.outputs != 0)).any())


def switched(before: Run, after: Run) -> tuple[int, int]:
    """Rectifiers switched differently, and rectifiers seen."""
    wrong = total = 0
    for one, other in zip(before.activations, after.activations, strict=True):
        wrong += int(((one != other) & (one != 0) & (other != 0)).sum())
        total += one.numel()
    return wrong, total


def unread(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], seed: int, before: Run, after: Run
) -> bool:
    """Whether no output reads the rectifiers that are switched differently: rows may be left out after them."""
    pairs = zip(before.activations, after.activations, strict=True)
    disturbed = Disturbed([(one != other) & (one != 0) & (other != 0) for one, other in pairs])
    return torch.equal(run(model, args, kwargs, seed=seed, recorder=disturbed).outputs, before.outputs)


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
    """Rescale by powers of two, and back: exact in floating point, and without a second copy of the weights."""
    tensors = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
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


def random_powers(graph: Structure, seed: int, largest: int = 12) -> Tensor:
    """Log-scales of random powers of two between ``2^-largest`` and ``2^largest``, shape ``(num_units,)``.

    Scales of which weights meet high powers are drawn so much closer to 1 that these powers stay below ``2^64``: by
    fractional powers of two, which are rounded, where nothing else is left.
    """
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.randint(-largest, largest + 1, (graph.num_units,), generator=generator).double()
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
    """The largest power of scales that a weight meets: 1 without products, 128 for a matrix used 128 times in depth."""
    return float(abs(graph.forms).sum(1).max()) if graph.forms.shape[0] else 1.0


def rounding_tolerance(graph: Structure, dtype: torch.dtype, tolerance: float) -> float:
    """``tolerance``, or more where a power is taken of scales, which multiplies their rounding errors."""
    return max(tolerance, 16 * largest_power(graph) * torch.finfo(dtype).eps)


def powers_for(graph: Structure, dtype: torch.dtype, seed: int) -> Tensor:
    """Log-scales to measure with: as large as rounding in a precision allows, where constants stand beside a scale."""
    return random_powers(graph, seed, LARGEST.get(dtype, 1) if graph.shifts else 12)


def sums(graph: Structure, weights: Mapping[str, Tensor], grads: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """``sum_in w g - sum_out w g`` and ``sum |w g|`` for the root and every unit.

    Args:
        graph: the reduction graph.
        weights: parameter name -> weights.
        grads: parameter name -> gradients.

    Returns:
        The two sums, shape ``(H + 1,)`` each, the root first.
    """
    net = torch.zeros(graph.expand.shape[0], dtype=torch.float64)
    size = torch.zeros_like(net)
    for block in graph.blocks:
        if block.name not in grads:
            continue
        product = (block.values(weights[block.name]) * grads[block.name]).double()
        for ids, sign in ((block.head, 1), (block.tail, -1)):
            dims = [d for d in range(len(block.shape)) if ids.shape[d] == 1 and block.shape[d] > 1]
            total = product.sum(dims, keepdim=True) if dims else product
            absolute = product.abs().sum(dims, keepdim=True) if dims else product.abs()
            flat = ids.reshape(-1)
            net.index_add_(0, flat.abs(), total.reshape(-1) * flat.sign() * sign)
            size.index_add_(0, flat.abs(), absolute.reshape(-1))
    for statistic in graph.statistics:
        # running statistics are rescaled along: the mean with its channel, the variance with its square
        for name, factor in ((statistic.mean, 1), (statistic.var, 2)):
            if name is not None and name in grads:
                value = weights[name].detach() + graph.shifts.get(name, 0.0)
                product = factor * (value * grads[name]).double()
                net.index_add_(0, statistic.units.abs(), product * statistic.units.sign())
                size.index_add_(0, statistic.units.abs(), product.abs())
    return torch.from_numpy(graph.expand.T @ net.numpy()), torch.from_numpy(abs(graph.expand).T @ size.numpy())


def balance(
    graph: Structure,
    weights: Mapping[str, Tensor],
    grads: Mapping[str, Tensor],
    others: Sequence[Mapping[str, Tensor]] = (),
) -> float:
    """Largest ``|sum_in w g - sum_out w g|`` over the units, relative to ``sum |w g|`` there.

    Args:
        graph: the reduction graph.
        weights: parameter name -> weights.
        grads: parameter name -> gradients.
        others: the same gradients with other rounding errors. A sum that is no larger than ``ROUNDED`` times what they
            differ by, or than the digits of the largest ``sum |w g|``, is 0 as far as can be told: a gradient that
            vanishes (two numbers that are normalised become 1 and -1, whatever they were) is rounding alone.

    Returns:
        The largest relative violation; 0 for units that no gradient reaches.
    """
    net, size = sums(graph, weights, grads)
    relative = torch.where(size > 0, net.abs() / size, net.abs())
    if others:
        digits = max((torch.finfo(grad.dtype).eps for grad in grads.values()), default=0.0)
        noise = torch.full_like(size, float(size.max()) * digits)
        for other in others:
            gap = {name: other[name] - grad for name, grad in grads.items() if name in other}
            noise = torch.maximum(noise, sums(graph, weights, gap)[1])
        relative = torch.where(net.abs() > ROUNDED * noise, relative, 0)
    return float(relative[1:].max()) if len(relative) > 1 else 0.0


def _leaves(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers as leaves to differentiate by."""
    leaves = {n: p.detach().clone().requires_grad_(p.is_floating_point()) for n, p in model.named_parameters()}
    buffers = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
    if not model.training:
        # frozen statistics are constants of the function, and scale like weights do
        for buffer in buffers.values():
            buffer.requires_grad_(buffer.is_floating_point())
    return leaves | buffers


def _loss(
    model: nn.Module, leaves: Mapping[str, Tensor], args: Sequence[Any], kwargs: Mapping[str, Any], seed: int
) -> Tensor:
    """A random linear function of all outputs."""
    torch.manual_seed(seed)
    outputs = evaluate(model, leaves, args, kwargs)
    generator = torch.Generator().manual_seed(seed + 1)
    loss = torch.zeros((), dtype=torch.float64)
    for leaf in leaves_of(outputs):
        if isinstance(leaf, Tensor) and leaf.is_floating_point():
            weight = torch.randn(leaf.shape, generator=generator, dtype=torch.float64)
            value = leaf.double().cpu()
            # what a mask made infinite does not depend on weights
            loss = loss + (torch.where(torch.isfinite(value), value, 0) * weight).sum()
    return loss


def gradients(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], seed: int) -> dict[str, Tensor]:
    """Gradients of a random linear function of all outputs by every parameter it depends on."""
    leaves = _leaves(model)
    with quiet(), computing_in(precision(model)), torch.enable_grad():
        loss = _loss(model, leaves, args, kwargs, seed)
        if not loss.requires_grad:
            return {}
        wanted = [name for name in leaves if leaves[name].requires_grad]
        found = torch.autograd.grad(loss, [leaves[name] for name in wanted], allow_unused=True)
    return {name: grad for name, grad in zip(wanted, found, strict=True) if grad is not None}


def rounded_otherwise(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], seed: int, times: int = 3
) -> Iterator[dict[str, Tensor]]:
    """The gradients again, of weights that are other in their last digits."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(times):
        kept = [(p, p.detach().clone()) for p in model.parameters() if p.is_floating_point()]
        try:
            with torch.no_grad():
                for parameter, _own in kept:
                    noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                    parameter.mul_((1 + 4 * torch.finfo(parameter.dtype).eps * noise).to(parameter))
            yield gradients(model, args, kwargs, seed)
        finally:
            with torch.no_grad():
                for parameter, own in kept:
                    parameter.copy_(own)


def misled(
    graph: Structure,
    model: nn.Module,
    inputs: tuple[Sequence[Any], Mapping[str, Any]],
    grads: Mapping[str, Tensor],
    seed: int,
    step: float = 1e-6,
) -> str:
    """A weight tensor whose gradient by autograd is not the function's, or ``""``.

    ``detach``, ``no_grad`` and backward passes of one's own make them differ. Each tensor is moved along
    a random direction ``v``, and ``(L(w + h v) - L(w - h v)) / 2h`` compared with ``g . v``.
    """
    generator = torch.Generator().manual_seed(seed)
    with quiet(), computing_in(precision(model)), torch.no_grad():
        leaves = _leaves(model)
        for block in graph.blocks:
            weight = leaves[block.name]
            direction = weight * torch.randn(weight.shape, generator=generator, dtype=torch.float64).to(weight)
            up, down = (
                float(_loss(model, leaves | {block.name: weight + h * direction}, *inputs, seed)) for h in (step, -step)
            )
            moved = (up - down) / (2 * step)
            product = grads[block.name] * direction if block.name in grads else torch.zeros(1)
            rounding = 1e-8 * max(abs(up), abs(down))
            if abs(moved - float(product.sum())) > 1e-3 * max(abs(moved), float(product.abs().sum())) + rounding:
                return block.name
    return ""


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
            parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
            count += parameter.numel()
    return count


def measure(
    graph: Structure, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], seed: int
) -> tuple[dict[str, Any], tuple[int, int]]:
    """Measure the invariance on ``model`` (a copy, or a model that is left exactly as it was).

    Returns:
        Evidence for the certificate, and how many rectifiers switched of how many seen under the rescaling.
    """
    before, drawn = run(model, args, kwargs, seed=seed), 0
    dtype = resolution(graph, model, before)
    tolerance = rounding_tolerance(graph, dtype, TOLERANCE.get(dtype, 1e-3))
    if not seen(before) and graph.num_weights <= LARGE:
        # a head that starts at zero hides everything behind it
        drawn = draw_zeros(model, seed)
        before = run(model, args, kwargs, seed=seed)
    silent, undefined = not seen(before), int(before.outputs.isnan().sum())
    largest = LARGEST.get(dtype, 1) if graph.shifts else 12
    phi = powers_for(graph, dtype, seed)

    def rescaled(before: Run) -> tuple[float, tuple[int, int]]:
        if graph.num_weights > LARGE:
            with rescaled_in_place(model, graph, phi):
                after = run(model, args, kwargs, seed=seed)
        else:
            after = run(model, args, kwargs, rescaled_weights(model, graph, phi), seed)
        return difference(before, after), switched(before, after)

    as_it_stands, switches = rescaled(before)
    exact = as_it_stands
    unbalanced: float | None = None
    no_gradient = ""
    with without_eps(model, graph.folded_eps) as layers:
        if layers or graph.folded_eps or graph.has_cuts:
            exact, switches = rescaled(run(model, args, kwargs, seed=seed))
        if graph.num_weights <= LARGE:
            weights = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())
            try:
                grads = gradients(model, args, kwargs, seed)
                unbalanced = balance(graph, weights, grads)
                if math.isnan(unbalanced):
                    unbalanced, no_gradient = None, "gradients are not finite"
                elif unbalanced > tolerance:
                    others = list(rounded_otherwise(model, args, kwargs, seed))
                    unbalanced = balance(graph, weights, grads, others)
                if unbalanced is not None and exact <= tolerance < unbalanced and dtype == torch.float64:
                    wrong = misled(graph, model, (args, kwargs), grads, seed)
                    if wrong:
                        unbalanced = None
                        no_gradient = f"detached or of its own: the gradient of {wrong} is not the function's"
            except Exception as error:
                # a model that cannot be differentiated (it overwrites what its backward pass needs, or that raises) can
                # still be rescaled
                no_gradient = no_derivative(error)
    worst = max(exact, unbalanced or 0.0)
    words = f"outputs differ by {exact:.1e} after random rescaling by up to {2**largest}"
    words += f", gradients balance to {unbalanced:.1e} per unit" if unbalanced is not None else ""
    words += f", gradient balance not applicable ({no_gradient})" if no_gradient else ""
    if layers or graph.folded_eps or graph.has_cuts:
        words += f" (with eps = 0 in normalisation layers; {as_it_stands:.1e} as the model stands)"
    words += (
        f"; {drawn:,} weights of tensors that are all 0 were drawn at random, as the outputs are 0" if drawn else ""
    )
    words += f"; {undefined:,} of {len(before.outputs):,} outputs are NaN, and stay so" if undefined else ""
    words += "; no output is a number other than 0, so that nothing could have been seen to change" if silent else ""
    words = words if len(before.outputs) else "the model returns no tensor in floating point, which could change"
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
