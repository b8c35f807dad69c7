"""The page on training: its Python runs as printed, in one go, with smaller budgets."""

from __future__ import annotations

import re
from pathlib import Path

from pathspace.training.task import _BUILDERS

PAGE = Path(__file__).parents[1] / "docs" / "training.md"


def test_code_of_the_page_runs() -> None:
    code = "\n".join(re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.S))
    for long, short in (("epochs=60", "epochs=1"), ("seeds=(0, 1))", "seeds=(0, 1), epochs=1)")):
        assert code.count(long) == 1
        code = code.replace(long, short)
    names: dict[str, object] = {}
    try:
        exec(compile(code, str(PAGE), "exec"), names)
        assert len(names["comparison"].verdicts) == 2  # type: ignore[attr-defined]
        assert names["task"].name == "parity"  # type: ignore[attr-defined]
    finally:
        _BUILDERS.pop("parity", None)
