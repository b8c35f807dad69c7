"""How often a verification runs the model, against a committed budget."""

from __future__ import annotations

import pytest
import torch
from benchmarks.measure import stem_runs
from zoo.entry import load

import pathspace as ps

# forwards of one `verify`, the capture included (18 and 20 today)
BUDGET = 60


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("mode", ["eval", "train"])
def test_a_residual_network_is_verified_within_its_budget(mode: str, batch: int) -> None:
    model, _, _ = load()["resnet18"].make(mode)
    with stem_runs() as runs:
        certificate = ps.verify(model, torch.randn(batch, 3, 64, 64))
    assert certificate.holds is not False
    assert 5 < len(runs) <= BUDGET, len(runs)
