"""What is 0 in a model as it stands hides nothing from `verify`: weights
and inputs are drawn again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import cases
import pytest
import torch
from torch import Tensor, nn

import pathspace as ps
from pathspace.inference.registry import RULES
from pathspace.inference.values import NEUTRAL, constant

# two layers of 3 inputs and 4 units, and an operation between them
Between = partial(cases.Between, features=4, inputs=3, units=4)


def unused(semantics: Any, x: Any, *rest: Any, **kwargs: Any) -> Tensor:
    return constant(tuple(semantics.place.result.shape), NEUTRAL)


def copied(semantics: Any, x: Any, *rest: Any, **kwargs: Any) -> Any:
    return semantics.activation(x)


@pytest.fixture
def wrong(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, Any], None]]:
    yield lambda name, rule: monkeypatch.setitem(RULES, name, rule)


def test_a_rule_that_calls_what_is_used_unused_is_refuted(
    wrong: Callable[[str, Any], None],
) -> None:
    wrong("aten.tanh", unused)
    model, x = Between(torch.tanh), torch.randn(5, 3)
    graph = ps.trace(model, x)
    assert {"first.weight", "first.bias"} <= set(graph.unused)
    certificate = ps.verify(model, x)
    assert not certificate.holds
    assert certificate.invariance["trials"]["unused"] > 1e-3


@pytest.mark.parametrize(
    ("name", "operation"),
    [
        ("aten.gelu", nn.functional.gelu),
        ("aten.tanh", torch.tanh),
        ("aten.sigmoid", torch.sigmoid),
        ("aten.softmax", lambda x: x.softmax(-1)),
        ("aten.hardtanh", lambda x: nn.functional.hardtanh(x, -40.0, 40.0)),
        ("aten.threshold", lambda x: nn.functional.threshold(x, 0.0, 1e-3)),
    ],
)
def test_operations_taken_for_the_identity_are_refuted(
    wrong: Callable[[str, Any], None], name: str, operation: Callable[[Tensor], Tensor]
) -> None:
    x = torch.randn(5, 3)
    assert ps.verify(Between(operation), x).holds
    wrong(name, copied)
    certificate = ps.verify(Between(operation), x)
    assert certificate.units == 4 and not certificate.holds


def test_a_bias_of_zero_hides_nothing(wrong: Callable[[str, Any], None]) -> None:
    """`x + 0 * b` looks homogeneous for as long as a bias is 0."""
    model, x = Between(lambda x: x), torch.randn(5, 3)
    model.shift = nn.Parameter(torch.zeros(4))
    model.operation = partial(lambda net, x: torch.relu(torch.add(x, net.shift)), model)
    # the shift said to be another layer's input, whose scale is fixed
    wrong("aten.add", lambda semantics, x, other, **kwargs: semantics.activation(x))
    certificate = ps.verify(model, x)
    assert not certificate.holds


def test_limits_far_from_the_example_are_met(wrong: Callable[[str, Any], None]) -> None:
    """A clamp at 50 is not seen by inputs of ordinary size; ones of 100 times the size see it."""
    wrong("aten.clamp", copied)
    assert not ps.verify(Between(lambda x: x.clamp(-50, 50)), torch.randn(5, 3)).holds


def test_models_without_tensor_outputs_are_not_applicable() -> None:
    chosen = cases.network(lambda net, x: net.a(x).argmax(-1), a=Between(torch.relu))
    certificate = ps.verify(chosen, torch.randn(4, 3))
    assert certificate.invariance["holds"] is None
    assert "no tensor in floating point" in certificate.invariance["evidence"]
    assert certificate.holds
