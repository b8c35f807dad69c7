"""Outputs of a watched run: a table of comma-separated values, TensorBoard, and an HTML page."""

from __future__ import annotations

import csv
import os
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pathspace.errors import InputError
from pathspace.files.writing import ensure_writable, replacing

from .log import RunLog
from .training_page import render

# the page is drawn again if drawing has taken less than this share of the run so far
PAGE_SHARE = 0.005


class Csv:
    """Append rows to a file; its columns are those of the first rows, and columns that
    appear later are omitted.

    Args:
        path: the file; an existing one is replaced at the first row.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        ensure_writable(path)
        self.path, self.written, self.columns = Path(path), 0, [""]

    def __call__(self, watch: RunLog) -> None:
        """Write what is new."""
        fresh = watch.rows[self.written :]
        if not fresh:
            return
        # columns for the chain and the units may be added with the second row
        if self.written < 3 or not self.path.exists():
            self.columns = list(dict.fromkeys(name for row in watch.rows for name in row))
            with replacing(self.path) as temporary:
                self._append(temporary, watch.rows, header=True)
        else:
            self._append(self.path, fresh, header=False)
        self.written = len(watch.rows)

    def _append(self, path: Path, rows: list[dict[str, float]], header: bool) -> None:
        with open(path, "w" if header else "a", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, self.columns, extrasaction="ignore")
            if header:
                writer.writeheader()
            writer.writerows(rows)


class TensorBoardWriter:
    """Write every number of a row as a scalar below ``pathspace/``.

    Args:
        target: a folder, or a ``SummaryWriter``.

    Raises:
        InputError: TensorBoard is not installed.
    """

    def __init__(self, target: Any) -> None:
        if not hasattr(target, "add_scalar"):
            if not find_spec("tensorboard"):
                raise InputError(
                    "TensorBoard is not installed; run pip install tensorboard, or do not pass"
                    " tensorboard=."
                )
            from torch.utils.tensorboard import SummaryWriter

            target = SummaryWriter(os.fspath(target))
        self.writer, self.written = target, 0

    def __call__(self, watch: RunLog) -> None:
        """Write what is new."""
        for row in watch.rows[self.written :]:
            for name, value in row.items():
                if name != "step":
                    self.writer.add_scalar(f"pathspace/{name}", value, int(row["step"]))
        self.written = len(watch.rows)
        self.writer.flush()


class Page:
    """Draw the run so far as a page that reloads itself, as often as the
    cost allows, and at the end.

    Args:
        path: the HTML file.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        ensure_writable(path)
        self.path, self.spent, self.started = Path(path), 0.0, time.perf_counter()

    def __call__(self, watch: RunLog) -> None:
        """Write the page, unless its cost so far is too high; a finished run is always drawn."""
        started = time.perf_counter()
        running = watch.running
        if running and self.spent > PAGE_SHARE * (started - self.started):
            return
        with replacing(self.path) as temporary:
            temporary.write_text(render(watch, running), encoding="utf-8")
        self.spent += time.perf_counter() - started
