"""The language of pages, docstrings, messages and help texts: proselint, and the
words of ``tests/words.toml``.

``python tests/prose.py`` prints each sentence that has to change, with its
place; ``make lint`` runs it.
"""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
WORDS = tomllib.loads((Path(__file__).parent / "words.toml").read_text(encoding="utf-8"))
PHRASES = [(re.compile(pattern, re.IGNORECASE), say) for pattern, say in WORDS["phrases"].items()]
# what is not prose: code, formulas, comments, addresses
CODE = re.compile(
    r"```.*?```|\$\$.*?\$\$|<!--.*?-->|`[^`\n]*`|\$[^$\n]+\$|\]\([^)]*\)|https?://\S+", re.DOTALL
)
# examples, and formulas that stand apart
EXAMPLE = re.compile(r"^ *(>>>|\.\.\.).*$(\n(?! *$).*)*|^ *\w+ (=|<-) .*$", re.MULTILINE)
SENTENCE = re.compile(r"(?<=[.:;?!])\s+|\n\s*\n|\n(?=[ ]*[*|#-])|\|")


def blank(pattern: re.Pattern[str], text: str) -> str:
    """Blanks in place of what matches, so that every place stays where it is."""
    return pattern.sub(lambda found: re.sub(r"[^\n]", " ", found[0]), text)


def pages() -> Iterator[tuple[str, int, str]]:
    """File, first line and prose of each page and each notebook's text."""
    for page in [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        *sorted((ROOT / "docs").rglob("*.md")),
    ]:
        yield str(page.relative_to(ROOT)), 1, blank(CODE, page.read_text(encoding="utf-8"))
    for source in sorted((ROOT / "docs" / "gallery").glob("*.py")):
        lines = source.read_text(encoding="utf-8").splitlines()
        said = (
            line.removeprefix("#") if line.startswith("# ") and "%%" not in line else ""
            for line in lines
        )
        yield str(source.relative_to(ROOT)), 1, blank(CODE, "\n".join(said))


def sources() -> Iterator[tuple[str, int, str]]:
    """File, first line and text of each docstring and each sentence in the code:
    messages and help texts.
    """
    for package in ("pathspace", "diagnostics", "training"):
        for file in sorted((ROOT / package).rglob("*.py")):
            name = str(file.relative_to(ROOT))
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if (
                    isinstance(node, ast.Constant)
                    and isinstance(node.value, str)
                    and node.value.count(" ") > 2
                    # (markup is not a sentence)
                    and not node.value.startswith("<")
                ):
                    yield name, node.lineno, blank(CODE, blank(EXAMPLE, node.value))


def long_sentences(text: str) -> Iterator[tuple[int, str]]:
    """Sentences with more words than anybody reads in one go."""
    start = 0
    for end in [*(found.start() for found in SENTENCE.finditer(text)), len(text)]:
        words = re.findall(r"[A-Za-z]{2,}", text[start:end])
        is_list = text.count(",", start, end) * 8 > len(words)
        if len(words) > WORDS["longest_sentence"] and not is_list:
            yield (
                end - 1,
                f"a sentence of {len(words)} words ('{' '.join(words[:6])} ...'): make it two",
            )
        start = end


def findings(text: str) -> Iterator[tuple[int, str]]:
    """Places in a text, and what is wrong there."""
    from proselint.checks import __register__
    from proselint.config import DEFAULT
    from proselint.registry import CheckRegistry
    from proselint.tools import LintFile

    yield from long_sentences(text)
    for pattern, say in PHRASES:
        for found in pattern.finditer(text):
            yield found.start(), f"'{' '.join(found[0].split())}': {say}"
    if not CheckRegistry().checks:
        CheckRegistry().register_many(__register__)
    checks = WORDS["proselint"] | {
        name: on for name, on in DEFAULT["checks"].items() if name not in WORDS["proselint"]
    }
    for error in LintFile("prose", content=text).lint({"max_errors": 1000, "checks": checks}):
        yield error.check_result.span[0] - 1, error.check_result.message


def problems() -> Iterator[str]:
    """One line for each finding of the whole project, which is read as one text."""
    parts, places = [], []
    for name, first, text in [*pages(), *sources()]:
        lines = text.split("\n")
        parts += [*lines, ""]
        places += [(name, first + number) for number in range(len(lines) + 1)]
    whole = "\n".join(parts)
    for place, says in sorted(findings(whole)):
        name, line = places[whole.count("\n", 0, max(place, 0))]
        yield f"{name}:{line}: {says}"


if __name__ == "__main__":
    lines = list(dict.fromkeys(problems()))
    print(*lines, sep="\n", end="\n" if lines else "")
    sys.exit(f"{len(lines)} sentences have to change" if lines else None)
