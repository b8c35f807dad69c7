"""Gauge transformations: multiply a model's parameters by factors that
leave its function unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..errors import InputError, InputTypeError, expect_arguments
from ..graph.structure import Structure
from ..models.copies import safe_deepcopy
from ..models.finite import expect_scales
from ..models.values import has_values, require_values, sharded
from ..models.walk import tensors_of
from .moves import move_, moved
from .transport import expect_transport, transported

M = TypeVar("M", bound=nn.Module)


def expect_blocks(
    owner: str, model: nn.Module, graph: Structure, names: Iterable[str] | None = None
) -> dict[str, Tensor]:
    """Parameters and buffers by name; those of the graph must be there as traced."""
    found = tensors_of(model)
    shapes = {block.name: block.shape for block in graph.blocks}
    for name in shapes if names is None else names:
        own = tuple(found[name].shape) if name in found else None
        if own is None or own != shapes.get(name, own):
            held = f"{name!r} of shape {own}, expected {shapes.get(name)},"
            raise InputError(
                f"{owner} found {f'no parameter {name!r}' if own is None else held} in"
                f" {type(model).__name__}; pass the traced model or a copy of it."
            )
    return found


@torch.no_grad()
def rescale_(
    model: M,
    graph: Structure,
    phi: Tensor,
    optimizer: Optimizer | None = None,
    keep_trajectory: bool | None = None,
    exact: bool = False,
) -> M:
    """Apply a gauge transformation to ``model`` in place: ``w_e <- w_e
    exp(phi(head e) - phi(tail e))``.

    The function does not change on the inputs in
    :attr:`pathspace.ReductionGraph.range`: all lengths, batch sizes and image sizes at
    which the model runs the same operations as in its capture.

    Running statistics of normalisation layers are rescaled too, ``mean <- s mean`` and ``var <- s^2
    (var + eps) - eps``, so that the function in eval mode does not change, exactly. (Entries of
    ``var`` can become negative; torch uses only ``var + eps``, which remains positive. If the type
    of ``var`` cannot represent the difference, the nearest value is taken.) Units before a
    normalisation by statistics of the data (train mode, layer, group and RMS norms:
    :attr:`pathspace.ReductionGraph.approximate`) are free only at ``eps = 0``: rescaling them
    changes the outputs by about ``eps / variance``; ``exact=True`` leaves them out.

    A factor ``f`` on a weight divides its gradient by ``f``. The buffers of ``optimizer`` are
    transported accordingly: first moments are divided by ``f`` and second moments by ``f^2``, as if
    the rescaled network had been trained.

    A rescaling-invariant optimizer then continues on the same trajectory. Plain SGD does not: it
    changes a weight that is ``f`` times larger by ``1/f`` times the amount. Therefore each gradient
    of a ``torch.optim.SGD`` is multiplied by ``f^2`` during each step (with momentum and weight
    decay, too), and its momentum is multiplied by ``f``. ``keep_trajectory=False`` divides the
    momentum by ``f`` instead, and SGD continues without these corrections.

    Args:
        model: the traced model, or a copy with the same parameter names.
        graph: its reduction graph.
        phi: log-scales of the units, shape ``(num_units,)``.
        optimizer: an optimizer of ``model``'s parameters, whose buffers are transported in place.
        keep_trajectory: let ``optimizer`` train the same functions as without the rescaling; by
            default true for a ``torch.optim.SGD``.
        exact: apply only the part of ``phi`` that is exact for the unchanged model,
            :meth:`pathspace.ReductionGraph.exact_part`.

    Returns:
        The model.

    Raises:
        InputError: ``phi`` has a wrong shape, a parameter is missing or sharded, or a weight would
            be beyond the range of its type; nothing was changed.
        InputTypeError: ``keep_trajectory`` is true and ``optimizer`` is not a ``torch.optim.SGD``.
        UnsupportedError: the optimizer has a buffer with an unknown scaling
            rule; nothing was changed.

    Example:
        >>> import torch, pathspace as ps
        >>> model = torch.nn.Sequential(
        ...     torch.nn.Linear(2, 3), torch.nn.ReLU(), torch.nn.Linear(3, 1)
        ... ).double()
        >>> x = torch.randn(5, 2).double()
        >>> before, graph = model(x), ps.trace(model, x)
        >>> after = ps.rescale_(model, graph, torch.randn(graph.num_units).double())(x)
        >>> torch.allclose(before, after, rtol=1e-12)
        True
    """
    expect_arguments("rescale_", model=model, graph=graph)
    expect_arguments("rescale_", or_none=True, optimizer=optimizer)
    expect_scales("rescale_", phi, graph.num_units)
    factors = graph.gauge_factors(graph.exact_part(phi.double()) if exact else phi.double())
    tensors = expect_blocks("rescale_", model, graph, factors)
    held = [(name, tensors[name]) for name in factors]
    require_values("rescale_", [(name, one) for name, one in held if sharded(one)])
    moves = _transport(
        optimizer, {tensors[name]: pair for name, pair in factors.items()}, keep_trajectory
    )
    for name, (head, tail) in factors.items():
        _expect_range(name, tensors[name], head, tail, graph.shifts.get(name, 0.0))
    for name, (head, tail) in factors.items():
        move_(tensors[name], head, tail, graph.shifts.get(name, 0.0))
    for move in moves:
        move()
    return model


def rescale(model: M, graph: Structure, phi: Tensor, exact: bool = False) -> M:
    """A copy of ``model`` after a gauge transformation; see :func:`pathspace.rescale_`, which
    changes the model itself and the state of an optimizer.

    Args:
        model: the traced model, or a copy with the same parameter names; it is not changed.
        graph: its reduction graph.
        phi: log-scales of the units, shape ``(num_units,)``.
        exact: apply only the part of ``phi`` that is exact for the unchanged model.

    Returns:
        The rescaled copy.

    Raises:
        InputError: see :func:`pathspace.rescale_`.

    Example:
        >>> import torch, pathspace as ps
        >>> model = torch.nn.Sequential(
        ...     torch.nn.Linear(2, 3), torch.nn.ReLU(), torch.nn.Linear(3, 1)
        ... ).double()
        >>> graph = ps.trace(model, torch.randn(5, 2).double())
        >>> twin = ps.rescale(model, graph, torch.ones(graph.num_units))
        >>> bool(torch.allclose(twin[0].weight, torch.e * model[0].weight))
        True
    """
    expect_arguments("rescale", model=model, graph=graph)
    expect_scales("rescale", phi, graph.num_units)
    expect_blocks("rescale", model, graph)
    return rescale_(safe_deepcopy(model), graph, phi, exact=exact)


def _expect_range(name: str, tensor: Tensor, head: Tensor, tail: Tensor, shift: float) -> None:
    if not tensor.is_floating_point() or not tensor.numel() or not has_values(tensor):
        return
    limit = torch.finfo(tensor.dtype).max
    # (a bound first, which reads the tensor once)
    largest = float(tensor.detach().abs().nan_to_num(0.0, 0.0).amax()) + abs(shift)
    if largest * float(head.amax()) / float(tail.amin()) <= limit:
        return
    after = moved(tensor.double(), head, tail, shift).abs()
    if bool(((after > limit) | after.isnan()).logical_and(tensor.isfinite()).any()):
        raise InputError(
            f"rescale_ found log-scales that take {name!r} beyond the range of {tensor.dtype},"
            f" expected entries up to {limit:.3g}; use smaller ones, or convert the model first."
        )


def _transport(
    optimizer: Optimizer | None,
    factors: Mapping[Tensor, tuple[Tensor, Tensor]],
    keep_trajectory: bool | None,
) -> list[Callable[[], Any]]:
    """The changes to an optimizer's buffers, as functions to call after all checks have passed."""
    if optimizer is None:
        if keep_trajectory:
            raise InputError(
                "rescale_ found keep_trajectory=True without an optimizer; pass optimizer= as well."
            )
        return []
    if keep_trajectory is None:
        keep_trajectory = type(optimizer) is torch.optim.SGD
    if keep_trajectory and type(optimizer) is not torch.optim.SGD:
        raise InputTypeError(
            f"rescale_ found keep_trajectory=True with {type(optimizer).__name__}, expected"
            " torch.optim.SGD, the only optimizer whose step is linear in gradients; do not pass"
            " keep_trajectory."
        )
    if optimizer.state:
        expect_transport("rescale_", optimizer)
    moves: list[Callable[[], Any]] = [
        partial(_move, buffer, head, tail, -1 if keep_trajectory else power)
        for parameter, (head, tail) in factors.items()
        for buffer, power in transported(optimizer, parameter)
    ]
    if keep_trajectory:
        # (gradients are multiplied by ``f^2`` in each step; those of several rescalings multiply)
        before, after = (partial(_scale_gradients, factors, power) for power in (-2, 2))
        moves.append(partial(optimizer.register_step_pre_hook, before))
        moves.append(partial(optimizer.register_step_post_hook, after))
    return moves


def _move(buffer: Tensor, head: Tensor, tail: Tensor, power: int) -> None:
    buffer.mul_((tail.to(buffer) / head.to(buffer)) ** power)


@torch.no_grad()
def _scale_gradients(
    factors: Mapping[Tensor, tuple[Tensor, Tensor]], power: int, *_: object
) -> None:
    for parameter, (head, tail) in factors.items():
        if parameter.grad is not None:
            _move(parameter.grad, head, tail, power)
