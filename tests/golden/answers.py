"""The row of one model in one mode: everything that the public interface says of it.

Fields, in order; those that take long are left out for large models, as stated:

* `weights`, `units`, `exact` (exact units), `approximate`, `dimension`, `affine`,
  `unused` (parameters): the reduction graph, at the default input sizes;
* `pins`: how many pins there are of each operation and reason;
* `ends`, `exact_ends`: digests of tails, heads, statistics and unused scalars, see
  :func:`golden.ends.ends_digest`;
* `basis`: number of basis paths, up to 3,000 weights;
* `norms`: path norms for `p = 1` and `p = 2`, up to 300,000 weights;
* `balanced`: least sum of squares, and how many units keep their scale, up to 100,000 weights;
* `verify`: verdicts on the three theorems and the invariance, the units at the given sizes, and the
  upper bound on them, up to 2,000 weights; the bound up to 600;
* `account`: scalars in path space, pinned and unused, and chains of reasons, up to 2,000 weights;
* `channels`: number of groups and of channels, and a digest of their slices, up to 3,000,000
  weights.

What fails gives the class of its error. A model that has no graph has a row with `error`.
"""

from __future__ import annotations

import hashlib
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import pathspace as ps
from golden.ends import ends_digest
from golden.targets import Target, seeded, settings_kept
from pathspace.pruning.channels import ChannelGroups

BASIS, NORMS, BALANCE, VERIFY, BOUND, CHANNELS = 3_000, 300_000, 100_000, 2_000, 600, 3_000_000
Row = dict[str, Any]


def answer(target: Target) -> Row:
    """The row of a target; the same for the same code, whatever ran before."""
    with warnings.catch_warnings(), settings_kept():
        warnings.simplefilter("ignore")
        seeded()
        row: Row = {"name": target.name}
        try:
            with target.around():
                model, args, kwargs = target.build()
                row |= _answers(model, args, kwargs)
        except Exception as error:
            row["error"] = type(error).__name__
        return row


def _answers(model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Row:
    graph = ps.trace(model, *args, kwargs=kwargs)
    size = graph.num_weights
    row: Row = {
        "weights": size,
        "units": graph.num_units,
        "exact": graph.num_exact_units,
        "approximate": len(graph.approximate),
        "dimension": graph.dimension,
        "affine": graph.affine,
        "unused": len(graph.unused),
        "pins": dict(sorted(Counter(f"{pin.op}: {pin.reason}" for pin in graph.pinned).items())),
        "ends": ends_digest(graph),
        "exact_ends": ends_digest(graph, exact=True),
    }
    if size <= BASIS:
        row["basis"] = _tried(lambda: len(graph.skeleton().basis()))
    if size <= NORMS:
        row["norms"] = [_tried(lambda p=p: _rounded(graph.path_norm(p))) for p in (1, 2)]
    if size <= BALANCE:
        row["balanced"] = _tried(lambda: _balanced(model, graph))
    if size <= VERIFY:
        row["verify"] = _tried(lambda: _verified(model, args, kwargs, size <= BOUND))
        row["account"] = _tried(lambda: _accounted(model, args, kwargs))
    if size <= CHANNELS:
        row["channels"] = _tried(lambda: _channels(ps.channels(model, *args, kwargs=kwargs)))
    return row


def _tried(compute: Callable[[], Any]) -> Any:
    """The answer, or the class of the error."""
    seeded()
    try:
        return compute()
    except Exception as error:
        return type(error).__name__


def _rounded(value: float) -> float | str:
    """Nine digits; a value that JSON has no number for in words."""
    short = float(f"{value:.9g}")
    return short if abs(short) < float("inf") else str(short)


def _balanced(model: Any, graph: ps.ReductionGraph) -> list[Any]:
    found = ps.balancing(model, graph)
    return [_rounded(found.after), len(found.kept)]


def _verified(model: Any, args: Any, kwargs: Any, bound: bool) -> Row:
    found = ps.verify(model, *args, kwargs=kwargs, upper_bound=bound)
    parts = (found.theorem1, found.theorem2, found.theorem3, found.invariance)
    verdicts = [part["holds"] for part in parts]
    row: Row = {"holds": found.holds, "verdicts": verdicts, "units": found.units}
    return row | ({"at_most": found.units_at_most} if bound else {})


def _accounted(model: Any, args: Any, kwargs: Any) -> list[int]:
    found = ps.explain(model, *args, kwargs=kwargs)
    return [*found.totals.values(), len(found.reasons)]


def _channels(found: ChannelGroups) -> list[Any]:
    """Groups and channels in number, and a digest of what they are made of."""
    parts = []
    for group in found:
        text = f"{len(group)} {sorted(group.readers)} {bool(group.reason)}"
        for (name, dim), positions in sorted(group.slices.items()):
            data = positions.long().contiguous().numpy().tobytes()
            text += f" {name} {dim} {hashlib.sha256(data).hexdigest()}"
        parts.append(text)
    digest = hashlib.sha256("\n".join(sorted(parts)).encode()).hexdigest()[:12]
    return [len(found), sum(map(len, found)), digest]
