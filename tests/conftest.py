"""Settings that all tests and examples share."""

import os
from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

# what 'make mutants' runs, with a library that only it needs
collect_ignore = ["mutants.py"]

# no test depends on time: a loaded machine is slow, not wrong
settings.register_profile("pathspace", deadline=None)
# 'make test' judges each change by the same networks; without the variable each run draws new ones
settings.register_profile("same", deadline=None, derandomize=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "pathspace"))


class SameDraws:
    """Each test and each example starts from the same random state, whatever ran before it in the process."""

    @pytest.fixture(autouse=True)
    def _seeded(self) -> Iterator[None]:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int(os.environ.get("PATHSPACE_TEST_SEED", "0")))
            yield


def pytest_configure(config: pytest.Config) -> None:
    """Seed the examples in the packages as well: they lie outside this folder."""
    config.pluginmanager.register(SameDraws())
