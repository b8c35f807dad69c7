"""Diagnostics during training: measured between steps, with their cost, and without
an effect on the training.

Each measurement gives one row with

* ``efficiency``: mean cosine between residual branches and descent (the learnable Markov chain);
* ``conserved_max`` and ``conserved_mean``: change, since the start, of the quantities that gradient
  flow conserves, one per free scale;
* ``sign_changes`` and ``stopped``: number of sign changes of path values so far, and number of path
  values stopped before 0 (optimizers on path values).

The measurements draw no random numbers and do not change weights, gradients and buffers: the
trained weights are bitwise those of a run without them. A value that does not apply to a model or
an optimizer is ``null``, with a note.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import pathspace as ps
from pathspace.diagnostics.chain.chain import MarkovChain
from pathspace.diagnostics.parameters.conservation import conserved
from pathspace.errors import InputError, PathspaceError
from pathspace.files.json_lines import append_lines, read_lines
from pathspace.files.writing import replacing

from .history import Tick
from .task import Task

# Number of validation examples for the chain: always the same, so that rows can be compared.
OBSERVED = 256


class Monitor:
    """A watcher for :class:`~pathspace.training.trainer.Trainer` that measures before the
    first step and regularly.

    Create it before the penal connection is attached, with the initial model.

    Args:
        task: the task, for its examples and its loss.
        model: the model to train.
        optimizer: its optimizer.
        every: number of steps between rows.
        path: rows are appended to this file, one JSON object per line; ``None``
            keeps them in memory only.

    Attributes:
        rows: the measurements; for a resumed run with a file also the earlier ones.
        notes: one sentence for every value that does not apply.
        seconds: total time of the measurements.
        preparation: time to trace the model before the run.

    Raises:
        InputError: ``every`` is not positive.

    Example:
        >>> from pathspace.training.recipe import Recipe, prepare
        >>> from pathspace.training.experiments.tasks import load_task
        >>> from pathspace.training.trainer import Trainer
        >>> task = load_task("digits-rows", hidden=6)
        >>> model, optimizer = prepare(task, Recipe("gsgd"))
        >>> monitor = Monitor(task, model, optimizer, every=20)
        >>> _ = Trainer(task, model, optimizer, epochs=1, watch=monitor).fit()
        >>> [row["step"] for row in monitor.rows], len(monitor.notes)
        ([0, 20], 1)
    """

    def __init__(
        self,
        task: Task,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        every: int,
        path: str | os.PathLike[str] | None = None,
    ) -> None:
        if every < 1:
            raise InputError(f"Diagnostics found a cadence of {every} steps, expected at least 1.")
        started = time.perf_counter()
        self.task, self.model, self.optimizer, self.every = task, model, optimizer, every
        self.path = None if path is None else Path(path)
        self.notes: list[str] = []
        self._chain, self._graph = self._find_chain(), self._find_graph()
        if not hasattr(optimizer, "clip_counts"):
            name = type(optimizer).__name__
            self.notes.append(
                f"Guards do not apply: {name} takes its steps on weights, not on path values."
            )
        self._start = conserved(self._graph) if self._graph is not None else None
        self.preparation = time.perf_counter() - started
        self.seconds, self._step, self._begun = 0.0, 0, False
        self.rows = [self._measure(0, 0)]

    def __call__(self, tick: Tick) -> None:
        """Measure at the right steps; called after each step."""
        self._step = tick.step
        if tick.step % self.every:
            return
        self.rows.append(self._measure(tick.step, tick.epoch))
        # the row before the first step is written only now, so that a run that cannot start
        # does not change the file
        self._write(self.rows[-1:] if self._begun else self.rows)

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a resumed run, without rows, which are in the file."""
        if self.path is not None and self._begun:
            with open(self.path, "rb+") as file:
                os.fsync(file.fileno())
        return {"step": self._step, "seconds": self.seconds, "start": self._start}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue after a checkpoint; later rows of the interrupted run are measured again.

        Args:
            state: a result of :meth:`state_dict`.
        """
        self._step, self.seconds, self._start = state["step"], state["seconds"], state["start"]
        if self.path is None or not self.path.exists():
            return
        rows = (row for row in read_lines(self.path) if "step" in row)
        self.rows = [row for row in rows if row["step"] <= self._step] or self.rows
        self._begun = False
        self._write(self.rows)

    def _find_chain(self) -> MarkovChain | None:
        try:
            with _evaluating(self.model):
                chain = MarkovChain.trace(self.model, *self.task.example_inputs())
        except PathspaceError as error:
            self.notes.append(f"The chain's efficiency does not apply: {error}")
            return None
        if not chain.nodes:
            self.notes.append(f"The chain's efficiency does not apply: {chain.sentence()}")
            return None
        return chain

    def _find_graph(self) -> ps.ReductionGraph | None:
        try:
            graph = ps.trace(self.model, *self.task.example_inputs())
        except PathspaceError as error:
            self.notes.append(f"Conserved quantities do not apply: {error}")
            return None
        if not graph.num_units:
            self.notes.append("Conserved quantities do not apply: the model has no free scale.")
            return None
        return graph

    def _measure(self, step: int, epoch: int) -> dict[str, Any]:
        started = time.perf_counter()
        row: dict[str, Any] = {"step": step, "epoch": epoch, "efficiency": None}
        row |= dict.fromkeys(("conserved_max", "conserved_mean", "sign_changes", "stopped"))
        if self._chain is not None:
            row["efficiency"] = self._efficiency(self._chain)
        if self._graph is not None and self._start is not None:
            drift = (conserved(self._graph) - self._start).abs()
            row |= {"conserved_max": drift.max().item(), "conserved_mean": drift.mean().item()}
        clip_counts: Tensor | None = getattr(self.optimizer, "clip_counts", None)
        if clip_counts is not None:
            row["sign_changes"], row["stopped"] = clip_counts.tolist()
        seconds = time.perf_counter() - started
        self.seconds += seconds
        return {**row, "seconds": seconds}

    def _efficiency(self, chain: MarkovChain) -> float:
        parameter = next(self.model.parameters())
        inputs, targets = self.task.valid.inputs[:OBSERVED], self.task.valid.targets[:OBSERVED]
        inputs = inputs.to(
            parameter.device, parameter.dtype if inputs.is_floating_point() else None
        )
        # (cuDNN's recurrent layers have no gradient in evaluation mode)
        with _evaluating(self.model), torch.backends.cudnn.flags(enabled=False):
            return chain.observe(
                self.task.loss, inputs, targets.to(parameter.device)
            ).mean_efficiency

    def _write(self, rows: list[dict[str, Any]]) -> None:
        if self.path is None:
            return
        if not self._begun:
            with replacing(self.path) as temporary:
                append_lines(temporary, rows)
            self._begun = True
            return
        try:
            append_lines(self.path, rows)
        except OSError as error:
            reason = (error.strerror or "unknown reason").lower()
            raise InputError(
                f"Cannot write '{self.path}': {reason}; make room and resume the run."
            ) from error


class Watchers:
    """Several watchers as one, with separate states by name.

    Args:
        **watchers: the watchers, called after each step in this order.

    Example:
        >>> Watchers(
        ...     first=lambda tick: print("first", tick), second=lambda tick: print("second", tick)
        ... )(1)
        first 1
        second 1
    """

    def __init__(self, **watchers: Callable[[Any], None]) -> None:
        self.watchers = watchers

    def __call__(self, tick: Any) -> None:
        """Call all watchers."""
        for watcher in self.watchers.values():
            watcher(tick)

    def state_dict(self) -> dict[str, Any]:
        """Return the states of the watchers that have one."""
        return {
            name: w.state_dict() for name, w in self.watchers.items() if hasattr(w, "state_dict")
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the state of every watcher that has one in ``state``.

        Args:
            state: a result of :meth:`state_dict`.
        """
        for name, watcher in self.watchers.items():
            if name in state and hasattr(watcher, "load_state_dict"):
                watcher.load_state_dict(state[name])


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """A context in evaluation mode, without randomness."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)
