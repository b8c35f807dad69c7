"""Whose code a frame runs: that of libraries, of installed packages, or the user's."""

from __future__ import annotations

from collections.abc import Sequence
from types import FrameType

LIBRARIES = ("/torch/", "/sympy/", "/pathspace/")
INSTALLED = ("/site-packages/", "/dist-packages/")


def within(frame: FrameType, folders: Sequence[str]) -> bool:
    """Whether the code of a frame is in one of the folders.

    Example:
        >>> import sys
        >>> within(sys._getframe(), INSTALLED)
        False
    """
    return any(folder in frame.f_code.co_filename for folder in folders)
