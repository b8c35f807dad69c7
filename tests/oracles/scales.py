"""How many scale symmetries can there be? The null space of a Jacobian, by singular
values: no graph, no rules.

A symmetry multiplies each tensor by factors of its rows and columns. Its logarithm ``a`` solves
``sum_e w_e df/dw_e (P a)_e = 0`` at every input, so the solutions, without the ``a`` that move
nothing, bound the number of symmetries from above.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from oracles.jacobian import jacobian


def outputs(value: Any) -> Tensor:
    """All numbers of an output in one vector, real and imaginary parts apart."""
    leaves = [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
    leaves = [torch.view_as_real(leaf) if leaf.is_complex() else leaf for leaf in leaves]
    return torch.cat([leaf.reshape(-1).double() for leaf in leaves if leaf.is_floating_point()])


def patterns(shape: Sequence[int], stacked: bool) -> list[tuple[int, ...]]:
    """Which dimensions a factor of a tensor may vary along: one each, or one
    with the first of a stack.
    """
    if stacked:
        return [(0, dim) for dim in range(1, len(shape))]
    return [(dim,) for dim in range(min(len(shape), 2))] or [()]


def at_most(
    model: nn.Module,
    samples: Iterable[tuple[Any, ...]],
    stacked: Iterable[str] = (),
    run: Callable[..., Any] | None = None,
    tolerance: float = 1e-9,
) -> int:
    """An upper bound on the number of scale symmetries of a small model in float64.

    Args:
        model: the model; its weights should be generic.
        samples: inputs, of many magnitudes and of all kinds (tokens, routes) that matter.
        stacked: parameters that are stacks of tensors, each with rows and columns of its own.
        run: how to run the model, where calling it is not enough.
        tolerance: below which a singular value, relative to the largest, is 0.
    """
    named = [
        (name, p) for name, p in model.named_parameters() if p.is_floating_point() or p.is_complex()
    ]
    moves = []
    for name, parameter in named:
        columns = []
        for dims in patterns(parameter.shape, name in stacked):
            sizes = [parameter.shape[dim] for dim in dims]
            for place in itertools.product(*map(range, sizes)):
                mask = torch.zeros(parameter.shape, dtype=torch.float64)
                mask[
                    tuple(
                        place[dims.index(d)] if d in dims else slice(None)
                        for d in range(parameter.dim())
                    )
                ] = 1
                columns.append(mask.reshape(-1))
        moves.append(torch.stack(columns, 1))
    rows = []
    for sample in samples:
        out = outputs((run or model)(*sample))
        size = float(out.detach().abs().max()) or 1.0
        if not out.requires_grad:
            continue
        grads = jacobian(out / size, [p for _, p in named])
        blocks = [
            (p.detach() * grad.conj()).real.flatten(1).double() @ move
            for (_, p), grad, move in zip(named, grads, moves, strict=True)
        ]
        rows.append(torch.cat(blocks, 1))
    matrix = torch.cat(rows)
    matrix = matrix / matrix.norm(dim=1, keepdim=True).clamp_min(1e-300)
    total = torch.block_diag(*moves)
    trivial = total.shape[1] - int(np.linalg.matrix_rank(total.numpy()))
    singular = torch.linalg.svdvals(matrix)
    rank = int((singular > tolerance * singular[0]).sum())
    return matrix.shape[1] - rank - trivial


__all__ = ["at_most", "outputs"]
