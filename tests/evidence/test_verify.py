"""Certificates: what they say of sound models, and that unsound claims are found out."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import CASES, Between, network
from torch import Tensor, nn

import pathspace as ps

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
    before = {key: value.clone() for key, value in model.state_dict().items()}
    certificate = ps.verify(model, *args)
    assert certificate.holds, certificate
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    data = json.loads(certificate.to_json())
    assert data.keys() >= KEYS
    assert data["rank"] in (data["dimension"], None)
    assert data["invariance"]["max_relative_violation"] <= data["invariance"]["tolerance"]
    assert str(data["dimension"]) in str(certificate).replace(",", "")


def test_eps_of_a_normalisation_is_reported() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, eps=1e-2), nn.ReLU(), nn.Flatten(), nn.Linear(64, 2)
    )
    x = torch.randn(4, 3, 6, 6)
    certificate = ps.verify(model, x)
    assert certificate.holds
    assert certificate.units == 8
    assert certificate.invariance["trials"]["tried"] > 0
    assert (
        certificate.invariance["rescaling_as_it_stands"]
        > 1e-3
        > certificate.invariance["rescaling"]
    )
    respected = ps.verify(model, x, norm_eps="respect")
    assert respected.holds
    assert respected.units == 4
    assert respected.invariance["rescaling_as_it_stands"] < 1e-10


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
    single = Between(lambda h: torch.relu(h).float() + torch.zeros(6, dtype=torch.float32))
    certificate = ps.verify(single, torch.randn(2, 4))
    assert certificate.holds
    assert certificate.invariance["dtype"] == "float32"


def test_large_models_are_verified_in_place_and_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pathspace.evidence.bench.LARGE", 10)
    monkeypatch.setattr("pathspace.evidence.theorems.MATRIX_WEIGHTS", 10)
    model = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    certificate = ps.verify(model, torch.randn(4, 3))
    assert certificate.holds
    assert (certificate.method, certificate.rank) == ("certificate", None)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


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


def two(between: Callable[[Any, Tensor], Tensor]) -> nn.Module:
    """Two layers, and what happens between them."""
    return network(
        lambda net, x: net.b(between(net, x)),
        a=nn.Linear(3, 4), b=nn.Linear(4, 2), other=nn.Linear(3, 4),
    )  # fmt: skip


@pytest.mark.parametrize("gate", [torch.arange(1, 5), torch.tensor([True, False, True, True])])
def test_parameters_of_whole_numbers_are_constants(gate: Tensor) -> None:
    model = two(lambda model, x: torch.relu(model.a(x)) * model.gate)
    model.gate, x = nn.Parameter(gate, requires_grad=False), torch.randn(5, 3)
    certificate = ps.verify(model, x)
    assert certificate.holds
    assert (certificate.units, certificate.parameters["pinned"]) == (4, 4)
    before = model(x)
    ps.rescale_(model, ps.trace(model, x), torch.randn(4))
    assert torch.allclose(model(x), before, rtol=1e-5, atol=1e-6)


def test_a_frozen_layer_used_several_times_has_its_statistics_once() -> None:
    def loop(net: Any, x: Tensor) -> Tensor:
        h = torch.zeros(x.shape[1], 3, dtype=x.dtype)
        for step in x:
            h = torch.relu(net.norm(net.a(step) + net.w(h)))
        return net.out(h)

    model = network(
        loop, a=nn.Linear(2, 3), w=nn.Linear(3, 3), norm=nn.BatchNorm1d(3), out=nn.Linear(3, 1)
    )
    x = torch.randn(3, 6, 2)
    model(x)
    certificate = ps.verify(model.eval(), x)
    assert certificate.holds
    document = ps.proof(ps.trace(model, x).skeleton())
    assert len(document["statistics"]) == 1 and ps.check(document, model=model, args=(x,)).accepted


@pytest.mark.parametrize("behind", [nn.Identity(), nn.LayerNorm(3), nn.ReLU()])
@pytest.mark.parametrize("seed", range(3))
def test_outputs_that_are_rounding_alone_refute_nothing(behind: nn.Module, seed: int) -> None:
    torch.manual_seed(seed)
    # the mean of what an instance norm has centred, which is 0 but for rounding
    centred = network(
        lambda net, x: net.behind(net.norm(net.other(net.one(x).relu())).mean((2, 3))),
        one=nn.Conv2d(2, 3, 3), other=nn.Conv2d(3, 3, 3), norm=nn.InstanceNorm2d(3), behind=behind,
    )  # fmt: skip
    certificate = ps.verify(centred, torch.randn(2, 2, 9, 9))
    assert certificate.holds and certificate.theorem2["holds"] is None
    assert "rounding decides, and nothing can be said" in certificate.theorem2["evidence"]


def test_a_graph_that_was_traced_already_is_not_traced_again() -> None:
    model, x = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)), torch.randn(5, 3)
    graph = ps.trace(model, x, sizes="given")
    own, given = ps.verify(model, x).to_dict(), ps.verify(model, x, graph=graph).to_dict()
    assert own | {"seconds": 0} == given | {"seconds": 0}
    with pytest.raises(ps.InputError, match="graph that does not belong to this"):
        ps.verify(copy.deepcopy(model), x, graph=graph)
    with pytest.raises(ps.InputTypeError, match="as its graph"):
        ps.verify(model, x, graph=model)  # type: ignore[arg-type]


def test_sizes_that_the_graph_does_not_know_are_no_obstacle() -> None:
    """Rows are repeated by a constant tensor, so that the graph does not know their number."""
    repeats = torch.tensor([1, 0, 2])
    certificate = ps.verify(
        two(lambda net, x: net.a(x).relu().repeat_interleave(repeats, 0)), torch.randn(3, 3)
    )
    assert certificate.holds and certificate.units == 4
