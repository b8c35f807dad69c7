"""The check for private imports, which ``make lint`` runs, finds them."""

from __future__ import annotations

import private_imports
import pytest


@pytest.mark.parametrize(
    "source",
    [
        "from pathspace.models.modes import _folded",
        "from .eps import _folded",
        "def f():\n    from training._hidden import step",
        "import importlib\nimportlib.import_module('diagnostics.chain')",
    ],
)
def test_it_fails_where_one_is_added(source: str) -> None:
    assert list(private_imports.private_imports(source))
