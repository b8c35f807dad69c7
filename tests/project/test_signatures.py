"""Public names, their arguments and the defaults of these, as users rely on them.

``python tests/project/test_signatures.py`` writes the list anew where a change is meant.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pathspace
import pathspace.diagnostics
import pathspace.training

LIST = Path(__file__).parents[1] / "signatures.txt"
PLAIN = (int, float, str, bytes, bool, type(None))


def shown(value: object) -> str:
    """A default as it is written where it is plain, else its type: other
    objects have no stable text.
    """
    if isinstance(value, tuple):
        return f"({', '.join(map(shown, value))})"
    if isinstance(value, PLAIN):
        return repr(value)
    return getattr(value, "__qualname__", None) or type(value).__name__


def signature(function: object) -> str:
    """Arguments with defaults, without types."""
    parts, marked = [], False
    for name, one in inspect.signature(function).parameters.items():  # type: ignore[arg-type]
        if one.kind is one.KEYWORD_ONLY and not marked:
            parts.append("*")
        marked |= one.kind in (one.KEYWORD_ONLY, one.VAR_POSITIONAL)
        star = {one.VAR_POSITIONAL: "*", one.VAR_KEYWORD: "**"}.get(one.kind, "")
        parts.append(
            f"{star}{name}" + ("" if one.default is one.empty else f"={shown(one.default)}")
        )
    return f"({', '.join(parts)})"


def lines(module: ModuleType) -> Iterator[str]:
    """One line per public function, class and method of the project."""
    for name in sorted(module.__all__):
        found, at = getattr(module, name), f"{module.__name__}.{name}"
        if inspect.isclass(found):
            own = "__init__" in vars(found) or "__new__" in vars(found)
            yield at + (
                signature(found) if own and not issubclass(found, BaseException | str) else ""
            )
            for method, raw in sorted(vars(found).items()):
                if method.startswith("_"):
                    continue
                function = raw.__func__ if isinstance(raw, classmethod | staticmethod) else raw
                # torch gives optimizers a step of their own, with hooks, when
                # the first of them is made
                if getattr(function, "__qualname__", "").partition(".")[0] not in (
                    "",
                    found.__name__,
                ):
                    continue
                yield f"{at}.{method}{signature(function) if inspect.isfunction(function) else ''}"
        elif callable(found):
            yield at + signature(found)
        else:
            yield at


def current() -> str:
    """The whole list."""
    modules = (pathspace, pathspace.training, pathspace.diagnostics)
    return "".join(f"{line}\n" for module in modules for line in lines(module))


def test_public_names_and_defaults_are_those_of_the_list() -> None:
    assert current().splitlines() == LIST.read_text().splitlines()


if __name__ == "__main__":
    LIST.write_text(current())
