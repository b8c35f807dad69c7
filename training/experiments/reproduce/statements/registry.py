"""The statements as data."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Literal

DOCUMENTS = ("path-space", "markov-chain", "evolution")
Kind = Literal["theory", "formula", "experiment", "background"]
Verdict = Literal["true", "changed", "false", "not shown", "undecided", "not tried"]


@dataclass(frozen=True)
class Statement:
    """One statement of a document, in our words.

    Either ``verdict`` stands in the file, or the verdict is computed: from the judged claims of a
    ``record`` whose text contains ``claims`` and not ``without``, or from figures of trained
    networks by the rule of ``evidence.RULES`` named ``measured``.

    Args:
        id: names it; the first letter is that of the document.
        kind: of these, ``background`` is history, opinions and analogies.
        source: section, equation, table or figure.
        verdict: ``changed`` is true with a changed statement; ``not shown`` is computed only: the
            effect is not there on a stand-in for the document's data, which does not refute it.
        right: what is right instead, for ``changed`` and ``false``.
        range: for which networks and sizes that holds, and how it was found.
        why: why it was not tried, or what would decide it.
        tests: tests that hold the verdict, as ``file::name``.
        pages: where it is explained, as ``file#heading``.
        reversed: the statement says the opposite of these claims.
        unsaid: what the document leaves open and the claims vary. Where only some of them hold,
            the statement is true with a change: of these.
    """

    document: str
    id: str
    kind: Kind
    source: str
    says: str
    verdict: Verdict | None = None
    right: str = ""
    range: str = ""
    why: str = ""
    tests: Sequence[str] = ()
    files: Sequence[str] = ()
    pages: Sequence[str] = ()
    record: str = ""
    claims: str = ""
    without: str = ""
    reversed: bool = False
    unsaid: str = ""
    measured: str = ""

    @property
    def command(self) -> str:
        """The command that shows the evidence; empty where nothing was tried."""
        if self.record:
            return f"pathspace reproduce {self.record}"
        if self.measured or "docs/data/markov.json" in self.files:
            return "PYTHONPATH=tests python -m benchmarks.markov --json docs/data/markov.json"
        if self.tests:
            return f"python -m pytest {' '.join(self.tests)}"
        pages = {Path(page.split("#")[0]).stem for page in self.pages}
        return (
            f"python -m pytest tests/project/test_docs.py -k '{' or '.join(sorted(pages))}'"
            if pages
            else ""
        )


@cache
def load_statements() -> tuple[Statement, ...]:
    """Return all statements, in the order of the documents."""
    folder = resources.files("pathspace.training.experiments.reproduce.statements")
    texts = [folder.joinpath(f"{name}.toml").read_text(encoding="utf-8") for name in DOCUMENTS]
    return tuple(
        Statement(document=content["title"], **entry)
        for content in map(tomllib.loads, texts)
        for entry in content["statement"]
    )
