"""No module imports a private name of another one, or a module by a string: ``make lint``."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("pathspace", "diagnostics", "training")


def private_imports(source: str) -> Iterator[tuple[int, str]]:
    """Line and name of every private name of these packages that a module imports, and every
    call that imports a module of them by a string, which import contracts do not see.

    Example:
        >>> list(private_imports("from pathspace.models.modes import _folded"))
        [(1, '_folded')]
        >>> list(private_imports("import_module('training.optim')"))
        [(1, 'training.optim')]
        >>> list(private_imports("from torch._ops import OpOverload"))
        []
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if node.level or module.split(".")[0] in PACKAGES:
                parts = [*module.split("."), *(alias.name for alias in node.names)]
                yield from ((node.lineno, name) for name in parts if _is_private(name))
        elif isinstance(node, ast.Call):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else node.func
            name = called.id if isinstance(called, ast.Name) else called
            texts = [str(each.value) for each in node.args if isinstance(each, ast.Constant)]
            if name == "import_module":
                yield from ((node.lineno, t) for t in texts if t.split(".")[0] in PACKAGES)


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def main() -> int:
    """Print what is found, and count it."""
    found = [
        f"{path.relative_to(ROOT)}:{line}: '{name}' is private, or imported by a string"
        for package in PACKAGES
        for path in sorted((ROOT / package).rglob("*.py"))
        for line, name in private_imports(path.read_text(encoding="utf-8"))
    ]
    print(*found, sep="\n", end="\n" * bool(found))
    return len(found)


if __name__ == "__main__":
    sys.exit(bool(main()))
