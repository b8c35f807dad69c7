"""Models without numbers: what is said of them is what is said of the same
model with generic numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import pathspace as ps


class Positions(nn.Module):
    """A table read at positions that lie in a buffer, under a mask that lies in another."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.mix = nn.Embedding(8, 4), nn.Linear(5, 5)
        self.out = nn.Linear(4, 3)
        self.register_buffer("places", torch.arange(5))
        self.register_buffer("mask", torch.ones(5, 5).tril())

    def forward(self, x: Tensor) -> Tensor:
        mixed = nn.functional.linear(
            (x + self.table(self.places)).mT, self.mix.weight * self.mask
        ).mT
        return self.out(mixed.relu())


def norms() -> nn.Module:
    layers = [
        nn.Conv2d(3, 6, 3, padding=1),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.Conv2d(6, 4, 3, groups=2),
        nn.GroupNorm(2, 4),
    ]
    return nn.Sequential(
        *layers, nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2)
    ).eval()


MODELS: list[tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = [
    (norms, lambda: torch.randn(2, 3, 8, 8)),
    (Positions, lambda: torch.randn(2, 5, 4)),
    (
        lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, norm_first=True),
        lambda: torch.randn(2, 3, 8),
    ),
]


def drawn(make: Callable[[], nn.Module]) -> nn.Module:
    """The model with numbers other than 0, as those without values are taken to be."""
    model = make()
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    return model


def document(model: nn.Module, inputs: Tensor) -> Any:
    return ps.proof(ps.trace(model, inputs).skeleton())


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("make", "inputs"), MODELS)
def test_structure_is_that_of_the_model_with_numbers(make: Any, inputs: Any) -> None:
    model, x = drawn(make), inputs()
    expected = document(model, x)
    with ps.without_weights():
        bare = make()
    assert all(parameter.is_meta for parameter in bare.parameters())
    assert not any(buffer.is_meta for buffer in bare.buffers())
    assert document(bare, x.to("meta")) == expected
    certificate = ps.verify(bare, x)
    assert certificate.holds and (
        certificate.theorem2["holds"],
        certificate.invariance["holds"],
    ) == (None, None)
    assert "no values" in certificate.invariance["evidence"]
    assert ps.check(expected, model=model, args=(x,)).accepted


@pytest.mark.parametrize(
    ("make", "inputs"), [entry for entry in MODELS if entry[0] is not Positions]
)
def test_meta_and_fake_tensors_alike(make: Any, inputs: Any) -> None:
    expected = document(drawn(make), inputs())
    with torch.device("meta"):
        model, x = make(), inputs()
        skeleton = ps.trace(model, x).skeleton()
    assert ps.proof(skeleton) == document(model, x) == expected
    with FakeTensorMode():
        model, x = make(), inputs()
        skeleton = ps.trace(model, x).skeleton()
    assert ps.proof(skeleton) == document(model, x) == expected


def test_tables_without_values_are_missed() -> None:
    with torch.device("meta"):
        lost = Positions()
    x = torch.randn(2, 5, 4)
    with pytest.raises(ps.InputError, match=r"buffer 'places' has no values.*without_weights"):
        ps.trace(lost, x)


def test_what_needs_numbers_says_so() -> None:
    with torch.device("meta"):
        model, x = norms(), torch.zeros(2, 3, 8, 8)
    graph = ps.trace(model, x)
    skeleton = graph.skeleton()
    basis = skeleton.basis()
    calls: list[Callable[[], Any]] = [
        lambda: graph.skeleton(rule="magnitude"),
        basis.values,
        lambda: basis[0].value,
        skeleton.prefixes,
        lambda: ps.balance_(model, graph),
        lambda: ps.path_norm(graph),
        lambda: ps.canonicalise_(model, skeleton),
    ]
    for call in calls:
        with pytest.raises(ps.InputError, match=r"without values.*load or initialise"):
            call()
    assert len(basis[0].counting_vector) == graph.num_weights
    assert basis.counting_matrix().shape == (graph.dimension, graph.num_weights)


def test_parameters_that_come_to_life_later_are_the_models() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    graph = ps.trace(model, torch.zeros(1, 3))
    model.to_empty(device="cpu")
    for layer in (model[0], model[2]):
        layer.reset_parameters()
    x = torch.randn(5, 3)
    before = model(x)
    ps.balance_(ps.rescale_(model, graph, torch.randn(graph.num_units)), graph)
    torch.testing.assert_close(model(x), before)


def test_a_large_model_costs_no_memory() -> None:
    with ps.without_weights():
        model = nn.Sequential(nn.Linear(10**6, 10**5), nn.ReLU(), nn.Linear(10**5, 10**6))
    graph = ps.trace(model, torch.zeros(1, 10**6))
    assert (graph.num_units, graph.num_weights) == (10**5, 2 * 10**11 + 10**5 + 10**6)


@pytest.mark.slow
def test_trees_of_large_models_take_memory_by_rows_and_columns() -> None:
    with ps.without_weights():
        model = nn.Sequential(nn.Linear(4, 8192), nn.ReLU(), nn.Linear(8192, 2_000_000))
    skeleton = ps.trace(model, torch.zeros(1, 4)).skeleton()
    # 16 billion edges lead to the outputs; the j-th unit takes the j-th one on each side
    assert skeleton.tree_in.index[1:].tolist() == [4 * j + j % 4 for j in range(8192)]
    assert skeleton.tree_out.index[1:].tolist() == [8192 * j + j for j in range(8192)]
    assert ps.check(ps.proof(skeleton)).dimension == skeleton.graph.dimension
