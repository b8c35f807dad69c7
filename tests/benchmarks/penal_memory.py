"""What `penalise_` keeps for the backward pass in blocks with an activation or a
norm after the sum, in bytes.

``PYTHONPATH=tests python -m benchmarks.penal_memory`` measures (seconds) and writes
``docs/data/penal-memory.json`` and the table of ``docs/markov-chain.md``.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from cases import network
from torch import nn

from benchmarks.figures import keep, markdown, write
from benchmarks.penalty import kept
from pathspace.training import penalise_

NAME, PAGE = "penal-memory", "markov-chain.md"
BLOCKS, CHANNELS, SIZE = 4, 8, (4, 8, 12, 12)


def gate() -> nn.Module:
    """Channels multiplied by what is read from their means."""
    read = [nn.AdaptiveAvgPool2d(1), nn.Conv2d(CHANNELS, CHANNELS, 1), nn.Sigmoid()]
    return network(lambda net, x: x * net.read(x), read=nn.Sequential(*read))


def post(end: list[nn.Module], after: nn.Module) -> nn.Module:
    """``after(x + branch(x))``."""
    first, last = (nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1) for _ in range(2))
    branch = nn.Sequential(first, nn.ReLU(), last, *end)
    return network(lambda net, x: net.after(x + net.branch(x)), branch=branch, after=after)


KINDS: dict[str, tuple[Callable[[], list[nn.Module]], Callable[[], nn.Module]]] = {
    "batch norm, sum, ReLU": (lambda: [nn.BatchNorm2d(CHANNELS)], nn.ReLU),
    "convolution, sum, layer norm": (list, lambda: nn.LayerNorm(SIZE[-1])),
    "convolution, sum, GELU": (list, nn.GELU),
    "convolution, sum, ReLU": (list, nn.ReLU),
    "convolution, sum, tanh": (list, nn.Tanh),
    "batch norm, gate, sum, ReLU": (lambda: [nn.BatchNorm2d(CHANNELS), gate()], nn.ReLU),
}


def measured(name: str) -> dict[str, Any]:
    """Tensors of the size of a node that are kept beside those of the model, for each node."""
    torch.manual_seed(0)
    end, after = KINDS[name]
    model = nn.Sequential(nn.Conv2d(3, CHANNELS, 1), *(post(end(), after()) for _ in range(BLOCKS)))
    x = torch.randn(SIZE[0], 3, *SIZE[2:])
    node = 4 * torch.Size(SIZE).numel() * BLOCKS
    found = {"plain": kept(model, lambda: model(x).square().mean())}
    penal = penalise_(copy.deepcopy(model), x, tau=1e-3)
    found["penalize"] = kept(penal, lambda: penal(x).square().mean())
    return {"block": name, **found, "for_a_node": (found["penalize"] - found["plain"]) / node}


def table(rows: list[dict[str, Any]]) -> str:
    """As Markdown."""
    head = "end of the block | kept, bytes | with `penalise_` | tensors for a node"
    lines = []
    for row in rows:
        bytes_kept = (f"{row[key]:,}" for key in ("plain", "penalize"))
        lines.append([row["block"], *bytes_kept, f"{row['for_a_node']:.2f}"])
    return markdown(head, lines)


def main() -> None:
    """Measure, and write the data and the table."""
    rows = [measured(name) for name in KINDS]
    keep(NAME, rows)
    write(PAGE, NAME, table(rows))


if __name__ == "__main__":
    main()
