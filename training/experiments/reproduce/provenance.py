"""The provenance of a result: its code and its data, and the computer and the
libraries that computed it.

Digests of code and data are part of a trial's name in the journal: other labels or another step of
an optimizer make another trial. Processor and libraries are not, they are noted: sums of
floating-point numbers are taken in another order elsewhere, so that runs of one seed on two
processors end apart, by about as much as two seeds do.
"""

from __future__ import annotations

import ast
import hashlib
import platform
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from ...config import versions
from ...task import Split, Task, load_task

# What decides how a trial ends. The analysis of models is not among it but for the choice of the
# skeleton and of the additions that are penalised: tests hold it to oracles, and it is too large
# to begin anew after each change. Experiments and pages decide nothing.
DECIDING = (
    *(
        "training/trainer.py",
        "training/batches.py",
        "training/recipe.py",
        "training/optim",
        "training/task.py",
        "training/launch.py",
        "training/threads.py",
        "training/schedules.py",
        "training/stopping.py",
        "training/checkpoint.py",
        "training/recurrent_part.py",
    ),
    *(
        "training/penal.py",
        "training/penal_gradients.py",
        "training/sums_again.py",
        "training/norms_again.py",
        "diagnostics/addition_hooks.py",
        "diagnostics/nodes.py",
        "diagnostics/residual.py",
        "diagnostics/penalty_disabled.py",
        "diagnostics/efficiency.py",
    ),
    *("training/experiments/augment.py", "training/experiments/data.py"),
    *("training/experiments/tasks", "training/experiments/models"),
    "training/experiments/reproduce/trial.py",
    *("edge_rows.py", "trees.py", "two_trees.py", "spanning_tree.py", "skeleton.py"),
)
# the same for a run of the leaderboard, which has a loop of its own
DECIDING_RUNS = (
    *("training/optim", "training/threads.py", "training/task.py"),
    *("training/experiments/adapters.py", "training/experiments/data.py"),
    *("training/experiments/tasks", "training/experiments/models"),
    *(
        f"training/experiments/reproduce/{name}"
        for name in ("leaderboard_run.py", "leaderboard_tasks.py")
    ),
    *("edge_rows.py", "trees.py", "two_trees.py", "spanning_tree.py", "skeleton.py"),
    *("rescale.py", "moves.py", "pairs.py", "log_prefix.py", "attained.py"),
)


def provenance() -> dict[str, str]:
    """Return commit, processor, system and versions of what computes here.

    Example:
        >>> {"commit", "processor", "system", "torch"} <= set(provenance())
        True
    """
    return {
        "commit": _commit(),
        "processor": _processor(),
        "system": f"{platform.system()} {platform.machine()}",
        **versions(),
    }


def together(origins: Sequence[dict[str, str]]) -> dict[str, str]:
    """Return the provenance of results that were computed in several places: by key,
    all values in their order.

    Example:
        >>> together([{"torch": "2.13.0", "commit": "a"}, {"torch": "2.13.0", "commit": "b"}])
        {'torch': '2.13.0', 'commit': 'a, b'}
    """
    keys = dict.fromkeys(key for origin in origins for key in origin)
    return {
        key: ", ".join(dict.fromkeys(one[key] for one in origins if key in one)) for key in keys
    }


@cache
def code_digest(deciding: tuple[str, ...] = DECIDING) -> str:
    """Return a digest of the code that decides how a trial ends; comments, docstrings
    and layout do not count.

    Args:
        deciding: the files and folders.

    Example:
        >>> len(code_digest())
        16
    """
    found = hashlib.sha256()
    for path in _sources(deciding):
        found.update(
            path.name.encode() + b"\0" + bare(path.read_text(encoding="utf-8")).encode() + b"\0"
        )
    return found.hexdigest()[:16]


def bare(source: str) -> str:
    r"""Return Python code without comments, docstrings and layout.

    Example:
        >>> bare("def f(x):\n    'Say x.'\n    return (x)  # as it is")
        'def f(x):\n    return x'
    """
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
            and node.body
        ):
            first = node.body[0]
            if (
                isinstance(first, ast.Expr)
                and isinstance(first.value, ast.Constant)
                and len(node.body) > 1
            ):
                del node.body[0]
    return ast.unparse(tree)


@cache
def task_data(name: str, options: tuple[tuple[str, Any], ...]) -> Task:
    """Load a task once per process: trials of one experiment share its data."""
    return load_task(name, **dict(options))


@cache
def data_digest(name: str, options: tuple[tuple[str, Any], ...]) -> str:
    """Return a digest of all examples and labels of a task, as its model meets them.

    Args:
        name: the task.
        options: of the task, as pairs.

    Example:
        >>> data_digest("digits-rows", ()) == data_digest("digits-rows", (("hidden", 4),))
        True
        >>> data_digest("digits-rows", ()) == data_digest("digits-rows-permuted", ())
        False
    """
    task = task_data(name, options)
    return splits_digest((task.train, task.valid, task.test))


def splits_digest(splits: Iterable[Split]) -> str:
    """Return a digest of all examples and labels of splits.

    Example:
        >>> from pathspace.training.experiments.tasks.digits import image_splits
        >>> len(splits_digest(image_splits()))
        16
    """
    found = hashlib.sha256()
    for split in splits:
        for tensor in (split.inputs, split.targets):
            found.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
            # (the array itself, not its bytes: large data are files that the system maps)
            found.update(tensor.detach().cpu().contiguous().numpy().data)
    return found.hexdigest()[:16]


def _sources(deciding: tuple[str, ...]) -> Iterator[Path]:
    root = Path(str(resources.files("pathspace")))
    for name in deciding:
        path = root / name
        # in an editable installation the packages are in one folder
        path = path if path.exists() else root.parent / name
        yield from sorted(path.rglob("*.py")) if path.is_dir() else [path]


@cache
def _commit() -> str:
    """Return the commit of a checkout, with a plus where files differ from it; an
    installed library has none.

    A process asks once: it computes with the code that it started with, and git takes
    longer than a short run.
    """
    ask = ["git", "describe", "--always", "--exclude=*", "--abbrev=40", "--dirty=+"]
    try:
        return subprocess.run(
            ask, cwd=Path(__file__).parent, capture_output=True, text=True, check=True
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "none: not a checkout"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(
            line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")
        )
    except (OSError, StopIteration):
        return platform.processor() or "unknown"
