"""A start for training on path values: skeleton weights of absolute value 1."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import nn

from pathspace.errors import InputError, expect_arguments
from pathspace.models.values import require_values
from pathspace.paths.skeleton import Skeleton

from .optim.matching import find_names
from .optim.tensors import find_indices, local

M = TypeVar("M", bound=nn.Module)


@torch.no_grad()
def init_skeleton_(model: M, skeleton: Skeleton) -> M:
    """Set every skeleton weight of ``model`` to +1 or -1 in place, with its sign; the
    function of the model changes.

    The step of G-SGD on a free edge ``u -> v`` is multiplied by ``1 / (pre_u s_v)^2``, a product of
    skeleton weights. With the usual initialisations it reaches ``1e13`` and more, and no
    function-preserving rescaling can reduce it: ``1 / p_k^2`` of a chain and the relative change of
    a weight are invariant. With skeleton weights of absolute value 1 every multiplier is 1. (The
    paper does not state its initialisation.)

    Frozen weights (without ``requires_grad``) and weights at dead units (``skeleton.dead``) are not
    changed. In a sharded model, every process sets the weights that it holds.

    Args:
        model: the traced model, or a copy of it with the same parameter names.
        skeleton: its skeleton.

    Returns:
        The model.

    Raises:
        InputTypeError: the arguments are of other types, or in another order.
        InputError: the model lacks a parameter of the skeleton, or one has no values yet.
        UnsupportedError: the model is sharded in a way that is not supported.

    Example:
        >>> import torch, pathspace as ps
        >>> from pathspace.training import init_skeleton_
        >>> model = torch.nn.Sequential(
        ...     torch.nn.Linear(2, 2), torch.nn.ReLU(), torch.nn.Linear(2, 1)
        ... )
        >>> skeleton = ps.trace(model, torch.randn(1, 2)).skeleton()
        >>> _ = init_skeleton_(model, skeleton)
        >>> model[2].weight.abs().tolist()
        [[1.0, 1.0]]
    """
    expect_arguments("init_skeleton_", model=model, skeleton=skeleton)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    names = find_names(parameters, skeleton.live.masks)
    for name, mask in skeleton.live.masks.items():
        if name not in names:
            raise InputError(
                f"init_skeleton_ found no parameter {name!r} in {type(model).__name__}; pass the"
                " model that was traced, or a copy of it."
            )
        weight = parameters[names[name]]
        if not weight.requires_grad:
            continue
        for d, index in enumerate(find_indices("init_skeleton_", name, weight) or ()):
            mask = mask.index_select(d, torch.from_numpy(index))
        held = local(weight)
        require_values("init_skeleton_", [(name, held)])
        # (for 1 + weight, the sum is set to +-1)
        shift = skeleton.graph.shifts.get(name, 0.0)
        ones = (torch.where(held + shift < 0, -1.0, 1.0) - shift).to(held)
        held.copy_(torch.where(mask.to(held.device), ones, held))
    return model
