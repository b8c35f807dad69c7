"""No result is typed into the texts of generated pages: records, journals, constants and recipes
give the numbers.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

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


@pytest.mark.parametrize("name", [name for name in texts() if name != "optimizers"])
def test_records_have_the_remarks_of_today(name: str) -> None:
    record = Record.read(RECORDS / f"{name}.json")
    for remark in texts()[name].get("remarks", ()):
        parts = [re.escape(part) for part in FIELD.split(remark)]
        assert any(re.fullmatch(".+".join(parts), line) for line in record.differs), remark
