"""Public functions stay callable when the modules of the same names are imported."""

from __future__ import annotations

import importlib
import pkgutil
from types import ModuleType

import pytest


@pytest.mark.parametrize("name", ["pathspace", "pathspace.diagnostics", "pathspace.training"])
def test_no_submodule_hides_a_function_of_its_name(name: str) -> None:
    package = importlib.import_module(name)
    same = {module.name for module in pkgutil.iter_modules(package.__path__)} & set(package.__all__)
    assert same  # each package has such names
    for word in same:
        module = importlib.import_module(f"{name}.{word}")
        setattr(package, word, module)  # as loaders of single files do
        assert not isinstance(getattr(package, word), ModuleType)
