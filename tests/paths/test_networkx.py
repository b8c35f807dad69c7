"""The scalar graph for networkx: what nodes and edges carry, and when there is none."""

from __future__ import annotations

from math import prod

import networkx as nx
import pytest
import torch
from cases import mlp
from torch import nn

import pathspace as ps


def test_nodes_and_edges_carry_layers_and_weights() -> None:
    model = mlp(3, 4, 2)
    graph = ps.trace(model, torch.randn(5, 3))
    found = graph.to_networkx()
    assert set(found) == set(range(graph.num_units + 1))
    assert found.number_of_edges() == graph.num_weights
    parameters = dict(model.named_parameters())
    for _, head, facts in found.edges(data=True):
        weight = parameters[facts["name"]].flatten()[facts["index"]]
        assert facts["weight"] == weight.item() and f"{facts['layer']}." in facts["name"]
        if head:
            assert found.nodes[head]["layer"] == "0"


def test_paths_are_those_of_the_graph() -> None:
    graph = ps.trace(mlp(3, 4, 2), torch.randn(5, 3))
    found = graph.to_networkx()
    # inputs and outputs are one node, the root, so that every path is a cycle; networkx lists
    # cycles of nodes, and each edge between two of them is a choice
    count = sum(
        prod(
            found.number_of_edges(*ends) for ends in zip(cycle, cycle[1:] + cycle[:1], strict=True)
        )
        for cycle in nx.simple_cycles(found)
    )
    assert count == len(list(graph.paths()))


def test_graphs_of_many_weights_are_refused() -> None:
    graph = ps.trace(nn.Linear(400, 400), torch.randn(1, 400))
    with pytest.raises(ps.UnsupportedError, match="to_networkx found 160,400 edges"):
        graph.to_networkx()
