"""The committed figures on channels: the page is what the data say, and the data
say what the page promises.
"""

from __future__ import annotations

import pytest
from benchmarks import matching, pruning, smoothing
from benchmarks.figures import load, shows


@pytest.mark.parametrize("part", [matching, pruning, smoothing])
def test_the_page_is_what_the_data_say(part):
    assert shows(part.PAGE, part.NAME, part.tables(load(part.NAME)))


def test_half_of_the_channels_of_most_families():
    held = load("pruning")
    good = [name for name, row in held["timm"].items() if pruning.stands(row["ours"])]
    assert set(held["timm"]) == set(pruning.TIMM) and len(good) >= len(pruning.TIMM) - 2 >= 38
    assert set(held["transformers"]) == set(pruning.LANGUAGE)
    assert sum(pruning.stands(row) for row in held["transformers"].values()) >= 15


def test_mappings_of_the_registry():
    held = load("smoothing")
    rows = list(held["listed"].values())
    assert sum(row["found"] for row in rows) >= 225 / 232 * sum(row["listed"] for row in rows)
    assert all(mapping["reason"] for row in rows for mapping in row["missed"])
    assert len(held["unlisted"]) >= 10
    assert all(
        row["pairs"] and row["change"] <= 1e-5 for row in [*rows, *held["unlisted"].values()]
    )
    assert all(row["same"] and row["quantised"] for row in held["accepted"].values())


def test_matched_networks_are_nearer_than_unmatched_ones():
    rows = load("matching")["rows"]
    for name in matching.NETS:
        for pair in range(matching.PAIRS):
            barriers = {
                row["way"]: row["barrier"]
                for row in rows
                if (row["net"], row["pair"]) == (name, pair)
            }
            assert barriers["weights"] < 0.2 * barriers["as trained"]
    assert all(row["moved"] <= 1e-5 for row in rows if row["way"] != "rebasin")
