"""The three optimizers of the evolution notes (2.2 to 2.4), corrected, with torch's own
code where it is equivalent.

* Moving-average descent is ``torch.optim.SGD`` with ``dampening = momentum``
  and a zero initial buffer.
* Rescaled descent divides each tensor's gradient by its root mean square over elements;
  torch has no equivalent.
* Sign descent without memory is ``torch.optim.Adam(betas=(0, 0), eps=0)``; with memory it
  is Lion with equal betas.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from pathspace.errors import UnsupportedError

from .settings import expect_parameters, modes, number


class EMASGD(SGD):
    r"""Moving-average descent: ``g <- gamma g + (1 - gamma) dL/dw``, ``w <- w
    - lr g``, from ``g = 0``.

    It differs from ``torch.optim.SGD(momentum=gamma, dampening=gamma)`` only in the first
    step: torch initialises its buffer with the first gradient, the notes with zero. All
    of torch's code is reused.

    Args:
        params: parameters, as for every torch optimizer.
        lr: learning rate.
        gamma: decay of the average, at least 0 and below 1 (with 1 the weights would never move).
        maximize: ascend instead.
        foreach: as for ``torch.optim.SGD``.
        capturable: accepted; nothing waits for the device either way.
        fused: as for ``torch.optim.SGD``.
        differentiable: refused when true.

    Raises:
        InputError: a setting is out of range.
        UnsupportedError: a mode that is refused.

    Example:
        >>> import torch
        >>> from pathspace.training import EMASGD
        >>> w = torch.nn.Parameter(torch.ones(1))
        >>> optimizer = EMASGD([w], lr=0.5, gamma=0.5)
        >>> w.grad = torch.ones(1)
        >>> optimizer.step()
        >>> w.item()
        0.75

    Reference:
        Evolution of neural network, equation (2.3).
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        gamma: float = 0.9,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,  # noqa: ARG002  (as by torch)
        fused: bool | None = None,
        differentiable: bool = False,
    ) -> None:
        # (differentiable is refused because the buffers start outside the differentiated graph)
        modes("EMASGD", None, differentiable)
        number("EMASGD", "lr", lr)
        number("EMASGD", "gamma", gamma, high=1.0)
        params = expect_parameters("EMASGD", params)
        super().__init__(
            params,
            lr=lr,
            momentum=gamma,
            dampening=gamma,
            maximize=maximize,
            foreach=foreach,
            fused=fused,
        )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step; with a closure, the loss it returns."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if (
                    parameter.grad is not None
                    and group["momentum"]
                    and state.get("momentum_buffer") is None
                ):
                    state["momentum_buffer"] = torch.zeros_like(parameter)
        # torch's step without its wrapper, because hooks are already called for this step
        inspect.unwrap(SGD.step)(self)
        return loss


class _PerTensor(Optimizer, ABC):
    """Base class of optimizers with a moving average from zero and a direction for each tensor.

    ``foreach`` and ``capturable`` are accepted as by torch (a step processes one tensor after the
    other, and never waits for the device); ``fused`` and ``differentiable`` are refused.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor,
        gamma: float,
        maximize: bool,
        modes_of_torch: dict[str, Any],
        **more: Any,
    ) -> None:
        number(type(self).__name__, "lr", lr)
        number(type(self).__name__, "gamma", gamma, high=1.0)
        modes(type(self).__name__, modes_of_torch["fused"], modes_of_torch["differentiable"])
        params = expect_parameters(type(self).__name__, params)
        super().__init__(
            params, {"lr": lr, "gamma": gamma, "maximize": maximize, **modes_of_torch, **more}
        )

    @abstractmethod
    def _direction(self, average: Tensor, group: dict[str, Any]) -> Tensor:
        """The negative direction of a tensor's step, given its average gradient."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step; with a closure, the loss it returns."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None or not parameter.numel():
                    continue
                if parameter.grad.is_sparse or parameter.grad.is_complex():
                    raise UnsupportedError(
                        f"{type(self).__name__} found a sparse or complex gradient, expected a"
                        " dense real one; use dense embeddings."
                    )
                grad = -parameter.grad if group["maximize"] else parameter.grad
                if group["gamma"]:
                    state = self.state[parameter]
                    if "average" not in state:
                        state["average"] = torch.zeros_like(parameter)
                    grad = state["average"].lerp_(grad, 1 - group["gamma"])
                lr = group["lr"]
                rate = lr.to(parameter).reshape(()) if isinstance(lr, Tensor) else lr
                parameter.sub_(self._direction(grad, group) * rate)
        return loss


class RescaleSGD(_PerTensor):
    r"""Rescaled descent: ``w <- w - lr g / rms(g)`` for every tensor, ``g`` a
    moving average from zero.

    The notes use the standard deviation, which is 0 for a tensor of one element and close to
    0 for a nearly constant gradient; here it is the root mean square. All gradients are
    computed at one point. Steps have a fixed length, so they oscillate around a minimum
    unless the learning rate decays.

    Args:
        params: parameters, as for every torch optimizer.
        lr: learning rate.
        gamma: decay of the average.
        eps: constant added to the root mean square; it is absolute, so choose it
            far below all gradients.
        maximize: ascend instead.
        foreach: accepted as by torch.
        capturable: accepted as by torch.
        fused: refused when true.
        differentiable: refused when true.

    Raises:
        InputError: a setting is out of range.
        UnsupportedError: a mode that is refused; sparse or complex gradients.

    Example:
        >>> import torch
        >>> from pathspace.training import RescaleSGD
        >>> w = torch.nn.Parameter(torch.zeros(2))
        >>> w.grad = torch.tensor([1e-6, -1e-6])
        >>> RescaleSGD([w], lr=0.5).step()
        >>> w.tolist()
        [-0.5, 0.5]

    Reference:
        Evolution of neural network, equation (2.5), corrected.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        gamma: float = 0.0,
        *,
        eps: float = 1e-30,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        fused: bool | None = None,
        differentiable: bool = False,
    ) -> None:
        number("RescaleSGD", "eps", eps)
        more = {
            "foreach": foreach,
            "capturable": capturable,
            "fused": fused,
            "differentiable": differentiable,
        }
        super().__init__(params, lr, gamma, maximize, more, eps=eps)

    def _direction(self, average: Tensor, group: dict[str, Any]) -> Tensor:
        # divide by the largest entry first, because squares of small gradients underflow
        top = average.abs().amax().clamp(min=torch.finfo(average.dtype).tiny)
        shape = average / top
        bottom = shape.square().mean().sqrt() + group["eps"] / top
        # a zero gradient has no direction, even if eps underflows in its type
        return torch.where(bottom == 0, shape, shape / bottom)


class SignProp(_PerTensor):
    r"""Sign descent: ``w <- w - lr sign(g)``, ``g`` a moving average from zero.

    With ``gamma = 0`` this is ``torch.optim.Adam(betas=(0, 0), eps=0)`` (which divides 0 by 0 for
    zero gradients); with ``gamma > 0`` it is Lion with equal betas.

    Args:
        params: parameters, as for every torch optimizer.
        lr: learning rate.
        gamma: decay of the average.
        maximize: ascend instead.
        foreach: accepted as by torch.
        capturable: accepted as by torch.
        fused: refused when true.
        differentiable: refused when true.

    Raises:
        InputError: a setting is out of range.
        UnsupportedError: a mode that is refused; sparse or complex gradients.

    Example:
        >>> import torch
        >>> from pathspace.training import SignProp
        >>> w = torch.nn.Parameter(torch.zeros(3))
        >>> w.grad = torch.tensor([2.0, -0.1, 0.0])
        >>> SignProp([w], lr=0.5).step()
        >>> w.tolist()
        [-0.5, 0.5, 0.0]

    Reference:
        Evolution of neural network, section 2.4.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        gamma: float = 0.0,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        fused: bool | None = None,
        differentiable: bool = False,
    ) -> None:
        more = {
            "foreach": foreach,
            "capturable": capturable,
            "fused": fused,
            "differentiable": differentiable,
        }
        super().__init__(params, lr, gamma, maximize, more)

    def _direction(self, average: Tensor, group: dict[str, Any]) -> Tensor:  # noqa: ARG002
        # keep NaN, whose sign is 0 in torch
        return torch.where(average.isnan(), average, average.sign())
