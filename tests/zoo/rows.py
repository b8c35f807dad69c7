"""Rows of data, one on each line of a file, and the page that is made of them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pathspace.files.writing import replacing


def keep(rows: Iterable[dict[str, Any]], data: Path, page: Path, text: str) -> None:
    """Write both, each aside and renamed."""
    with replacing(data) as temporary:
        temporary.write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n")
    with replacing(page) as temporary:
        temporary.write_text(text)
