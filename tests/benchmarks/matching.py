"""Networks trained from different seeds on Fashion-MNIST, brought into one order of channels.

`python -m benchmarks.matching [NET ...]` from `tests/`; rows go to `docs/data/matching.json`,
the table onto `docs/channel-figures.md`. The *barrier* is the largest amount by which the test
loss between two networks, `loss((1 - t) a + t b)`, exceeds the straight line between their own
losses, over t = 0, 0.1, ..., 1. The published weight matching (Ainsworth et al., Git Re-Basin,
2023, Algorithm 1) is that of the package rebasin. Needs rebasin and torchview, and `pathspace
data fetch fashion-mnist`.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pathspace as ps
from benchmarks.figures import keep, load, page_of, write
from pathspace.training.experiments.data import given
from pathspace.training.experiments.tasks.papers import mnist_splits

Row = dict[str, Any]
NAME, PAGE = "matching", "channel-figures.md"
EPOCHS, BATCH, PAIRS = 3, 128, 2
POINTS = [i / 10 for i in range(11)]


def perceptron() -> nn.Sequential:
    """Three hidden layers."""
    sizes = [784, 256, 256, 256]
    hidden = [layer for a, b in pairwise(sizes) for layer in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(256, 10))


def convolutional() -> nn.Sequential:
    """Three convolutions of stride 2, no normalisation."""
    hidden: list[nn.Module] = []
    for a, b in pairwise([1, 16, 32, 32]):
        hidden += [nn.Conv2d(a, b, 3, stride=2, padding=1), nn.ReLU()]
    return nn.Sequential(*hidden, nn.Flatten(), nn.Linear(32 * 16, 10))


NETS: dict[str, Callable[[], nn.Sequential]] = {
    make.__name__: make for make in (perceptron, convolutional)
}


def images() -> list[tuple[Tensor, Tensor]]:
    """Normalised images and their classes: to train, to choose, to test."""
    parts = mnist_splits(given("matching", None, "fashion-mnist"))
    return [(torch.as_tensor(part.inputs), torch.as_tensor(part.targets)) for part in parts]


def trained(name: str, seed: int, x: Tensor, y: Tensor) -> nn.Sequential:
    """A network trained by Adam; the seed draws its start and its batches."""
    torch.manual_seed(seed)
    net = NETS[name]()
    optimizer = torch.optim.Adam(net.parameters(), 1e-3)
    rates = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS * (len(x) // BATCH + 1))
    for _ in range(EPOCHS):
        for some in torch.randperm(len(x)).split(BATCH):
            optimizer.zero_grad()
            F.cross_entropy(net(x[some]), y[some]).backward()
            optimizer.step()
            rates.step()
    return net.eval()


@torch.no_grad()
def tested(net: nn.Module, x: Tensor, y: Tensor) -> tuple[float, float]:
    """Loss and accuracy."""
    logits = net(x)
    return float(F.cross_entropy(logits, y)), float((logits.argmax(1) == y).float().mean())


def published(one: nn.Module, two: nn.Module, x: Tensor) -> nn.Module:
    """The package's weight matching."""
    from rebasin import PermutationCoordinateDescent

    moved = copy.deepcopy(two)
    PermutationCoordinateDescent(copy.deepcopy(one), moved, x).rebasin()
    return moved


def measured(name: str, pair: int, parts: list[tuple[Tensor, Tensor]]) -> list[Row]:
    """One pair of networks, brought together in every way."""
    (x, y), test = parts[0], parts[-1]
    one, two = (trained(name, 2 * pair + i, x, y) for i in (0, 1))
    graph = ps.trace(one, test[0][:2])
    level = [ps.balance_(copy.deepcopy(net), graph) for net in (one, two)]
    groups, even = (ps.channels(net, test[0][:2]) for net in (one, level[0]))
    by_outputs = {"by": "activations", "inputs": x[:5000]}
    ways: dict[str, Callable[[], tuple[nn.Module, nn.Module]]] = {
        "as trained": lambda: (one, two),
        "rebasin": lambda: (one, published(one, two, test[0][:2])),
        "weights": lambda: (one, groups.match(two).model),
        "weights, balanced": lambda: (level[0], even.match(level[1]).model),
        "activations": lambda: (one, groups.match(two, **by_outputs).model),
        "activations, balanced": lambda: (level[0], even.match(level[1], **by_outputs).model),
    }
    rows = []
    for way, match in ways.items():
        row: Row = {"net": name, "pair": pair, "way": way}
        try:
            ends = match()
        except Exception as error:
            why = str(error).splitlines()[0][:120]
            rows.append({**row, "failure": f"{type(error).__name__}: {why}"})
            continue
        start = groups if ends[0] is one else even
        between = [tested(start.interpolate(ends[1], t), *test) for t in POINTS]
        loss, right = zip(*between, strict=True)
        above = [
            value - (1 - t) * loss[0] - t * loss[-1] for t, value in zip(POINTS, loss, strict=True)
        ]
        moved = tested(ends[1], *test)[0] - tested(two, *test)[0]
        row |= {"barrier": max(above), "middle": right[5], "ends": [right[0], right[-1]]}
        row["moved"] = abs(moved)
        rows.append(row)
        print(row, flush=True)
    return rows


def tables(held: Row) -> str:
    """The figures as they stand on the page."""
    rows: dict[tuple[str, str], list[Row]] = {}
    for row in held["rows"]:
        rows.setdefault((row["net"], row["way"]), []).append(row)
    return page_of("matching", rows=rows).rstrip()


def main(names: list[str]) -> None:
    """Measure, keep, write the page."""
    held = {"rows": []} | load(NAME) | {"epochs": EPOCHS, "batch": BATCH}
    parts = images()
    for name in names or NETS:
        for pair in range(PAIRS):
            kept = [row for row in held["rows"] if (row["net"], row["pair"]) != (name, pair)]
            held["rows"] = kept + measured(name, pair, parts)
            keep(NAME, held)
    write(PAGE, NAME, tables(held))


if __name__ == "__main__":
    main(sys.argv[1:])
