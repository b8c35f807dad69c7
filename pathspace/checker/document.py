"""Reading and checking of a proof document: its form, its digest, its tables of units."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

STATEMENT = (
    "w_e <- w_e exp(phi(head e) - phi(tail e)), phi(root) = 0, acts by as many independent"
    " generators as there are units; the basis paths of the two trees are as many as weights less"
    " units, and independent"
)
# the fields of a document, by their kind
NUMBERS = "version weights units dimension shared_edges chains basis_paths"
TEXTS, LISTS = "format model statement digest", "tensors products statistics pinned unused"
KINDS = {int: NUMBERS, str: TEXTS, list: LISTS, dict: "trees"}
FIELDS = {field: kind for kind, fields in KINDS.items() for field in fields.split()}
# documents whose runs stand for more numbers are rejected
MOST_NUMBERS = 1 << 26


class Rejected(Exception):
    """The document does not prove what it states; the message says why."""


@dataclass(frozen=True)
class Tensor:
    """Ends of the edges of one weight tensor, read from the document."""

    name: str
    shape: tuple[int, ...]
    tail: np.ndarray
    head: np.ndarray
    unused: np.ndarray | None
    edges: int
    # the constant that the model adds to the tensor in every use: the sum is rescaled
    shift: float = 0.0

    def at(self, ids: np.ndarray, flat: np.ndarray) -> np.ndarray:
        """Entries of a broadcast table at flat positions of the tensor."""
        index = np.unravel_index(flat, self.shape) if self.shape else ()
        return np.asarray(
            ids[tuple(i if n > 1 else i * 0 for i, n in zip(index, ids.shape, strict=True))]
        )


def is_bare(value: Any) -> bool:
    """Whether a tensor has a shape but no values."""
    return bool(getattr(value, "is_meta", False)) or type(value).__name__ == "FakeTensor"


def require(condition: Any, reason: str) -> None:
    """Reject the document for a reason unless a condition holds."""
    if not condition:
        raise Rejected(reason)


def read_document(document: Mapping[str, Any] | str | Path) -> Mapping[str, Any]:
    """Read a document, and check its fields, format, statement and digest."""
    if isinstance(document, str | Path):
        try:
            text = Path(document).read_text(encoding="utf-8")
        except OSError as error:
            raise Rejected(
                f"the file {str(document)!r} cannot be read ({error.strerror})"
            ) from error
        document = json.loads(text)
    require(isinstance(document, Mapping), "the document is not a JSON object")
    assert isinstance(document, Mapping)
    told = "this is a certificate, not a proof: write one with pathspace verify --proof FILE"
    require("theorem1" not in document, told)
    for field, kind in FIELDS.items():
        require(field in document, f"the document lacks {field!r}")
        require(type(document[field]) is kind, f"{field!r} is no {kind.__name__}")
    require(set(document) - {"spaces"} == set(FIELDS), "it has fields that do not belong there")
    form = document["format"], document["version"]
    require(form == ("pathspace-proof", 3), "the format is not known")
    require(document["statement"] == STATEMENT, "the statement is not the one that is proven here")
    body = {key: value for key, value in document.items() if key != "digest"}
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    digest = hashlib.sha256(text.encode()).hexdigest()
    require(digest == document["digest"], "the digest is another document's")
    asked = _numbers_asked(document)
    require(asked <= MOST_NUMBERS, f"its runs stand for {asked:,} numbers, more than are judged")
    return document


def _numbers_asked(value: Any) -> int:
    """For how many numbers the runs of a document stand, before any of them is written out."""
    if isinstance(value, Mapping):
        counts = [_numbers_asked(entry) for entry in value.values()]
        runs = value.get("runs")
        if isinstance(runs, list):
            long = (run[2] for run in runs if isinstance(run, list) and len(run) == 3)
            counts += [count for count in long if type(count) is int and count > 0]
        return sum(counts)
    return sum(map(_numbers_asked, value)) if isinstance(value, list) else 0


def integers(values: Any, what: str, length: int | None = None) -> np.ndarray:
    """Integers: a list, or runs ``[first, step, count]`` with ``length`` numbers in total."""
    if isinstance(values, dict) and length is not None:
        require(set(values) == {"runs"}, f"{what} is not a list")
        runs = [integers(run, what) for run in values["runs"]]
        require(all(len(run) == 3 and run[2] >= 1 for run in runs), f"{what} has a malformed run")
        require(sum(int(run[2]) for run in runs) == length, f"{what} has the wrong length")
        ends = (abs(int(run[0])) + abs(int(run[1])) * int(run[2]) for run in runs)
        require(max(ends, default=0) < 1 << 62, f"{what} holds numbers that are too large")
        parts = [run[0] + run[1] * np.arange(run[2]) for run in runs]
        return np.concatenate([np.zeros(0, np.int64), *parts])
    require(isinstance(values, list), f"{what} is not a list")
    whole = all(type(value) is int for value in values)
    require(whole, f"{what} holds something else than whole numbers")
    return np.array(values, dtype=np.int64)


def _table(entry: Any, shape: tuple[int, ...], what: str) -> np.ndarray:
    own = tuple(integers(entry["shape"], what).tolist())
    fits = len(own) == len(shape) and all(
        n in (1, size) for n, size in zip(own, shape, strict=True)
    )
    require(fits, f"{what} of shape {own} does not broadcast to {shape}")
    values = integers(entry["values"], what, math.prod(own))
    require(len(values) == math.prod(own), f"{what} has the wrong length")
    return values.reshape(own)


def read_tensors(document: Mapping[str, Any]) -> Iterator[Tensor]:
    """Read the tensors one by one; every id must name the root, a unit or a product of units."""
    largest = document["units"] + len(document["products"])
    names: set[str] = set()
    for entry in document["tensors"]:
        name, shape = entry["name"], tuple(integers(entry["shape"], "a shape").tolist())
        require(isinstance(name, str) and name not in names, f"the tensor {name!r} is listed twice")
        require(min(shape, default=1) >= 1, f"the tensor {name!r} is empty")
        # with Python's integers, because a product of sizes could overflow
        size = math.prod(shape)
        names.add(name)
        tail, head = (
            _table(entry[side], shape, f"the {side} of {name}") for side in ("tail", "head")
        )
        for ids in (tail, head):
            known = -largest <= int(ids.min()) and int(ids.max()) <= largest
            require(known, f"{name} names an unknown unit")
        unused, dead = None, 0
        if entry["unused"] is not None:
            table = _table(entry["unused"], shape, f"the unused scalars of {name}")
            require(np.isin(table, (0, 1)).all(), f"unused scalars of {name} are not marked by 1")
            unused = table.astype(bool)
            dead = int(table.sum()) * size // table.size
        edges = size - dead
        same = entry["edges"] == edges and type(entry["edges"]) is int
        require(same, f"{name} has {edges} edges, not as stated")
        shift = entry.get("shift", 0.0)
        finite = type(shift) in (int, float) and math.isfinite(shift)
        require(finite, f"the shift of {name} is no number")
        yield Tensor(name, shape, tail, head, unused, edges, float(shift))


def read_products(document: Mapping[str, Any]) -> list[dict[int, int]]:
    """Products of units, each as unit -> power."""
    result = []
    for row in document["products"]:
        product: dict[int, int] = {}
        for unit, times in row:
            whole = type(unit) is type(times) is int and 0 < abs(times) < 1 << 60
            require(whole, "a product is not a list of powers")
            known = 1 <= unit <= document["units"] and unit not in product
            require(known, "a product names an unknown unit")
            product[unit] = times
        result.append(product)
    return result
