"""Every Python block of the pages on Markov chains runs, and prints what stands below it."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest
import torch

DOCS = Path(__file__).parent.parent / "docs"
BLOCK = re.compile(r"```python\n(.*?)```(?:\n\n```text\n(.*?)```)?", re.DOTALL)


@pytest.mark.parametrize("name", ["markov-chain", "claims-markov"])
def test_the_blocks_run(name: str) -> None:
    blocks = BLOCK.findall((DOCS / f"{name}.md").read_text())
    assert blocks
    space: dict[str, object] = {"__name__": "page"}
    torch.manual_seed(0)
    for code, expected in blocks:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(code, name, "exec"), space)
        if expected:
            assert printed.getvalue() == expected
