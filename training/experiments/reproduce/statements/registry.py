"""The statements as data."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, Literal, get_args

from pathspace.errors import InputError

DOCUMENTS = ("path-space", "markov-chain", "evolution")
Kind = Literal["theory", "formula", "experiment", "background"]
Verdict = Literal["true", "changed", "false", "not shown", "undecided", "not tried"]


@dataclass(frozen=True)
class Statement:
    """One statement of a document.

    Either ``verdict`` stands in the file, or the verdict is computed: from the judged claims
    of a ``record`` whose text contains ``claims``, or from figures of trained networks by the
    rule named ``measured``.

    Args:
        document: title of the document.
        id: names it; the first letter is that of the document.
        kind: ``theory``, ``formula``, ``experiment`` or ``background``
            (history, opinions, analogies).
        source: section, equation, table or figure.
        says: the statement, in our words.
        verdict: ``changed`` is true with a changed statement; ``not shown`` is computed only: the
            effect is not there on a stand-in for the document's data, which does not refute it.
        right: what is right instead, for ``changed`` and ``false``.
        range: for which networks and sizes that holds, and how it was found.
        why: why it was not tried, or what would decide it.
        tests: tests that hold the verdict, as ``file::name``.
        files: data behind it.
        pages: where it is explained, as ``file#heading``.
        record: experiment of ``pathspace reproduce``.
        claims: part of the text of that experiment's claims.
        without: claims with this text are left out.
        reversed: the statement says the opposite of these claims.
        unsaid: what the document leaves open and the claims vary. Where only some of them hold,
            the statement is true with a change: of these.
        measured: a rule of
            :data:`~pathspace.training.experiments.reproduce.statements.evidence.RULES`.

    Raises:
        InputError: a key has a value it cannot have, or lacks the one that its verdict needs.
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

    def __post_init__(self) -> None:
        def expect(right: bool, what: str) -> None:
            if not right:
                raise InputError(
                    f"The statement '{self.id}' {what}; see"
                    " pathspace.training.experiments.reproduce.statements."
                )

        expect(
            self.kind in get_args(Kind),
            f"is of kind '{self.kind}', expected one of {', '.join(get_args(Kind))}",
        )
        found = [what for what in (self.verdict, self.record, self.measured) if what]
        expect(len(found) == 1, f"has {len(found)} of verdict, record and measured, expected one")
        if self.verdict is None:
            return
        expect(
            self.verdict in get_args(Verdict),
            f"has the verdict '{self.verdict}', expected {get_args(Verdict)}",
        )
        expect(self.verdict != "not shown", "is 'not shown', which only a record says")
        expect(
            bool(self.right) == (self.verdict in ("changed", "false")),
            "needs 'right' if it is changed or false",
        )
        expect(bool(self.range) == bool(self.right), "needs 'range' beside 'right'")
        expect(
            bool(self.why) == (self.verdict in ("undecided", "not tried")),
            "needs 'why' if it is not decided",
        )
        evidence = bool(self.tests or self.files or self.pages)
        expect(
            evidence != bool(self.why),
            "needs tests, files or pages if it is decided, and none if not",
        )

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


def read_statements(content: Mapping[str, Any]) -> Iterator[Statement]:
    """Read the statements of one document."""
    known = {field.name for field in fields(Statement)} - {"document"}
    for entry in content["statement"]:
        name = entry.get("id", "without an id")
        if strange := sorted(entry.keys() - known):
            raise InputError(
                f"The statement '{name}' has the key '{strange[0]}', expected:"
                f" {', '.join(sorted(known))}."
            )
        if lacking := sorted({"id", "kind", "source", "says"} - entry.keys()):
            raise InputError(f"The statement '{name}' lacks the key '{lacking[0]}'; add it.")
        yield Statement(document=content["title"], **entry)


@cache
def load_statements() -> tuple[Statement, ...]:
    """Return all statements, in the order of the documents."""
    folder = resources.files("pathspace.training.experiments.reproduce.statements")
    texts = [folder.joinpath(f"{name}.toml").read_text(encoding="utf-8") for name in DOCUMENTS]
    statements = tuple(
        statement for text in texts for statement in read_statements(tomllib.loads(text))
    )
    names = [statement.id for statement in statements]
    if twice := [name for name in names if names.count(name) > 1]:
        raise InputError(f"Two statements have the id '{twice[0]}'; give one of them another.")
    return statements
