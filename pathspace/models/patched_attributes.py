"""Attributes of torch that have another value for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_ABSENT = object()


@contextmanager
def replaced(*places: tuple[Any, str, Any]) -> Iterator[None]:
    """Give attributes other values, and their own ones afterwards, whatever happens in between.

    Args:
        places: owner (a module or class), name of the attribute, and the value.

    Raises:
        AttributeError: there is no such attribute; nothing is changed then.

    Example:
        >>> import math
        >>> with replaced((math, "pi", 3)):
        ...     print(math.pi)
        3
        >>> math.pi > 3
        True
    """
    # (an attribute that a class inherits is removed again)
    before = [
        (owner, name, vars(owner).get(name, _ABSENT))
        for owner, name, _ in places
        if hasattr(owner, name)
    ]
    if len(before) < len(places):
        owner, name, _ = next(place for place in places if not hasattr(place[0], place[1]))
        raise AttributeError(f"{owner!r} has no attribute {name!r}, expected one to replace.")
    try:
        for owner, name, value in places:
            setattr(owner, name, value)
        yield
    finally:
        for owner, name, value in before:
            if value is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, value)
