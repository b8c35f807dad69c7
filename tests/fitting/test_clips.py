"""Lifted clips: the same function, and bounds that move with the gauge."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import pathspace as ps


class Twice(nn.Module):
    """One clip at two places of different widths."""

    def __init__(self, clip: nn.Module) -> None:
        super().__init__()
        self.enter, self.depth, self.leave, self.clip = (
            nn.Conv2d(3, 8, 1),
            nn.Conv2d(8, 6, 3),
            nn.Linear(6, 2),
            clip,
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(self.clip(self.depth(self.clip(self.enter(x)))).mean((2, 3)))


@pytest.mark.slow
@pytest.mark.parametrize(
    "clip", [nn.ReLU6(), nn.ReLU6(inplace=True), nn.Hardtanh(-0.5, 0.2), nn.Hardtanh(-1, 0.0)]
)
def test_lifted_clips_are_the_same_function_with_free_scales(clip: nn.Module) -> None:
    model, x = Twice(clip).double(), torch.randn(3, 3, 8, 8).double()
    keys = set(model.state_dict())
    for lifted in (ps.lift_clips(model), ps.lift_clips(model, x)):
        assert set(model.state_dict()) == keys < set(lifted.state_dict())
        graph = ps.trace(lifted, x)
        assert ps.trace(model, x).num_units == 0 and graph.num_units == 14 and not graph.pinned
        for size in (0.01, 1.0, 100.0):
            assert torch.equal(lifted(size * x), model(size * x))
            moved = ps.rescale_(copy.deepcopy(lifted), graph, torch.randn(14, dtype=torch.float64))
            torch.testing.assert_close(moved(size * x), model(size * x), rtol=1e-9, atol=1e-9)


def test_bounds_lie_along_features_of_tokens() -> None:
    model, x = nn.Sequential(nn.Linear(3, 4), nn.ReLU6(), nn.Linear(4, 2)), torch.randn(2, 5, 3)
    lifted = ps.lift_clips(model, x)
    assert tuple(lifted.state_dict()["1.high.0"].shape) == (4,)
    assert ps.trace(lifted, x).num_units == 4


def test_nothing_to_lift_is_said() -> None:
    with pytest.raises(ps.InputError, match=r"found no nn\.ReLU6"):
        ps.lift_clips(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
