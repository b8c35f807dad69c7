"""Changes of basis: what is written, what is refused, and parameters with two names."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import pathspace as ps
from pathspace.errors import InputError
from pathspace.rotations.elements import hadamard


def chain(size: int = 6) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, size), nn.Linear(size, 2)).double()


def normed(norm: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 6), norm, nn.Linear(6, 2)).double()
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.copy_(torch.randn(6))
    return model


X = torch.randn(5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def test_a_matrix_of_ones_own() -> None:
    model = chain()
    a = torch.randn(6, 6, dtype=torch.float64)
    turned = ps.rotate_(deepcopy(model), ps.spaces(model, X), {"0.weight": a})
    torch.testing.assert_close(turned[0].weight, a @ model[0].weight)
    torch.testing.assert_close(turned[0].bias, a @ model[0].bias)
    torch.testing.assert_close(turned[1].weight, model[1].weight @ a.inverse())
    torch.testing.assert_close(turned(X), model(X))


@pytest.mark.parametrize("norm", [nn.LayerNorm(6), nn.RMSNorm(6)])
def test_gains_of_both_signs_are_folded_into_readers(norm: nn.Module) -> None:
    model = normed(norm)
    turned = ps.rotate_(deepcopy(model), ps.spaces(model, X), "random")
    torch.testing.assert_close(turned(X), model(X))
    assert bool((turned[1].weight == 1).all())


def test_a_gain_with_one_added() -> None:
    class Gained(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(6))

        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.rms_norm(x, (6,)) * (1.0 + self.weight)

    model = normed(Gained())
    found = ps.spaces(model, X)
    assert found["0.weight"].gains == ("1.weight",)
    turned = ps.rotate_(deepcopy(model), found, "random")
    torch.testing.assert_close(turned(X), model(X))
    assert bool((turned[1].weight == 0).all())


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("1", 0.0, "a gain of 0 in '1.weight'"),
        ("0", torch.nan, "1 values in '0.weight' that are NaN"),
    ],
)
def test_numbers_that_would_spread_are_refused_and_nothing_is_lost(
    name: str, value: float, said: str
) -> None:
    model = normed(nn.LayerNorm(6))
    with torch.no_grad():
        model.get_parameter(f"{name}.weight").view(-1)[2] = value
    before = deepcopy(model.state_dict())
    with pytest.raises(InputError, match=said):
        ps.rotate_(model, ps.spaces(model, X), "random")
    after = model.state_dict()
    assert all(torch.allclose(before[k], after[k], 0, 0, equal_nan=True) for k in before)


class Tied(nn.Module):
    def __init__(self, norm: bool) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(7, 6), nn.Linear(6, 7, bias=False)
        self.head.weight = self.table.weight
        self.norm = nn.RMSNorm(6, elementwise_affine=norm)
        self.config = SimpleNamespace(tie_word_embeddings=True)
        if norm:
            nn.init.normal_(self.norm.weight)

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.norm(self.table(words)))


@pytest.mark.parametrize("gain", [False, True])
def test_a_tie_is_cut_where_a_gain_needs_it(gain: bool, tmp_path: Path) -> None:
    model, words = Tied(gain).double(), torch.arange(7)
    before = model(words)
    found = ps.spaces(model, words)
    assert [(space.name, space.group) for space in found.free] == [("table.weight", "O")]
    state = {name: own for name, own in model.state_dict().items() if name != "head.weight"}
    save_file(state, tmp_path / "old.safetensors")
    ps.rotate_files(found, "hadamard", tmp_path / "old.safetensors", tmp_path / "new.safetensors")
    ps.rotate_(model, found, "hadamard")
    state = {name: own for name, own in model.state_dict().items() if gain or name in state}
    written = load_file(tmp_path / "new.safetensors")
    torch.testing.assert_close(written, state, rtol=0, atol=0)
    torch.testing.assert_close(model(words), before)
    assert (model.head.weight is model.table.weight) is not gain
    assert model.config.tie_word_embeddings is not gain


def test_a_tie_stays_that_the_code_asks_for() -> None:
    """Some models multiply what a head reads that is tied to the table."""

    class Scaled(Tied):
        def forward(self, words: Tensor) -> Tensor:
            factor = 6**-0.5 if self.config.tie_word_embeddings else 1.0
            return self.head(factor * self.norm(self.table(words)))

    model, words = Scaled(True).double(), torch.arange(7)
    assert ps.spaces(model, words).free == []
    model, before = Scaled(False).double(), Scaled(False).double()
    before.load_state_dict(model.state_dict())
    found = ps.spaces(model, words)
    assert [(space.name, space.group) for space in found.free] == [("table.weight", "O")]
    ps.rotate_(model, found, "random")
    torch.testing.assert_close(model(words), before(words))
    assert model.head.weight is model.table.weight


@pytest.mark.parametrize("size", [1, 2, 6, 8, 12, 64])
def test_hadamard_matrices_spread_an_entry(size: int) -> None:
    matrix = hadamard(size, torch.Generator().manual_seed(0))
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(size, dtype=torch.float64))
    if size & (size - 1) == 0:
        torch.testing.assert_close(matrix.abs(), torch.full_like(matrix, size**-0.5))


def test_complex_numbers_for_pairs() -> None:
    class Turned(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([-x[..., 1:], x[..., :1]], -1)

    model = nn.Sequential(nn.Linear(3, 2), Turned(), nn.Linear(2, 2)).double()
    found = ps.spaces(model, X)
    assert found["0.weight"].group == "complex"
    turned = ps.rotate_(deepcopy(model), found, {"0.weight": torch.tensor([2.0 + 3.0j])})
    torch.testing.assert_close(turned(X), model(X))
    assert not torch.allclose(turned[0].weight, model[0].weight)


BAD = {
    "an unknown space": ({"1.bias": "random"}, "the space '1.bias'"),
    "a rigid space": ({"1.weight": "random"}, "it is rigid"),
    "a word": ({"0.weight": "skew"}, "expected a matrix, 'random' or 'hadamard'"),
    "a shape": ({"0.weight": torch.eye(3)}, "expected"),
    "no inverse": ({"0.weight": torch.zeros(6, 6)}, "not in its group GL"),
    "no number": ({"0.weight": torch.full((6, 6), float("nan"))}, "not in its group GL"),
    "complex numbers": ({"0.weight": torch.ones(6) * 1j}, "pairs of features"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name: str) -> None:
    elements, sentence = BAD[name]
    model = chain()
    with pytest.raises(InputError, match=sentence):
        ps.rotate_(model, ps.spaces(model, X), elements)


def test_a_matrix_outside_of_its_group_is_refused() -> None:
    model = normed(nn.LayerNorm(6))
    found = ps.spaces(model, X)
    for wrong in (2 * torch.eye(6), -torch.eye(6)):
        with pytest.raises(InputError, match="not in its group O1"):
            ps.rotate_(model, found, {"0.weight": wrong})


def test_another_model_is_refused() -> None:
    found = ps.spaces(chain(), X)
    with pytest.raises(InputError, match=r"a model with 0, expected the model of"):
        ps.rotate_(nn.Linear(3, 2), found, "random")
    wider = nn.Sequential(*chain(), nn.Linear(2, 2))
    for wrong in (wider, nn.Linear(3, 2)):
        with pytest.raises(InputError, match="expected the model of these spaces"):
            ps.rotate_(wrong, found, "random")
        with pytest.raises(InputError, match="rotation_recipe found spaces"):
            ps.rotation_recipe(wrong, found)
    with pytest.raises(InputError, match=r"rotate_ found .* without values"):
        ps.rotate_(chain().to("meta"), found, "random")
