"""The functions of a page of the gallery, for tests of what the page says."""

from __future__ import annotations

import contextlib
import io
import runpy
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import torch
from matplotlib import pyplot

GALLERY = Path(__file__).parents[1] / "docs" / "gallery"


@cache
def notebook(name: str) -> SimpleNamespace:
    """All names that a page defines; it runs once, and the random state stays as it is."""
    with contextlib.redirect_stdout(io.StringIO()), torch.random.fork_rng(devices=[]):
        found = SimpleNamespace(**runpy.run_path(str(GALLERY / f"{name}.py")))
    pyplot.close("all")
    return found
