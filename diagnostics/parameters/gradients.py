"""Gradients per parameter tensor: their size, their spread across layers, and
their noise between batches.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pathspace.errors import InputError, UnsupportedError, expect_arguments
from pathspace.models.values import require_runnable

from ..shared.model_calls import call, differentiating, lost, pairs_of
from ..shared.selection import Names, matching
from ..shared.tables import Table
from ..shared.unchanged import unchanged

Loss = Callable[[Any, Any], Tensor]


@dataclass(frozen=True)
class TensorGradient:
    """The gradient of one parameter tensor.

    Attributes:
        parameter: its name.
        shape: its shape.
        mean: mean of the batch gradient over components.
        variance: variance over components; 0 for a tensor of one element, so
            divide by ``rms`` instead.
        rms: root mean square over components.
        relative: ``rms`` of the gradient divided by that of the weights; ``None``
            if all weights are zero.
        spread: ``rms`` divided by the median ``rms`` of all tensors.
        noise: variance over mini-batches, mean over components (``None`` for a single batch).
        signal_to_noise: ``|mean gradient|^2 / (components * noise)``, without the
            sampling noise of the mean.
    """

    parameter: str
    shape: tuple[int, ...]
    mean: float
    variance: float
    rms: float
    relative: float | None
    spread: float | None
    noise: float | None
    signal_to_noise: float | None


def gradients(
    model: nn.Module, loss: Loss, batches: Iterable[tuple[Any, Any]], names: Names = None
) -> Table[TensorGradient]:
    """Measure the gradient of every parameter tensor, and its noise if there are several batches.

    With batch gradients ``g_1 .. g_n`` of mean ``g``: ``noise = sum_i |g_i - g|^2 / (n - 1)`` per
    component, and ``|E g|^2`` is estimated without bias by ``|g|^2 - noise / n``.

    Args:
        model: any module; its ``.grad`` and buffers are not changed.
        loss: ``loss(output, target)``, a scalar.
        batches: pairs of inputs (a tensor, a tuple of positional or a mapping of
            keyword inputs) and targets.
        names: patterns of parameter names.

    Returns:
        One row per parameter tensor.

    Raises:
        InputError: no batches, no parameter matches, or a parameter has no values.

    Example:
        >>> model = nn.Linear(2, 1, bias=False).double()
        >>> x = torch.tensor([[1.0, 0.0], [0.0, 1.0]]).double()
        >>> table = gradients(model, lambda y, _: y.sum(), [(x, None)])
        >>> table["weight"].mean, table["weight"].variance, table["weight"].noise
        (1.0, 0.0, None)

    Reference:
        Evolution of neural network, sections 2.2.1 and 2.3; McCandlish et al., An empirical model
        of large-batch training (2018), appendix A, for the bias of ``|g|^2``.
    """
    expect_arguments("gradients", model=model, loss=loss)
    wanted = matching(names)
    chosen = {name: p for name, p in model.named_parameters() if p.requires_grad and wanted(name)}
    if not chosen:
        which = "" if names is None else f" that matches {names!r}"
        raise InputError(
            f"{type(model).__name__} has no trainable parameter{which} for a gradient."
        )
    require_runnable("gradients", chosen.items())
    odd = next((name for name, p in chosen.items() if p.is_complex()), None)
    if odd is not None:
        raise UnsupportedError(
            f"gradients found the complex parameter {odd!r}, expected real ones; leave it out by"
            " names, or keep torch.view_as_real(weight) as the parameter."
        )
    count = 0
    means = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in chosen.items()}
    squares = {name: torch.zeros((), dtype=torch.float64) for name in chosen}
    unused = set(chosen)
    for inputs, targets in pairs_of("gradients", batches):
        found = batch_gradient(model, loss, inputs, targets, list(chosen.values()))
        count += 1
        for (name, mean), gradient in zip(means.items(), found, strict=True):
            # (what a batch does not reach has the gradient 0 there)
            value = torch.zeros_like(mean) if gradient is None else gradient.double()
            if gradient is not None:
                unused.discard(name)
            delta = value - mean
            # Welford's recurrence: one pass, and no difference of large sums
            mean += delta / count
            squares[name] += (delta * (value - mean)).sum().cpu()
    if count == 0:
        raise InputError(
            "gradients found no batches, expected at least one pair (inputs, targets)."
        )
    sizes = {
        name: float(mean.square().mean().sqrt())
        for name, mean in means.items()
        if name not in unused
    }
    middle = statistics.median(sizes.values()) if sizes else 0.0
    rows = []
    for name, rms in sizes.items():
        mean, number = means[name], means[name].numel()
        weight = float(chosen[name].detach().double().square().mean().sqrt())
        noise = float(squares[name]) / (count - 1) / number if count > 1 else None
        clear = None if not noise else max(rms**2 - noise / count, 0.0) / noise
        rows.append(
            TensorGradient(
                name,
                tuple(mean.shape),
                float(mean.mean()),
                float(mean.var(correction=0)),
                rms,
                rms / weight if weight else None,
                rms / middle if middle else None,
                noise,
                clear,
            )
        )
    notes = [f"No gradient reaches {', '.join(sorted(unused))}."] if unused else []
    infinite = [row.parameter for row in rows if not math.isfinite(row.rms)]
    if infinite:
        notes.append(
            "Gradients are not finite at"
            f" {', '.join(infinite[:5])}{' and others' if infinite[5:] else ''}."
        )
    if count == 1:
        notes.append("Gradient noise needs at least two batches.")
    return Table("gradients by parameter", tuple(rows), tuple(notes))


def batch_gradient(
    model: nn.Module,
    loss: Loss,
    inputs: Any,
    targets: Any,
    parameters: Sequence[Tensor],
    summed: bool = False,
) -> list[Tensor | None]:
    """The gradient of the loss on one batch, without changing ``.grad``.

    Args:
        model: any module.
        loss: ``loss(output, target)``.
        inputs: a tensor, a tuple of positional or a mapping of keyword inputs.
        targets: passed to ``loss``.
        parameters: the parameters of the gradient.
        summed: take the sum of a vector of losses.

    Returns:
        One gradient per parameter, ``None`` for those on which the loss does not depend.
    """
    with unchanged(model), torch.enable_grad():
        value = lost(loss, call(model, inputs), targets)
        if summed:
            value = value.sum()
        elif value.dim() or not value.requires_grad:
            raise InputError(
                f"The loss has shape {tuple(value.shape)} and requires_grad={value.requires_grad},"
                " expected a scalar that depends on the parameters."
            )
        with differentiating(model):
            return list(torch.autograd.grad(value, list(parameters), allow_unused=True))


def imbalance(table: Table[TensorGradient]) -> float:
    """Largest gradient ``rms`` of all tensors divided by the smallest (section 2.3);
    infinite if one is zero.
    """
    sizes = [row.rms for row in table]
    return max(sizes) / min(sizes) if sizes and min(sizes) > 0 else math.inf
