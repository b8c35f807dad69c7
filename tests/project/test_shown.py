"""Results in terminals and notebooks: the same table as text and as HTML."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from cases import mlp

import pathspace as ps
from pathspace import diagnostics, training
from pathspace.evidence.claims import printed_skeleton
from pathspace.shown import Shown


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


def every() -> dict[str, Any]:
    """A result of every public function that returns one."""
    model, inputs = mlp(3, 4, 2), (torch.randn(4, 3),)
    found = results()
    graph, skeleton = found["graph"], found["skeleton"]
    report = diagnostics.report(model, *inputs)
    gauge = ps.choose_gauge(model, graph, ps.Range())
    return found | {
        "block": graph.blocks[0],
        "path": found["basis"][0],
        "group": next(iter(found["channels"])),
        "balancing": ps.balancing(model, graph),
        "matching": found["channels"].match(model),
        "comparison": ps.compare(model, model, graph),
        "pair": ps.smoothing_pairs(graph)[0],
        "gauge": gauge.certificate,
        "equalised": ps.equalise(model, graph, calibration=inputs[0]),
        "symbols": ps.symbolic(skeleton),
        "claim": printed_skeleton(skeleton),
        "statistics": ps.path_statistics(skeleton),
        "advice": training.suggest(model, graph, show=False),
        "chain": diagnostics.MarkovChain.trace(model, *inputs),
        "signal": diagnostics.signal(model, *inputs),
        "cost": diagnostics.cost(model, *inputs),
        "diagnosis": diagnostics.diagnose(model, *inputs),
        "report": report,
        "versus": diagnostics.versus(report, report),
    }


def test_every_result_is_short_in_a_line_and_a_table_in_a_notebook() -> None:
    for name, result in every().items():
        assert isinstance(result, Shown), name
        assert len(repr(result)) <= 1000 and "\n" not in repr(result), name
        assert result._repr_html_().strip(), name
        assert isinstance(result.to_dict(), dict) and result.to_dict(), name


@pytest.mark.parametrize("name", ["<b>", "a[red]b"])
def test_names_of_parameters_are_no_markup(name: str) -> None:
    model = torch.nn.Module()
    model.register_parameter(name, torch.nn.Parameter(torch.ones(2)))
    model.forward = lambda x: x * model.get_parameter(name)  # type: ignore[method-assign]
    skeleton = ps.trace(model, torch.ones(1, 2)).skeleton()
    assert name in str(skeleton) and "<b>" not in skeleton._repr_html_()
