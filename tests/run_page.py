"""Run what a Markdown page shows, in order, in an empty folder, and compare
what it prints with the page.

It needs nothing but what the page needs: ``make dist`` runs it with the wheel in a new environment.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

BLOCK = re.compile(r"```python\n(.*?)```(?:\n\n```text\n(.*?)```)?", re.DOTALL)
# a block that is the content of a file, and lines that are typed
FILE = re.compile(r"`([\w./]+)` contains[^\n]*\n\n```\w+\n(.*?)```", re.DOTALL)
COMMAND = re.compile(r"^\$ pathspace (.*)$", re.MULTILINE)


def outputs(page: Path) -> Iterator[tuple[str, str]]:
    """Run the blocks of a page in order; yield what each prints, and what the
    page says (``""``: nothing).
    """
    import torch

    space: dict[str, object] = {"__name__": "page"}
    torch.manual_seed(0)
    for code, expected in BLOCK.findall(page.read_text(encoding="utf-8")):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(code, page.name, "exec"), space)
        yield printed.getvalue(), expected


def run(page: Path) -> tuple[int, int]:
    """Run a page in a folder with ``training`` and ``diagnostics`` of its own; count its
    blocks and its commands.
    """
    text, count = page.read_text(encoding="utf-8"), 0
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        for name in ("training", "diagnostics"):
            Path(name).mkdir()
            Path(name, "__init__.py").touch()
        sys.path.insert(0, folder)
        for printed, expected in outputs(page):
            count += 1
            if expected and printed != expected:
                sys.exit(f"{page.name} says\n{expected}\nbut its code prints\n{printed}")
        for name, content in FILE.findall(text):
            Path(name).write_text(content, encoding="utf-8")
        typed = COMMAND.findall(text)
        for line in typed:
            subprocess.run([sys.executable, "-m", "pathspace", *shlex.split(line)], check=True)
        os.chdir(page.parent)
    return count, len(typed)


if __name__ == "__main__":
    blocks, commands = run(Path(sys.argv[1]).resolve())
    print(
        f"{blocks} blocks of {sys.argv[1]} ran and print what it says, and {commands} commands ran"
    )
