"""Functions with the gradient of the penal connection, ``g + tau z``, and the value of the model.

If possible, a function keeps only tensors that autograd keeps anyway: both operands of a sum, or
the inputs of a norm that computes ``z``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from pathspace.errors import UnsupportedError

Again = Callable[..., Tensor]


class _Application:
    """One use of a function: with nested transforms of ``torch.func``, each of
    their levels calls backward.
    """

    entered, level = 0, 0

    def enter(self) -> int:
        """Return the number of the current level."""
        self.entered += 1
        return self.entered


class _Penalised(torch.autograd.Function):
    """Base class of the functions: a single derivative, by autograd or one
    transform of ``torch.func``.

    Backward adds a term that does not depend on the incoming gradient, so a second
    derivative would add it again.
    """

    generate_vmap_rule = True

    @staticmethod
    def remember(ctx: Any, application: _Application | None, *tensors: Tensor) -> None:
        """Save the tensors for backward."""
        ctx.save_for_backward(*tensors)
        ctx.application, ctx.level = application, 0 if application is None else application.enter()


def _first_derivative(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Refuse second derivatives, because some of their paths would not include the penalty."""

    @wraps(backward)
    def checked(ctx: Any, *gradients: Tensor) -> Any:
        application = ctx.application
        if application is not None:
            application.level = application.level or ctx.level
            if (torch.is_grad_enabled() and not transforming()) or application.level != ctx.level:
                raise UnsupportedError(
                    "The gradient of a penalised model was asked for with create_graph=True, or by"
                    " one transform of torch.func inside another, and a second derivative would"
                    " miss the penalty; call model.penal_connection.remove() and write the penalty"
                    " into the loss."
                )
        return backward(ctx, *gradients)

    return checked


def transforming() -> bool:
    """Whether a transform of ``torch.func`` runs: they differentiate with
    create_graph=True in any case.
    """
    return not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active()  # noqa: SLF001


def learns(direction: Tensor) -> bool:
    """Whether a gradient will reach a tensor."""
    # (inside a vmap, requires_grad does not show the gradients of an outer transform)
    return torch.is_grad_enabled() and (direction.requires_grad or transforming())


def _apply(function: type[_Penalised], *args: Any) -> Any:
    if torch.compiler.is_compiling():
        return function.apply(*args, None)  # type: ignore[no-untyped-call]
    try:
        return function.apply(*args, _Application())  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        if not transforming():
            raise
        raise UnsupportedError(
            "The penal connection has no forward-mode derivative, so jvp, jacfwd and hessian of"
            " torch.func do not work with it; call model.penal_connection.remove(), or write the"
            " penalty into the loss."
        ) from error


def _added(gradient: Tensor, direction: Tensor, coefficient: float) -> Tensor:
    """``gradient + coefficient * direction``, with the correct mean in 16-bit types.

    Rounding to the nearest number would lose every term below half a unit in the last
    place. So if this unit is larger than the mean size of the term, the sum is rounded by
    dithering with a fixed pattern. Otherwise rounding to the nearest number preserves the
    mean too, with half of the noise.
    """
    if gradient.dtype not in (torch.bfloat16, torch.float16) or direction.dtype != gradient.dtype:
        return torch.add(gradient, direction, alpha=coefficient)
    exact = torch.add(gradient.float(), direction.float(), alpha=coefficient)
    size = exact.to(gradient.dtype).abs()
    unit = size - torch.nextafter(size, torch.zeros_like(size))
    # thresholds in (-1/2, 1/2) from multiples of the golden ratio, without random numbers
    place = torch.arange(direction.numel(), dtype=torch.int32, device=direction.device).view(
        direction.shape
    )
    mixed = (place + direction.view(torch.int16)) & 0x7FFF
    pattern = ((mixed * 40503 >> 4 & 0xFFF) - 2047.5) / 4096
    coarse = unit > abs(coefficient) * direction.abs().mean(dtype=torch.float32)
    return (exact + pattern * (unit * coarse)).to(gradient.dtype)


class _Saved(_Penalised):
    """The identity with the gradient ``g + coefficient * z``; keeps ``z``, or
    the arguments of ``again``.
    """

    @staticmethod
    def forward(
        direction: Tensor, _coefficient: float, _again: Again | None, *_rest: Any
    ) -> Tensor:
        return direction.view_as(direction)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, _output: Tensor) -> None:
        direction, ctx.coefficient, ctx.again, *kept, application = inputs
        ctx.unmoved = (None,) * (len(inputs) - 1)
        _Penalised.remember(ctx, application, *(kept or [direction]))

    @staticmethod
    @_first_derivative
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return _added(gradients[0], _found_again(ctx), ctx.coefficient), *ctx.unmoved


class _Sum(_Penalised):
    """``stream + scale * branch``, which computes ``z`` as the difference of two
    tensors that are kept anyway.
    """

    @staticmethod
    def forward(stream: Tensor, branch: Tensor, scale: float, *_rest: Any) -> Tensor:
        return torch.add(stream, branch, alpha=scale) if scale != 1 else stream + branch

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        stream, branch, ctx.scale, ctx.coefficient, application = inputs
        ctx.types = stream.dtype, branch.dtype
        _Penalised.remember(ctx, application, stream, output)

    @staticmethod
    @_first_derivative
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        to_stream = gradients[0].to(ctx.types[0]) if ctx.needs_input_grad[0] else None
        to_branch = None
        if ctx.needs_input_grad[1]:
            stream, out = ctx.saved_tensors
            whole = out - stream
            if whole.dtype == gradients[0].dtype and not transforming():
                # into an existing tensor, which halves the memory traffic
                torch.add(gradients[0], whole, alpha=ctx.coefficient, out=whole)
            else:
                whole = torch.add(gradients[0], whole, alpha=ctx.coefficient)
            to_branch = (ctx.scale * whole if ctx.scale != 1 else whole).to(ctx.types[1])
        return to_stream, to_branch, None, None, None


class _Nothing(_Penalised):
    """Zero, with the gradient ``coefficient * z``: added to the other operand of an
    addition that overwrites z.
    """

    @staticmethod
    def forward(
        direction: Tensor, _coefficient: float, again: Again | None, *_rest: Any
    ) -> tuple[Tensor, Tensor]:
        copy = direction.clone() if again is None else direction.new_empty(0)
        return direction.new_zeros(()).expand_as(direction), copy

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: tuple[Tensor, Tensor]) -> None:
        _, ctx.coefficient, ctx.again, *kept, application = inputs
        ctx.unmoved = (None,) * (len(inputs) - 1)
        ctx.mark_non_differentiable(output[1])
        _Penalised.remember(ctx, application, *(kept or [output[1]]))

    @staticmethod
    @_first_derivative
    def backward(ctx: Any, *_gradients: Tensor) -> Any:
        return ctx.coefficient * _found_again(ctx), *ctx.unmoved


def _found_again(ctx: Any) -> Tensor:
    return ctx.saved_tensors[0] if ctx.again is None else ctx.again(*ctx.saved_tensors)  # type: ignore[no-any-return]


def penalised(
    direction: Tensor, coefficient: float, again: Again | None = None, *kept: Tensor
) -> Tensor:
    """``z`` with the gradient ``g + coefficient * z``.

    Args:
        direction: ``z``.
        coefficient: what multiplies it.
        again: computes ``z`` from the tensors that are kept; without it ``z`` is kept.
        *kept: those tensors.
    """
    return _apply(_Saved, direction, coefficient, again, *kept)  # type: ignore[no-any-return]


def penalised_zero(
    direction: Tensor, coefficient: float, again: Again | None = None, *kept: Tensor
) -> Tensor:
    """Zero, with the gradient ``coefficient * z``: for additions that overwrite ``z``.

    Args:
        direction: ``z``.
        coefficient: what multiplies it.
        again: computes ``z`` from the tensors that are kept; without it a copy of ``z`` is kept.
        *kept: those tensors.
    """
    return _apply(_Nothing, direction, coefficient, again, *kept)[0]  # type: ignore[no-any-return]


def penalised_sum(stream: Tensor, branch: Tensor, scale: float, coefficient: float) -> Tensor:
    """``stream + z`` with ``z = scale * branch`` and the gradient ``g + coefficient *
    z`` with respect to ``z``.

    Args:
        stream: the stream.
        branch: the output of the branch.
        scale: factor of ``branch``.
        coefficient: factor of ``z`` in the gradient.
    """
    return _apply(_Sum, stream, branch, scale, coefficient)  # type: ignore[no-any-return]
