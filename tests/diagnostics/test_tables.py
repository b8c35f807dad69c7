"""Tables: export without pandas, with it, and comparison."""

from __future__ import annotations

import csv
import io
import json
import math
import sys
import types
from dataclasses import dataclass
from pathlib import Path

import pytest

from pathspace.diagnostics.shared.tables import Estimate, Table
from pathspace.errors import InputError, UnsupportedError


@dataclass(frozen=True)
class Row:
    name: str
    size: int
    gain: Estimate | None
    shape: tuple[int, ...] = (2, 3)


def table(value: float = 1.5) -> Table[Row]:
    return Table(
        "gains", (Row("a", 3, Estimate(value, 0.1, 8)), Row("b", 0, None)), ("b has no gain.",)
    )


def test_json_is_strict_and_csv_reads_back(tmp_path: Path) -> None:
    text = table(math.inf).to_json(tmp_path / "t.json")
    assert json.loads((tmp_path / "t.json").read_text()) == json.loads(text)
    assert json.loads(text)["rows"][0]["gain.value"] is None
    assert json.loads(text)["notes"] == ["b has no gain."]
    rows = list(csv.DictReader(io.StringIO(table().to_csv(tmp_path / "t.csv"))))
    assert (rows[0]["gain.value"], rows[1]["gain.value"], rows[0]["shape"]) == ("1.5", "", "2 3")
    assert (tmp_path / "t.csv").read_bytes().decode() == table().to_csv()
    with pytest.raises(InputError, match="does not exist"):
        table().to_csv(tmp_path / "missing" / "t.csv")


def test_frames_need_pandas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(UnsupportedError, match=r"use to_dicts\(\)"):
        table().to_frame()
    fake = types.ModuleType("pandas")
    fake.DataFrame = lambda rows, columns: (rows, columns)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "pandas", fake)
    rows, columns = table().to_frame()
    assert columns == ["name", "size", "gain.value", "gain.error", "gain.samples", "shape", "gain"]
    assert len(rows) == 2


def test_scalars_for_tensorboard() -> None:
    seen: dict[tuple[str, int | None], float] = {}

    class Writer:
        def add_scalar(self, tag: str, scalar_value: float, global_step: int | None = None) -> None:
            seen[tag, global_step] = scalar_value

    assert table().to_tensorboard(Writer(), 7) == len(seen) == 5
    assert seen["gains/a/gain.value", 7] == 1.5


def test_comparison_of_two_checkpoints() -> None:
    changes = table(2.0).changes(table(3.0), ["gain.value"])
    assert [(c.row, c.before, c.after, c.ratio) for c in changes] == [("a", 2.0, 3.0, 1.5)]
    (note,) = table().changes(Table("gains", table().rows[:1])).notes
    assert note == "Only the first table has 'b'."
    assert [c.ratio for c in table().changes(table(), ["size"])] == [1.0, None]


def test_access() -> None:
    assert table()["b"].size == 0 and table()[0].name == "a" and table().column("size") == [3, 0]
    with pytest.raises(InputError, match="its rows are 'a', 'b'"):
        table()["c"]
    with pytest.raises(InputError, match="found no column 'nothing'"):
        table().column("nothing")


def test_intervals() -> None:
    found = Estimate.of([1.0, 2.0, 3.0, 4.0])
    assert found.value == 2.5 and found.error == pytest.approx(math.sqrt(5 / 3 / 4))
    low, high = found.interval()
    assert (low + high) / 2 == pytest.approx(2.5)
    assert high - 2.5 == pytest.approx(3.182446 * found.error, rel=1e-5)
    assert Estimate.of([1.0]).interval() == (-math.inf, math.inf)
