"""No result is typed into the texts of generated pages: records, journals, constants and recipes
give the numbers.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from statistics import fmean

import pytest
from scipy.stats import ttest_rel

from pathspace.training.experiments.json_lines import read_lines
from pathspace.training.experiments.reproduce.page import figures, render, reported
from pathspace.training.experiments.reproduce.recipes import load_cells
from pathspace.training.experiments.reproduce.record import Record, texts
from pathspace.training.experiments.reproduce.statements import load_statements

ROOT = Path(__file__).parents[2]
REPRODUCE = ROOT / "training" / "experiments" / "reproduce"
RECORDS = ROOT / "docs" / "reproduction"
NUMBER = re.compile(
    r"\d[\d.,]*(?:e-?\d+)?(?: ?%)?"
    r"|\b(?:four|five|six|seven|eight|nine|ten|eleven|twelve|twenty|hundred|thousand|twice)\b"
    r"|\b(?:half|quarter) (?:of )?the (?:time|runs|seeds)\b"
)
FIELD = re.compile(r"\{[^{}]*\}")
# what stands for a place or a name
PLACE = re.compile(
    r"(?:sections?|eq\.|tables?|figures?|theorems?|lemmas?|definitions?|algorithms?|lines|footnotes?)"
    r" \(?\d[\d.]*(?:\([a-z]\))?\)?(?:(?:,| and| to) \(?\d+(?:\([a-z]\))?\)?)*",
    re.IGNORECASE,
)
NAME = re.compile(
    r"\b(?:Fashion-MNIST|s?MNIST-\d+|CIFAR-\d+|WMT-16|WikiText-2|enwik8|ImageNet-1k|L2"
    r"|ResNet-\d+|C10-RCNN96|log10|float64)\b"
)
# sizes of the networks and of the images of the leaderboard, whose code names them so as well
SIZE = re.compile(
    r"\d+ x \d+ (?:digits|pixels)|patches of \d+ x \d+|ResNet of \d+ layers"
    r"|transformer of \d+ blocks|\d+ degrees|max_multiplier=\d+|between 1/"
)
# what the paper gives, where no recipe says it
GIVEN = re.compile(r"28 parameters|four values of tau|unfolded three times|±1")
YEAR = re.compile(r"et al\., \d{4}|is of \d{4}\b")


def numbers(text: str, *allowed: re.Pattern[str]) -> list[str]:
    """The numbers of a text that no pattern allows."""
    for pattern in (FIELD, PLACE, NAME, *allowed):
        text = pattern.sub(" ", text)
    return NUMBER.findall(text)


def of_recipes(document: str) -> set[str]:
    """The numbers in the recipes of a document, as they are written there."""
    cells = [cell for cell in load_cells().values() if cell.paper == document]
    values = [(cell.printed, cell.row, cell.column, *cell.recipe.values()) for cell in cells]
    return set(re.findall(r"\d[\d.]*", str(values)))


@pytest.mark.parametrize(
    "page", sorted(REPRODUCE.rglob("*.md")), ids=lambda path: "-".join(path.parts[-2:])
)
def test_heads_of_pages_have_fields_in_place_of_numbers(page: Path) -> None:
    assert numbers(page.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("name", texts())
def test_texts_of_experiments_have_fields_in_place_of_numbers(name: str) -> None:
    """A paper's own figures stand under ``paper``; all other texts are ours."""
    entry = texts()[name]
    ours = [entry["title"], entry["source"], entry["caption"], *entry.get("remarks", ())]
    for text in (*ours, *entry.get("tasks", {}).values()):
        assert numbers(text, SIZE, GIVEN) == [], text


def test_what_is_right_instead_names_no_measured_number() -> None:
    """Formulas have small whole numbers, and a sentence may repeat a number of the recipes or name
    a year.
    """
    for statement in load_statements():
        known = of_recipes(statement.document)
        left = [
            number
            for number in numbers(f"{statement.right} {statement.range} {statement.unsaid}", YEAR)
            if not re.fullmatch(r"\d", number.strip(".,")) and number.strip(".,") not in known
        ]
        assert left == [], statement.id


def test_why_something_was_not_tried_names_numbers_of_the_recipes_alone() -> None:
    for statement in load_statements():
        known = of_recipes(statement.document)
        left = {number.strip(".,") for number in numbers(statement.why, YEAR)} - known
        assert left == set(), statement.id


@pytest.mark.parametrize("module", sorted(REPRODUCE.rglob("*.py")), ids=lambda path: path.stem)
def test_sentences_in_the_code_have_no_shares_and_no_decimals(module: Path) -> None:
    tree = ast.parse(module.read_text(encoding="utf-8"))
    documented = ast.Module | ast.ClassDef | ast.FunctionDef
    docstrings = {
        ast.get_docstring(n, clean=False) for n in ast.walk(tree) if isinstance(n, documented)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = "" if node.value in docstrings or " " not in node.value else node.value
            # the least p-value that is shown
            found = re.findall(r"\d+ ?%|\d+\.\d+", text.replace("< 0.001", ""))
            assert found == [], f"{module}:{node.lineno}"


def test_the_check_finds_what_was_typed() -> None:
    for typed in (
        "gauge-fixed AdamW ended 7 % higher",
        "a test result of the smaller setting (11 %) had been seen",
        "and 10 runs of it had been evaluated",
        "in two of nine columns",
        "about four times the time",
    ):
        assert numbers(typed), typed
    assert numbers("section 4, eq. (11) and (12), tables 2 and 4, CIFAR-10 with {runs} runs") == []


@pytest.mark.parametrize("name", [name for name in texts() if name != "optimizers"])
def test_records_have_the_remarks_of_today(name: str) -> None:
    record = Record.read(RECORDS / f"{name}.json")
    for remark in texts()[name].get("remarks", ()):
        parts = [re.escape(part) for part in FIELD.split(remark)]
        assert any(re.fullmatch(".+".join(parts), line) for line in record.differs), remark


@pytest.mark.slow
def test_runs_that_no_record_reports_are_counted_in_the_journals() -> None:
    """By hand: all runs that looked at the test split, less the seeds of all arms."""
    known = [Record.read(path) for path in RECORDS.glob("*.json") if path.stem != "optimizers"]
    for record in known:
        lines = list(read_lines(RECORDS / f"{record.name}-trials.jsonl"))
        told = sum(len(arm["tests"]) for arm in record.data.get("arms", ())) if lines else 0
        tested = sum(line["trial"]["test"] for line in lines)
        assert len(reported(record, RECORDS)[1]) == tested - told, record.name
    by_name = {record.name: record for record in known}
    (one,) = {
        tuple(map(tuple, run["trial"]["options"]))
        for run in reported(by_name["language"], RECORDS)[1]
    }
    assert dict(one)["layers"] == 1
    found = figures(known, RECORDS)
    assert found["language_runs"] == "10 runs" and found["smnist_runs"] == "35 runs"
    assert "70 runs of smnist" in str(found["again"])
    assert "13.3 %" in str(found["smnist_best"])
    # without journals the page says less
    assert figures(known)["smnist_best"] == "" and "runs of it had" in render(known)


@pytest.mark.slow
def test_first_runs_of_the_recurrent_network_are_judged_as_its_record_is() -> None:
    """By hand: the paired t-test on the runs of earlier code."""
    record = Record.read(RECORDS / "rcnn.json")
    errors: dict[str, dict[int, float]] = {"gmomentum": {}, "momentum": {}}
    for run in reported(record, RECORDS)[1]:
        assert not run["outcome"].get("test_parts")
        errors[run["trial"]["optimizer"]][run["trial"]["seed"]] = run["outcome"]["test_metric"]
    paths, weights = ([of[seed] for seed in sorted(of)] for of in errors.values())
    found = ttest_rel(weights, paths)
    share = 1 - fmean(paths) / fmean(weights)
    said = str(figures([record], RECORDS)["rcnn_first"])
    assert f"{share:+.1%}" in said and f"(p = {found.pvalue:.3f})" in said
    assert f"first {2 * len(paths)} runs (18 of them" in said
    assert ("**undecided**" in said) == (found.pvalue > 0.05)
    assert figures([record])["rcnn_first"] == ""
