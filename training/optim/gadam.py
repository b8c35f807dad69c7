r"""G-Adam: Adam on the values of basis paths, as a step on the weights.

With ``D_e = pre_tail s_head`` for an edge ``e`` in neither tree and ``D_k = (pre s)_k`` for a
chain, the gradients with respect to path values are ``G_e = g_e / D_e`` and ``G_k = c_k / D_k``
(``c_k`` as in G-SGD). Adam computes directions ``U`` from them, and::

    R_k = 1 - lr U_k / D_k
    w_e <- (w_e - lr U_e / D_e) / R_tail                      edges in neither tree
    w_e <- w_e R_head / R_tail                                edges of T_in that are not in T_out
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from pathspace.errors import InputError
from pathspace.paths.skeleton import Skeleton

from .kernels import groups
from .pathwise import PathOptimizer, Step, StepRule
from .settings import check_bound, modes, number, pair
from .tree_products import Manner


@dataclass(frozen=True)
class GAdamStep(StepRule):
    """Adam on path values."""

    manner: Manner
    chains: ClassVar[tuple[str, ...]] = ("mean", "square", "ages")
    buffers: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq")

    def vectors(self, chains: Tensor, tensors: int) -> dict[str, Tensor]:
        """Both moments of chains, the numbers of steps of chains, and those of tensors."""
        zero = torch.zeros_like
        ages = torch.zeros(tensors, dtype=chains.dtype, device=chains.device)
        return {"mean": zero(chains), "square": zero(chains), "ages": zero(chains), "steps": ages}

    def ratios(self, step: Step, gradient: Tensor) -> None:
        """``R_k = 1 - lr decay - lr U_k / p_k`` with Adam's direction ``U_k``."""
        space, kept = step.space, step.kept
        kept["ages"].add_(1 if space.held is None else (~space.held).double())
        scale = space.scales
        lr, decay, eps = (step.setting(name) for name in ("lr", "weight_decay", "eps"))
        one, two = (step.setting("betas", place) for place in (0, 1))
        by_value = gradient / scale
        mean = kept["mean"].lerp(by_value, 1 - one)
        square = kept["square"] * two + by_value * by_value * (1 - two)
        if space.held is not None:
            mean = torch.where(space.held, kept["mean"], mean)
            square = torch.where(space.held, kept["square"], square)
        kept["mean"].copy_(mean)
        kept["square"].copy_(square)
        mean = mean / (1 - one ** kept["ages"])
        bottom = square.sqrt_().div_((1 - two ** kept["ages"]).sqrt_()).add_(eps)
        # with eps = 0 some are 0 / 0: those without any gradient so far, and the root's
        bottom.masked_fill_(bottom == 0, torch.inf)
        step.parts.ratio.copy_(1 - lr * decay - lr * mean / bottom / scale)
        step.parts.ratio[:1].fill_(1)

    def move(self, step: Step) -> None:
        """``w <- (w - lr U_e / D_e) / R_tail`` with Adam's direction ``U_e``."""
        directions, slots = step.downhill(), step.space.slots
        moving = [0.0 if slot.idle else 1.0 for slot in slots]
        steps = step.kept["steps"]
        # (a list of numbers would be copied to the device at every step)
        steps.add_(1 if all(moving) else torch.stack([steps.new_full((), one) for one in moving]))
        rates = self._rates(step)
        for i, slot in enumerate(slots):
            if not slot.idle:
                rate, small = (values[i] for values in rates[slot.group, slot.held.dtype])
                self._move(step, i, directions[i], rate, small)

    @staticmethod
    def _rates(step: Step) -> dict[tuple[int, torch.dtype], tuple[Tensor, Tensor]]:
        """For every group and type, ``lr sqrt(1 - b2^t) / (1 - b1^t)`` and ``eps sqrt(1
        - b2^t)`` of all tensors.
        """
        result: dict[tuple[int, torch.dtype], tuple[Tensor, Tensor]] = {}
        for slot in step.space.slots:
            key = (slot.group, slot.held.dtype)
            if key not in result:
                group = step.groups[slot.group]
                # (0 / 0 for a tensor without a step so far, which is not moved)
                one, two = (1 - beta ** step.kept["steps"] for beta in group["betas"])
                root = two.sqrt_()
                # (kept on the device, so that nothing waits for them)
                rate, small = group["lr"] * root / one, group["eps"] * root
                result[key] = rate.to(slot.held.dtype), small.to(slot.held.dtype)
        return result

    def _move(
        self, step: Step, number: int, direction: Tensor, rate: Tensor, small: Tensor
    ) -> None:
        """Adam on one tensor: gradients with respect to path values, moments,
        and the step on weights.
        """
        slot, weight, columns = (
            step.space.slots[number],
            step.weights[number],
            step.parts.columns[number],
        )
        part, group, state = slot.part, step.groups[slot.group], step.state[slot.parameter]
        if "exp_avg" not in state:
            state["exp_avg"] = torch.zeros_like(slot.parameter)
            state["exp_avg_sq"] = torch.zeros_like(slot.parameter)
        moments = [step.space.moments(slot, state, name) for name in ("exp_avg", "exp_avg_sq")]
        keep, factor = (None, slot.tail) if columns is None else columns
        share = step.space.share(number)
        first, head, own = slot.tail, step.heads[number], None
        if part.span is not None:
            # bounded 1 / pre before this step
            first = step.space.bounded_factor[part.span].view(part.tail.shape).to(weight.dtype)
        if self.manner.relative and slot.block is not None:
            # gradients with respect to logarithms of path values: times the
            # weight, for gradient and step
            first, factor, head, own = None, keep, None, weight.clone()
        if group["weight_decay"]:
            shrink = 1 - group["lr"] * group["weight_decay"]
            weight.mul_(shrink.reshape(()) if isinstance(shrink, Tensor) else shrink)
        factors = (part.spread(first), part.spread(keep), part.spread(factor), head, own)
        # without eps, a weight without any gradient so far does not move
        exact = not isinstance(group["eps"], Tensor) and group["eps"] == 0
        for w, d, m, v, f, k, s, h, o in groups(
            step.space.rows(slot), weight, direction, *moments, *factors
        ):
            assert w is not None and d is not None and m is not None and v is not None
            moved = adam(
                d if share == 1 else d * share, m, v, (f, h, o), group["betas"], small, exact
            )
            for side in (h, o):
                if side is not None:
                    moved.mul_(side)
            if k is not None:
                w.mul_(k)
            w.addcmul_(moved, rate if s is None else s * rate, value=-share)


def adam(
    grad: Tensor,
    mean: Tensor,
    square: Tensor,
    factors: tuple[Tensor | None, ...],
    betas: tuple[Any, Any],
    small: Tensor,
    exact: bool,
) -> Tensor:
    """Adam's direction for a gradient times factors, without the bias correction of the rate.

    Args:
        grad: the gradient with respect to weights.
        mean: first moments, updated in place.
        square: second moments, updated in place.
        factors: factors that broadcast to the gradient; ``None`` for 1.
        betas: decay rates of the moments.
        small: constant added to the root of the second moment.
        exact: whether a second moment of 0 means no step.
    """
    work = torch.empty_like(grad, memory_format=torch.contiguous_format)
    for factor in factors:
        if factor is not None:
            grad = torch.mul(grad, factor, out=work)
    mean.lerp_(grad, 1 - betas[0])
    square.mul_(betas[1]).addcmul_(grad, grad, value=1 - betas[1])
    bottom = torch.sqrt(square, out=work).add_(small)
    if exact:
        bottom.masked_fill_(bottom == 0, torch.inf)
    return torch.div(mean, bottom, out=work)


class GAdam(PathOptimizer):
    r"""Adam on basis path values (G-Adam), with the conventions of ``torch.optim.AdamW``.

    The moments are those of path values: the moments of ``P(e)`` are stored like the weight
    ``w_e``, those of ``p_k`` in vectors with one entry per chain. Moments of ``dL/dw`` would depend
    on the scale: a rescaling multiplies them by factors that differ between steps, and ``eps``
    would depend on the scale. No rescaling changes a path value or its gradient, so every step,
    including ``eps`` and the decay, commutes with every rescaling.

    Args:
        params: ``model.named_parameters()``, named parameter groups, or parameters of
            the traced model itself.
        lr: learning rate (a number or a tensor).
        betas: decay rates of the two moments.
        eps: constant added to the root of the second moment; with 0, a path value without any
            gradient so far does not change.
        weight_decay: decoupled decay of path values, ``v <- (1 - lr weight_decay) v - lr U``.
        skeleton: the skeleton of the traced model.
        maximize: maximise the loss.
        amsgrad: refused when true.
        foreach: accepted as by torch, without effect.
        capturable: accepted as by torch; a step never waits for the device either way.
        fused: take each step in four kernels, whatever the number of tensors: of Triton on a CUDA
            device, of Numba on a processor (``pathspace[gpu]``, ``pathspace[cpu]``).
        differentiable: refused when true.
        min_ratio: smallest ratio of a path value to its initial value; see
            :class:`pathspace.training.GSGD`.
        max_multiplier: upper bound of the multiplier of the learning rate in the balanced gauge at
            the start: of ``1 / |pre_u s_v|`` for an edge ``u -> v``, with its root at each end, and
            of ``1 / |p_k|`` for a chain. With ``b`` the ratio of bounded to unbounded multiplier,
            this is Adam on ``v / b``: ``v <- v - lr b U(b dL/dv)``. Invariant under rescaling.
        relative: steps relative to the path value, ``v <- v (1 - lr U)`` with Adam's direction
            ``U`` for ``v dL/dv``: without multipliers, and invariant. A path value of 0 does not
            change, and with ``lr`` below 1 path values hardly ever change their signs.

    Raises:
        InputError: a parameter of the skeleton is missing, or a setting is out of range.
        UnsupportedError: a skeleton weight is 0, FullyShardedDataParallel or ZeRO has split
            parameters, or a mode is refused.

    Parameters outside path space move by Adam on their weights in the same step.

    Example:
        >>> import torch, pathspace as ps
        >>> from pathspace.training import GAdam, init_skeleton
        >>> _ = torch.manual_seed(0)
        >>> model = torch.nn.Sequential(
        ...     torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1)
        ... )
        >>> x, y = torch.randn(64, 4), torch.randn(64, 1)
        >>> skeleton = ps.trace(model, x).skeleton()
        >>> init_skeleton(model, skeleton)
        >>> optimizer = GAdam(model.named_parameters(), lr=0.01, skeleton=skeleton)
        >>> losses = []
        >>> for _ in range(50):
        ...     optimizer.zero_grad()
        ...     loss = torch.nn.functional.mse_loss(model(x), y)
        ...     loss.backward()
        ...     _ = optimizer.step()
        ...     losses.append(loss.item())
        >>> losses[-1] < 0.5 * losses[0]
        True

    Reference:
        Path space for recurrent neural networks with ReLU activations, appendix E (which
        gives results, no formulas).
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        skeleton: Skeleton,
        maximize: bool = False,
        amsgrad: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        fused: bool | None = None,
        differentiable: bool = False,
        min_ratio: float = 1e-12,
        max_multiplier: float | None = None,
        relative: bool = False,
    ) -> None:
        check_bound("GAdam", max_multiplier, relative)
        for name, value in (("lr", lr), ("eps", eps), ("weight_decay", weight_decay)):
            number("GAdam", name, value)
        pair("GAdam", "betas", betas)
        if amsgrad:
            raise InputError(
                "GAdam found amsgrad=True, expected False: the maximum of moments is not kept;"
                " leave it out."
            )
        modes("GAdam", None, differentiable)
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "maximize": maximize,
            "amsgrad": False,
            "foreach": foreach,
            "capturable": capturable,
            "fused": fused,
            "differentiable": differentiable,
        }
        manner = Manner(
            True, max_multiplier, relative, "" if max_multiplier else ", pass max_multiplier=1.0"
        )
        super().__init__(params, defaults, skeleton, min_ratio, GAdamStep(manner))


__all__ = ["GAdam", "GAdamStep"]
