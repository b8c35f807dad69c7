"""Functions with the gradient of the penal connection: ``g + tau z`` where the value is that of the model.

What a function keeps for it is what autograd keeps anyway, where there is such a thing: both sides of a sum, or what a
norm computes ``z`` from.
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
    """One use of a function below: under nested transforms of ``torch.func`` each of their levels calls backward."""

    entered, level = 0, 0

    def enter(self) -> int:
        """Number the level that comes by."""
        self.entered += 1
        return self.entered


class _Penalised(torch.autograd.Function):
    """What the functions below share: one derivative, by any of autograd and the transforms of ``torch.func``.

    Backward adds a term that does not depend on the gradient given, so a derivative of it would add the term again.
    """

    generate_vmap_rule = True

    @staticmethod
    def remember(ctx: Any, application: _Application | None, *tensors: Tensor) -> None:
        """Keep what backward needs."""
        ctx.save_for_backward(*tensors)
        ctx.application, ctx.level = application, 0 if application is None else application.enter()


def _first_derivative(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Refuse a gradient that is going to be differentiated: some of its paths would miss the penalty."""

    @wraps(backward)
    def checked(ctx: Any, *gradients: Tensor) -> Any:
        application = ctx.application
        if application is not None:
            application.level = application.level or ctx.level
            if (torch.is_grad_enabled() and not transforming()) or application.level != ctx.level:
                raise UnsupportedError(
                    "The gradient of a penalised model was asked for with create_graph=True, or by one transform of "
                    "torch.func inside another, and a second derivative would miss the penalty; call "
                    "model.penal_connection.remove() and write the penalty into the loss."
                )
        return backward(ctx, *gradients)

    return checked


def transforming() -> bool:
    """Whether a transform of ``torch.func`` runs: they differentiate with create_graph=True in any case."""
    return not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active()  # noqa: SLF001


def learns(direction: Tensor) -> bool:
    """Whether a gradient will reach a tensor."""
    # inside of a vmap, a value does not say that a transform around it will differentiate by it
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
            "The penal connection has no forward-mode derivative, so jvp, jacfwd and hessian of torch.func do not "
            "work with it; call model.penal_connection.remove(), or write the penalty into the loss."
        ) from error


def _added(gradient: Tensor, direction: Tensor, coefficient: float) -> Tensor:
    """``gradient + coefficient * direction``, of which types of 16 bits keep the mean.

    Rounded to the nearest, a term below half a unit in the last place is lost wherever it stands. So where a unit is
    more than the mean size of the term, the sum is rounded up as often as it is close to the upper number, by a fixed
    pattern. Where a unit is less, the nearest number keeps the mean as well, with half of the noise.
    """
    if gradient.dtype not in (torch.bfloat16, torch.float16) or direction.dtype != gradient.dtype:
        return torch.add(gradient, direction, alpha=coefficient)
    exact = torch.add(gradient.float(), direction.float(), alpha=coefficient)
    size = exact.to(gradient.dtype).abs()
    unit = size - torch.nextafter(size, torch.zeros_like(size))
    # places and values, spread over (-1/2, 1/2) by multiples of the golden ratio: no random number of the run is used
    place = torch.arange(direction.numel(), dtype=torch.int32, device=direction.device).view(direction.shape)
    mixed = (place + direction.view(torch.int16)) & 0x7FFF
    pattern = ((mixed * 40503 >> 4 & 0xFFF) - 2047.5) / 4096
    coarse = unit > abs(coefficient) * direction.abs().mean(dtype=torch.float32)
    return (exact + pattern * (unit * coarse)).to(gradient.dtype)


class _Saved(_Penalised):
    """Identity whose gradient is ``g + coefficient * z``; keeps ``z``, or what ``again`` computes it from."""

    @staticmethod
    def forward(direction: Tensor, _coefficient: float, _again: Again | None, *_rest: Any) -> Tensor:
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
    """``stream + scale * branch``, which finds ``z`` again as the difference of two tensors kept anyway."""

    @staticmethod
    def forward(stream: Tensor, branch: Tensor, scale: float, *_rest: Any) -> Tensor:
        return torch.add(stream, branch, alpha=scale) if scale != 1 else stream + branch

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        stream, branch, ctx.scale, ctx.coefficient, ctx.again, application = inputs
        ctx.types = stream.dtype, branch.dtype
        _Penalised.remember(ctx, application, *((stream, output) if ctx.again is None else ()))

    @staticmethod
    @_first_derivative
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        to_stream = gradients[0].to(ctx.types[0]) if ctx.needs_input_grad[0] else None
        to_branch = None
        if ctx.needs_input_grad[1]:
            whole = (_difference if ctx.again is None else ctx.again)(*ctx.saved_tensors)
            if whole.dtype == gradients[0].dtype and not transforming():
                # into the tensor that is there already: half the memory traffic of another new one
                torch.add(gradients[0], whole, alpha=ctx.coefficient, out=whole)
            else:
                whole = torch.add(gradients[0], whole, alpha=ctx.coefficient)
            to_branch = (ctx.scale * whole if ctx.scale != 1 else whole).to(ctx.types[1])
        return to_stream, to_branch, None, None, None, None


def _difference(stream: Tensor, out: Tensor) -> Tensor:
    return out - stream


class _Nothing(_Penalised):
    """Zero, with the gradient ``coefficient * z``: added to the other operand of an addition that overwrites z."""

    @staticmethod
    def forward(direction: Tensor, _coefficient: float, again: Again | None, *_rest: Any) -> tuple[Tensor, Tensor]:
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


def penalised(direction: Tensor, coefficient: float, again: Again | None = None, *kept: Tensor) -> Tensor:
    """``z`` itself, whose gradient becomes ``g + coefficient * z``.

    Args:
        direction: ``z``.
        coefficient: what multiplies it.
        again: computes ``z`` from the tensors that are kept; without it ``z`` is kept.
        *kept: those tensors.
    """
    return _apply(_Saved, direction, coefficient, again, *kept)  # type: ignore[no-any-return]


def penalised_zero(direction: Tensor, coefficient: float, again: Again | None = None, *kept: Tensor) -> Tensor:
    """Zero, with the gradient ``coefficient * z``: for additions that overwrite ``z``.

    Args:
        direction: ``z``.
        coefficient: what multiplies it.
        again: computes ``z`` from the tensors that are kept; without it a copy of ``z`` is kept.
        *kept: those tensors.
    """
    return _apply(_Nothing, direction, coefficient, again, *kept)[0]  # type: ignore[no-any-return]


def penalised_sum(
    stream: Tensor, branch: Tensor, scale: float, coefficient: float, again: Again | None = None
) -> Tensor:
    """``stream + z`` with ``z = scale * branch``, whose gradient by ``z`` becomes ``g + coefficient * z``.

    Args:
        stream: the other side of the addition.
        branch: what is added.
        scale: what multiplies it.
        coefficient: what multiplies ``z`` in the gradient.
        again: computes ``z``; without it both sides of the addition are kept.
    """
    return _apply(_Sum, stream, branch, scale, coefficient, again)  # type: ignore[no-any-return]


__all__ = ["Again", "learns", "penalised", "penalised_sum", "penalised_zero", "transforming"]
