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
from collections.abc import Iterable
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
SHOWN = "torch torchvision numpy scipy sympy networkx safetensors typer rich".split()
EXPLAINED = "torchvision:resnet18"
TESTS = {
    "capture of models": "tests/capture/test_capture.py",
    "masks as files": "tests/paths/test_masks.py",
    "two spanning trees": "tests/paths/test_two_trees.py",
    "G-SGD against differentiated path values": "tests/training/test_gsgd_oracle.py",
}
STEPS = {
    "README, block by block": ["tests/run_page.py", "README.md"],
    f"`pathspace explain {EXPLAINED}`": ["-m", "pathspace", "explain", EXPLAINED],
    **{name: ["-m", "pytest", file] for name, file in TESTS.items()},
}
TOP = """# Versions

A selection of the tests was run on the oldest versions that `pyproject.toml` allows, on the newest torch,
and on a torch between them. `make matrix` runs it and writes this page.
"""  # noqa: E501
BOTTOM = """
torch 2.6 does not work: its `torch.export` cannot capture `nn.RNN`, `nn.LSTM` and other modules that keep a
list of their weights. Versions between 2.6 and the lower bound were not tried. The whole test suite runs on
the version in `constraints.txt`.
"""  # noqa: E501
QUIET = ["--tb=no", "-p", "no:logging", "-W", "ignore::DeprecationWarning"]


def requirements(column: str) -> list[str]:
    """Every lower bound of the package as an exact version, or what a column pins of torch."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    declared = project["dependencies"]
    if column != "oldest":
        others = [need for need in declared if not need.startswith("torch")]
        return [*(PAIRS[column] or ()), *others, *TOOLS]
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
    pip = [python, "-m", "pip"]
    subprocess.run([*pip, "install", "--quiet", *extra, *requirements(column)], check=True)
    # the package itself, for the commands that it registers
    subprocess.run([*pip, "install", "--quiet", "--no-deps", ROOT], check=True)
    listed = subprocess.check_output([*pip, "list", "--format=json"], text=True)
    versions = {entry["name"].lower(): entry["version"] for entry in json.loads(listed)}
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "OMP_NUM_THREADS": "1"}
    found: dict[str, Any] = {}
    imported = subprocess.run(
        [python, "-c", "import torchvision"], capture_output=True, check=False
    )
    for name, words in STEPS.items():
        if words[-1] == EXPLAINED and imported.returncode:
            said = "not run: this torchvision was built for another torch"
            found[name] = {"ok": True, "said": said}
            continue
        tests = words[:2] == ["-m", "pytest"]
        done = subprocess.run(
            [python, *words, *(QUIET if tests else ())],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
        )
        pairs = re.findall(r"(\d+) (passed|failed|skipped|error)", done.stdout)
        found[name] = {"ok": done.returncode == 0, **{word: int(number) for number, word in pairs}}
        last = (done.stderr.strip() or done.stdout.strip()).splitlines()[-1:]
        if done.returncode and last and not tests:
            found[name]["said"] = last[0]
        print(f"{column}: {name}: {found[name]}", flush=True)
    interpreter = subprocess.check_output([python, "-V"], text=True).split()[1]
    shown = {name: versions.get(name) for name in SHOWN}
    return {"python": interpreter, "versions": shown, "steps": found}


def page(data: dict[str, Any]) -> str:
    """The page that says what was run."""
    columns = [name for name in PAIRS if name in data]

    def line(first: str, cells: Iterable[str]) -> str:
        return f"| {' | '.join([first, *cells])} |"

    head = ["| | " + " | ".join(columns) + " |", "| --- |" + " --- |" * len(columns)]
    lines = [TOP, *head, line("Python", (data[name]["python"] for name in columns))]
    for package in SHOWN:
        lines.append(line(package, (data[n]["versions"][package] or "-" for n in columns)))
    lines += ["", "Results:", "", *head]
    lines += [line(step, (verdict(data[n]["steps"].get(step)) for n in columns)) for step in STEPS]
    return "\n".join([*lines, BOTTOM])


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
