"""Views of parameters: which movements stay views, and where the scalars of a view are."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from pathspace.inference.values import Weight

OFFSETS = {"before": 0, "w": 10}


@pytest.mark.parametrize(
    ("move", "view"),
    [
        (lambda t: t, True),
        (lambda t: t.T, True),
        (lambda t: t[1:, ::2], True),
        (lambda t: t.select(1, 2), True),
        (lambda t: t.unsqueeze(0).expand(4, -1, -1), True),
        (lambda t: t.T.reshape(-1), False),
        (lambda t: torch.cat([t, t]), False),
        (lambda t: t.flip(0), False),
    ],
)
def test_a_moved_weight_has_the_positions_of_its_scalars(
    move: Callable[[Tensor], Tensor], view: bool
) -> None:
    """A movement that copies leaves no strided view of the parameter, but the same positions."""
    whole = torch.arange(10, 16).reshape(2, 3)
    found = Weight.of("w", (2, 3)).moved(move, OFFSETS)
    assert (found.name == "w") == view and found.shape == move(whole).shape
    assert torch.equal(found.positions(OFFSETS), move(whole))
    # a second movement starts where the first ended
    again = found.moved(lambda t: t.unsqueeze(0), OFFSETS)
    assert (again.name == "w") == view and torch.equal(
        again.positions(OFFSETS), move(whole).unsqueeze(0)
    )
