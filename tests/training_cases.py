"""Networks on which optimizers are tried beside `cases.CASES`: norms, attention and
residual streams together.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from cases import CASES, network
from oracles.networks import Case
from torch import Tensor, nn

NOTHING = 1e-30
"""In place of the eps of a norm: nothing beside any variance, and torch accepts it in training."""


class TransformerBlock(nn.Module):
    """An embedding, one pre-norm block with two heads, and a read-out of the mean token."""

    def __init__(self, inputs: int = 2, width: int = 4, inner: int = 3, outputs: int = 2) -> None:
        super().__init__()
        self.embed = nn.Linear(inputs, width)
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(width, eps=NOTHING) for _ in range(3))
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)
        self.head = nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        y = self.norm1(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        x = x + self.down(torch.relu(self.up(self.norm2(x))))
        return self.head(self.norm3(x).mean(1))


class BatchNormCNN(nn.Module):
    """Batch norm that keeps running statistics, in training mode: with biases,
    pooling, a strided shortcut.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.stem_norm = nn.Conv2d(2, 3, 3, padding=1), nn.BatchNorm2d(3, eps=NOTHING)
        self.first = nn.Conv2d(3, 2, 3, stride=2, padding=1)
        self.first_norm = nn.BatchNorm2d(2, eps=NOTHING)
        self.second = nn.Conv2d(2, 4, 3, padding=1, bias=False)
        self.second_norm = nn.BatchNorm2d(4, eps=NOTHING)
        self.shortcut, self.head = nn.Conv2d(3, 4, 1, stride=2), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.stem_norm(self.stem(x)))
        y = self.second_norm(self.second(torch.relu(self.first_norm(self.first(x)))))
        return self.head(torch.max_pool2d(torch.relu(self.shortcut(x) + y), 2).flatten(1))


def opposite_parents() -> nn.Module:
    """Factors of a product that ends at the root have opposite scales, and one of
    them feeds another layer.

    So some units hang on edges whose other end has the opposite of a unit's scale, and
    chains run against each other.
    """

    def forward(net: Any, x: Tensor) -> Tensor:
        a, b = torch.relu(net.a(x)), torch.relu(net.b(x))
        return torch.softmax(a * b, -1) + net.head(torch.relu(net.c(b)))

    a, b, c, head = (nn.Linear(3, 3) for _ in range(4))
    return network(forward, a=a, b=b, c=c, head=head)


def seeded(build: Callable[[], nn.Module], *shape: int) -> Callable[[], Case]:
    def make() -> Case:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(5)
            return build(), (torch.randn(shape),)

    return make


TRAINED: dict[str, Callable[[], Case]] = {
    **CASES,
    "transformer_block": seeded(TransformerBlock, 3, 4, 2),
    "batchnorm_cnn": seeded(BatchNormCNN, 4, 2, 4, 4),
    "opposite_parents": seeded(opposite_parents, 4, 3),
}
