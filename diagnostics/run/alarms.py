"""Alarms: rules about the measured steps of a run, each with a number, a
place, a remedy and a cause.

A rule finds problems in the last snapshot or the last few. An alarm refers to an earlier alarm that
explains it, if there is one: a rate that is too large causes dead units, and a layer that is too
large causes an overflow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from pathspace.shown import Shown

from ..shared.wording import plural
from . import passes_judged, steps_judged
from .snapshot import Snapshot


@dataclass(frozen=True)
class Alarm(Shown):
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
class AlarmRule:
    """One kind of alarm.

    Attributes:
        kind: its name.
        find: yields place, value and sentence of the problems in the last one
            of the snapshots so far.
        advice: what to do.
        explains: kinds that are a consequence of this one if it came first.
        late: it concerns the update at the end of a step, and comes after the alarms about
            the pass of the same step.
        own: whether a place has the problem by itself, whatever else is wrong in the run.
    """

    kind: str
    find: Callable[[Sequence[Snapshot]], Iterator[tuple[str, float, str]]]
    advice: str
    explains: frozenset[str] = field(default_factory=frozenset)
    late: bool = False
    own: Callable[[Sequence[Snapshot], str], bool] = lambda _run, _place: False


_SIZES = frozenset(
    {"exploding", "vanishing", "overflow", "saturated", "eps", "not finite", "dead", "no gradient"}
)
_MOVES = frozenset({"rate", "slow", "pulled back"})
# what a search for a lower loss within a step may do, as that of L-BFGS: its loss is the judge
_SEARCHED = frozenset({"rate", "exploding", "vanishing", "saturated", "overflow", "unbalanced"})
RULES = (
    AlarmRule(
        "inputs not finite",
        passes_judged.inputs_not_finite,
        "Clean the data.",
        _SIZES | _MOVES | {"input scale", "unbalanced"},
    ),
    AlarmRule(
        "input scale",
        passes_judged.input_scale,
        "Normalise the inputs to mean 0 and variance 1.",
        _SIZES | _MOVES | {"unbalanced"},
    ),
    AlarmRule(
        "repeated batch",
        passes_judged.repeated,
        "Take the next batch of the loader in every step, and shuffle them.",
    ),
    AlarmRule(
        "squashed twice",
        passes_judged.loss_of("squashed twice"),
        "Hand the logits to the loss, without a softmax or sigmoid before it.",
        frozenset({"vanishing", "slow"}),
    ),
    AlarmRule(
        "uniform targets",
        passes_judged.loss_of("uniform targets"),
        "Look at the targets, and at label smoothing: at 1 nothing is left of them.",
        _MOVES | {"vanishing", "no gradient"},
    ),
    AlarmRule(
        "broadcast targets",
        passes_judged.loss_of("broadcast targets"),
        "Give the targets the shape of the outputs, as by targets.view_as(outputs).",
        _SIZES | _MOVES | {"uniform targets"},
    ),
    AlarmRule(
        "negated loss",
        passes_judged.loss_of("negated loss"),
        "Look at the sign of the loss: optimizers make it smaller.",
        _SIZES | _MOVES | {"unbalanced"},
    ),
    AlarmRule(
        "rectified outputs",
        passes_judged.loss_of("rectified outputs"),
        "Take the last activation away.",
        frozenset({"dead"}),
    ),
    AlarmRule(
        "copies", steps_judged.copies, "Initialise it at random.", _SIZES | _MOVES | {"unbalanced"}
    ),
    AlarmRule(
        "unbalanced",
        passes_judged.unbalanced,
        "Rescale it: ps.balance_(model, graph) leaves the function as it is.",
        _SIZES | _MOVES,
    ),
    AlarmRule(
        "exploding",
        passes_judged.exploding,
        "Initialise this layer smaller, or put a normalisation behind it.",
        _SIZES | _MOVES | {"unbalanced"},
        own=passes_judged.of_unusual_weights,
    ),
    AlarmRule(
        "saturated",
        passes_judged.saturated,
        "Initialise the layer before it smaller, or normalise its input.",
        _SIZES | _MOVES | {"constant outputs"},
    ),
    AlarmRule(
        "vanishing",
        passes_judged.vanishing,
        "Initialise this layer larger, use an activation that keeps gradients, or add a residual"
        " connection.",
        _SIZES | _MOVES | {"unbalanced", "constant outputs"},
        own=passes_judged.of_unusual_weights,
    ),
    AlarmRule(
        "stale gradients",
        steps_judged.stale,
        "Call optimizer.zero_grad() in every step.",
        _SIZES | _MOVES | {"unbalanced"},
    ),
    AlarmRule(
        "dropped",
        steps_judged.dropped,
        "Lower the share of dropout; it is rarely more than a half.",
        _SIZES,
    ),
    AlarmRule(
        "evaluation mode",
        steps_judged.evaluation_mode,
        "Call model.train() before the training loop.",
    ),
    AlarmRule(
        "untrained",
        steps_judged.untrained,
        "Hand it to the optimizer, or set requires_grad to False.",
    ),
    AlarmRule(
        "rate",
        steps_judged.rate,
        "Divide the learning rate by ten, or warm it up.",
        _SIZES | {"pulled back", "unbalanced", "copies", "no gradient", "decay"},
        late=True,
    ),
    AlarmRule("decay", steps_judged.decay, "Lower the weight decay.", _SIZES | {"slow"}, late=True),
    AlarmRule(
        "dead",
        passes_judged.dead,
        "Bring the bias towards 0, lower the learning rate, or use a leaky activation.",
        _SIZES | _MOVES | {"constant outputs"},
        own=passes_judged.shut_from_the_start,
    ),
    AlarmRule(
        "constant outputs",
        passes_judged.constant_outputs,
        "Look behind the last weights for a norm or a softmax over a single value.",
        frozenset({"vanishing", "no gradient", "slow"}),
    ),
    AlarmRule(
        "eps",
        passes_judged.eps,
        "Scale up what enters the norm, or lower its eps.",
        frozenset({"vanishing", "rate"}),
    ),
    AlarmRule(
        "overflow",
        passes_judged.overflow,
        "Stay in float32 or bfloat16, or balance the network with ps.balance_ or ps.fit_dtype.",
    ),
    AlarmRule(
        "pulled back",
        passes_judged.pulled_back,
        "Scale the branch down at the start (zero-initialise its last layer), or train it with a"
        " penal connection.",
    ),
    AlarmRule(
        "no gradient",
        steps_judged.no_gradient,
        "Look for detach, no_grad or an output that the loss does not use.",
        frozenset({"slow"}),
    ),
    AlarmRule(
        "clipped",
        steps_judged.clipped,
        "Raise the norm to which gradients are clipped.",
        frozenset({"slow", "rounded"}),
        late=True,
    ),
    AlarmRule(
        "optimizer eps",
        steps_judged.optimizer_eps,
        "Lower the eps of the optimizer.",
        frozenset({"slow", "rounded"}),
        late=True,
    ),
    AlarmRule(
        "rounded",
        steps_judged.rounded,
        "Keep the weights in float32 and compute in 16 bits by autocast, or raise the learning"
        " rate.",
        frozenset({"slow"}),
        late=True,
    ),
    AlarmRule("slow", steps_judged.slow, "Raise the learning rate.", late=True),
    AlarmRule(
        "not finite",
        passes_judged.not_finite,
        "Look there for a division, root or logarithm of zero, or an overflow.",
        _MOVES,
    ),
)


def new_alarms(run: Sequence[Snapshot], before: Sequence[Alarm] = ()) -> list[Alarm]:
    """Find the problems at the last snapshot of a run that were not found before.

    Args:
        run: the measured steps so far, at least one.
        before: alarms of the steps before.

    Returns:
        New alarms, causes first; one for each kind, at the place with the largest value.
    """
    known, step = {alarm.kind: alarm for alarm in before}, run[-1].step
    fresh: list[tuple[AlarmRule, Alarm]] = []
    for rule in RULES:
        wanted = rule.kind not in known and not (
            run[-1].searched and rule.kind in _SEARCHED and (rule.late or len(run) > 1)
        )
        found = list(rule.find(run)) if wanted else []
        if found:
            place, value, text = found[0]
            more = f" (also at {plural(len(found) - 1, 'other place')})" if len(found) > 1 else ""
            text = f"{text.removesuffix('.')}{more}."
            fresh.append((rule, Alarm(rule.kind, place, value, step, text, rule.advice)))
    fresh.sort(key=lambda pair: pair[0].late)
    earlier = [rule for rule in RULES if rule.kind in known]
    result = []
    for rule, alarm in fresh:
        explained = () if rule.own(run, alarm.place) else earlier
        cause = next((other.kind for other in explained if rule.kind in other.explains), "")
        result.append(replace(alarm, because=cause))
        earlier.append(rule)
    return result


def not_held(steps: int) -> Alarm:
    """The alarm of a run whose optimizers hold other tensors than the model's, as
    after the model was copied.

    Args:
        steps: how many steps they made.
    """
    text = (
        f"None of the {steps} optimizer steps was one of an optimizer that holds a weight of the"
        " model."
    )
    return Alarm(
        "untrained",
        "",
        float(steps),
        0,
        text,
        "Make the optimizer after the model is in its final form.",
    )


__all__ = ["RULES", "Alarm", "AlarmRule", "new_alarms", "not_held"]
