"""The models of the demo: everything that is said of path spaces holds for them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import pathspace as ps
from training.models import loop_rnn, mlp, relu_rnn, residual_cnn, stacked_rnn


@pytest.mark.parametrize("build", [mlp, residual_cnn, stacked_rnn, loop_rnn], ids=lambda build: build.__name__)
def test_theorems_hold(build: Callable) -> None:
    model, inputs = build()
    certificate = ps.verify(model, *inputs)
    assert certificate.holds
    assert certificate.rank == certificate.dimension == certificate.weights - certificate.units
    assert [getattr(certificate, f"theorem{n}")["holds"] for n in (1, 2, 3)] == [True] * 3


@pytest.mark.parametrize(
    ("build", "weights", "units"),
    [
        (mlp, 9 * 16 + 17 * 12 + 13 * 20 + 21 * 5, 16 + 12 + 20),
        # the stream is one class per channel, the inside of each block another
        (residual_cnn, 28 * 6 + 2 * (55 * 5 + 46 * 6) + 7 * 4, 6 + 2 * 5),
        (relu_rnn, 8 * 100 + 100 * 100 + 100 * 10, 100),
        (stacked_rnn, 6 * 12 + 3 * 12 * 12 + 12 * 4, 24),
        (loop_rnn, 7 * 14 + 14 * 14 + 15 * 3, 14),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_counts_are_those_of_the_architecture(build: Callable, weights: int, units: int) -> None:
    model, inputs = build()
    graph = ps.trace(model, *inputs)
    assert (graph.num_weights, graph.num_units) == (weights, units)


@pytest.mark.parametrize(
    "build", [mlp, residual_cnn, relu_rnn, stacked_rnn, loop_rnn], ids=lambda build: build.__name__
)
def test_models_repeat_themselves_and_leave_random_numbers_alone(build: Callable) -> None:
    before = torch.get_rng_state()
    (first, inputs), (second, same) = build(), build()
    assert torch.equal(first(*inputs), second(*same)) and torch.equal(before, torch.get_rng_state())
