"""Files of installed packages, and single modules of theirs, without
importing the packages themselves.

A package that ships trained weights often imports much that its network does not need (audio files,
image transforms). The network is taken from the package's own file, and the imports that only serve
the rest are answered by empty modules while that file is loaded.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any


class Missing(Exception):
    """A package of trained weights that is not installed."""


def available(*packages: str) -> bool:
    """Whether all of these packages are installed."""
    return all(importlib.util.find_spec(package) is not None for package in packages)


def folder(package: str) -> Path:
    """The folder of an installed package."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise Missing(
            f"the package {package} with trained weights is not installed: see tests/trained.txt"
        )
    return Path(spec.origin).parent


@contextmanager
def standing_in(names: Mapping[str, Mapping[str, Any]]) -> Iterator[None]:
    """Within: modules of these names with these attributes, in place of what they name."""
    kept = {name: sys.modules.get(name) for name in names}
    for name, attributes in names.items():
        module = ModuleType(name)
        module.__path__ = []
        vars(module).update(attributes)
        sys.modules[name] = module
    try:
        yield
    finally:
        for name, module in kept.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module


def file_as_module(name: str, path: Path, stand_ins: Mapping[str, Mapping[str, Any]]) -> ModuleType:
    """One file of a package as a module, loaded while some imports are answered by stand-ins."""
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise Missing(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    with standing_in(stand_ins):
        spec.loader.exec_module(module)
    return module
