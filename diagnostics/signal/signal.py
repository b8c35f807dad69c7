"""Signal by depth: the effect of every layer on activations in the forward and
gradients in the backward pass.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from pathspace.errors import COUNT, SEED, expect_numbers
from pathspace.models.walk import has_hooks

from ..shared.layers import Call, RecordedRun, record_layers
from ..shared.model_calls import differentiating
from ..shared.real_tensors import rademacher
from ..shared.selection import Names, Types, select
from ..shared.tables import Estimate, Table
from ..shared.unchanged import unchanged
from .meanfield import Function, Gains, gains
from .theory import BATCH_NORMS, ELEMENTWISE, MATRICES, expected_gain


@dataclass(frozen=True)
class LayerSignal:
    """One call of one layer.

    Attributes:
        layer: the layer's name, with the number of the call if it is not the first.
        kind: type of the module.
        shape: shape of its output.
        mean: mean of its output over the batch and all components.
        variance: variance of its output; 0 if its values are equal up to rounding.
        zeros: share of outputs that are exactly 0.
        units: number of channels or features.
        dead: number of units through which no gradient of the model's output passed on this batch;
            for an activation also units with zero derivative.
        vjp_gain: ``Var[vJ] / Var[v] = tr(J J^T) / N`` of the layer, over isotropic v.
        jvp_gain: ``Var[Ju] / Var[u] = tr(J^T J) / M`` of the layer, over isotropic u.
        expected_gain: theoretical ``vjp_gain``, see
            :func:`pathspace.diagnostics.signal.theory.expected_gain`.
        output_gain: ``Var[v dy/dz] / Var[v]`` from the model's output y back
            to this layer's output z.
        weight_gain: ``sqrt(fan_in E[w^2])``, the scale of the layer's weights.
        forward_gain: the weight scale that preserves unit variance, given the following activation.
        backward_gain: the weight scale that preserves gradients, for layers of equal width.
        remark: missing values, with the reason.
    """

    layer: str
    kind: str
    shape: tuple[int, ...]
    mean: float
    variance: float
    zeros: float
    units: int
    dead: int | None
    vjp_gain: Estimate | None
    jvp_gain: Estimate | None
    expected_gain: float | None
    output_gain: Estimate | None
    weight_gain: float | None
    forward_gain: float | None
    backward_gain: float | None
    remark: str

    @property
    def finite(self) -> bool:
        """Whether its values and gains are finite."""
        gains = [
            gain.value
            for gain in (self.vjp_gain, self.jvp_gain, self.output_gain)
            if gain is not None
        ]
        return all(map(math.isfinite, (self.mean, self.variance, *gains)))


def signal(
    model: nn.Module,
    *inputs: Any,
    kwargs: Mapping[str, Any] | None = None,
    names: Names = None,
    types: Types = None,
    probes: int | None = None,
    jvp: bool = True,
    seed: int = 0,
) -> Table[LayerSignal]:
    """Measure mean and variance, gains and dead units of every layer on one batch.

    For a layer ``z' = f(z)`` with Jacobian J of shape (M, N), and v with independent
    components of mean 0 and variance 1, ``E Var[vJ] = tr K``, ``K = J J^T / N``; likewise ``E
    Var[Ju] = tr L``, ``L = J^T J / M``, so ``N tr K = M tr L``. Each is the mean over random
    sign vectors, with its standard error, without assumptions about J. A batch is one map, so
    the gain is the mean over its samples.

    Args:
        model: any module, in its current mode; it is not changed.
        *inputs: one batch.
        kwargs: keyword inputs.
        names: patterns of the names of the layers.
        types: classes, or names of classes, of the layers.
        probes: number of random vectors per gain; by default 8, and 2 for models with more than
            ten million activations.
        jvp: also measure the JVP gain; this doubles the cost.
        seed: seed of the random vectors.

    Returns:
        One row per call of a layer, in order of execution.

    Raises:
        InputError: no layer passes the filters, or fewer than one probe.
        CaptureError: the model raises on these inputs.

    Example:
        >>> layer = nn.Linear(3, 2, bias=False)
        >>> row = signal(layer, torch.randn(64, 3), probes=200)[0]
        >>> row.vjp_gain.agrees(float(layer.weight.detach().square().sum() / 3))
        True

    Reference:
        Evolution of neural network, sections 2.6.1 and 2.6.2; the ratio printed there holds
        as an expectation over v.
    """
    expect_numbers("signal", COUNT, or_none=True, probes=probes)
    expect_numbers("signal", SEED, seed=seed)
    layers = select(model, names, types)
    # (to read a weight may change the model: some are computed, and count how often)
    with unchanged(model):
        return _measured(
            model, layers, record_layers(model, inputs, kwargs, layers), probes, jvp, seed
        )


def _measured(
    model: nn.Module,
    layers: Mapping[str, nn.Module],
    run: RecordedRun,
    probes: int | None,
    jvp: bool,
    seed: int,
) -> Table[LayerSignal]:
    """The table of :func:`signal` from one run."""
    if probes is None:
        probes = 2 if sum(call.output.numel() for call in run.calls) > 10_000_000 else 8
    generator = torch.Generator().manual_seed(seed)
    with differentiating(model):
        back, alive = _from_output(run, probes, generator)
    rows = []
    for i, call in enumerate(run.calls):
        vjp, forward, remark, own = _own_gains(call, probes, jvp, generator)
        value = call.output.detach().double()
        axis = call.unit_axis if value.dim() > 1 else 0
        following = run.calls[i + 1].module if i + 1 < len(run.calls) else None
        scale = weight_gain(call.module)
        best = _recommended(call, following) if scale is not None else None
        lives = alive[i]
        if own is not None and lives is not None:
            lives = lives & own
        dead = value.new_zeros(()) if lives is None else (~lives).sum()
        numbers = torch.stack(
            [value.mean(), _variance(call.output), value.count_nonzero().double(), dead.double()]
        )
        mean, variance, nonzero, dead_units = numbers.tolist()
        rows.append(
            LayerSignal(
                call.label,
                type(call.module).__name__,
                tuple(value.shape),
                mean,
                variance,
                1 - nonzero / max(value.numel(), 1),
                value.shape[axis] if value.dim() else 1,
                None if lives is None else int(dead_units),
                vjp,
                forward,
                expected_gain(call),
                back[i],
                scale,
                best.forward if best else None,
                best.backward if best else None,
                remark,
            )
        )
    return Table("signal by depth", tuple(rows), never_called(layers, run) + _not_finite(rows))


def _variance(output: Tensor) -> Tensor:
    """The variance; 0 if all values are equal up to rounding, as for equal samples."""
    value = output.detach().double()
    variance = value.var(correction=0)
    rounding = torch.finfo(output.dtype).eps * value.abs().max() if value.numel() else variance
    return torch.where(variance <= rounding**2, torch.zeros_like(variance), variance)


def _not_finite(rows: list[LayerSignal]) -> tuple[str, ...]:
    """A note on layers whose results are not finite because values or
    derivatives of the model are not.
    """
    found = [row.layer or row.kind for row in rows if not row.finite]
    if not found:
        return ()
    return (
        (
            "Values or derivatives are not finite at"
            f" {', '.join(found[:5])}{' and others' if len(found) > 5 else ''}; look for a weight"
            " that is not, an overflow, or a square root, norm or logarithm of zero behind it."
        ),
    )


def never_called(layers: Mapping[str, nn.Module], run: RecordedRun) -> tuple[str, ...]:
    """A note on layers that the model did not call."""
    missing = sorted(layers.keys() - {call.name for call in run.calls})
    if not missing:
        return ()
    shown = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
    return (f"Not measured, because the model did not call them on these inputs: {shown}.",)


def _from_output(
    run: RecordedRun, probes: int, generator: torch.Generator
) -> tuple[list[Estimate | None], list[Tensor | None]]:
    """Gain from the model's output back to every layer, and which units a gradient reached."""
    samples: list[list[Tensor]] = [[] for _ in run.calls]
    alive: list[Tensor | None] = [None] * len(run.calls)

    def note(i: int, axis: int) -> Callable[[Tensor], None]:
        def hook(gradient: Tensor) -> None:
            samples[i].append(gradient.square().mean(dtype=torch.float64))
            passed = _reached(gradient, axis) if gradient.dim() > 1 else gradient != 0
            before = alive[i]
            alive[i] = passed if before is None else before | passed

        return hook

    with ExitStack() as stack:
        for i, call in enumerate(run.calls):
            if call.sink.requires_grad:
                stack.callback(call.sink.register_hook(note(i, call.unit_axis)).remove)
        start = [
            source for call in run.calls if (source := call.source) is not None and source.is_leaf
        ]
        # gradients must reach the embeddings of integer inputs
        start += [
            p
            for call in run.calls
            if call.source is None
            for p in call.module.parameters()
            if p.requires_grad
        ]
        start += run.inputs
        for probe in range(probes if run.calls else 0):
            cotangent = rademacher(run.output, generator)
            if start:
                torch.autograd.grad(
                    run.output, start, cotangent, retain_graph=True, allow_unused=True
                )
            if probe == 0:
                # layers that depend on no input and no embedding: computed from
                # parameters, or selected by name
                missed = [
                    call.sink for call, seen in zip(run.calls, samples, strict=True) if not seen
                ]
                missed = [sink for sink in missed if sink.requires_grad]
                if missed:
                    found = torch.autograd.grad(
                        run.output, missed, cotangent, retain_graph=True, allow_unused=True
                    )
                    start += [
                        sink
                        for sink, gradient in zip(missed, found, strict=True)
                        if gradient is not None
                    ]
    return [_estimate(sample) if sample else None for sample in samples], alive


def _reached(gradient: Tensor, axis: int) -> Tensor:
    """Which units have a gradient that is not 0."""
    return (gradient.movedim(axis, 0).flatten(1) != 0).any(1)


def _own_gains(
    call: Call, probes: int, jvp: bool, generator: torch.Generator
) -> tuple[Estimate | None, Estimate | None, str, Tensor | None]:
    """VJP and JVP gain of a layer, why one is missing, and which units of an activation
    have a non-zero derivative.
    """
    if call.source is None:
        return None, None, "integer inputs have no Jacobian", None
    constant = (None, None, "the output does not depend differentiably on the input", None)
    if not call.output.requires_grad:
        return constant
    samples: list[Tensor] = []
    own: Tensor | None = None
    elementwise = isinstance(call.module, ELEMENTWISE)
    for _ in range(probes):
        (back,) = torch.autograd.grad(
            call.output,
            call.source,
            rademacher(call.output, generator),
            retain_graph=True,
            allow_unused=True,
        )
        if back is None:
            return constant
        samples.append(back.square().mean(dtype=torch.float64))
        if elementwise and back.dim() > 1:
            passed = _reached(back, call.unit_axis)
            own = passed if own is None else own | passed
    gain = _estimate(samples)
    if not jvp or elementwise:
        # (a diagonal Jacobian is symmetric)
        return gain, gain if jvp else None, "", own
    try:
        pushed = [
            value.square().mean(dtype=torch.float64)
            for value in _pushed(call, call.source, probes, generator)
        ]
    except RuntimeError:
        return gain, None, "no JVP gain: an operation has no second derivative", own
    return gain, _estimate(pushed), "", own


def _pushed(
    call: Call, source: Tensor, probes: int, generator: torch.Generator
) -> Iterator[Tensor]:
    """The products ``J u`` with random signs."""
    if _is_plain_affine(call):
        # an affine map without its bias is its own derivative, and far cheaper to run
        # than to differentiate twice
        for _ in range(probes):
            with torch.no_grad():
                pushed = _without_bias(call.module, rademacher(source, generator))
            yield pushed
        return
    cotangent = torch.zeros_like(call.output, requires_grad=True)
    # vJ is linear in v, so its derivative with respect to v is J
    (transposed,) = torch.autograd.grad(call.output, source, cotangent, create_graph=True)
    for _ in range(probes):
        signs = rademacher(source, generator)
        yield torch.autograd.grad(transposed, cotangent, signs, retain_graph=True)[0]


def _estimate(samples: list[Tensor]) -> Estimate:
    """Mean and standard error of numbers on a device, with one transfer for all."""
    return Estimate.of(torch.stack(samples).tolist())


def _is_plain_affine(call: Call) -> bool:
    """Whether a layer is an affine map of known weights: no hook changes what enters or leaves it,
    and no autocast its type.
    """
    module = call.module
    if has_hooks(module):
        return False
    weight = getattr(module, "weight", None)
    types = {call.source.dtype if call.source is not None else None, call.output.dtype}
    return (isinstance(module, MATRICES) or _frozen_norm(module)) and (
        weight is None or types == {weight.dtype}
    )


def _frozen_norm(module: nn.Module) -> bool:
    return (
        isinstance(module, BATCH_NORMS) and not module.training and module.running_var is not None
    )


def _without_bias(module: nn.Module, value: Tensor) -> Tensor:
    """An affine layer without what it adds: its bias, and a running mean."""
    named = itertools.chain(module.named_parameters(), module.named_buffers())
    zeros = {n: torch.zeros_like(t) for n, t in named if n in ("bias", "running_mean")}
    result: Tensor = functional_call(module, zeros, (value,))
    return result


def weight_gain(module: nn.Module) -> float | None:
    """``sqrt(fan_in E[w^2])`` of a linear, convolutional or recurrent
    layer, ``None`` for others.
    """
    if isinstance(module, nn.RNNBase | nn.RNNCellBase):
        weight = getattr(module, "weight_hh_l0", getattr(module, "weight_hh", None))
    elif type(module).__name__ == "Conv1D":
        weight = module.weight.T
    else:
        weight = getattr(module, "weight", None) if isinstance(module, MATRICES) else None
    if not isinstance(weight, Tensor) or weight.dim() < 2:
        return None
    weight = weight.detach().double()
    return math.sqrt(float(weight.square().mean()) * weight[0].numel())


def _recommended(call: Call, following: nn.Module | None) -> Gains | None:
    """Forward and backward gain for the activation after the layer; ``None`` if a
    normalisation sets the scale.
    """
    if isinstance(call.module, nn.RNN | nn.RNNCell):
        function: Function | None = torch.relu if call.module.nonlinearity == "relu" else torch.tanh
    elif isinstance(call.module, nn.RNNBase | nn.RNNCellBase):
        return None
    elif call.activation is None:
        return None if "Norm" in type(following).__name__ else Gains(1.0, 1.0)
    else:
        name, args, kwargs = call.activation
        function = _functional(
            name, args, {key: value for key, value in kwargs.items() if key != "inplace"}
        )
    return None if function is None else gains(function)


def _functional(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Function | None:
    base = getattr(F, name, None) or getattr(torch, name, None)
    tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
    if base is None or name == "rrelu" or any(tensor.numel() > 1 for tensor in tensors):
        return None
    # without inplace=True, because the nodes of the integral are used again
    if name in {"relu", "relu6", "selu", "silu", "mish", "hardswish", "hardsigmoid"}:
        args = ()
    settings = [value.detach().double() if isinstance(value, Tensor) else value for value in args]
    return lambda z: base(z.clone(), *settings, **kwargs)
