"""What readings miss among changes of basis, by an upper bound on their dimension."""

from __future__ import annotations

import pytest
import torch
from oracles.spaces_bound import most_dimensions
from rotations.test_spaces import BETWEEN, Llama, two

import pathspace as ps

CLOSED = ("nothing", "other factors", "a length by hand", "groups", "a half-turn", "a turn", "GELU")


@pytest.mark.parametrize("name", CLOSED)
def test_nothing_is_missed_between_two_maps(name: str) -> None:
    torch.manual_seed(0)
    model, x = two(BETWEEN[name][0]), torch.randn(4, 3)
    found = ps.spaces(model, x)
    assert most_dimensions(model, found, x) == found.dimension


def test_a_language_model_has_no_other_changes_of_basis() -> None:
    torch.manual_seed(0)
    model, words = Llama(), torch.randint(11, (3, 6))
    found = ps.spaces(model, words)
    assert most_dimensions(model, found, words) == found.dimension == 66


def test_a_softmax_does_not_see_a_common_summand() -> None:
    """``I + 1 c^T`` adds one number to all features; the reading does not know this group."""
    torch.manual_seed(0)
    model, x = two(BETWEEN["a softmax"][0]), torch.randn(4, 3)
    found = ps.spaces(model, x)
    assert (found.dimension, most_dimensions(model, found, x)) == (0, 6)
