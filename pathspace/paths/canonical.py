"""The canonical form of a gauge orbit: skeleton weights of size one."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from ..errors import InputError, expect_arguments
from ..gauge.rescale import rescale
from .log_prefix import log_prefixes, log_suffixes
from .skeleton import Skeleton, warn_of_dead

M = TypeVar("M", bound=nn.Module)


def canonicalise(
    model: M, skeleton: Skeleton, tree: str = "out", optimizer: Optimizer | None = None
) -> M:
    """Rescale a model in place so that all weights of one tree are +-1; the
    function does not change.

    ``phi(v) = log |suf(v)|`` makes every suffix +-1, hence every weight of ``T_out`` (``phi(v) =
    -log |pre(v)|`` those of ``T_in``). There are as many units as edges in a tree, so this uses up
    the whole gauge: two models compute the same function by the same activations exactly if their
    canonical forms are equal. Dead units (``skeleton.dead``), which only weights of 0 connect to
    the rest, keep their scale.

    Args:
        model: the traced model, or a copy of it.
        skeleton: a skeleton of its reduction graph.
        tree: ``"out"`` (the constants of G-SGD) or ``"in"``.
        optimizer: see :func:`pathspace.rescale`.

    Returns:
        The model.

    Raises:
        InputError: unknown ``tree``, or a skeleton weight is zero that was not when
            the skeleton was chosen.

    Example:
        >>> import torch, pathspace as ps
        >>> model = torch.nn.Sequential(
        ...     torch.nn.Linear(2, 3), torch.nn.ReLU(), torch.nn.Linear(3, 1)
        ... ).double()
        >>> skeleton = ps.trace(model, torch.randn(1, 2).double()).skeleton()
        >>> canonical = ps.canonicalise(model, skeleton)
        >>> bool(torch.allclose(canonical[2].weight.abs(), torch.ones(1, 3).double()))
        True
    """
    expect_arguments("canonicalise", model=model, skeleton=skeleton)
    expect_arguments("canonicalise", or_none=True, optimizer=optimizer)
    if tree not in ("in", "out"):
        raise InputError(f"canonicalise found tree={tree!r}, expected 'in' or 'out'.")
    warn_of_dead("canonicalise", skeleton)
    skeleton = skeleton.live
    units = slice(1, skeleton.graph.num_units + 1)
    logs = log_suffixes(skeleton)[units] if tree == "out" else -log_prefixes(skeleton)[units]
    return rescale(model, skeleton.graph, torch.from_numpy(logs), optimizer)
