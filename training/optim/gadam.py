r"""G-Adam: Adam on the values of basis paths, carried out on weights.

With ``D_e = pre_tail s_head`` for an edge ``e`` in neither tree and ``D_k = (pre s)_k`` for a chain, the gradients by
path values are ``G_e = g_e / D_e`` and ``G_k = c_k / D_k`` (``c_k`` as in G-SGD). Adam turns them into directions
``U``, and::

    R_k = 1 - lr U_k / D_k
    w_e <- (w_e - lr U_e / D_e) / R_tail                      edges in neither tree
    w_e <- w_e R_head / R_tail                                edges of T_in that are not in T_out
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from pathspace import InputError, Skeleton
from pathspace.training.optim.kernels import groups
from pathspace.training.optim.multipliers import warn_of_multipliers
from pathspace.training.optim.pathwise import PathOptimizer
from pathspace.training.optim.settings import modes, number, pair
from pathspace.training.optim.state import EXTRA


class GAdam(PathOptimizer):
    r"""Adam on basis path values (G-Adam), with the conventions of ``torch.optim.AdamW``.

    The moments live in the coordinates of path values: those of ``P(e)`` at the place of the weight ``w_e``, those of
    ``p_k`` in vectors of one entry per chain. Squares of ``dL/dw`` would not do: a rescaling multiplies them by factors
    that a quotient of moments of *different* steps keeps, and ``eps`` would depend on the scale. A path value and its
    gradient know no scale, so every step, ``eps`` and the decay included, commutes with every rescaling.

    Args:
        params: ``model.named_parameters()``, named parameter groups, or parameters of the traced model itself.
        lr: learning rate (a number or a tensor).
        betas: decay rates of the two moments.
        eps: added to the root of the second moment; with 0, a path value that never had a gradient keeps its value.
        weight_decay: decoupled decay of path values, ``v <- (1 - lr weight_decay) v - lr U``.
        skeleton: the skeleton of the traced model.
        maximize: ascend instead.
        amsgrad: refused when true.
        foreach: accepted as by torch, without effect.
        capturable: accepted as by torch; a step never waits for the device either way.
        fused: refused when true.
        differentiable: refused when true.
        min_ratio: how much smaller a path value may get than it was; see :class:`pathspace.training.GSGD`.

    Raises:
        InputError: a parameter of the skeleton is missing, or a setting is out of range.
        UnsupportedError: a skeleton weight of 0, shards other than those of ``fully_shard``, or a mode that is refused.

    Parameters outside path space move by Adam on their weights in the same step.

    Example:
        >>> import torch, pathspace as ps
        >>> from pathspace.training import GAdam, init_skeleton
        >>> _ = torch.manual_seed(0)
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
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
        Path space for recurrent neural networks with ReLU activations, appendix E (which gives results, no formulas).
    """

    _linear = True
    _extra = (*EXTRA, "mean", "square", "ages", "steps")
    _mean: Tensor
    _square: Tensor
    _ages: Tensor
    _steps: Tensor

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
    ) -> None:
        for name, value in (("lr", lr), ("eps", eps), ("weight_decay", weight_decay)):
            number("GAdam", name, value)
        pair("GAdam", "betas", betas)
        if amsgrad:
            raise InputError(
                "GAdam found amsgrad=True, expected False: the maximum of moments is not kept; leave it out."
            )
        modes("GAdam", fused, differentiable)
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
        super().__init__(params, defaults, skeleton, min_ratio)
        warn_of_multipliers("GAdam", skeleton, None)

    def _allocate(self) -> None:
        super()._allocate()
        if not hasattr(self, "_mean") or self._mean.shape != self._value.shape:
            self._mean, self._square = torch.zeros_like(self._value), torch.zeros_like(self._value)
            self._ages = torch.zeros_like(self._value)
        # steps that each tensor has taken; those that joined later have taken none
        old = getattr(self, "_steps", self._value[:0])
        self._steps = torch.zeros(len(self._owned), dtype=torch.float64, device=self._value.device)
        self._steps[: len(old)] = old[: len(self._steps)]
        self._moving: list[bool] = []

    def _count_steps(self) -> None:
        """One step more for all tensors and chains that take part in this one."""
        moving = [
            not (still or (block is None and parameter.grad is None))
            for still, block, (parameter, _) in zip(self._still, self._blocks, self._owned, strict=True)
        ]
        if all(moving):
            self._steps.add_(1)
        else:
            if moving != self._moving:
                self._moving = moving
                self._counted = torch.tensor(moving, dtype=torch.float64, device=self._steps.device)
            self._steps.add_(self._counted)
        self._ages.add_(1 if self._held is None else (~self._held).double())

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """One step; with a closure, the loss it returns."""
        loss = self._closure(closure)
        grads = self._gradients()
        if grads is None:
            return loss
        self._check_versions()
        weights = self._current()
        self._count_steps()
        before = self._factor.clone()
        kept = self._vectors
        self._find_ratios(kept.ratio, self._log_gradient(kept, weights, self._views(grads)))
        directions = self._views(self._downhill(grads))
        self._pass(kept)
        rates = self._rates()
        described = zip(self._layout.parts, self._owned, self._groups(), kept.columns, strict=True)
        for i, (part, (parameter, g), rows, columns) in enumerate(described):
            if self._still[i] or (self._blocks[i] is None and parameter.grad is None):
                continue
            group, weight, span = self.param_groups[g], weights[i], self._layout.spans[i]
            state = self.state[parameter]
            if not state:
                state["exp_avg"] = torch.zeros_like(parameter)
                state["exp_avg_sq"] = torch.zeros_like(parameter)
            mean, square = self._moments(i, "exp_avg"), self._moments(i, "exp_avg_sq")
            keep, step = (None, self._tail[i]) if columns is None else columns
            first = step if span is None else before[span[0] : span[1]].view(part.tail.shape).to(weight.dtype)
            if group["weight_decay"]:
                shrink = 1 - group["lr"] * group["weight_decay"]
                weight.mul_(shrink.reshape(()) if isinstance(shrink, Tensor) else shrink)
            rate, small = (values[i] for values in rates[g, weight.dtype])
            # without eps, what never had a gradient stays where it is
            exact = not isinstance(group["eps"], Tensor) and group["eps"] == 0
            for w, d, m, v, f, k, s, h in groups(
                rows,
                *(weight, directions[i], mean, square),
                *(part.spread(first), part.spread(keep), part.spread(step), self._head[i]),
            ):
                self._move(w, d, m, v, (f, k, s, h), (*group["betas"], rate, small, exact))
        self._write_trees(kept, weights)
        return loss

    def _rates(self) -> dict[tuple[int, torch.dtype], tuple[Tensor, Tensor]]:
        """For every group and type, ``lr sqrt(1 - b2^t) / (1 - b1^t)`` and ``eps sqrt(1 - b2^t)`` of all tensors."""
        result: dict[tuple[int, torch.dtype], tuple[Tensor, Tensor]] = {}
        for parameter, g in self._owned:
            if (g, parameter.dtype) not in result:
                group = self.param_groups[g]
                # a tensor that has taken no step yet is not moved: its 0 / 0 is not looked at
                one, two = (1 - beta**self._steps for beta in group["betas"])
                root = two.sqrt_()
                # small numbers, kept on the device: nothing waits for them
                rate, small = group["lr"] * root / one, group["eps"] * root
                result[g, parameter.dtype] = rate.to(parameter.dtype), small.to(parameter.dtype)
        return result

    def _move(
        self,
        weight: Tensor | None,
        direction: Tensor | None,
        mean: Tensor | None,
        square: Tensor | None,
        factors: tuple[Tensor | None, ...],
        settings: tuple[Any, ...],
    ) -> None:
        """Adam on some rows: gradients by path values, moments, and the step back on weights."""
        assert weight is not None and direction is not None and mean is not None and square is not None
        first, keep, step, head = factors
        one, two, rate, small, exact = settings
        work, gradient = torch.empty_like(weight), direction
        for factor in (first, head):
            if factor is not None:
                gradient = torch.mul(gradient, factor, out=work)
        mean.lerp_(gradient, 1 - one)
        square.mul_(two).addcmul_(gradient, gradient, value=1 - two)
        bottom = torch.sqrt(square, out=work).add_(small)
        if exact:
            bottom.masked_fill_(bottom == 0, torch.inf)
        moved = torch.div(mean, bottom, out=work)
        if head is not None:
            moved.mul_(head)
        if keep is not None:
            weight.mul_(keep)
        weight.addcmul_(moved, rate if step is None else step * rate, value=-1)

    def _find_ratios(self, ratio: Tensor, gradient: Tensor) -> None:
        lr, decay, eps = (self._setting(name) for name in ("lr", "weight_decay", "eps"))
        one, two = (self._setting("betas", place) for place in (0, 1))
        by_value = gradient / self._value
        mean = self._mean.lerp(by_value, 1 - one)
        square = self._square * two + by_value * by_value * (1 - two)
        if self._held is not None:
            mean, square = (
                torch.where(self._held, old, new) for old, new in ((self._mean, mean), (self._square, square))
            )
        self._mean.copy_(mean)
        self._square.copy_(square)
        mean = mean / (1 - one**self._ages)
        bottom = square.sqrt_().div_((1 - two**self._ages).sqrt_()).add_(eps)
        # with eps = 0 some are 0 / 0: what never had a gradient, and the root's
        bottom.masked_fill_(bottom == 0, torch.inf)
        ratio.copy_(1 - lr * decay - lr * mean / bottom / self._value)
        ratio[0] = 1
