"""The README and the docs: every Python block runs, every link leads somewhere, every
public name and rule is there.

``python tests/project/test_docs.py`` writes again what is generated: the table of operations.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
import runpy
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from run_page import BLOCK, COMMAND, FILE, outputs

import pathspace
from pathspace import diagnostics, training
from pathspace.diagnostics.chain import dataflow
from pathspace.inference import eps_detection
from pathspace.inference.registry import FACTS, KINDS, RULES, Facts
from pathspace.training import path_norm

ROOT = Path(__file__).parents[2]
WRITE_AGAIN = "write it again: python tests/project/test_docs.py"
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


# --- what is stated of operations, and who reads it


def linear_in(facts: Facts) -> str:
    """How an operation is linear, in words."""
    coefficients = {
        "one": ", coefficients 0 and 1",
        "positive": ", positive coefficients",
        "real": "",
    }
    return f"{facts.linear}{coefficients[facts.coefficients]}" if facts.linear else ""


def of_path_norm(facts: Facts) -> str:
    """How the path norm passes an operation."""
    if facts.kind in ("copy", "dropout"):
        return "as it is"
    if facts.linear == "each":
        return "as it is, on powers"
    if facts.elementwise and facts.linear == "jointly":
        return "measured coefficients"
    if facts.moves or (facts.linear == "jointly" and facts.coefficients == "positive"):
        return (
            "as it is"
            if facts.moves or not facts.separable
            else "as it is (p = 1), one dimension after the other"
        )
    if facts.separable:
        return "one dimension after the other"
    if facts.linear:
        return "unit vectors"
    if facts.elementwise and facts.degree == (1,):
        return "all paths of the operands"
    return (
        "by slope for `bound=True`; reads the rule" if facts.slope is not None else "reads the rule"
    )


def of_eps(facts: Facts) -> str:
    """What an operation does to the eps of a divisor."""
    if facts.kind in eps_detection.MOVEMENTS | eps_detection.DIVISORS or facts.kind == "power":
        return "keeps a divisor"
    divides = facts.kind == "quotient" or (facts.linear == "each" and facts.bias is None)
    return "divides, or is divided" if divides else ""


def of_dataflow(facts: Facts) -> str:
    """What an operation is to a stream."""
    if facts.kind in dataflow.MOVES:
        return "carries a stream"
    return "affine" if facts.kind in dataflow.AFFINE else ""


def of_path_sgd(facts: Facts) -> str:
    """When Path-SGD refuses an operation."""
    if facts.kind in path_norm.CROOKED:
        return "refused"
    several = facts.linear == "each" or facts.kind == "quotient"
    return (
        "refused of two activations"
        if several
        else "refused of activations"
        if facts.kind == "power"
        else ""
    )


def of_cost(facts: Facts) -> str:
    """What an operation counts as."""
    if facts.kind in ("activation", "function"):
        return "an activation"
    return (
        "a multiplication"
        if facts.kind in ("product", "quotient") or facts.kind.endswith("convolution")
        else ""
    )


READERS: dict[str, Callable[[Facts], str]] = {
    "path norm": of_path_norm, "eps detection": of_eps, "dataflow": of_dataflow,
    "Path-SGD": of_path_sgd, "cost": of_cost,
}  # fmt: skip


def operations_page() -> str:
    """Operations of which the same is stated in one row, by kind."""
    own: dict[Facts, set[str]] = defaultdict(set)
    for name, facts in FACTS.items():
        own_rule = name not in RULES or "pathspace.inference.rules." in RULES[name].__module__
        if name and own_rule:
            own[facts].add(name.removeprefix("aten.").rstrip("_").removesuffix("_copy"))
    lines = [INTRODUCTION, "## Kinds\n"]
    lines += [
        "| kind | what it does |\n| --- | --- |",
        *(f"| {k} | {says} |" for k, says in KINDS.items() if k),
        "",
    ]
    lines += ["## Operations\n"]
    columns = ["kind", "operations", "degree", "linear", "elementwise", "largest slope", *READERS]
    lines += ["| " + " | ".join(columns) + " |", "| " + " | ".join(["---"] * len(columns)) + " |"]
    places = list(KINDS)
    for facts in sorted(own, key=lambda f: (places.index(f.kind), min(own[f]))):
        cells = [
            facts.kind,
            ", ".join(f"`{name}`" for name in sorted(own[facts])),
            ", ".join(f"{degree:g}" for degree in facts.degree),
            linear_in(facts),
            "yes" if facts.elementwise else "",
            "" if facts.slope is None else f"{facts.slope:.4g}",
            *(reader(facts) for reader in READERS.values()),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


INTRODUCTION = """# Table of operations

What the registry states of operations beyond their rules (in-place and other variants under one name, without
`aten.`), and what its readers make of it. Operations that are not listed are followed by the smaller steps that torch
knows, or else pinned. An empty cell makes no statement. Constants that are added (a margin, a number) do not count for
"linear". One degree stands for all activations together, several for one operand each.

The page is generated, and a test compares every statement with torch. Scales, unrolled paths and the proofs of symmetry
read the rules themselves.
"""  # noqa: E501


def test_the_page_of_operations_is_that_of_the_registry() -> None:
    text = (ROOT / "docs" / "operations.md").read_text()
    assert text == operations_page(), WRITE_AGAIN


def test_the_files_that_the_readme_runs_are_written_by_it() -> None:
    text = (ROOT / "README.md").read_text()
    used = {
        word.split(":")[0]
        for line in COMMAND.findall(text)
        for word in line.split()
        if ".py:" in word
    }
    assert used == {name for name, _ in FILE.findall(text)} != set()


if __name__ == "__main__":
    (ROOT / "docs" / "operations.md").write_text(operations_page())
