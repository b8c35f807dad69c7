"""Settings that all tests and examples share."""

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from zlib import crc32

import pytest
import torch
from hypothesis import settings

# what 'make mutants' runs, with a library that only it needs
collect_ignore = ["mutants.py"]

# Runs write a checkpoint every few steps, and wait for the disk each time; in
# memory this takes no time.
MEMORY = Path("/dev/shm")
if MEMORY.is_dir() and os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free > 4 << 30:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY))

# tests look at what commands leave in a folder; what Python leaves there is not theirs
sys.dont_write_bytecode = True
os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
# and commands buffer what they print, as they do for users
os.environ.pop("PYTHONUNBUFFERED", None)

# no test depends on time: a loaded machine is slow, not wrong
settings.register_profile("pathspace", deadline=None)
# 'make test' judges each change by the same networks; without the variable each run draws new ones
settings.register_profile("same", deadline=None, derandomize=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "pathspace"))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of a test with the mark ``sampled(n)`` the quick tests run about one case of n."""
    for item in items:
        mark = item.get_closest_marker("sampled")
        if mark is not None and crc32(item.name.encode()) % mark.args[0]:
            item.add_marker(pytest.mark.slow)


class SameDraws:
    """Each test and each example starts from the same random state, whatever ran
    before it in the process.
    """

    @pytest.fixture(autouse=True)
    def _seeded(self) -> Iterator[None]:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            yield


@pytest.fixture
def one_core() -> Iterator[None]:
    """Small models train on one thread: several would wait for each other."""
    from pathspace.training.experiments.task import one_thread

    with one_thread():
        yield


@pytest.fixture
def rules_that_failed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Errors of rules during a test: torch's decomposition then takes the rule's place,
    and often hides the error.
    """
    from pathspace.inference import interpreter

    found: list[str] = []
    shortened = interpreter.first_line

    def noted(error: Exception) -> str:
        found.append(repr(error))
        return shortened(error)

    monkeypatch.setattr(interpreter, "first_line", noted)
    return found


@pytest.fixture
def no_rule_fails(rules_that_failed: list[str]) -> Iterator[None]:
    """Every operation of the test is treated by its own rule, where it has one."""
    yield
    assert rules_that_failed == []


def pytest_configure(config: pytest.Config) -> None:
    """Seed the examples in the packages as well: they lie outside this folder."""
    config.pluginmanager.register(SameDraws())
