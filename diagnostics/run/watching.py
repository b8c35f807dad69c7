"""Observation of a training loop from outside: steps are counted, measured at
regular intervals, and judged.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from pathspace.errors import (
    AT_LEAST_1,
    SEED,
    InputError,
    PathspaceError,
    expect_arguments,
    expect_numbers,
)
from pathspace.paths.norms import path_statistics
from pathspace.paths.skeleton import Skeleton
from pathspace.reduction import trace

from ..chain.chain import MarkovChain
from ..chain.efficiency import ChainRecord, as_record
from ..chain.observer import Observer
from .alarms import Alarm, new_alarms, not_held
from .log import RunLog
from .output_writers import Csv, Page, TensorBoardWriter
from .passes_judged import same_batch
from .probe import Pass, Probe
from .snapshot import Snapshot, UnitFacts
from .weights import TensorFacts, Units, eps_share, fan_in, moves, tensor_facts, usual_squares

EVERY = 100
# tracing waits until its cost is this share of the run, unless it takes less than half a second
TRACE_SHARE, SHORT = 0.01, 0.5
# estimated time of tracing for each layer without submodules; it only decides when to trace
_SECONDS_PER_LAYER = 0.04
# path values and chains of larger models cost more than 1 % of a hundred steps
MOST_WEIGHTS = 100_000_000
_log = logging.getLogger("pathspace")


class Watching(RunLog):
    """The result of :func:`watching`: a context that measures the training loop inside
    it; see :class:`RunLog`.

    Attributes:
        rows: one mapping of names to numbers for each measured step.
        alarms: the problems in the order in which they were found; ``causes`` are those
            that no other one explains.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        every: int,
        outputs: list[Callable[[RunLog], None]],
        on_alarm: Callable[[Alarm], None] | None,
        structure: bool | None,
        planned: int | None,
        batches: int | None,
    ) -> None:
        super().__init__(getattr(model, "_orig_mod", getattr(model, "module", model)))
        self.compiled = hasattr(model, "_orig_mod")
        self.every, self.outputs, self.on_alarm = every, outputs, on_alarm
        self.structure, self.planned, self.batches = structure, planned, batches
        self._fans = fan_in(self.model)
        self._counted = usual_squares(self.model, self._fans).keys()
        self._probe = Probe(self.model)
        self._ids = {id(p) for p in self.model.parameters()}
        self._held = self._probe.held
        self._first: Optimizer | None = None
        self._others = 0
        self._handles: list[Any] = []
        self._measuring = self._prepared = False
        self._began: tuple[float, float, int] | None = None
        self._tensors: list[TensorFacts] = []
        self._before: dict[str, Tensor] = {}
        self._losses: list[Tensor] = []
        self._pass = Pass()
        self._observer: Observer | None = None
        self._record: ChainRecord | None = None
        self._units: Units | None = None
        self._skeleton: Skeleton | None = None
        self._start: tuple[np.ndarray, np.ndarray] | None = None

    def __enter__(self) -> Watching:
        self.running = True
        self._handles = [
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        ]
        self._arm()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._disarm()
        self._measuring = self.running = False
        if self._first is None and kind is None:
            self._raise([not_held(self._others)] if self._others else [])
            self.notes += [] if self._others else ["Nothing is measured: no optimizer made a step."]
        if self.rows and not self._prepared:
            self.notes.append(
                "Units and chain are not measured: tracing the model would have been more than 1 %"
                " of this run; structure=True traces it at the first step."
            )
        if self.batches is None and same_batch(self.snapshots):
            self.notes.append(
                "All measured batches are the same one; if the data has more, the loader repeats"
                " its first."
            )
        if self.rows:
            self._write()

    def due(self, step: int) -> bool:
        """Whether a step is measured: each ``every``-th, and before the first
        of them the powers of two.
        """
        return step % self.every == 0 or (step < self.every and step & (step - 1) == 0)

    def _arm(self) -> None:
        """Attach the hooks for the next step if it will be measured; other
        steps run without hooks.
        """
        self._measuring = self.due(self.steps + 1)
        if not self._measuring or self.compiled:
            return
        self._probe.attach()
        if self._observer is not None:
            self._record = None
            self._observer.sites.attach(self.model)

    def _disarm(self) -> None:
        self._pass = self._probe.detach() if self._probe.handles else Pass()
        if self._observer is not None and self._observer.sites.handles:
            self._observer.sites.detach()
            self._observer.finish()

    def _ours(self, optimizer: Optimizer) -> bool:
        mine = {id(p) for group in optimizer.param_groups for p in group["params"]} & self._ids
        self._held |= mine
        if mine and self._first is None:
            self._first = optimizer
        self._others += not mine
        return optimizer is self._first

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        if not self._ours(optimizer) or not self._measuring:
            return None
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            self._look()
            return None

        def looked() -> Any:
            # the pass is computed inside the step, as in Lightning's loops and with L-BFGS
            loss = closure()
            if not self._tensors:
                self._look()
            if isinstance(loss, Tensor):
                self._losses.append(loss.detach())
            return loss

        if "closure" in kwargs:
            return args, {**kwargs, "closure": looked}
        return (args[0], looked, *args[2:]), kwargs

    @torch.no_grad()
    def _look(self) -> None:
        """Record the pass, and copy the weights before the step."""
        started = time.perf_counter()
        self._disarm()
        self._tensors = tensor_facts(self.model, self._fans)
        self._before = {
            n: p.detach().clone() for n, p in self.model.named_parameters() if n in self._counted
        }
        self.seconds += time.perf_counter() - started

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        if optimizer is not self._first:
            return
        self.steps += 1
        if self._measuring and self._tensors:
            self._finish(optimizer)
        self._arm()

    def _finish(self, optimizer: Optimizer) -> None:
        if not self._prepared and self._worth_tracing():
            self._prepare()
        started = time.perf_counter()
        moves(self._before, self.model, self._tensors, self._fans)
        units = self._unit_facts()
        named = dict(self.model.named_parameters())
        for tensor in self._tensors:
            tensor.trained = id(named[tensor.name]) in self._held
        groups = optimizer.param_groups
        decays = [float(g["lr"]) * float(g.get("weight_decay") or 0) for g in groups if "lr" in g]
        rates = [float(group["lr"]) for group in groups if "lr" in group]
        snapshot = Snapshot(
            self.steps, self._pass, self._tensors, units, self._record, max(rates, default=None)
        )
        snapshot.decay, snapshot.batches = max(decays, default=None), self.batches
        snapshot.eps = eps_share(optimizer)
        snapshot.searched = (
            bool(self._losses[-1] < self._losses[0])
            if len(self._losses) > 1
            else bool(self.snapshots) and self.snapshots[-1].searched
        )
        snapshot.seconds = time.perf_counter() - started
        self._keep(snapshot)
        self._tensors, self._before, self._losses = [], {}, []
        self._write()
        self.seconds += time.perf_counter() - started

    def _keep(self, snapshot: Snapshot) -> None:
        self.snapshots.append(snapshot)
        self._raise(new_alarms(self.snapshots, self.alarms))
        self.rows.append(snapshot.row())
        for old in self.snapshots[:-3]:
            old.chain = None
            for layer in old.layers.layers:
                layer.live = None

    def _raise(self, alarms: list[Alarm]) -> None:
        for alarm in alarms:
            self.alarms.append(alarm)
            _log.warning("%s", alarm)
            if self.on_alarm is not None:
                self._tell(self.on_alarm, alarm)

    def _write(self) -> None:
        for output in self.outputs:
            self._tell(output, self)

    def _tell(self, listener: Callable[[Any], None], what: Any) -> None:
        """Call what is not part of the run, which goes on whatever happens there."""
        try:
            listener(what)
        except Exception as error:
            note = f"{_name(listener)} failed, and the run goes on: {error or type(error).__name__}"
            if note not in self.notes:
                self.notes.append(note)
                _log.warning("%s", note)

    def _worth_tracing(self) -> bool:
        """Whether tracing is a small part of the run so far, or of the whole run if its
        number of steps is known.
        """
        if self.structure is not None or self.every < EVERY:
            return True
        layers = sum(next(module.children(), None) is None for module in self.model.modules())
        price = _SECONDS_PER_LAYER * layers
        if price <= SHORT:
            return True
        if self._began is None:
            self._began = time.perf_counter(), time.process_time(), self.steps
            return False
        # other processes slow down both the run and tracing, so the processor time of
        # this process is compared
        spent = min(time.perf_counter() - self._began[0], time.process_time() - self._began[1])
        steps = self.steps - self._began[2]
        whole = spent * max(1.0, (self.planned or 0) / steps)
        return price <= TRACE_SHARE * whole

    def _prepare(self) -> None:
        """Trace the model on the inputs of the first measured pass."""
        self._prepared = True
        example = self._probe.example
        self._probe.example = None
        weights = sum(p.numel() for p in self.model.parameters())
        if example is None or self.structure is False or weights > MOST_WEIGHTS:
            why = f"the model has {weights:,} weights"
            if self.structure is False:
                why = "structure=False"
            elif example is None:
                why = "the model is compiled" if self.compiled else "no pass was seen"
            self.notes.append(f"Units and chain are not measured: {why}.")
            return
        started = time.perf_counter()
        args, kwargs = example
        for what, build in (("Units are", self._trace_units), ("The chain is", self._trace_chain)):
            try:
                build(args, kwargs)
            except PathspaceError as error:
                self.notes.append(f"{what} not measured: {error}")
        self.preparation = time.perf_counter() - started

    def _trace_units(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        graph = trace(self.model, *args, kwargs=kwargs)
        self._units = Units(self.model, graph, self._fans)
        self._skeleton = graph.skeleton(rule="magnitude")

    def _trace_chain(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        chain = MarkovChain.trace(self.model, *args, kwargs=kwargs)
        if len(chain):
            self._observer = Observer(chain, self._observed)

    def _observed(self, done: Any) -> None:
        if self._record is None and self._observer is not None:
            self._record = as_record(self._observer, done)

    def _unit_facts(self) -> UnitFacts:
        units = self._units
        if units is None or not units.graph.num_units:
            return UnitFacts()
        # (as the pass saw them: a step that is too large is not the fault of the weights before it)
        incoming, outgoing = units.sums(self._before)
        facts = UnitFacts(units.facts(incoming, outgoing))
        if self._start is None:
            self._start = incoming, outgoing
        before_in, before_out = self._start
        with np.errstate(divide="ignore", invalid="ignore"):
            total = before_in + before_out
            drift = (
                np.abs(incoming - outgoing - before_in + before_out)[total > 0] / total[total > 0]
            )
            gauge = 0.5 * np.abs(np.log10(incoming / outgoing) - np.log10(before_in / before_out))
            step = np.sqrt(units.entering(self._before) / incoming)
        facts.conserved = float(drift.max(initial=0.0))
        for name, values, q in (
            ("gauge", gauge, 0.5),
            ("step_median", step, 0.5),
            ("step_largest", step, 0.99),
        ):
            kept = values[np.isfinite(values)]
            setattr(facts, name, float(np.quantile(kept, q)) if len(kept) else None)
        if self.steps > 1 and self.steps % self.every:
            # this is half of the cost of a row, and it changes slowly
            return facts
        try:
            statistics = path_statistics(self._skeleton) if self._skeleton is not None else None
        except InputError:  # a weight of a tree became 0
            self._skeleton, statistics = units.graph.skeleton(rule="magnitude"), None
        if statistics is not None and statistics.count > statistics.zeros:
            facts.path_median, facts.path_largest = (
                v / np.log(10) for v in (statistics.median, statistics.largest)
            )
        return facts


def _name(listener: Any) -> str:
    return str(getattr(listener, "__name__", type(listener).__name__))


def watching(
    model: nn.Module,
    *,
    every: int = EVERY,
    csv: str | os.PathLike[str] | None = None,
    tensorboard: str | os.PathLike[str] | Any | None = None,
    page: str | os.PathLike[str] | None = None,
    on_alarm: Callable[[Alarm], None] | None = None,
    structure: bool | None = None,
    planned: int | None = None,
    batches: int | None = None,
) -> Watching:
    """Watch a training loop: measure it at regular steps, and report problems with
    their place and a remedy.

    The loop does not change: steps are counted by hooks of the optimizer of the model's
    parameters, hooks of the model exist only in the steps that are measured (the steps 1, 2, 4, 8,
    ... and each ``every``-th), and no random number is drawn. The model is traced once, on the
    inputs of a measured step.

    Each row contains: efficiency and cosines of the residual branches; the drift of the gauge and
    of the quantities that gradient flow conserves; sizes of path values; root mean square of the
    outputs and norm of the gradients of every layer; the relative step (effective learning rate)
    of every tensor and unit.

    Args:
        model: the model that is trained; wrapped (data parallel) or not. Of compiled models only
            weights, gradients and steps are measured.
        every: number of steps between measurements.
        csv: a file for the rows.
        tensorboard: a folder for event files, or a ``SummaryWriter``.
        page: an HTML file that reloads itself; it is written again with new rows.
        on_alarm: called with each new alarm; each is also logged as a warning of
            the logger ``pathspace``.
        structure: trace the model at the first step (``True``) or never, which leaves out units,
            path values and the chain; by default at the first step where ``every`` is below 100 or
            the model is small (tracing takes half a second at most), and otherwise at the first
            measured step where it is 1 % of the run.
        planned: number of steps of the run, if known; tracing can then begin earlier.
        batches: number of batches in the data, if known: if it is more than one, the same batch at
            every measured step raises an alarm; otherwise it is only noted.

    Returns:
        A context manager with ``rows``, ``alarms`` and ``causes``.

    Raises:
        InputError: ``every`` is not positive, a file cannot be written, or
            TensorBoard is not installed.

    Example:
        >>> _ = torch.manual_seed(0)
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        >>> with watching(model, every=10) as watch:
        ...     for _ in range(20):
        ...         optimizer.zero_grad()
        ...         model(torch.randn(16, 4)).square().mean().backward()
        ...         optimizer.step()
        >>> [int(row["step"]) for row in watch.rows], watch.causes
        ([1, 2, 4, 8, 10, 20], [])
    """
    expect_arguments("watching", model=model)
    expect_numbers("watching", AT_LEAST_1, every=every)
    expect_numbers("watching", SEED, or_none=True, planned=planned, batches=batches)
    outputs: list[Callable[[RunLog], None]] = []
    if csv is not None:
        outputs.append(Csv(csv))
    if tensorboard is not None:
        outputs.append(TensorBoardWriter(tensorboard))
    if page is not None:
        outputs.append(Page(page))
    return Watching(
        model,
        every=every,
        outputs=outputs,
        on_alarm=on_alarm,
        structure=structure,
        planned=planned,
        batches=batches,
    )


__all__ = ["EVERY", "Watching", "watching"]
