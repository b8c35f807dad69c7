"""The theoretical gain of a layer, computed from its weights and the mean
and variance of its input.
"""

from __future__ import annotations

import itertools
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_map

from pathspace.inference.registry import FACTS
from pathspace.models.copies import safe_deepcopy
from pathspace.models.isolation import torch_kept

from ..shared.layers import Call
from ..shared.real_tensors import first_real, rademacher
from .meanfield import Function, gaussian_mean, slope

# layers that apply one elementwise activation function, such as nn.LeakyReLU (except
# those with a random slope)
_FUNCTIONS = {
    name.removeprefix("aten.").replace("_", "")
    for name, facts in FACTS.items()
    if facts.kind == "activation" and facts.elementwise and "rrelu" not in name
}
ELEMENTWISE = tuple(
    layer
    for name, layer in vars(nn).items()
    if name.lower() in _FUNCTIONS and issubclass(layer, nn.Module)
)
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
MATRICES = (nn.Linear, *CONVOLUTIONS)
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_MAXIMA = (
    nn.MaxPool1d,
    nn.MaxPool2d,
    nn.MaxPool3d,
    nn.AdaptiveMaxPool1d,
    nn.AdaptiveMaxPool2d,
    nn.AdaptiveMaxPool3d,
)
_ADAPTIVE_MEANS = (nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d)
_SAMPLES = 8


def expected_gain(call: Call) -> float | None:
    """Compute the theoretical ``tr K = ||J||^2 / N`` of a layer.

    * linear maps: the squared weights, each times the number of its uses (fewer at
      padded borders), over N;
    * maximum pooling: outputs over inputs; mean pooling: outputs over inputs and size of a window;
    * activations: ``E[phi'^2]`` over a normal input of the measured mean and variance;
    * layer norm ``(1 - 2/n) E[gamma^2] E[1/var]``, group and batch norm likewise,
      RMS norm with ``1 - 1/n``;
    * batch norm in eval mode ``E[gamma^2 / running_var]``; dropout ``1 / (1 - p)``;
    * attention, gates, convolutions whose padding repeats entries, and other layers without
      submodules: ``E tr K`` over independent normal
      inputs of the measured mean and variance, estimated with eight samples.

    Args:
        call: a call of the layer, recorded by
            :func:`pathspace.diagnostics.shared.layers.record_layers`.

    Returns:
        The gain, or ``None`` if it is not known.
    """
    module, source = call.module, call.source
    if source is None:
        return None
    source = source.detach().double()
    exact = _linear(call, source)
    if exact is not None:
        return exact
    if isinstance(module, nn.Dropout):
        return 1 / (1 - module.p) if module.training and module.p < 1 else 1.0
    # tested before norms, which are recognised by outputs of size 1: an elementwise
    # function may have such outputs
    if is_elementwise(module):
        derivative = slope(_alone(module))
        return gaussian_mean(
            lambda z: derivative(z) ** 2, float(source.var(correction=0)), float(source.mean())
        )
    normalised = _normalised(call, source)
    if normalised is not None:
        return normalised
    inside = any(True for _ in module.children())
    if inside and not type(module).__module__.startswith("torch.nn"):
        return None
    return _over_normal(call)


def is_elementwise(module: nn.Module) -> bool:
    """Whether a layer applies one function to each entry, like the activations of torch."""
    if isinstance(module, ELEMENTWISE):
        return not any(parameter.numel() > 1 for parameter in module.parameters())
    if any(True for _ in itertools.chain(module.parameters(), module.buffers(), module.children())):
        return False
    generator = torch.Generator().manual_seed(0)
    z, other = torch.randn(2, 64, dtype=torch.float64, generator=generator)
    order, kept = torch.randperm(64, generator=generator), torch.arange(64) % 3 > 0
    alone = _alone(module)
    try:
        with torch.no_grad(), torch_kept():
            value, moved, mixed = alone(z), alone(z[order]), alone(torch.where(kept, z, other))
    except Exception:
        # it takes other arguments, or tensors of other shapes
        return False
    if not isinstance(value, Tensor) or value.shape != z.shape:
        return False
    return torch.equal(moved, value[order]) and torch.equal(mixed[kept], value[kept])


def _alone(module: nn.Module) -> Function:
    twin = safe_deepcopy(module).double().requires_grad_(False)
    if hasattr(twin, "inplace"):
        setattr(twin, "inplace", False)  # noqa: B010
    return twin


def _linear(call: Call, source: Tensor) -> float | None:
    """``||J||^2 / N`` of layers that are linear or select entries."""
    module = call.module
    size, outputs = source.numel(), call.output.numel()
    if isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D":
        weight = module.weight
        assert isinstance(weight, Tensor)
        # one matrix for all rows
        return float(weight.detach().double().square().sum()) / source.shape[-1]
    if isinstance(module, (*CONVOLUTIONS, *_TRANSPOSED)):
        kernel = module.weight.detach().double().square().sum((0, 1))
        rank = kernel.dim()
        narrow, wide = call.output.shape[-rank:], source.shape[-rank:]
        if isinstance(module, _TRANSPOSED):
            narrow, wide = wide, narrow
        if module.padding_mode == "zeros":
            convolve: Any = getattr(F, f"conv{rank}d")
            ones, where = kernel.new_ones(1, 1, *wide), (module.stride, module.padding)
            counts = convolve(ones, kernel[None, None], None, *where, module.dilation)
            # (padding of the result may make room for one more window than there are entries)
            total = counts[(..., *(slice(n) for n in narrow))].sum()
        elif module.padding_mode == "circular" and all(
            hole * (taps - 1) < n
            for hole, taps, n in zip(module.dilation, kernel.shape, wide, strict=True)
        ):
            # every tap meets an entry of its own
            total = prod(narrow) * kernel.sum()
        else:
            # (two taps may meet the same entry)
            return None
        batch = prod(source.shape[:-rank]) // module.in_channels
        return float(total) * batch / size
    if isinstance(module, _MAXIMA):
        return outputs / size
    if isinstance(module, _ADAPTIVE_MEANS):
        rank = int(type(module).__name__[-2])
        # a window of k entries has k coefficients 1 / k
        rows = [
            sum(1 / (-(-(i + 1) * wide // narrow) - i * wide // narrow) for i in range(narrow))
            for wide, narrow in zip(source.shape[-rank:], call.output.shape[-rank:], strict=True)
        ]
        return prod(rows) * prod(source.shape[:-rank]) / size
    return (
        1.0
        if isinstance(module, nn.Identity | nn.Flatten | nn.Unflatten | nn.PixelShuffle)
        else None
    )


def _normalised(call: Call, source: Tensor) -> float | None:
    """Gains of norms, which divide entries by a statistic of the same entries."""
    module: Any = call.module
    weight = getattr(module, "weight", None)
    gamma = (
        weight.detach().double().square()
        if isinstance(weight, Tensor)
        else torch.ones((), dtype=torch.float64)
    )
    if isinstance(module, nn.GroupNorm):
        flat, centred, eps = source.reshape(len(source), module.num_groups, -1), True, module.eps
    elif isinstance(module, BATCH_NORMS):
        if not module.training and module.running_var is not None:
            return float((gamma / (module.running_var.double() + module.eps)).mean())
        flat = source.movedim(1, 0).flatten(1)
        return (1 - 2 / flat.shape[-1]) * float(
            (gamma / (flat.var(-1, correction=0) + module.eps)).mean()
        )
    elif type(module) in (nn.LayerNorm, nn.RMSNorm):
        flat = source.flatten(source.dim() - len(module.normalized_shape))
        centred = type(module) is nn.LayerNorm
        eps = torch.finfo(call.output.dtype).eps if module.eps is None else module.eps
    else:
        found = _written_norm(call, source, gamma) if source.shape == call.output.shape else None
        if found is None:
            return None
        flat, centred, eps, gamma = found
    size = flat.var(-1, correction=0) if centred else flat.square().mean(-1)
    return (
        (1 - (2 if centred else 1) / flat.shape[-1])
        * float(gamma.mean())
        * float((1 / (size + eps)).mean())
    )


def _written_norm(
    call: Call, source: Tensor, gamma: Tensor
) -> tuple[Tensor, bool, float, Tensor] | None:
    """The norm that a layer of another library computes: over the last dimension or
    channels, centred or not.
    """
    named = vars(call.module).items()
    eps = next((v for k, v in named if "eps" in k and isinstance(v, float)), 0.0)
    weight = getattr(call.module, "weight", None)
    shifted = (weight.detach().double() + 1).square() if isinstance(weight, Tensor) else gamma
    for dim, centred, squares in itertools.product((-1, 1), (True, False), (gamma, shifted)):
        flat = source.movedim(dim, -1)
        if squares.numel() not in (1, flat.shape[-1]):
            continue
        centre = flat.mean(-1, keepdim=True) if centred else torch.zeros((), dtype=flat.dtype)
        bias = getattr(call.module, "bias", None)
        bias = bias.detach().double() if isinstance(bias, Tensor) else 0.0
        size = ((flat - centre).square().mean(-1, keepdim=True) + eps).sqrt()
        answer = call.output.detach().double().movedim(dim, -1) - bias
        if torch.allclose(
            answer.square(), ((flat - centre) / size).square() * squares, rtol=1e-2, atol=1e-5
        ):
            return flat, centred, eps, squares
    return None


def _over_normal(call: Call) -> float | None:
    """``E tr K`` over inputs of independent normal entries with the mean and
    variance of the layer's input.
    """
    generator = torch.Generator().manual_seed(0)
    source, module = call.source, safe_deepcopy(call.module)
    assert source is not None
    mean, deviation = float(source.detach().mean()), float(source.detach().std(correction=0))
    received = first_real(call.given)
    total = 0.0
    try:
        with torch_kept(), torch.enable_grad():
            for _ in range(_SAMPLES):
                noise = torch.randn(source.shape, generator=generator).to(source) * deviation + mean
                normal = noise.requires_grad_()
                # the layer may receive the same tensor more than once
                args, kwargs = tree_map(
                    lambda v, x=normal: x.clone() if v is received else v, call.given
                )
                result = module(*args, **kwargs)
                output = result[0] if isinstance(result, tuple | list) else result
                (back,) = torch.autograd.grad(output, normal, rademacher(output, generator))
                total += float(back.double().square().mean())
    except (RuntimeError, TypeError, AttributeError):
        return None
    return total / _SAMPLES
