"""The page on training: its Python runs as printed, in one go, with smaller budgets."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pathspace.training.experiments.task import _BUILDERS

PAGE = Path(__file__).parents[2] / "docs" / "training.md"


@pytest.mark.slow
def test_code_of_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    code = "\n".join(re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.S))
    for long, short, times in (("epochs=60", "epochs=1", 1), ("epochs=10", "epochs=1", 2)):
        assert code.count(long) == times
        code = code.replace(long, short)
    names: dict[str, object] = {}
    try:
        exec(compile(code, str(PAGE), "exec"), names)
        assert [m.arm.label for m in names["measured"]] == ["Adam", "G-SGD"]  # type: ignore[attr-defined]
        assert names["task"].name == "parity"  # type: ignore[attr-defined]
    finally:
        _BUILDERS.pop("parity", None)
