"""The provenance of a result, and the data that it is known by.

Settings and a digest of the data are a run's key. Commit, processor and libraries stand beside its
result, which is found after a change of the code. On another processor sums are taken in another
order: runs of one seed end apart there, by about as much as two seeds do.
"""

from __future__ import annotations

import hashlib
import json
import platform
import re
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from ..task import Split, Task, load_task

# Packages on which the results of a run may depend.
PACKAGES = ("pathspace", "torch", "numpy", "scipy", "scikit-learn", "lightning")


def run_key(settings: Mapping[str, Any], data: str) -> str:
    """Return the name of a run: a digest of its settings and of its data."""
    told = json.dumps({**settings, "data": data}, sort_keys=True)
    return hashlib.sha256(told.encode()).hexdigest()[:20]


@cache
def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages on which a result may depend."""
    return {"python": platform.python_version(), **{name: version(name) for name in PACKAGES}}


def provenance() -> dict[str, str]:
    """Return commit, processor, system and versions of what computes here."""
    return {
        "commit": _commit(),
        "processor": _processor(),
        "system": f"{platform.system()} {platform.machine()}",
        **versions(),
    }


def together(origins: Sequence[dict[str, str]]) -> dict[str, str]:
    """Return the provenance of several results: by key, all values in their order."""
    keys = dict.fromkeys(key for origin in origins for key in origin)
    return {
        key: ", ".join(dict.fromkeys(one[key] for one in origins if key in one)) for key in keys
    }


@cache
def task_data(name: str, options: tuple[tuple[str, Any], ...]) -> Task:
    """Load a task once per process: trials of one experiment share its data."""
    return load_task(name, **dict(options))


@cache
def data_digest(name: str, options: tuple[tuple[str, Any], ...]) -> str:
    """Return a digest of all examples and labels of a task, as its model meets them."""
    task = task_data(name, options)
    return splits_digest((task.train, task.valid, task.test))


def splits_digest(splits: Iterable[Split]) -> str:
    """Return a digest of all examples and labels of splits."""
    found = hashlib.sha256()
    for split in splits:
        for tensor in (split.inputs, split.targets):
            found.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
            # (the array itself, not its bytes: large data are files that the system maps)
            found.update(tensor.detach().cpu().contiguous().numpy().data)
    return found.hexdigest()[:16]


@cache
def _commit() -> str:
    """Return the commit with which this process began, with a plus where files differ from it."""
    ask = ["git", "describe", "--always", "--exclude=*", "--abbrev=40", "--dirty=+"]
    try:
        return subprocess.run(
            ask, cwd=Path(__file__).parent, capture_output=True, text=True, check=True
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "none: not a checkout"


def _processor() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        text = ""
    found = re.search(r"^model name\s*: (.+)$", text, re.MULTILINE)
    return found[1].strip() if found else platform.processor() or "unknown"
