"""Training on Lightning: a task, its model and its optimizer as one module.

Lightning owns loops, devices, processes, early stopping, logs and checkpoints. What is here decides
the numbers of a run: the order of the examples, weights of unequal passes, means in float64.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import RichProgressBar
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import BatchSampler, DataLoader, Sampler

from pathspace.diagnostics.chain.penalty_disabled import restore_schedule_steps, schedule_steps
from pathspace.errors import AT_LEAST_1, SEED, InputError, UnsupportedError, expect_numbers

from .run_folder import expect_own, kept
from .task import Split, Task

EVALUATION_BATCH = 1024
# Gloo has no class of errors: what it and the socket say when another process has died.
LOST = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Gloo", "gloo")


class Score(NamedTuple):
    """Loss and metric of a model on one split, both means over its examples."""

    loss: float
    metric: float


@dataclass(frozen=True)
class Record:
    """A run after one epoch; the training loss is the mean of losses before their own steps."""

    epoch: int
    step: int
    train_loss: float
    valid_loss: float
    valid_metric: float
    seconds: float


class DivergedError(Exception):
    """A loss is not finite: the run ends before the step."""


class Training(LightningModule):
    """A task, a model and an optimizer, for :func:`lightning_trainer` and :func:`run_epochs`.

    The order of the batches and every other random number depend on ``seed`` alone. On a CPU a
    resumed run is bitwise equal to an uninterrupted one. A step takes the gradients of
    ``accumulate`` passes, weighted by examples; ``schedule`` maps the completed share of the run's
    steps to a factor of every learning rate; ``settings`` are plain values, and only a run with
    equal ones resumes a checkpoint.

    Attributes:
        records: one per finished epoch.
        diverged: whether a loss stopped being finite.
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
        schedule: Callable[[float], float] | None = None,
        clip: float | None = None,
        augment: Callable[[Tensor], Tensor] | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.size = len(task.train)
        counts = {"epochs": epochs, "batch_size": batch_size, "accumulate": accumulate}
        counts |= {"training_examples": self.size, "validation_examples": len(task.valid)}
        for name, count in counts.items():
            expect_numbers("Training", AT_LEAST_1, **{name: count})  # type: ignore[arg-type]
        expect_numbers("Training", "a positive number", or_none=True, clip=clip)
        expect_numbers("Training", SEED, seed=seed)
        self.task, self.model, self.optimizer = task, model, optimizer
        self.epochs, self.batch_size, self.accumulate = epochs, batch_size, accumulate
        self.seed, self.schedule, self.clip, self.augment = seed, schedule, clip, augment
        # (with a schedule the rates of all steps depend on the number of epochs)
        used = {"accumulate": accumulate > 1, "clip": clip, "schedule_epochs": schedule}
        values = {"accumulate": accumulate, "clip": clip, "schedule_epochs": epochs}
        own = {"task": task.name, "batch_size": batch_size, "seed": seed}
        own |= {name: value for name, value in values.items() if used[name]}
        self.run_settings = {**own, **(settings or {})}
        self.monitored = f"valid_{task.metric_name}"
        self.records: list[Record] = []
        self.diverged = False
        self.score = Score(math.nan, math.nan)
        self._order, self._drawn = torch.Generator().manual_seed(seed), 0
        self._noise: list[dict[str, Tensor]] = []
        # sums over the epoch so far, sums over a split, and when the run began
        self._loss, self._examples, self._began = 0.0, 0, 0.0
        self._sums = torch.zeros(3, dtype=torch.float64)

    def setup(self, stage: str) -> None:
        """Refuse a last pass in which a process would have no example."""
        rest = self.size % self.batch_size or self.batch_size
        if stage == "fit" and rest < self.trainer.world_size:
            raise InputError(
                f"{self.trainer.world_size} processes share passes of {self.batch_size} examples,"
                f" of which the last has {rest}; choose another batch size, or fewer processes."
            )

    def configure_optimizers(self) -> Any:
        """Return the optimizer, with the schedule of its rates."""
        if (factor := self.schedule) is None:
            return self.optimizer
        steps = self.epochs * math.ceil(self.size / (self.batch_size * self.accumulate))
        moves = LambdaLR(self.optimizer, lambda step: factor(step / steps))
        return [self.optimizer], [{"scheduler": moves, "interval": "step"}]

    def train_dataloader(self) -> DataLoader[Any]:
        """Return the rest of an epoch."""
        return _loader(self.task.train, _Passes(self))

    def val_dataloader(self) -> DataLoader[Any]:
        """Return the validation split."""
        return self.evaluation(self.task.valid)

    def evaluation(self, split: Split) -> DataLoader[Any]:
        """Return this process's examples of a split."""
        rows = range(self.trainer.global_rank, len(split), self.trainer.world_size)
        return _loader(split, BatchSampler(rows, EVALUATION_BATCH, drop_last=False))

    def rows(self, epoch: int) -> Tensor:
        """Return the order of the examples in an epoch, counted from 0, later ones later: as
        recorded runs had it from a ``DataLoader``, the first of two permutations after one number,
        per epoch.
        """
        rows = torch.empty(0)
        for _ in range(self._drawn, epoch + 1):
            torch.empty((), dtype=torch.int64).random_(generator=self._order)
            rows, _unused = (torch.randperm(self.size, generator=self._order) for _ in range(2))
        self._drawn = epoch + 1
        return rows

    def on_train_start(self) -> None:
        """Set clock, table and noise; the first process has the noise of a single one."""
        self._began = time.perf_counter() - (self.records[-1].seconds if self.records else 0.0)
        for logger in self.loggers:
            # (it begins its file anew)
            for record in self.records if isinstance(logger, CSVLogger) else ():
                logger.log_metrics(self.row(record), record.step)
        if self.trainer.global_rank >= len(self._noise):
            torch.manual_seed(self.seed + self.trainer.global_rank * 2**32)
        else:
            noise = self._noise[self.trainer.global_rank]
            torch.set_rng_state(noise["cpu"])
            if self.device.type in noise.keys() - {"cpu"}:
                torch.cuda.set_rng_state(noise["cuda"], self.device)

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        """Return the loss of a pass, so weighted that those of a step add up to its mean."""
        inputs, targets = batch
        if self.augment is not None:
            inputs = self.augment(inputs)
        loss = self.task.loss(self.model(inputs), targets)
        (total,) = self._total(loss.item() * len(targets))
        if not math.isfinite(total):
            raise DivergedError
        start, step = index * self.batch_size, self.batch_size * self.accumulate
        self._loss += total
        self._examples += min(self.batch_size, self.size - start)
        # Lightning divides by the number of passes, and averages over processes
        whole = min(step, self.size - start // step * step)
        return loss * (len(targets) * self.trainer.world_size * self.accumulate / whole)

    def validation_step(self, batch: tuple[Tensor, Tensor], _index: int) -> None:
        """Add loss and metric of some examples."""
        inputs, targets = batch
        outputs = self.model(inputs)
        pair = torch.stack([self.task.loss(outputs, targets), self.task.metric(outputs, targets)])
        self._sums[:2] += len(targets) * pair.double().cpu()
        self._sums[2] += len(targets)

    test_step = validation_step

    def on_validation_epoch_end(self) -> None:
        """Record the epoch."""
        self.take_score()
        if not math.isfinite(self.score.loss):
            raise DivergedError
        done, seconds = self.current_epoch + 1, time.perf_counter() - self._began
        loss = self._loss / self._examples
        self.records.append(Record(done, self.global_step, loss, *self.score, seconds))
        self._loss, self._examples = 0.0, 0
        row = self.row(self.records[-1])
        shown = {name: row[name] for name in ("train_loss", self.monitored)}
        self.log_dict(shown, prog_bar=True, logger=False)
        for logger in self.loggers:
            logger.log_metrics(row, row["step"])

    def row(self, record: Record) -> dict[str, Any]:
        """Return a record as logs show it."""
        row = asdict(record)
        row[self.monitored] = row.pop("valid_metric")
        return row

    def take_score(self) -> None:
        """Divide the sums over a split by its examples."""
        loss, metric, examples = self._total(*self._sums.tolist())
        self.score = Score(loss / examples, metric / examples)
        self._sums.zero_()

    on_test_epoch_end = take_score

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add what Lightning does not know."""
        noise = {"cpu": torch.get_rng_state()}
        if self.device.type == "cuda":
            noise["cuda"] = torch.cuda.get_rng_state(self.device)
        everywhere = [noise] * self.trainer.world_size
        if self.trainer.world_size > 1:
            dist.all_gather_object(everywhere, noise)
        checkpoint["run"] = {
            "settings": self.run_settings,
            "records": [asdict(record) for record in self.records],
            "part": (self._loss, self._examples),
            "noise": everywhere,
            "penal_steps": schedule_steps(self.model),
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Take over what :meth:`on_save_checkpoint` added."""
        state = checkpoint["run"]
        self.records = [Record(**record) for record in state["records"]]
        (self._loss, self._examples), self._noise = state["part"], state["noise"]
        restore_schedule_steps(self.model, state["penal_steps"])

    def _total(self, *values: float) -> Sequence[float]:
        """Sums over all processes, in float64."""
        if self.trainer.world_size == 1:
            return values
        sums = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(sums)
        return sums.tolist()


class _Passes(Sampler[Tensor]):
    """This process's examples of each pass, from where a resumed epoch's counters stand."""

    def __init__(self, run: Training) -> None:
        self.run = run

    def __len__(self) -> int:
        return math.ceil(self.run.size / self.run.batch_size)

    def __iter__(self) -> Iterator[Tensor]:
        trainer = self.run.trainer
        done = trainer.fit_loop.epoch_loop.batch_progress.current.ready
        for rows in self.run.rows(self.run.current_epoch).split(self.run.batch_size)[done:]:
            yield rows[trainer.global_rank :: trainer.world_size]


def _loader(split: Any, batches: Any) -> DataLoader[Any]:
    # an element of the sampler is a whole batch, so that tensors are indexed once per batch;
    # a generator of its own leaves the noise of the model alone
    return DataLoader(split, sampler=batches, batch_size=None, generator=torch.Generator())


def lightning_trainer(
    training: Training | None = None,
    *,
    folder: str | os.PathLike[str] | None = None,
    patience: int | None = None,
    tensorboard: bool = False,
    bar: bool = False,
    callbacks: Sequence[Callback] = (),
    device: str = "cpu",
    devices: int | None = None,
    precision: str = "32-true",
) -> Trainer:
    """Return Lightning's trainer for a run; without a run, check device and precision alone.

    A folder gets ``metrics.csv``, ``last.ckpt`` and ``best.ckpt``, the weights of the lowest
    validation metric. With it, ``patience`` stops after so many epochs without a lower one, and
    takes the weights of the best. ``bar`` is on standard error. ``device`` and ``precision`` are
    Lightning's names; ``devices`` are processes on this machine, ``None`` for those of
    ``torchrun``, or one. Gradients and means are by examples: the run is that of one process, to
    rounding, but for noise and batch norm.
    """
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    options: dict[str, Any] = {"callbacks": [], "logger": False}
    if training is not None:
        if folder is not None:
            options = kept(training.monitored, Path(folder), patience, tensorboard)
        options |= {"max_epochs": training.epochs, "gradient_clip_val": training.clip}
        options["accumulate_grad_batches"] = training.accumulate
    shown = [RichProgressBar(console_kwargs={"stderr": True})] if bar else []
    options["callbacks"] += [*callbacks, *shown]
    here = devices or int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    nodes = int(os.environ.get("GROUP_WORLD_SIZE", "1"))
    try:
        return Trainer(
            **options,
            accelerator=device,
            devices=here,
            num_nodes=nodes,
            strategy="ddp" if here * nodes > 1 else "auto",
            precision=precision,  # type: ignore[arg-type]
            enable_checkpointing=folder is not None,
            enable_progress_bar=bar,
            enable_model_summary=False,
            num_sanity_val_steps=0,
            use_distributed_sampler=False,
            inference_mode=False,
        )
    except (MisconfigurationException, ValueError, RuntimeError) as error:
        reason = " ".join(str(error).split()).rstrip(".")
        raise InputError(
            f"Lightning cannot use the device '{device}' with the precision {precision} ({reason});"
            " choose another."
        ) from error


def run_epochs(training: Training, trainer: Trainer, resume: Path | None = None) -> list[Record]:
    """Train to the last epoch, until patience is exhausted, or until a loss is not finite; return
    one record per epoch, those before an interruption included. ``resume`` is a checkpoint to
    continue from.

    Raises:
        InputError: the checkpoint cannot be read, or is that of a run with other settings.
        UnsupportedError: another process of the run has died.
        KeyboardInterrupt: after Ctrl-C; checkpoints stay.
    """
    if resume is not None:
        expect_own(resume, training.run_settings)
    device = trainer.strategy.root_device
    noisy = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=noisy), warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="lightning")
        try:
            trainer.fit(training, ckpt_path=resume, weights_only=True)
        except DivergedError:
            training.diverged = True
        except RuntimeError as error:
            if any(word in str(error) for word in LOST):
                raise UnsupportedError(
                    "Another process of this run has failed; the last checkpoint is complete: add"
                    " --resume to continue."
                ) from error
            # (rates, decay and tau are numbers of Python, which has a wider range than weights)
            if "without overflow" not in str(error):
                raise
            training.diverged = True
        except SystemExit:
            # (Lightning ends the process after Ctrl-C, and leaves that key without effect)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            raise KeyboardInterrupt from None
    if trainer.early_stopping_callback and not training.diverged:
        best = next(c for c in trainer.checkpoint_callbacks if getattr(c, "monitor", None))
        state = torch.load(best.best_model_path, map_location="cpu", weights_only=True)  # type: ignore[attr-defined]
        training.load_state_dict(state["state_dict"])
    return training.records


def score_split(training: Training, split: Split) -> Score:
    """Return loss and metric of the model on a split, after :func:`run_epochs`."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="lightning")
        training.trainer.test(training, training.evaluation(split), verbose=False)
    return training.score
