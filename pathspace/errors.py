"""The exceptions of the library: one base, and one sentence per error.

Every message says what went wrong, where, what was found, what was expected and what to do.
"""

from __future__ import annotations


class PathspaceError(Exception):
    """Base of every error the library raises on purpose."""


class InputError(PathspaceError, ValueError):
    """A value handed to the library is wrong: a shape, a file, a name, a number."""


class InputTypeError(PathspaceError, TypeError):
    """A value handed to the library has the wrong type."""


class CaptureError(PathspaceError, ValueError):
    """The model could not be captured as a graph, or raised while it was being captured."""


class UnsupportedError(PathspaceError, ValueError):
    """The request is meaningful, but outside what is supported; the message says what is supported."""
