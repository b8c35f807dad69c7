"""Spaces in proofs: true ones are accepted, and every group, slice, gain and number that is not the
model's is refused.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import network
from checker.test_forged_proofs import sealed
from rotations.test_spaces import Llama, two
from torch import nn
from zoo.entry import load

import pathspace as ps
from pathspace.checker.bases import rotate_copy
from pathspace.checker.document import Rejected
from pathspace.checker.spaces import DIMENSIONS, read_spaces
from pathspace.evidence.proof import space_lines

pytestmark = pytest.mark.filterwarnings("ignore")
Lines = dict[str, Any]
ZOO = load()
WORDS = torch.randint(11, (2, 5), generator=torch.Generator().manual_seed(0))


def lines_of(model: nn.Module, *args: Any, kwargs: Any = None) -> Lines:
    return json.loads(json.dumps(space_lines(ps.spaces(model, *args, kwargs=kwargs))))


def judged(lines: Lines, model: nn.Module, args: Any, kwargs: Any = None) -> str:
    """Why spaces are refused, or ``""``."""
    try:
        return rotate_copy(*read_spaces({"spaces": lines}), model, args, kwargs or {}, 1e-6)
    except Rejected as rejection:
        return str(rejection)


def counted(lines: Lines) -> Lines:
    """Lines with the dimensions that follow from their groups."""
    for line in lines["free"]:
        line["dimension"] = line["count"] * DIMENSIONS[line["group"]](line["size"])
    return lines | {"dimension": sum(line["dimension"] for line in lines["free"])}


def llama() -> tuple[nn.Module, Lines]:
    torch.manual_seed(0)
    model = Llama()
    for norm in (model.norm, model.last):
        nn.init.normal_(norm.weight)
    return model, lines_of(model, WORDS)


@pytest.mark.parametrize(
    ("name", "stream"),
    [
        ("hf_llama_eager_tied", "O(24)"),
        ("hf_gpt2", "O1(24)"),
        ("hf_t5", "O(24)"),
        ("hf_mistral", "O(24)"),
        ("hf_bert", "GL(6)"),
    ],
)
def test_true_spaces_of_language_models_are_accepted(name: str, stream: str) -> None:
    model, args, kwargs = ZOO[name].make("eval", small=True)
    lines = lines_of(model, *args, kwargs=kwargs)
    first = max(lines["free"], key=lambda line: line["size"])
    assert f"{first['group']}({first['size']})" == stream
    assert judged(lines, model, args, kwargs) == ""
    first["group"] = "GL"
    if not stream.startswith("GL"):
        assert "of GL(24) on the space" in judged(counted(lines), model, args, kwargs)


def test_a_proof_with_spaces_is_judged_with_and_without_its_model() -> None:
    model, lines = llama()
    graph, found = ps.trace(model, WORDS, sizes="given"), ps.spaces(model, WORDS)
    document = ps.proof(graph.skeleton(), "net", found)
    assert document["spaces"] == lines
    alone, run = ps.check(document), ps.check(document, model=model, args=(WORDS,))
    assert (alone.accepted, alone.spaces) == (run.accepted, None) == (True, None)
    assert alone.unseen == ("what the groups of 4 spaces do to outputs",)
    assert (run.compared, run.spaces) == ("outputs", 66)
    document["spaces"]["free"][1]["group"] = "O"
    assert "dimension 6, not as stated" in ps.check(sealed(document)).reason
    convolutions = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Conv2d(2, 1, 3))
    x = torch.randn(1, 1, 6, 6)
    document = ps.proof(ps.trace(convolutions, x).skeleton(), "cnn", ps.spaces(convolutions, x))
    assert document["spaces"]["dimension"] == 0 < len(document["spaces"]["rigid"])
    assert ps.check(document, model=convolutions, args=(x,)).spaces is None


def test_every_slice_and_gain_of_a_language_model_counts() -> None:
    """But for a bias of keys: it adds the same number to all scores of a query."""
    model, lines = llama()
    assert judged(lines, model, (WORDS,)) == ""
    accepted = []
    for number, line in enumerate(lines["free"]):
        for place, part in enumerate(line["slices"]):
            for what, new in (("drop", []), ("dual", [part | {"dual": not part["dual"]}]),
                              ("gains", [part | {"gains": []}])):  # fmt: skip
                forged = copy.deepcopy(lines)
                forged["free"][number]["slices"][place : place + 1] = new
                orthogonal = what == "dual" and line["group"] == "O"
                same = forged == lines or orthogonal
                if not same and not judged(forged, model, (WORDS,)):
                    accepted.append((what, part["parameter"]))
    assert accepted == [("drop", "k.bias"), ("dual", "k.bias")]


def forged_chain(lines: Lines, **changes: Any) -> Lines:
    lines["free"][0] |= changes
    return lines


def twice(lines: Lines) -> Lines:
    return lines | {"free": 2 * lines["free"], "dimension": 2 * lines["dimension"]}


def moved(lines: Lines, at: list[int]) -> Lines:
    lines["free"][0]["slices"][0]["positions"] = at
    return lines


FORGED: dict[str, tuple[Callable[[Lines], Lines], str]] = {
    "another dimension": (lambda lines: forged_chain(lines, dimension=37), "has the dimension 36"),
    "another sum": (lambda lines: lines | {"dimension": 37}, "have the dimension 36"),
    "an unknown group": (lambda lines: forged_chain(lines, group="U"), "'U' of the space"),
    "two spaces in one place": (twice, "positions of a.weight in common"),
    "a position twice": (lambda lines: moved(lines, [0, 1, 2, 3, 4, 4]), "in common"),
    "a position too far": (lambda lines: moved(lines, [0, 1, 2, 3, 4, 6]), "leaves the parameter"),
    "a position below 0": (lambda lines: moved(lines, [-1, 1, 2, 3, 4, 5]), "does not exist"),
    "too few positions": (lambda lines: moved(lines, [0, 1]), "has 2 positions, not 6"),
    "another order": (lambda lines: moved(lines, [1, 0, 2, 3, 4, 5]), "change the model's outputs"),
    "no slices": (lambda lines: forged_chain(lines, slices=[]), "is empty"),
    "no such tie": (lambda lines: lines | {"ties": ["c"]}, "no parameter c"),
    "factors of blocks": (
        lambda lines: counted(forged_chain(lines, group="scales")),
        "not one for each feature",
    ),
    "another turn": (
        lambda lines: counted(
            forged_chain(lines, group="complex", partners=[1, 0, 3, 2, 5, 4], signs=[1] * 6)
        ),
        "is not by pairs",
    ),
}


@pytest.mark.parametrize("name", FORGED)
def test_what_is_wrong_in_a_line_is_said(name: str) -> None:
    forge, reason = FORGED[name]
    model, x = two(lambda x: x), torch.randn(4, 3)
    lines = lines_of(model, x)
    assert judged(lines, model, (x,)) == ""
    assert reason in judged(forge(lines), model, (x,))


def test_no_space_acts_on_gains_that_become_1() -> None:
    """An orthogonal matrix that keeps the vector of ones would not be seen there."""
    model, lines = llama()
    part = {"parameter": "norm.weight", "dim": 0, "dual": False, "positions": list(range(8))}
    line = {"name": "x", "group": "O1", "size": 8, "count": 1, "gains": [], "slices": [part]}
    part["gains"] = []
    forged = counted(lines | {"free": [*lines["free"], line]})
    assert judged(forged, model, (WORDS,)) == "a space has the gains norm.weight, which become 1"


def test_one_tensor_does_not_count_twice_under_two_names() -> None:
    a, b = nn.Linear(3, 4), nn.Linear(4, 2)
    model, x = network(lambda net, x: net.b(net.a(x)), a=a, b=b, c=a, d=b), torch.randn(4, 3)
    lines = lines_of(model, x)
    other = json.loads(json.dumps(lines).replace('"a.', '"c.').replace('"b.', '"d.'))
    both = lines | {"free": lines["free"] + other["free"], "dimension": 2 * lines["dimension"]}
    for ties in ([], ["c.weight", "c.bias", "d.weight"]):
        assert "in common" in judged(both | {"ties": ties}, model, (x,))


def test_a_gain_of_zero_and_silent_outputs_leave_nothing_to_say() -> None:
    model, lines = llama()
    with torch.no_grad():
        model.norm.weight[2] = 0
    assert judged(lines, model, (WORDS,)) == ""
    silent, x = two(lambda x: 0 * x), torch.randn(4, 3)
    silent.b.bias = None
    assert "all outputs are 0" in judged(lines_of(two(lambda x: x), x), silent, (x,))
