"""Certificates: what they say of sound models, and that unsound claims are found out."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from cases import CASES
from torch import Tensor, nn

import pathspace as ps
from pathspace import invariance
from pathspace.inference.registry import RULES
from pathspace.theorems import tree_problem

KEYS = {
    "weights",
    "units",
    "dimension",
    "basis_paths",
    "rank",
    "method",
    "theorem1",
    "theorem2",
    "theorem3",
    "invariance",
    "pinned",
    "seconds",
}


@pytest.mark.parametrize("name", sorted(CASES)[::4])
def test_certificates_hold_and_are_json(name: str) -> None:
    model, args = CASES[name]()
    certificate = ps.verify(model, *args)
    assert certificate.holds, certificate
    data = json.loads(certificate.to_json())
    assert data.keys() >= KEYS
    assert data["rank"] in (data["dimension"], None)
    assert data["invariance"]["max_relative_violation"] <= data["invariance"]["tolerance"]
    assert str(data["dimension"]) in str(certificate).replace(",", "")


def test_an_unsound_rule_is_refuted() -> None:
    """GELU declared homogeneous: the symmetries it would have are not there."""
    known = RULES["aten.gelu"]
    RULES["aten.gelu"] = lambda semantics, x, **kwargs: x
    try:
        model = nn.Sequential(nn.Linear(3, 4), nn.GELU(), nn.Linear(4, 2))
        certificate = ps.verify(model, torch.randn(6, 3))
    finally:
        RULES["aten.gelu"] = known
    assert certificate.units == 4
    assert certificate.invariance["holds"] is False
    assert not certificate.holds
    assert ps.verify(model, torch.randn(6, 3)).holds


def test_eps_of_a_normalisation_is_reported() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, eps=1e-2), nn.ReLU(), nn.Flatten(), nn.Linear(64, 2))
    x = torch.randn(4, 3, 6, 6)
    certificate = ps.verify(model, x)
    assert certificate.holds
    assert certificate.units == 8
    assert certificate.invariance["rescaling_as_it_stands"] > 1e-3 > certificate.invariance["rescaling"]
    respected = ps.verify(model, x, norm_eps="respect")
    assert respected.holds
    assert respected.units == 4
    assert respected.invariance["rescaling_as_it_stands"] < 1e-10


def test_a_broken_tree_is_noticed() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    graph = ps.trace(model, torch.randn(1, 3))
    tree = graph.skeleton().tree_in
    assert tree_problem(graph, tree) is None
    tree.index[2] = tree.index[1]
    assert tree_problem(graph, tree) is not None


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_weights_that_are_no_numbers_are_refused(poison: float) -> None:
    model = nn.Linear(3, 2)
    with torch.no_grad():
        model.weight[0, 0] = poison
    with pytest.raises(ps.InputError, match="weight"):
        ps.verify(model, torch.randn(1, 3))
    with pytest.raises(ps.InputError, match="inputs"):
        ps.verify(nn.Linear(3, 2), torch.full((1, 3), poison))


def test_a_model_that_insists_on_single_precision() -> None:
    class Single(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.second(torch.relu(self.first(x)).float() + torch.zeros(4, dtype=torch.float32))

    certificate = ps.verify(Single(), torch.randn(2, 3))
    assert certificate.holds
    assert certificate.invariance["dtype"] == "float32"


def test_large_models_are_verified_in_place_and_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(invariance, "LARGE", 10)
    monkeypatch.setattr("pathspace.theorems.LARGE", 10)
    monkeypatch.setattr("pathspace.theorems.MATRIX_WEIGHTS", 10)
    model = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    certificate = ps.verify(model, torch.randn(4, 3))
    assert certificate.holds
    assert (certificate.method, certificate.rank) == ("certificate", None)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_rescaling_keeps_the_function_in_eval_mode() -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, eps=1e-20), nn.ReLU(), nn.Flatten(), nn.Linear(64, 2))
    model(torch.randn(8, 3, 6, 6))
    model = model.double().eval()
    x = torch.randn(2, 3, 6, 6).double()
    graph = ps.trace(model, x)
    before = model(x)
    phi = torch.from_numpy(np.random.default_rng(0).normal(size=graph.num_units))
    ps.rescale(model, graph, phi)
    assert torch.allclose(model(x), before, rtol=1e-10)
    with pytest.raises(ps.InputError, match="phi"):
        ps.rescale(model, graph, phi[1:])


def test_products_of_scales_do_not_hide_that_a_large_basis_is_triangular() -> None:
    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.out = nn.Linear(60, 30), nn.Linear(60, 30), nn.Linear(30, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.out(self.a(x).relu() * self.b(x).relu())

    certificate = ps.verify(Gated(), torch.randn(4, 60))
    assert certificate.method == "certificate" and certificate.units == 60 and certificate.holds


def test_a_head_of_zeros_is_no_excuse() -> None:
    model = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2))
    nn.init.zeros_(model[2].weight)
    nn.init.zeros_(model[2].bias)
    certificate = ps.verify(model, torch.randn(4, 3))
    assert certificate.holds
    assert certificate.invariance["weights_drawn"] == 12
    assert not certificate.invariance["vacuous"]
    # the model itself is left as it was
    assert not model[2].weight.any()


def test_outputs_of_zero_are_said_to_show_nothing() -> None:
    model = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2, bias=False))
    with torch.no_grad():
        model[0].weight.zero_()[0, 0] = 1e-30
        model[0].bias.fill_(-1.0)
    certificate = ps.verify(model, torch.randn(4, 3))
    assert certificate.invariance["vacuous"]
    assert "nothing could have been seen to change" in certificate.invariance["evidence"]


def test_frozen_batch_norm_is_differentiated_by_its_statistics() -> None:
    model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 2)).eval()
    with torch.no_grad():
        model[1].running_mean.normal_()
        model[1].running_var.uniform_(0.5, 2.0)
    certificate = ps.verify(model, torch.randn(4, 3))
    assert certificate.invariance["gradient_balance"] is not None
    assert certificate.invariance["gradient_balance"] < 1e-12
