"""A training run and its outcome as plain data, for journals, processes and tables."""

from __future__ import annotations

import hashlib
import json
import platform
import re
import subprocess
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback

from pathspace.diagnostics import ChainRecord, MarkovChain

from ...penal import penalise_
from ..recipe import Init, Recipe, Rule, augmentation, prepare, schedule
from ..run_folder import LAST
from ..task import Split, Task, load_task, one_thread
from ..trainer import Training, lightning_trainer, run_epochs, score_split

# Packages on which the results of a run may depend.
PACKAGES = ("pathspace", "torch", "numpy", "scipy", "scikit-learn", "lightning")


def run_key(settings: Mapping[str, Any], data: str) -> str:
    """Return the name of a run: a digest of its settings and of its data."""
    told = json.dumps({**settings, "data": data}, sort_keys=True)
    return hashlib.sha256(told.encode()).hexdigest()[:20]


@cache
def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages on which a result may depend."""
    return {"python": platform.python_version(), **{name: version(name) for name in PACKAGES}}


def provenance() -> dict[str, str]:
    """Return commit, processor, system and versions of what computes here."""
    return {
        "commit": _commit(),
        "processor": _processor(),
        "system": f"{platform.system()} {platform.machine()}",
        **versions(),
    }


def together(origins: Sequence[dict[str, str]]) -> dict[str, str]:
    """Return the provenance of several results: by key, all values in their order."""
    keys = dict.fromkeys(key for origin in origins for key in origin)
    return {
        key: ", ".join(dict.fromkeys(one[key] for one in origins if key in one)) for key in keys
    }


@cache
def task_data(name: str, options: tuple[tuple[str, Any], ...]) -> Task:
    """Load a task once per process: trials of one experiment share its data."""
    return load_task(name, **dict(options))


@cache
def data_digest(name: str, options: tuple[tuple[str, Any], ...]) -> str:
    """Return a digest of all examples and labels of a task, as its model meets them."""
    task = task_data(name, options)
    return splits_digest((task.train, task.valid, task.test))


def splits_digest(splits: Iterable[Split]) -> str:
    """Return a digest of all examples and labels of splits."""
    found = hashlib.sha256()
    for split in splits:
        for tensor in (split.inputs, split.targets):
            found.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
            # (the array itself, not its bytes: large data are files that the system maps)
            found.update(tensor.detach().cpu().contiguous().numpy().data)
    return found.hexdigest()[:16]


@cache
def _commit() -> str:
    """Return the commit with which this process began, with a plus where files differ from it."""
    ask = ["git", "describe", "--always", "--exclude=*", "--abbrev=40", "--dirty=+"]
    try:
        return subprocess.run(
            ask, cwd=Path(__file__).parent, capture_output=True, text=True, check=True
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "none: not a checkout"


def _processor() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        text = ""
    found = re.search(r"^model name\s*: (.+)$", text, re.MULTILINE)
    return found[1].strip() if found else platform.processor() or "unknown"


# How many validation examples the efficiency of a chain is measured on after each
# epoch, and how many at a time.
OBSERVED, AT_A_TIME = 64, 500
# Into how many parts the test split is cut, to see how much depends on its items.
PARTS = 20


@dataclass(frozen=True)
class Trial:
    """A run, named completely: a recipe, a task with its options, and a budget.

    ``test`` looks at the test split after the last epoch, and ``efficiency`` measures that of the
    Markov chain after every epoch.
    """

    task: str
    optimizer: str
    lr: float
    seed: int
    epochs: int
    batch_size: int = 32
    init: Init | None = None
    rule: Rule = "modulo"
    tau: float = 0.0
    options: tuple[tuple[str, Any], ...] = ()
    test: bool = False
    efficiency: bool = False
    device: str = "cpu"
    schedule: str = "constant"
    clip: float | None = None
    decay: float = 0.0
    augment: str = "none"
    betas: tuple[float, float] | None = None
    eps: float | None = None

    @property
    def key(self) -> str:
        """A name that no other run has: its data and its settings, without usual values."""
        values = ((f.name, getattr(self, f.name), f.default) for f in fields(self))
        told = {name: value for name, value, default in values if value != default}
        told["options"] = sorted((k, v) for k, v in self.options if k != "data")
        return run_key(told, self.data)

    @property
    def data(self) -> str:
        """A digest of its data."""
        return data_digest(self.task, self.options)

    @property
    def label(self) -> str:
        """What a progress bar says of it."""
        return f"{self.task} {self.optimizer} lr {self.lr:g}"

    def carry_out(self, folder: Path | None = None) -> Outcome:
        """Train: :func:`run_trial`."""
        return run_trial(self, folder)

    def outcome(self, values: dict[str, Any]) -> Outcome:
        """Read the plain values of an outcome."""
        return Outcome.from_dict(values)


@dataclass(frozen=True)
class Outcome:
    """The outcome of a run: numbers of each epoch, and those of the test split if the trial looked.

    The curves of a run that diverged end before that epoch; ``efficiencies`` begin before the first
    one. ``test_parts`` are of :data:`PARTS` consecutive parts of the test split, as neighbours may
    depend on each other.
    """

    train_losses: tuple[float, ...]
    valid_losses: tuple[float, ...]
    valid_metrics: tuple[float, ...]
    seconds: float
    diverged: bool
    test_loss: float | None = None
    test_metric: float | None = None
    efficiencies: tuple[float, ...] = ()
    test_parts: tuple[float, ...] = ()
    test_efficiency: float | None = None

    @classmethod
    def from_dict(cls, record: dict[str, Any]) -> Outcome:
        """Read plain values."""
        values: dict[str, Any] = {
            k: tuple(v) if isinstance(v, list) else v for k, v in record.items()
        }
        return cls(**values)


def run_trial(trial: Trial, folder: Path | None = None) -> Outcome:
    """Train once, on one thread."""
    task = task_data(trial.task, trial.options)
    # (an experiment tries rates and starts that an optimizer warns of)
    with one_thread(), warnings.catch_warnings(action="ignore", category=UserWarning):
        training, probes = make_training(trial, task)
        trainer = lightning_trainer(
            training, folder=folder, callbacks=probes, device=trial.device, devices=1
        )
        last = folder / LAST if folder is not None and (folder / LAST).is_file() else None
        records = run_epochs(training, trainer, last)
        tested: dict[str, Any] = {}
        if trial.test and not training.diverged:
            score = score_split(training, task.test)
            tested = {"test_loss": score.loss, "test_metric": score.metric}
            parts = (score_split(training, part).metric for part in cut(task.test))
            tested["test_parts"] = tuple(parts)
            for probe in probes:
                tested["test_efficiency"] = probe.measure(task.test)
    return Outcome(
        train_losses=tuple(record.train_loss for record in records),
        valid_losses=tuple(record.valid_loss for record in records),
        valid_metrics=tuple(record.valid_metric for record in records),
        seconds=records[-1].seconds if records else 0.0,
        diverged=training.diverged,
        efficiencies=tuple(value for probe in probes for value in probe.values),
        **tested,
    )


def make_training(trial: Trial, task: Task) -> tuple[Training, list[EfficiencyProbe]]:
    """Return a run before its first step, and what looks on where the trial asks for it."""
    recipe = Recipe(
        trial.optimizer,
        trial.lr,
        trial.init,
        trial.rule,
        trial.seed,
        trial.decay or None,
        trial.betas,
        trial.eps,
    )
    model, optimizer = prepare(task, recipe)
    probes = [EfficiencyProbe(task, model)] if trial.efficiency else []
    if trial.tau:
        penalise_(model, *task.example_inputs(), tau=trial.tau)
    training = Training(
        task,
        model,
        optimizer,
        epochs=trial.epochs,
        batch_size=trial.batch_size,
        seed=trial.seed,
        schedule=schedule(trial.schedule),
        clip=trial.clip,
        augment=augmentation(trial.augment),
        settings={"trial": trial.key},
    )
    return training, probes


def cut(split: Split) -> list[Split]:
    """Cut a split into :data:`PARTS` parts of consecutive items, of as equal sizes as can be."""
    pieces = (
        tensor.tensor_split(min(PARTS, len(split))) for tensor in (split.inputs, split.targets)
    )
    return [Split(*pair) for pair in zip(*pieces, strict=True)]


class EfficiencyProbe(Callback):
    """Measures ``eps'`` before a run and after every epoch, without a penal connection."""

    def __init__(self, task: Task, model: Any) -> None:
        self.task, self.model = task, model
        self.chain = MarkovChain.trace(model, *task.example_inputs())
        self.values = [self.measure(task.valid, OBSERVED)]

    def on_train_epoch_end(self, *_: Any) -> None:
        """Look."""
        self.values.append(self.measure(self.task.valid, OBSERVED))

    def state_dict(self) -> dict[str, list[float]]:
        """Return what a checkpoint keeps."""
        return {"values": self.values}

    def load_state_dict(self, state: dict[str, list[float]]) -> None:
        """Go on from a checkpoint."""
        self.values = list(state["values"])

    def measure(self, split: Split, count: int | None = None) -> float:
        """Return the mean of ``eps'`` over the first so many examples of a split."""
        weight = next(self.model.parameters())
        records = []
        for inputs, targets in zip(
            *(part[:count].split(AT_A_TIME) for part in (split.inputs, split.targets)), strict=True
        ):
            some = inputs.to(weight.device, weight.dtype if inputs.is_floating_point() else None)
            records.append(self.chain.observe(self.task.loss, some, targets.to(weight.device)))
        return ChainRecord.merge(records).mean_efficiency
