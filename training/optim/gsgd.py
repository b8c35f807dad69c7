r"""G-SGD: gradient descent on the values of basis paths, as an exact closed-form step on the weights.

With ``lambda_e = w_e dL/dw_e``, prefixes ``pre``, suffixes ``s`` and chains ``k`` of units that share a basis path::

    c_k = sum over e in T_in \\ T_out entering k of lambda_e  -  sum over e not in T_out leaving k of lambda_e
    R_k = 1 - lr c_k / (pre s)_k^2                            the ratio new / old of the value of p_k
    w_e <- (w_e - lr g_e / (pre_tail s_head)^2) / R_tail      edges in neither tree
    w_e <- w_e R_head / R_tail                                edges of T_in that are not in T_out

One masked reduction and one update per tensor, vectors of one entry per unit, no sweep over depth and no host
synchronisation. The step equals gradient descent on path values to rounding, and therefore commutes with every
rescaling of the network.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from pathspace import InputError, Skeleton
from pathspace.training.optim.kernels import descend
from pathspace.training.optim.layout import PLAIN, Part
from pathspace.training.optim.multipliers import warn_of_multipliers
from pathspace.training.optim.pathwise import PathOptimizer
from pathspace.training.optim.settings import SMALLEST, modes, number
from pathspace.training.optim.sharding import local
from pathspace.training.optim.state import EXTRA
from pathspace.training.optim.vectors import Parts


class GSGD(PathOptimizer):
    r"""Gradient descent on basis path values (G-SGD), with the conventions of ``torch.optim.SGD``.

    Args:
        params: ``model.named_parameters()``, named parameter groups, or parameters of the traced model itself.
        lr: learning rate on path values (a number or a tensor).
        skeleton: the skeleton of the traced model: ``ps.trace(model, ...).skeleton()``.
        momentum: momentum factor: that of ``torch.optim.SGD`` on path values. The buffer of a tensor holds the momentum
            of ``dL/dP(e)`` times ``pre_tail s_head``, and is multiplied by the ratio of ``pre_tail`` after every step.
        dampening: dampening of the momentum.
        nesterov: Nesterov's momentum.
        weight_decay: decay of *path values*, ``v <- (1 - lr weight_decay) v - lr dL/dv``, which is invariant under
            rescaling (decay of weights is not); it does not enter the momentum.
        maximize: ascend instead.
        foreach: accepted as by torch; tensors outside path space are treated together unless this is ``False``.
        capturable: accepted as by torch; a step never waits for the device either way.
        fused: refused when true.
        differentiable: refused when true.
        min_ratio: how much smaller a path value may get than it was at the start (or when the weights were last changed
            by others); one that would come closer to zero is stopped there with its sign, because the weights behind
            it could not be recovered. Ratios ``R_k`` below 0 (a path value that changes sign) are carried out exactly.
            Both are counted in :attr:`clip_counts`.
        max_multiplier: upper bound of the multiplier of the learning rate, in the balanced gauge (the one in which
            ``|pre_v| = |s_v|``): ``1 / |p_u p_v|`` for an edge ``u -> v``, bounded at either end by its root, and
            ``1 / p_k^2`` for a chain. These are invariant under rescaling, so the bounded step is, too.

    Raises:
        InputError: a parameter of the skeleton is missing, or a setting is out of range.
        UnsupportedError: a skeleton weight of 0, products of skeleton weights too small to be divided by, shards
            other than those of ``fully_shard``, or a mode that is refused.

    Parameters outside path space (pinned or unused ones) move by plain gradient descent in the same step. A parameter
    of path space that asks for no gradient keeps its value, and path values that it would have to follow stay with it.

    Example:
        >>> import torch, pathspace as ps
        >>> from pathspace.training import GSGD, init_skeleton
        >>> _ = torch.manual_seed(0)
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
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
        Path space for recurrent neural networks with ReLU activations, section 4 and Algorithm 2, in the corrected
        general form of the documentation.
    """

    _extra = (*EXTRA, "momentum_value")
    _momentum_value: Tensor

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
    ) -> None:
        for name, value in (("lr", lr), ("momentum", momentum), ("weight_decay", weight_decay)):
            number("GSGD", name, value)
        number("GSGD", "dampening", dampening, low=-float("inf"))
        if max_multiplier is not None:
            number("GSGD", "max_multiplier", max_multiplier, low=SMALLEST)
        if nesterov and (momentum <= 0 or dampening != 0):
            raise InputError("GSGD found nesterov=True, which needs momentum above 0 and dampening 0.")
        modes("GSGD", fused, differentiable)
        self.max_multiplier = max_multiplier
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
        self._chained: dict[tuple[Part, str], tuple[Tensor, Tensor | None]] = {}
        super().__init__(params, defaults, skeleton, min_ratio)
        warn_of_multipliers("GSGD", skeleton, max_multiplier)

    def _allocate(self) -> None:
        super()._allocate()
        self._chained.clear()
        for part in self._layout.parts if self.max_multiplier is not None else ():
            for side in ("tail", "head"):
                self._chains(part, side)
        if not hasattr(self, "_momentum_value") or self._momentum_value.shape != self._value.shape:
            self._momentum_value = torch.zeros_like(self._value)

    def _settings(self) -> dict[str, Any]:
        return {"max_multiplier": self.max_multiplier, "_chained": {}}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """One step; with a closure, the loss it returns."""
        loss = self._closure(closure)
        grads = self._gradients()
        if grads is None:
            return loss
        self._check_versions()
        weights, heads = self._current(), self._heads()
        kept = self._vectors
        directions = self._views(grads)
        gradient, moves = self._log_gradient(kept, weights, directions), self._downhill(grads)
        if any(group["momentum"] for group in self.param_groups):
            gradient = self._chain_momentum(gradient)
            moves = self._momentum(moves)
        if moves is not grads:
            directions = self._views(moves)
        self._find_ratios(kept.ratio, gradient)
        self._pass(kept)
        alike: dict[float, tuple[list[Tensor], list[Tensor]]] = {}
        few: dict[float, tuple[list[Tensor], list[Tensor], list[Tensor], list[Tensor]]] = {}
        described = zip(self._layout.parts, self._owned, self._groups(), kept.columns, strict=True)
        for i, (part, (parameter, g), rows, columns) in enumerate(described):
            if self._still[i] or (self._blocks[i] is None and parameter.grad is None):
                continue
            group, weight, grad = self.param_groups[g], weights[i], directions[i]
            lr, decay = group["lr"], group["weight_decay"]
            rate = lr
            if isinstance(lr, Tensor):
                grad, rate = grad * lr.to(grad).reshape(()), 1.0
            if columns is None and self.max_multiplier is not None:
                # the root's share of the multiplier is 1
                rate = rate * min(1.0, self.max_multiplier ** (1.0 if part.kind == PLAIN else 0.5))
            if decay:
                weight.mul_((1 - lr * decay).reshape(()) if isinstance(lr, Tensor) else 1 - lr * decay)
            if part.kind == PLAIN and not isinstance(lr, Tensor) and group["foreach"] is not False:
                plain = alike.setdefault(rate, ([], []))
                plain[0].append(weight)
                plain[1].append(grad)
                continue
            keep, step = (None, self._tail[i]) if columns is None else columns
            simple = heads[i] is None and not rows and not isinstance(lr, Tensor)
            if self._few and simple and keep is not None and step is not None:
                together = few.setdefault(rate, ([], [], [], []))
                for column, value in zip(together, (weight, grad, part.spread(keep), part.spread(step)), strict=True):
                    column.append(value)
                continue
            descend(weight, grad, part.spread(keep), part.spread(step), heads[i], rate, rows)
        for rate, (some, by) in alike.items():
            torch._foreach_add_(some, by, alpha=-rate)
        for rate, (some, by, keeps, steps) in few.items():
            # the same as descend, all tensors at once
            torch._foreach_mul_(some, keeps)
            torch._foreach_addcmul_(some, by, steps, value=-rate)
        # whatever the momentum is now
        if self.state and any("momentum_buffer" in state for state in self.state.values()):
            self._transport(kept)
        self._write_trees(kept, weights)
        return loss

    def _bound_steps(self, step: Tensor, keep: Tensor) -> None:
        if self.max_multiplier is not None:
            for part, span in zip(self._layout.parts, self._layout.spans, strict=True):
                if span is not None:
                    # the values before this step: the ratio is taken back
                    some = slice(*span)
                    step[some].mul_(self._bounded(*self._chains(part, "tail"), keep[some]))

    def _chains(self, part: Part, side: str) -> tuple[Tensor, Tensor | None]:
        """Chains of all tails or heads of a tensor, and where they move against them; found once."""
        if (part, side) not in self._chained:
            chain, sign = (torch.from_numpy(a) for a in (self.skeleton.chain, self.skeleton.chain_sign))
            ids = getattr(part, side).reshape(-1)
            flip = torch.where(ids < 0, -1, 1) * sign[ids.abs()] < 0
            place = self._value.device
            found = chain[ids.abs()].to(place, torch.int32)
            self._chained[part, side] = (found, flip.to(place) if bool(flip.any()) else None)
        return self._chained[part, side]

    def _bounded(self, chains: Tensor, flipped: Tensor | None, keep: Tensor | None = None) -> Tensor:
        """``min(1, sqrt(max_multiplier) |p|)`` for some chains; 1 for the root's."""
        assert self.max_multiplier is not None
        value = self._value.index_select(0, chains).abs_()
        if flipped is not None:
            value = torch.where(flipped, value.reciprocal(), value)
        value = torch.where(chains == 0, 1.0, value if keep is None else value * keep.abs())
        return value.mul_(self.max_multiplier**0.5).clamp_(max=1.0)

    def _heads(self) -> list[Tensor | None]:
        """Factors by head; with a bound on the multiplier they follow the path values."""
        if self.max_multiplier is None:
            return self._head
        return [self._bounded_head(i) for i in range(len(self._head))]

    def _bounded_head(self, number: int) -> Tensor | None:
        """The factor by head of one tensor, bounded before it is rounded to the tensor's type."""
        part, factor = self._layout.parts[number], self._head[number]
        if part.kind == PLAIN:
            return factor
        bound = self._bounded(*self._chains(part, "head")).view(part.head.shape)
        return (bound if factor is None else bound.mul_(factor)).to(self._parameters[number].dtype)

    def _multipliers(self, number: int) -> list[Tensor]:
        span, part = self._layout.spans[number], self._layout.parts[number]
        if self.max_multiplier is None or part.kind == PLAIN:
            return super()._multipliers(number)
        head = self._bounded_head(number)
        tail = self._tail[number]
        if span is not None:
            tail = self._factor[slice(*span)] * self._bounded(*self._chains(part, "tail"))
        return [factor for factor in (head, tail) if factor is not None]

    def _divisors(self) -> Tensor:
        square = super()._divisors()
        # the root's stays infinite
        return square if self.max_multiplier is None else square.clamp_(min=1 / self.max_multiplier)

    def _applied(self, number: int) -> list[Tensor]:
        part, span = self._layout.parts[number], self._layout.spans[number]
        if self.max_multiplier is None:
            return super()._applied(number)
        if part.kind == PLAIN:
            # both ends are the root's, whose share is 1
            return [torch.full((1,) * len(part.view), min(1.0, self.max_multiplier)).to(self._factor)]
        head, tail = self._bounded_head(number), self._tail[number]
        if span is None:
            share = min(1.0, self.max_multiplier**0.5)
            tail = self._factor.new_tensor(share) if tail is None else tail * share
            return [side for side in (head, part.spread(tail) if tail.dim() else tail) if side is not None]
        tail = self._factor[slice(*span)] * self._bounded(*self._chains(part, "tail"))
        return [side for side in (head, part.spread(tail.view(part.tail.shape))) if side is not None]

    @property
    def _capped(self) -> bool:  # type: ignore[override]
        """Whether multipliers are bounded."""
        return self.max_multiplier is not None

    @property
    def _way_out(self) -> str:  # type: ignore[override]
        return "" if self._capped else ", pass max_multiplier=1.0"

    def _find_ratios(self, ratio: Tensor, gradient: Tensor) -> None:
        lr, decay = self._setting("lr"), self._setting("weight_decay")
        square = self._divisors()
        ones = self._one
        if isinstance(lr, Tensor):
            gradient, rate = gradient * lr, 1.0
        else:
            rate = lr
        if isinstance(decay, Tensor) or decay:
            ones = torch.ones_like(square) - lr * decay
            ones[0] = 1
        torch.addcdiv(ones, gradient, square, value=-rate, out=ratio)

    def _momentum(self, grads: list[Tensor]) -> list[Tensor]:
        """Gradients, or their moving averages where momentum is asked for."""
        result = list(grads)
        for i, (parameter, g) in enumerate(self._owned):
            group = self.param_groups[g]
            idle = self._still[i] or (self._layout.parts[i].kind == PLAIN and parameter.grad is None)
            if group["momentum"] == 0 or idle:
                continue
            state = self.state[parameter]
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(parameter)
                buffer = local(state["momentum_buffer"]).copy_(grads[i])
            else:
                self._moments(i, "momentum_buffer")
                buffer = local(state["momentum_buffer"])
                buffer.mul_(group["momentum"]).add_(grads[i], alpha=1 - group["dampening"])
            result[i] = grads[i].add(buffer, alpha=group["momentum"]) if group["nesterov"] else buffer
        return result

    def _chain_momentum(self, gradient: Tensor) -> Tensor:
        """The same for chains, whose buffer holds ``dL/dp_k``; called before that of the tensors."""
        inside = (p for (p, _), block in zip(self._owned, self._blocks, strict=True) if block is not None)
        seen = any("momentum_buffer" in self.state[p] for p in inside)
        momentum, dampening, nesterov = (self._setting(name) for name in ("momentum", "dampening", "nesterov"))
        by_value = gradient / self._value
        # as torch does, the first gradient enters whole, and dampening without momentum means nothing
        share = 1 - dampening * (momentum != 0) if seen else 1.0
        average = self._momentum_value * momentum + by_value * share
        moved = torch.lerp(average, by_value + momentum * average, by_value * 0 + nesterov)
        kept = self._held
        if isinstance(momentum, Tensor):
            # where there is no momentum now, the average waits
            kept = momentum == 0 if kept is None else kept | (momentum == 0)
        self._momentum_value.copy_(average if kept is None else torch.where(kept, self._momentum_value, average))
        return torch.where(self._value.isinf(), 0.0, moved * self._value)

    def _transport(self, kept: Parts) -> None:
        """Carry the buffers along with the gauge: they hold ``M_e pre_tail s_head``, and ``pre`` has changed."""
        described = zip(self._layout.parts, self._owned, kept.columns, strict=True)
        for i, (part, (parameter, _), columns) in enumerate(described):
            if columns is not None and "momentum_buffer" in self.state[parameter]:
                self._moments(i, "momentum_buffer").div_(part.spread(columns[0]))
