"""Logarithms of prefix and suffix values along the trees: finite where the products
themselves leave the floats.
"""

from __future__ import annotations

import numpy as np

from ..errors import InputError
from .two_trees import TwoTrees


def log_prefixes(skeleton: TwoTrees, zeros: bool = False) -> np.ndarray:
    """``log |pre_v|`` for the root, every unit and every derived id, float64; with
    ``zeros``, that of 0 is ``-inf``.
    """
    return _log_along(skeleton, True, zeros)


def log_suffixes(skeleton: TwoTrees, zeros: bool = False) -> np.ndarray:
    """``log |suf_v|`` for the root, every unit and every derived id, float64; with
    ``zeros``, that of 0 is ``-inf``.
    """
    return _log_along(skeleton, False, zeros)


def _log_along(skeleton: TwoTrees, entering: bool, zeros: bool) -> np.ndarray:
    graph = skeleton.graph
    tree = skeleton.tree_in if entering else skeleton.tree_out
    weights = tree.gather(graph)
    if not zeros and bool((weights == 0).any()):
        unit = int((weights == 0).nonzero()[0])
        name = graph.blocks[int(tree.block[unit])].name
        raise InputError(
            f"The skeleton weight of unit {unit}, entry {int(tree.index[unit])} of {name!r}, is"
            " zero, expected skeleton weights other than zero; choose the skeleton again from the"
            " current model (units that only weights of 0 connect are in skeleton.dead)."
        )
    size, expand = weights.abs().log().numpy(), graph.expand
    result = np.zeros(graph.num_units + 1)
    for units in tree.rounds:
        own, both = tree.own[units], tree.own[units] * tree.other[units]
        step = np.where(tree.forward[units], own, -own)
        parents = np.where(both != 0, expand[tree.parent[units]] @ result, 0.0)
        with np.errstate(invalid="ignore"):
            result[units] = step * size[units] + both * parents + tree.rest[units] @ result
    every: np.ndarray = expand @ result
    # where products of scales make one tree serve both ways, the suffix is the prefix walked back
    return -every if graph.forms.shape[0] and not entering else every
