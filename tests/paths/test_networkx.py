"""Paths of a graph are the cycles that networkx finds through its root."""

from __future__ import annotations

from math import prod

import networkx as nx
import torch
from cases import mlp

import pathspace as ps


def test_paths_are_those_of_the_graph() -> None:
    graph = ps.trace(mlp(3, 4, 2), torch.randn(5, 3))
    found = nx.MultiDiGraph()
    found.add_edges_from(zip(*(ends.tolist() for ends in graph.ends()), strict=True))
    # inputs and outputs are one node, the root, so that every path is a cycle; networkx lists
    # cycles of nodes, and each edge between two of them is a choice
    count = sum(
        prod(
            found.number_of_edges(*ends) for ends in zip(cycle, cycle[1:] + cycle[:1], strict=True)
        )
        for cycle in nx.simple_cycles(found)
    )
    assert count == len(list(graph.paths()))
