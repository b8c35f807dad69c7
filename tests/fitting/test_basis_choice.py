"""Matrices of feature spaces in which rounding costs least."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from rotations.test_spaces import Llama
from torch import Tensor, nn

import pathspace as ps
from pathspace.errors import InputError, InputTypeError
from pathspace.fitting.basis_choice import BasisDescent
from pathspace.fitting.calibration import Calibrated
from pathspace.fitting.weight_inputs import WeightInputs

pytestmark = pytest.mark.filterwarnings("ignore")
BOTH = ps.Noise(bits=6, activations=6)


def with_outliers() -> tuple[nn.Module, list[Tensor]]:
    """A language model with one large feature in its stream."""
    torch.manual_seed(0)
    model = Llama()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
        next(model.parameters())[:, 1] *= 20
    return model.eval(), list(torch.randint(11, (36, 6)).split(6))


@pytest.mark.parametrize(
    "noise", [ps.Noise(bits=6), ps.Noise(bits=None, activations=6), BOTH, ps.Noise(4, "channel")]
)
def test_less_noise_in_the_same_function(noise: ps.Noise) -> None:
    model, words = with_outliers()
    spaces = ps.spaces(model, words[0])
    kept = {name: p.clone() for name, p in model.named_parameters()}
    chosen = ps.choose_gauge(model, spaces, noise, words, steps=40)
    assert chosen.helped
    assert chosen.after > chosen.before + 1
    assert chosen.after >= chosen.hadamard - 0.5
    assert chosen.held_out == 2
    assert all(torch.equal(p, kept[name]) for name, p in model.named_parameters())
    turned = ps.rotate_(deepcopy(model).double(), spaces, chosen)
    wanted = model.double()(words[0])
    assert (turned(words[0]) - wanted).abs().max() < 1e-5 * wanted.abs().max()


def test_the_cost_in_another_basis_is_that_of_the_rotated_model() -> None:
    model, words = with_outliers()
    model = model.double()
    spaces = ps.spaces(model, words[0])
    turned = ps.rotate_(deepcopy(model), spaces, "random", seed=5)
    costs = []
    for own, first in ((model, dict(_elements(spaces, 5))), (turned, {})):
        batches = Calibrated(own, words).batches
        costs.append(BasisDescent(own, spaces, BOTH, batches, first).total(1000.0))
    assert costs[0] == pytest.approx(costs[1], rel=1e-3)


def _elements(spaces: Any, seed: int) -> dict[str, Tensor]:
    from pathspace.rotations.rotate import matrices

    return matrices(spaces, "random", seed)


def test_the_step_of_a_group_leads_down() -> None:
    model, words = with_outliers()
    spaces = ps.spaces(model, words[0])
    batches = Calibrated(model, words).batches
    descent = BasisDescent(model, spaces, BOTH, batches, _elements(spaces, 1))
    before = descent.total(16.0)
    descent.minimum(30)
    assert descent.total(16.0) < 0.8 * before


def test_a_model_without_free_spaces_stays_as_it_is() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.GELU(), nn.Linear(6, 2))
    chosen = ps.choose_gauge(
        model, ps.spaces(model, torch.ones(4)), BOTH, list(torch.randn(2, 30, 4))
    )
    assert not chosen.helped
    assert not dict(chosen)
    assert "no basis is safely better" in str(chosen)


def test_inputs_of_weights_are_seen_however_they_are_multiplied() -> None:
    wide, square = torch.randn(3, 4), torch.randn(4, 4)
    x, seen = torch.randn(2, 4), []

    def look(name: str, dim: int, given: Tensor) -> Tensor:
        seen.append((name, dim, torch.equal(given, x)))
        return 2 * given

    with WeightInputs({"wide": wide, "square": square}, look):
        ways = [
            nn.functional.linear(x, wide),
            x @ wide.T,
            torch.addmm(torch.zeros(4), x, square),
            x.matmul(square.T),
        ]
    assert seen == [("wide", 1, True), ("wide", 1, True), ("square", 0, True), ("square", 1, True)]
    once = (x @ wide.T, x @ wide.T, x @ square, x @ square.T)
    assert all(torch.allclose(way, 2 * one) for way, one in zip(ways, once, strict=True))


def test_what_cannot_be_chosen_is_refused() -> None:
    model, words = with_outliers()
    spaces, graph = ps.spaces(model, words[0]), ps.trace(model, words[0])
    with pytest.raises(InputTypeError, match=r"expected ps\.Noise"):
        ps.choose_gauge(model, spaces, ps.Range(), words)  # type: ignore[call-overload]
    with pytest.raises(InputError, match=r"batches \(0\), expected two"):
        ps.choose_gauge(model, spaces, BOTH, None)
    with pytest.raises(InputError, match=r"batches \(1\), expected two"):
        ps.choose_gauge(model, spaces, BOTH, words[:1])
    with pytest.raises(InputError, match=r"need ps\.spaces"):
        ps.choose_gauge(model, graph, BOTH, words)


class ByKeyword(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(input=x, weight=self.weight, bias=self.bias)


def test_inputs_given_by_keyword_are_rounded() -> None:
    model, x = nn.Sequential(ByKeyword(4, 8), ByKeyword(8, 2)), torch.randn(6, 4)
    noise = ps.Noise(bits=None, activations=4)
    assert ps.choose_gauge(model, ps.spaces(model, x), noise, [x, x], steps=1).before < 100
    assert not x.requires_grad


def test_noise_of_nothing_is_refused() -> None:
    model, x = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)), torch.randn(6, 4)
    with pytest.raises(InputError, match="Noise found"):
        ps.choose_gauge(model, ps.spaces(model, x), ps.Noise(bits=None), x)
