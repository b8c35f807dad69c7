"""The penal connection under DistributedDataParallel: per sample, two processes
find the gradient of one.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from processes import two_processes
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from pathspace.training import penalise_

TAU = 0.3


class Chain(nn.Module):
    """Two pre-norm blocks and a head; the directions are kept for the explicit loss."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(5), nn.Linear(5, 5), nn.Tanh()) for _ in range(2)
        )
        self.head = nn.Linear(5, 1)
        self.directions: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.directions = []
        for block in self.blocks:
            z = block(x)
            self.directions.append(z)
            x = x + z
        return self.head(x)


def setting() -> tuple[Chain, Tensor]:
    torch.manual_seed(0)
    return Chain().double(), torch.randn(8, 5).double()


def work(rank: int, folder: Path) -> None:
    for order in ("penalised first", "wrapped first"):
        model, x = setting()
        if order == "penalised first":
            wrapped = DistributedDataParallel(penalise_(model, x, tau=TAU, per="sample"))
        else:
            wrapped = DistributedDataParallel(model)
            penalise_(model, x, tau=TAU, per="sample")
        wrapped(x[4 * rank : 4 * rank + 4]).square().mean().backward()
        torch.save(
            {name: p.grad for name, p in model.named_parameters()}, f"{folder}/{order}{rank}.pt"
        )


@pytest.mark.slow
def test_two_processes_find_the_gradient_of_one(tmp_path: Path) -> None:
    two_processes(work, tmp_path)
    model, x = setting()
    loss = model(x).square().mean()
    (loss + TAU / 2 * sum(z.square().sum() for z in model.directions) / len(x)).backward()
    for order in ("penalised first", "wrapped first"):
        for rank in (0, 1):
            found = torch.load(tmp_path / f"{order}{rank}.pt")
            for name, parameter in model.named_parameters():
                assert parameter.grad is not None
                torch.testing.assert_close(found[name], parameter.grad, rtol=1e-12, atol=1e-14)
