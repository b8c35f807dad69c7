"""The names of tasks and experiments without torch: a wrong name is an error at once."""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterable
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pathspace.errors import InputError, did_you_mean

FOLDER = Path(__file__).parent / "reproduce"


def read_toml(file: str) -> dict[str, Any]:
    """Read a file of the experiments, whose package imports torch."""
    return tomllib.loads((FOLDER / file).read_text(encoding="utf-8"))


@cache
def texts() -> dict[str, dict[str, Any]]:
    """Return the texts of all experiments."""
    return read_toml("experiments.toml")


# the tasks of this library -> their data, in the words of the recipes
TASKS: dict[str, str] = read_toml("recipes/data.toml")
PAGES = ("page", "claims", "recipes")
EXPERIMENTS = (*texts(), *PAGES)


def expect_packages() -> None:
    """Check that the packages are there that only the laboratory needs."""
    for name in ("filelock", "lightning", "sklearn"):
        if find_spec(name) is None:
            raise InputError(
                f"This command needs the package {name}; run: pip install -e '.[laboratory]'."
            )


def known_task(name: str) -> str:
    """Check the name of a task on the command line."""
    expect_packages()
    # (once the registry is imported, it decides itself, because it may have tasks of the user)
    if "pathspace.training.experiments.task" not in sys.modules:
        expect_known("task", name, TASKS)
    return name


def known_experiment(name: str) -> str:
    """Check the name of an experiment on the command line."""
    expect_packages()
    expect_known("experiment", name, EXPERIMENTS)
    return name


def experiments_help() -> str:
    """Return the experiments in a sentence, with what they are and their minutes."""
    return ", ".join(
        f"{name} ({one['summary']}; {one['minutes']})" for name, one in texts().items()
    )


def expect_known(what: str, name: str, names: Iterable[str]) -> None:
    """Refuse a name that does not exist."""
    names = list(names)
    if name not in names:
        raise InputError(
            f"There is no {what} '{name}'{did_you_mean(name, names)}; choose one of:"
            f" {', '.join(names)}."
        )
