"""The list of all statements: its entries, what they name, and the verdicts that are computed."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
from rich.console import Console

from pathspace.training.experiments.names import EXPERIMENTS as NAMES
from pathspace.training.experiments.names import PAGES
from pathspace.training.experiments.reproduce.command import run_reproduction
from pathspace.training.experiments.reproduce.page import render_statements, with_tables
from pathspace.training.experiments.reproduce.record import Record
from pathspace.training.experiments.reproduce.statements import (
    Statement,
    judge_all,
    load_statements,
)
from pathspace.training.experiments.reproduce.statements.evidence import RULES, Kind, Verdict

ROOT = Path(__file__).parents[2]
RECORDS = ROOT / "docs" / "reproduction"
ENTRY: dict[str, Any] = {"id": "A-1", "kind": "theory", "source": "p. 1", "says": "One is one."}


UNDECIDED = "undecided", "not tried"


def one(**more: Any) -> Statement:
    return Statement(document="A paper", **(ENTRY | more))


def is_there(name: str) -> bool:
    """Whether a checkout has a test, a file, a page or its heading."""
    file, _, test = name.partition("::")
    file, _, heading = file.partition("#")
    if not (path := ROOT / file).is_file():
        return False
    text = path.read_text(encoding="utf-8")
    titles = (line.lstrip("#").strip().lower() for line in text.splitlines() if line[:1] == "#")
    ends = {re.sub(r"[ \-]+", "-", re.sub(r"[^\w\- ]", "", title)) for title in titles}
    return f"\ndef {test}(" in text if test else not heading or heading in ends


def test_what_statements_name_is_there() -> None:
    for statement in load_statements():
        assert statement.record in {"", *NAMES} - {*PAGES}
        assert statement.measured in {"", *RULES}
        for name in (*statement.tests, *statement.files, *statement.pages):
            assert is_there(name), (statement.id, name)


def test_no_verdict_on_an_experiment_is_typed() -> None:
    typed = {s.id for s in load_statements() if s.kind == "experiment" and s.verdict}
    untried = {s.id for s in load_statements() if s.verdict == "not tried"}
    # figure 2(a) is a drawing, which a counterexample refutes
    assert typed - untried == {"M-figure-2a"}


def test_each_statement_about_an_experiment_finds_its_claims() -> None:
    for judged in judge_all([s for s in load_statements() if s.record], RECORDS):
        assert judged.verdict != "not tried", judged.statement.id


def test_entries_say_what_their_verdict_needs() -> None:
    statements = load_statements()
    assert len({one.id for one in statements}) == len(statements)
    for one in statements:
        assert one.kind in get_args(Kind), one.id
        assert bool(one.verdict) + bool(one.record) + bool(one.measured) == 1, one.id
        # a stand-in alone does not show, which a record says
        assert one.verdict in {None, *get_args(Verdict)} - {"not shown"}, one.id
        if one.verdict is not None:
            changed, open_ = one.verdict in ("changed", "false"), one.verdict in UNDECIDED
            assert bool(one.right) == bool(one.range) == changed, one.id
            assert bool(one.why) == open_ != bool(one.tests or one.files or one.pages), one.id


def record(*claims: tuple[str, str]) -> Record:
    whole = Record.read(RECORDS / "toy.json")
    return replace(
        whole, claims=tuple({**whole.claims[0], "statement": s, "verdict": v} for s, v in claims)
    )


@pytest.mark.parametrize(
    ("claims", "verdict", "turned"),
    [
        ((("x: a wins", "better"), ("y: a wins", "better")), "true", "false"),
        ((("x: a wins", "better"), ("y: a wins", "undecided")), "undecided", "false"),
        ((("x: a wins", "worse"), ("y: a wins", "undecided")), "false", "undecided"),
        ((("x: a wins", "better"), ("p: a wins", "worse")), "true", "false"),
        ((("x: a wins", "no difference that matters"),), "false", "false"),
        ((("x: b wins", "better"),), "not tried", "not tried"),
    ],
)
def test_verdicts_follow_the_record(
    claims: tuple[tuple[str, str], ...], verdict: str, turned: str, tmp_path: Path
) -> None:
    record(*claims).write(tmp_path / "toy.json")
    statement = one(record="toy", claims="a wins", without="p:", kind="experiment")
    assert [
        j.verdict for j in judge_all([statement, replace(statement, reversed=True)], tmp_path)
    ] == [verdict, turned]


@pytest.mark.parametrize(
    ("name", "scale", "differs", "verdict", "said"),
    [
        ("toy", "embedded", (), "false", "The document's own task and size; "),
        ("time", "embedded", ("One thread in place of a GPU.",), "not shown", "One thread in pl"),
        ("optimizers", "fetched", ("Tasks: clothes.",), "not shown", "On a stand-in for"),
        ("smnist", "full", ("Epochs: 4 in place of 400.",), "false", ""),
        ("smnist", "full", ("Data: B in place of A. (SGD)",), "not shown", "On B in place of A."),
    ],
)
def test_only_the_documents_own_setting_refutes(
    name: str, scale: str, differs: tuple[str, ...], verdict: str, said: str, tmp_path: Path
) -> None:
    found = replace(record(("mnist-28: a wins", "worse")), name=name, scale=scale, differs=differs)
    found.write(tmp_path / f"{name}.json")
    (judged,) = judge_all([one(record=name, claims="a wins", kind="experiment")], tmp_path)
    assert judged.verdict == verdict and f"worse. {said}".rstrip() in judged.detail


def test_without_records_experiments_are_not_tried(tmp_path: Path) -> None:
    computed = [s for s in load_statements() if s.record or s.measured]
    for judged in judge_all(computed, tmp_path / "none"):
        assert judged.verdict == "not tried" and judged.statement.command in judged.detail


@pytest.mark.parametrize("rule", RULES)
def test_rules_follow_the_figures(rule: str, tmp_path: Path) -> None:
    """Figures that say yes in every run, and the same with the sign turned."""

    def row(up: bool, seed: int, tau: float) -> dict[str, object]:
        fold, long = (0.5, 0.9) if up else (0.1, 0.1)
        better = 0.6 + (0.2 if (tau > 0) is up else -0.2) + seed / 1000
        alone = (0.5 if up else -0.5) + seed / 1000
        found = {"network": "net", "seed": seed, "tau": tau, "accuracy": better}
        found |= {"efficiency": alone if rule == "efficient_without_help" else better}
        found |= {"trained": {"gradient_above_one": long}, "fold_at_start": fold}
        return found | {"fold": 0.2 + seed / 1000}

    file = tmp_path / "figures.json"
    for up, kind, verdict in (
        (True, "experiment", "true"),
        (False, "theory", "false"),
        (False, "experiment", "not shown"),
    ):
        rows = [row(up, seed, tau) for seed in range(4) for tau in (0.0, 3e-4)]
        file.write_text(json.dumps({"rows": rows}))
        (judged,) = judge_all([one(measured=rule, kind=kind)], tmp_path, file)
        assert judged.verdict == verdict


def test_the_page_is_that_of_statements_and_records(monkeypatch: pytest.MonkeyPatch) -> None:
    """If this fails, run: pathspace reproduce claims --out docs/reproduction."""
    monkeypatch.chdir(ROOT)
    judged = judge_all(load_statements(), RECORDS)
    page = (ROOT / "docs" / "claims.md").read_text()
    assert page == render_statements(judged, Path("docs/reproduction"))


def test_the_page_of_errata_has_every_statement_that_is_not_right() -> None:
    """If this fails, run: pathspace reproduce claims --out docs/reproduction."""
    page = (ROOT / "docs" / "errata.md").read_text()
    assert with_tables(page, load_statements()) == page
    wrong = [s for s in load_statements() if s.verdict in ("changed", "false")]
    for statement in wrong:
        assert f"**{statement.id}**" in page, statement.id
        assert statement.right and statement.range and statement.tests, statement.id
    assert {s.id[0] for s in wrong} == {"P", "M", "E"}


def test_the_command_writes_and_prints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    console = Console(record=True, width=200)
    run_reproduction("claims", console, out="records")
    assert "Wrote claims.md: " in console.export_text()
    assert "**P-theorem-2-stacks**" in (tmp_path / "claims.md").read_text()
