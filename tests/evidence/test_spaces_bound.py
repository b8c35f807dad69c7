"""The upper bound on changes of basis: closed on small networks, and open where one is missed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from rotations.test_spaces import BETWEEN, Llama, two

import pathspace as ps
from pathspace.errors import InputError
from pathspace.evidence.spaces_bound import spaces_bound

CLOSED = ("nothing", "other factors", "a length by hand", "groups", "a half-turn", "a turn", "GELU")


@pytest.mark.parametrize("name", CLOSED)
def test_nothing_is_missed_between_two_maps(name: str) -> None:
    model, x = two(BETWEEN[name][0]), torch.randn(4, 3)
    found = ps.spaces(model, x)
    assert spaces_bound(model, found, x).closed


def test_a_language_model_has_no_other_changes_of_basis() -> None:
    model, words = Llama(), torch.randint(11, (3, 6))
    found = ps.spaces(model, words)
    bound = spaces_bound(model, found, words)
    assert (bound.found, bound.at_most, bound.closed) == (66, 66, True)


def test_a_softmax_does_not_see_a_common_summand() -> None:
    """``I + 1 c^T`` adds one number to all features; the reading does not know this group."""
    model, x = two(BETWEEN["a softmax"][0]), torch.randn(4, 3)
    bound = spaces_bound(model, ps.spaces(model, x), x)
    assert (bound.found, bound.at_most) == (0, 6)


def test_what_a_reading_missed_leaves_the_bound_open() -> None:
    model, x = two(lambda x: x), torch.randn(4, 3)
    found = ps.spaces(model, x)
    missed = replace(found, spaces=tuple(replace(s, group="rigid") for s in found))
    bound = spaces_bound(model, missed, x)
    assert (bound.found, bound.at_most) == (0, 36)


def test_large_spaces_are_refused() -> None:
    model, x = two(lambda x: x, 100), torch.randn(4, 3)
    with pytest.raises(InputError, match="10,013 entries"):
        spaces_bound(model, ps.spaces(model, x), x)
