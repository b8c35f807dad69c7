"""Path-SGD: the step of each weight is divided by the curvature of the path norm."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pathspace.errors import AT_LEAST_1, InputError, PathspaceError, expect_numbers

from .optim.settings import (
    check_group,
    expect_order,
    expect_parameters,
    expect_shapes,
    expect_state,
    switch,
)
from .optim.tensors import refuse_shards
from .path_norm import PathNorm, refuse_sparse


class PathSGD(Optimizer):
    r"""Path-SGD: ``w <- w - lr dL/dw / kappa``, exactly invariant under rescaling.

    Args:
        params: ``model.named_parameters()``.
        lr: learning rate.
        model: the model whose parameters these are.
        example: example inputs of any number of samples; a step is that of one sample.
        second: include the second term for weights that paths pass several times
            (see :class:`pathspace.training.PathNorm`).
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
