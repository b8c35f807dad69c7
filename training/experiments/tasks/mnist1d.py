"""``mnist1d``: digits drawn as 40 numbers in a row, by the program of the package mnist1d.

The program draws as many as one wants, so that the test set can be large. It is fetched, checked
and run, not installed.
"""

from __future__ import annotations

import importlib
import importlib.util
import random
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch

from pathspace.errors import InputError

from ..data import digest_of, given, source
from ..task import Split, Task, register_task
from .digits import sequence_task

LENGTH = 40


def program_of(folder: Path) -> Any:
    """Import the program ``mnist1d.data`` from a folder, if it has the known digest."""
    for file, digest in source("mnist1d").files.items():
        if digest_of(folder / file) != digest:
            raise InputError(
                f"The file '{folder / file}' is not that of the known version of MNIST-1D, so it"
                " is not run; bring it with 'pathspace data fetch mnist1d'."
            )
    spec = importlib.util.spec_from_file_location(
        "mnist1d", folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None and spec.loader is not None
    package = importlib.util.module_from_spec(spec)
    added = {"mnist1d": package}
    if "requests" not in sys.modules:
        # (the program imports it for a download that does not take place here)
        added["requests"] = ModuleType("requests")
    sys.modules.update(added)
    try:
        spec.loader.exec_module(package)
        return importlib.import_module("mnist1d.data")
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] in added]:
            del sys.modules[name]


def draw(program: Any, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Draw digits with the program's own settings and seed."""
    settings = program.get_dataset_args()
    vars(settings).update(num_samples=-(-count // 10) * 10, train_split=1.0)
    drawn, state = random.getstate(), np.random.get_state()
    try:
        found = program.make_dataset(settings)
    finally:
        # the program seeds the global generators
        random.setstate(drawn)
        np.random.set_state(state)
    return found["x"][:count], found["y"][:count]


@register_task("mnist1d")
def mnist1d(
    hidden: int = 100,
    steps: int = 10,
    limit: int = 4000,
    tests: int = 10_000,
    data: str | None = None,
) -> Task:
    """Build the task: a digit from 40 numbers that are read step by step, by a ReLU RNN.

    Reference:
        Scaling Down Deep Learning with MNIST-1D, https://arxiv.org/abs/2011.14439.
    """
    if steps < 1 or LENGTH % steps:
        raise InputError(
            f"Task 'mnist1d' got steps = {steps}; give a number that divides {LENGTH}."
        )
    if limit < 4 or tests < 1:
        raise InputError(
            f"Task 'mnist1d' got limit = {limit} and tests = {tests}; give at least 4 training"
            " items and 1 test item."
        )
    quarter = limit // 4
    values, digits = draw(program_of(given("mnist1d", data, "mnist1d")), limit + quarter + tests)
    inputs = torch.tensor(values, dtype=torch.float32).view(len(values), steps, -1)
    targets = torch.tensor(digits, dtype=torch.int64)
    sizes = [limit, quarter, tests]
    parts = [Split(x, y) for x, y in zip(inputs.split(sizes), targets.split(sizes), strict=True)]
    return sequence_task("mnist1d", "MNIST-1D", parts, hidden, permuted=False)
