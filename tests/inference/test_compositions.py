"""Scales of random compositions leave their functions unchanged, and disguises change no count."""

from __future__ import annotations

import pytest
from compositions import examined, planned

# prints and warnings of other libraries say nothing here
pytestmark = [pytest.mark.filterwarnings("ignore")]
SLOW = [pytest.param(seed, marks=pytest.mark.slow) for seed in range(30, 360)]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("seed", [*range(30), *SLOW])
def test_units_of_random_compositions(seed: int) -> None:
    """Every symmetry exists, at other inputs too, and one network has one number of them."""
    found = examined(planned(seed))
    assert not found.unsound and not found.unlike and not found.refused
