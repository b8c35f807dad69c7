"""Which data set the files in a user's folder are, by their digests: several have one format."""

from __future__ import annotations

import hashlib
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

from pathspace.errors import InputError

from ...tasks.files import find, read_bytes
from .cells import ROOT

KNOWN: dict[str, dict[str, Any]] = tomllib.loads(
    (ROOT / "digests.toml").read_text(encoding="utf-8")
)


def found_in(folder: Path, task: str, wanted: str) -> tuple[str, str]:
    """Say which data a task of the papers reads from a folder."""
    candidates = [name for name, known in KNOWN.items() if task in known["tasks"]]
    if not candidates:
        return (
            wanted,
            f"Data: no digests of {wanted} are known here, so the files were not checked.",
        )
    own = candidates[0]
    for name in candidates:
        if _matches(folder, name):
            return wanted.replace(own, name), ""
    return f"files that are not recognised as {own}", ""


def _matches(folder: Path, name: str) -> bool:
    """Whether those of a data set's files that are there have its digests."""
    inner = folder / KNOWN[name].get("folder", "")
    place = inner if inner.is_dir() else folder
    found = {file: _digest(place, file) for file in KNOWN[name]["files"]}
    there = {file: digest for file, digest in found.items() if digest}
    return bool(there) and there.items() <= KNOWN[name]["files"].items()


@cache
def _digest(folder: Path, file: str) -> str:
    """The MD5 of a file's unpacked contents; empty where it is not there."""
    try:
        content = read_bytes(find(folder, (file,), ""), "")
    except InputError:
        return ""
    return hashlib.md5(content, usedforsecurity=False).hexdigest()
