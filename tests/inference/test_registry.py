"""What the table states of operations is true of them, run on random numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from operations import Act, Par, overload_of, registered
from rule_cases import COPYING, FORMS, TAKEN_APART, TELLING
from torch import Tensor
from torch.utils import _pytree as pytree

from pathspace.inference.registry import FACTS, KINDS, RULES, Facts, facts_of, rule

CASES: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
    *((name, *case) for table in (TELLING, COPYING) for name, case in table.items()),
    *((name, *case) for name, case in TAKEN_APART.items() if registered(name) in FACTS),
    *((name, args, kwargs) for name, args, kwargs, _ in FORMS if registered(name) in FACTS),
]
Call = Callable[[list[Tensor]], list[Tensor]]

pytestmark = pytest.mark.filterwarnings("ignore")


def prepared(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Call, list[Tensor]]:
    """An operation as a function of its real operands, and random values for them."""
    generator = torch.Generator().manual_seed(0)
    values: dict[int, Tensor] = {}
    for leaf in pytree.tree_leaves((args, kwargs)):
        if isinstance(leaf, Act | Par) and id(leaf) not in values:
            numbers = torch.rand(leaf.shape, generator=generator, dtype=torch.float64)
            low, high = (leaf.low, leaf.high) if isinstance(leaf, Act) else (-1.0, 1.0)
            value = numbers * (high - low) + low
            value = (
                leaf.values.clone() if isinstance(leaf, Act) and leaf.values is not None else value
            )
            for step in leaf.through if isinstance(leaf, Act) else ():
                value = step[0](value, *step[1:])
            values[id(leaf)] = value
    real = [key for key, value in values.items() if value.is_floating_point() or value.is_complex()]
    first = pytree.tree_map(
        lambda a: values[id(a)] if isinstance(a, Act | Par) else a, (args, kwargs)
    )
    overload, _ = overload_of(name, *first)

    def call(operands: list[Tensor]) -> list[Tensor]:
        own = values | dict(zip(real, operands, strict=True))
        given = pytree.tree_map(
            lambda a: (
                own[id(a)].clone()
                if isinstance(a, Act | Par)
                else a.clone()
                if isinstance(a, Tensor)
                else a
            ),
            (args, kwargs),
        )
        torch.default_generator.manual_seed(0)
        found = pytree.tree_leaves(overload(*given[0], **given[1]))
        return [
            leaf.to(torch.float64 if not leaf.is_complex() else leaf.dtype)
            for leaf in found
            if is_number(leaf)
        ]

    return call, [values[key] for key in real]


def is_number(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and (
        leaf.is_floating_point() or leaf.is_complex() or leaf.dtype == torch.bool
    )


def same(one: list[Tensor], two: list[Tensor]) -> bool:
    return all(
        torch.allclose(a, b, rtol=1e-5, atol=1e-7, equal_nan=True)
        for a, b in zip(one, two, strict=True)
    )


def is_homogeneous(call: Call, operands: list[Tensor], facts: Facts) -> bool:
    """``f(c x) = c^d f(x)`` in each operand by itself, or in all together."""
    together = len(facts.degree) == 1
    bias = [facts.bias] if facts.bias is not None and len(operands) > facts.bias else []
    for place in [None] if together else [i for i in range(len(operands)) if i not in bias]:
        changed = [
            value * 1.7 if place in (None, i) or i in bias else value
            for i, value in enumerate(operands)
        ]
        degree = facts.degree[0]
        if not same(call(changed), [value * 1.7**degree for value in call(operands)]):
            return False
    return True


def is_affine(call: Call, operands: list[Tensor], places: list[int]) -> bool:
    """Whether an operation is linear in the operands at places together, up to a constant."""
    ways = [
        [value * (factor if i in places else 1) for i, value in enumerate(operands)]
        for factor in (0.0, 1.0, 2.5)
    ]
    zero, one, more = map(call, ways)
    turned = [
        value.flip(0) if i in places and value.dim() else value for i, value in enumerate(operands)
    ]
    both = [
        v + w if i in places else v for i, (v, w) in enumerate(zip(operands, turned, strict=True))
    ]
    scaled = same(more, [z + 2.5 * (o - z) for z, o in zip(zero, one, strict=True)])
    added = [o + t - z for z, o, t in zip(zero, one, call(turned), strict=True)]
    return scaled and same(call(both), added)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case[0])
def test_what_is_stated_is_true(case: tuple[str, tuple[Any, ...], dict[str, Any]]) -> None:
    name, args, kwargs = case
    facts = FACTS[registered(name)]
    call, operands = prepared(name, args, kwargs)
    assert facts.kind in KINDS and facts.kind
    if kwargs.get("dtype") in (torch.int64, torch.int32, torch.bool):
        # what is stated says nothing of a conversion inside of the operation
        return
    # numbers among the operands that are not coefficients: fills, constants added, margins
    fixed = any(isinstance(a, Tensor) and a.is_floating_point() for a in pytree.tree_leaves(args))
    constants = (
        fixed
        or any(isinstance(a, float) for a in args)
        or facts.kind in ("sum", "combination", "choice")
    )
    if facts.degree and not constants:
        assert is_homogeneous(call, operands, facts)
    if facts.linear == "jointly" and operands:
        assert is_affine(call, operands, list(range(len(operands))))
    # (an operand that is read twice is in no product linear)
    read = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Act | Par)]
    if facts.linear == "each" and len(set(map(id, read))) == len(read):
        bias = [facts.bias] if facts.bias is not None and facts.bias < len(operands) else []
        for place in (i for i in range(len(operands)) if i not in bias):
            assert is_affine(call, operands, [place, *bias])
    if facts.linear and facts.coefficients != "real" and operands and not operands[0].is_complex():
        ones = [torch.ones_like(value) for value in operands]
        start = call([value * 0 for value in ones])
        for value, before in zip(call(ones), start, strict=True):
            assert bool((value - before >= -1e-12).all())
            if facts.coefficients == "one":
                assert torch.allclose(value, value.round())
    if facts.elementwise and operands:
        for value in call(operands):
            assert value.shape == torch.broadcast_shapes(
                *(each.shape for each in operands), value.shape
            )


# moving, writing and choosing places is elementwise only by chance; the last one
# has outputs that are not
PLACES = set("write random movement repetition creation order choice".split())
BY_CHANCE = {"aten.log_sigmoid_forward"}


def entry_by_entry(call: Call, operands: list[Tensor]) -> bool | None:
    """Whether the first entry depends on first entries alone; ``None``: nobody can say."""
    results = call(operands)
    shape = max((value.shape for value in operands), key=torch.Size.numel)
    if not results or shape.numel() < 2 or any(value.shape != shape for value in results):
        return None
    for place in (i for i, value in enumerate(operands) if value.shape == shape):
        moved = operands[place].flatten()
        steps = torch.linspace(0.1, 0.5, len(moved), dtype=moved.dtype)
        for first in (True, False):
            chosen = (torch.arange(len(moved)) == 0) == first
            changed = torch.where(chosen, moved + steps, moved).view(shape)
            again = call([changed if i == place else value for i, value in enumerate(operands)])
            for before, after in zip(results, again, strict=True):
                if not torch.equal(
                    before.flatten()[~chosen].nan_to_num(), after.flatten()[~chosen].nan_to_num()
                ):
                    return False
    return True


def test_what_is_elementwise_is_stated_so() -> None:
    found: dict[str, list[bool | None]] = {}
    for name, args, kwargs in CASES:
        call, operands = prepared(name, args, kwargs)
        if operands and FACTS[registered(name)].kind not in PLACES:
            found.setdefault(registered(name), []).append(entry_by_entry(call, operands))
    seen = {name for name, kept in found.items() if True in kept and False not in kept}
    assert {name for name in seen if not FACTS[name].elementwise} <= BY_CHANCE
    assert not {name for name, kept in found.items() if FACTS[name].elementwise and False in kept}
    assert len(seen) > 120


def test_slopes_are_the_largest_ones() -> None:
    x = torch.linspace(-12, 12, 48001, dtype=torch.float64)
    for name, facts in FACTS.items():
        if facts.slope is None or name.endswith("_") or name in ("aten.log_sigmoid_forward",):
            continue
        packet = getattr(torch.ops.aten, name.removeprefix("aten."), None)
        if packet is None:
            continue
        settings = (
            (0.0, 2.0)
            if facts.kind == "clip" and "_m" not in name
            else (0.5,)
            if facts.kind == "clip"
            else ()
        )
        value = packet(x, *settings)
        steepest = float((value.diff() / x.diff()).abs().max())
        assert steepest <= facts.slope + 1e-9, name
        assert steepest >= 0.98 * facts.slope, name


def test_rotations_keep_lengths_and_turn_what_is_divided_by_them() -> None:
    x, turn = torch.randn(3, 4), torch.linalg.qr(torch.randn(4, 4)).Q
    calls = {
        "aten.norm": lambda y: y.norm(2, -1),
        "aten.linalg_vector_norm": lambda y: torch.linalg.vector_norm(y, 2, -1),
        "aten.rms_norm": lambda y: torch.rms_norm(y, (4,)),
    }
    assert {name for name, facts in FACTS.items() if facts.rotations} == set(calls)
    for call in calls.values():
        before = call(x)
        torch.testing.assert_close(call(x @ turn), before @ turn if before.dim() == 2 else before)


def test_facts_are_found_by_name_node_and_variant() -> None:
    assert facts_of("relu") is facts_of("aten.relu") is facts_of(torch.ops.aten.relu.default)
    assert facts_of("some_library.unknown") == Facts()
    assert set(RULES) <= set(FACTS)
    with pytest.raises(ValueError, match="expected one of"):
        rule("mylib.bent", kind="nonsense")
