"""How many scale symmetries there can be at most: brackets close, and open
ones name what was missed.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import CASES, mlp, network
from torch import Tensor, nn
from typer.testing import CliRunner

import pathspace as ps
from pathspace.cli.main import app
from pathspace.evidence import upper_bound
from pathspace.inference.registry import RULES
from pathspace.inference.values import constant

# (slow: factorisations)
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_rule_fails")]


def bracket(model: nn.Module, *args: Any, **kwargs: Any) -> ps.Certificate:
    return ps.verify(model, *args, upper_bound=True, **kwargs)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [*sorted(CASES)[1::8], "mlp_2x4x1x3x2", "batchnorm_conv", "gated_product"]
)
def test_brackets_of_small_networks_are_closed(name: str) -> None:
    model, args = CASES[name]()
    certificate = bracket(model, *args)
    assert certificate.units_at_most == certificate.units, certificate.upper_bound["evidence"]
    assert certificate.upper_bound["closed"] and not certificate.upper_bound["left_over"]
    # far from the limit on both sides
    assert certificate.upper_bound["smallest_kept"] > 1e-6
    assert certificate.upper_bound["largest_dropped"] < 1e-9


def pinned(semantics: Any, x: Any, *rest: Any, **kwargs: Any) -> Tensor:
    semantics.pin([x], "not followed any more")
    return constant(tuple(semantics.place.result.shape))


@pytest.mark.parametrize(
    ("op", "layer", "more", "tensors"),
    [
        ("aten.leaky_relu", nn.LeakyReLU(0.1), 4, {"0.weight", "0.bias", "2.weight"}),
        ("aten.relu", nn.ReLU(), 3, {"2.weight", "2.bias", "4.weight"}),
    ],
)
def test_a_missing_rule_leaves_the_bracket_open_and_names_the_tensors(
    monkeypatch: pytest.MonkeyPatch, op: str, layer: nn.Module, more: int, tensors: set[str]
) -> None:
    other = nn.ReLU() if isinstance(layer, nn.LeakyReLU) else nn.LeakyReLU(0.1)
    torch.manual_seed(0)
    first, second = (layer, other) if op == "aten.leaky_relu" else (other, layer)
    model = nn.Sequential(nn.Linear(3, 4), first, nn.Linear(4, 3), second, nn.Linear(3, 2))
    x = torch.randn(6, 3)
    assert bracket(model, x).units_at_most == 7
    monkeypatch.setitem(RULES, op, pinned)
    certificate = bracket(model, x)
    assert (certificate.units, certificate.units_at_most) == (7 - more, 7)
    assert {entry["tensor"] for entry in certificate.upper_bound["left_over"]} >= tensors
    assert all(name in certificate.upper_bound["evidence"] for name in tensors)


def test_what_has_no_effect_is_taken_out_and_said() -> None:
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 2)
    )
    x = torch.randn(6, 2, 4, 4)
    certificate = bracket(model, x)
    # four biases that batch norm subtracts
    assert certificate.upper_bound["without_effect"] == 4
    assert certificate.units_at_most == certificate.units == 8
    assert "4 scalars without effect" in certificate.upper_bound["evidence"]
    model(x)
    frozen = bracket(model.eval(), x)
    assert frozen.upper_bound["without_effect"] == 0
    assert frozen.units_at_most == frozen.units == 8


def test_inputs_too_small_to_switch_a_rectifier_do_not_open_the_bracket() -> None:
    model = mlp(3, 8, 2)
    with torch.no_grad():
        model[0].bias.fill_(1.0)
    certificate = bracket(model, 1e-3 * torch.randn(5, 3))
    assert certificate.units_at_most == certificate.units == 8


def test_the_bound_does_not_depend_on_the_gauge() -> None:
    model, args = CASES["residual_cnn"]()
    graph = ps.trace(model, *args)
    ps.rescale_(model, graph, torch.randn(graph.num_units))
    assert bracket(model, *args).units_at_most == graph.num_units


def echo(net: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """Most of its outputs depend on one scalar alone."""
    return net.body(x), (net.gain * x).repeat(1, 40)


def detached(net: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients see neither the norm of `a`, which hides a scale of each row, nor what the first
    output does to the scales of `b`.
    """
    h = torch.relu(net.a(x) / net.a.weight.detach().norm(dim=1))
    with torch.no_grad():
        seen = net.b(h).relu()
    return seen, net.c(torch.relu(net.b(h)))


# what might open a bracket: a network, the shapes of its inputs, and its units
CLOSED: dict[str, tuple[Callable[[], nn.Module], tuple[tuple[int, ...], ...], int]] = {
    "samples that tell next to nothing": (
        lambda: network(echo, body=mlp(3, 12, 12, 2), gain=nn.Parameter(torch.tensor(0.7))),
        ((8, 3),), 24,
    ),
    "gradients that are cut": (
        lambda: network(detached, a=nn.Linear(3, 4), b=nn.Linear(4, 2), c=nn.Linear(2, 2)),
        ((4, 3),), 4,
    ),
    # batch norm of two numbers is 1 and -1, whatever they are
    "a batch of two": (
        lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2)),
        ((2, 3),), 8,
    ),
    # torch's batched backward pass of ``cdist`` gives other gradients than one by one
    "batching rules that are wrong": (
        lambda: network(
            lambda net, x, y: torch.cdist(net.left(x), net.right(y)),
            left=mlp(3, 8, 6), right=mlp(3, 7, 6),
        ),
        ((4, 3), (3, 3)), 15,
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", CLOSED)
def test_nothing_of_this_opens_the_bracket(what: str) -> None:
    build, shapes, units = CLOSED[what]
    torch.manual_seed(0)
    certificate = bracket(build(), *map(torch.randn, shapes))
    assert certificate.units == certificate.units_at_most == units
    # rounding errors of float32 would stand at 1e-7
    assert certificate.upper_bound["smallest_kept"] > 1e-6
    if what == "a batch of two":
        assert "32x3" in certificate.upper_bound["evidence"]


def test_it_says_where_it_is_not_attempted(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(4, 3)

    class Straight(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, h: Tensor) -> Tensor:
            return h.relu()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad

    a, b = nn.Linear(3, 4), nn.Linear(4, 2)
    own = network(lambda net, x: net.b(Straight.apply(net.a(x))), a=a, b=b)
    chosen = network(lambda net, x: net.a(x).argmax(-1), a=a)
    for model, reason in ((own, "gradients"), (chosen, "no output has a derivative")):
        certificate = bracket(model, x)
        assert certificate.units_at_most is None
        assert reason in certificate.upper_bound["evidence"]
        assert "not attempted" in str(certificate)
    monkeypatch.setattr(upper_bound, "MOST_SCALES", 10)
    assert "more than 10 rows" in bracket(mlp(3, 4, 2), x).upper_bound["evidence"]
    monkeypatch.undo()
    monkeypatch.setattr(upper_bound, "MOST_SECONDS", 0.0)
    assert "seconds" in bracket(mlp(3, 4, 2), x).upper_bound["evidence"]


def test_the_bracket_is_in_json_and_on_the_command_line(tmp_path: Path) -> None:
    file = tmp_path / "net.py"
    file.write_text(
        "from torch.nn import *\nnet = Sequential(Linear(3, 4), ReLU(), Linear(4, 2))\n"
    )
    found = CliRunner().invoke(
        app, ["verify", f"{file}:net", "--input", "4x3", "--upper-bound", "--json", "-"]
    )
    assert found.exit_code == 0, found.output
    data = json.loads(found.stdout)
    assert data["units"] == data["units_at_most"] == 4
    assert data["upper_bound"]["evidence"].startswith("4 found; at most 4 exist")
    shown = CliRunner().invoke(app, ["verify", f"{file}:net", "--input", "4x3", "--upper-bound"])
    assert "units at most" in shown.stdout
    plain = bracket(mlp(3, 4, 2), torch.randn(2, 3))
    assert plain.to_dict()["units_at_most"] == 4
    assert ps.verify(mlp(3, 4, 2), torch.randn(2, 3)).units_at_most is None


def test_units_that_are_exact_as_the_model_stands_are_bounded_too() -> None:
    model = nn.Sequential(nn.Linear(3, 6), nn.LayerNorm(6, 1e-3), *mlp(6, 4, 2))
    certificate = bracket(model, torch.randn(7, 3))
    assert certificate.units_at_most == certificate.units
    bound = certificate.upper_bound
    assert (
        certificate.units_exact
        == bound["exact_found"]
        == bound["exact_at_most"]
        < certificate.units
    )
    assert (
        f"{certificate.units_exact} found, at most {certificate.units_exact}" in bound["evidence"]
    )
