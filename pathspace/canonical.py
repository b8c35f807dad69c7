"""Two places in a gauge orbit worth going to: skeleton weights +-1, and equal norms on both sides of every unit."""

from __future__ import annotations

from typing import TypeVar

import numpy as np
import torch
from scipy.sparse import coo_array, csr_array, diags_array
from scipy.sparse.csgraph import connected_components
from scipy.sparse.linalg import cg
from torch import Tensor, nn
from torch.optim import Optimizer

from pathspace.errors import InputError
from pathspace.potentials import log_prefixes, log_suffixes
from pathspace.reduction import ReductionGraph
from pathspace.rescale import rescale
from pathspace.skeleton import Skeleton
from pathspace.traced import last_graph

M = TypeVar("M", bound=nn.Module)

STEPS = 200
LARGEST_STEP = 4.0


def canonicalise(model: M, skeleton: Skeleton, tree: str = "out", optimizer: Optimizer | None = None) -> M:
    """Rescale a model in place so that all weights of one tree of its skeleton are +-1; the function stays.

    ``phi(v) = log |suf(v)|`` makes every suffix +-1, hence every weight of ``T_out`` (``phi(v) = -log |pre(v)|`` those
    of ``T_in``). There are as many units as edges in a tree, so this uses up the whole gauge: two models compute the
    same function by the same activations exactly if their canonical forms are equal.

    Args:
        model: the traced model, or a copy of it.
        skeleton: a skeleton of its reduction graph.
        tree: ``"out"`` (the constants of G-SGD) or ``"in"``.
        optimizer: see :func:`pathspace.rescale`.

    Returns:
        The model.

    Raises:
        InputError: unknown ``tree``, or a skeleton weight is zero.

    Example:
        >>> import torch, pathspace as ps
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU(), torch.nn.Linear(3, 1)).double()
        >>> skeleton = ps.trace(model, torch.randn(1, 2).double()).skeleton()
        >>> canonical = ps.canonicalise(model, skeleton)
        >>> bool(torch.allclose(canonical[2].weight.abs(), torch.ones(1, 3).double()))
        True
    """
    if tree not in ("in", "out"):
        raise InputError(f"canonicalise found tree={tree!r}, expected 'in' or 'out'.")
    units = slice(1, skeleton.graph.num_units + 1)
    logs = log_suffixes(skeleton)[units] if tree == "out" else -log_prefixes(skeleton)[units]
    return rescale(model, skeleton.graph, torch.from_numpy(logs), optimizer)


def balance(
    model: M,
    graph: ReductionGraph | None = None,
    p: float = 2,
    tolerance: float = 1e-12,
    optimizer: Optimizer | None = None,
) -> M:
    """Rescale a model in place so that incoming and outgoing weights of every unit have equal norms.

    ``sum_in |w|^p = sum_out |w|^p`` is where the convex function ``sum_e |w_e|^p exp(p (phi(head) - phi(tail)))`` has
    its minimum: of all networks in the orbit the one with the smallest ``L_p`` norm. It is found by Newton's method.

    Units without a minimum keep their scale and are listed by :func:`unbalanced`: those that no weight leaves (a
    normalisation follows) or enters. So are factors of products, left alone although a smaller norm may exist.

    Args:
        model: the model whose parameters ``graph`` holds, or a copy of it.
        graph: its reduction graph, by default that of the last :func:`pathspace.trace` of ``model``.
        p: which norm.
        tolerance: largest relative difference of the two sides.
        optimizer: see :func:`pathspace.rescale`.

    Returns:
        The model.

    Raises:
        InputError: ``p`` is not positive, the model was never traced, or the norms differ by more than ``tolerance``
            after 200 steps.

    Example:
        >>> import torch, pathspace as ps
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU(), torch.nn.Linear(3, 1)).double()
        >>> graph = ps.trace(model, torch.randn(1, 2).double())
        >>> balanced = ps.balance(model)
        >>> incoming = balanced[0].weight.square().sum(1) + balanced[0].bias.square()
        >>> bool(torch.allclose(incoming, balanced[2].weight.square()[0]))
        True
    """
    if not p > 0:
        raise InputError(f"balance found p={p!r}, expected a positive number.")
    graph = last_graph(model, "balance") if graph is None else graph
    tails, heads, sizes = _pairs(model, graph, p)
    free = _attainable(graph, tails, heads)
    change = _change(graph, tails, heads)[:, free]
    phi = np.zeros(graph.num_units)
    if len(free):
        phi[free] = _minimum(change, sizes, p, tolerance)
    return rescale(model, graph, torch.from_numpy(phi), optimizer)


def unbalanced(graph: ReductionGraph) -> np.ndarray:
    """Ids of the units that :func:`balance` leaves alone."""
    tails, heads, _ = _pairs(None, graph, 2)
    return np.setdiff1d(np.arange(graph.num_units), _attainable(graph, tails, heads)) + 1


def _pairs(model: nn.Module | None, graph: ReductionGraph, p: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Distinct pairs (tail, head) with the sum of ``|w|^p`` over the weights between them, zeros left out."""
    own = dict(model.named_parameters(remove_duplicate=False)) if model is not None else graph.parameters
    count = graph.expand.shape[0]
    keys: list[np.ndarray] = [np.zeros(0, np.int64)]
    sizes: list[np.ndarray] = [np.zeros(0)]
    for block in graph.blocks:
        value = own[block.name].detach().double().cpu().abs().pow(p)
        if block.unused is not None:
            value = value.masked_fill(block.unused.expand(block.shape), 0)
        dims = [d for d in range(value.dim()) if block.tail.shape[d] == block.head.shape[d] == 1 < value.shape[d]]
        value = value.sum(dims, keepdim=True) if dims else value

        def wide(ids: Tensor, like: Tensor = value) -> np.ndarray:
            return np.asarray(ids.expand(like.shape).reshape(-1).numpy())

        key, inverse = np.unique(
            (wide(block.tail) + count) * (2 * count + 1) + wide(block.head) + count, return_inverse=True
        )
        keys.append(key)
        sizes.append(np.bincount(inverse.reshape(-1), value.reshape(-1).numpy(), len(key)))
    key, inverse = np.unique(np.concatenate(keys), return_inverse=True)
    size = np.bincount(inverse.reshape(-1), np.concatenate(sizes), len(key))
    tails, heads = key // (2 * count + 1) - count, key % (2 * count + 1) - count
    kept = (size > 0) & (tails != heads)
    return tails[kept], heads[kept], size[kept]


def _change(graph: ReductionGraph, tails: np.ndarray, heads: np.ndarray) -> csr_array:
    """How log-scales of units move the logarithm of each pair's weights, ``(pairs, H)``."""
    expand = graph.expand[:, 1:]
    sides = [expand[np.abs(ids)].multiply(np.sign(ids)[:, None]).tocsr() for ids in (heads, tails)]
    return csr_array(sides[0] - sides[1])


def _attainable(graph: ReductionGraph, tails: np.ndarray, heads: np.ndarray) -> np.ndarray:
    """Units (counted from 0) that lie on closed walks through the root, so that both sides of them hold each other.

    Opposite scales are followed on a doubled graph, where ``-v`` is a unit of its own.
    """
    count = graph.num_units + 1
    fixed = np.zeros(graph.expand.shape[0], bool)
    fixed[0] = fixed[count:] = True
    fixed[1:count] = np.asarray(abs(graph.forms).sum(0)).reshape(-1) > 0

    def node(ids: np.ndarray, sign: int) -> np.ndarray:
        place = np.where(fixed[np.abs(ids)], 0, np.abs(ids))
        return np.where((place > 0) & (ids * sign < 0), place + count, place)

    while True:
        ends = (
            np.concatenate([node(tails, 1), node(heads, -1)]),
            np.concatenate([node(heads, 1), node(tails, -1)]),
        )
        links = coo_array((np.ones(len(ends[0]), bool), ends), shape=(2 * count, 2 * count))
        _, label = connected_components(links, directed=True, connection="strong")
        stays = (label[:count] == label[0]) & ~fixed[:count]
        # a unit left alone is as good as the root to its neighbours
        if np.array_equal(stays, ~fixed[:count]):
            return np.flatnonzero(stays) - 1
        fixed[:count] = ~stays


def _minimum(change: csr_array, sizes: np.ndarray, p: float, tolerance: float) -> np.ndarray:
    """Newton's method with line search for ``min sum_e c_e exp(p (A phi)_e)``."""
    phi = np.zeros(change.shape[1])
    turned, absolute = change.T.tocsr(), abs(change).T.tocsr()
    value = sizes
    for _ in range(STEPS):
        gradient = turned @ value
        scale = absolute @ value
        if (np.abs(gradient) <= tolerance * scale).all():
            return phi
        hessian = turned @ diags_array(value) @ change
        inverse = diags_array(1 / hessian.diagonal())
        step, _info = cg(hessian, -gradient / p, rtol=1e-10, maxiter=4 * len(phi) + 50, M=inverse)
        step *= min(1.0, LARGEST_STEP / max(float(np.abs(change @ step).max()), 1e-300))
        total, slope = value.sum(), float(gradient @ step) * p
        for _halving in range(60):
            trial = sizes * np.exp(p * (change @ (phi + step)))
            if trial.sum() <= total + 1e-4 * slope or np.abs(turned @ trial).sum() < np.abs(gradient).sum():
                break
            step = step / 2
        phi, value = phi + step, trial
    raise InputError(
        f"balance found norms that still differ by {float((np.abs(turned @ value) / scale).max()):.0e} after {STEPS} "
        f"steps, expected {tolerance:.0e}; ask for a larger tolerance."
    )
