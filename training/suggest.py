"""Suggestion of an optimizer and a learning rate before the first step."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn

from pathspace.errors import (
    InputError,
    InputTypeError,
    PathspaceError,
    UnsupportedError,
    expect_arguments,
)
from pathspace.gauge.moves import moved
from pathspace.graph.structure import Structure
from pathspace.models.copies import safe_deepcopy
from pathspace.shown import Shown

from .optim.canonical_gauge import canonical
from .optim.gauge_fixed import GaugeFixed
from .optim.matching import find_tensors, movable
from .optim.multipliers import LARGE, Multipliers, multipliers

# relative change of all matrices together in one step, without a test of rates; trained weights
# that are not at a minimum of the loss tolerate it
RELATIVE = 2e-3
TRIED = (3e-2, 1e-2, 3e-3, 1e-3, 3e-4, 1e-4, 3e-5)
STEPS = 10
DECAY = 0.01


@dataclass(frozen=True, eq=False)
class Advice(Shown):
    """A suggestion for training a model.

    Attributes:
        optimizer: ``"GaugeFixed(AdamW)"``, or ``"AdamW"`` if there is no free scale.
        lr: the initial learning rate.
        rule: the rule of the skeleton for an optimizer on path values.
        max_multiplier: the bound on the multipliers for it; ``None`` if none is needed.
        multipliers: rule -> the distribution of multipliers, in the gauge with ``|pre| = |s|``.
        reasons: why, in sentences with numbers.
        graph: the reduction graph.
        model: the model.
    """

    optimizer: str
    lr: float
    rule: str
    max_multiplier: float | None
    multipliers: dict[str, Multipliers] = field(repr=False)
    reasons: tuple[str, ...]
    graph: Structure = field(repr=False)
    model: nn.Module = field(repr=False)

    def make(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Create the suggested optimizer for the model, or for a copy of it.

        Raises:
            InputTypeError: it is not a module.
            InputError: it is another model, or none of its parameters can be trained.
        """
        expect_arguments("Advice.make", or_none=True, model=model)
        return _make(self.graph, self.model if model is None else model, self.lr)

    def __str__(self) -> str:
        lines = [f"{self.optimizer}, lr {self.lr:.1e}"]
        lines += [f"  {reason}" for reason in self.reasons]
        for rule, found in self.multipliers.items():
            lines += [f"Multipliers of steps on path values, rule {rule!r}:", str(found)]
        return "\n".join(lines)


def suggest(
    model: nn.Module,
    graph: Structure,
    loss: Callable[[nn.Module], Tensor] | None = None,
    *,
    show: bool = True,
) -> Advice:
    """Suggest an optimizer, a learning rate, a rule and a bound, with reasons.

    The optimizer is AdamW in the canonical gauge. Its rate is a small part of the size of typical
    weights there, the same for all rescaled copies of the network, at which the loss may rise
    near a minimum. With a loss, it is a third of
    the largest tested rate at which the loss falls over ten steps of a copy. The multipliers of
    steps on path values are reported for optimizers on path values.

    Args:
        model: the model with its initial weights.
        graph: its reduction graph.
        loss: the loss of a model on a batch; it is called with copies of the model.
        show: print the suggestion.

    Returns:
        The suggestion; ``advice.make()`` creates the optimizer.

    Raises:
        InputTypeError: an argument has a wrong type, or the order is wrong.
        InputError: no parameter can be trained, weights are not finite, or
            the loss falls at no rate.
        UnsupportedError: an embedding has sparse gradients.

    Example:
        >>> import torch, pathspace as ps
        >>> from pathspace.training import suggest
        >>> _ = torch.manual_seed(0)
        >>> layers = [
        ...     layer for _ in range(8) for layer in (torch.nn.Linear(16, 16), torch.nn.ReLU())
        ... ]
        >>> model = torch.nn.Sequential(*layers, torch.nn.Linear(16, 2))
        >>> advice = suggest(model, ps.trace(model, torch.randn(1, 16)), show=False)
        >>> advice.optimizer, advice.rule, advice.max_multiplier
        ('GaugeFixed(AdamW)', 'magnitude', 1.0)
    """
    expect_arguments("suggest", model=model, graph=graph)
    if loss is not None and not _takes_a_model(loss):
        raise InputTypeError(
            f"suggest found a {type(loss).__name__}{' without one argument' * callable(loss)} as"
            " its loss, expected a function of a model, such as"
            " lambda model: F.cross_entropy(model(x), y)."
        )
    size, matrices, free = _typical_size(model, graph)
    reasons = []
    if free:
        reasons.append(
            f"{free:,} scales of the weights are free and AdamW's steps depend on them; the"
            " canonical gauge fixes them."
        )
    else:
        reasons.append(
            "No scale of what is trained is free: there is no gauge to fix, so use AdamW."
        )
    if loss is None:
        lr = RELATIVE * size / matrices
        reasons.append(
            f"Typical weights have the size {size:.1e} there and a step changes the {matrices:,}"
            f" matrices by {RELATIVE:.1%} together. Near a minimum the loss may rise at this rate;"
            " random weights tolerate ten to a hundred times as much: pass the loss to try rates."
        )
    else:
        lr, tried = _try(model, graph, loss, size)
        reasons.append(f"Rates tried, with the loss after {STEPS} steps over that before: {tried}.")
    kinds = {p.dtype for _, p in _trained("suggest", model)}
    lost = [kind for kind in kinds if lr < size * torch.finfo(kind).eps / 2]
    if lost:
        reasons.append(
            f"Most of its steps are lost by rounding in {lost[0]}: train float32 weights, under"
            " autocast if the model computes in lower precision."
        )
    found, bound = _of_rules(graph, reasons)
    advice = Advice(
        "GaugeFixed(AdamW)" if free else "AdamW",
        float(f"{lr:.2g}"),
        "magnitude",
        bound,
        found,
        tuple(reasons),
        graph,
        model,
    )
    if show:
        print(advice)
    return advice


def _takes_a_model(loss: object) -> bool:
    """Whether something can be called with one argument, as far as its signature says."""
    if not callable(loss):
        return False
    try:
        signature = inspect.signature(loss)
    except (TypeError, ValueError):
        return True
    try:
        signature.bind(None)
    except TypeError:
        return False
    return True


def _trained(owner: str, model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    if not trained:
        raise InputError(
            f"{owner} found no parameter with requires_grad=True; call requires_grad_() on some."
        )
    for name, module in model.named_modules():
        sparse = isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse
        if sparse and any(p.requires_grad for p in module.parameters()):
            raise UnsupportedError(
                f"{owner} found sparse gradients of the embedding {name!r}, expected dense ones,"
                " which AdamW needs; make it with sparse=False."
            )
    return trained


def _make(graph: Structure, model: nn.Module, lr: float) -> torch.optim.Optimizer:
    # (AdamW multiplies weights by 1 - lr decay: of large weights too, a step takes 1 % at most)
    decay = DECAY / max(lr, 1.0)
    inner = torch.optim.AdamW(_trained("Advice.make", model), lr=lr, weight_decay=decay)
    return GaugeFixed(inner, graph, model=model)


def _typical_size(model: nn.Module, graph: Structure) -> tuple[float, int, int]:
    """Median root mean square of matrices in the canonical gauge, number of
    matrices, number of free scales.
    """
    _trained("suggest", model)
    tensors = find_tensors("suggest", graph, model)
    own, _ = movable(graph, {name for name, p in tensors.items() if p.requires_grad})
    factors = own.gauge_factors(torch.from_numpy(canonical(own, tensors).phi))
    known = {id(parameter): name for name, parameter in tensors.items()}
    sizes = []
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.dim() > 1:
            value, name = parameter.detach(), known.get(id(parameter))
            if name in factors:
                head, tail = (side.to(value.device) for side in factors[name])
                value = moved(value, head, tail, graph.shifts.get(name, 0.0))
            sizes.append(float(value.double().square().mean().sqrt()))
    sizes = [size for size in sizes if size > 0] or [1.0]
    if not all(map(math.isfinite, sizes)):
        raise InputError(
            "suggest found weights that are not finite; load weights from before they diverged."
        )
    return float(np.median(sizes)), len(sizes), own.num_units


def _try(
    model: nn.Module, graph: Structure, loss: Callable[[nn.Module], Tensor], size: float
) -> tuple[float, str]:
    """The rate from a test of rates, and the results of the test."""
    seen = []
    for relative in TRIED:
        twin = safe_deepcopy(model)
        losses = follow(twin, _make(graph, twin, relative * size), loss)
        seen.append(
            f"{relative * size:.1e}: {losses[-1] / losses[0] if losses[0] else math.nan:.3f}"
        )
        if falls(losses):
            # a third of the largest, so that the loss falls in later steps, too
            return relative * size / 3, ", ".join(seen)
    raise InputError(
        f"suggest found no rate at which the loss falls over {STEPS} steps ({', '.join(seen)});"
        " check the loss and the trained parameters."
    )


def follow(
    model: nn.Module, optimizer: torch.optim.Optimizer, loss: Callable[[nn.Module], Tensor]
) -> list[float]:
    """The losses before each of ten steps, and after the last.

    Args:
        model: the model, which is trained.
        optimizer: its optimizer.
        loss: the loss of the model.
    """
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        value = loss(model)
        if not isinstance(value, Tensor) or value.numel() != 1 or not value.requires_grad:
            found = (
                f"a tensor of shape {tuple(value.shape)}"
                if isinstance(value, Tensor)
                else type(value).__name__
            )
            found += (
                "" if not isinstance(value, Tensor) or value.requires_grad else " without gradients"
            )
            raise InputTypeError(
                f"suggest found a loss that returns {found}, expected one number with gradients."
            )
        value.backward()
        optimizer.step()
        losses.append(value.item())
    with torch.no_grad():
        return [*losses, loss(model).item()]


def falls(losses: Sequence[float]) -> bool:
    """Whether all losses are finite, and the last is below the first."""
    return all(map(math.isfinite, losses)) and losses[-1] < losses[0]


def _of_rules(graph: Structure, reasons: list[str]) -> tuple[dict[str, Multipliers], float | None]:
    """Multipliers by rule, and the bound that steps on path values need."""
    found = {}
    for rule in ("modulo", "magnitude"):
        try:
            # (Structure is what the core calls it; users hold a ReductionGraph)
            found[rule] = multipliers(graph.skeleton(rule))  # type: ignore[attr-defined]
        except PathspaceError as error:
            reasons.append(f"No steps on path values by rule {rule!r}: {error}")
    least = found.get("magnitude")
    if least is None or not graph.num_units:
        return found, None
    bound = 1.0 if least.largest > LARGE else None
    reasons.append(
        f"Steps on path values (rule 'magnitude') multiply the rate by {least.median:.0e} at the"
        f" median, {least.largest:.0e} at most, in the gauge with |pre| = |s|: GSGD"
        f" {'needs max_multiplier=1.0' if bound else 'needs no bound'}."
    )
    return found, bound
