"""How often a verification runs the model, against a committed budget."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from zoo.entry import load

import pathspace as ps

# forwards of one `verify`, the capture included (18 and 20 today)
BUDGET = 60


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("mode", ["eval", "train"])
def test_a_residual_network_is_verified_within_its_budget(
    monkeypatch: pytest.MonkeyPatch, mode: str, batch: int
) -> None:
    model, _, _ = load()["resnet18"].make(mode)
    forward, count = nn.Conv2d.forward, 0

    def counted(layer: nn.Conv2d, x: Tensor) -> Tensor:
        nonlocal count
        # (the stem runs once in each)
        count += layer.in_channels == 3
        return forward(layer, x)

    monkeypatch.setattr(nn.Conv2d, "forward", counted)
    certificate = ps.verify(model, torch.randn(batch, 3, 64, 64))
    assert certificate.holds is not False
    assert 5 < count <= BUDGET, count
