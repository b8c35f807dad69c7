"""Predicted and measured decrease of the loss by new parameters, and saddles."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from notebook import notebook
from torch import nn

page = notebook("grow")


def trained(act: nn.Module | None = None) -> tuple[nn.Sequential, torch.Tensor, torch.Tensor]:
    """A net whose output layer is the best fit of its features."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 3), act or nn.Tanh(), nn.Linear(3, 1)).double()
    x = torch.randn(80, 2).double()
    y = torch.sin(2 * x[:, :1]) + x[:, 1:] ** 2
    features = torch.cat([model[:2](x), torch.ones(80, 1).double()], 1).detach()
    best = torch.linalg.lstsq(features, y).solution
    with torch.no_grad():
        model[2].weight.copy_(best[:3].T)
        model[2].bias.copy_(best[3])
    return model, x, y


def test_linear_growth_is_predicted_to_1e_10() -> None:
    model, x, y = trained()
    for seed in range(3):
        wider = page.Widened(*model, 4, seed=seed)
        assert torch.allclose(wider(x), model(x))
        found = page.predict_growth(wider, "new_out.*", x, y)
        assert found.measured == pytest.approx(found.predicted, abs=1e-10)
        assert found.linear_step == pytest.approx(found.predicted, abs=1e-10)
        assert found.predicted > 1e-3 and not found.saddle and found.rank == 4
        # the same by the normal equations, with the uncentred second moment
        new = torch.tanh(wider.new_into(x)).detach().numpy()
        error = (y - model(x)).detach().numpy()
        a, b = new.T @ new / 80, new.T @ error / 80
        exact = float((b.T @ np.linalg.pinv(a) @ b)[0, 0]) / 2
        assert found.predicted == pytest.approx(exact, abs=1e-10)


def test_dependent_candidates_need_the_pseudoinverse() -> None:
    model, x, y = trained()
    wider = page.Widened(*model, 3)
    with torch.no_grad():
        wider.new_into.weight[1] = wider.new_into.weight[0]
        wider.new_into.bias[1] = wider.new_into.bias[0]
    found = page.predict_growth(wider, "new_out.*", x, y)
    assert found.rank == 2 and found.measured == pytest.approx(found.predicted, abs=1e-10)


@pytest.mark.parametrize("act", [nn.Tanh(), nn.Sigmoid(), nn.SiLU()])
def test_a_unit_at_zero_is_a_saddle(act: nn.Module) -> None:
    model, x, y = trained(act)
    found = page.predict_growth(page.Widened(*model, 1, zero=True), "new_*", x, y)
    assert found.saddle and found.predicted < 1e-14 and found.curvature < -1e-6
