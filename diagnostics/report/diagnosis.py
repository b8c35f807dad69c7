"""Diagnosis of a model with data and loss: signal by depth, the Markov chain, and alarms."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import nn

from pathspace.errors import SEED, PathspaceError, expect_arguments, expect_numbers
from pathspace.reduction import trace
from pathspace.shown import Shown

from ..chain.chain import MarkovChain
from ..chain.efficiency import ChainRecord
from ..chain.first_steps import FirstSteps, first_steps
from ..run.alarms import Alarm
from ..run.examine import examine
from ..shared.losses import Function
from ..shared.selection import Names
from ..shared.subject import Subject, make_subject
from ..shared.tables import Table
from ..signal.signal import LayerSignal, signal


@dataclass(frozen=True)
class Diagnosis(Shown):
    """The result of :func:`diagnose`.

    Attributes:
        subject: the model, its batches and its loss.
        signal: the effect of every layer on signals and gradients, on the first batch.
        chain: the residual additions of the model.
        record: the chain on all batches; ``None`` for a model without nodes.
        started: directions after the first steps of branches that start without one;
            ``None`` if all have one.
        alarms: problems, each with its place, its number and a remedy.
    """

    subject: Subject = field(repr=False)
    signal: Table[LayerSignal]
    chain: MarkovChain = field(repr=False)
    record: ChainRecord | None
    started: FirstSteps | None
    alarms: list[Alarm]

    def to_dict(self) -> dict[str, Any]:
        """All results as plain values, as ``pathspace diagnose --json`` writes them."""
        chain = self.chain
        measured = {} if self.record is None else self.record.to_dict()
        values = measured.pop("nodes", [{}] * len(chain))
        nodes = [
            {
                "name": n.name,
                "module": n.module,
                "kind": n.kind,
                "shape": list(n.shape),
                "source": n.source,
                **found,
            }
            for n, found in zip(chain.nodes, values, strict=True)
        ]
        dismissed = [
            {"operation": d.operation, "module": d.module, "reason": d.reason}
            for d in chain.dismissed
        ]
        return {
            "sentence": chain.sentence(),
            "loss": self.subject.loss.says,
            "alarms": [asdict(alarm) for alarm in self.alarms],
            "length": len(chain),
            **measured,
            **({} if self.started is None else self.started.to_dict()),
            "nodes": nodes,
            "dismissed": dismissed,
            "signal": self.signal.to_dicts(),
        }


def diagnose(
    model: nn.Module,
    *inputs: Any,
    kwargs: Mapping[str, Any] | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    data: Any = None,
    loss: str | Function | None = None,
    targets: Any = None,
    batches: int = 4,
    loss_fn: Function | None = None,
    names: Names = None,
    seed: int = 0,
    progress: Callable[[str], None] | None = None,
) -> Diagnosis:
    """Measure signals at every layer and the cosine of residual branches with
    descent, and list problems.

    Args:
        model: any module; it is not changed.
        *inputs: example inputs, a batch; not needed with ``data``.
        kwargs: example inputs by keyword.
        checkpoint: a file of weights, loaded into a copy, see
            :func:`pathspace.diagnostics.shared.subject.load_weights`.
        data: batches of inputs and targets, see
            :func:`pathspace.diagnostics.shared.subject.read_batches`.
        loss: ``loss(outputs, targets)`` or its name, see
            :func:`pathspace.diagnostics.shared.losses.choose_loss`.
        targets: targets of the example inputs.
        batches: largest number of batches to use.
        loss_fn: the same as ``loss``.
        names: patterns of the names of the layers whose signal is measured.
        seed: seed of random vectors, and of the stand-in loss.
        progress: called with the name of each stage.

    Returns:
        The diagnosis.

    Raises:
        InputError: data, loss or checkpoint are not valid, or no layer has these names.
        CaptureError: the model fails on these inputs or cannot be captured.

    Example:
        >>> import torch
        >>> model = nn.TransformerEncoderLayer(
        ...     8, 2, 16, batch_first=True, norm_first=True, dropout=0.0
        ... )
        >>> data = [(torch.randn(4, 5, 8), torch.zeros(4, 5, 8)) for _ in range(3)]
        >>> found = diagnose(model, data=data, loss="mse_loss")
        >>> found.record.samples, found.chain.sentence()
        (12, 'TransformerEncoderLayer is a Markov chain of 2 nodes (2 identity).')
    """
    expect_arguments("diagnose", model=model)
    expect_arguments("diagnose", or_none=True, checkpoint=checkpoint, progress=progress)
    expect_numbers("diagnose", SEED, seed=seed)
    tell = progress if progress is not None else lambda _doing: None
    what = {
        "checkpoint": checkpoint,
        "data": data,
        "loss": loss_fn if loss is None else loss,
        "targets": targets,
        "batches": batches,
    }
    subject = make_subject(model, inputs, kwargs, seed=seed, **what)
    tell("Following signals")
    model, args, named = subject.model, subject.args, subject.kwargs
    table = signal(model, *args, kwargs=named, names=names, jvp=False, seed=seed)
    tell("Tracing and observing")
    chain = MarkovChain.trace(model, *args, kwargs=named)
    records = (chain.observe(subject.loss, *batch) for batch in subject.batches)
    record = ChainRecord.merge(records) if len(chain) else None
    started = None if record is None else first_steps(chain, record, subject.loss, subject.batches)
    tell("Looking for what is wrong")
    try:
        graph = trace(model, *args, kwargs=named)
    except PathspaceError:  # the model has a chain, but no reduction graph
        graph = None
    alarms = examine(subject, graph, record if subject.loss.given else None)
    return Diagnosis(subject, table, chain, record, started, alarms)
