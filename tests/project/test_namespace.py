"""Names: public functions stay callable beside modules of their names, and one name of the code
stands for one thing.
"""

from __future__ import annotations

import ast
import importlib
import pkgutil
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]

# names that are defined in more than one module -> why they are
COMMAND = "a command, and the function that it runs"
ENTRY = "by convention the same in every such module"
APART = "in packages that do not import each other's"
TWICE = {
    **dict.fromkeys(
        [
            "check",
            "compare",
            "diagnose",
            "equalise",
            "explain",
            "report",
            "rescale",
            "spaces",
            "verify",
        ],
        COMMAND,
    ),
    "draw": f"{COMMAND}; and figures of experiments",
    "match": f"the command of two models; and of parameters with weight blocks: {APART}",
    **dict.fromkeys(["main", "register", "render", "run"], ENTRY),
    "Claim": "about one network, which users know; and about the methods of an experiment",
    "versus": "of two reports, which users know; and of the results of two methods",
    **dict.fromkeys(["Record", "Table"], APART),
    "show": "verdicts, and values of settings: in experiments alone",
    "together": "provenances, and verdicts: in experiments alone",
}


def definitions(source: str) -> Iterator[str]:
    r"""The public classes and functions at the top of a module.

    Example:
        >>> list(definitions("class A: ...\ndef b(): ...\ndef _c(): ..."))
        ['A', 'b']
    """
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_"):
            yield node.name


@pytest.mark.slow
def test_one_name_stands_for_one_thing() -> None:
    modules = defaultdict(set)
    for package in ("pathspace", "diagnostics", "training"):
        for path in (ROOT / package).rglob("*.py"):
            # (pathspace links the other two packages)
            if path.resolve() == path:
                for name in definitions(path.read_text(encoding="utf-8")):
                    modules[name].add(str(path.relative_to(ROOT)))
    twice = {name: sorted(paths) for name, paths in modules.items() if len(paths) > 1}
    new = {name: paths for name, paths in twice.items() if name not in TWICE}
    assert not new, f"{new}: say in the name of each what it is"
    assert not TWICE.keys() - twice.keys(), "stand once by now: take them out of the list"


@pytest.mark.parametrize("name", ["pathspace", "pathspace.diagnostics", "pathspace.training"])
def test_no_submodule_hides_a_function_of_its_name(name: str) -> None:
    package = importlib.import_module(name)
    same = {module.name for module in pkgutil.iter_modules(package.__path__)} & set(package.__all__)
    # (the rooms of pathspace have names of their own)
    assert bool(same) == (name != "pathspace")
    for word in same:
        module = importlib.import_module(f"{name}.{word}")
        setattr(package, word, module)  # as loaders of single files do
        assert not isinstance(getattr(package, word), ModuleType)
