"""Path norms of networks around every registered operation: none that paths pass is
refused, and the sums are right.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from operations import Act, Par, network, registered
from rule_cases import COPYING, FORMS, TELLING
from torch import Tensor
from torch.utils import _pytree as pytree

import pathspace as ps
from pathspace.inference.interpreter import interpret
from pathspace.inference.registry import FACTS
from pathspace.inference.unrolled import Unrolled
from pathspace.models.finite import count_nonfinite
from pathspace.paths.path_facts import Request
from pathspace.paths.path_forward import ends_of_paths
from tests.inference.test_registry import prepared

EVERY: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
    *((name, *case) for table in (TELLING, COPYING) for name, case in table.items()),
    *((name, args, kwargs) for name, args, kwargs, _ in FORMS if registered(name) in FACTS),
]
# (bags are refused)
CASES = [case for case in EVERY if FACTS[registered(case[0])].kind != "bag"]

# kinds of operations that nothing passes, in any of the forms above
ENDING = ("function", "softmax", "rounding")

pytestmark = pytest.mark.filterwarnings("ignore")


class Passed(Unrolled):
    """The unrolled network, and whether a path ended before the outputs."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.ended: list[str] = []

    def fix(self, value: Tensor) -> None:
        super().fix(value)
        ids = value.unique().tolist()
        if self.place.op != "output" and any(node not in (0, 2**62) for node in ids):
            self.ended.append(self.place.op)


def norm(net: Any, p: float, until: str | None = None) -> float:
    ends = ends_of_paths(Request(net.captured, p, fixed_ends=until == "fixed"))
    return math.exp(np.logaddexp.reduce([end.total for end in ends]))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case[0])
def test_what_paths_pass_has_a_norm(case: tuple[str, tuple[Any, ...], dict[str, Any]]) -> None:
    name, args, kwargs = case
    net = network(name, args, kwargs)
    if any(count_nonfinite(weight) for weight in net.captured.parameters.values()):
        with pytest.raises(ps.InputError, match="NaN or infinite"):
            norm(net, 1)
        return
    shown = [node.meta.get("val") for node in net.captured.graph.graph.nodes]
    if any(isinstance(value, Tensor) and value.is_complex() for value in shown):
        with pytest.raises(ps.UnsupportedError, match="complex numbers"):
            norm(net, 1)
        assert norm(net, 1, "fixed") > 0
        return
    paths, _ = interpret(net.captured, Passed)
    found = "refused"
    with torch.no_grad():
        assert norm(net, 1, "fixed") >= 0
        facts, by_batch = (
            FACTS[registered(name)],
            "batch_norm" in name and any(a is True for a in args),
        )
        if not paths.ended and not by_batch:
            found = norm(net, 2)
        elif by_batch or facts.kind in ENDING:
            with pytest.raises(ps.UnsupportedError, match="until='fixed'"):
                norm(net, 2)
    read = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Act | Par)]
    # (the oracle knows operands that are real, and read once)
    plain = len(set(map(id, read))) == len(read) and not any(
        isinstance(leaf, Act) and leaf.through for leaf in read
    )
    # (a sum of truth values is not linear)
    if (
        isinstance(found, float)
        and facts.linear
        and plain
        and "fft" not in name
        and "dtype" not in kwargs
    ):
        assert found == pytest.approx(by_unit_vectors(case, net), rel=1e-9, abs=1e-30)


def by_unit_vectors(case: tuple[str, tuple[Any, ...], dict[str, Any]], net: Any) -> float:
    """The same from coefficients: what the operation makes of unit vectors in
    the place of its operands.
    """
    name, args, kwargs = case
    facts = FACTS[registered(name)]
    call, operands = prepared(name, args, kwargs)
    held = net.captured.parameters
    inside = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Act | Par)]
    keys = [key for key in held if not key.startswith("out")]
    sums = []
    for leaf, key in zip(inside, keys, strict=True):
        weight = held[key].detach().abs() ** 2
        sums.append(weight.sum(1).reshape(leaf.shape) if isinstance(leaf, Act) else weight)
    weights = [held[key].detach().abs() ** 2 for key in held if key.startswith("out")]
    total = 0.0
    zero = call([0 * each for each in operands])
    if facts.linear == "jointly":
        total += sum(
            float((z.abs().reshape(-1) ** 2 * w).sum()) for z, w in zip(zero, weights, strict=False)
        )
        for place, size in enumerate(sums):
            for at in itertools.product(*map(range, size.shape)):
                unit = [torch.zeros_like(each) for each in operands]
                unit[place][at] = 1.0
                for value, z, w in zip(call(unit), zero, weights, strict=False):
                    total += float(((value - z).abs().reshape(-1) ** 2 * w).sum() * size[at])
        return total
    bias = facts.bias if facts.bias is not None and facts.bias < len(operands) else None
    factors = [place for place in range(len(operands)) if place != bias]
    for at in itertools.product(
        *(itertools.product(*map(range, sums[place].shape)) for place in factors)
    ):
        unit = [torch.zeros_like(each) for each in operands]
        size = 1.0
        for place, index in zip(factors, at, strict=True):
            unit[place][index] = 1.0
            size *= float(sums[place][index])
        total += sum(
            float((v.abs().reshape(-1) ** 2 * w).sum()) * size
            for v, w in zip(call(unit), weights, strict=False)
        )
    if bias is not None:
        unit = [torch.zeros_like(each) for each in operands]
        unit[bias] = sums[bias].sqrt()
        total += sum(
            float((v.abs().reshape(-1) ** 2 * w).sum())
            for v, w in zip(call(unit), weights, strict=False)
        )
    return total


@pytest.mark.parametrize("name", ["to", "sum", "cumsum", "prod"])
def test_no_path_passes_a_conversion_to_integers(name: str) -> None:
    args = (Act((2, 3)),) if name == "to" else (Act((2, 3)), 1)
    net = network(name, args, {"dtype": torch.int64})
    with pytest.raises(ps.UnsupportedError, match="rounding is not homogeneous"):
        norm(net, 2)
    assert norm(net, 1, "fixed") > 0
