"""The trainer: epochs over a task with any optimizer, on the device of Lightning Fabric."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from lightning_fabric import Fabric
from lightning_fabric.strategies import DDPStrategy, SingleDeviceStrategy  # type: ignore[attr-defined]
from torch import nn
from torch.utils.data import DataLoader

from pathspace.diagnostics.chain.penalty_disabled import (
    penalty_disabled,
    restore_schedule_steps,
    schedule_steps,
)
from pathspace.errors import (
    AT_LEAST_1,
    SEED,
    InputError,
    PathspaceError,
    UnsupportedError,
    expect_numbers,
)

from . import ranks
from .batches import Batches
from .checkpoint import FORMAT, RunFolder, noise_state, restore_noise
from .history import EpochRecord, History, Partial, Score, Tick, best_record, exhausted
from .recipe import UNFIT
from .task import Split, Task

EVALUATION_BATCH = 1024


class Trainer:
    """Train one model on one task.

    The order of the batches and every other random number depend only on ``seed``, so that two
    optimizers with the same seed have the same batches. With a ``folder``, ``checkpoint.pt``,
    ``metrics.csv`` and ``metrics.jsonl`` are written after every epoch, each under a temporary name
    and renamed; with ``checkpoint_every`` the first is also written inside epochs. The loggers of
    ``fabric`` receive the same results. On a CPU a resumed run is bitwise equal to an uninterrupted
    one. The global random state is not changed.

    Args:
        task: data, loss and metric.
        model: trained in place.
        optimizer: any ``torch.optim.Optimizer`` over the parameters of ``model``.
        epochs: number of passes over the training split.
        batch_size: examples per pass through the model; the last of an epoch may be smaller.
        accumulate: passes per step. Their gradients are summed, weighted by their examples: the
            step equals that of ``accumulate * batch_size`` examples, to rounding. This holds if the
            loss is a mean over examples and no layer combines several of them (batch norm does).
            The last step of an epoch may have fewer examples.
        seed: seed of the order of the batches and of the noise of the model.
        folder: the folder of the files; ``None`` for no files.
        checkpoint_every: number of steps between checkpoints inside an epoch; ``None`` writes them
            only at the ends of epochs.
        checkpoint_seconds: also write a checkpoint inside an epoch when the
            last is older than this.
        schedule: completed share of the run's steps -> factor of every learning rate, such as
            :func:`pathspace.training.schedules.schedule` returns; ``None`` for constant rates.
            With a schedule, a resumed run must have as many epochs.
        clip: upper bound of the gradient norm of a step, over all weights; ``None`` for no bound.
        augment: changes the inputs of a training step, at random by torch's global generator.
        settings: plain values that identify the run; only a run with equal
            settings resumes its checkpoint.
        patience: stop after this number of epochs without a lower validation metric, and restore
            the weights of the best epoch; they are also written as ``best.pt``. ``None`` trains to
            the last epoch and keeps its weights.
        watch: called after each step; if it has ``state_dict`` and ``load_state_dict``, its state
            (plain values and tensors) is part of the checkpoint.
        fabric: device, precision and processes, launched; by default one CPU. Several processes
            share every pass and average their results by examples, so that their run equals that of
            one process to rounding, except for noise (dropout) and batch norm, which are separate
            in each process. The first of them writes files.

    Raises:
        InputError: a number is not positive, ``folder`` cannot be created, the training or
            validation split is empty, or the optimizer has no parameter of the model.
        UnsupportedError: ``fabric`` distributes the model in another way than
            ``DistributedDataParallel``, or a trainer cannot use the optimizer.

    Example:
        >>> from pathspace.training.experiments.tasks import load_task
        >>> task = load_task("digits-rows", hidden=8)
        >>> model = task.make_model(0)
        >>> trainer = Trainer(task, model, torch.optim.SGD(model.parameters(), lr=0.1), epochs=2)
        >>> len(trainer.fit().records)
        2
    """

    def __init__(
        self,
        task: Task,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        epochs: int,
        batch_size: int = 32,
        accumulate: int = 1,
        seed: int = 0,
        folder: str | os.PathLike[str] | None = None,
        checkpoint_every: int | None = None,
        checkpoint_seconds: float | None = None,
        schedule: Callable[[float], float] | None = None,
        clip: float | None = None,
        augment: Callable[[torch.Tensor], torch.Tensor] | None = None,
        settings: Mapping[str, Any] | None = None,
        patience: int | None = None,
        watch: Callable[[Tick], None] | None = None,
        fabric: Fabric | None = None,
    ) -> None:
        expect_numbers(
            "Trainer", AT_LEAST_1, epochs=epochs, batch_size=batch_size, accumulate=accumulate
        )
        expect_numbers(
            "Trainer",
            AT_LEAST_1,
            or_none=True,
            checkpoint_every=checkpoint_every,
            patience=patience,
        )
        expect_numbers(
            "Trainer", "a number of at least 0", or_none=True, checkpoint_seconds=checkpoint_seconds
        )
        expect_numbers("Trainer", "a positive number", or_none=True, clip=clip)
        expect_numbers("Trainer", SEED, seed=seed)
        _expect_trainable(task, model, optimizer)
        self.task, self.epochs, self.batch_size, self.seed = task, epochs, batch_size, seed
        self.settings = {
            "task": task.name,
            "batch_size": batch_size,
            "seed": seed,
            **(settings or {}),
        }
        if accumulate > 1:
            self.settings["accumulate"] = accumulate
        if clip is not None:
            self.settings["clip"] = clip
        if schedule is not None:
            # (the rates of all steps depend on their number)
            self.settings["schedule_epochs"] = epochs
        if patience is not None:
            # (a resumed run may have another patience, but the best weights must have been kept)
            self.settings["early_stopping"] = True
        self.patience = patience
        self._best: dict[str, Any] | None = None
        self.watch, self.checkpoint_every = watch, checkpoint_every
        self.checkpoint_seconds, self._saved = checkpoint_seconds, time.monotonic()
        self.augment = augment
        self.clip, self.schedule, self._rates = (
            clip,
            schedule,
            [group["lr"] for group in optimizer.param_groups],
        )
        self.fabric = fabric or Fabric(accelerator="cpu", devices=1)
        if not isinstance(self.fabric.strategy, SingleDeviceStrategy | DDPStrategy):
            raise UnsupportedError(
                f"The trainer found a Fabric with {type(self.fabric.strategy).__name__}, expected"
                " one device or DDPStrategy; use strategy='ddp'."
            )
        self._files = RunFolder(self.fabric, folder)
        self.model, self.optimizer = self.fabric.setup(model, optimizer)
        self._order = torch.Generator()
        # random state of the order at the start of the current epoch, and the
        # completed part of this epoch
        self._epoch_order, self._partial = self._order.get_state(), Partial()
        self._batches = self._cut(task.train, batch_size, self._order, accumulate)
        self._loader = self._load(task.train, self._batches)

    @property
    def folder(self) -> Path | None:
        """The folder of the files, ``None`` for a run without files."""
        return self._files.path

    @property
    def checkpoint(self) -> Path | None:
        """The checkpoint's path, ``None`` without a folder."""
        return self._files.checkpoint

    def fit(self, resume: bool = False) -> History:
        """Train to the last epoch, or until patience is exhausted or a loss is not finite.

        Args:
            resume: continue from the checkpoint in the folder instead of starting afresh.

        Returns:
            One record per epoch, those before an interruption included.

        Raises:
            InputError: there is no checkpoint to resume from or it does not fit, or
                a file cannot be written.
        """
        devices = [self.fabric.device] if self.fabric.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):
            # different noise for every process; the first has that of a single process
            torch.manual_seed(self.seed + self.fabric.global_rank * 2**32)
            self._order.manual_seed(self.seed)
            self._epoch_order, self._partial, self._best = self._order.get_state(), Partial(), None
            history = self._restore() if resume else History()
            while not (
                len(history.records) >= self.epochs
                or history.diverged
                or exhausted(history, self.patience)
            ):
                history = History((*history.records, self._epoch(history)))
                self._epoch_order, self._partial = (
                    self._order.get_state(),
                    Partial(seconds=history.records[-1].seconds),
                )
                self._write(history)
        if self._best is not None and not history.diverged:
            self.model.load_state_dict(self._best["model"])
            self._files.write("best.pt", self._best)
        return history

    def record_of_weights(self, history: History) -> EpochRecord | None:
        """Return the record of the epoch whose weights the model has after :meth:`fit`.

        Args:
            history: the result of :meth:`fit`.

        Returns:
            The best record with ``patience``, otherwise the last.
        """
        return history.last if self.patience is None or history.diverged else best_record(history)

    def evaluate(self, split: Split) -> Score:
        """Return loss and metric of the model on a split, in evaluation mode and without gradients.

        Args:
            split: examples of the task.

        Returns:
            Means over the examples.

        Raises:
            InputError: there are no examples.
        """
        _expect_examples(split, "split to evaluate")
        self.model.eval()
        sums = torch.zeros(2, dtype=torch.float64)
        batches = self._cut(split, EVALUATION_BATCH)
        with torch.no_grad():
            for share, (inputs, targets) in zip(
                batches.shares(), self._load(split, batches), strict=True
            ):
                outputs = self.model(inputs)
                pair = torch.stack(
                    [self.task.loss(outputs, targets), self.task.metric(outputs, targets)]
                )
                sums += share.examples * pair.double().cpu()
        return Score(*(value / len(split) for value in ranks.total(self.fabric, *sums.tolist())))

    def _epoch(self, history: History) -> EpochRecord:
        """Train the rest of the current epoch."""
        started, done = time.perf_counter(), self._partial
        last = history.last
        epoch, step, metric = (
            (last.epoch + 1, last.step, last.valid_metric) if last else (1, 0, math.nan)
        )
        step += done.steps
        total = 0.0
        self.model.train()
        self._batches.skip = done.steps
        for share, (inputs, targets) in zip(self._batches.shares(), self._loader, strict=True):
            if share.first:
                self.optimizer.zero_grad()
                total = 0.0
            # without the penalty for an example that does not count
            stands_in = penalty_disabled(self.model.module, share.examples == 0)
            with stands_in, self.fabric.no_backward_sync(self.model, enabled=not share.last):
                loss = self.task.loss(
                    self.model(self.augment(inputs) if self.augment else inputs), targets
                )
                total += loss.item() * share.examples
                if share.last:
                    (total,) = ranks.total(self.fabric, total)
                seconds = self._partial.seconds + time.perf_counter() - started
                if share.last and not math.isfinite(total):
                    # (no step for a loss that is not finite)
                    return EpochRecord(epoch, step, total / share.of, math.nan, math.nan, seconds)
                whole = self._within_range(
                    self.fabric.backward, loss if share.weight == 1 else loss * share.weight
                )
            if whole and not share.last:
                continue
            if not (whole and self._within_range(self._take, step)):
                return EpochRecord(epoch, step, math.inf, math.nan, math.nan, seconds)
            step += 1
            done = Partial(done.steps + 1, done.examples + share.of, done.loss_sum + total, seconds)
            if self.watch is not None:
                self.watch(Tick(step, self._batches.steps * self.epochs, epoch, done.loss, metric))
            if self._due(step):
                self._save(history, done)
        score = self.evaluate(self.task.valid)
        seconds = self._partial.seconds + time.perf_counter() - started
        return EpochRecord(epoch, step, done.loss, score.loss, score.metric, seconds)

    @staticmethod
    def _within_range(act: Callable[..., Any], *args: Any) -> bool:
        """Act; ``False`` if torch found a number beyond the range of the weights' data type."""
        try:
            act(*args)
        except RuntimeError as error:
            # (rates, decay and tau are numbers of Python, which have a wider range)
            if "without overflow" not in str(error):
                raise
            return False
        return True

    def _take(self, step: int) -> None:
        self._adjust(step)
        self.optimizer.step()

    def _adjust(self, step: int) -> None:
        """Set the learning rates of this step by the schedule, and clip its gradient."""
        if self.schedule is not None:
            factor = self.schedule(step / (self._batches.steps * self.epochs))
            for group, rate in zip(self.optimizer.optimizer.param_groups, self._rates, strict=True):
                group["lr"] = factor * rate
        if self.clip is not None:
            # (divides by the loss scale of 16-mixed, which leaves out a step that is not finite)
            self.fabric.clip_gradients(
                self.model, self.optimizer, max_norm=self.clip, error_if_nonfinite=False
            )

    def _due(self, step: int) -> bool:
        """Whether to write a checkpoint inside the epoch; the first process decides for all."""
        every, age = self.checkpoint_every, self.checkpoint_seconds
        if every and step % every == 0:
            return True
        return age is not None and ranks.first(
            self.fabric, lambda: time.monotonic() - self._saved >= age
        )

    def _cut(
        self,
        split: Split,
        batch_size: int,
        order: torch.Generator | None = None,
        accumulate: int = 1,
    ) -> Batches:
        rank, world = self.fabric.global_rank, self.fabric.world_size
        return Batches(len(split), batch_size, order, accumulate=accumulate, rank=rank, world=world)

    def _load(self, split: Split, batches: Batches) -> Any:
        # each element of the sampler is a whole batch, so that tensors are indexed once per batch
        generator = torch.Generator() if batches.order is None else batches.order
        loader = DataLoader(split.dataset(), sampler=batches, batch_size=None, generator=generator)
        return self.fabric.setup_dataloaders(loader, use_distributed_sampler=False)

    def _write(self, history: History) -> None:
        """Write the record of an epoch to files and loggers."""
        self._files.write_metrics(history, self.task.metric_name)
        *_, row = history.rows(self.task.metric_name)
        self.fabric.log_dict(
            {k: v for k, v in row.items() if k not in ("step", "status")}, step=row["step"]
        )
        best = best_record(history)
        if self.patience is not None and best is not None and best is history.last:
            weights = self.model.state_dict()
            copy = {name: value.detach().cpu().clone() for name, value in weights.items()}
            self._best = {"epoch": best.epoch, "metric": best.valid_metric, "model": copy}
            self._files.write("best.pt", self._best)
        if not history.diverged:
            # otherwise keep the checkpoint of the last epoch or step with finite losses
            self._save(history, self._partial)

    def _save(self, history: History, done: Partial) -> None:
        if self.checkpoint is None:
            return
        remember = getattr(self.watch, "state_dict", None)
        state = {
            "format": FORMAT,
            "settings": self.settings,
            "epochs": self.epochs,
            "patience": self.patience,
            "records": [asdict(record) for record in history.records],
            "partial": asdict(done),
            "model": self.model.state_dict(),
            "best": self._best,
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.fabric.strategy.precision.state_dict(),
            "order": self._epoch_order,
            "noise": ranks.gather(self.fabric, noise_state(self.fabric.device)),
            "watch": remember() if remember else None,
            "penal_steps": schedule_steps(self.model.module),
        }
        self._files.write("checkpoint.pt", state)
        self._saved = time.monotonic()

    def _restore(self) -> History:
        state = self._files.load(self.settings)
        history = History(tuple(EpochRecord(**record) for record in state["records"]))
        done, begun = len(history.records), Partial(**state["partial"])
        least = done + (begun.steps > 0)
        if least > self.epochs:
            raise InputError(
                f"The checkpoint '{self.checkpoint}' has {done} whole epochs"
                f"{f' and {begun.steps} steps' if begun.steps else ''}, this run asks for"
                f" {self.epochs}; give at least {least} epochs, or choose another folder."
            )
        try:
            self._take_over(state)
        except PathspaceError:
            raise
        except (RuntimeError, TypeError, ValueError, LookupError, AttributeError) as error:
            reason = " ".join(str(error).split()).rstrip(".")
            raise InputError(
                f"The checkpoint '{self.checkpoint}' does not fit the model and the optimizer of"
                f" this run ({reason}); resume with those it was written with, or choose another"
                " folder."
            ) from error
        self._epoch_order, self._partial = state["order"], begun
        return history

    def _take_over(self, state: Mapping[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self._best = state["best"]
        self.fabric.strategy.precision.load_state_dict(state["scaler"])
        self._order.set_state(state["order"])
        if self.fabric.global_rank < len(state["noise"]):
            # (a new process keeps its own noise)
            restore_noise(state["noise"][self.fabric.global_rank], self.fabric.device)
        restore_schedule_steps(self.model.module, state.get("penal_steps", {}))
        recall = getattr(self.watch, "load_state_dict", None)
        if recall and state["watch"] is not None:
            recall(state["watch"])


def _expect_examples(split: Split, name: str) -> None:
    if not len(split):
        raise InputError(f"The trainer found no examples in the {name}; give it at least one.")


def _expect_trainable(task: Task, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Refuse what would train nothing."""
    _expect_examples(task.train, "training split")
    _expect_examples(task.valid, "validation split")
    name = type(optimizer).__name__
    if isinstance(optimizer, torch.optim.LBFGS | torch.optim.SparseAdam):
        raise UnsupportedError(
            f"The trainer found torch's {name}, which {UNFIT[name]}; choose another optimizer."
        )
    own = {id(parameter) for parameter in model.parameters()}
    if not any(id(p) in own for group in optimizer.param_groups for p in group["params"]):
        raise InputError(
            f"The trainer found no parameter of {type(model).__name__} in {name}, expected those"
            " that it trains; make the optimizer with the parameters of this model."
        )
