"""The README and the docs: every Python block runs, every link leads somewhere, every public name and rule is there.

``python tests/test_docs.py`` writes anew what is generated: the API page and the table of operations.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import io
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch

import pathspace
from pathspace import diagnostics, training
from pathspace.inference.registry import RULES

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"```python\n(.*?)```(?:\n\n```text\n(.*?)```)?", re.DOTALL)
# pages whose blocks need other names, budgets or files are run by the tests beside them
ELSEWHERE = {
    "command-line": "test_cli.py",
    "training": "test_training_docs.py",
    "markov-chain": "test_diagnostics_docs.py",
    "claims-markov": "test_diagnostics_docs.py",
    "signal-propagation": "test_signal.py",
}
HERE = [page for page in PAGES if "```python" in page.read_text() and page.stem not in ELSEWHERE]


@pytest.mark.parametrize("page", HERE, ids=lambda page: page.stem)
def test_the_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = BLOCK.findall(page.read_text())
    assert len(blocks) == page.read_text().count("```python")
    space: dict[str, object] = {"__name__": "page"}
    torch.manual_seed(0)
    for code, expected in blocks:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(code, str(page), "exec"), space)
        if expected:
            assert printed.getvalue() == expected


def test_the_blocks_of_all_other_pages_run_elsewhere() -> None:
    for name, test in ELSEWHERE.items():
        assert "```python" in (ROOT / "docs" / f"{name}.md").read_text()
        assert name in (ROOT / "tests" / test).read_text() or name in test


def anchors(page: Path) -> set[str]:
    """Anchors of the headings of a page, spelled as mkdocs and GitHub spell them."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL), re.MULTILINE)
    plain = (re.sub(r"[^\w\- ]", "", heading.lower()).strip() for heading in headings)
    return {re.sub(r"[ \-]+", "-", text) for text in plain}


def test_links_lead_somewhere() -> None:
    for page in PAGES:
        text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
        for target, anchor in re.findall(r"\]\(([^)#:\s]*?)(?:#([^)\s]*))?\)", text):
            other = (page.parent / target) if target else page
            assert other.exists(), f"{page.name} links to {target}"
            if anchor:
                assert anchor in anchors(other), f"{page.name} links to {target}#{anchor}"


def test_every_page_and_picture_is_reached() -> None:
    nav = (ROOT / "mkdocs.yml").read_text()
    for page in (ROOT / "docs").glob("*.md"):
        assert f": {page.name}\n" in nav, f"{page.name} is not in the navigation"
    everything = "".join(page.read_text() for page in PAGES)
    for picture in (ROOT / "docs" / "images").iterdir():
        assert f"images/{picture.name}" in everything, f"{picture.name} is shown nowhere"


# --- the API page

PACKAGES = (pathspace, diagnostics, training)


def api() -> str:
    """One entry per public name, found where it is defined."""
    parts = ["# API\n"]
    for package in PACKAGES:
        parts.append(f"\n## {package.__name__}\n\n{(package.__doc__ or '').splitlines()[0]}\n")
        for name in package.__all__:
            parts.append(f"\n::: {getattr(package, name).__module__}.{name}\n")
    return "".join(parts)


def test_the_api_page_has_every_public_name() -> None:
    assert (ROOT / "docs" / "api.md").read_text() == api(), "write it anew: python tests/test_docs.py"


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
                assert re.search(rf"^ *\*{{0,2}}(\w+, )*{parameter}\b", text, re.MULTILINE), f"{name}: {parameter}"
        elif not issubclass(found, Exception):
            assert "Attributes:" in text or "Args:" in text or "Example:" in text, name


# --- operations by rule

START, END = "<!-- operations -->\n", "<!-- end -->"


def operations() -> str:
    """A row per module of rules, with the operations its rules are registered for."""
    importlib.import_module("pathspace.inference.rules")
    own: dict[str, set[str]] = defaultdict(set)
    for name, rule in RULES.items():
        if rule.__module__.startswith("pathspace.inference.rules."):
            own[rule.__module__].add(name.removeprefix("aten.").rstrip("_"))
    rows = ["| rules | what they say | operations |\n| --- | --- | --- |\n"]
    for module in sorted(own):
        says = (importlib.import_module(module).__doc__ or "").splitlines()[0]
        names = ", ".join(f"`{name}`" for name in sorted(own[module]))
        rows.append(f"| {module.rpartition('.')[2]} | {says} | {names} |\n")
    return "".join(rows)


def test_the_table_of_operations_is_that_of_the_registry() -> None:
    text = (ROOT / "docs" / "limitations.md").read_text()
    written = text[text.index(START) + len(START) : text.index(END)]
    assert written.strip() == operations().strip(), "write it anew: python tests/test_docs.py"


if __name__ == "__main__":
    (ROOT / "docs" / "api.md").write_text(api())
    page = ROOT / "docs" / "limitations.md"
    content = page.read_text()
    page.write_text(
        content[: content.index(START) + len(START)] + "\n" + operations() + "\n" + content[content.index(END) :]
    )
