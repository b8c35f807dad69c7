"""The report: all measurements of a model on one HTML page."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from jinja2.utils import htmlsafe_json_dumps
from markupsafe import Markup
from torch import nn

from pathspace.errors import SEED, InputError, expect_arguments, expect_numbers
from pathspace.evidence.explain import explain
from pathspace.files.writing import expect_suffix, replacing
from pathspace.models.values import names_without_values
from pathspace.paths.skeleton import Skeleton, choose
from pathspace.shown import Shown

from ..shared import charts
from ..shared.losses import Function
from ..shared.pages import render
from ..shared.subject import Subject, make_subject
from ..shared.tables import plain
from . import graph_svg, measure, sentences
from .graph_layout import describe_layers
from .measure import Facts, attempt

Progress = Callable[[str, float], None]
FORMAT = "pathspace-report/1"
# tracing, the parts, and writing
STEPS = 10


@dataclass(frozen=True)
class Report(Shown):
    """All results about a model.

    Attributes:
        facts: all numbers, as plain values; a part that was not measured holds
            ``{"absent": sentence}``.
        sentences: the interpretation of each part, computed from its numbers.
        html: the page, self-contained.
    """

    facts: dict[str, Facts]
    sentences: dict[str, str]
    html: str = field(repr=False)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the page; an existing file is replaced completely or not at all.

        Args:
            path: the file.

        Raises:
            InputError: it cannot be written, or its name does not end in ``.html``.
        """
        expect_suffix(path, "report", (".html", ".htm"))
        with replacing(path) as temporary:
            temporary.write_text(self.html, encoding="utf-8")

    def to_dict(self) -> dict[str, Any]:
        """Numbers and sentences as plain values for JSON; a number that is not
        finite becomes ``None``.
        """
        return {
            "format": FORMAT,
            "sentences": self.sentences,
            **plain(self.facts),
        }

    def _repr_html_(self) -> str:
        # a frame separates the page's style and script from the notebook's
        frame = Markup(
            '<iframe srcdoc="{}" style="width: 100%; height: 700px; border: 1px solid #888"'
            ' title="{}"></iframe>'
        )
        return str(frame.format(self.html, f"Report on {self.facts['model']['name']}"))


def report(
    model: nn.Module,
    *inputs: Any,
    kwargs: Mapping[str, Any] | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    data: Any = None,
    loss: str | Function | None = None,
    batches: int = 4,
    loss_fn: Function | None = None,
    targets: Any = None,
    rule: str = "modulo",
    norm_eps: str = "ignore",
    seed: int = 0,
    progress: Progress | None = None,
) -> Report:
    """Run all measurements on a model, and put the results on one page.

    Args:
        model: any module that can be captured; it is not changed.
        *inputs: example inputs, a batch; not needed with ``data``.
        kwargs: example inputs by keyword.
        checkpoint: a file of weights, see
            :func:`pathspace.diagnostics.shared.subject.load_weights`; loaded into a copy.
        data: batches of inputs and targets, see :func:`pathspace.diagnostics.shared.subject.read_batches`.
        loss: ``loss(outputs, targets)``, or its name, see
            :func:`pathspace.diagnostics.shared.losses.choose_loss`; without it
            :func:`pathspace.diagnostics.shared.losses.default_loss`, and the page says so.
        batches: largest number of batches of the data that are used.
        loss_fn: the same as ``loss``.
        targets: of the example inputs, passed to the loss.
        rule: rule for the choice of the skeleton, see :func:`pathspace.paths.skeleton.choose`.
        norm_eps: see :func:`pathspace.trace`.
        seed: of the skeleton, of random rescalings and of the default loss.
        progress: called with the current step and the share of the work that is done.

    Returns:
        The report; ``save(path)`` writes the page, and a notebook shows it.

    Raises:
        CaptureError: the model fails on these inputs or cannot be captured.
        InputError: unknown ``rule`` or ``norm_eps``.

    Example:
        >>> import torch
        >>> model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2))
        >>> found = report(model, torch.randn(8, 2))
        >>> found.facts["certificate"]["dimension"], found.facts["chain"]["absent"]
        (14, 'Sequential is not a Markov chain: no addition joins a stream and a branch computed from it.')
    """  # noqa: E501
    expect_arguments("report", model=model)
    expect_arguments("report", or_none=True, checkpoint=checkpoint, progress=progress)
    expect_numbers("report", SEED, seed=seed)
    brought: dict[str, Any] = {
        "checkpoint": checkpoint,
        "data": data,
        "targets": targets,
        "batches": batches,
    }
    subject = make_subject(
        model, inputs, kwargs, loss=loss_fn if loss is None else loss, seed=seed, **brought
    )
    model, inputs, kwargs = subject.model, subject.args, subject.kwargs
    done = itertools.count()

    def tell(doing: str) -> None:
        if progress is not None:
            progress(doing, next(done) / STEPS)

    tell("tracing")
    explanation = explain(model, *inputs, kwargs=kwargs, norm_eps=norm_eps)
    skeleton = explanation.graph.skeleton(rule=rule, seed=seed)
    walks = _walkable(skeleton)
    facts: dict[str, Facts] = {
        "model": measure.model_facts(subject, explanation),
        "account": measure.parameter_table(explanation),
        "graph": describe_layers(skeleton, walks),
    }
    options = {"norm_eps": norm_eps, "rule": rule, "seed": seed}
    parts: dict[str, tuple[str, str, Callable[[], Facts]]] = {
        "certificate": (
            "verifying",
            "The certificate",
            lambda: measure.certificate_facts(subject, options),
        ),
        "proof": (
            "judging the proof",
            "The proof",
            lambda: measure.proof_facts(skeleton, type(model).__name__),
        ),
        "values": (
            "path values",
            "The distribution of path values",
            lambda: measure.path_value_facts(walks),
        ),
        "chain": ("Markov chain", "The Markov chain", lambda: measure.chain_facts(subject)),
        "signal": ("signal by depth", "Signal propagation", lambda: measure.signal_facts(subject)),
        "gradients": (
            "gradients",
            "The size of gradients",
            lambda: measure.gradient_facts(subject),
        ),
        "alarms": (
            "what is wrong",
            "What is wrong",
            lambda: measure.alarm_facts(subject, explanation),
        ),
        "degeneracy": (
            "degeneracy",
            "Degeneracy",
            lambda: measure.degeneracy_facts(subject, explanation),
        ),
    }
    for name, (doing, what, work) in parts.items():
        tell(doing)
        facts[name] = attempt(what, work)
    tell("writing the page")
    facts = plain(facts)
    told = _told(facts, subject, rule)
    return Report(facts, told, _render(facts, told, skeleton))


def _walkable(skeleton: Skeleton) -> Skeleton:
    """The skeleton, or, where a weight of it is 0, one of the largest weights, so that
    products can be computed.
    """
    if names_without_values(skeleton.graph.parameters.items()):
        return skeleton
    try:
        skeleton.log_prefixes(), skeleton.log_suffixes()
    except InputError:
        return choose(skeleton.graph, rule="magnitude")
    return skeleton


def _told(facts: dict[str, Facts], subject: Subject, rule: str) -> dict[str, str]:
    """The sentence of every part, or the reason why it has no numbers."""

    def of(part: str, tell: Callable[[Facts], str]) -> str:
        return str(facts[part].get("absent") or tell(facts[part]))

    return {
        "model": sentences.model(facts["model"], facts["chain"]),
        "graph": sentences.graph(facts["graph"]),
        "certificate": of(
            "certificate", lambda found: sentences.certificate(found, facts["model"]["path_space"])
        ),
        "proof": of("proof", sentences.checker_verdict),
        "pins": sentences.pins(facts["account"]),
        "values": of("values", lambda found: sentences.values(found, rule)),
        "multipliers": of("values", sentences.rate_multipliers),
        "chain": of("chain", sentences.chain),
        "variance": of("signal", sentences.variance),
        "gains": of("signal", sentences.gradient_gains),
        "gradients": of("gradients", sentences.gradient),
        "alarms": of("alarms", sentences.alarms),
        "degeneracy": of("degeneracy", sentences.degenerate_directions),
        "loss": (
            f"{'G' if subject.loss.given else 'No loss was given: g'}radients are those of"
            f" {subject.loss.says}."
        ),
    }


def _figures(facts: dict[str, Facts], skeleton: Skeleton) -> dict[str, Markup]:
    found: dict[str, Markup] = {}
    if len(facts["graph"]["layers"]) <= graph_svg.MOST_ROWS:
        found["graph"] = graph_svg.lanes(facts["graph"])
    small = graph_svg.weights(skeleton)
    if small is not None:
        found["weights"] = small
    for name, across in (
        ("values", "size of the path value"),
        ("multipliers", "multiplier of the learning rate"),
    ):
        if facts["values"].get(name, {}).get("count"):
            found[name] = charts.histogram(facts["values"][name], f"Histogram: {across}", across)
    if any(node["cosine_mean"] is not None for node in facts["chain"].get("nodes", [])):
        found["chain"] = charts.cosines(
            facts["chain"]["nodes"], "Cosine of every node with descent"
        )

    def column(part: str, key: str) -> list[Any]:
        return [row[key] for row in facts[part].get("rows", [])]

    layers, tensors = column("signal", "layer"), column("gradients", "parameter")
    if layers:
        variance, gains = column("signal", "variance"), column("signal", "vjp_gain")
        expected = column("signal", "expected_gain")
        found["variance"] = charts.depth_chart(layers, variance, "Variance by depth", "variance")
        found["gains"] = charts.depth_chart(
            layers, gains, "VJP gain by depth", "VJP gain", expected
        )
    if tensors:
        sizes, across = column("gradients", "rms"), "parameter tensors in order"
        label, up = "Gradient RMS by tensor", "gradient RMS"
        found["gradients"] = charts.depth_chart(tensors, sizes, label, up, across=across)
    cause = facts["degeneracy"]
    if "deficit" in cause:
        kinds = ("rank", "gauge", "symmetric", "dead", "undetermined", "unexplained")
        found["degeneracy"] = charts.shares(
            [(kind, cause[kind], kind) for kind in kinds], "Directions by cause"
        )
    return found


def _render(facts: dict[str, Facts], told: dict[str, str], skeleton: Skeleton) -> str:
    shown = {name: found for name, found in facts.items() if name != "proof"}
    return render(
        "report.html.j2",
        facts=facts,
        told=told,
        figures=_figures(facts, skeleton),
        pins=_grouped(facts["account"]["pins"]),
        # JSON that cannot end the script element around it, whatever the names in a model are
        data=htmlsafe_json_dumps(
            {**shown, "sentences": told}, allow_nan=False, separators=(",", ":")
        ),
        most=graph_svg.MOST_ROWS,
    )


def _grouped(pins: list[Facts]) -> list[Facts]:
    """Operations that fixed scales; operations of equal name and reason share a row."""
    groups: dict[tuple[str, str], list[Facts]] = {}
    for pin in pins:
        groups.setdefault((pin["op"], pin["reason"]), []).append(pin)
    return [
        {
            "op": op,
            "reason": reason,
            "pins": found,
            "elements": sum(pin["elements"] for pin in found),
        }
        for (op, reason), found in groups.items()
    ]
