"""The advice of ``suggest`` followed literally: trained networks, the
leaderboard's tasks, and others.

    PYTHONPATH=tests python -m benchmarks.advice [TRAINED NETWORK ...]

keeps its rows in ``docs/data/advice.json``. With names, only these trained networks are taken
again. Ten steps with the advised optimizer and rate, once without a loss given to ``suggest`` and
once with it.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import torch
from cases import network
from torch import Tensor, nn
from torch.nn import functional as F
from zoo import trained

import pathspace as ps
from benchmarks.figures import keep, load
from pathspace.models.nested import leaves
from pathspace.training import suggest
from pathspace.training.experiments.reproduce.leaderboard_run import TASKS, Run, prepared
from pathspace.training.experiments.tasks.text import token_loss
from pathspace.training.suggest import STEPS, falls, follow

Loss = Callable[[nn.Module], Tensor]
Subject = tuple[str, nn.Module, ps.ReductionGraph, Loss]


def trained_ones(names: list[str]) -> Iterator[Subject]:
    """Trained networks, asked for their own outputs with noise of the outputs' size."""
    for name in names:
        model, args, kwargs = trained.load(name)
        graph = ps.trace(model, *args, kwargs=kwargs)
        with torch.no_grad():
            first = _first(model(*args, **kwargs))
        targets = first + first.std() * torch.randn(
            first.shape, generator=torch.Generator().manual_seed(0)
        )

        def loss(
            one: nn.Module, args: Any = args, kwargs: Any = kwargs, targets: Tensor = targets
        ) -> Tensor:
            return (_first(one(*args, **kwargs)) - targets).square().mean()

        yield name, model, graph, loss


def _first(outputs: Any) -> Tensor:
    """The first tensor of numbers among some outputs."""
    return next(
        leaf for leaf in leaves(outputs) if isinstance(leaf, Tensor) and leaf.is_floating_point()
    )


def tasks(starts: tuple[str, ...] = ("default", "scrambled 100")) -> Iterator[Subject]:
    """The leaderboard's tasks, on one batch."""
    for task in TASKS:
        for start in starts:
            model, graph = prepared(Run(task, start, "AdamW", 0.0, seed=3))
            train = TASKS[task][1]("embedded")[0]
            inputs, targets = train.inputs[:64], train.targets[:64]

            def loss(one: nn.Module, inputs: Tensor = inputs, targets: Tensor = targets) -> Tensor:
                outputs = one(inputs)
                return (
                    token_loss(outputs, targets)
                    if outputs.dim() == 3
                    else F.cross_entropy(outputs, targets)
                )

            yield f"{task}, {start}", model.train(), graph, loss


def recurrent(body: nn.RNNBase) -> nn.Module:
    """A recurrent layer with a read-out of the last step."""
    return network(lambda net, x: net.head(net.body(x)[0][:, -1]), body=body, head=nn.Linear(24, 4))


def others() -> Iterator[Subject]:
    """Networks of other kinds, fresh and regressed on random targets."""
    deep = [layer for _ in range(20) for layer in (nn.Linear(24, 24), nn.ReLU())]
    norms = [
        layer for _ in range(4) for layer in (nn.Linear(24, 24), nn.GroupNorm(4, 24), nn.SiLU())
    ]
    post = nn.TransformerEncoderLayer(24, 4, 48, dropout=0.0, batch_first=True)
    relu = nn.RNN(8, 24, nonlinearity="relu", batch_first=True)
    makers: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
        "20 hidden layers": (nn.Sequential(nn.Linear(8, 24), *deep, nn.Linear(24, 4)), (8,)),
        "group norms and SiLU": (nn.Sequential(nn.Linear(8, 24), *norms, nn.Linear(24, 4)), (8,)),
        "LSTM": (recurrent(nn.LSTM(8, 24, batch_first=True)), (10, 8)),
        "ReLU RNN": (recurrent(relu), (10, 8)),
        "post-norm transformer": (
            nn.Sequential(nn.Linear(8, 24), post, nn.Flatten(), nn.Linear(240, 4)),
            (10, 8),
        ),
        "tanh": (nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 4)), (8,)),
    }
    for name, (model, shape) in makers.items():
        x = torch.randn(64, *shape)
        y = torch.randn(64, 4)

        def loss(one: nn.Module, x: Tensor = x, y: Tensor = y) -> Tensor:
            return F.mse_loss(one(x), y)

        yield name, model, ps.trace(model, x[:2]), loss


def followed(subject: Subject, tried: bool) -> dict[str, Any]:
    """Ten steps as advised, of a copy."""
    name, model, graph, loss = subject
    advice = suggest(model, graph, loss if tried else None, show=False)
    twin = copy.deepcopy(model)
    losses = follow(twin, advice.make(twin), loss)
    rate = "tried" if tried else "not tried"
    row = {"network": name, "optimizer": advice.optimizer, "rate": rate, "lr": advice.lr}
    return {**row, "before": losses[0], "after": losses[-1], "falls": falls(losses)}


def table(rows: list[dict[str, Any]]) -> list[dict[str, str]]:
    """Rows as the page shows them: the loss after ten steps over that before."""
    shown: dict[str, dict[str, str]] = {}
    for row in rows:
        one = shown.setdefault(
            row["network"], {"network": row["network"], "optimizer": row["optimizer"]}
        )
        one[f"rate, {row['rate']}"] = f"{row['lr']:.1e}"
        one[f"loss, {row['rate']}"] = f"{row['after'] / row['before']:.3f}"
    return list(shown.values())


def main(names: list[str]) -> None:
    """Follow the advice everywhere, or on the trained networks that are named."""
    torch.manual_seed(0)
    kept = load("advice")["rows"] if names else []
    rows = [row for row in kept if row["network"] not in names]
    some = trained_ones(names or list(trained.TRAINED))
    for subject in some if names else chain(others(), tasks(), some):
        rows += [followed(subject, tried) for tried in (False, True)]
        print(*rows[-2:], flush=True)
        keep("advice", {"torch": torch.__version__, "steps": STEPS, "rows": rows})


if __name__ == "__main__":
    main(sys.argv[1:])
