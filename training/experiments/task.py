"""Tasks, and their registry by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from pathspace.errors import InputError

from .names import expect_known


@dataclass(frozen=True)
class Split:
    """One part of the data of a task: inputs of shape (N, ...), and a target for each."""

    inputs: Tensor
    targets: Tensor

    def __post_init__(self) -> None:
        """Check the numbers of rows."""
        if len(self.inputs) != len(self.targets):
            raise InputError(
                f"A split found {len(self.inputs)} inputs and {len(self.targets)} targets, expected"
                " one target for each input; give both the same number of rows."
            )

    def __len__(self) -> int:
        """Count the examples."""
        return len(self.inputs)

    def __getitem__(self, rows: Any) -> tuple[Tensor, Tensor]:
        """Return inputs and targets of some examples."""
        return self.inputs[rows], self.targets[rows]


@dataclass(frozen=True)
class Task:
    """A learning problem: data, model, loss and metric.

    The validation split chooses settings; the test split is evaluated once. ``make_model`` maps a
    seed to a new model. Loss and metric are means over the batch; a lower metric is better, and a
    run that ends above ``hopeless`` counts as failed.
    """

    name: str
    description: str
    train: Split
    valid: Split
    test: Split
    make_model: Callable[[int], nn.Module]
    loss: Callable[[Tensor, Tensor], Tensor]
    metric: Callable[[Tensor, Tensor], Tensor]
    metric_name: str
    hopeless: float

    @classmethod
    def of(cls, name: str, what: str, parts: Sequence[Split], items: str, **more: Any) -> Task:
        """Return a task whose description ends with the sizes of its splits, of such ``items``."""
        train, valid, test = parts
        sizes = f"{len(train)} training, {len(valid)} validation and {len(test)} test {items}"
        return cls(name, f"{what}; {sizes}", train, valid, test, **more)

    def example_inputs(self) -> tuple[Tensor, ...]:
        """Return two examples, for ``pathspace.trace`` and ``pathspace.verify``."""
        return (self.train.inputs[:2],)


_BUILDERS: dict[str, Callable[..., Task]] = {}


def register_task(name: str) -> Callable[[Callable[..., Task]], Callable[..., Task]]:
    """Return a decorator that registers what builds a task, in place of an existing one."""

    def remember(builder: Callable[..., Task]) -> Callable[..., Task]:
        _BUILDERS[name] = builder
        return builder

    return remember


def task_names() -> tuple[str, ...]:
    """Return the names of all registered tasks, sorted."""
    return tuple(sorted(_BUILDERS))


def task_options(name: str) -> dict[str, Any]:
    """Return the options of a task with their defaults; nothing is loaded."""
    expect_known("task", name, task_names())
    found = inspect.signature(_BUILDERS[name]).parameters
    return {key: parameter.default for key, parameter in found.items()}


def load_task(name: str, **options: Any) -> Task:
    """Build the task of this name, with options of its own, such as ``hidden=100``."""
    known = task_options(name)
    for option in options:
        if option not in known:
            raise InputError(
                f"Task '{name}' has no option '{option}'; it has {', '.join(known) or 'none'}:"
                " leave it out."
            )
    return _BUILDERS[name](**options)


def seeded(build: Callable[[], nn.Module]) -> Callable[[int], nn.Module]:
    """Create models from seeds, without changing the global random state."""

    def make_model(seed: int) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return build()

    return make_model


def classes_task(name: str, what: str, parts: Sequence[Split], items: str, **more: Any) -> Task:
    """Return a task of classes, judged by the share of errors; see :meth:`Task.of`."""
    usual = {"loss": functional.cross_entropy, "metric": error_rate, "metric_name": "error"}
    return Task.of(name, what, parts, items, **{**usual, **more})


def error_rate(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the share of wrong classifications, ``mean(argmax(outputs) != targets)``."""
    return (outputs.argmax(dim=1) != targets).float().mean()


@contextmanager
def one_thread() -> Iterator[None]:
    """A context with one thread: faster for small matrices, and the same everywhere."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
