"""Faults of a loss, found in its gradient by the outputs: a second softmax, a
negated loss, uniform targets.

Cross-entropy of outputs ``z`` has the gradient ``w (softmax(z) - t)`` in every row. Where ``z`` are
already probabilities, or become ones before the loss applies its own softmax, the gradient has
another form, and the loss has a lower bound above 0.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..shared.real_tensors import first_real, is_real

ROWS = 512
# largest relative error of a form that fits (in 32 bits, in 16), and the factor by which
# other forms must miss it
FITS, MISSES = {False: 2e-3, True: 1e-2}, 5
_VIEWS = (
    "View",
    "Reshape",
    "ToCopy",
    "Transpose",
    "Permute",
    "Slice",
    "Clone",
    "Alias",
    "queeze",
    "Select",
    "TBackward",
)


@dataclass(frozen=True)
class LossFault:
    """A fault of a loss.

    Attributes:
        kind: ``"squashed twice"``, ``"uniform targets"``, ``"broadcast targets"``,
            ``"negated loss"`` or ``"rectified outputs"``.
        value: the loss of a perfect prediction, the number of classes, the target
            value, the number of targets that meet each output, or the share of zeros.
        text: one sentence.
    """

    kind: str
    value: float
    text: str


def loss_fault(output: Tensor, gradient: Tensor) -> LossFault | None:
    """Find a fault of a loss in its gradient by a model's outputs; ``None`` if none is certain.

    Args:
        output: outputs, with classes along the last dimension or dimension 1; those of one
            dimension are one number per sample.
        gradient: of the loss, of the same shape.

    Example:
        >>> z = torch.randn(8, 5).softmax(1).requires_grad_()
        >>> loss = torch.nn.functional.cross_entropy(z, torch.arange(8) % 5)
        >>> loss_fault(z.detach(), torch.autograd.grad(loss, z)[0]).kind
        'squashed twice'
    """
    if (
        output.ndim == 0
        or not output.numel()
        or output.shape != gradient.shape
        or not bool(torch.isfinite(gradient).all())
    ):
        return None
    if output.ndim == 1:
        output, gradient = output[:, None], gradient[:, None]
    for dim in dict.fromkeys((output.ndim - 1, min(1, output.ndim - 1))):
        z, g = (
            value.detach().float().movedim(dim, -1).reshape(-1, output.shape[dim])
            for value in (output, gradient)
        )
        close = FITS[output.element_size() == 2]
        asked = (g != 0).any(-1).nonzero().flatten()
        asked = asked[:: -(-len(asked) // ROWS) or 1]
        z, g = z[asked], g[asked]
        if not len(z):
            return None
        if z.shape[1] > 1 and bool((g.sum(-1).abs() < close * g.abs().sum(-1)).all()):
            return _by_classes(z, g, close)
    return _by_entries(z, g, close) or _one_value(z, g, close)


def _by_classes(z: Tensor, g: Tensor, close: float) -> LossFault | None:
    classes = z.shape[1]
    rest = torch.ones_like(g, dtype=torch.bool)
    alike = z.softmax(-1) - 1 / classes
    if _is(g, alike, [z - z.mean(-1, keepdim=True)], rest, close):
        text = (
            f"The gradient asks for the same probability of all {classes} classes, whatever the"
            " targets are."
        )
        return LossFault("uniform targets", classes, text)
    given = bool((z >= 0).all()) and bool(((z.sum(-1) - 1).abs() < 1e-2).all())
    share = z if given else z.softmax(-1)
    steepest = (g if given else g / share.clamp(min=1e-12)).argmin(-1, keepdim=True)
    target = torch.zeros_like(g).scatter_(1, steepest, 1.0)
    rest = target == 0
    twice, brier = share.softmax(-1) - target, share - target
    if not given:
        # through the softmax between the outputs and the loss
        twice, brier = (share * (v - (share * v).sum(-1, keepdim=True)) for v in (twice, brier))
    if _is(g, twice, [brier] + [share] * (not given), rest, close):
        floor = math.log(math.e + classes - 1) - 1
        text = (
            f"Probabilities go through a softmax once more: with {classes} classes the loss stays"
            f" above {floor:.3g}."
        )
        return LossFault("squashed twice", floor, text)
    return None if given else _by_logits(z, g, close)


def _by_logits(z: Tensor, g: Tensor, close: float) -> LossFault | None:
    """Cross-entropy as it should be, but of the wrong sign, or of logits
    that cannot be negative.
    """
    share, zeros = z.softmax(-1), float((z == 0).float().mean())
    for sign in (1, -1):
        target = torch.zeros_like(g).scatter_(
            1, (sign * g / share.clamp(min=1e-12)).argmin(-1, keepdim=True), 1.0
        )
        if _missed(sign * g, share - target, torch.ones_like(g)) > close:
            continue
        if sign < 0:
            return LossFault(
                "negated loss",
                -1.0,
                "The loss asks for less probability of the targets, not for more.",
            )
        if zeros > 0.2 and bool((z >= 0).all()):
            text = (
                f"{zeros:.0%} of the logits are 0 and none is below: what is set to 0 learns"
                " nothing from the loss."
            )
            return LossFault("rectified outputs", zeros, text)
    return None


def _one_value(z: Tensor, g: Tensor, close: float) -> LossFault | None:
    """A square loss with the same target for all samples, as after broadcasting of a
    column with a row of targets.
    """
    z, g = z.flatten(), g.flatten()
    slope = g - g.mean()
    if len(z) < 8 or float(z.std()) < 1e-3 * float(z.norm()):
        return None
    factor = float((slope * z).sum() / (z - z.mean()).square().sum())
    value = float(z.mean() - g.mean() / factor) if factor > 0 else 0.0
    # discriminators have whole batches of the target 0 or 1, with a square loss or a logistic one
    if factor <= 0 or any(abs(value - number) < 1e-2 for number in (-1, 0, 1)):
        return None
    missed, logistic = (
        _missed(slope[None], (f - f.mean())[None], torch.ones_like(g)) for f in (z, z.sigmoid())
    )
    if missed > close or logistic < MISSES * close:
        return None
    text = (
        f"The gradient asks for the output {value:.3g} from each of {len(z)} samples, whatever"
        " their targets are."
    )
    return LossFault("uniform targets", value, text)


def _by_entries(z: Tensor, g: Tensor, close: float) -> LossFault | None:
    """The same for independent binary classes and sigmoids."""
    whole = (g != 0)[None].flatten(1)
    z, g = z.reshape(1, -1), g.reshape(1, -1)
    given = bool(((z >= 0) & (z <= 1)).all())
    share = z if given else z.sigmoid()
    target, slope = (g < 0).float(), torch.ones_like(z) if given else share * (1 - share)
    if whole.sum() < 8 or bool(target.all()) or not bool(target.any()):
        return None
    twice, rivals = (
        slope * (share.sigmoid() - target),
        [slope * (share - target)] + [share - target] * (not given),
    )
    if _is(g, twice, rivals, whole, close):
        floor = math.log1p(math.exp(-1))
        return LossFault(
            "squashed twice",
            floor,
            f"Probabilities go through a sigmoid again: the loss stays above {floor:.3g}.",
        )
    return None


def _is(g: Tensor, wanted: Tensor, rivals: list[Tensor], where: Tensor, close: float) -> bool:
    """Whether a gradient has one form and certainly none of the others."""
    return _missed(g, wanted, where) < close and all(
        _missed(g, rival, where) > MISSES * close for rival in rivals
    )


def _missed(g: Tensor, wanted: Tensor, where: Tensor) -> float:
    """The relative residual of a gradient after projection on a form, for each row or,
    with few classes, for all.
    """
    g, wanted = g * where, wanted * where
    over = (-1,) if g.shape[1] > 3 else (0, 1)
    factor = (g * wanted).sum(over, keepdim=True) / wanted.square().sum(over, keepdim=True).clamp(
        min=1e-30
    )
    return float((g - factor.clamp(min=0) * wanted).norm() / g.norm().clamp(min=1e-30))


def broadcast_fault(
    loss: Callable[[Any, Any], Tensor], outputs: Any, targets: Any
) -> LossFault | None:
    """Targets of another shape than the outputs, which the loss broadcasts.

    Args:
        loss: ``loss(outputs, targets)``.
        outputs: the output of the model.
        targets: passed to the loss.

    Example:
        >>> z, y = torch.randn(4, 1), torch.randn(4)
        >>> broadcast_fault(torch.nn.functional.mse_loss, z, y).text
        'The loss compares outputs of shape (4, 1) with targets of shape (4,) as tables of shape (4, 4).'
        >>> broadcast_fault(lambda z, y: (z.squeeze(1) - y).square().sum(), z, y)
    """  # noqa: E501
    z = first_real(outputs)
    if z is None or not is_real(targets) or z.shape == targets.shape:
        return None
    z = z.detach()
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            table = torch.broadcast_shapes(z.shape, targets.shape)
            found = loss(outputs, targets)
            wide = loss(z.expand(table), targets.expand(table))
    except Exception:  # shapes that do not fit together, or a loss that takes no such tables
        return None
    if table.numel() == min(z.numel(), targets.numel()) or not torch.allclose(found, wide):
        return None
    text = (
        f"The loss compares outputs of shape {tuple(z.shape)} with targets of shape"
        f" {tuple(targets.shape)} as tables of shape {tuple(table)}."
    )
    return LossFault("broadcast targets", table.numel() / z.numel(), text)


def judged_inside(loss: Tensor) -> LossFault | None:
    """The same for a loss that the model computes itself, from autograd's graph.

    Args:
        loss: a scalar with a graph.

    Example:
        >>> z = torch.randn(4, 3, requires_grad=True)
        >>> judged_inside(
        ...     torch.nn.functional.cross_entropy(z.softmax(1), torch.tensor([0, 1, 2, 0]))
        ... ).kind
        'squashed twice'
        >>> judged_inside(torch.nn.functional.cross_entropy(z, torch.tensor([0, 1, 2, 0])))
    """
    pairs = (("LogSoftmax", "Softmax"), ("BinaryCrossEntropyWithLogits", "Sigmoid"))
    for node in _last(loss):
        for taken, given in pairs:
            if node.name().startswith(taken) and any(
                _source(node).startswith(each) for each in (given, f"Safe{given}")
            ):
                text = (
                    f"The loss of the model takes the {given.lower()} of a {given.lower()}, and has"
                    " a floor above 0."
                )
                return LossFault("squashed twice", 0.0, text)
    return None


def _last(loss: Tensor) -> Iterator[torch.autograd.graph.Node]:
    """The last few nodes of a graph."""
    waiting, seen = [loss.grad_fn], 0
    while waiting and seen < 30:
        node = waiting.pop(0)
        if node is not None:
            seen += 1
            yield node
            waiting += [each for each, _ in node.next_functions]


def _source(node: torch.autograd.graph.Node) -> str:
    """The name of the node before this one, without views."""
    following = node.next_functions[0][0] if node.next_functions else None
    while (
        following is not None
        and any(view in following.name() for view in _VIEWS)
        and following.next_functions
    ):
        following = following.next_functions[0][0]
    return "" if following is None else following.name()
