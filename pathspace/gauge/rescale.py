"""Gauge transformations: multiply a model's parameters by factors that
leave its function unchanged.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..errors import InputError, expect_arguments
from ..graph.structure import Structure
from ..models.copies import safe_deepcopy
from ..models.finite import expect_scales
from ..models.values import has_values, is_cut, require_values
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
            held = f"no parameter {name!r}" if own is None else f"{name!r} of shape {own}"
            raise InputError(
                f"{owner} found {held} in {type(model).__name__}"
                f"{'' if own is None else f', expected {shapes[name]}'}; pass the traced model or"
                " a copy of it."
            )
    return found


@torch.no_grad()
def rescale_(
    model: M,
    graph: Structure,
    phi: Tensor,
    optimizer: Optimizer | None = None,
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
    the rescaled network had been trained. A rescaling-invariant optimizer then continues on the
    same trajectory. Plain SGD does not: it changes a weight that is ``f`` times larger by ``1/f``
    times the amount.

    Args:
        model: the traced model, or a copy with the same parameter names.
        graph: its reduction graph.
        phi: log-scales of the units, shape ``(num_units,)``.
        optimizer: an optimizer of ``model``'s parameters, whose buffers are transported in place.
        exact: apply only the part of ``phi`` that is exact for the unchanged model,
            :meth:`pathspace.ReductionGraph.exact_part`.

    Raises:
        InputError: ``phi`` has a wrong shape, a parameter is missing or sharded, or a weight would
            be beyond the range of its type; nothing was changed.
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
    require_values("rescale_", [(name, tensors[name]) for name in factors if is_cut(tensors[name])])
    buffers: list[tuple[Tensor, Tensor, Tensor, int]] = []
    if optimizer is not None and optimizer.state:
        expect_transport("rescale_", optimizer)
        buffers = [
            (buffer, head, tail, power)
            for name, (head, tail) in factors.items()
            for buffer, power in transported(optimizer, tensors[name])
        ]
    for name, (head, tail) in factors.items():
        _expect_range(name, tensors[name], head, tail, graph.shifts.get(name, 0.0))
    for name, (head, tail) in factors.items():
        move_(tensors[name], head, tail, graph.shifts.get(name, 0.0))
    for buffer, head, tail, power in buffers:
        buffer.mul_((tail.to(buffer) / head.to(buffer)) ** power)
    return model


def rescale(model: M, graph: Structure, phi: Tensor, exact: bool = False) -> M:
    """A copy of ``model`` after a gauge transformation, with the arguments and errors of
    :func:`pathspace.rescale_`, which changes the model itself and the state of an optimizer.

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
    return rescale_(safe_deepcopy(model), graph, phi, exact=exact)


def _expect_range(name: str, tensor: Tensor, head: Tensor, tail: Tensor, shift: float) -> None:
    if not tensor.is_floating_point() or not tensor.numel() or not has_values(tensor):
        return
    limit = torch.finfo(tensor.dtype).max
    # (a bound first, which reads the tensor once)
    largest = float(tensor.detach().abs().nan_to_num(0.0, 0.0).amax()) + abs(shift)
    if largest * float(head.amax()) / float(tail.amin()) <= limit:
        return
    up, down = head.to(tensor.device), tail.to(tensor.device)
    after = moved(tensor.double(), up, down, shift).abs()
    if bool(((after > limit) | after.isnan()).logical_and(tensor.isfinite()).any()):
        raise InputError(
            f"rescale_ found log-scales that take {name!r} beyond the range of {tensor.dtype},"
            f" expected entries up to {limit:.3g}; use smaller ones, or convert the model first."
        )
