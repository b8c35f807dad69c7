r"""G-SGD and G-Adam, gradient descent and Adam on the values of basis paths; and Path-SGD, in which
the step of each weight is divided by the curvature of the path norm, ``w <- w - lr dL/dw / kappa``.

The first two are :class:`pathspace.training.PathSpace` around an optimizer of torch. With the way
in and out, a step of G-SGD is, with ``lambda_e = w_e dL/dw_e``, prefixes ``pre``, suffixes ``s``
and chains ``k`` of units that share a basis path::

    c_k = sum over e in T_in \\ T_out entering k of lambda_e
        - sum over e not in T_out leaving k of lambda_e
    R_k = 1 - lr c_k / (pre s)_k^2                          the ratio new / old of the value of p_k
    w_e <- (w_e - lr g_e / (pre_tail s_head)^2) / R_tail      edges in neither tree
    w_e <- w_e R_head / R_tail                                edges of T_in that are not in T_out
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from pathspace.errors import AT_LEAST_1, InputError, PathspaceError, expect_numbers
from pathspace.paths.skeleton import Skeleton

from ..path_norm import PathNorm, refuse_sparse
from .path_space import PathSpace
from .settings import (
    check_group,
    expect_order,
    expect_parameters,
    expect_shapes,
    expect_state,
    switch,
)
from .tensors import refuse_shards


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
        min_ratio: smallest absolute ratio of a path value to its value at the start; see
            :class:`pathspace.training.PathSpace`.
        max_multiplier: upper bound of the multiplier of the learning rate in the balanced gauge
            at the start: of ``1 / (pre_u s_v)^2`` for an edge ``u -> v``, with its root at each
            end, and of ``1 / p_k^2`` for a chain. These are invariant under rescaling, so the
            bounded step is invariant too.
        relative: steps relative to the path value, ``v <- v (1 - lr v dL/dv)``: without
            multipliers, and invariant. A path value of 0 does not change, and signs change only if
            ``lr v dL/dv`` exceeds 1.

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
        >>> init_skeleton_(model, skeleton)
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
            inner,
            skeleton,
            min_ratio=min_ratio,
            max_multiplier=max_multiplier,
            relative=relative,
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
        foreach: as for ``torch.optim.AdamW``.
        capturable: as for ``torch.optim.AdamW``.
        fused: as for ``torch.optim.AdamW``.
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
        >>> init_skeleton_(model, skeleton)
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
        super().__init__(
            inner,
            skeleton,
            min_ratio=min_ratio,
            max_multiplier=max_multiplier,
            relative=relative,
        )


class PathSGD(Optimizer):
    r"""Path-SGD: ``w <- w - lr dL/dw / kappa``, exactly invariant under rescaling.

    Args:
        params: ``model.named_parameters()``.
        lr: learning rate.
        model: the model whose parameters these are.
        example: example inputs of any number of samples; a step is that of one sample.
        second: include the second term for weights that paths pass several times
            (see the module's text).
        every: number of steps between computations of ``kappa``.
        reused: names of parameters that paths pass several times; ``None`` finds them: ``gamma^2``
            grows faster than they do.
        min_kappa: a weight whose ``kappa`` is not above this (on no path, or only on paths
            of value 0) does not move.
        maximize: maximise the loss.

    Raises:
        InputError: parameters have no names, or a setting is out of range.
        UnsupportedError: the model has layers whose outputs are not sums over
            paths, or sharded parameters.

    Example:
        >>> import torch
        >>> from pathspace.training import PathSGD
        >>> model = torch.nn.Linear(1, 1, bias=False)
        >>> optimizer = PathSGD(
        ...     model.named_parameters(), lr=0.5, model=model, example=(torch.ones(1, 1),)
        ... )
        >>> optimizer.path_norm.kappa()["weight"].tolist()
        [[1.0]]

    Reference:
        Neyshabur, Salakhutdinov and Srebro, Path-SGD, 2015; for recurrent
        networks Neyshabur et al., 2016.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        *,
        model: nn.Module,
        example: tuple[Any, ...],
        second: bool = True,
        every: int = 1,
        reused: Iterable[str] | None = None,
        min_kappa: float = 1e-30,
        maximize: bool = False,
    ) -> None:
        check_group("PathSGD", {"lr": lr})
        expect_numbers("PathSGD", AT_LEAST_1, every=every)
        expect_numbers("PathSGD", "a number of at least 0", min_kappa=min_kappa)
        switch("PathSGD", "second", second)
        params = expect_parameters("PathSGD", params)
        super().__init__(params, {"lr": lr, "maximize": maximize})
        refuse_shards(
            "PathSGD",
            [p for group in self.param_groups for p in group["params"]],
            "the path norm is a pass through the whole network; use DistributedDataParallel"
            " instead.",
        )
        self.path_norm = PathNorm(model, example, reused)
        self.second, self.every, self.min_kappa = second, every, min_kappa
        self._names()

    def _names(self) -> dict[Tensor, str]:
        """The names of the parameters in the model.

        Raises:
            InputError: a parameter does not belong to the model.
        """
        names: dict[Tensor, str] = {p: name for name, p in self.path_norm.model.named_parameters()}
        strange = [p for group in self.param_groups for p in group["params"] if p not in names]
        if strange:
            raise InputError(
                f"PathSGD found a parameter of shape {tuple(strange[0].shape)} that is not the"
                " model's, expected parameters of the model given."
            )
        return names

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters of the model."""
        super().add_param_group(param_group)
        try:
            check_group("PathSGD", self.param_groups[-1])
            if hasattr(self, "path_norm"):
                self._names()
        except PathspaceError:
            self.param_groups.pop()
            raise

    def __getstate__(self) -> dict[str, Any]:
        """State for copies and pickles, including the model."""
        kept = ("path_norm", "second", "every", "min_kappa")
        return {**super().__getstate__(), **{name: getattr(self, name) for name in kept}}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step; with a closure, the loss it returns."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        parameters = [
            (p, group) for group in self.param_groups for p in group["params"] if p.grad is not None
        ]
        if not parameters:
            return loss
        names = self._names()
        for p, _ in parameters:
            refuse_sparse(names[p], p.grad)
        if any(self.state[p].get("step", 0) % self.every == 0 for p, _ in parameters):
            kappa = self.path_norm.kappa(self.second)
            for p, _ in parameters:
                self.state[p]["kappa"] = kappa[names[p]]
        for p, group in parameters:
            self.state[p]["step"] = self.state[p].get("step", 0) + 1
            kappa_of, lr = self.state[p]["kappa"].to(p), group["lr"]
            move = torch.where(kappa_of > self.min_kappa, p.grad / kappa_of, 0.0)
            move = move * (lr.to(p).reshape(()) if isinstance(lr, Tensor) else lr)
            p.sub_(-move if group["maximize"] else move)
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state.

        Raises:
            InputError: it is not a state of this optimizer, or has its parameters in another order.
        """
        expect_state("PathSGD", state_dict)
        entries = [entry for entry in state_dict["state"].values() if isinstance(entry, Mapping)]
        strange = sorted({str(key) for entry in entries for key in entry} - {"kappa", "step"})
        if strange:
            raise InputError(
                f"PathSGD found a state with {strange[0]!r}, expected 'kappa' and 'step', as"
                " PathSGD.state_dict() returns it; load another checkpoint."
            )
        expect_order("PathSGD", state_dict, self.param_groups)
        parameters = [p for group in self.param_groups for p in group["params"]]
        expect_shapes("PathSGD", state_dict, parameters)
        super().load_state_dict(state_dict)


__all__ = ["GSGD", "GAdam", "PathSGD"]
