"""G-SGD and G-Adam, gradient descent and Adam on the values of basis paths.

Both are :class:`pathspace.training.PathSpace` around an optimizer of torch; ``coordinates.py`` has
the formulas of a step.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, AdamW

from pathspace.paths.skeleton import Skeleton

from .path_space import PathSpace
from .settings import check_group, expect_parameters


class GSGD(PathSpace):
    r"""Gradient descent on basis path values (G-SGD), with the conventions of ``torch.optim.SGD``.

    Args:
        params: ``model.named_parameters()``, named parameter groups, or parameters of
            the traced model itself.
        lr: learning rate on path values (a number or a tensor).
        skeleton: the skeleton of the traced model: ``ps.trace(model, ...).skeleton()``.
        momentum: momentum factor: that of ``torch.optim.SGD`` on path values.
        dampening: dampening of the momentum.
        nesterov: Nesterov's momentum.
        weight_decay: decay of *path values*, ``v <- (1 - lr weight_decay) v - lr dL/dv``, which is
            invariant under rescaling (decay of weights is not); as by torch it enters the momentum.
        maximize: maximise the loss.
        foreach: as for ``torch.optim.SGD``.
        fused: as for ``torch.optim.SGD``.
        differentiable: refused when true.
        min_ratio: see :class:`pathspace.training.PathSpace`.
        max_multiplier: see there.
        relative: see there; ``v <- v (1 - lr v dL/dv)``, where signs change only if ``lr v dL/dv``
            exceeds 1.

    Raises:
        InputError: a parameter of the skeleton is missing, or a setting is out of range.
        InputTypeError: a setting is not a number.
        UnsupportedError: a skeleton weight is 0, products of skeleton weights are too small to
            divide by, FullyShardedDataParallel or ZeRO has split parameters, or a mode is refused.

    Parameters outside path space (pinned or unused ones) move by plain gradient descent in the same
    step. A parameter of path space without ``requires_grad`` keeps its value, and path values that
    would change it are constant.

    Example:
        >>> import torch, pathspace as ps
        >>> from pathspace.training import GSGD, init_skeleton_
        >>> _ = torch.manual_seed(0)
        >>> model = torch.nn.Sequential(
        ...     torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1)
        ... )
        >>> x, y = torch.randn(64, 4), torch.randn(64, 1)
        >>> skeleton = ps.trace(model, x).skeleton()
        >>> _ = init_skeleton_(model, skeleton)
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
        fused: bool | None = None,
        differentiable: bool = False,
        min_ratio: float = 1e-12,
        max_multiplier: float | None = None,
        relative: bool = False,
    ) -> None:
        settings = {
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
            "maximize": maximize,
            "differentiable": differentiable,
        }
        check_group("GSGD", settings)
        given = expect_parameters("GSGD", params)
        inner = SGD(given, foreach=foreach, fused=fused, **settings)  # type: ignore[arg-type]
        super().__init__(
            inner, skeleton, min_ratio=min_ratio, max_multiplier=max_multiplier, relative=relative
        )


class GAdam(PathSpace):
    r"""Adam on basis path values (G-Adam), with the conventions of ``torch.optim.AdamW``.

    The moments are those of path values. Moments of ``dL/dw`` would depend
    on the scale: a rescaling multiplies them by factors that differ between steps, and ``eps``
    would depend on the scale. No rescaling changes a path value or its gradient, so every step,
    including ``eps`` and the decay, commutes with every rescaling.

    Args:
        params: ``model.named_parameters()``, named parameter groups, or parameters of
            the traced model itself.
        lr: learning rate (a number or a tensor).
        betas: decay rates of the two moments.
        eps: constant added to the root of the second moment; with 0, a path value without any
            gradient so far does not change (as with torch for the smallest number above 0).
        weight_decay: decoupled decay of path values, ``v <- (1 - lr weight_decay) v - lr U``.
        skeleton: the skeleton of the traced model.
        maximize: maximise the loss.
        amsgrad: use the maximum of all second moments.
        foreach: as for ``torch.optim.AdamW``; so is ``capturable``.
        capturable: see there.
        fused: see there; by default, true on a processor (a third of the time of a step).
        differentiable: refused when true.
        min_ratio: see :class:`pathspace.training.PathSpace`.
        max_multiplier: see there. With ``b`` the ratio of bounded to unbounded multiplier, this is
            Adam on ``v / b``: ``v <- v - lr b U(b dL/dv)``.
        relative: see there; ``v <- v (1 - lr U)`` with Adam's direction ``U`` for ``v dL/dv``. With
            ``lr`` below 1 path values hardly ever change their signs.

    Raises:
        InputError: a parameter of the skeleton is missing, or a setting is out of range.
        InputTypeError: a setting is not a number.
        UnsupportedError: a skeleton weight is 0, FullyShardedDataParallel or ZeRO has split
            parameters, or a mode is refused.

    Parameters outside path space move by Adam on their weights in the same step.

    Example:
        >>> import torch, pathspace as ps
        >>> from pathspace.training import GAdam, init_skeleton_
        >>> _ = torch.manual_seed(0)
        >>> model = torch.nn.Sequential(
        ...     torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1)
        ... )
        >>> x, y = torch.randn(64, 4), torch.randn(64, 1)
        >>> skeleton = ps.trace(model, x).skeleton()
        >>> _ = init_skeleton_(model, skeleton)
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
        settings = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "maximize": maximize,
            "amsgrad": amsgrad,
            "differentiable": differentiable,
        }
        check_group("GAdam", settings)
        # (0 / 0 where there was no gradient)
        settings["eps"] = eps or torch.finfo(torch.float32).tiny
        given = expect_parameters("GAdam", params)
        how = {"foreach": foreach, "capturable": capturable, "fused": fused}
        inner = AdamW(given, **settings, **how)  # type: ignore[arg-type]
        if foreach is fused is None and not capturable:
            # torch's default for a processor walks over the weights seven times
            for group in inner.param_groups:
                whole = all(p.is_cpu and p.is_floating_point() for p in group["params"])
                group["fused"] = whole or None
        super().__init__(
            inner, skeleton, min_ratio=min_ratio, max_multiplier=max_multiplier, relative=relative
        )
