"""Claims on trial: counts without enumeration against enumeration, verdicts against exact ranks."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from cases import CASES, mlp
from oracles.exact import exact_rank
from oracles.layered import LayeredMLP, by_width
from oracles.networks import LoopRNN, OpRNN, RandomConv
from typer.testing import CliRunner

import pathspace as ps
from pathspace.cli.main import app
from pathspace.evidence.claims import (
    COUNTEREXAMPLES,
    count_selected,
    printed_skeleton,
)


def selected(skeleton: ps.Skeleton) -> np.ndarray:
    """The printed rule by enumeration: all unrolled paths, kept if at most one
    passage is off the skeleton.
    """
    graph = skeleton.graph
    mask = np.concatenate(
        [skeleton.masks[block.name].reshape(-1).numpy() for block in graph.blocks]
    )
    rows = np.array([path.counting_vector for path in graph.paths()]).reshape(-1, graph.num_weights)
    return rows[rows @ ~mask <= 1]


@pytest.mark.parametrize(
    "widths", [(3, 4, 2), (2, 3, 5, 2), (3, 3, 3, 3), (2, 1, 2, 1), (1, 2, 1, 2), (2, 4, 1, 3, 2)]
)
@pytest.mark.parametrize("rule", ["modulo", "random"])
@pytest.mark.parametrize("bias", [False, True])
def test_the_count_is_exact_on_multilayer_networks(
    widths: tuple[int, ...], rule: str, bias: bool
) -> None:
    graph = ps.trace(mlp(*widths, bias=bias), torch.randn(1, widths[0]))
    for seed in range(1 if rule == "modulo" else 5):
        skeleton = graph.skeleton(rule, seed)
        rows = selected(skeleton)
        found = printed_skeleton(skeleton)
        assert found.paths == len(rows)
        assert found.rank == exact_rank(rows) == graph.dimension
        assert found.verdict is (len(rows) == graph.dimension)


@pytest.mark.parametrize("hidden", [[3], [2, 2], [1, 2], [2, 1], [2, 3, 2]])
@pytest.mark.parametrize("rule", ["modulo", "random"])
def test_the_count_is_exact_on_recurrent_networks(hidden: list[int], rule: str) -> None:
    model = LoopRNN(2, hidden, 2, last=False, bias=False, out_bias=False)
    graph = ps.trace(model, torch.randn(1, 3, 2))
    skeleton = graph.skeleton(rule, 1)
    rows = selected(skeleton)
    found = printed_skeleton(skeleton)
    assert (found.paths, found.rank) == (len(rows), exact_rank(rows))
    assert found.rank == graph.dimension


def test_the_count_is_exact_on_convolutions() -> None:
    seen = 0
    for seed in range(12):
        kinds = [(0, 2, 3, 0), (1, 2, 1, 1)] if seed % 2 else [(0, 2, 1, 1), (0, 3, 3, 0)]
        model = RandomConv(2, 2, kinds, flat=False, seed=seed)
        skeleton = ps.trace(model, *model.example()).skeleton("random", seed)
        found = count_selected(skeleton)
        if not isinstance(found, str):
            assert found[1] == len(np.unique(selected(skeleton), axis=0))
            seen += 1
    assert seen > 6


def test_the_printed_rule_is_refuted_on_the_smallest_stack() -> None:
    skeleton = ps.trace(mlp(2, 1, 2, 1, bias=False), torch.randn(1, 2)).skeleton()
    found = printed_skeleton(skeleton)
    assert (found.verdict, found.paths, found.rank, found.dimension) == (False, 4, 3, 3)
    assert found.counterexample is not None
    assert found.counterexample["weights"] == 6
    assert sorted(found.counterexample["widths"]) == [1, 1, 2, 2]
    assert json.loads(found.to_json())["counterexample"]["rank"] == 3


def test_it_is_upheld_for_every_selection_with_one_hidden_layer() -> None:
    for recurrent, widths in itertools.product(
        (False, True), itertools.product((1, 2, 3), (1, 2, 3), (1, 2, 3))
    ):
        net = LayeredMLP(widths, recurrent)
        for skeleton in itertools.islice(net.selections(), 300):
            walks = net.selected(skeleton)
            assert len(walks) == net.count(skeleton) == net.num_weights - net.num_units
            assert exact_rank(net.vectors(walks)) == len(walks)


def test_equal_widths_with_modulo_masks_are_upheld_and_unequal_refuted() -> None:
    for recurrent, hidden in itertools.product(
        (False, True), itertools.product((1, 2, 3), repeat=3)
    ):
        net = LayeredMLP((2, *hidden, 2), recurrent)
        walks = net.selected(net.modulo())
        assert len(walks) == net.count(net.modulo())
        assert exact_rank(net.vectors(walks)) == net.num_weights - net.num_units
        basis = len(walks) == net.num_weights - net.num_units
        assert basis if len(set(hidden)) == 1 else (not basis or not recurrent)


@pytest.mark.parametrize("recurrent", [False, True])
def test_the_smallest_counterexamples_are_the_smallest(recurrent: bool) -> None:
    """The rule fails there, whichever edges it chooses, and on no smaller network."""
    kept = COUNTEREXAMPLES[recurrent]
    for net in by_width(recurrent, kept["weights"]):
        dimension = net.num_weights - net.num_units
        wrong = [each for each in net.selections() if net.count(each) != dimension]
        if wrong:
            break
    walks, rank = net.selected(wrong[0]), exact_rank(net.vectors(net.selected(wrong[0])))
    assert list(net.widths) == kept["widths"] and len(wrong) == len(list(net.selections()))
    assert (net.num_weights, dimension, rank) == (kept["weights"], kept["dimension"], kept["rank"])
    assert kept["summary"].startswith(f"{net}: {net.num_weights} weights, {len(walks)} paths")


def test_wide_networks_are_counted_without_enumeration() -> None:
    graph = ps.trace(mlp(50, 60, 60, 60, 60, 10, bias=False), torch.randn(1, 50))
    equal, drawn = printed_skeleton(graph.skeleton()), printed_skeleton(graph.skeleton("random"))
    assert equal.verdict is True
    assert drawn.verdict is False
    assert drawn.paths is not None and drawn.paths > graph.dimension
    stack = OpRNN(5, 40, 4, num_layers=3, bias=False, out_bias=False)
    assert printed_skeleton(ps.trace(stack, torch.randn(3, 1, 5)).skeleton()).verdict is True


@pytest.mark.parametrize(
    ("name", "words"),
    [("batchnorm_conv", "backwards"), ("gated_product", "products"), ("residual_mlp", "circle")],
)
def test_networks_that_the_rule_says_nothing_about(name: str, words: str) -> None:
    model, args = CASES[name]()
    found = printed_skeleton(ps.trace(model, *args).skeleton())
    assert found.verdict is None
    assert words in found.evidence


def test_the_command_line_tries_claims_and_judges_proofs(tmp_path: Path) -> None:
    (tmp_path / "stack.py").write_text(
        "import torch\nfrom torch import nn\n\n\ndef net():\n    layers = [nn.Linear(2, 1,"
        " bias=False), nn.ReLU(), nn.Linear(1, 2, bias=False), nn.ReLU(), nn.Linear(2, 1)]\n   "
        " return nn.Sequential(*layers), torch.ones(4, 2)\n"
    )
    target = f"{tmp_path / 'stack.py'}:net"
    proof = tmp_path / "proof.json"
    runner = CliRunner()

    def run(*words: object) -> tuple[int, str]:
        result = runner.invoke(app, [str(word) for word in words])
        return result.exit_code, result.output

    code, text = run("verify", target, "--claim", "printed-skeleton", "--json", "-")
    assert (code, json.loads(text)["verdict"]) == (1, False)
    assert run("verify", target, "--proof", proof)[0] == 0
    assert run("check", proof)[0] == 0
    assert "compared with outputs" in run("check", proof, target)[1]
    proof.write_text(proof.read_text().replace('"units": 3', '"units": 2', 1))
    code, text = run("check", proof)
    assert code == 1 and "Rejected" in text
    proof.write_text("not JSON")
    code, text = run("check", proof)
    assert code == 2 and "found no JSON" in text
