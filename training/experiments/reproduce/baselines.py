"""Test metrics of simple baselines and of published networks, which arms have to beat."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ..task import Split, Task, one_thread
from ..tasks.translation import token_accuracy_error
from .trial import task_data

# Published metrics on the data of a task as it is: all training images, in their own size. Those of
# another kind of network are shown, and decide nothing: a recurrence with gates is no bar for one
# without them.
SHOWN = "for information, published: "
PUBLISHED = {
    "fashion-28": {f"{SHOWN}a recurrence with gates, README of Fashion-MNIST": 1 - 0.888},
    "fashion-images": {
        "published: three convolutions with batch norm, README of Fashion-MNIST": 1 - 0.903
    },
}
# options of tasks that take fewer images or smaller ones
CUT = {"limit", "pool"}
EPOCHS, STEPS, BATCH, RATE = 5, 1000, 250, 0.002


@cache
def baselines(name: str, options: tuple[tuple[str, Any], ...]) -> dict[str, float]:
    """Return the test metrics of the baselines for a task, simple and published; lower is better.

    Logistic regression on the whole input where there are classes; where every token is followed by
    the next, the table of pairs of tokens, for translations that of the target words.
    """
    task, found = task_data(name, options), {}
    train = task.train
    if train.targets.dim() == 1 and train.inputs.is_floating_point():
        found = {"logistic regression": _logistic_regression(task)}
    elif task.metric is token_accuracy_error or (
        train.targets.shape == train.inputs.shape and bool((train.targets >= 0).all())
    ):
        found = {"bigram table": _bigrams(task)}
    return found | published(name, options)


def published(name: str, options: tuple[tuple[str, Any], ...]) -> dict[str, float]:
    """Return published test metrics on the same data, in the same size."""
    return {} if CUT & dict(options).keys() else PUBLISHED.get(name, {})


def _bigrams(task: Task) -> float:
    length = task.train.targets.shape[1]
    with torch.no_grad():
        size = task.make_model(0)(task.test.inputs[:1]).shape[-1]
    pairs = torch.stack([task.train.inputs[:, -length:].flatten(), task.train.targets.flatten()])
    pairs = pairs[:, pairs[1] >= 0]
    counts = (
        torch.zeros(size, size).index_put_(
            tuple(pairs), torch.ones(pairs.shape[1]), accumulate=True
        )
        + 1
    )
    table = (counts / counts.sum(1, keepdim=True)).log()
    return _mean(task, task.test, lambda inputs: table[inputs[:, -length:]])


def _logistic_regression(task: Task) -> float:
    inputs, targets = task.train.inputs.flatten(1), task.train.targets
    mean, deviation = inputs.mean(0), inputs.std(0).clamp_min(1e-3)
    with one_thread(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = torch.nn.Linear(inputs.shape[1], int(targets.max()) + 1)
        torch.nn.init.zeros_(model.weight)
        in_epoch = -(-len(inputs) // BATCH)
        epochs = max(EPOCHS, -(-STEPS // in_epoch))
        optimizer = torch.optim.Adam(model.parameters(), lr=RATE)
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: 1 - step / (epochs * in_epoch)
        )
        for _ in range(epochs):
            for some in torch.randperm(len(inputs)).split(BATCH):
                optimizer.zero_grad()
                functional.cross_entropy(
                    model((inputs[some] - mean) / deviation), targets[some]
                ).backward()
                optimizer.step()
                schedule.step()
    with torch.no_grad():
        return _mean(task, task.test, lambda inputs: model((inputs.flatten(1) - mean) / deviation))


def _mean(task: Task, split: Split, predict: Callable[[Tensor], Tensor]) -> float:
    total = 0.0
    for inputs, targets in zip(split.inputs.split(BATCH), split.targets.split(BATCH), strict=True):
        total += float(task.metric(predict(inputs), targets)) * len(inputs)
    return total / len(split)
