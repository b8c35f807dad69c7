"""Every run of a recipe is built at its full size, and how it is trained is read from what was
built: whatever differs from the recipe is listed, and what is not listed does not differ.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from recipe_meters import METERS, Built, stand_in

from pathspace import Skeleton
from pathspace.training.experiments import recipe
from pathspace.training.experiments.reproduce import Setting
from pathspace.training.experiments.reproduce.recipes import (
    Cell,
    describe,
    full_arm,
    load_cells,
    runnable,
)
from pathspace.training.experiments.reproduce.trial import Trial, make_training
from pathspace.training.experiments.task import Task, one_thread
from pathspace.training.experiments.tasks import load_task

SKELETONS: dict[Any, Skeleton] = {}
CELLS = {name: cell for name, cell in load_cells().items() if not runnable(cell)}


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return stand_in(tmp_path_factory.mktemp("papers"))


@pytest.fixture(autouse=True)
def one_graph_for_each_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs that differ in the optimizer alone, and what reads them, share a skeleton: its graph is
    most of the time.
    """
    find = recipe.find_skeleton

    def remembered(task: Task, asked: recipe.Recipe) -> Skeleton:
        key = task.name, str(task.make_model(asked.seed)), asked.rule, asked.seed
        if key not in SKELETONS:
            SKELETONS[key] = find(task, asked)
        return SKELETONS[key]

    monkeypatch.setattr(recipe, "find_skeleton", remembered)


def kinds() -> Iterator[Any]:
    """Return one cell for each run that builds something else; how long it takes, its rate and the
    size of a penal connection build nothing.
    """
    seen: set[Trial] = set()
    for name, cell in CELLS.items():
        trial = full_arm("x", cell, Setting(run=lambda _: [])).base
        kind, *_ = trial.schedule.split()
        plain = replace(trial, lr=1.0, epochs=1, schedule=kind, tau=float(trial.tau > 0), clip=None)
        if plain not in seen:
            seen.add(plain)
            yield pytest.param(cell, id=name)


def build(cell: Cell, data: Path) -> tuple[Built, dict[str, Any]]:
    """Return a run before its first step, and its description."""
    arm = full_arm("x", cell, Setting(run=lambda _: [], scale="full", data=data))
    task = load_task(arm.base.task, **dict(arm.base.options))
    with one_thread():
        run = describe(arm.base, arm.rates, 5, 2, arm.decays)
        return Built(make_training(arm.base, task)[0]), run


@pytest.mark.slow
@pytest.mark.parametrize("cell", list(kinds()))
def test_what_is_built_is_what_is_described(cell: Cell, data: Path) -> None:
    built, run = build(cell, data)
    found = {key: meter(built) for key, meter in METERS.items()}
    rate, warmup, decay = (found.pop(key) for key in ("rates", "warmup", "decay"))
    assert decay == run["decay"] or decay in run["decay"]
    assert rate in run["rates"] and warmup == pytest.approx(run["warmup"], abs=run["epochs"] / 1000)
    assert found == {key: run[key] for key in found}
