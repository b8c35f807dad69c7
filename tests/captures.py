"""Both ways to capture a model, judged against each other: a recording of one
run, and what torch exports.

`python -m captures [zoo|odd|cases] [NAME ...]` from `tests/` compares the answers on every model
and says what was exported, and why. What differs is printed; nothing else should be.
"""

from __future__ import annotations

import contextlib
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch

import pathspace as ps
import pathspace.capture.capture
from pathspace.evidence.explain import account

Made = tuple[Any, tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Model:
    """A model by name, how it is built, and in what surroundings it is used."""

    name: str
    make: Callable[[], Made]
    around: Callable[[], Any] = contextlib.nullcontext


def _zoo() -> Iterator[Model]:
    from zoo.entry import load

    for entry in load().values():
        for mode in entry.modes:
            yield Model(f"{entry.name}-{mode}", lambda entry=entry, mode=mode: entry.make(mode))  # type: ignore[misc]


def _odd() -> Iterator[Model]:
    import odder_models  # noqa: F401 (registers its models)
    from odd_models import ODD, Named

    def make(build: Callable[[], tuple[Any, ...]]) -> Made:
        model, *args = build()
        kwargs = dict(args.pop()) if args and isinstance(args[-1], Named) else {}
        return model, tuple(args), kwargs

    for name, entry in ODD.items():
        yield Model(name, lambda build=entry.build: make(build), entry.around)  # type: ignore[misc]


def _cases() -> Iterator[Model]:
    from cases import CASES

    for name, case in CASES.items():
        yield Model(name, lambda case=case: (*case(), {}))  # type: ignore[misc]


def models(kind: str) -> list[Model]:
    """All models of a kind: `zoo`, `odd` or `cases`."""
    return list({"zoo": _zoo, "odd": _odd, "cases": _cases}[kind]())


def _entries(matrix: Any) -> list[tuple[int, int, float]]:
    """Rows, columns and numbers that are not 0."""
    found = matrix.tocoo()
    return sorted(zip(found.row.tolist(), found.col.tolist(), map(float, found.data), strict=True))


def answer(graph: Any) -> dict[str, Any]:
    """All that a trace says about a model."""
    return {
        "units": graph.num_units,
        "dimension": graph.dimension,
        "pins": [
            (pin.op, pin.module, pin.source, pin.reason, pin.elements, pin.parameters)
            for pin in graph.pinned
        ],
        "range": graph.range,
        "unused": graph.unused,
        "edges": {
            b.name: (b.shape, b.tail.tolist(), b.head.tolist(), b.aliases, b.shift)
            for b in graph.blocks
        },
        "parameters": [str(row) for row in account(graph).parameters],
        "approximate": graph.approximate.tolist(),
        "statistics": [(s.mean, s.var, s.units.tolist(), s.eps) for s in graph.statistics],
        "exact": _entries(graph.exact),
        "forms": _entries(graph.forms),
        "written": dict(graph.captured.written),
    }


@contextlib.contextmanager
def exported() -> Iterator[None]:
    """Every capture in here is an export."""
    with mock.patch.object(pathspace.capture.capture, "recorded", lambda *_: None):
        yield


@contextlib.contextmanager
def counted(reasons: list[str]) -> Iterator[None]:
    """Note for every capture in here why it was not recorded, or nothing."""
    record, recorded = pathspace.capture.capture.record_graph, pathspace.capture.capture.recorded
    last: list[str] = []

    def noted(*args: Any) -> Any:
        try:
            return record(*args)
        except BaseException as error:
            last.append(f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:80]}")
            raise

    def found(*args: Any) -> Any:
        last.clear()
        result = recorded(*args)
        reasons.append(
            ""
            if result is not None
            else (last or ["it writes into memory that is read by other names"])[0]
        )
        return result

    with (
        mock.patch.object(pathspace.capture.capture, "record_graph", noted),
        mock.patch.object(pathspace.capture.capture, "recorded", found),
    ):
        yield


def traced(model: Model) -> dict[str, Any] | str:
    """What a trace answers, or the sentence that it raises."""
    torch.manual_seed(0)
    random.seed(0)
    network, args, kwargs = model.make()
    try:
        return answer(ps.trace(network, *args, kwargs=kwargs))
    except ps.PathspaceError as error:
        return f"{type(error).__name__}: {error}"


def _differences(one: Any, other: Any) -> list[str]:
    if isinstance(one, str) or isinstance(other, str):
        return [f"{str(one)[:300]}\n    {str(other)[:300]}"]
    return [
        f"{key}: {str(one[key])[:200]} | {str(other[key])[:200]}"
        for key in one
        if one[key] != other[key]
    ]


def main(kind: str, *names: str) -> None:
    """Compare and print."""
    why: Counter[str] = Counter()
    seconds = [0.0, 0.0]
    for model in models(kind):
        if names and not any(name in model.name for name in names):
            continue
        reasons: list[str] = []
        with contextlib.suppress(ImportError, OSError), model.around():
            start = time.process_time()
            with counted(reasons):
                one = traced(model)
            middle = time.process_time()
            with exported():
                other = traced(model)
            seconds = [seconds[0] + middle - start, seconds[1] + time.process_time() - middle]
            if one != other:
                print(model.name, *_differences(one, other), sep="\n    ", flush=True)
        why.update(reasons)
        torch.set_default_dtype(torch.float32)
        torch.set_grad_enabled(True)
        torch.compiler.reset()
    print(
        f"recorded {why.pop('', 0)}, exported {why.total()}; {seconds[0]:.1f} s, by export alone"
        f" {seconds[1]:.1f} s"
    )
    for reason, count in why.most_common():
        print(f"{count:5} {reason}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*sys.argv[1:])
