"""Random networks and multigraphs for hypothesis, drawn as specifications of plain integers."""

from __future__ import annotations

import os
from typing import Any

import networkx as nx
import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

EXAMPLES = int(os.environ.get("PATHSPACE_EXAMPLES", "30"))
modest = settings(
    max_examples=EXAMPLES,
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)

seeds = st.integers(0, 999)
rules = st.sampled_from(["modulo", "magnitude", "random"])


def dag_specs() -> st.SearchStrategy[Any]:
    """Arguments of `RandomDag`."""
    node = st.tuples(
        st.sampled_from([0, 0, 0, 1, 2]), st.integers(0, 6), st.integers(1, 4), st.integers(0, 1)
    )
    return st.tuples(
        st.integers(1, 3), st.integers(1, 2), st.lists(node, min_size=1, max_size=6), seeds
    )


def tied_dag_specs() -> st.SearchStrategy[Any]:
    """Arguments of `RandomDag` with products of activations and matrices used
    several times, also transposed.
    """
    kinds = st.sampled_from([0, 0, 1, 2, 3, 4, 4])
    node = st.tuples(kinds, st.integers(0, 6), st.integers(1, 3), st.integers(0, 1))
    return st.tuples(
        st.integers(1, 2), st.integers(1, 2), st.lists(node, min_size=2, max_size=5), seeds
    )


def conv_specs() -> st.SearchStrategy[Any]:
    """Arguments of `RandomConv`."""
    layer = st.tuples(
        st.integers(0, 4), st.integers(1, 3), st.sampled_from([1, 3]), st.integers(0, 1)
    )
    # more than two 3x3 kernels in a row make more paths than it is worth to count
    few = st.lists(layer, min_size=1, max_size=4).filter(
        lambda ls: sum(k == 3 for _, _, k, _ in ls) <= 2
    )
    return st.tuples(st.integers(1, 2), st.integers(1, 2), few, st.booleans(), seeds)


def rnn_specs() -> st.SearchStrategy[Any]:
    """Arguments of `random_rnn`: two or more steps, since one step never
    uses the recurrent weights.
    """
    hidden = st.lists(st.integers(1, 3), min_size=1, max_size=3)
    forms = st.sampled_from(["op", "zeros", "none"])
    return st.tuples(
        st.integers(1, 3),
        hidden,
        st.integers(1, 2),
        st.integers(2, 4),
        st.booleans(),
        st.booleans(),
        forms,
        seeds,
    )


@st.composite
def rooted_multigraphs(draw: Any) -> tuple[list[tuple[int, int]], dict[int, Any], dict[int, Any]]:
    """A connected directed multigraph on `0..H` and two random spanning trees of it.

    Returns:
        Edges (tail, head), and for both trees `{v: (edge, forward)}` as in
        `oracles.gsgd.signed_walk`.
    """
    units = draw(st.integers(0, 6))
    extra = draw(st.lists(st.tuples(st.integers(0, units), st.integers(0, units)), max_size=10))
    generator = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    edges = list(extra)
    for v in range(1, units + 1):
        u = int(generator.integers(v))
        edges.append((u, v) if generator.random() < 0.5 else (v, u))
    order = generator.permutation(len(edges))
    edges = [edges[i] for i in order]
    return (
        edges,
        spanning_tree(edges, units, generator, True),
        spanning_tree(edges, units, generator, False),
    )


def spanning_tree(
    edges: list[tuple[int, int]], units: int, generator: np.random.Generator, entering: bool
) -> dict[int, Any]:
    """A random spanning tree: for each unit its first edge towards the root,
    and that edge's direction.
    """
    graph = nx.MultiGraph()
    graph.add_nodes_from(range(units + 1))
    for number, (tail, head) in enumerate(edges):
        graph.add_edge(tail, head, key=number, weight=generator.random())
    tree = nx.minimum_spanning_tree(graph)
    steps: dict[int, Any] = {}
    for parent, unit in nx.bfs_edges(tree, 0):
        (number,) = tree[parent][unit]
        tail, head = edges[number]
        steps[unit] = (number, (head if entering else tail) == unit)
    return steps
