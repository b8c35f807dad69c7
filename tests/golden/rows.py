"""Rows as a file, and rows as computed now, in several processes."""

from __future__ import annotations

import json
import multiprocessing
import os
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch

from golden.answers import Row, answer
from golden.targets import targets

FILE = Path(__file__).with_name("answers.jsonl")


def read(file: Path = FILE) -> dict[str, Row]:
    """Name -> row, as kept."""
    lines = file.read_text().splitlines() if file.exists() else []
    return {row["name"]: row for row in map(json.loads, lines)}


def write(rows: dict[str, Row], file: Path = FILE) -> None:
    """Keep the rows, one on each line, sorted by name."""
    lines = [json.dumps(rows[name]) for name in sorted(rows)]
    file.write_text("\n".join(lines) + "\n")


def row_of(name: str) -> Row:
    """The row of one target, as the file would give it back."""
    row: Row = json.loads(json.dumps(answer(targets()[name])))
    return row


def _quiet() -> None:
    """One thread; nothing that models print."""
    torch.set_num_threads(1)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(nowhere, stream)


def rows_of(names: Iterable[str], jobs: int) -> dict[str, Row]:
    """Name -> row, computed now, in several processes."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context, initializer=_quiet) as pool:
        return {row["name"]: row for row in pool.map(row_of, names)}
