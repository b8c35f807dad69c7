"""What a measured step of the optimizer shows: steps that are too large, too small, lost
or made on other tensors.

A function gets the snapshots so far and yields place, value and sentence of the
problems in the last one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

from .passes_judged import Found, shown
from .snapshot import Snapshot


def rate(run: Sequence[Snapshot]) -> Found:
    """Steps that move weights by a large part of their size."""
    recent = run[-3:]
    all_moved = [
        t.moved
        for t in run[-1].tensors
        if t.matrix and t.moved is not None and t.excess is not None
    ]
    usual = median(all_moved) if all_moved else 0.0
    for tensor in run[-1].tensors:
        moved = tensor.moved
        if not tensor.matrix or moved is None or tensor.excess is None:
            continue
        history = [
            t.moved
            for snap in recent
            for t in snap.tensors
            if t.name == tensor.name and t.moved is not None
        ]
        sustained = sorted(history)[-2:]
        if (
            usual > 0.8
            or not moved <= 3
            or (len(history) == 3 and min(history) > 0.3)
            or (len(sustained) == 2 and min(sustained) > 1)
        ):
            text = (
                f"A step of rate {run[-1].rate or 0:.3g} moves {tensor.name} by {moved:.2g} of its"
                " size"
            )
            yield tensor.name, moved, f"{text}, and path values through it by as much."


def slow(run: Sequence[Snapshot]) -> Found:
    """Steps that hardly move any weight."""
    if len(run) < 4 or run[-1].rate is None:
        return
    # rates that fall to 0 at the end of a schedule are larger in most of the last measured steps
    for steps, least, which in (
        (run, 1e-7, "No step"),
        (run[-4:], 1e-9, "None of the last measured steps"),
    ):
        moved = [
            t.moved for snap in steps for t in snap.tensors if t.matrix and t.moved is not None
        ]
        if moved and max(moved) < least:
            yield (
                "",
                max(moved),
                f"{which} has moved any tensor by more than {max(moved):.1g} of its size.",
            )
            return


def clipped(run: Sequence[Snapshot]) -> Found:
    """Gradients that shrink between the backward pass and the step to so little that no
    tensor moves.
    """
    last = run[-4:]
    if len(last) < 4 or last[-1].rate is None:
        return
    norms = [math.hypot(*(t.gradient or 0.0 for t in snap.tensors)) for snap in last]
    sizes = [snap.layers.slope for snap in last]
    shares = [norm / size if size else 0.0 for norm, size in zip(norms, sizes, strict=True)]
    moved = max((t.moved or 0.0 for snap in last for t in snap.tensors if t.matrix), default=0.0)
    if moved < 1e-5 and all(0 < share < 0.01 for share in shares) and not _scaled(shares):
        text = (
            f"Gradients are clipped to {shares[-1]:.1g} of their size, to the norm {norms[-1]:.3g}"
        )
        yield "", norms[-1], f"{text}, and no tensor moves by more than {moved:.1g} of its size."


def _scaled(shares: Sequence[float]) -> bool:
    """Whether gradients lose a power of two by which the loss was multiplied for 16 bits."""
    return all(abs(math.log2(share) - round(math.log2(share))) < 1e-5 for share in shares)


def optimizer_eps(run: Sequence[Snapshot]) -> Found:
    """An eps of the optimizer that is far above the usual gradients."""
    value = run[-1].eps
    if len(run) > 3 and value is not None and value > 10:
        text = f"eps of the optimizer is {value:.3g} times the usual size of the largest gradients"
        yield "", value, f"{text}, and shrinks every step by as much."


def dropped(run: Sequence[Snapshot]) -> Found:
    """Dropout that drops nearly everything."""
    for layer in run[-1].layers.layers:
        if layer.dropped > 0.85:
            yield (
                layer.name,
                layer.dropped,
                f"{shown(layer)} sets {layer.dropped:.0%} of its input to 0.",
            )


def rounded(run: Sequence[Snapshot]) -> Found:
    """Steps smaller than the distance to the next number of the type."""
    # a rate may be warmed up from 0
    recent = [{t.name: t.still for t in snap.tensors} for snap in run[-4:]]
    for name, still in recent[-1].items():
        shares = [found.get(name) for found in recent]
        if (
            still is not None
            and len(run) > 3
            and all(share is not None and share > 0.8 for share in shares)
        ):
            text = f"A step leaves {still:.0%} of the weights of {name} as they are: in 16 bits"
            yield name, still, f"{text} it is rounded to nothing."


def decay(run: Sequence[Snapshot]) -> Found:
    """Weight decay that halves weights within a few hundred steps."""
    share = run[-1].decay
    if share is not None and share > 2e-3:
        yield (
            "",
            share,
            (
                f"Weight decay takes {share:.2g} off every weight in each step, half of it in"
                f" {0.69 / share:.0f}."
            ),
        )


def no_gradient(run: Sequence[Snapshot]) -> Found:
    """Weights that no gradient reaches."""
    if len(run) < 3:
        return
    seen = {layer.name for layer in run[-1].layers.layers if layer.weighted}
    silent = [
        t
        for t in run[-1].tensors
        if t.matrix and t.name.rpartition(".")[0] in seen and not t.gradient
    ]
    for tensor in silent:
        history = [t.gradient for snap in run[-3:] for t in snap.tensors if t.name == tensor.name]
        if not any(history) and tensor.norm > 0:
            yield tensor.name, 0.0, f"No gradient reaches {tensor.name}, though its layer runs."


def untrained(run: Sequence[Snapshot]) -> Found:
    """Weights that the optimizer does not have."""
    if len(run) < 3 or run[-1].rate is None:
        return
    held = [t for t in run[-1].tensors if not t.trained and t.gradient]
    for tensor in held:
        yield (
            tensor.name,
            tensor.gradient or 0.0,
            f"{tensor.name} gets gradients, and no optimizer holds it.",
        )


def stale(run: Sequence[Snapshot]) -> Found:
    """Gradients that were not set to zero."""
    if len(run) > 2 and all(snap.layers.stale for snap in run[-2:]):
        yield (
            "",
            1.0,
            "Gradients of the step before are still there when a backward pass begins, and add up.",
        )


def evaluation_mode(run: Sequence[Snapshot]) -> Found:
    """Training with normalisations or dropout in evaluation mode."""
    kinds = [
        layer.kind
        for layer in run[-1].layers.layers
        if "BatchNorm" in layer.kind or "Dropout" in layer.kind
    ]
    if run[-1].rate is not None and not run[-1].layers.training and kinds:
        yield (
            "",
            0.0,
            f"The model trains in evaluation mode: {kinds[0]} does not work as in training.",
        )


def copies(run: Sequence[Snapshot]) -> Found:
    """Matrices with equal rows, whose units do the same."""
    for tensor in run[-1].tensors:
        if tensor.copies:
            yield (
                tensor.name,
                1.0,
                f"All units of {tensor.name} have the same weights, and do the same.",
            )
