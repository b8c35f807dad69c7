"""Public names: what is meant by an unknown one, and functions whose module has the same name."""

from __future__ import annotations

import sys
from collections.abc import Collection
from importlib import import_module
from types import ModuleType
from typing import Any

from .errors import did_you_mean


def unknown_name(package: str, name: str, public: Collection[str]) -> str:
    """The sentence for a name that a package does not have."""
    sentence = f"module {package!r} has no attribute {name!r}"
    if name.startswith("_"):
        return sentence
    for other in ("training", "diagnostics"):
        if name in import_module(f".{other}", package).__all__:
            return f"{sentence}; it is in {package}.{other}"
    return sentence + did_you_mean(name, public)


def keep_functions(package: str, public: Collection[str]) -> None:
    """Let no import of a submodule of a package hide the public function of the same name."""

    class Package(ModuleType):
        def __setattr__(self, name: str, value: Any) -> None:
            if not (isinstance(value, ModuleType) and name in public):
                super().__setattr__(name, value)

    sys.modules[package].__class__ = Package
