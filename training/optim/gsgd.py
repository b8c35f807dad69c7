r"""G-SGD: gradient descent on the values of basis paths, as an exact
closed-form step on the weights.

With ``lambda_e = w_e dL/dw_e``, prefixes ``pre``, suffixes ``s`` and chains ``k`` of units
that share a basis path::

    c_k = sum over e in T_in \\ T_out entering k of lambda_e
        - sum over e not in T_out leaving k of lambda_e
    R_k = 1 - lr c_k / (pre s)_k^2                          the ratio new / old of the value of p_k
    w_e <- (w_e - lr g_e / (pre_tail s_head)^2) / R_tail      edges in neither tree
    w_e <- w_e R_head / R_tail                                edges of T_in that are not in T_out

A step needs one masked reduction and one update per tensor, and vectors with one entry per unit; it
has no loop over depth and does not synchronise with the host. It equals gradient descent on path
values to rounding, and therefore commutes with every rescaling of the network.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from pathspace.errors import InputError
from pathspace.paths.skeleton import Skeleton

from .kernels import descend
from .layout import PLAIN
from .pathwise import PathOptimizer, Step, StepRule
from .settings import check_bound, modes, number
from .slots import Slot
from .tree_products import Manner

# arguments of one kind of update for several tensors
Lists = tuple[list[Tensor], ...]


@dataclass
class Together:
    """Tensors with the same kind of update, which are updated together.

    Attributes:
        plain: rate -> weights and gradients of ``w <- w - rate g``.
        scaled: rate -> weights, gradients, factors ``k`` and ``s`` of ``w <- w k - rate g s``.
    """

    plain: dict[float, Lists] = field(default_factory=dict)
    scaled: dict[float, Lists] = field(default_factory=dict)

    @staticmethod
    def add(found: dict[float, Lists], rate: float, *tensors: Tensor) -> None:
        """Add one tensor's update."""
        columns = found.get(rate)
        if columns is None:
            columns = found[rate] = tuple([] for _ in tensors)
        for column, tensor in zip(columns, tensors, strict=True):
            column.append(tensor)

    def run(self) -> None:
        """Perform all updates."""
        for rate, (weights, grads) in self.plain.items():
            torch._foreach_add_(weights, grads, alpha=-rate)
        for rate, (weights, grads, keeps, steps) in self.scaled.items():
            torch._foreach_mul_(weights, keeps)
            torch._foreach_addcmul_(weights, grads, steps, value=-rate)


@dataclass(frozen=True)
class GSGDStep(StepRule):
    """Gradient descent on path values, with the momentum and decay of the groups.

    Args:
        manner: the step's factors: squares of ``1 / scale``, bounded or not.
    """

    manner: Manner
    chains: ClassVar[tuple[str, ...]] = ("momentum_value",)
    buffers: ClassVar[tuple[str, ...]] = ("momentum_buffer",)

    def vectors(self, chains: Tensor, tensors: int) -> dict[str, Tensor]:  # noqa: ARG002
        """The momentum of chains, an average of ``dL/dp_k``."""
        return {"momentum_value": torch.zeros_like(chains)}

    def ratios(self, step: Step, gradient: Tensor) -> None:
        """``R_k = 1 - lr decay - lr c_k / p_k^2``."""
        if any(group["momentum"] for group in step.groups):
            gradient = self._chain_momentum(step, gradient)
        lr, decay = step.setting("lr"), step.setting("weight_decay")
        square, ones, rate = step.space.divisors(), step.space.vectors.one, lr
        if isinstance(lr, Tensor):
            gradient, rate = gradient * lr, 1.0
        if isinstance(decay, Tensor) or decay:
            ones = torch.ones_like(square) - lr * decay
            ones[:1].fill_(1)
        torch.addcdiv(ones, gradient, square, value=-rate, out=step.parts.ratio)

    def move(self, step: Step) -> None:
        """``w <- (w - lr M_e g) / R_tail``, and the same gauge for buffers of momentum."""
        grads, together, relative = step.downhill(), Together(), self.manner.relative
        if relative:
            # gradients with respect to logarithms of path values
            inside = [slot.block is not None for slot in step.space.slots]
            grads = [
                w * g if one else g for one, w, g in zip(inside, step.weights, grads, strict=True)
            ]
        if any(group["momentum"] for group in step.groups):
            grads = [
                self._averaged(step, slot, grad)
                for slot, grad in zip(step.space.slots, grads, strict=True)
            ]
        for i, slot in enumerate(step.space.slots):
            if not slot.idle:
                self._move(step, i, grads[i], together)
        together.run()
        # (even if the momentum is 0 now)
        kept = (
            zip(step.space.slots, step.parts.columns, strict=True)
            if step.state and not relative
            else ()
        )
        for slot, columns in kept:
            if columns is not None and "momentum_buffer" in step.state.get(slot.parameter, {}):
                # it contains the factor pre_tail s_head, and pre has changed
                buffer = step.space.moments(slot, step.state[slot.parameter], "momentum_buffer")
                buffer.div_(slot.part.spread(columns[0]))

    def _move(self, step: Step, number: int, grad: Tensor, together: Together) -> None:
        slot, weight, columns = (
            step.space.slots[number],
            step.weights[number],
            step.parts.columns[number],
        )
        part, group = slot.part, step.groups[slot.group]
        lr = rate = group["lr"]
        if isinstance(lr, Tensor):
            lr = lr.reshape(())
            grad, rate = grad * lr.to(grad), 1.0
        rate = rate * step.space.share(number)
        keep, factor = (None, slot.tail) if columns is None else columns
        head = step.heads[number]
        if self.manner.relative and slot.block is not None:
            # lambda = w dL/dw is invariant: w <- w (1 - lr lambda) / R_tail
            grad, factor, head = weight * grad, keep, None
        if group["weight_decay"]:
            weight.mul_(1 - lr * group["weight_decay"])
        if part.kind == PLAIN and not isinstance(lr, Tensor) and group["foreach"] is not False:
            together.add(together.plain, rate, weight, grad)
            return
        if step.space.few and head is None and keep is not None and factor is not None:
            together.add(
                together.scaled, rate, weight, grad, part.spread(keep), part.spread(factor)
            )
            return
        descend(
            weight, grad, part.spread(keep), part.spread(factor), head, rate, step.space.rows(slot)
        )

    @staticmethod
    def _averaged(step: Step, slot: Slot, grad: Tensor) -> Tensor:
        """A gradient, or its moving average with momentum."""
        group = step.groups[slot.group]
        if group["momentum"] == 0 or slot.idle:
            return grad
        state = step.state[slot.parameter]
        first = "momentum_buffer" not in state
        if first:
            state["momentum_buffer"] = torch.zeros_like(slot.parameter)
        buffer = step.space.moments(slot, state, "momentum_buffer")
        # as in torch, dampening does not apply to the first gradient
        buffer.mul_(group["momentum"]).add_(grad, alpha=1 if first else 1 - group["dampening"])
        return grad.add(buffer, alpha=group["momentum"]) if group["nesterov"] else buffer

    @staticmethod
    def _chain_momentum(step: Step, gradient: Tensor) -> Tensor:
        """The same for chains, with a buffer of ``dL/dp_k``; called before that of the tensors."""
        value, average = step.space.scales, step.kept["momentum_value"]
        seen = any(
            "momentum_buffer" in step.state.get(slot.parameter, {})
            for slot in step.space.slots
            if slot.block is not None
        )
        momentum, dampening, nesterov = (
            step.setting(name) for name in ("momentum", "dampening", "nesterov")
        )
        by_value = gradient / value
        # as in torch, dampening applies neither to the first gradient nor without momentum
        share = 1 - dampening * (momentum != 0) if seen else 1.0
        moved = average * momentum + by_value * share
        ahead = torch.lerp(moved, by_value + momentum * moved, by_value * 0 + nesterov)
        waits = step.space.held
        if isinstance(momentum, Tensor):
            # without momentum now, the average does not change
            waits = momentum == 0 if waits is None else waits | (momentum == 0)
        average.copy_(moved if waits is None else torch.where(waits, average, moved))
        return torch.where(value.isinf(), 0.0, ahead * value)


class GSGD(PathOptimizer):
    r"""Gradient descent on basis path values (G-SGD), with the conventions of ``torch.optim.SGD``.

    Args:
        params: ``model.named_parameters()``, named parameter groups, or parameters of
            the traced model itself.
        lr: learning rate on path values (a number or a tensor).
        skeleton: the skeleton of the traced model: ``ps.trace(model, ...).skeleton()``.
        momentum: momentum factor: that of ``torch.optim.SGD`` on path values. The buffer of a
            tensor holds the momentum of ``dL/dP(e)`` times ``pre_tail s_head``, and is multiplied
            by the ratio of ``pre_tail`` after every step.
        dampening: dampening of the momentum.
        nesterov: Nesterov's momentum.
        weight_decay: decay of *path values*, ``v <- (1 - lr weight_decay) v - lr dL/dv``, which is
            invariant under rescaling (decay of weights is not); it does not enter the momentum.
        maximize: maximise the loss.
        foreach: accepted as by torch; tensors outside path space are updated together
            unless this is ``False``.
        capturable: accepted as by torch; a step never waits for the device either way.
        fused: take each step in four kernels, whatever the number of tensors: of Triton on a CUDA
            device, of Numba on a processor (``pathspace[gpu]``, ``pathspace[cpu]``).
        differentiable: refused when true.
        min_ratio: smallest absolute ratio of a path value to its value at the start (or when
            other code last changed the weights). A path value that would come closer to zero
            is set to this limit with its sign, because the weights could not be recovered
            from 0. Ratios ``R_k`` below 0 (changes of sign) are performed exactly. Both are
            counted in :attr:`clip_counts`.
        max_multiplier: upper bound of the multiplier of the learning rate in the balanced gauge
            at the start: of ``1 / (pre_u s_v)^2`` for an edge ``u -> v``, with its root at each
            end, and of ``1 / p_k^2`` for a chain. These are invariant under rescaling, so the
            bounded step is invariant too.
        relative: steps relative to the path value, ``v <- v (1 - lr v dL/dv)``: without
            multipliers, and invariant. A path value of 0 does not change, and signs change only if
            ``lr v dL/dv`` exceeds 1.

    Raises:
        InputError: a parameter of the skeleton is missing, or a setting is out of range.
        UnsupportedError: a skeleton weight is 0, products of skeleton weights are too small to
            divide by, FullyShardedDataParallel or ZeRO has split parameters, or a mode is refused.

    Parameters outside path space (pinned or unused ones) move by plain gradient descent in the same
    step. A parameter of path space without ``requires_grad`` keeps its value, and path values that
    would change it are constant.

    Example:
        >>> import torch, pathspace as ps
        >>> from pathspace.training import GSGD, init_skeleton
        >>> _ = torch.manual_seed(0)
        >>> model = torch.nn.Sequential(
        ...     torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1)
        ... )
        >>> x, y = torch.randn(64, 4), torch.randn(64, 1)
        >>> skeleton = ps.trace(model, x).skeleton()
        >>> init_skeleton(model, skeleton)
        >>> optimizer = GSGD(model.named_parameters(), lr=0.05, skeleton=skeleton)
        >>> losses = []
        >>> for _ in range(50):
        ...     optimizer.zero_grad()
        ...     loss = torch.nn.functional.mse_loss(model(x), y)
        ...     loss.backward()
        ...     _ = optimizer.step()
        ...     losses.append(loss.item())
        >>> losses[-1] < losses[0]
        True

    Reference:
        Path space for recurrent neural networks with ReLU activations, section 4 and Algorithm 2,
        in the corrected general form of the documentation.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        *,
        skeleton: Skeleton,
        momentum: float = 0.0,
        dampening: float = 0.0,
        nesterov: bool = False,
        weight_decay: float = 0.0,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        fused: bool | None = None,
        differentiable: bool = False,
        min_ratio: float = 1e-12,
        max_multiplier: float | None = None,
        relative: bool = False,
    ) -> None:
        for name, value in (("lr", lr), ("momentum", momentum), ("weight_decay", weight_decay)):
            number("GSGD", name, value)
        number("GSGD", "dampening", dampening, low=-float("inf"))
        check_bound("GSGD", max_multiplier, relative)
        if nesterov and (momentum <= 0 or dampening != 0):
            raise InputError(
                "GSGD found nesterov=True, which needs momentum above 0 and dampening 0."
            )
        modes("GSGD", None, differentiable)
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening,
            "nesterov": nesterov,
            "weight_decay": weight_decay,
            "maximize": maximize,
            "foreach": foreach,
            "capturable": capturable,
            "fused": fused,
            "differentiable": differentiable,
        }
        manner = Manner(
            False, max_multiplier, relative, "" if max_multiplier else ", pass max_multiplier=1.0"
        )
        super().__init__(params, defaults, skeleton, min_ratio, GSGDStep(manner))


__all__ = ["GSGD", "GSGDStep"]
