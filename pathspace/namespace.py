"""Public names: what is meant by an unknown one, and functions whose module has the same name."""

from __future__ import annotations

import sys
from collections.abc import Collection
from difflib import get_close_matches
from importlib import import_module
from types import ModuleType
from typing import Any

# names that other libraries use -> the way here
ELSEWHERE = {
    "prune": "ps.channels(model, x).remove(0.25)",
    "match": "ps.channels(model, x).match(other)",
    "quantise": "ps.equalise",
    "quantize": "ps.equalise",
    "penalize": "pathspace.training.penalise_",
    "balance": "ps.balance_, which changes the model",
    "canonicalise": "ps.canonicalise_, which changes the model",
}


def unknown_name(package: str, name: str, public: Collection[str]) -> str:
    """The sentence for a name that a package does not have."""
    sentence = f"module {package!r} has no attribute {name!r}"
    if name.startswith("_"):
        return sentence
    for other in ("training", "diagnostics"):
        if name in import_module(f".{other}", package).__all__:
            return f"{sentence}; it is in {package}.{other}"
    near = [ELSEWHERE[name]] if name in ELSEWHERE else get_close_matches(name, public, 1)
    return f"{sentence}; did you mean {near[0]}?" if near else sentence


def keep_functions(package: str, public: Collection[str]) -> None:
    """Let no import of a submodule hide the public function of the same name.

    Args:
        package: the name of a package that is being imported.
        public: its public names; none of them is a module.
    """

    class Package(ModuleType):
        def __setattr__(self, name: str, value: Any) -> None:
            if not (isinstance(value, ModuleType) and name in public):
                super().__setattr__(name, value)

    sys.modules[package].__class__ = Package
