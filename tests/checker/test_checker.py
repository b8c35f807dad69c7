"""The independent checker: accepts what holds, rejects every corruption, and
knows nothing of the library.
"""

from __future__ import annotations

import copy
import json
import random
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import CASES, mlp, network
from checker.test_forged_proofs import incidence, sealed
from oracles.exact import exact_rank
from torch import Tensor, nn

import pathspace as ps
from pathspace.checker import check
from pathspace.evidence.proof import proof

SEVERAL = (
    "mlp_2x3x5x2",
    "residual_mlp",
    "conv_groups",
    "rnn_op_2_layers",
    "gated_product",
    "tied_transposed",
)


def document_of(model: nn.Module, args: tuple[Tensor, ...], rule: str = "modulo") -> dict[str, Any]:
    return json.loads(
        json.dumps(proof(ps.trace(model, *args).skeleton(rule, 1), type(model).__name__))
    )


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths to every entry of a nested document."""
    found = [path] if path else []
    entries = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for key, entry in entries:
        found += places(entry, (*path, key))
    return found


def corrupt(
    document: dict[str, Any], generator: random.Random
) -> tuple[dict[str, Any], tuple[Any, ...]]:
    """One random change: another number or text, an entry lost, doubled, or
    swapped with its neighbour.
    """
    while True:
        broken = copy.deepcopy(document)
        place = generator.choice(places(broken))
        holder: Any = broken
        for key in place[:-1]:
            holder = holder[key]
        key, value = place[-1], holder[place[-1]]
        kind = generator.choice(("change", "lose", "double", "swap"))
        if kind == "lose":
            del holder[key]
        elif kind == "change":
            if isinstance(value, int):
                holder[key] = value + generator.choice((-2, -1, 1, 2, 1000))
            elif isinstance(value, str):
                holder[key] = value + "x"
            elif value is None:
                holder[key] = 0
            else:
                holder[key] = []
        elif isinstance(holder, list) and kind == "double":
            holder.insert(key, copy.deepcopy(value))
        elif isinstance(holder, list) and kind == "swap" and len(holder) > 1:
            other = (key + 1) % len(holder)
            holder[key], holder[other] = holder[other], holder[key]
        if broken != document:
            return broken, place


@pytest.mark.parametrize("name", sorted(CASES)[::3])
def test_proofs_are_accepted_and_fit_the_model(name: str) -> None:
    model, args = CASES[name]()
    graph = ps.trace(model, *args)
    for rule in ("modulo", "random"):
        document = proof(graph.skeleton(rule), name)
        judgement = check(
            document, dict(model.named_parameters(remove_duplicate=False)), model, args
        )
        assert judgement.accepted, judgement.reason
        assert (judgement.weights, judgement.units) == (graph.num_weights, graph.num_units)
        assert judgement.dimension == graph.dimension
        # one dead network shows nothing
        assert (judgement.compared, judgement.reason) in (
            ("outputs", ""),
            ("tensors", "all outputs are 0"),
        )


def test_a_thousand_random_corruptions_are_rejected() -> None:
    generator = random.Random(0)
    documents = [document_of(*CASES[name]()) for name in SEVERAL]
    assert all(check(document).accepted for document in documents)
    for i in range(1000):
        broken, place = corrupt(documents[i % len(documents)], generator)
        assert not check(broken).accepted, place


def rank_by_brute_force(document: dict[str, Any]) -> int:
    """Dimension of the closed walks of the graph a document states: kernel of its
    incidence, by exact elimination.
    """
    rows = incidence(document)
    return len(rows) - exact_rank(rows)


def test_a_forger_who_mends_the_digest_proves_nothing_false() -> None:
    """With the digest recomputed, what is still accepted is true of the graph that
    the document now states.
    """
    generator = random.Random(1)
    documents = [document_of(*CASES[name]()) for name in SEVERAL]
    accepted = 0
    for i in range(1000):
        broken, place = corrupt(documents[i % len(documents)], generator)
        if "digest" not in broken:
            continue
        broken = sealed(broken)
        judgement = check(broken)
        if judgement.accepted:
            accepted += 1
            assert rank_by_brute_force(broken) == judgement.dimension == broken["dimension"], place
    assert 0 < accepted < 400


def test_a_model_that_does_not_fit_is_rejected() -> None:
    model, x = mlp(3, 4, 2), torch.randn(2, 3)
    document = document_of(model, (x,))
    parameters = dict(model.named_parameters())
    assert check(document, parameters).compared == "tensors"
    assert "shape" in check(document, parameters | {"0.weight": torch.ones(5, 3)}).reason
    assert "no tensor" in check(document, {"0.weight": torch.ones(4, 3)}).reason
    assert "zero" in check(document, parameters | {"0.weight": torch.zeros(4, 3)}).reason
    assert not check(document, model=mlp(3, 4, 2, act=nn.GELU), args=(x,)).accepted


def test_one_mapping_gives_all_inputs_by_name() -> None:
    model = network(
        lambda net, left, right: net.second(torch.relu(net.first(left) + net.first(right))),
        first=nn.Linear(3, 4), second=nn.Linear(4, 2),
    )  # fmt: skip
    inputs = {"right": torch.randn(2, 3), "left": torch.randn(2, 3)}
    document = proof(ps.trace(model, kwargs=inputs).skeleton())
    judgement = check(document, model=model, args=(inputs,))
    assert judgement.accepted and judgement.compared == "outputs", judgement


def test_a_model_that_cannot_be_copied_is_rejected_with_the_reason() -> None:
    model, x = mlp(3, 4, 2), torch.randn(2, 3)
    document = document_of(model, (x,))
    model.lock = threading.Lock()  # has no copy, and is shared
    assert check(document, model=model, args=(x,)).accepted

    class Single:
        def __deepcopy__(self, memo: dict[int, Any]) -> Single:
            raise RuntimeError("there is one of it")

    model.single = Single()
    judgement = check(document, model=model, args=(x,))
    assert not judgement.accepted
    assert judgement.reason == "the model cannot be copied: RuntimeError (there is one of it)"


def signed(document: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return sealed(copy.deepcopy(document) | changes)


ROOT = {"shape": [1, 1], "values": [0]}
NO_TREES = {side: {"order": [], "tensor": [], "index": []} for side in ("in", "out")}


def rootless(shape: list[int], edges: int) -> dict[str, Any]:
    """What a forger says of a network without units."""
    tensor = {
        "name": "0.weight",
        "shape": shape,
        "tail": ROOT,
        "head": ROOT,
        "unused": None,
        "edges": edges,
    }
    figures = {
        "weights": edges,
        "units": 0,
        "dimension": edges,
        "basis_paths": edges,
        "shared_edges": 0,
        "chains": 0,
    }
    return {"tensors": [tensor], "trees": NO_TREES, **figures}


def test_what_a_document_states_is_held_to_the_letter() -> None:
    model, x = mlp(3, 4, 2), torch.randn(2, 3)
    document = document_of(model, (x,))
    for changes, reason in (
        (rootless([2**32, 2**32 + 1], 2**32), "edges"),
        (rootless([2**32, 2**32], 0), "edges"),
        ({"statement": "P = NP"}, "statement"),
        ({"statistics": ["foo", 3]}, "statistic"),
        ({"statistics": [{"mean": None, "var": None, "units": []}]}, "no buffer"),
        ({"statistics": [{"mean": "a", "var": None, "units": [5]}]}, "unknown unit"),
        ({"statistics": [{"mean": "a", "var": "a", "units": [1]}]}, "listed twice"),
        ({"pinned": ["0.weight"]}, "listed twice"),
    ):
        judgement = check(signed(document, **changes))
        assert not judgement.accepted and reason in judgement.reason, judgement.reason
    broken = copy.deepcopy(document)
    broken["tensors"][-1]["head"]["values"] = [-(2**63)]
    assert "unknown unit" in check(signed(broken)).reason


def test_every_parameter_is_accounted_for_and_unused_scalars_do_nothing() -> None:
    model = network(
        lambda net, x: net.b(torch.relu(net.a(net.table(x))) * torch.tanh(net.scale)),
        table=nn.Embedding(5, 3), a=nn.Linear(3, 4), b=nn.Linear(4, 2), spare=nn.Linear(2, 2),
        scale=nn.Parameter(torch.rand(4)),
    )  # fmt: skip
    tokens = torch.tensor([0, 1, 2])
    document = document_of(model, (tokens,))
    assert document["unused"] == ["spare.weight", "spare.bias"]
    assert check(document, model=model, args=(tokens,)).accepted
    for changes, reason in (
        ({"unused": []}, "says nothing of the parameter spare.weight"),
        (rootless([5, 3], 15), "0.weight"),
        (
            rootless([5, 3], 15) | {"tensors": [], "weights": 0, "dimension": 0, "basis_paths": 0},
            "nothing of",
        ),
    ):
        assert reason in check(signed(document, **changes), model=model, args=(tokens,)).reason
    listed = [name for name, _ in model.named_parameters()]
    nothing = rootless([1, 1], 0) | {"tensors": [], "pinned": [], "unused": listed}
    assert check(signed(document, **nothing)).accepted
    assert (
        "said to be unused"
        in check(signed(document, **nothing), model=model, args=(tokens,)).reason
    )


def test_nothing_is_compared_vacuously_and_nothing_is_raised(tmp_path: Path) -> None:
    model, x = mlp(3, 4, 2), torch.randn(2, 3)
    document = document_of(model, (x,))
    assert "fails on these inputs" in check(document, model=model, args=(torch.randn(3, 7),)).reason
    assert "cannot be read" in check(tmp_path / "missing.json").reason
    (tmp_path / "deep.json").write_text("[" * 100_000)
    assert "nested too deeply" in check(tmp_path / "deep.json").reason
    picks = network(lambda net, x: net.model(x).argmax(-1), model=model)
    judgement = check(document_of(picks, (x,)), model=picks, args=(x,))
    assert (judgement.compared, judgement.reason) == (
        "tensors",
        "there are no floating point outputs",
    )
    with torch.no_grad():
        for parameter in model[-1].parameters():
            parameter.zero_()
    # a head of zeros is drawn at random, and so are biases that switch every unit off
    assert check(document, model=model, args=(x,)).compared == "outputs"
    dead = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2, bias=False))
    with torch.no_grad():
        dead[0].bias.fill_(-100.0)
    judgement = check(document_of(dead, (x,)), model=dead, args=(x,))
    assert (judgement.compared, judgement.reason) == ("outputs", "")


def test_a_proof_travels_as_a_file(tmp_path: Path) -> None:
    model, args = CASES["residual_cnn"]()
    file = tmp_path / "proof.json"
    file.write_text(json.dumps(document_of(model, args)))
    assert check(file).accepted
    file.write_text(file.read_text()[:-1] + ', "more": 1}')
    assert "do not belong" in check(file).reason
    file.write_text("[]")
    assert "not a JSON object" in check(file).reason
    file.write_text("{")
    assert "malformed" in check(file).reason


def test_a_model_is_understood_where_tensors_belong() -> None:
    model, x = mlp(3, 4, 2), torch.randn(5, 3)
    document = document_of(model, (x,))
    assert check(document, model).accepted and check(document, model).compared == "tensors"
    assert check(document, model, args=(x,)).compared == "outputs"
    assert "no tensor" in check(document, nn.Linear(3, 2)).reason
    # inputs in the place of the model, and of the tensors
    assert "the model is a Tensor, expected a module" in check(document, None, x).reason
    assert "the tensors are a Tensor, expected a mapping" in check(document, x).reason


def test_running_variances_move_with_their_eps() -> None:
    """Channels that hardly vary: their eps is larger than their variance."""
    model = nn.Sequential(
        nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3, eps=1e-3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 2)
    )
    model[1].running_var.copy_(torch.tensor([1e-8, 0.0, 2e-3]))
    x = torch.randn(8, 2, 4, 4)
    document = document_of(model.eval(), (x,))
    assert document["statistics"][0]["eps"] == 1e-3
    judgement = check(document, model=model, args=(x,))
    assert judgement.accepted, judgement.reason
    assert [len(entry["units"]) for entry in document["statistics"]] == [3]
    without = signed(document, statistics=[])
    assert check(without).accepted
    assert not check(without, model=model, args=(x,)).accepted
    document["statistics"][0]["eps"] = 1e-2
    assert not check(signed(document), model=model, args=(x,)).accepted
    document["statistics"][0]["eps"] = "1"
    assert "eps of a statistic" in check(signed(document)).reason


def expanded(value: Any) -> Any:
    """A document with its runs written out."""
    if isinstance(value, dict):
        if set(value) == {"runs"}:
            return [first + step * i for first, step, count in value["runs"] for i in range(count)]
        return {key: expanded(entry) for key, entry in value.items()}
    return [expanded(entry) for entry in value] if isinstance(value, list) else value


@pytest.mark.parametrize("name", SEVERAL)
def test_runs_say_what_lists_say(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = CASES[name]()
    graph = ps.trace(model, *inputs)
    for rule in ("modulo", "random"):
        skeleton = graph.skeleton(rule, 1)
        plain = proof(skeleton)
        monkeypatch.setitem(proof.__globals__, "SHORT", 0)
        short = proof(skeleton)
        monkeypatch.undo()
        assert {**expanded(short), "digest": plain["digest"]} == plain
        assert check(short).accepted and check(short, tensors=model).accepted
    generator = random.Random(1)
    for _ in range(40):
        broken, place = corrupt(short, generator)
        assert not check(broken).accepted, place
        # with its digest mended it is judged, and nothing is raised
        assert check(signed(broken)).seconds >= 0


def test_large_graphs_have_short_proofs_and_need_no_numbers() -> None:
    with torch.device("meta"):
        model = mlp(100, 50_000, 7_001, 3)
        x = torch.zeros(1, 100)
    document = proof(ps.trace(model, x).skeleton())
    assert len(json.dumps(document)) < 100_000
    assert check(document).dimension == document["weights"] - 57_001
    for found in (check(document, tensors=model), check(document, model=model, args=(x,))):
        assert found.accepted and found.compared == "shapes"
    document["trees"]["out"]["order"]["runs"][0][0] += 1
    assert not check(signed(document)).accepted
    endless = {"in": {"order": {"runs": [[1, 1, 1 << 60]]}, "tensor": [], "index": []}}
    assert not check(signed(document, trees=endless)).accepted


def fuzz(
    model: nn.Module, x: Tensor, count: int, seed: int
) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Changes of a proof, digest recomputed, that the model does not refute."""
    document = document_of(model, (x,))
    assert check(document, model=model, args=(x,)).accepted
    generator, found = random.Random(seed), []
    for _ in range(count):
        broken, place = corrupt(document, generator)
        if "digest" in broken:
            broken = sealed(broken)
        if check(broken).accepted and check(broken, model=model, args=(x,)).accepted:
            found.append((place, broken))
    return found


def test_zeros_of_a_fresh_network_hide_no_forged_proof() -> None:
    """Biases of batch norm and running means start at 0, and stay 0 whatever a
    proof multiplies them by.
    """
    model = nn.Sequential(
        nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Conv2d(3, 2, 2), nn.BatchNorm2d(2),
        nn.ReLU(), nn.Flatten(), nn.Linear(8, 2),
    ).eval()  # fmt: skip
    x = torch.randn(16, 2, 5, 5)
    document = document_of(model, (x,))
    before = {key: value.clone() for key, value in model.state_dict().items()}
    for number, tensor in enumerate(document["tensors"]):
        if tensor["name"] not in ("1.bias", "4.bias"):
            continue
        for i, unit in enumerate(tensor["head"]["values"]):
            broken = copy.deepcopy(document)
            broken["tensors"][number]["head"]["values"][i] = unit % document["units"] + 1
            broken = signed(broken)
            if check(broken).accepted:
                assert not check(broken, model=model, args=(x,)).accepted, (tensor["name"], i)
    broken = copy.deepcopy(document)
    units = broken["statistics"][0]["units"]
    broken["statistics"][0]["units"] = units[1:] + units[:1]
    assert not check(signed(broken), model=model, args=(x,)).accepted
    for place, accepted in fuzz(model, x, 150, 3):
        # what is left states the same graph in other words
        if place[0] not in ("model", "pinned", "trees"):
            assert place[0] in ("statistics", "tensors"), place
            same = [sorted(map(json.dumps, side[place[0]])) for side in (document, accepted)]
            assert same[0] == same[1], place
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
