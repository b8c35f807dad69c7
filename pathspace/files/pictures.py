"""Write figures so that the same figure gives the same bytes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from .writing import expect_suffix, replacing

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# what a format would say of the time or of the version that wrote it
LEFT_OUT = {".svg": {"Date": None}, ".png": {"Software": None}, ".pdf": {"CreationDate": None}}
FORMATS = tuple(LEFT_OUT)


def save(
    figure: Figure, path: str | os.PathLike[str], dpi: float | Literal["figure"] = "figure"
) -> Path:
    """Write a figure in the format of the suffix (``.svg``, ``.png``, ``.pdf``), without a date."""
    import matplotlib

    expect_suffix(path, "save", FORMATS)
    suffix = Path(path).suffix.lower()
    # (names of parts of an SVG are random without a salt)
    with matplotlib.rc_context({"svg.hashsalt": "pathspace"}), replacing(path) as temporary:
        figure.savefig(temporary, dpi=dpi, format=suffix[1:], metadata=LEFT_OUT[suffix])
    return Path(path)
