"""Predicted and measured decrease of the loss, and saddles."""

from __future__ import annotations

import copy
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import prune

from pathspace.diagnostics.signal.growth import deepen, predict_growth, rank_growths, widen
from pathspace.errors import InputError


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
        wider, names = widen(model, 0, 4, seed=seed)
        assert torch.allclose(wider(x), model(x))
        found = predict_growth(wider, names, x, y)
        assert found.measured == pytest.approx(found.predicted, abs=1e-10)
        assert found.linear_step == pytest.approx(found.predicted, abs=1e-10)
        assert found.predicted > 1e-3 and not found.saddle and found.rank == 4
        # the same by the normal equations, with the uncentred second moment
        new = torch.tanh(wider[0].new_into(x)).detach().numpy()
        error = (y - model(x)).detach().numpy()
        a, b = new.T @ new / 80, new.T @ error / 80
        assert found.predicted == pytest.approx(
            float((b.T @ np.linalg.pinv(a) @ b)[0, 0]) / 2, abs=1e-10
        )
        centred = a - new.mean(0)[:, None] * new.mean(0)
        assert abs(float((b.T @ np.linalg.pinv(centred) @ b)[0, 0]) / 2 - found.predicted) > 1e-6


def test_dependent_candidates_need_the_pseudoinverse() -> None:
    model, x, y = trained()
    wider, names = widen(model, 0, 3)
    with torch.no_grad():
        wider[0].new_into.weight[1] = wider[0].new_into.weight[0]
        wider[0].new_into.bias[1] = wider[0].new_into.bias[0]
    found = predict_growth(wider, names, x, y)
    assert found.rank == 2 and found.measured == pytest.approx(found.predicted, abs=1e-10)


@pytest.mark.parametrize("act", [nn.Tanh(), nn.Sigmoid(), nn.SiLU()])
def test_a_unit_at_zero_is_a_saddle(act: nn.Module) -> None:
    model, x, y = trained(act)
    wider, names = widen(model, 0, 1, start="zero")
    found = predict_growth(wider, names, x, y, fit=False)
    assert found.saddle and found.predicted < 1e-14
    assert found.curvature is not None and found.curvature < -1e-6 and "saddle" in found.remark


def test_a_relu_at_zero_is_stationary_and_said_to_be() -> None:
    model, x, y = trained(nn.ReLU())
    wider, names = widen(model, 0, 1, start="zero")
    found = predict_growth(wider, names, x, y, fit=False)
    assert found.predicted < 1e-14 and "stationary" in found.remark and not found.saddle


def test_linearisation_beyond_its_range_is_flagged() -> None:
    class Wave(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.phi = nn.Parameter(torch.zeros(1, dtype=torch.float64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.sin(6 * self.phi) + 0 * x

    x = torch.zeros(4, 1).double()
    found = predict_growth(Wave(), "phi", x, torch.full((4, 1), 4.5).double())
    assert found.loss == pytest.approx(10.125) and found.loss - found.linear_step == pytest.approx(
        14.97, abs=0.05
    )
    assert "far from linear" in found.remark and found.measured == pytest.approx(
        10.125 - 3.5**2 / 2, abs=1e-8
    )


def test_ranking() -> None:
    model, x, y = trained()
    candidates = {f"{units} units": widen(model, 0, units) for units in (1, 4, 8)}
    candidates["zero"] = widen(model, 0, 1, start="zero")
    table = rank_growths(candidates, x, y, fit=False)
    assert [row.candidate for row in table] == ["8 units", "4 units", "1 units", "zero"]
    assert table.notes[-1].startswith("zero: saddle")


def test_deeper_chains() -> None:
    model, x, y = trained()
    deeper = deepen(model, 1, 3, nn.Tanh(), residual=True)
    assert torch.equal(deeper(x), model(x))
    assert len(deepen(model, 1, 3, nn.Tanh())) == 5
    found = predict_growth(deeper, "2.out.*", x, y)
    assert found.measured == pytest.approx(found.predicted, abs=1e-10) and found.predicted > 0


def test_the_model_is_left_alone_and_refusals() -> None:
    model, x, y = trained()
    before = copy.deepcopy(model.state_dict())
    predict_growth(model, "2.*", x, y)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    with pytest.raises(InputError, match="matches 'new'"):
        predict_growth(model, "new", x, y)
    with pytest.raises(InputError, match="that of the outputs"):
        predict_growth(model, "2.*", x, y[:, 0])
    with pytest.raises(InputError, match="expected Linear"):
        widen(model, 1, 2)
    with pytest.raises(InputError, match="start="):
        widen(model, 0, 2, start="one")


@pytest.mark.parametrize(
    "hooked", [nn.utils.spectral_norm, lambda layer: prune.l1_unstructured(layer, "weight", 0.3)]
)
def test_models_that_hold_tensors_of_a_pass_are_grown(
    hooked: Callable[[nn.Module], nn.Module],
) -> None:
    """``copy.deepcopy`` cannot copy such models."""
    torch.manual_seed(0)
    model, x = (
        nn.Sequential(
            nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2)
        ).eval(),
        torch.randn(5, 4),
    )
    for layer in (model[0], model[4]):
        hooked(layer)
    want = model(x)
    for wide in (widen(model, 0, 3)[0], widen(model, 2, 3, start="zero")[0]):
        torch.testing.assert_close(wide.eval()(x), want)
    for deep in (
        deepen(model, 1, 8, nn.Tanh(), residual=True),
        deepen(model, 3, 8, model[3], residual=True),
    ):
        torch.testing.assert_close(deep.eval()(x), want)
