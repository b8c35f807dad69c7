"""The models of the demo: everything that is said of path spaces holds for them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import pathspace as ps
from pathspace.errors import InputError
from pathspace.training.experiments.models import (
    CifarResNet,
    RecurrentCNN,
    ReluRNN,
    StackedReluLM,
    Toy,
    Translator,
    residual_cnn,
    stacked_rnn,
)
from pathspace.training.experiments.models.resnet import ResNetBlock

pytestmark = pytest.mark.usefixtures("no_rule_fails")

Example = tuple[torch.nn.Module, tuple[torch.Tensor, ...]]


def relu_rnn() -> Example:
    return ReluRNN(8, 100, 10), (torch.randn(2, 8, 8),)


def toy() -> Example:
    return Toy(), (torch.randn(4, 2),)


def language_model() -> Example:
    return StackedReluLM(12, embedding=6, hidden=8), (torch.randint(12, (2, 5)),)


def recurrent_cnn() -> Example:
    return RecurrentCNN(1, 6, 10, layers=2).eval(), (torch.randn(2, 1, 8, 8),)


def cifar_resnet() -> Example:
    return CifarResNet(20, width=4).eval(), (torch.randn(2, 3, 8, 8),)


def translator() -> Example:
    return Translator(20, 4, 8, 2, 12, layers=1), (torch.randint(1, 20, (2, 9)),)


PAPERS = [residual_cnn, stacked_rnn, toy, language_model, recurrent_cnn, cifar_resnet, translator]


@pytest.mark.parametrize(
    ("build", "weights", "units"),
    [
        # the stream is one class per channel, the inside of each block another
        (residual_cnn, 28 * 6 + 2 * (55 * 5 + 46 * 6) + 7 * 4, 6 + 2 * 5),
        (relu_rnn, 8 * 100 + 100 * 100 + 100 * 10, 100),
        (stacked_rnn, 6 * 12 + 3 * 12 * 12 + 12 * 4, 24),
        (toy, 28, 4),
        # the embedding's features and the units of four layers
        (language_model, 12 * 6 + 6 * 8 + 7 * 64 + 9 * 12, 6 + 4 * 8),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_counts_are_those_of_the_architecture(build: Callable, weights: int, units: int) -> None:
    model, inputs = build()
    graph = ps.trace(model, *inputs)
    assert (graph.num_weights, graph.num_units) == (weights, units)


@pytest.mark.slow
@pytest.mark.parametrize("build", PAPERS, ids=lambda build: build.__name__)
def test_models_are_verified_with_nothing_pinned_but_by_positions(build: Callable) -> None:
    model, inputs = build()
    certificate = ps.verify(model, *inputs)
    assert certificate.holds
    reasons = {pin["reason"] for pin in certificate.pinned}
    assert reasons <= {"shares one scale with the buffer places"}
    assert certificate.dimension == certificate.weights - certificate.units


@pytest.mark.parametrize(("depth", "parameters"), [(20, 0.27), (32, 0.46), (44, 0.66), (56, 0.85)])
def test_residual_networks_have_the_sizes_of_their_paper(depth: int, parameters: float) -> None:
    assert round(sum(p.numel() for p in CifarResNet(depth).parameters()) / 1e6, 2) == parameters
    with pytest.raises(InputError, match="depth 21 does not exist"):
        CifarResNet(21)


def test_blocks_of_residual_networks_have_regularisers() -> None:
    x = torch.randn(64, 1, 8, 8)
    block = ResNetBlock(1, 1, 1, scale=0.0)
    assert torch.equal(block(x), x.relu())
    # a dropped branch leaves the stream, one that is kept counts more; none is
    # dropped in evaluation mode
    dropping = ResNetBlock(1, 1, 1, drop=0.75)
    torch.nn.init.zeros_(dropping.branch[-1].weight)
    torch.nn.init.ones_(dropping.branch[-1].bias)
    added = (dropping(x.abs()) - x.abs()).mean(dim=(1, 2, 3))
    assert sorted({round(float(a), 4) for a in added.detach()}) == [0.0, 4.0]
    assert torch.allclose(dropping.eval()(x.abs()), x.abs() + 1)


def test_translator_looks_neither_ahead_nor_at_padding() -> None:
    model, (pairs,) = translator()
    model.eval()
    before = model(pairs)
    later = pairs.clone()
    later[:, -1] = 1 + pairs[:, -1] % 19
    assert torch.allclose(before[:, :-1], model(later)[:, :-1], atol=1e-6)
    padded = pairs.clone()
    padded[:, 3] = 0
    shorter = model(padded)
    model.source, cut = 3, padded[:, [0, 1, 2, 4, 5, 6, 7, 8]]
    assert torch.allclose(shorter, model(cut), atol=1e-5)
