"""What a newcomer meets first: numbers, names, refusals, and the size of what is printed."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pathspace as ps


def convolutions() -> tuple[Any, Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 6, 3), nn.ReLU(), nn.Flatten(), nn.Linear(96, 4)
    ).eval(), torch.randn(2, 1, 8, 8)


RESULTS: dict[str, Any] = {
    "graph": lambda graph, model, x: graph,
    "skeleton": lambda graph, model, x: graph.skeleton(),
    "basis": lambda graph, model, x: graph.skeleton().basis(),
    "fitted": lambda graph, model, x: ps.fit_dtype(model, x),
}


@pytest.mark.parametrize("what", RESULTS)
def test_a_result_fits_the_terminal(what: str) -> None:
    model, x = convolutions()
    shown = repr(RESULTS[what](ps.trace(model, x), model, x))
    assert len(shown) < 1500 and len(shown.splitlines()) < 25


def test_inputs_in_a_tuple_are_named_as_the_mistake() -> None:
    model, x = convolutions()
    with pytest.raises(ps.PathspaceError) as caught:
        ps.trace(model, (x,))
    assert "tuple" in str(caught.value) and "invalid combination" not in str(caught.value)


def test_a_shape_in_place_of_an_input_is_named_as_the_mistake() -> None:
    model, _ = convolutions()
    with pytest.raises(ps.PathspaceError) as caught:
        ps.trace(model, (2, 1, 8, 8))
    assert "torch.randn" in str(caught.value)


@pytest.mark.parametrize("function", [ps.draw, ps.proof, ps.symbolic])
def test_a_graph_in_place_of_a_skeleton_names_the_missing_call(function: Any) -> None:
    model, x = convolutions()
    with pytest.raises(ps.PathspaceError) as caught:
        function(ps.trace(model, x))
    assert "graph.skeleton()" in str(caught.value)
