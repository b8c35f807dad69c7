"""Run the Python blocks of a Markdown page in order, in an empty folder, and compare what they print with the page.

It needs nothing but what the page needs: ``make dist`` runs it with the wheel in a new environment.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
import tempfile
from pathlib import Path

BLOCK = re.compile(r"```python\n(.*?)```(?:\n\n```text\n(.*?)```)?", re.DOTALL)


def run(page: Path) -> int:
    """Run the blocks of a page; return how many there are."""
    import torch

    blocks = BLOCK.findall(page.read_text(encoding="utf-8"))
    space: dict[str, object] = {"__name__": "page"}
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        # folders of the user's own that have the names of ours
        for name in ("training", "diagnostics"):
            Path(name).mkdir()
            Path(name, "__init__.py").touch()
        sys.path.insert(0, folder)
        for code, expected in blocks:
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec(compile(code, page.name, "exec"), space)
            if expected and printed.getvalue() != expected:
                sys.exit(f"{page.name} says\n{expected}\nbut its code prints\n{printed.getvalue()}")
        os.chdir(page.parent)
    return len(blocks)


if __name__ == "__main__":
    print(f"{run(Path(sys.argv[1]).resolve())} blocks of {sys.argv[1]} ran and print what it says")
