"""Models, data and a loss that commands load from a file."""

from __future__ import annotations

import torch
from cases import mlp
from torch import Tensor, nn
from torch.nn import functional as F

Made = tuple[nn.Module, Tensor]


class Block(nn.Module):
    """A residual block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.branch = nn.LayerNorm(6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.branch(self.norm(x))


class Net(nn.Sequential):
    """Two blocks and a head."""

    def __init__(self) -> None:
        super().__init__(Block(), Block(), nn.Linear(6, 3))


def loader() -> list[tuple[Tensor, Tensor]]:
    """The same five batches each time."""
    torch.manual_seed(3)
    return [(torch.randn(8, 6), torch.randint(0, 3, (8,))) for _ in range(5)]


def focal(outputs: Tensor, targets: Tensor) -> Tensor:
    """A loss of one's own."""
    return (F.cross_entropy(outputs, targets, reduction="none") ** 2).mean()


def chain() -> Made:
    """Three blocks and a head."""
    return nn.Sequential(Block(), Block(), Block(), nn.Linear(6, 3)), torch.randn(8, 6)


def zeros(last: bool = False) -> Made:
    """Branches of zeros; with the last one nothing moves."""
    model, x = chain()
    for block in model[0 if last else 1 : 3]:
        for parameter in block.branch.parameters():
            nn.init.zeros_(parameter)
    return model, x


def silent() -> Made:
    """All branches are zeros."""
    return zeros(last=True)


def plain() -> Made:
    """No block."""
    return mlp(6, 5, 5, 3), torch.randn(8, 6)
