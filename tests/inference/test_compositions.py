"""Scales of random compositions leave their functions unchanged, and disguises change no count."""

from __future__ import annotations

import pytest
import torch
from compositions import built, examined, inputs, planned, shrunk

from pathspace.inference.scales import Scales

# prints and warnings of other libraries say nothing here
pytestmark = [pytest.mark.filterwarnings("ignore")]
SLOW = [pytest.param(seed, marks=pytest.mark.slow) for seed in range(30, 360)]


@pytest.mark.parametrize("seed", [*range(30), *SLOW])
def test_units_of_random_compositions(seed: int) -> None:
    """Every symmetry exists, at other inputs too, and one network has one number of them."""
    found = examined(planned(seed))
    assert not found.unsound and not found.unlike and not found.refused


def test_a_seed_gives_one_network() -> None:
    plan = planned(5)
    assert plan == planned(5) != planned(6)
    one, other = built(plan).state_dict(), built(plan).state_dict()
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    assert built(plan)(inputs(plan)).isfinite().all()


@pytest.mark.slow
def test_a_tie_that_is_not_recorded_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ids that stand for others, without a flow from these, make weights behind them unused."""
    product = Scales.product

    def forgetful(scales: Scales, *factors: tuple[int, torch.Tensor]) -> torch.Tensor:
        with monkeypatch.context() as patch:
            patch.setattr(scales.flows, "into", lambda *_: None)
            return product(scales, *factors)

    monkeypatch.setattr(Scales, "product", forgetful)
    plan = planned(1)
    assert examined(plan, alike=False).unsound
    less = shrunk(plan, lambda found: found.unsound)
    assert len(less.motifs) <= 2 and examined(less, alike=False).unsound
