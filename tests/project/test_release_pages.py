"""The pages made from records: how it compares, and which versions were run."""

from __future__ import annotations

import importlib.util
import json
import re
import runpy
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import matrix
import pytest

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def compare() -> ModuleType:
    spec = importlib.util.spec_from_file_location("compare_page", DOCS / "compare_page.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_record_of_a_comparison_is_on_the_page(compare: ModuleType) -> None:
    text = compare.on_page_markdown((DOCS / "compare.md").read_text(encoding="utf-8"))
    assert compare.MARK not in text
    assert [
        page.name for page in DOCS.rglob("*.md") if compare.MARK in page.read_text("utf-8")
    ] == ["compare.md"]
    records = [
        json.loads(path.read_text(encoding="utf-8")) for path in (DOCS / "data").glob("*.json")
    ]
    entries = [
        entry for one in records if isinstance(one, dict) for entry in one.get("head_to_head", ())
    ]
    assert entries and all(f"| {entry['against']} | {entry['what']} |" in text for entry in entries)
    claims = json.loads((DOCS / "reproduction/optimizers.json").read_text(encoding="utf-8"))[
        "claims"
    ]
    assert all(f"| {claim['statement']} |" in text and claim["verdict"] in text for claim in claims)


def test_a_page_without_records_is_short(compare: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    assert not compare.measured(tmp_path).strip()
    entry = {"against": "Another 1.0", "what": "a count", "ours": "3", "theirs": "2"}
    (tmp_path / "data/one.json").write_text(json.dumps({"head_to_head": [entry]}))
    assert "| Another 1.0 | a count | 3 | 2 | [one.json](data/one.json) |" in compare.measured(
        tmp_path
    )


def test_links_of_the_readme_lead_into_the_repository_where_one_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interface = ModuleType("hatchling.metadata.plugin.interface")
    interface.MetadataHookInterface = type("Hook", (), {"root": str(DOCS.parent)})  # type: ignore[attr-defined]
    for name in ("hatchling", "hatchling.metadata", "hatchling.metadata.plugin"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, interface.__name__, interface)
    hook = runpy.run_path(str(DOCS / "wheel_readme.py"))["Readme"]()
    home = "https://forge.example/owner/pathspace"
    without: dict[str, Any] = {}
    named: dict[str, Any] = {"urls": {"Repository": home + "/"}}
    hook.update(without)
    hook.update(named)
    text = named["readme"]["text"]
    assert without["readme"]["text"] == (DOCS.parent / "README.md").read_text(encoding="utf-8")
    assert f"]({home}/raw/HEAD/docs/images/report.png)" in text
    assert f"]({home}/blob/HEAD/docs/gallery/index.md)" in text
    targets = re.findall(r"\]\(([^)\s]+)\)", text)
    assert targets and all(target.startswith(("https://", "#")) for target in targets)


def test_oldest_column_is_what_the_package_allows() -> None:
    oldest, newest = matrix.requirements("oldest"), matrix.requirements("newest")
    assert all("==" in need for need in oldest if need not in matrix.TOOLS)
    assert "torchvision" in newest
    assert {need.split("==")[0] for need in oldest if "==" in need} - {"torchvision"} == {
        need.split(">=")[0] for need in newest if need not in ("torchvision", *matrix.TOOLS)
    }


def test_versions_page_is_what_the_record_says() -> None:
    data = json.loads(matrix.DATA.read_text(encoding="utf-8"))
    assert matrix.PAGE.read_text(encoding="utf-8") == matrix.page(data)
    failed = {"ok": False, "passed": 3, "failed": 1}
    assert matrix.verdict(failed) == "3 passed, 1 failed" and matrix.verdict({"ok": True}) == "runs"
