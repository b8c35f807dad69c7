"""One sentence per figure, computed only from the numbers in the figure."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

from pathspace.evidence.invariance import levels_in_words

from ..shared.wording import number_text, plural, power_of_ten

Facts = dict[str, Any]

# relative to the largest gradient: rounding errors in the zero gradient of a bias in front
# of a norm are this small
NEGLIGIBLE = 1e-6


def model(facts: Facts, chain: Facts) -> str:
    """The model in one paragraph."""
    total = facts["total"]
    text = (
        f"{facts['name']} has {plural(total, 'parameter')} in {plural(facts['tensors'], 'tensor')}"
        f" and was traced in {'training' if facts['training'] else 'evaluation'} mode on"
        f" {', '.join(facts['inputs']) or 'no tensor'}. "
    )
    if not total:
        return text.removesuffix(". ") + ": there is nothing to rescale."
    text += (
        f"{plural(facts['path_space'], 'scalar')} of them"
        f" {'lies' if facts['path_space'] == 1 else 'lie'} on paths"
    )
    rest = [
        f"{plural(facts[key], 'is', 'are')} {key}" for key in ("pinned", "unused") if facts[key]
    ]
    text += (", " + " and ".join(rest) if rest else ", which is all of them") + ". "
    units = facts["units"]
    if units:
        text += (
            f"{plural(units, 'scale')} {'is' if units == 1 else 'are'} free: changing"
            f" {'it' if units == 1 else 'them'} leaves the function as it is"
            + (
                f" ({plural(facts['approximate'], 'of them', 'of them')} up to the epsilon of a"
                f" normalisation, {number_text(facts['units_exact'])} exactly in the unchanged"
                " model)"
                if facts["approximate"]
                else ""
            )
            + f". So {number_text(facts['dimension'])} independent path values, with one sign for"
            " each unit, fix it"
        )
    else:
        text += (
            f"No unit can be rescaled, so all {number_text(facts['dimension'])} weights are path"
            " values themselves"
        )
    text += "; normalisations cut its paths. " if facts["has_cuts"] else ". "
    return text + str(chain.get("sentence") or chain.get("absent", ""))


def graph(facts: Facts) -> str:
    """The content of the picture of the reduction graph."""
    layers, groups = facts["layers"], facts["groups"]
    if not layers:
        return "No layer has weights on paths."
    if not groups:
        ends = "The only layer reads from the root and writes to it"
        if len(layers) > 1:
            ends = f"All {len(layers)} layers read from the root and write to it"
        return f"{ends}: every scale is fixed, and there is nothing to rescale."
    widest = max(groups, key=lambda group: len(group["entering"]) + len(group["leaving"]))
    touching = len(widest["entering"]) + len(widest["leaving"])
    return (
        f"{plural(len(layers), 'layer')} and {plural(sum(g['units'] for g in groups), 'unit')} in"
        f" {plural(len(groups), 'group')}; the busiest group, {plural(widest['units'], 'unit')}"
        f" numbered {widest['ids']}, is read or written {plural(touching, 'time')}."
    )


def certificate(facts: Facts, path_space: int | None = None) -> str:
    """The verdict; ``path_space`` is the number of weights on paths at any size of the
    inputs, where it is known.
    """
    statements = [facts[key]["holds"] for key in ("theorem1", "theorem2", "theorem3", "invariance")]
    held, failed, moot = (
        sum(verdict is kind for verdict in statements) for kind in (True, False, None)
    )
    text = f"{held} of 4 statements hold {facts['level']}"
    if failed:
        text += f", {failed} {'fails' if failed == 1 else 'fail'}"
    if moot:
        text += f", {moot} {'does' if moot == 1 else 'do'} not apply"
    rank, dimension = facts["rank"], number_text(facts["dimension"])
    if rank is not None:
        verb = "meets" if rank == facts["dimension"] else "misses"
        text += (
            f"; the exact rank of the path matrix, {number_text(rank)}, {verb} m - H = {dimension}"
        )
    else:
        text += (
            f"; both bounds on the dimension {dimension} come from the two trees, no matrix formed"
        )
    text += (
        f". {plural(facts['units_exact'], 'unit is', 'units are')} exact with every epsilon"
        " included"
    )
    text += (
        f" (dimension {number_text(facts['dimension_exact'])}); {levels_in_words(facts['levels'])}."
    )
    if path_space is None or path_space == facts["weights"]:
        return text
    more = plural(
        path_space - facts["weights"], "weight that larger ones use", "weights that larger ones use"
    )
    return f"{text} The certificate is for inputs of exactly these sizes, without {more}."


def checker_verdict(facts: Facts) -> str:
    """The independent judgement."""
    if facts["accepted"]:
        return (
            "A checker that shares no code with the library accepts the proof of dimension"
            f" {number_text(facts['dimension'])}: {number_text(facts['weights'])} weights less"
            f" {plural(facts['units'], 'unit')}."
        )
    return f"A checker that shares no code with the library rejects the proof: {facts['reason']}."


def pins(facts: Facts) -> str:
    """The operations that fixed scales, and the number of scales."""
    found = facts["pins"]
    fixed = [pin for pin in found if pin["elements"] or pin["parameters"]]
    if not fixed:
        return (
            "No operation fixed the scale of an activation or kept a parameter out of path space."
        )
    most, times = Counter(pin["op"] for pin in fixed).most_common(1)[0]
    return (
        f"{plural(len(fixed), 'operation')} fixed scales, most often {most}"
        f" ({plural(times, 'time')}); between them they fixed"
        f" {plural(sum(pin['elements'] for pin in fixed), 'activation scale')} and kept"
        f" {plural(len({name for pin in fixed for name in pin['parameters']}), 'parameter tensor')}"
        " out of path space."
    )


def values(facts: Facts, rule: str) -> str:
    """The spread of path values."""
    found, lost = facts["values"], _lost(facts["values"], "path value")
    if not found["count"]:
        if not found["zeros"]:
            return f"{lost}none is left." if lost else "There is no basis path."
        return f"{lost}{'every other' if lost else 'Every'} basis path has the value 0."
    spread = found["q95"] - found["q05"]
    text = (
        f"{lost}{'nine' if lost else 'Nine'} in ten {'of the others' if lost else 'path values'}"
        f" lie between {power_of_ten(found['q05'])} and {power_of_ten(found['q95'])} in size,"
        f" {_decades(spread)}; the median is {power_of_ten(found['median'])}"
    )
    if found["zeros"]:
        text += f", and {number_text(found['zeros'])} are 0"
    notes = []
    if facts["dead"]:
        notes.append(f"{plural(facts['dead'], 'unit')} on no path of weights other than 0")
    if facts["rule"] != rule:
        weights = "more weights" if facts["dead"] else "a weight"
        notes.append(
            f"trees chosen by {facts['rule']}, because those chosen by {rule} hold {weights} of 0"
        )
    text += f" ({'; '.join(notes)})" if notes else ""
    return text + "."


def _lost(found: Facts, noun: str) -> str:
    """How many numbers of a histogram are not finite, as the start of a sentence."""
    lost, total = found["not_finite"], found["not_finite"] + found["count"] + found["zeros"]
    return (
        f"{number_text(lost)} of {plural(total, noun)} {'is' if lost == 1 else 'are'} not finite; "
        if lost
        else ""
    )


def _decades(spread: float) -> str:
    return "within a factor of ten" if spread <= 1 else f"a range of {spread:.1f} powers of ten"


def rate_multipliers(facts: Facts) -> str:
    """The effect of steps on path values on the learning rate."""
    found, lost = facts["multipliers"], _lost(facts["multipliers"], "multiplier")
    if not found["count"]:
        none = (
            "none is left."
            if lost
            else "There is no weight outside the trees, so no learning rate is multiplied."
        )
        return f"{lost}{none}"
    largest = found["largest"]
    advice = (
        "one learning rate suits all weights"
        if max(abs(largest), abs(found["smallest"])) <= 1
        else (
            "pathspace.training.init_skeleton_, or max_multiplier= of pathspace.training.GSGD,"
            " keeps such steps in"
            " bounds"
            if largest > 4
            else (
                "a step on path values moves some weights much further than others"
                if largest > 1
                else (
                    "steps on path values move every weight less far than plain steps, at one"
                    " learning rate"
                    if largest <= 0
                    else "a step on path values moves some weights much less far than others"
                )
            )
        )
    )
    return (
        f"{lost}{'a' if lost else 'A'} step on path values multiplies the learning rate by "
        f"{power_of_ten(found['median'])} for the median weight and by "
        f"up to {power_of_ten(largest)}: {advice}."
    )


def chain(facts: Facts) -> str:
    """Whether the nodes point in directions that decrease the loss."""
    nodes = facts["nodes"]
    down = sum((node["cosine_mean"] or 0) > 0 for node in nodes)
    known = [node for node in nodes if node["cosine_mean"] is not None]
    lost = sum(node["gauge"] is None for node in nodes)
    if lost:
        return (
            f"Values or gradients at {lost} of {plural(len(nodes), 'node')} are not finite; no"
            " direction is known."
        )
    if not known:
        return (
            f"The direction or its gradient is 0 at each of {plural(len(nodes), 'node')}, as where"
            " last layers start at zero, so nothing can be said of their"
            f" directions{started(facts) or '.'}"
        )
    text = (
        f"{down} of {plural(len(nodes), 'node')} {'points' if down == 1 else 'point'} down the loss"
        f" on average over {plural(facts['samples'], 'sample')}, efficiency"
        f" {_signed(facts['efficiency'])}"
    )
    best = max(known, key=lambda node: node["cosine_mean"])
    return (
        text + f"; the best is {best['name']} with cosine"
        f" {_signed(best['cosine_mean'])}{started(facts) or '.'}"
    )


def started(facts: Facts) -> str:
    """Directions after the first steps of training, for nodes that have no cosine before."""
    cosines = facts.get("first_cosines")
    if not cosines:
        return ""
    steps, name = facts["first_steps"], min(cosines, key=lambda each: cosines[each])
    silent = plural(len(cosines), "node")
    return (
        f"; after {'one small step' if steps == 1 else f'{steps} small steps'} of gradient descent,"
        f" {silent} without a direction now {'points' if len(cosines) == 1 else 'point'} down the"
        f" loss with mean cosine {_signed(sum(cosines.values()) / len(cosines))}"
        + (f", least {name} ({_signed(cosines[name])})." if len(cosines) > 1 else ".")
    )


def _signed(value: float | None) -> str:
    return "none" if value is None else f"{value:+.3g}"


def alarms(facts: Facts) -> str:
    """The problems that were found, causes first."""
    found = facts["alarms"]
    if not found:
        return "No rule finds anything wrong in a pass on each batch."
    causes = [alarm for alarm in found if not alarm["because"]]
    text = " ".join(f"{alarm['text']} {alarm['advice']}" for alarm in causes)
    rest = [alarm["kind"] for alarm in found if alarm["because"]]
    return text + (f" From this follow: {', '.join(rest)}." if rest else "")


def variance(facts: Facts) -> str:
    """The change of the size of activations with depth."""
    lost = [row for row in facts["rows"] if row["variance"] is None]
    if lost:
        return (
            f"Activations of {_first_of(lost, facts['rows'])} are not finite, so nothing is said of"
            " their variance."
        )
    rows = [row for row in facts["rows"] if row["variance"] > 0]
    if not rows:
        return "No layer has outputs that vary."
    first, last = rows[0], rows[-1]
    if len(rows) == 1:
        size = number_text(first["variance"], 2)
        text = f"The variance of activations is {size} at {first['layer']}"
    else:
        ratio = last["variance"] / first["variance"]
        change = (
            "keeps its size to within a factor of ten"
            if 0.1 <= ratio <= 10
            else (
                f"{'grows' if ratio > 1 else 'shrinks'} by a factor of"
                f" {number_text(max(ratio, 1 / ratio), 2)}"
            )
        )
        text = (
            f"From {first['layer']} to {last['layer']} the variance of activations {change} "
            f"({number_text(first['variance'], 2)} to {number_text(last['variance'], 2)})"
        )
    if len(rows) < len(facts["rows"]):
        text += (
            f"; {plural(len(facts['rows']) - len(rows), 'layer has', 'layers have')} constant"
            " outputs"
        )
    dead = dead_units(facts["rows"])
    if dead:
        return f"{text}; {plural(dead, 'unit')} passed no gradient on this batch."
    return f"{text}; no layer hands on a dead unit."


def dead_units(rows: list[Facts]) -> int:
    """Units without a gradient, each counted once, at the layer whose weights compute it.

    An activation, a dropout or a norm passes on the units of the layer before, so
    its units are not counted.

    Example:
        >>> linear, relu = (
        ...     {"layer": name, "kind": "", "units": 5, "dead": 2} for name in ("0", "1")
        ... )
        >>> dead_units([{**linear, "weights": True}, {**relu, "weights": False}])
        2
    """
    calls: dict[str, list[int]] = {}
    latest, units = [0], 0
    for row in rows:
        dead = row["dead"] or 0
        if row["weights"]:
            latest, units = calls.setdefault(row["layer"].split(" (")[0], []), row["units"]
            latest.append(dead)
        elif "Norm" in row["kind"] and row["units"] == units:
            latest[-1] = max(latest[-1], dead)
    # a unit is dead only if it is dead at every call of its layer
    return sum(map(min, calls.values())) or max((row["dead"] or 0 for row in rows), default=0)


def _first_of(lost: list[Facts], rows: list[Facts]) -> str:
    return f"{len(lost)} of {plural(len(rows), 'layer')} (the first is {lost[0]['layer']})"


def gradient_gains(facts: Facts) -> str:
    """The gain of gradients in each layer, compared with the theory."""
    lost = [row for row in facts["rows"] if not row["finite"]]
    text = (
        f"Values or derivatives of {_first_of(lost, facts['rows'])} are not finite" if lost else ""
    )
    rows = [row for row in facts["rows"] if row["vjp_gain"] and row["finite"]]
    if not rows:
        return (
            f"{text}, and no other has a gain."
            if lost
            else "No layer has a gain that can be measured."
        )
    logs = [math.log10(row["vjp_gain"]) for row in rows]
    low, high = rows[logs.index(min(logs))], rows[logs.index(max(logs))]
    text += "; elsewhere " if lost else ""
    if len(rows) == 1:
        gain = number_text(low["vjp_gain"], 2)
        text += f"{'the' if lost else 'The'} gain of {low['layer']} is {gain}"
    else:
        text += (
            f"{'layer' if lost else 'Layer'} gains run from {number_text(low['vjp_gain'], 2)}"
            f" ({low['layer']}) to {number_text(high['vjp_gain'], 2)} ({high['layer']})"
        )
    compared = [row for row in rows if row["expected_gain"]]
    if compared:
        near = sum(0.5 <= row["vjp_gain"] / row["expected_gain"] <= 2 for row in compared)
        text += (
            f"; {near} of {len(compared)} {'is' if near == 1 else 'are'} within a factor of two of"
            " what theory expects of the layer"
        )
    return text + "."


def gradient(facts: Facts) -> str:
    """The differences between the gradients of the tensors."""
    rows = facts["rows"]
    lost = [row for row in rows if row["rms"] is None]
    if lost:
        first = lost[0]["parameter"]
        return (
            f"Gradients of {len(lost)} of {plural(len(rows), 'tensor')} (the first is {first}) are"
            " not finite."
        )
    largest = max((row["rms"] for row in rows), default=0.0)
    if not largest:
        return "No gradient is larger than 0."
    alive = [row for row in rows if row["rms"] > NEGLIGIBLE * largest]
    zero = sum(row["rms"] == 0 for row in rows)
    low, high = min(alive, key=lambda row: row["rms"]), max(alive, key=lambda row: row["rms"])
    if len(alive) == 1:
        text = (
            f"{high['parameter']} has the only gradient to speak of ({number_text(high['rms'], 2)}"
            " in RMS)"
        )
    else:
        text = (
            f"Gradients of {plural(len(alive), 'tensor')} differ by a factor of"
            f" {number_text(high['rms'] / low['rms'], 2)} in RMS, between {low['parameter']}"
            f" ({number_text(low['rms'], 2)}) and {high['parameter']}"
            f" ({number_text(high['rms'], 2)})"
        )
    if zero:
        text += f"; {plural(zero, 'more tensor')} got a gradient of 0"
    small = len(rows) - len(alive) - zero
    if small:
        text += (
            f"; {plural(small, 'more tensor')} got less than a millionth of that: vanished, or 0"
            " but for rounding"
        )
    return f"{text}."


def degenerate_directions(facts: Facts) -> str:
    """The number of directions that do not change the outputs, and the reasons."""
    bound = "at most " if facts["method"] == "randomised" else ""
    causes = [
        f"{number_text(facts[key])} {text}"
        for key, text in (
            ("gauge", "from rescaling"),
            ("symmetric", "from other symmetries"),
            ("dead", "dead on these data"),
            ("undetermined", "because the sample is too small"),
            ("unexplained", "unexplained"),
        )
        if facts[key]
    ]
    share = facts["deficit"] / facts["parameters"] if facts["parameters"] else 0.0
    text = (
        f"{bound}{number_text(facts['deficit'])} of {plural(facts['parameters'], 'direction')}"
        f" ({share:.0%}) of parameter space leave all {plural(facts['outputs'], 'output')} alone"
    )
    text = text[:1].upper() + text[1:] + (": " + ", ".join(causes) if causes else "") + "."
    return text + (
        " The number is bounded by the sample: more data would lower it."
        if facts["undetermined"]
        else ""
    )
