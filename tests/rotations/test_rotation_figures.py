"""The page of rotations shows the figures that are kept."""

from __future__ import annotations

from benchmarks import rotations
from benchmarks.figures import load, shows


def test_the_page_has_the_kept_figures() -> None:
    kept = load(rotations.NAME)
    assert shows(rotations.PAGE, rotations.NAME, rotations.table(kept["rows"], kept["costs"]))


def test_rotations_take_outliers_out_of_a_language_model() -> None:
    for rows in load(rotations.NAME)["rows"].values():
        plain, hand, chosen = (rows[name] for name in ("as trained", "by hand", "chosen"))
        for basis in ("random", "Hadamard", "chosen"):
            assert abs(rows[basis]["float32"] / plain["float32"] - 1) < 1e-5
            for kind in ("weights, 6 bits", "activations, 6 bits"):
                assert rows[basis][kind] < 0.9 * plain[kind]
        for kind in rotations.ROUNDED:
            # (draws scatter by about 4 % on either side)
            assert chosen[kind] < min(1.05 * hand[kind], plain[kind])
        # the matrices for weights of 6 bits were chosen to be better than one draw
        assert chosen["weights, 6 bits"] < min(
            hand["weights, 6 bits"], 0.65 * plain["weights, 6 bits"]
        )
