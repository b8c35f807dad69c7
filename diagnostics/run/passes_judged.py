"""What a measured pass shows: values, gradients and a loss that are too
large, too small or not finite.

A function gets the snapshots so far and yields place, value and sentence of the
problems in the last one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from .probe import LayerFacts
from .snapshot import Snapshot
from .weights import GroupFacts

FLOAT16 = 65504.0
HEADROOM = 4.0
SMALL = -1.7
Found = Iterator[tuple[str, float, str]]


def inputs_not_finite(run: Sequence[Snapshot]) -> Found:
    """Inputs of the model that are not finite."""
    size = run[-1].layers.rms_inputs
    if size is not None and not math.isfinite(size):
        yield "", size, "The model's inputs hold values that are not finite."


def not_finite(run: Sequence[Snapshot]) -> Found:
    """The first place in order of computation: a layer forwards, a layer backwards, a weight."""
    last = run[-1]
    for tensor in last.tensors:
        if not math.isfinite(tensor.norm) and math.isfinite(tensor.moved or 0.0):
            yield tensor.name, tensor.norm, f"The weights of {tensor.name} are not finite."
            return
    for layer in last.layers.layers:
        # (no input has the size NaN)
        if not math.isfinite(layer.rms_out) and not math.isinf(layer.rms_in):
            text = f"The outputs of {shown(layer)} are not finite, and its inputs are."
            yield layer.name, layer.rms_out, text
            return
    for layer in reversed(last.layers.layers):
        if layer.gradient is not None and not math.isfinite(layer.gradient):
            text = (
                f"The gradient that reaches {shown(layer)} is not finite, though all activations"
                " are."
            )
            yield layer.name, layer.gradient, text
            return
    for tensor in last.tensors:
        if tensor.gradient is not None and not math.isfinite(tensor.gradient):
            yield tensor.name, tensor.gradient, f"The gradient of {tensor.name} is not finite."
            return


def input_scale(run: Sequence[Snapshot]) -> Found:
    """Inputs whose size is far from 1, where no normalisation comes first."""
    size, layers = run[-1].layers.rms_inputs, run[-1].layers.layers
    if size is None or not layers or "Norm" in layers[0].kind or not layers[0].weighted:
        return
    if size > 50 or size < 1e-3:
        yield (
            "",
            size,
            f"The model's inputs have a root mean square of {size:.3g}, expected about 1.",
        )


def loss_of(kind: str) -> Callable[[Sequence[Snapshot]], Found]:
    """Faults of the loss, found in its gradients by the outputs; in training, at two
    measured steps in a row.
    """

    def find(run: Sequence[Snapshot]) -> Found:
        recent = [snap.layers.judged for snap in run[-2:]]
        if (len(recent) > 1 or run[-1].rate is None) and all(
            each is not None and each.kind == kind for each in recent
        ):
            found = recent[-1]
            if found is not None:
                yield "", found.value, found.text

    return find


def repeated(run: Sequence[Snapshot]) -> Found:
    """The same batch twice, though the loader has several."""
    batches = run[-1].batches
    if batches is not None and batches > 1 and same_batch(run):
        yield (
            "",
            batches,
            f"All {len(run)} measured batches are the same one, of {batches} in the data.",
        )


def same_batch(run: Sequence[Snapshot]) -> bool:
    """Whether all measured steps, four at least, had the same inputs."""
    return (
        len(run) > 3
        and bool(run[-1].layers.batch)
        and len({snap.layers.batch for snap in run}) == 1
    )


def unbalanced(run: Sequence[Snapshot]) -> Found:
    """Groups of units whose entering and leaving weights differ much in size."""
    for group in run[-1].units.groups:
        if _differ(group):
            value = max(abs(group.ratio), group.spread)
            text = (
                f"incoming over outgoing weights are {10**group.ratio:.2g} of what layers start"
                " from"
            )
            if group.spread > abs(group.ratio):
                text = (
                    "incoming over outgoing weights of its units differ by a factor of"
                    f" {10**group.spread:.2g}"
                )
            yield (
                group.name,
                value,
                f"The units between {group.name} and {group.after} are unbalanced: {text}.",
            )


def _differ(group: GroupFacts) -> bool:
    # a large product means that the weights of one side are too large; rescaling does not help
    shifted = (
        abs(group.ratio) > 1.5 and -abs(group.ratio) / 2 < group.product < abs(group.ratio) / 3
    )
    return shifted or group.spread > 2.2


def of_unusual_weights(run: Sequence[Snapshot], name: str) -> bool:
    """Whether a layer's weights had another size than usual at the first snapshot already, and not
    because of scales that another layer takes back.
    """
    size = _excess(run[0]).get(name, 0.0)
    rescaled = [n for g in run[0].units.groups if _differ(g) for n in (g.name, g.after)]
    return (size > 1 or size < SMALL) and name not in {n.rpartition(".")[0] for n in rescaled}


def exploding(run: Sequence[Snapshot]) -> Found:
    """Layers with unusually large weights that multiply their input, and activations
    that grow over the layers.
    """
    last = run[-1]
    excess, layers = _excess(last), last.layers.layers
    for i, layer in enumerate(layers):
        size = excess.get(layer.name, 0.0)
        gain = layer.rms_out / layer.rms_in if layer.rms_in > 0 else 0.0
        if size > 1 and gain > 4 and not _normed(layers, i):
            text = f"its weights are {10**size:.3g} times the usual size"
            yield (
                layer.name,
                gain,
                f"Layer {shown(layer)} multiplies its input by {gain:.3g}: {text}.",
            )
    weighted = [layer for layer in layers if layer.weighted and layer.rms_out > 0]
    # (a recurrent layer alone may be where they grow, from its own input to its output)
    start = max(last.layers.rms_inputs or 1.0, weighted[0].rms_in, 1.0) if weighted else 1.0
    sizes = [start, *(layer.rms_out for layer in weighted)]
    if max(sizes) > 1e4 * start:
        steps = [b / a if math.isfinite(a) else 0.0 for a, b in pairwise(sizes)]
        growth, layer = max(zip(steps, weighted, strict=True), key=lambda pair: pair[0])
        text = f"Activations grow by {max(sizes) / start:.2g} from the inputs on, most at "
        yield layer.name, growth, f"{text}{shown(layer)}."


def vanishing(run: Sequence[Snapshot]) -> Found:
    """Weights far below their usual size, and gradients that shrink from the
    last layer to the first.
    """
    last = run[-1]
    excess, layers = _excess(last), last.layers.layers
    for i, layer in enumerate(layers):
        size = excess.get(layer.name, 0.0)
        if size < SMALL and not _normed(layers, i):
            yield (
                layer.name,
                10**size,
                f"The weights of {shown(layer)} are {10**size:.2g} of their usual size.",
            )
    known = [(layer.gradient, layer) for layer in layers if layer.weighted and layer.gradient]
    if last.layers.constant:
        # (no gradient is left where outputs do not depend on the inputs)
        return
    if len(known) > 2 and known[0][0] < 1e-6 * max(size for size, _ in known):
        steps = [(a[0] / b[0], b[1]) for a, b in pairwise(known)]
        fall, layer = min(steps, key=lambda pair: pair[0])
        text = (
            f"Gradients shrink by {known[0][0] / known[-1][0]:.2g} from the last layer to the"
            " first, most at "
        )
        yield layer.name, fall, f"{text}{shown(layer)}."


def dead(run: Sequence[Snapshot]) -> Found:
    """Layers most of whose units passed no gradient in the last snapshots."""
    if len(run) < 3 and run[-1].rate is not None:
        return
    layers = run[-1].layers.layers
    for i, layer in enumerate(layers):
        if not (layer.weighted or "Norm" in layer.kind) or layer.live is None:
            continue
        recent = run[-3:]
        share = _dead_share(recent, layer.name, layer.live)
        following = next((each for each in layers[i + 1 :] if each.weighted), None)
        hands_on = (
            following is not None and following.gradient is not None and following.gradient > 0
        )
        if _normed(layers, i):
            # (the norm is judged itself)
            continue
        if share == 1 and not (hands_on and following is not None and following.idle > 0.5):
            continue
        # where biases exceed the inputs, as in deep networks at the start, half
        # of the units are always 0
        if share >= 0.75 and len(layer.live) > 3:
            batches = "batch" if len(recent) == 1 else f"{len(recent)} batches"
            text = (
                f"{share:.0%} of the units of {shown(layer)} are dead: no gradient passed through"
                f" them in the last measured {batches}."
            )
            yield layer.name, share, text


def shut_from_the_start(run: Sequence[Snapshot], name: str) -> bool:
    """Whether biases alone held most units of a layer below 0 at the first snapshot."""
    return any(layer.name == name and layer.shut >= 0.75 for layer in run[0].layers.layers)


def constant_outputs(run: Sequence[Snapshot]) -> Found:
    """Outputs that do not depend on the inputs; in three snapshots if a layer starts at zero,
    and has such outputs before its first step, or may be dead.
    """
    last = run[-1]
    zero = any(t.matrix and t.norm == 0 and t.gradient for t in last.tensors)
    may_be_dead = last.rate is not None and any(each.idle == 1 for each in last.layers.layers)
    unsure = zero or may_be_dead
    if all(snap.layers.constant for snap in run[-3:]) and (len(run) > 2 or not unsure):
        yield "", 1.0, "The outputs are the same for all samples, although the inputs differ."


def _dead_share(recent: Sequence[Snapshot], name: str, latest: Tensor) -> float:
    """Share of a layer's units that no gradient passed in any of some
    snapshots; 0 without snapshots.
    """
    same = [each.live for snap in recent for each in snap.layers.layers if each.name == name]
    known = [live for live in same if live is not None and live.shape == latest.shape]
    return 1 - float(torch.stack(known).any(0).float().mean()) if known else 0.0


def saturated(run: Sequence[Snapshot]) -> Found:
    """Activations most of whose values lie where the slope is nearly 0."""
    for layer in run[-1].layers.layers:
        if layer.flat is not None and layer.flat > 0.8:
            text = (
                f"{layer.flat:.0%} of the outputs of {shown(layer)} lie where its derivative is"
                " below 0.001."
            )
            yield layer.name, layer.flat, text


def eps(run: Sequence[Snapshot]) -> Found:
    """Normalisations in which eps is a large part of what they divide by."""
    idle = 0.0
    for layer in run[-1].layers.layers:
        idle = layer.idle if layer.weighted else idle
        # outputs of dead units are constant, and the rule about dead units reports them
        if idle > 0.5 and len(run) < 3:
            continue
        if layer.eps_share is not None and layer.eps_share > 0.3:
            text = (
                f"eps makes up {layer.eps_share:.0%} of what {shown(layer)} divides by: its input"
                " is too small."
            )
            yield layer.name, layer.eps_share, text


def overflow(run: Sequence[Snapshot]) -> Found:
    """Activations near the largest number of float16."""
    found = [layer for layer in run[-1].layers.layers if layer.largest > FLOAT16 / HEADROOM]
    if found:
        layer = max(found, key=lambda each: each.largest)
        text = (
            f"An activation of {shown(layer)} reaches {layer.largest:.3g}, which is not safe in"
            f" float16: it ends at {FLOAT16:.0f}."
        )
        yield layer.name, layer.largest, text


def pulled_back(run: Sequence[Snapshot]) -> Found:
    """Residual branches whose output points against descent for nearly all samples."""
    training = run[-1].rate is not None
    recent = [snap.chain for snap in run[-4:] if snap.chain is not None]
    if not recent or (len(recent) < 4 and training):
        return
    for i, name in enumerate(recent[-1].names):
        cosines = [record.cosines[i] for record in recent]
        means = [float(each.nanmean()) for each in cosines]
        share = min(float((each < 0).double().mean()) for each in cosines)
        size = min(float(record.norms[i].nanmean()) for record in recent)
        if max(means) < (-0.15 if training else -0.25) and share > 0.9 and size > 0.2:
            text = (
                f"The loss pulls back the residual branch {name}: its output has cosine"
                f" {means[-1]:+.2f} with descent"
            )
            yield name, means[-1], f"{text}, negative for {share:.0%} of the samples."


def _normed(layers: Sequence[LayerFacts], i: int) -> bool:
    """Whether a normalisation takes the layer's output as it is, so that
    its size does not matter.
    """
    return i + 1 < len(layers) and layers[i + 1].direct and "Norm" in layers[i + 1].kind


def shown(layer: LayerFacts) -> str:
    """A layer in a sentence: its name and its kind."""
    return f"{layer.name or 'the model'} ({layer.kind})"


def _excess(snapshot: Snapshot) -> dict[str, float]:
    """The size of each layer's weights over the usual one, in powers of ten."""
    found: dict[str, float] = {}
    for tensor in snapshot.tensors:
        if tensor.excess is not None:
            found.setdefault(tensor.name.rpartition(".")[0], tensor.excess)
    return found
