"""The rules for watched runs, applied to a model without training: one pass on each batch."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from pathspace.models.values import require_runnable
from pathspace.reduction import ReductionGraph

from ..chain.efficiency import ChainRecord
from ..parameters.gradients import batch_gradient
from ..shared.subject import Subject
from .alarms import Alarm, new_alarms
from .outputs_judged import LossFault, broadcast_fault
from .probe import Probe
from .snapshot import Snapshot, UnitFacts
from .weights import Units, fan_in, tensor_facts


def examine(
    subject: Subject, graph: ReductionGraph | None = None, record: ChainRecord | None = None
) -> list[Alarm]:
    """Find problems of a model on its data and with its loss, without training.

    Args:
        subject: the model, its batches and its loss.
        graph: the model's reduction graph; without it units are not judged.
        record: the chain, observed with the loss of a task.

    Returns:
        Alarms, causes first. Rates and decay are not judged, because only a run has them.

    Raises:
        InputError: a parameter has no values.
    """
    model = subject.model
    require_runnable("a pass on the batches", model.named_parameters())
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    probe, fans, run = Probe(model), fan_in(model), list[Snapshot]()
    units = UnitFacts()
    if graph is not None and graph.num_units:
        compared = Units(model, graph, fans)
        units = UnitFacts(compared.facts(*compared.sums()))
    alarms: list[Alarm] = []
    for number, (inputs, targets) in enumerate(subject.batches, 1):
        probe.attach()
        faults: list[LossFault | None] = []

        def loss(outputs: Any, wanted: Any, into: list[LossFault | None] = faults) -> Tensor:
            into.append(broadcast_fault(subject.loss, outputs, wanted))
            return subject.loss(outputs, wanted)

        try:
            weights = [p for _, p in named]
            found = batch_gradient(model, loss, inputs, targets, weights, summed=True)
        finally:
            seen = probe.detach()
        if not subject.loss.named:
            seen.judged = None
        seen.judged = next(filter(None, faults), seen.judged)
        gradients = {name: g for (name, _), g in zip(named, found, strict=True) if g is not None}
        run.append(Snapshot(number, seen, tensor_facts(model, fans, gradients), units, record))
        alarms += new_alarms(run, alarms)
    return alarms
