"""Options of a run from a TOML file: checked key by key, so that a slip of the pen is one sentence."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pathspace.errors import InputError


def read_config(path: str | os.PathLike[str], allowed: Mapping[str, type]) -> dict[str, Any]:
    """Read a flat TOML file of options.

    Args:
        path: the file.
        allowed: name of each option and the type of its value; whole numbers stand for ``float``, too.

    Returns:
        The options that the file sets.

    Raises:
        InputError: the file cannot be read, is no TOML, or has an unknown key or a value of another type.

    Example:
        >>> import tempfile
        >>> with tempfile.NamedTemporaryFile("w", suffix=".toml") as file:
        ...     _ = file.write("epochs = 3")
        ...     file.flush()
        ...     read_config(file.name, {"epochs": int})
        {'epochs': 3}
    """
    try:
        values = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        reason = (error.strerror or "unknown reason").lower()
        raise InputError(f"Cannot read the configuration '{path}': {reason}; give an existing TOML file.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"The configuration '{path}' is no TOML: {error}; write lines such as lr = 0.1.") from error
    options = {key.replace("-", "_"): value for key, value in values.items()}
    for key, value in options.items():
        if key not in allowed:
            raise InputError(
                f"The configuration '{path}' has an unknown key '{key}'; known are: {', '.join(sorted(allowed))}."
            )
        kind = allowed[key]
        # True is an int in Python, and no number to anybody else.
        right = isinstance(value, (int, float) if kind is float else kind) and (kind is bool or value is not True)
        if not right or (value is False and kind is not bool):
            raise InputError(
                f"The configuration '{path}' gives {key} the value {value!r}, expected a value of type "
                f"{kind.__name__}; correct that line."
            )
    return options
