r"""Other optimizers for low-rank adapters, from the formulas of their papers: LoRA+ and LoRA-RITE.

An adapter adds ``up @ down`` to a frozen matrix, ``up`` of shape ``(m, r)``,
``down`` of shape ``(r, n)``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import AdamW, Optimizer

Pairs = Sequence[tuple[Tensor, Tensor]]


def lora_plus(pairs: Pairs, lr: float, ratio: float = 16.0) -> AdamW:
    """AdamW with a rate for ``up`` that is ``ratio`` times that for ``down``.

    Reference:
        Hayou, Ghosh and Yu, LoRA+: Efficient Low Rank Adaptation of Large Models, 2024.
    """
    groups: list[dict[str, Any]] = [
        {"params": [down for _, down in pairs]},
        {"params": [up for up, _ in pairs], "lr": ratio * lr},
    ]
    return AdamW(groups, lr=lr)


class LoRARite(Optimizer):
    """Matrix preconditioning of the pairs ``(up, down)`` of adapters that does not depend on the
    factorisation of their product (LoRA-RITE).

    For a factor ``A`` with partner ``B``, ``Z = A B^T``, and ``B = U R`` (QR)::

        g = dL/dA R^-1                               the gradient without the partner's size, (m, r)
        P = U^T U_before                             from the basis of the step before
        rho <- b2 (rho + max_i (l_i(V) - l_i(P V P^T)))  what the change of basis has lost
        V <- b2 P V P^T + (1 - b2) g^T g
        S = g (V + rho 1)^(-1/2)
        M <- b1 M P^T + (1 - b1) S
        A <- A - lr M R^-T

    Moving averages stand in place of the paper's sums, with Adam's correction for their start, as
    in the authors' code. A partner of 0 has the pseudo-inverse 0 for ``R^-1``: the factor waits.

    Reference:
        Yen et al., LoRA Done RITE: Robust Invariant Transformation Equilibration for LoRA
        Optimization, 2024, algorithm 1.
    """

    def __init__(self, pairs: Pairs, lr: float, betas: tuple[float, float] = (0.9, 0.999)) -> None:
        self.pairs = list(pairs)
        super().__init__([one for pair in self.pairs for one in pair], {"lr": lr, "betas": betas})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of both factors of every adapter; with a closure, the loss it returns."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        group = self.param_groups[0]
        changes = []
        for up, down in self.pairs:
            if up.grad is not None and down.grad is not None:
                changes.append((up, self._change(self.state[up], up.grad, down.T, group["betas"])))
                changes.append(
                    (down, self._change(self.state[down], down.grad.T, up, group["betas"]).T)
                )
        for factor, change in changes:
            factor.sub_(change, alpha=group["lr"])
        return loss

    @staticmethod
    def _change(
        state: dict[str, Any], grad: Tensor, partner: Tensor, betas: tuple[float, float]
    ) -> Tensor:
        basis, size = torch.linalg.qr(partner)
        inverse = torch.linalg.pinv(size)
        if not state:
            state |= {"basis": basis, "steps": 0, "first": torch.zeros_like(grad)}
            state |= {"second": torch.zeros_like(size), "lost": grad.new_zeros(())}
        own, turn = grad @ inverse, basis.T @ state["basis"]
        turned = turn @ state["second"] @ turn.T
        before, after = map(torch.linalg.eigvalsh, (state["second"], turned))
        state["lost"] = betas[1] * (state["lost"] + (before - after).max().clamp(min=0))
        state["second"] = betas[1] * turned + (1 - betas[1]) * own.T @ own
        state["steps"] += 1
        one, two = (1 - beta ** state["steps"] for beta in betas)
        values, vectors = torch.linalg.eigh(state["second"] / two)
        values = (values + state["lost"] / two).clamp(min=0)
        # directions without a gradient do not move; rounding errors of the
        # largest one are not a gradient
        some = values > values.max() * torch.finfo(grad.dtype).eps * len(values)
        roots = torch.where(some, values, torch.inf).rsqrt()
        scaled = own @ (vectors * roots) @ vectors.T
        state["first"] = betas[0] * state["first"] @ turn.T + (1 - betas[0]) * scaled
        state["basis"] = basis
        change: Tensor = state["first"] / one @ inverse.T
        return change
