"""The papers' recipes: every cell is there, says something of each field, and a run's
differences are all listed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from pathspace.errors import InputError
from pathspace.training.experiments.reproduce import Setting
from pathspace.training.experiments.reproduce.command import run_reproduction
from pathspace.training.experiments.reproduce.recipes import (
    FIELDS,
    UNSAID,
    Cell,
    describe,
    differences,
    full_arms,
    full_trial,
    listed,
    load_cells,
    runnable,
    settled,
    table_cells,
)
from pathspace.training.experiments.reproduce.recipes.full import full_arm
from pathspace.training.experiments.reproduce.trial import Outcome, Trial
from pathspace.training.experiments.reproduce.tuning import measure
from pathspace.training.experiments.tasks import task_names

SETTING = Setting(run=lambda trials: [], scale="full")
RUNNABLE = [cell for cell in load_cells().values() if not runnable(cell)]
# What a full run cannot take over from a recipe, by the fields that differ: one thread in place of
# a GPU, five seeds, rates chosen on validation data, and details of Path-SGD.
ALWAYS = {"device", "seeds", "search"}
LEFT = {
    "path-space-figure-4": {"decay", "scaling"},
    "path-space-table-6": {"decay", "reported", "scaling"},
}


def test_every_cell_of_the_papers_is_there_and_says_something_of_each_field() -> None:
    assert len(load_cells()) == 170
    for cell in load_cells().values():
        assert cell.recipe.keys() == FIELDS.keys() >= cell.fill.keys(), cell.name
    with pytest.raises(InputError, match="table"):
        table_cells("path-space-table-9")


def test_what_is_unsaid_of_a_run_is_filled_in() -> None:
    for cell in RUNNABLE:
        assert [key for key in FIELDS if cell.value(key) == UNSAID] in ([], ["device"]), cell.name
        assert cell.ours["task"] in task_names()


def test_decays_are_chosen_from_those_of_the_recipe() -> None:
    seen: list[Trial] = []

    def run_of(trials: Sequence[Trial]) -> list[Outcome]:
        seen.extend(trials)
        return [
            Outcome((1.0,), (1.0,), (abs(t.decay - 1e-5) + t.lr / 100,), 2.0, False, 0.5, 0.5)
            for t in trials
        ]

    arm = full_arm("x", table_cells("path-space-figure-4")["PTB", "G-SGD"], SETTING)
    (found,) = measure([arm], run_of, (1000, 1001), (0, 1, 2))
    assert len([t for t in seen if not t.test]) == len(set(seen)) - 3 == 3 * len(arm.rates) * 2
    assert {(t.decay, t.lr) for t in seen if t.test} == {(1e-5, 0.1)}
    assert (found.arm.base.decay, found.lr, found.to_dict()["decay"]) == (1e-5, 0.1, 1e-5)
    assert found.seconds == 2.0 * len(seen)


def of_full(cell: Cell, **more: Any) -> dict[str, Any]:
    arm = full_arm("x", cell, SETTING)
    return describe(replace(arm.base, **more), arm.rates, 5, 2, arm.decays)


def test_the_full_scale_is_the_recipe() -> None:
    """Whatever the paper says is done, but for the fields that are named above; what
    is unsaid is as filled in. Each field that differs is listed.
    """
    for cell in RUNNABLE:
        run, cell = of_full(cell), settled(cell)
        left = ALWAYS | LEFT.get(cell.name.split("/")[0], set())
        for key, said in cell.recipe.items():
            alone, nothing = replace(cell, recipe={**dict.fromkeys(FIELDS, 0), key: said}), 0
            lines = differences(alone, {**dict.fromkeys(FIELDS, nothing), key: run[key]})
            if said == UNSAID:
                assert [line[-24:] for line in lines] == ["; the paper does not say."[-24:]]
                assert key in ALWAYS or run[key] == cell.value(key), (cell.name, key)
            elif key not in left:
                assert not lines, (cell.name, key, lines)
            (other,) = differences(alone, {**dict.fromkeys(FIELDS, 0), key: "something else"})
            assert other.startswith(f"{FIELDS[key]}: something else")


# a change of each field of a trial, and what it touches
CHANGES: dict[str, tuple[Any, str]] = {
    "task": ("fashion-28", "data"),
    "optimizer": ("momentum", "momentum"),
    "epochs": (9, "epochs"),
    "batch_size": (9, "batch"),
    "init": ("default", "start"),
    "rule": ("random", "start"),
    "tau": (9.0, "tau"),
    "options": ((("hidden", 9),), "width"),
    "device": ("cuda", "device"),
    "schedule": ("linear", "schedule"),
    "clip": (9.0, "clip"),
    "decay": (9.0, "decay"),
    "augment": ("crop-flip", "augmentation"),
    "betas": ((0.9, 0.98), "betas"),
    "eps": (1e-9, "eps"),
}


def test_a_change_of_the_run_is_listed() -> None:
    # the rate is chosen from the grid, seeds are counted, and looking on changes nothing
    left = {"lr", "seed", "test", "efficiency"}
    assert CHANGES.keys() == {field.name for field in fields(Trial)} - left
    cell = table_cells("path-space-table-1")["sMNIST-28", "SGD"]
    for name, (value, key) in CHANGES.items():
        # (SGD has no moments)
        adam = {"optimizer": "adam"} if name in ("betas", "eps") else {}
        before, after = (
            differences(cell, of_full(cell, **{**adam, **more})) for more in ({}, {name: value})
        )
        assert any(line.startswith(f"{FIELDS[key]}: ") for line in set(after) - set(before)), name
    few = replace(full_arm("x", cell, SETTING).base, task="fashion-28", options=(("limit", 999),))
    assert "999 of 55,000 training examples" in describe(few, (0.1,), 2, 1)["data"]


def test_cells_that_cannot_be_trained_say_why() -> None:
    left = [cell for cell in load_cells().values() if runnable(cell)]
    assert {cell.name.split("/")[0] for cell in left} == {
        "markov-chain-figure-2",
        "path-space-table-4",
    }
    for cell in left:
        assert runnable(cell).endswith(".")
        with pytest.raises(InputError, match="cannot be trained here"):
            full_trial(cell)


def test_what_holds_for_all_contenders_is_listed_once() -> None:
    cells = table_cells("path-space-table-1")
    arms, _ = full_arms("path-space-table-1", replace(SETTING, shrink=100))
    assert arms.keys() == cells.keys()
    pairs = [(cells[place], arm) for place, arm in arms.items()]
    lines = listed(pairs, replace(SETTING, device="cuda"))
    assert lines.count("Epochs: 4 in place of 400.") == 1
    assert "Computer: cuda in place of one Nvidia GPU." in lines
    some = [line for line in lines if line.startswith("Start")]
    assert some == ["Start: unit skeleton; the paper does not say."]
    plain = cells["sMNIST-28", "SGD"]
    mixed = listed([(plain, arms["sMNIST-28", column]) for column in ("SGD", "G-SGD")], SETTING)
    assert "Optimizer: G-SGD in place of SGD. (sMNIST-28: G-SGD)" in mixed
    with pytest.raises(InputError, match="No cell of markov-chain-figure-2"):
        full_arms("markov-chain-figure-2", SETTING)


def test_the_page_is_that_of_the_files(tmp_path: Path) -> None:
    """If this fails, run: pathspace reproduce recipes --out docs/reproduction."""
    run_reproduction("recipes", Console(quiet=True), out=str(tmp_path / "records"))
    page = (tmp_path / "paper-recipes.md").read_text()
    assert page == (Path(__file__).parents[2] / "docs" / "paper-recipes.md").read_text()
    assert page.count("\n## ") == 13 and "–" in page


def figures(cell: Cell) -> list[float]:
    """The numbers of a cell as printed."""
    return [
        float(word.strip(",%"))
        for word in cell.printed.replace("±", " ").split()
        if word.strip(",%.").replace(".", "").isdigit()
    ]


def test_tables_2_and_4_disagree() -> None:
    second, fourth = table_cells("path-space-table-2"), table_cells("path-space-table-4")
    names = {"G-SGD": "G-SGD (our method)", "SGD": "SGD (our implementation)"}
    wrong = [
        (row, column)
        for (row, column), cell in second.items()
        if figures(fourth[names[row], column.replace("160", "196")]) != figures(cell)
    ]
    assert wrong == [("G-SGD", "CIFAR-100 RCNN-96")]
    widths = [{column.split("-")[-1] for _, column in cells} for cells in (second, fourth)]
    assert widths[0] - widths[1] == {"160"}
    published = {c: figures(cell)[0] for (row, c), cell in fourth.items() if "Liang" in row}
    worse = [c for c, error in published.items() if figures(fourth[names["G-SGD"], c])[0] >= error]
    assert sorted(worse) == ["CIFAR-10 RCNN-96", "MNIST RCNN-96"]


def test_the_increases_of_table_6_follow_from_its_times() -> None:
    cells = table_cells("path-space-table-6")
    printed = dict(
        entry.rsplit(" ", 2)[:2]
        for entry in next(iter(cells.values())).note.split(": ")[1].split(", ")
    )
    assert len(printed) == 9
    for column, increase in printed.items():
        ours, plain = (figures(cells[row, column])[0] for row in ("G-SGD", "SGD"))
        assert 100 * (ours / plain - 1) == pytest.approx(float(increase), abs=0.1)


def test_the_improvements_of_the_chain_paper_follow_from_its_figures() -> None:
    first, second, third = (table_cells(f"markov-chain-table-{number}") for number in (1, 2, 3))
    improvements = {"WMT-16 DE/EN (Q)": (25.4, 33.6), "WMT-16 DE/EN (S)": (6.0, 4.0),
                    "WMT-16 EN/DE (Q)": (25.5, 28.7), "WMT-16 EN/DE (S)": (4.9, 4.1)}  # fmt: skip
    for row, printed in improvements.items():
        plain, chain = (figures(first[row, column]) for column in ("transformer", "Markov chain"))
        assert (plain[0] - chain[0], chain[1] - plain[1]) == pytest.approx(printed)
    gains = {18: 0.4, 20: 0.2, 32: 0.6, 34: 0.4, 44: 0.2, 50: 0.6, 56: 1.2, 101: 0.4, 152: 0.3}
    for row in {row for row, _ in third}:
        plain, chain = (figures(third[row, column])[0] for column in ("ResNet", "Markov chain"))
        assert chain - plain == pytest.approx(gains[int(row.split(", ")[1].split()[0])])
    best = {"ResNet50": 0.2, "ViT-S/16-224": 0.3, "DeiT-S/16-224": 0.2, "Swin-S/4-7-224": 0.2}
    for row, gain in best.items():
        mine = {c: figures(cell)[0] for (r, c), cell in second.items() if r == row}
        assert max(mine.values()) - mine["baseline"] == pytest.approx(gain)


def test_longer_training_worsens_the_perplexity_of_table_1() -> None:
    cells = table_cells("markov-chain-table-1")
    for pair in ("DE/EN", "EN/DE"):
        short, long = (figures(cells[f"WMT-16 {pair} ({s})", "Markov chain"])[0] for s in "QS")
        assert long > short


def test_gains_in_table_3_do_not_grow_with_depth_everywhere() -> None:
    cells = table_cells("markov-chain-table-3")
    gains: dict[str, dict[int, float]] = {}
    for row in dict.fromkeys(row for row, _ in cells):
        data, layers = row.split(", ")
        plain, chain = (figures(cells[row, column])[0] for column in ("ResNet", "Markov chain"))
        gains.setdefault(data, {})[int(layers.split()[0])] = round(chain - plain, 6)
    by_depth = {data: [found[depth] for depth in sorted(found)] for data, found in gains.items()}
    # the deepest network gains most on two data sets, step by step on one of them
    deepest = {data for data, found in by_depth.items() if max(found) == found[-1]}
    assert deepest == {"CIFAR-10", "CIFAR-100"}
    steady = {data for data, found in by_depth.items() if found == sorted(found)}
    assert steady == {"CIFAR-100"}
    assert by_depth["ImageNet-1k"] == [0.4, 0.3]
