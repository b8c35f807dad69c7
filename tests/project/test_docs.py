"""The README and the docs: every Python block runs, every link leads somewhere, every
public name and rule is there.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
import runpy
from pathlib import Path
from typing import Any

import pytest
from run_page import BLOCK, COMMAND, FILE, outputs

import pathspace
from pathspace import diagnostics, training

ROOT = Path(__file__).parents[2]
WRITE_AGAIN = "write it again: python docs/operations_page.py"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
# pages whose blocks need other names, budgets or files are run by the tests beside them
ELSEWHERE = {"command-line": "cli/test_main.py", "training": "training/test_training_docs.py"}
HERE = [page for page in PAGES if "```python" in page.read_text() and page.stem not in ELSEWHERE]


@pytest.mark.slow
@pytest.mark.parametrize("page", HERE, ids=lambda page: page.stem)
def test_the_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert len(BLOCK.findall(page.read_text())) == page.read_text().count("```python")
    for printed, expected in outputs(page):
        if expected:
            assert printed == expected


def test_the_blocks_of_all_other_pages_run_elsewhere() -> None:
    for name, test in ELSEWHERE.items():
        assert "```python" in (ROOT / "docs" / f"{name}.md").read_text()
        assert name in (ROOT / "tests" / test).read_text() or name in test


def anchors(page: Path) -> set[str]:
    """Anchors of the headings of a page, spelled as mkdocs and GitHub spell them."""
    headings = re.findall(
        r"^#+ (.+)$", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL), re.MULTILINE
    )
    plain = (re.sub(r"[^\w\- ]", "", heading.lower()).strip() for heading in headings)
    return {re.sub(r"[ \-]+", "-", text) for text in plain}


def test_links_lead_somewhere() -> None:
    for page in PAGES:
        text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
        for target, anchor in re.findall(r"\]\(([^)#:\s]*?)(?:#([^)\s]*))?\)", text):
            other = (page.parent / target) if target else page
            if target.startswith("api/"):  # made with the site, which refuses links to nowhere
                continue
            if target.startswith("gallery/") and not other.exists():  # (made from its notebook)
                other = other.with_suffix(".ipynb")
            assert other.exists(), f"{page.name} links to {target}"
            if anchor:
                assert anchor in anchors(other), f"{page.name} links to {target}#{anchor}"


def test_every_page_and_picture_is_reached() -> None:
    nav = (ROOT / "mkdocs.yml").read_text()
    menu = set(re.findall(r"- ([\w/-]+\.md)$", nav, re.MULTILINE))
    assert len(menu) <= 30
    behind = (ROOT / "docs" / "evidence.md").read_text()
    for page in (ROOT / "docs").glob("*.md"):
        reached = page.name in menu or f"({page.name})" in behind
        assert reached, f"{page.name} is not in the navigation"
    everything = "".join(page.read_text() for page in PAGES)
    for picture in (ROOT / "docs" / "images").iterdir():
        assert f"images/{picture.name}" in everything, f"{picture.name} is shown nowhere"


# --- the API page

PACKAGES = (pathspace, diagnostics, training)


SITE = runpy.run_path(str(ROOT / "docs" / "site.py"))


def test_every_public_name_has_a_page_under_its_path() -> None:
    pages = dict(SITE["api"]())
    listed = pages.pop("api/index.md")
    names = {f"{package.__name__}.{name}" for package in PACKAGES for name in package.__all__}
    names |= set(SITE["RESULTS"])
    assert pages.keys() == {f"api/{name}.md" for name in names}
    for name in names:
        assert re.search(rf"\({re.escape(name)}\.md\) \| .{{20,}} \|\n", listed), name
        target = pages[f"api/{name}.md"].split("::: ")[1].split()[0]
        package, _, last = name.rpartition(".")
        assert pkgutil.resolve_name(target) is getattr(importlib.import_module(package), last)


def test_every_command_has_one_section_in_the_guide() -> None:
    sections = SITE["commands"]((ROOT / "docs" / "command-line.md").read_text())
    assert sorted(sections) == sorted(SITE["command_line"]())
    assert all("| `--help`" not in SITE["options"](name) for name in sections)
    assert "| `--json` | " in SITE["options"]("verify")


def test_bars_of_code_in_tables_are_shown_as_bars() -> None:
    page = "| `a\\|b` | c\\|d |\n\nSay `x\\|y`."
    assert SITE["plain_bars"](page) == "| `a|b` | c\\|d |\n\nSay `x\\|y`."


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.__name__)
def test_every_public_name_is_documented(package: Any) -> None:
    for name in package.__all__:
        found = getattr(package, name)
        text = inspect.getdoc(found) or ""
        assert len(text) > 40, name
        if inspect.isfunction(found):
            taken = [p for p in inspect.signature(found).parameters if p != "self"]
            assert not taken or "Args:" in text or "Example:" in text, name
            for parameter in taken if "Args:" in text else []:
                assert re.search(rf"^ *\*{{0,2}}(\w+, )*{parameter}\b", text, re.MULTILINE), (
                    f"{name}: {parameter}"
                )
        elif not issubclass(found, Exception):
            assert "Attributes:" in text or "Args:" in text or "Example:" in text, name


# --- the table of operations


def test_the_page_of_operations_is_that_of_the_registry() -> None:
    text = (ROOT / "docs" / "operations.md").read_text()
    assert text == runpy.run_path(str(ROOT / "docs" / "operations_page.py"))["page"](), WRITE_AGAIN


def test_tests_that_pages_and_statements_name_exist() -> None:
    named = re.compile(r"(tests/[\w/]+\.py)(?:::(\w+))?")
    texts = [*PAGES, *ROOT.glob("training/experiments/reproduce/statements/*.toml")]
    for file, test in {found for text in texts for found in named.findall(text.read_text())}:
        assert f"def {test}" in (ROOT / file).read_text(), f"{file}::{test}"


def test_the_files_that_the_readme_runs_are_written_by_it() -> None:
    text = (ROOT / "README.md").read_text()
    used = {
        word.split(":")[0]
        for line in COMMAND.findall(text)
        for word in line.split()
        if ".py:" in word
    }
    assert used == {name for name, _ in FILE.findall(text)} != set()
