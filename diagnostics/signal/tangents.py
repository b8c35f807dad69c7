"""Tangents of the outputs of layers: an infinitesimal perturbation, followed through a model by
forward differentiation.

``dz_l = (dz_l / dx) dx`` for random ``dx``, in one run, for the output ``z_l`` of each call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_map

from pathspace.errors import CaptureError, InputError, first_line
from pathspace.models.inputs import arranged, check_inputs, describe_inputs

from ..shared.layers import RecordedRun, hooked
from ..shared.real_tensors import in_float64, is_real
from ..shared.unchanged import unchanged


def follow_tangents(
    model: nn.Module,
    inputs: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
    layers: Mapping[str, nn.Module],
    at: Any,
    start: str | None,
    generator: torch.Generator,
) -> list[Tensor]:
    """Tangents of the outputs of layers, in order of execution.

    Args:
        model: a float64 model.
        inputs: positional inputs.
        kwargs: keyword inputs.
        layers: the layers by name.
        at: index of the part of the tensor to perturb; ``None`` for all of it.
        start: name of the layer whose output is perturbed instead of the first input.
        generator: of the perturbation.

    Raises:
        InputError: there is nothing to perturb, or none of the layers is called.
        CaptureError: the model raises, or an operation has no forward derivative.
    """
    check_inputs(model, tuple(inputs), dict(kwargs or {}))
    used: list[Tensor] = []
    named_modules = dict(model.named_modules())
    if start is not None and start not in named_modules:
        raise InputError(
            f"growth_exponent found no layer {start!r} in {type(model).__name__}; see"
            " named_modules()."
        )

    def perturb(value: Any) -> Any:
        # inputs become float64 like the weights
        value = in_float64(value)
        if used or not is_real(value):
            return value
        used.append(value)
        noise = torch.randn(value.shape, generator=generator, dtype=torch.float64).to(value.device)
        if at is not None:
            mask = torch.zeros_like(noise)
            mask[at] = 1
            noise = noise * mask
        return forward_ad.make_dual(value, noise)

    run, tangents = RecordedRun(), []
    # without gradients, torch's layers would use fused kernels without forward derivatives
    with (
        unchanged(model),
        sdpa_kernel(SDPBackend.MATH),
        torch.enable_grad(),
        forward_ad.dual_level(),
    ):
        try:
            args, named = tree_map(
                perturb if start is None else in_float64, arranged(model, inputs, kwargs)
            )
            with ExitStack() as stack:
                if start is not None:
                    hook = named_modules[start].register_forward_hook(
                        lambda _m, _a, out: tree_map(perturb, out)
                    )
                    stack.callback(hook.remove)
                stack.enter_context(hooked(layers, run, differentiable=False))
                model(*args, **named)
        except Exception as error:
            raise CaptureError(
                f"{type(model).__name__} raised {type(error).__name__} on inputs"
                f" ({describe_inputs(inputs, kwargs or {})}) under forward differentiation:"
                f" {first_line(error)}; check the inputs, or this operation."
            ) from error
        for call in run.calls:
            tangent = forward_ad.unpack_dual(call.output).tangent
            tangents.append(
                torch.zeros_like(call.output) if tangent is None else tangent.detach().clone()
            )
    if not used:
        raise InputError(
            "growth_exponent found no floating-point input to perturb; name a layer by start=."
            if start is None
            else (
                f"growth_exponent: {type(model).__name__} does not call the layer {start!r} on"
                " these inputs."
            )
        )
    if not tangents:
        raise InputError(
            "growth_exponent: the model called none of the chosen layers on these inputs."
        )
    return tangents
