"""Options of a run in a TOML file, and the versions of what computes it."""

from __future__ import annotations

import json
import os
import platform
import tomllib
from collections.abc import Collection, Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from pathspace.errors import InputError
from pathspace.files.writing import write_text

# Packages on which the results of a run may depend.
PACKAGES = ("pathspace", "torch", "numpy", "scipy", "scikit-learn", "lightning")
VERSIONS = "versions"


def read_config(path: str | os.PathLike[str], allowed: Collection[str]) -> dict[str, Any]:
    """Read a flat TOML file of options."""
    try:
        values = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        reason = (error.strerror or "unknown reason").lower()
        raise InputError(
            f"Cannot read the configuration '{path}': {reason}; give an existing TOML file."
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(
            f"The configuration '{path}' is not TOML: {error}; write lines such as lr = 0.1."
        ) from error
    options = {key.replace("-", "_"): value for key, value in values.items() if key != VERSIONS}
    for key in options:
        if key not in allowed:
            raise InputError(
                f"The configuration '{path}' has an unknown key '{key}'; known are:"
                f" {', '.join(sorted(allowed))}."
            )
    return options


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages on which a result may depend."""
    return {"python": platform.python_version(), **{name: _installed(name) for name in PACKAGES}}


@cache
def _installed(name: str) -> str:
    """The version of a package, whose file takes a millisecond to read."""
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed as a package"


def write_config(path: str | os.PathLike[str], options: Mapping[str, Any]) -> None:
    """Write options as a TOML file for :func:`read_config`, with a table of versions at its end.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     write_config(f"{folder}/run.toml", {"lr": 0.1, "out": None})
        ...     read_config(f"{folder}/run.toml", ["lr"])
        {'lr': 0.1}
    """
    # (JSON and TOML write texts, finite numbers and truth values in the same way)
    lines = [f"{key} = {json.dumps(value)}" for key, value in options.items() if value is not None]
    lines += ["", f"[{VERSIONS}]"]
    lines += [f"{json.dumps(key)} = {json.dumps(value)}" for key, value in versions().items()]
    write_text("\n".join(lines), os.fspath(path))
