"""The page of rotations shows the figures that are kept."""

from __future__ import annotations

from benchmarks import rotations
from benchmarks.figures import load, shows


def test_the_page_has_the_kept_figures() -> None:
    kept = load(rotations.NAME)
    assert shows(rotations.PAGE, rotations.NAME, rotations.table(kept["rows"], kept["costs"]))


def test_rotations_take_outliers_out_of_a_language_model() -> None:
    rows = load(rotations.NAME)["rows"]
    for basis in ("random", "Hadamard", "chosen"):
        assert abs(rows[basis]["float32"] / rows["as trained"]["float32"] - 1) < 1e-5
        for bits in ("weights, 6 bits", "activations, 6 bits"):
            assert rows[basis][bits] < 0.8 * rows["as trained"][bits]
            # (draws scatter by about 4 % on either side)
            assert rows[basis][bits] < 1.05 * rows["by hand"][bits]
            assert rows["chosen"][bits] <= rows[basis][bits]
