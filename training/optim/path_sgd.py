"""Path-SGD: gradient descent in which the step of each weight is divided by the
curvature of the path norm, ``w <- w - lr dL/dw / kappa``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pathspace.errors import AT_LEAST_1, InputError, PathspaceError, expect_numbers

from ..path_norm import PathNorm, refuse_sparse
from .settings import (
    check_group,
    expect_order,
    expect_parameters,
    expect_shapes,
    expect_state,
    number,
    switch,
)
from .sharding import refuse_shards


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
        number("PathSGD", "lr", lr)
        expect_numbers("PathSGD", AT_LEAST_1, every=every)
        number("PathSGD", "min_kappa", min_kappa)
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
        self._count = 0
        self._find_names()

    def _find_names(self) -> None:
        """Find the names of the parameters in the model.

        Raises:
            InputError: a parameter does not belong to the model.
        """
        self._name = {id(p): name for name, p in self.path_norm.model.named_parameters()}
        strange = [
            p for group in self.param_groups for p in group["params"] if id(p) not in self._name
        ]
        if strange:
            raise InputError(
                f"PathSGD found a parameter of shape {tuple(strange[0].shape)} that is not the"
                " model's, expected parameters of the model given."
            )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters of the model."""
        super().add_param_group(param_group)
        try:
            check_group("PathSGD", self.param_groups[-1])
            if hasattr(self, "path_norm"):
                self._find_names()
        except PathspaceError:
            self.param_groups.pop()
            raise

    def __getstate__(self) -> dict[str, Any]:
        """State for copies and pickles, including the model."""
        kept = ("path_norm", "second", "every", "min_kappa", "_count")
        return {**super().__getstate__(), **{name: getattr(self, name) for name in kept}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a copy or a pickle."""
        super().__setstate__(state)
        if "path_norm" in state:
            self._patch_step_function()
            self._find_names()

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
        for p, _ in parameters:
            refuse_sparse(self._name[id(p)], p.grad)
        if (
            any("kappa" not in self.state[p] for p, _ in parameters)
            or self._count % self.every == 0
        ):
            kappa = self.path_norm.kappa(self.second)
            for p, _ in parameters:
                self.state[p]["kappa"] = kappa[self._name[id(p)]]
        self._count += 1
        for p, group in parameters:
            kappa_of, lr = self.state[p]["kappa"].to(p), group["lr"]
            move = torch.where(kappa_of > self.min_kappa, p.grad / kappa_of, 0.0)
            move = move * (lr.to(p).reshape(()) if isinstance(lr, Tensor) else lr)
            p.sub_(-move if group["maximize"] else move)
        return loss

    def state_dict(self) -> dict[str, Any]:
        """State, with the number of steps, which determines the next computation of ``kappa``."""
        return {**super().state_dict(), "count": self._count}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state.

        Raises:
            InputError: it is not a state of this optimizer, or has its parameters in another order.
        """
        expect_state("PathSGD", state_dict)
        entries = [entry for entry in state_dict["state"].values() if isinstance(entry, Mapping)]
        strange = sorted({str(key) for entry in entries for key in entry} - {"kappa"})
        if strange:
            raise InputError(
                f"PathSGD found a state with {strange[0]!r}, expected 'kappa' alone, as"
                " PathSGD.state_dict() returns it; load another checkpoint."
            )
        expect_order("PathSGD", state_dict, self.param_groups)
        parameters = [p for group in self.param_groups for p in group["params"]]
        expect_shapes("PathSGD", state_dict, parameters)
        super().load_state_dict({key: value for key, value in state_dict.items() if key != "count"})
        self._count = state_dict.get("count", 0)


__all__ = ["PathSGD"]
