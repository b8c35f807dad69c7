"""Rank of the derivative of a network's outputs by its weights: an oracle
that knows nothing of paths.

Outputs depend on the weights only through path values, so this rank never exceeds `m - H`. A
ReLU network attains it only where every unit is switched on by some inputs and off by
others, hence many random inputs, weights drawn afresh several times (the largest rank
counts), every second time positive so that no unit is dead, and biases kept away from zero
so that kinks fall among the inputs.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.func import functional_call


def jacobian(out: torch.Tensor, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Derivatives of a vector by each parameter, all entries at once where torch can."""
    every = torch.eye(len(out), dtype=out.dtype)

    def pulled(grads: torch.Tensor, batched: bool) -> Sequence[torch.Tensor | None]:
        return torch.autograd.grad(
            out, parameters, grads, retain_graph=True, allow_unused=True, is_grads_batched=batched
        )

    try:
        found = pulled(every, True)
    except RuntimeError:  # (sparse matrices, for example)
        rows = [pulled(row, False) for row in every]
        found = [None if of[0] is None else torch.stack(of) for of in zip(*rows, strict=True)]
    return [
        p.new_zeros(len(out), *p.shape) if grad is None else grad
        for p, grad in zip(parameters, found, strict=True)
    ]


def jacobian_rank(model: nn.Module, *args: Any, draws: int = 4, seed: int = 0) -> int:
    """The largest rank, over random weights, of d outputs / d weights on many random inputs.

    Args:
        model: Any module; evaluated in float64, in its own mode.
        args: Example inputs; only their shapes matter. One batch of inputs is drawn per sample.
        draws: Number of random weight settings.
        seed: Seed of all draws.

    Returns:
        The rank with singular values below 1e-9 of the largest counted as zero.
    """
    generator = torch.Generator().manual_seed(seed)
    twin = copy.deepcopy(model).double()
    best, weights = 0, sum(parameter.numel() for parameter in twin.parameters())
    for draw in range(draws):
        parameters = {}
        for name, parameter in twin.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            if parameter.ndim > 1:
                parameters[name] = noise.abs() if draw % 2 else noise
            else:
                parameters[name] = noise.sign() * (0.3 + noise.abs())
        wanted = [parameter.requires_grad_() for parameter in parameters.values()]
        rows: list[torch.Tensor] = []
        count = 0
        while count < max(200, 3 * weights):
            inputs = [
                2 * torch.randn(arg.shape, generator=generator, dtype=torch.float64) for arg in args
            ]

            leaves = torch.utils._pytree.tree_leaves(
                functional_call(twin, parameters, tuple(inputs))
            )
            outputs = torch.cat([leaf.flatten() for leaf in leaves])
            rows.append(torch.cat([grad.flatten(1) for grad in jacobian(outputs, wanted)], 1))
            count += len(outputs)
        matrix = torch.cat(rows)
        # each column is scaled to unit length: weights of deep layers would
        # drown the others otherwise
        norms = matrix.norm(dim=0)
        singular = torch.linalg.svdvals(matrix[:, norms > 0] / norms[norms > 0]).numpy()
        best = max(best, int((singular > 1e-9 * singular.max(initial=0.0)).sum()))
    return best
