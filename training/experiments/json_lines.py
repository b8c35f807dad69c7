"""Files with one JSON object per line, which a killed run may leave with half a line at the end."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any


def read_lines(path: str | os.PathLike[str]) -> Iterator[dict[str, Any]]:
    """Yield the objects of a file in order, without lines that a kill cut off; none of no file."""
    if not Path(path).is_file():
        return
    for line in Path(path).read_text(encoding="utf-8").splitlines():
        try:
            found = json.loads(line)
        except ValueError:
            continue
        if isinstance(found, dict):
            yield found


def append_lines(path: str | os.PathLike[str], objects: Iterable[Mapping[str, Any]]) -> None:
    r"""Write objects of plain values to the end of a file, each on a line of its own."""
    with open(path, "ab+") as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
            # half a line stays on a line of its own
            if file.read(1) != b"\n":
                file.write(b"\n")
        file.writelines(json.dumps(one).encode() + b"\n" for one in objects)
