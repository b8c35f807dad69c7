"""Results in terminals and notebooks: the same table as text and as HTML."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from cases import mlp

import pathspace as ps


def results() -> dict[str, Any]:
    model, inputs = mlp(3, 4, 2), (torch.randn(4, 3),)
    graph = ps.trace(model, *inputs)
    return {
        "graph": graph,
        "skeleton": graph.skeleton(),
        "basis": graph.skeleton().basis(),
        "channels": ps.channels(model, *inputs),
        "certificate": ps.verify(model, *inputs),
        "explanation": ps.explain(model, *inputs),
    }


def test_text_and_html_say_the_same() -> None:
    for result in results().values():
        text, page = str(result), result._repr_html_()
        shown = (
            re.sub(r"<[^>]+>", "", page)
            .replace("&lt;", "<")
            .replace("&gt;", ">")
            .replace("&#x27;", "'")
        )
        assert page.startswith("<pre") and "<script" not in page
        assert shown.split() == text.replace("&quot;", '"').split()


def test_figures_are_those_of_the_result() -> None:
    found = results()
    graph = found["graph"]
    for figure in (graph.num_weights, graph.num_units, graph.dimension):
        assert f"{figure:,}" in str(graph)
    assert all(block.name in str(found["skeleton"]) for block in graph.blocks)


@pytest.mark.parametrize("name", ["<b>", "a[red]b"])
def test_names_of_parameters_are_no_markup(name: str) -> None:
    model = torch.nn.Module()
    model.register_parameter(name, torch.nn.Parameter(torch.ones(2)))
    model.forward = lambda x: x * model.get_parameter(name)  # type: ignore[method-assign]
    skeleton = ps.trace(model, torch.ones(1, 2)).skeleton()
    assert name in str(skeleton) and "<b>" not in skeleton._repr_html_()
