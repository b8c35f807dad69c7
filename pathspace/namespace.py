"""Packages in which a function and the module that holds it have one name."""

from __future__ import annotations

import sys
from collections.abc import Collection
from types import ModuleType
from typing import Any


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
