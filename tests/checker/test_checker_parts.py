"""The parts of the checker, each against a slow and obvious counterpart."""

from __future__ import annotations

import json
import math
import random
from typing import Any

import networkx as nx
import numpy as np
import pytest
import torch
from cases import network
from checker.test_forged_proofs import incidence, sealed
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import pathspace as ps
from pathspace.checker import check
from pathspace.checker.bench import numbers_of, redrawn_values, scale_exponents
from pathspace.checker.document import Rejected, integers, read_tensors
from pathspace.checker.trees import count
from pathspace.evidence.proof import proof


def random_document(generator: random.Random, products: int) -> dict[str, Any]:
    """One vector of weights whose edges join random units, and two trees that are
    often right and often wrong.

    What is stated of the trees is right whenever they are trees.
    """
    units = generator.randint(1, 6)
    powers_of = [
        {
            unit: generator.choice((-2, -1, 1, 2))
            for unit in generator.sample(range(1, units + 1), min(units, 2))
        }
        for _ in range(products)
    ]
    tails, heads, trees = [], [], {}
    order = generator.sample(range(1, units + 1), units)
    for side in ("in", "out"):
        index = []
        for place, unit in enumerate(order):
            before = [0, *order[:place]]
            after = order[place + 1 :] if generator.random() < 0.1 else []
            other = generator.choice(before + after)
            if products and generator.random() < 0.3:
                other = units + generator.randint(1, products)
            ends = [unit, other * generator.choice((1, -1) if products else (1,))]
            generator.shuffle(ends)
            if side == "out" and generator.random() < 0.4:
                index.append(trees["in"]["index"][trees["in"]["order"].index(unit)])
                continue
            index.append(len(tails))
            tails.append(ends[0])
            heads.append(ends[1])
        trees[side] = {"order": list(order), "tensor": [0] * units, "index": index}
        if generator.random() < 0.5:
            order = generator.sample(range(1, units + 1), units)
    if products:
        trees["out"] = trees["in"]
    for _ in range(generator.randint(0, 3)):
        tails.append(generator.randint(0, units))
        heads.append(generator.randint(0, units))
    size = len(tails)
    ends_of = {"tail": tails, "head": heads}
    tensor = {
        "name": "w",
        "shape": [size],
        "unused": None,
        "edges": size,
        **{side: {"shape": [size], "values": values} for side, values in ends_of.items()},
    }
    shared = set(trees["in"]["index"]) & set(trees["out"]["index"])
    forest = nx.Graph()
    forest.add_nodes_from(range(units + 1))
    forest.add_edges_from(
        (tails[edge], heads[edge])
        for edge in shared
        if max(abs(tails[edge]), abs(heads[edge])) <= units
    )
    chains = 0 if products else nx.number_connected_components(forest) - 1
    return {
        "units": units,
        "weights": size,
        "dimension": size - units,
        "tensors": [tensor],
        "products": [[[unit, times] for unit, times in row.items()] for row in powers_of],
        "statistics": [],
        "pinned": [],
        "unused": [],
        "trees": trees,
        "shared_edges": len(shared),
        "chains": chains,
        "basis_paths": chains + size - (2 * units - len(shared)),
    }


def sound(document: dict[str, Any]) -> bool:
    """Triangular rows with +-1 on the diagonal for both trees, and one
    entering edge for each chain.
    """
    units, trees = document["units"], document["trees"]
    for tree in trees.values():
        rows = incidence(document)[tree["index"]][:, np.array(tree["order"]) - 1]
        if np.triu(rows, 1).any() or not (np.abs(np.diag(rows)) == 1).all():
            return False
    if document["products"]:
        return document["basis_paths"] == document["dimension"]
    (tensor,) = document["tensors"]
    pairs = list(zip(tensor["tail"]["values"], tensor["head"]["values"], strict=True))
    edge_of = {
        side: dict(zip(tree["order"], tree["index"], strict=True)) for side, tree in trees.items()
    }
    shared = set(edge_of["in"].values()) & set(edge_of["out"].values())
    forest = nx.MultiGraph()
    forest.add_nodes_from(range(units + 1))
    forest.add_edges_from(pairs[edge] for edge in shared)
    if not nx.is_forest(forest):
        return False
    for chain in nx.connected_components(forest):
        entering = sum(edge_of["in"][unit] not in shared for unit in chain if unit)
        if entering != (0 not in chain):
            return False
    return bool(document["basis_paths"] == document["dimension"])


def accepted(document: dict[str, Any]) -> bool:
    try:
        count(document, list(read_tensors(document)), document["weights"], document["units"])
    except Rejected:
        return False
    return True


@pytest.mark.parametrize("products", [0, 1, 2])
def test_two_trees_are_accepted_where_their_rows_are_triangular(products: int) -> None:
    generator = random.Random(products)
    found = [
        (accepted(d), sound(d)) for d in (random_document(generator, products) for _ in range(1500))
    ]
    assert all(ours == theirs for ours, theirs in found)
    share = sum(ours for ours, _ in found) / len(found)
    # both answers are frequent enough to mean something
    assert 0.1 < share < 0.9


@given(
    st.integers(0, 1000),
    st.sampled_from(["near", "new", "signs"]),
    st.sampled_from(["running_var", "running_mean", "weight"]),
)
def test_numbers_drawn_again_are_other_numbers_of_the_same_size(
    seed: int, manner: str, name: str
) -> None:
    value = torch.randn(200, generator=torch.Generator().manual_seed(seed)).double() * 7
    value[:20] = 0
    if name == "running_var":
        value = value.abs()
    drawn = redrawn_values(name, value, seed + 1, manner)
    assert drawn.shape == value.shape and not (drawn == value).any()
    assert 0.2 < float(drawn.abs().mean() / value.abs().mean()) < 5
    if name == "running_var" or manner == "signs":
        assert (drawn[20:].sign() == value[20:].sign()).all() and (drawn[:20] > 0).all()
    elif name == "weight":
        assert (drawn[20:].sign() != value[20:].sign()).any() and (drawn[:20] < 0).any()
    assert torch.equal(drawn, redrawn_values(name, value, seed + 1, manner))


@given(st.integers(0, 1000), st.integers(1, 9), st.integers(1, 40))
def test_scales_are_powers_of_two_that_no_product_overflows(
    seed: int, largest: int, times: int
) -> None:
    products = [{1: times, 2: -times}, {3: 1, 4: 1}]
    phi = scale_exponents(products, 6, np.random.default_rng(seed), largest)
    assert phi.shape == (9,) and phi[0] == 0
    # (units 5 and 6 belong to no product)
    assert np.array_equal(phi[5:7], np.round(phi[5:7])) and np.abs(phi[:7]).max() <= largest
    assert phi[7] == pytest.approx(times * (phi[1] - phi[2])) and phi[8] == phi[3] + phi[4]
    assert abs(phi[7]) <= 64 + 1e-9 or 2 * times * largest <= 64
    room = 64 / (2 * times)
    if room < largest:
        assert np.abs(phi[1:3]).max() <= room + 1e-9
    if room >= 1:
        assert np.array_equal(phi[1:3], np.round(phi[1:3]))


def wary(net: Any, x: Tensor) -> Tensor:
    """Refuses large inputs, as a model that checks its inputs does."""
    # (a trace runs on tensors without values)
    if type(x) is Tensor and float(x.abs().max()) > 20:
        raise ValueError("expected inputs below 20")
    return net.second(net.first(x).relu())


def test_inputs_that_a_model_refuses_are_left_out() -> None:
    model = network(wary, first=nn.Linear(3, 5), second=nn.Linear(5, 2))
    x = torch.rand(4, 3) + 0.5
    judgement = check(proof(ps.trace(model, x).skeleton(), "net"), model=model, args=(x,))
    assert judgement.accepted and judgement.compared == "outputs", judgement.reason
    large = check(proof(ps.trace(model, x).skeleton(), "net"), model=model, args=(100 * x,))
    assert not large.accepted and "the model fails on these inputs" in large.reason
    assert math.isfinite(large.seconds)


def test_running_means_that_start_at_zero_are_drawn_again() -> None:
    model = nn.Sequential(
        nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 2)
    ).eval()
    x = torch.randn(8, 2, 4, 4)
    document = json.loads(json.dumps(proof(ps.trace(model, x).skeleton(), "net")))
    assert check(document, model=model, args=(x,)).accepted
    (statistic,) = document["statistics"]
    assert not model[1].running_mean.any() and statistic["mean"] == "1.running_mean"
    # a mean that stays where it is while its channel is rescaled: nothing shows at 0
    statistic["mean"] = None
    assert check(sealed(document)).accepted
    assert not check(sealed(document), model=model, args=(x,)).accepted
    assert {name for name, _ in numbers_of(model)} == {"", "running_mean", "running_var"}


@pytest.mark.parametrize(
    ("values", "length", "reason"),
    [
        ({}, 0, "is not a list"),
        ({"runs": [[0, 1, 2]], "more": []}, 2, "is not a list"),
        ({"runs": [[0, 1]]}, 2, "malformed run"),
        ({"runs": [[0, 1, 0]]}, 0, "malformed run"),
        ({"runs": [[0, 1, 2]]}, 3, "wrong length"),
        # (the last number would be 2^62, one step beyond the largest that fits with its sign)
        ({"runs": [[0, 1 << 60, 4]]}, 4, "too large"),
        ({"runs": [[1 << 62, 0, 1]]}, 1, "too large"),
        ([1, True], None, "something else than whole numbers"),
    ],
)
def test_malformed_lists_are_rejected(values: Any, length: int | None, reason: str) -> None:
    with pytest.raises(Rejected, match=reason):
        integers(values, "it", length)


def test_runs_are_what_they_abbreviate() -> None:
    assert integers({"runs": [[3, -2, 3], [7, 0, 2]]}, "it", 5).tolist() == [3, 1, -1, 7, 7]


def test_a_tensor_is_listed_once() -> None:
    tensor = {"name": "w", "shape": [1], "unused": None, "edges": 1}
    ends = {side: {"shape": [1], "values": [0]} for side in ("tail", "head")}
    document = {"units": 0, "products": [], "tensors": [{**tensor, **ends}] * 2}
    with pytest.raises(Rejected, match="'w' is listed twice"):
        list(read_tensors(document))


def test_whole_numbers_in_a_model_have_no_scale() -> None:
    """A forger who takes a counter for a running mean."""
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1)).eval()
    model[1].register_buffer("counts", torch.ones(3, dtype=torch.long))
    document = proof(ps.trace(model, torch.randn(4, 2)).skeleton())
    assert check(document, model=model, args=(torch.randn(4, 2),)).accepted
    document["statistics"][0]["mean"] = "1.counts"
    judgement = check(sealed(document), model=model, args=(torch.randn(4, 2),))
    assert "1.counts holds whole numbers" in judgement.reason
