"""Measurements of one forward and backward pass, layer by layer: sizes, dead
units, epsilons of norms.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized
from torch.utils._pytree import tree_leaves

from ..shared.real_tensors import first_real
from ..shared.selection import select
from ..shared.unit_axes import unit_axis
from .outputs_judged import LossFault, judged_inside, loss_fault

DROPPING = (
    nn.Dropout,
    nn.Dropout1d,
    nn.Dropout2d,
    nn.Dropout3d,
    nn.AlphaDropout,
    nn.FeatureAlphaDropout,
)
SQUASHING = (nn.Tanh, nn.Sigmoid, nn.Softsign, nn.Hardtanh, nn.Hardsigmoid, nn.LogSigmoid)


@dataclass
class LayerFacts:
    """One call of a layer; root mean squares (rms) are over all components.

    Attributes:
        name: name of the module.
        kind: type of the module.
        weighted: whether it has a weight of two or more dimensions that multiplies activations.
        rms_in: of the first floating-point input.
        rms_out: of the first floating-point output.
        largest: largest absolute value of the output, and of the input of a norm.
        gradient: norm of the loss's gradient by the output; ``None`` without one.
        live: for every unit, whether any gradient is not 0; ``None`` without gradients.
        idle: share of input units that were 0 in the whole batch.
        eps_share: for a norm, the median of ``eps / (variance + eps)``.
        direct: whether its input is exactly the output of the layer called before.
        flat: for a squashing activation, the share of outputs whose derivative is below 0.001.
        dropped: for dropout in training, the share that it sets to 0.
        shut: share of units that their bias holds below 0, whatever comes in.
    """

    name: str
    kind: str
    weighted: bool
    rms_in: float = math.nan
    rms_out: float = math.nan
    largest: float = math.nan
    gradient: float | None = None
    live: Tensor | None = None
    idle: float = 0.0
    eps_share: float | None = None
    direct: bool = False
    flat: float | None = None
    dropped: float = 0.0
    shut: float = 0.0


@dataclass
class Pass:
    """One pass: its layers in order of execution, the sizes of the inputs, and the loss
    if the model returns it.

    Attributes:
        batch: a digest of the inputs, the same for equal ones.
        judged: a fault of the loss, found in its gradient by the outputs.
        constant: whether the outputs are the same for all samples, although the inputs differ.
        slope: norm of the parameters' gradients at the end of the backward pass.
    """

    layers: list[LayerFacts] = field(default_factory=list)
    rms_inputs: float | None = None
    loss: float | None = None
    training: bool = True
    stale: bool = False
    batch: str = ""
    judged: LossFault | None = None
    constant: float = 0.0
    slope: float = math.nan


class Probe:
    """Hooks that record the first pass with gradients while they are attached, without changing it.

    Args:
        model: any module.

    Attributes:
        example: the inputs of the pass.
        held: ids of the parameters whose gradients an optimizer has to set to zero.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
        >>> probe = Probe(model)
        >>> probe.attach()
        >>> model(torch.ones(4, 2)).sum().backward()
        >>> [layer.name for layer in probe.detach().layers]
        ['0', '1', '2']
    """

    # safe_deepcopy leaves the hooks out
    stays_behind = True

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.layers = select(model)
        self.handles: list[Any] = []
        self.current, self.active, self.done = Pass(), False, False
        self.example: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        self.held: set[int] = set()
        self._later: list[tuple[LayerFacts | Pass, str, Tensor]] = []
        # calls without gradients, which reentrant checkpointing makes again in the backward pass
        self._again: dict[str, list[LayerFacts]] = {}
        self._last: Tensor | None = None
        self._old: list[tuple[Tensor, ref[Tensor]]] | None = None

    def attach(self) -> None:
        """Wait for a pass."""
        self._again.clear()
        self._old = None
        self.current, self.active, self.done = Pass(), False, False
        for name, module in self.layers.items():
            self.handles.append(
                module.register_forward_hook(partial(self._layer, name), with_kwargs=True)
            )
        self.handles.append(
            self.model.register_forward_pre_hook(self._start, with_kwargs=True, prepend=True)
        )
        self.handles.append(self.model.register_forward_hook(self._end))

    def detach(self) -> Pass:
        """Remove the hooks, and return the pass; without a pass the result has no layers."""
        for handle in self.handles:
            handle.remove()
        self.handles.clear()
        self.active, self._last = False, None
        # a gradient that was set to None since then belonged to another pass, such as
        # that of a GAN's generator
        self.current.stale = any(
            old() is not None and p.grad is old() for p, old in self._old or ()
        )
        self._old = None
        # one transfer of all numbers instead of one for each
        if self._later:
            values = torch.stack(
                [value.detach().float().cpu() for _, _, value in self._later]
            ).tolist()
            for (facts, name, _), value in zip(self._later, values, strict=True):
                setattr(facts, name, value)
        self._later.clear()
        return self.current

    def __getstate__(self) -> dict[str, Any]:
        """Copies, also those in files, record nothing: the pass is the model's own."""
        return {"active": False, "done": True, "example": None}

    def _start(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self.active = not self.done and _trains()
        if not self.active:
            return
        self.example = (args, dict(kwargs))
        tensors = [v for v in tree_leaves((args, kwargs)) if isinstance(v, Tensor) and v.numel()]
        self.current.batch = _digest(tensors)
        held = [v for v in tensors if v.is_floating_point()]
        with torch.no_grad():
            self.current.rms_inputs = float(max(map(_rms, held))) if held else None
        self.current.training = any(m.training for m in module.modules())

    def _end(self, _module: nn.Module, _args: Any, output: Any) -> None:
        if not self.active:
            return
        self.active, self.done = False, True
        first = first_real(output)
        if first is not None and first.ndim == 0:
            self.current.loss = float(first.detach())
            self.current.judged = judged_inside(first)
        if first is not None and first.requires_grad:
            constant = _constant(first.detach(), self.example)
            if constant is not None:
                self._later.append((self.current, "constant", constant))
            first.register_hook(partial(self._began, first.detach()))

    def _began(self, output: Tensor, gradient: Tensor) -> None:
        """Note the gradients that exist before the backward pass; they
        belong to an earlier step.
        """
        if self._old is not None:
            # a second backward pass through the same outputs
            return
        self.current.judged = self.current.judged or loss_fault(output, gradient)
        found = [p for p in self.model.parameters() if p.grad is not None and id(p) in self.held]
        self._old = [
            (p, ref(p.grad)) for p in found[:3] if p.grad is not None and bool((p.grad != 0).any())
        ]
        torch.autograd.Variable._execution_engine.queue_callback(
            partial(self._passed, self.current)
        )

    @torch.no_grad()
    def _passed(self, current: Pass) -> None:
        """Note the size of the gradients before the loop changes them, as by clipping."""
        slopes = [p.grad for p in self.model.parameters() if p.grad is not None]
        slopes = [slope for slope in slopes if not slope.is_sparse]
        if current is self.current and slopes:
            sizes = torch.stack([s.float().cpu() for s in torch._foreach_norm(slopes)])
            self._later.append((current, "slope", torch.linalg.vector_norm(sizes)))

    @torch.no_grad()
    def _layer(self, name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if torch._C._current_graph_task_id() != -1:
            self._recomputed(name, module, output)
            return
        if not self.example and not self.done:
            # called from outside the model's own forward, for example by a training_step
            self.active = _trains()
        if not self.active:
            return
        source, result = first_real((args, kwargs)), first_real(output)
        if result is None or not result.numel():
            return
        weighted = _has_matrix(module) and not isinstance(module, nn.Embedding)
        facts = LayerFacts(name, type(module).__name__, weighted or isinstance(module, nn.RNNBase))
        if isinstance(module, DROPPING) and module.training:
            facts.dropped = module.p
        self.current.layers.append(facts)
        facts.direct, self._last = source is not None and source is self._last, result
        self._later += [(facts, what, value) for what, value in _sizes(module, source, result)]
        if result.requires_grad:
            result.register_hook(partial(self._back, facts, _axis(module, result)))
        else:
            self._again.setdefault(name, []).append(facts)

    def _recomputed(self, name: str, module: nn.Module, output: Any) -> None:
        """A call in the backward pass: the gradient of a call that had none in the forward pass."""
        result, waiting = first_real(output), self._again.get(name)
        if waiting and result is not None and result.requires_grad:
            result.register_hook(partial(self._back, waiting.pop(), _axis(module, result)))

    @torch.no_grad()
    def _back(self, facts: LayerFacts, axis: int, gradient: Tensor) -> None:
        if facts.live is None:
            facts.live = _any_by_unit(gradient, axis)
            self._later.append(
                (facts, "gradient", torch.linalg.vector_norm(gradient, dtype=_wide(gradient)))
            )


def _sizes(
    module: nn.Module, source: Tensor | None, result: Tensor
) -> Iterator[tuple[str, Tensor]]:
    """Facts of one call of a layer by name, as numbers that no one waits for."""
    normed = "Norm" in type(module).__name__
    largest = result.abs().amax()
    yield "rms_out", _rms(result)
    if source is None or not source.numel():
        yield "largest", largest
        return
    yield "largest", torch.maximum(largest, source.abs().amax()) if normed else largest
    yield "rms_in", _rms(source)
    if source.ndim > 1 and _has_matrix(module) and not isinstance(module, nn.Embedding):
        yield "idle", (~_any_by_unit(source, _axis(module, source))).float().mean()
    share, shut = _eps_share(module, source), _shut(module, result, source)
    if share is not None:
        yield "eps_share", share
    if shut is not None:
        yield "shut", shut
    if isinstance(module, SQUASHING):
        yield "flat", _flat(module, source)


def _axis(module: nn.Module, value: Tensor) -> int:
    """The axis of units in an input or output of a module; the last where it does not say."""
    axis = unit_axis(module, value)
    return -1 if axis is None else axis


def _has_matrix(module: nn.Module) -> bool:
    """Whether a module has a weight of two or more dimensions."""
    if is_parametrized(module, "weight"):
        # (reading the weight would compute it, which takes one more step of a spectral norm)
        stored = module.get_submodule("parametrizations.weight").parameters(recurse=False)
        return any(tensor.ndim > 1 for tensor in stored)
    weight = getattr(module, "weight", None)
    return isinstance(weight, Tensor) and weight.ndim > 1


def _trains() -> bool:
    """Whether a pass may be one of training: it has gradients, and tensors are ordinary ones."""
    transformed = torch._C._are_functorch_transforms_active()  # noqa: SLF001
    return torch.is_grad_enabled() and not transformed


def _digest(tensors: list[Tensor]) -> str:
    digest = hashlib.blake2b()
    for value in tensors:
        if not value.is_sparse:
            flat = value.detach().flatten()
            # a hundred thousand numbers are enough to distinguish batches
            digest.update(
                flat[:: -(-len(flat) // 100_000)]
                .contiguous()
                .view(torch.uint8)
                .cpu()
                .numpy()
                .tobytes()
            )
    return digest.hexdigest()


def _wide(value: Tensor) -> torch.dtype:
    return torch.float64 if value.dtype == torch.float64 else torch.float32


def _rms(value: Tensor) -> Tensor:
    result: Tensor = torch.linalg.vector_norm(value, dtype=_wide(value)) / math.sqrt(value.numel())
    return result


def _any_by_unit(value: Tensor, axis: int) -> Tensor:
    if value.ndim < 2:
        return value != 0
    dims = [dim for dim in range(value.ndim) if dim != axis % value.ndim]
    # NaN counts as a gradient; the largest absolute value is cheaper than a mask of booleans
    return value.abs().amax(dims) != 0


def _shut(module: nn.Module, result: Tensor, source: Tensor) -> Tensor | None:
    """Share of the units whose negative bias is three times as large as all that it is added to."""
    axis = unit_axis(module, result)
    bias = None if is_parametrized(module, "bias") else getattr(module, "bias", None)
    if axis is None or not isinstance(bias, Tensor) or bias.shape != (result.shape[axis],):
        return None
    dims = [dim for dim in range(result.ndim) if dim != axis % result.ndim]
    variance, mean = torch.var_mean(result.to(_wide(result)), dims, correction=0)
    with torch._C.DisableTorchFunction():  # (an observer counts the additions of the model)
        rest = (variance + (mean - bias).square()).sqrt()
    if "Norm" not in type(module).__name__:
        # (a small input is the fault of the layers before: with a usual one the bias counts less)
        rest = rest / _rms(source).clamp(max=1)
    return (bias < -3 * rest).float().mean()


def _constant(output: Tensor, example: Any) -> Tensor | None:
    """Whether all rows of the outputs are equal up to rounding, and those of an input are not."""
    rows = len(output) if output.ndim else 0
    inputs = [v for v in tree_leaves(example) if isinstance(v, Tensor) and v.ndim]
    if rows < 2 or not any(len(v) == rows and bool((v != v[:1]).any()) for v in inputs):
        return None
    with torch._C.DisableTorchFunction():  # (an observer counts the additions of the model)
        spread = (output - output[:1]).abs().amax()
    return (spread <= 8 * torch.finfo(output.dtype).eps * output.abs().amax()).float()


def _flat(module: nn.Module, source: Tensor) -> Tensor:
    with torch.enable_grad():
        sample = source.detach().flatten()[:100_000].clone().requires_grad_()
        (slope,) = torch.autograd.grad(module.forward(sample.clone()).sum(), sample)
    return (slope.abs() < 1e-3).float().mean()


def _eps_share(module: nn.Module, source: Tensor) -> Tensor | None:
    """Median of ``eps / (variance + eps)`` over the normalised groups."""
    eps = getattr(module, "eps", getattr(module, "variance_epsilon", None))
    if "Norm" not in type(module).__name__ or not isinstance(eps, float) or source.ndim < 2:
        return None
    value = source.detach().to(_wide(source))
    moments: Callable[..., Tensor] = partial(torch.var, dim=-1, correction=0)
    if isinstance(module, nn.modules.batchnorm._NormBase):
        if not module.training and module.running_var is not None:
            return (eps / (module.running_var + eps)).median()
        value = (
            value.transpose(0, 1).flatten(1)
            if "Instance" not in type(module).__name__
            else value.flatten(2)
        )
    elif isinstance(module, nn.GroupNorm):
        value = value.reshape(value.shape[0], module.num_groups, -1)
    elif "RMS" in type(module).__name__:
        value = value.square()
        moments = partial(torch.mean, dim=-1)
    elif len(getattr(module, "normalized_shape", ())) > 1:
        value = value.flatten(value.ndim - len(module.normalized_shape))  # type: ignore[arg-type]
    if value.shape[-1] < 2:
        return None
    return (eps / (moments(value) + eps)).median()
