"""Alarms: rules about the measured steps of a run, each with a number, a place, a remedy and a cause.

A rule finds problems in the last snapshot or the last few. An alarm refers to an earlier alarm
that explains it, if there is one: a rate that is too large causes dead units, and a layer that is too large
causes an overflow.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import median

import torch

from pathspace.diagnostics.run.probe import LayerFacts
from pathspace.diagnostics.run.snapshot import Snapshot
from pathspace.diagnostics.run.weights import TensorFacts

FLOAT16 = 65504.0
HEADROOM = 4.0


@dataclass(frozen=True)
class Alarm:
    """A problem of a training run, with its place, a number and advice.

    Attributes:
        kind: the rule that found it.
        place: the layer, parameter or node; "" for the run as a whole.
        value: the number that the rule compared.
        step: the step at which it was found first.
        text: one sentence: what, where, how much.
        advice: one sentence: what to do.
        because: kind of the alarm that explains this one, "" if there is none.
    """

    kind: str
    place: str
    value: float
    step: int
    text: str
    advice: str
    because: str = ""

    def __str__(self) -> str:
        return f"step {self.step}: {self.text} {self.advice}"


@dataclass(frozen=True)
class Rule:
    """One kind of alarm.

    Attributes:
        kind: its name.
        find: yields place, value and sentence of the problems in the last one of the snapshots so far.
        advice: what to do.
        explains: kinds that are a consequence of this one if it came first.
        late: it concerns the update at the end of a step, and comes after the alarms about the pass of the same step.
    """

    kind: str
    find: Callable[[Sequence[Snapshot]], Iterator[tuple[str, float, str]]]
    advice: str
    explains: frozenset[str] = field(default_factory=frozenset)
    late: bool = False


Found = Iterator[tuple[str, float, str]]


def _inputs_not_finite(run: Sequence[Snapshot]) -> Found:
    size = run[-1].layers.rms_inputs
    if size is not None and not math.isfinite(size):
        yield "", size, "The model's inputs hold values that are not finite."


def _not_finite(run: Sequence[Snapshot]) -> Found:
    """The first place in order of computation: a layer forwards, a layer backwards, a weight."""
    last = run[-1]
    for tensor in last.tensors:
        if not math.isfinite(tensor.norm) and not (tensor.moved is not None and not math.isfinite(tensor.moved)):
            yield tensor.name, tensor.norm, f"The weights of {tensor.name} are not finite."
            return
    for layer in last.layers.layers:
        if not math.isfinite(layer.rms_out) and (math.isfinite(layer.rms_in) or math.isnan(layer.rms_in)):
            yield layer.name, layer.rms_out, f"The outputs of {_layer(layer)} are not finite, and its inputs are."
            return
    for layer in reversed(last.layers.layers):
        if layer.gradient is not None and not math.isfinite(layer.gradient):
            text = f"The gradient that reaches {_layer(layer)} is not finite, though all activations are."
            yield layer.name, layer.gradient, text
            return
    for tensor in last.tensors:
        if tensor.gradient is not None and not math.isfinite(tensor.gradient):
            yield tensor.name, tensor.gradient, f"The gradient of {tensor.name} is not finite."
            return


def _input_scale(run: Sequence[Snapshot]) -> Found:
    size, layers = run[-1].layers.rms_inputs, run[-1].layers.layers
    if size is None or not layers or "Norm" in layers[0].kind or not layers[0].weighted:
        return
    if size > 50 or size < 1e-3:
        yield "", size, f"The model's inputs have a root mean square of {size:.3g}, expected about 1."


def _loss(kind: str) -> Callable[[Sequence[Snapshot]], Found]:
    """Faults of the loss, found in its gradients by the outputs; in training, at two measured steps in a row."""

    def find(run: Sequence[Snapshot]) -> Found:
        recent = [snap.layers.judged for snap in run[-2:]]
        if (len(recent) > 1 or run[-1].rate is None) and all(each is not None and each.kind == kind for each in recent):
            found = recent[-1]
            if found is not None:
                yield "", found.value, found.text

    return find


def _repeated(run: Sequence[Snapshot]) -> Found:
    batches = run[-1].batches
    if batches is not None and batches > 1 and same_batch(run):
        yield "", batches, f"All {len(run)} measured batches are the same one, of {batches} in the data."


def same_batch(run: Sequence[Snapshot]) -> bool:
    """Whether all measured steps, four at least, had the same inputs."""
    return len(run) > 3 and bool(run[-1].layers.batch) and len({snap.layers.batch for snap in run}) == 1


def _unbalanced(run: Sequence[Snapshot]) -> Found:
    for group in run[-1].units.groups:
        # a large product means that the weights of one side are too large; rescaling does not help there
        shifted = abs(group.ratio) > 1.5 and -abs(group.ratio) / 2 < group.product < abs(group.ratio) / 3
        if shifted or group.spread > 2.2:
            value = max(abs(group.ratio), group.spread)
            text = f"incoming over outgoing weights are {10**group.ratio:.2g} of what layers start from"
            if group.spread > abs(group.ratio):
                text = f"incoming over outgoing weights of its units differ by a factor of {10**group.spread:.2g}"
            yield group.name, value, f"The units between {group.name} and {group.after} are unbalanced: {text}."


def _exploding(run: Sequence[Snapshot]) -> Found:
    last = run[-1]
    excess, layers = _excess(last), last.layers.layers
    for i, layer in enumerate(layers):
        size = excess.get(layer.name, 0.0)
        gain = layer.rms_out / layer.rms_in if layer.rms_in > 0 else 0.0
        if size > 1 and gain > 4 and not _normed(layers, i):
            text = f"its weights are {10**size:.3g} times the usual size"
            yield layer.name, gain, f"Layer {_layer(layer)} multiplies its input by {gain:.3g}: {text}."
    sizes = [(layer.rms_out, layer) for layer in layers if layer.weighted and layer.rms_out > 0]
    if sizes and max(sizes, key=lambda pair: pair[0])[0] > 1e4 * max(last.layers.rms_inputs or 1.0, sizes[0][0], 1.0):
        steps = [(b[0] / a[0], b[1]) for a, b in pairwise(sizes)]
        growth, layer = max(steps, key=lambda pair: pair[0])
        yield (
            layer.name,
            growth,
            f"Activations grow by {sizes[-1][0] / sizes[0][0]:.2g} from the first layer to the last.",
        )


def _vanishing(run: Sequence[Snapshot]) -> Found:
    last = run[-1]
    excess, layers = _excess(last), last.layers.layers
    for i, layer in enumerate(layers):
        size = excess.get(layer.name, 0.0)
        if size < -1.7 and not _normed(layers, i):
            yield layer.name, 10**size, f"The weights of {_layer(layer)} are {10**size:.2g} of their usual size."
    known = [(layer.gradient, layer) for layer in layers if layer.weighted and layer.gradient]
    if len(known) > 2 and known[0][0] < 1e-6 * max(size for size, _ in known):
        steps = [(a[0] / b[0], b[1]) for a, b in pairwise(known)]
        fall, layer = min(steps, key=lambda pair: pair[0])
        text = f"Gradients shrink by {known[0][0] / known[-1][0]:.2g} from the last layer to the first, most at "
        yield layer.name, fall, f"{text}{_layer(layer)}."


def _dead(run: Sequence[Snapshot]) -> Found:
    if len(run) < 3 and run[-1].rate is not None:
        return
    layers = run[-1].layers.layers
    for i, layer in enumerate(layers):
        if not (layer.weighted or "Norm" in layer.kind) or layer.live is None:
            continue
        recent = run[-3:]
        share = _dead_share(recent, layer)
        following = next((each for each in layers[i + 1 :] if each.weighted), None)
        hands_on = following is not None and following.gradient is not None and following.gradient > 0
        if i + 1 < len(layers) and _normed(layers, i) and _share(layers[i + 1]) >= _share(layer):
            continue
        if share == 1 and not (hands_on and following is not None and following.idle > 0.5):
            continue
        # where biases exceed the inputs, as in deep networks at the start, half of the units are always 0
        if share >= 0.75 and len(layer.live) > 3:
            text = (
                f"{share:.0%} of the units of {_layer(layer)} are dead: no sample of the last {len(recent)} measured "
            )
            yield layer.name, share, f"{text}batches passes a gradient through them."


def _dead_share(recent: Sequence[Snapshot], layer: LayerFacts) -> float:
    """Share of a layer's units that no gradient passed in any of some snapshots; 0 without snapshots."""
    same = [each.live for snap in recent for each in snap.layers.layers if each.name == layer.name]
    known = [live for live in same if live is not None and layer.live is not None and live.shape == layer.live.shape]
    return 1 - float(torch.stack(known).any(0).float().mean()) if known else 0.0


def _saturated(run: Sequence[Snapshot]) -> Found:
    for layer in run[-1].layers.layers:
        if layer.flat is not None and layer.flat > 0.8:
            text = f"{layer.flat:.0%} of the outputs of {_layer(layer)} lie where its derivative is below 0.001."
            yield layer.name, layer.flat, text


def _eps(run: Sequence[Snapshot]) -> Found:
    idle = 0.0
    for layer in run[-1].layers.layers:
        idle = layer.idle if layer.weighted else idle
        # outputs of dead units are constant, and the rule about dead units reports them
        if idle > 0.5 and len(run) < 3:
            continue
        if layer.eps_share is not None and layer.eps_share > 0.3:
            text = f"eps makes up {layer.eps_share:.0%} of what {_layer(layer)} divides by: its input is too small."
            yield layer.name, layer.eps_share, text


def _overflow(run: Sequence[Snapshot]) -> Found:
    found = [layer for layer in run[-1].layers.layers if layer.largest > FLOAT16 / HEADROOM]
    if found:
        layer = max(found, key=lambda each: each.largest)
        text = f"An activation of {_layer(layer)} reaches {layer.largest:.3g}; float16 ends at {FLOAT16:.0f}."
        yield layer.name, layer.largest, text


def _pulled_back(run: Sequence[Snapshot]) -> Found:
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
                f"The loss pulls back the residual branch {name}: its output has cosine {means[-1]:+.2f} with descent"
            )
            yield name, means[-1], f"{text}, negative for {share:.0%} of the samples."


def _rate(run: Sequence[Snapshot]) -> Found:
    recent = run[-3:]
    all_moved = [t.moved for t in run[-1].tensors if t.matrix and t.moved is not None and t.excess is not None]
    usual = median(all_moved) if all_moved else 0.0
    for tensor in run[-1].tensors:
        moved = tensor.moved
        if not tensor.matrix or moved is None or tensor.excess is None:
            continue
        history = [t.moved for snap in recent for t in snap.tensors if t.name == tensor.name and t.moved is not None]
        sustained = sorted(history)[-2:]
        if (
            usual > 0.8
            or not moved <= 3
            or (len(history) == 3 and min(history) > 0.3)
            or (len(sustained) == 2 and min(sustained) > 1)
        ):
            text = f"A step of rate {run[-1].rate or 0:.3g} moves {tensor.name} by {moved:.2g} of its size"
            yield tensor.name, moved, f"{text}, and path values through it by as much."


def _slow(run: Sequence[Snapshot]) -> Found:
    if len(run) < 4 or run[-1].rate is None:
        return
    # rates that fall to 0 at the end of a schedule are larger in most of the last measured steps
    for steps, least, which in ((run, 1e-7, "No step"), (run[-4:], 1e-9, "None of the last measured steps")):
        moved = [t.moved for snap in steps for t in snap.tensors if t.matrix and t.moved is not None]
        if moved and max(moved) < least:
            yield "", max(moved), f"{which} has moved any tensor by more than {max(moved):.1g} of its size."
            return


def _clipped(run: Sequence[Snapshot]) -> Found:
    """The norm of all gradients is the same in every step, though what reaches the layers is not, and too small."""
    last = run[-4:]
    if len(last) < 4 or last[-1].rate is None:
        return
    norms = [math.hypot(*(t.gradient or 0.0 for t in snap.tensors)) for snap in last]
    reach = [max((layer.gradient or 0.0 for layer in snap.layers.layers), default=0.0) for snap in last]
    moved = max((t.moved or 0.0 for snap in last for t in snap.tensors if t.matrix), default=0.0)
    same = max(norms) < (1 + 1e-4) * min(norms)
    if same and min(norms) > 0 and max(reach) > 1.01 * min(reach) and moved < 1e-5:
        text = f"Gradients are clipped to the norm {norms[-1]:.3g} in every step"
        yield "", norms[-1], f"{text}, and no tensor moves by more than {moved:.1g} of its size."


def _optimizer_eps(run: Sequence[Snapshot]) -> Found:
    value = run[-1].eps
    if len(run) > 3 and value is not None and value > 10:
        text = f"eps of the optimizer is {value:.3g} times the usual size of the largest gradients"
        yield "", value, f"{text}, and shrinks every step by as much."


def _dropped(run: Sequence[Snapshot]) -> Found:
    for layer in run[-1].layers.layers:
        if layer.dropped > 0.85:
            yield layer.name, layer.dropped, f"{_layer(layer)} sets {layer.dropped:.0%} of its input to 0."


def _rounded(run: Sequence[Snapshot]) -> Found:
    # a rate may be warmed up from 0
    recent = [{t.name: t.still for t in snap.tensors} for snap in run[-4:]]
    for name, still in recent[-1].items():
        shares = [found.get(name) for found in recent]
        if still is not None and len(run) > 3 and all(share is not None and share > 0.8 for share in shares):
            text = f"A step leaves {still:.0%} of the weights of {name} as they are: in 16 bits"
            yield name, still, f"{text} it is rounded to nothing."


def _decay(run: Sequence[Snapshot]) -> Found:
    share = run[-1].decay
    if share is not None and share > 2e-3:
        yield (
            "",
            share,
            f"Weight decay takes {share:.2g} off every weight in each step, half of it in {0.69 / share:.0f}.",
        )


def _no_gradient(run: Sequence[Snapshot]) -> Found:
    if len(run) < 3:
        return
    seen = {layer.name for layer in run[-1].layers.layers if layer.weighted}
    silent = [t for t in run[-1].tensors if t.matrix and t.name.rpartition(".")[0] in seen and not t.gradient]
    for tensor in silent:
        history = [t.gradient for snap in run[-3:] for t in snap.tensors if t.name == tensor.name]
        if not any(history) and tensor.norm > 0:
            yield tensor.name, 0.0, f"No gradient reaches {tensor.name}, though its layer runs."


def _untrained(run: Sequence[Snapshot]) -> Found:
    if len(run) < 3 or run[-1].rate is None:
        return
    held = [t for t in run[-1].tensors if not t.trained and t.gradient]
    for tensor in held:
        yield tensor.name, tensor.gradient or 0.0, f"{tensor.name} gets gradients, and no optimizer holds it."


def _stale(run: Sequence[Snapshot]) -> Found:
    if len(run) > 2 and all(snap.layers.stale for snap in run[-2:]):
        yield "", 1.0, "Gradients of the step before are still there when a backward pass begins, and add up."


def _evaluating(run: Sequence[Snapshot]) -> Found:
    kinds = [layer.kind for layer in run[-1].layers.layers if "BatchNorm" in layer.kind or "Dropout" in layer.kind]
    if run[-1].rate is not None and not run[-1].layers.training and kinds:
        yield "", 0.0, f"The model trains in evaluation mode: {kinds[0]} does not work as in training."


def _copies(run: Sequence[Snapshot]) -> Found:
    for tensor in run[-1].tensors:
        if tensor.copies:
            yield tensor.name, 1.0, f"All units of {tensor.name} have the same weights, and will learn the same."


def _normed(layers: Sequence[LayerFacts], i: int) -> bool:
    """Whether a normalisation takes the layer's output as it is, so that its size does not matter."""
    return i + 1 < len(layers) and layers[i + 1].direct and "Norm" in layers[i + 1].kind


def _share(layer: LayerFacts) -> float:
    return 0.0 if layer.live is None else 1 - float(layer.live.float().mean())


def _layer(layer: LayerFacts) -> str:
    return f"{layer.name or 'the model'} ({layer.kind})"


def _excess(snapshot: Snapshot) -> dict[str, float]:
    """The size of each layer's weights over the usual one, in powers of ten."""
    found: dict[str, TensorFacts] = {}
    for tensor in snapshot.tensors:
        if tensor.excess is not None:
            found.setdefault(tensor.name.rpartition(".")[0], tensor)
    return {name: tensor.excess for name, tensor in found.items() if tensor.excess is not None}


_SIZES = frozenset({"exploding", "vanishing", "overflow", "saturated", "eps", "not finite", "dead", "no gradient"})
_MOVES = frozenset({"rate", "slow", "pulled back"})
RULES = (
    Rule(
        "inputs not finite",
        _inputs_not_finite,
        "Clean the data.",
        _SIZES | _MOVES | {"input scale", "unbalanced"},
    ),
    Rule(
        "input scale",
        _input_scale,
        "Normalise the inputs to mean 0 and variance 1.",
        _SIZES | _MOVES | {"unbalanced"},
    ),
    Rule(
        "repeated batch",
        _repeated,
        "Take the next batch of the loader in every step, and shuffle them.",
    ),
    Rule(
        "squashed twice",
        _loss("squashed twice"),
        "Hand the logits to the loss, without a softmax or sigmoid before it.",
        frozenset({"vanishing", "slow"}),
    ),
    Rule(
        "uniform targets",
        _loss("uniform targets"),
        "Look at the targets, and at label smoothing: at 1 nothing is left of them.",
        _MOVES | {"vanishing", "no gradient"},
    ),
    Rule(
        "negated loss",
        _loss("negated loss"),
        "Look at the sign of the loss: optimizers make it smaller.",
        _SIZES | _MOVES | {"unbalanced"},
    ),
    Rule("rectified outputs", _loss("rectified outputs"), "Take the last activation away.", frozenset({"dead"})),
    Rule("copies", _copies, "Initialise it at random.", _SIZES | _MOVES | {"unbalanced"}),
    Rule(
        "unbalanced",
        _unbalanced,
        "Rescale it: ps.balance(model, graph) leaves the function as it is.",
        _SIZES | _MOVES,
    ),
    Rule(
        "exploding",
        _exploding,
        "Initialise this layer smaller, or put a normalisation behind it.",
        _SIZES | _MOVES | {"unbalanced"},
    ),
    Rule("saturated", _saturated, "Initialise the layer before it smaller, or normalise its input.", _SIZES | _MOVES),
    Rule(
        "vanishing",
        _vanishing,
        "Initialise this layer larger, use an activation that keeps gradients, or add a residual connection.",
        _SIZES | _MOVES | {"unbalanced"},
    ),
    Rule("stale gradients", _stale, "Call optimizer.zero_grad() in every step.", _SIZES | _MOVES | {"unbalanced"}),
    Rule("dropped", _dropped, "Lower the share of dropout; it is rarely more than a half.", _SIZES),
    Rule("evaluation mode", _evaluating, "Call model.train() before the training loop."),
    Rule("untrained", _untrained, "Hand it to the optimizer, or set requires_grad to False."),
    Rule(
        "rate",
        _rate,
        "Divide the learning rate by ten, or warm it up.",
        _SIZES | {"pulled back", "unbalanced", "copies", "no gradient", "decay"},
        late=True,
    ),
    Rule("decay", _decay, "Lower the weight decay.", _SIZES | {"slow"}, late=True),
    Rule("dead", _dead, "Lower the learning rate or the bias, or use a leaky activation.", _SIZES | _MOVES),
    Rule("eps", _eps, "Scale up what enters the norm, or lower its eps.", frozenset({"vanishing", "rate"})),
    Rule("overflow", _overflow, "Use bfloat16, or balance the network with ps.balance or ps.fit_dtype."),
    Rule(
        "pulled back",
        _pulled_back,
        "Scale the branch down at the start (zero-initialise its last layer), or train it with a penal connection.",
    ),
    Rule(
        "no gradient",
        _no_gradient,
        "Look for detach, no_grad or an output that the loss does not use.",
        frozenset({"slow"}),
    ),
    Rule(
        "clipped",
        _clipped,
        "Raise the norm to which gradients are clipped.",
        frozenset({"slow", "rounded"}),
        late=True,
    ),
    Rule("optimizer eps", _optimizer_eps, "Lower the eps of the optimizer.", frozenset({"slow", "rounded"}), late=True),
    Rule(
        "rounded",
        _rounded,
        "Keep the weights in float32 and compute in 16 bits by autocast, or raise the learning rate.",
        frozenset({"slow"}),
        late=True,
    ),
    Rule("slow", _slow, "Raise the learning rate.", late=True),
    Rule("not finite", _not_finite, "Look there for a division, root or logarithm of zero, or an overflow.", _MOVES),
)


def judge(run: Sequence[Snapshot], before: Sequence[Alarm] = ()) -> list[Alarm]:
    """Find the problems at the last snapshot of a run that were not found before.

    Args:
        run: the measured steps so far, at least one.
        before: alarms of the steps before.

    Returns:
        New alarms, causes first; one for each kind, at the place with the largest value.
    """
    known, step = {alarm.kind: alarm for alarm in before}, run[-1].step
    fresh: list[tuple[Rule, Alarm]] = []
    for rule in RULES:
        found = [] if rule.kind in known else list(rule.find(run))
        if found:
            place, value, text = found[0]
            more = f" ({len(found) - 1} more like it)" if len(found) > 1 else ""
            fresh.append((rule, Alarm(rule.kind, place, value, step, text.removesuffix(".") + more + ".", rule.advice)))
    fresh.sort(key=lambda pair: pair[0].late)
    earlier = [rule for rule in RULES if rule.kind in known]
    result = []
    for rule, alarm in fresh:
        cause = next((other.kind for other in earlier if rule.kind in other.explains), "")
        result.append(replace(alarm, because=cause))
        earlier.append(rule)
    return result


def not_held(steps: int) -> Alarm:
    """The alarm of a run whose optimizers hold other tensors than the model's, as after the model was copied.

    Args:
        steps: how many steps they made.
    """
    text = f"None of the {steps} optimizer steps was one of an optimizer that holds a weight of the model."
    return Alarm("untrained", "", float(steps), 0, text, "Make the optimizer after the model is in its final form.")


def causes(alarms: Sequence[Alarm]) -> list[Alarm]:
    """The alarms that no other one explains."""
    return [alarm for alarm in alarms if not alarm.because]


__all__ = ["RULES", "Alarm", "Rule", "causes", "judge", "not_held", "same_batch"]
