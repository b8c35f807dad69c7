"""Run a selection of the tests on the oldest versions that the package allows, on
middle ones and on the newest.

``make matrix`` makes an environment for each column in ``build/matrix`` (``MATRIX_DIR`` names
another place), runs the selection in it, and writes what was run and found to
``docs/data/matrix.json`` and ``docs/matrix.md``. Arguments name columns; ``page`` writes the page
alone. ``MATRIX_PIP`` holds arguments for pip, such as the index of CPU builds.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
DATA, PAGE = ROOT / "docs/data/matrix.json", ROOT / "docs/matrix.md"
PLACE = Path(os.environ.get("MATRIX_DIR", ROOT / "build/matrix"))
TOOLS = ["pytest>=8", "hypothesis>=6.100", "jsonschema>=4.20"]
# torch and the torchvision of the same day; None: whatever pip takes
PAIRS = {
    "oldest": None,
    "middle": ("torch==2.14.1", "torchvision==0.29.1"),
    "newest": ("torch", "torchvision"),
}
VISION = {"2.9": "0.24.0", "2.10": "0.25.0", "2.11": "0.26.0", "2.12": "0.27.0", "2.13": "0.28.0"}
SHOWN = (
    "torch",
    "torchvision",
    "numpy",
    "scipy",
    "sympy",
    "networkx",
    "safetensors",
    "typer",
    "rich",
)
STEPS = {
    "README, block by block": ["tests/run_page.py", "README.md"],
    "`pathspace explain torchvision:resnet18`": [
        "-m",
        "pathspace",
        "explain",
        "torchvision:resnet18",
    ],
    "capture of models": ["-m", "pytest", "tests/capture/test_capture.py"],
    "masks as files": ["-m", "pytest", "tests/paths/test_masks.py"],
    "two spanning trees": ["-m", "pytest", "tests/paths/test_two_trees.py"],
    "G-SGD against differentiated path values": [
        "-m",
        "pytest",
        "tests/training/test_gsgd_oracle.py",
    ],
}
QUIET = ["--tb=no", "-p", "no:logging", "-W", "ignore::DeprecationWarning"]


def requirements(column: str) -> list[str]:
    """What pip is asked for: every lower bound of the package as an exact version, or
    what a column pins of torch.
    """
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"][
        "dependencies"
    ]
    if column != "oldest":
        return [
            *(PAIRS[column] or ()),
            *(need for need in declared if not need.startswith("torch")),
            *TOOLS,
        ]
    exact = [re.sub(r">=([\d.]+).*", r"==\1", need) for need in declared]
    torch = next(need for need in exact if need.startswith("torch=="))
    minor = ".".join(torch.removeprefix("torch==").split(".")[:2])
    return [*exact, f"torchvision=={VISION[minor]}", *TOOLS]


def run(column: str) -> dict[str, Any]:
    """Install a column and run the selection; return what was found."""
    folder = PLACE / column
    python = folder / "bin/python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    extra = shlex.split(os.environ.get("MATRIX_PIP", ""))
    subprocess.run(
        [python, "-m", "pip", "install", "--quiet", *extra, *requirements(column)], check=True
    )
    # the package itself, for the commands that it registers
    subprocess.run([python, "-m", "pip", "install", "--quiet", "--no-deps", ROOT], check=True)
    listed = subprocess.run(
        [python, "-m", "pip", "list", "--format=json"], check=True, capture_output=True, text=True
    ).stdout
    versions = {entry["name"].lower(): entry["version"] for entry in json.loads(listed)}
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "OMP_NUM_THREADS": "1"}
    found: dict[str, Any] = {}
    vision = (
        subprocess.run(
            [python, "-c", "import torchvision"], capture_output=True, check=False
        ).returncode
        == 0
    )
    for name, words in STEPS.items():
        if "torchvision:" in words[-1] and not vision:
            found[name] = {
                "ok": True,
                "said": "not run: this torchvision was built for another torch",
            }
            continue
        tests = words[:2] == ["-m", "pytest"]
        done = subprocess.run(
            [python, *words, *(QUIET if tests else ())],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
        )
        counts = {
            word: int(number)
            for number, word in re.findall(r"(\d+) (passed|failed|skipped|error)", done.stdout)
        }
        last = (
            (done.stderr.strip() or done.stdout.strip()).splitlines()[-1:]
            if done.returncode
            else []
        )
        found[name] = {
            "ok": done.returncode == 0,
            **counts,
            **({"said": last[0]} if last and not tests else {}),
        }
        print(f"{column}: {name}: {found[name]}", flush=True)
    interpreter = subprocess.run(
        [python, "-V"], check=True, capture_output=True, text=True
    ).stdout.split()[1]
    return {
        "python": interpreter,
        "versions": {name: versions.get(name) for name in SHOWN},
        "steps": found,
    }


def page(data: dict[str, Any]) -> str:
    """The page that says what was run."""
    columns = [name for name in PAIRS if name in data]
    rule = "| --- |" + " --- |" * len(columns)
    lines = [
        "# Versions",
        "",
        (
            "A selection of the tests was run on the oldest versions that `pyproject.toml` allows,"
            " on the newest torch,"
        ),
        "and on a torch between them. `make matrix` runs it and writes this page.",
        "",
        "| | " + " | ".join(columns) + " |",
        rule,
        "| Python | " + " | ".join(data[name]["python"] for name in columns) + " |",
    ]
    for package in SHOWN:
        lines.append(
            f"| {package} | "
            + " | ".join(data[name]["versions"][package] or "-" for name in columns)
            + " |"
        )
    lines += ["", "Results:", "", "| | " + " | ".join(columns) + " |", rule]
    for step in STEPS:
        lines.append(
            f"| {step} | "
            + " | ".join(verdict(data[name]["steps"].get(step)) for name in columns)
            + " |"
        )
    lines += [
        "",
        (
            "torch 2.6 does not work: its `torch.export` cannot capture `nn.RNN`, `nn.LSTM` and"
            " other modules that keep a"
        ),
        (
            "list of their weights. Versions between 2.6 and the lower bound were not tried. The"
            " whole test suite runs on"
        ),
        "the version in `constraints.txt`.",
    ]
    return "\n".join(lines) + "\n"


def verdict(step: dict[str, Any] | None) -> str:
    """One cell: what passed, what failed."""
    if step is None:
        return "not run"
    counts = ", ".join(
        f"{step[word]} {word}" for word in ("passed", "failed", "error", "skipped") if word in step
    )
    return counts or (step.get("said", "runs") if step["ok"] else "fails")


def main(words: list[str]) -> int:
    """Run columns, all without arguments, and write data and page."""
    data: dict[str, Any] = json.loads(DATA.read_text(encoding="utf-8")) if DATA.is_file() else {}
    for column in [word for word in words if word != "page"] or (() if words else PAIRS):
        data[column] = run(column)
        DATA.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(page(data), encoding="utf-8")
    return sum(not step["ok"] for column in data.values() for step in column["steps"].values())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]) and 1)
