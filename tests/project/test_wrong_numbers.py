"""Numbers out of range, NaN, and what is no number end in one sentence, and change nothing."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import pathspace as ps
from pathspace import diagnostics
from pathspace.errors import expect_numbers
from pathspace.training.experiments.tasks import load_task
from pathspace.training.experiments.trainer import Training

MODEL = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2))
X, Y = torch.randn(4, 2), torch.tensor([0, 1, 0, 1])
Call = Callable[[Any], Any]


def choose(objective: Callable[[Any], Any]) -> Call:
    return lambda v: ps.choose_gauge(MODEL, ps.trace(MODEL, X), objective(v))


def with_graph(call: Callable[[ps.ReductionGraph, Any], Any]) -> Call:
    return lambda v: call(ps.trace(MODEL, X), v)


def trained(name: str) -> Call:
    def call(value: Any) -> None:
        task = load_task("digits-rows", hidden=2)
        model = task.make_model(0)
        sgd = torch.optim.SGD(model.parameters(), 0.1)
        Training(task, model, sgd, **{"epochs": 1, name: value})

    return call


# what numbers of a kind are never
REAL = (-1, math.nan, math.inf, "3")
POSITIVE = (0, *REAL)
WHOLE = (*REAL, 2.5, 10**30)
COUNT = (0, *WHOLE)

CASES: dict[str, tuple[Call, tuple[Any, ...]]] = {
    "ActivationRange, headroom": (
        choose(lambda v: ps.ActivationRange(headroom=v)),
        (0.5, None, *POSITIVE),
    ),
    "Balance, p": (choose(lambda v: ps.Balance(p=v)), (None, *POSITIVE)),
    "Noise, bits": (choose(lambda v: ps.Noise(bits=v)), (17, None, *COUNT)),
    "Range, bits": (choose(lambda v: ps.Range(bits=v)), (17, None, *COUNT)),
    "Smooth, alpha": (choose(lambda v: ps.Smooth(alpha=v)), (1, None, *POSITIVE)),
    "balance, p": (with_graph(lambda g, v: ps.balance_(MODEL, g, p=v)), (None, *POSITIVE)),
    "balance, tolerance": (
        with_graph(lambda g, v: ps.balance_(MODEL, g, tolerance=v)),
        (None, *POSITIVE),
    ),
    "choose_gauge, limit": (
        with_graph(lambda g, v: ps.choose_gauge(MODEL, g, ps.Range(), limit=v)),
        (1, 0, -1, math.nan, "3", None),
    ),
    "choose_gauge, tolerance": (
        with_graph(lambda g, v: ps.choose_gauge(MODEL, g, ps.Range(), tolerance=v)),
        (-1, math.nan, "3", None),
    ),
    "choose_gauge, steps": (
        with_graph(lambda g, v: ps.choose_gauge(MODEL, g, ps.Range(), steps=v)),
        WHOLE,
    ),
    "compare, tolerance": (
        with_graph(lambda g, v: ps.compare(MODEL, MODEL, g, tolerance=v)),
        (None, *REAL),
    ),
    "equalise, bits": (with_graph(lambda g, v: ps.equalise(MODEL, g, bits=v)), (1, None, *COUNT)),
    "equalise, trials": (with_graph(lambda g, v: ps.equalise(MODEL, g, trials=v)), WHOLE),
    "fit_dtype, headroom": (lambda v: ps.fit_dtype(MODEL, X, headroom=v), (0.5, None, *POSITIVE)),
    "path_norm, p": (lambda v: ps.path_norm(MODEL, X, p=v), (None, *POSITIVE)),
    "path_statistics, p": (
        with_graph(lambda g, v: ps.path_statistics(g.skeleton(), p=v)),
        (None, *POSITIVE),
    ),
    "skeleton, seed": (with_graph(lambda g, v: g.skeleton("random", seed=v)), (None, *WHOLE)),
    "verify, seed": (lambda v: ps.verify(MODEL, X, seed=v), (None, *WHOLE)),
    "draw, path": (
        with_graph(lambda g, v: ps.draw(g.skeleton(), path=v)),
        (99, -99, math.nan, "3", 1.5),
    ),
    "rescale, phi": (with_graph(lambda g, v: ps.rescale_(MODEL, g, v)), (1, None, *REAL)),
    "Training, epochs": (trained("epochs"), (None, *COUNT)),
    "Training, batch_size": (trained("batch_size"), (None, *COUNT)),
    "Training, clip": (trained("clip"), POSITIVE),
    "Training, seed": (trained("seed"), (None, *WHOLE)),
    "Training, accumulate": (trained("accumulate"), (None, *COUNT)),
    "cost, repeats": (lambda v: diagnostics.cost(MODEL, X, repeats=v), (None, *WHOLE)),
    "degeneracy, tolerance": (
        lambda v: diagnostics.degeneracy(MODEL, X, tolerance=v),
        (None, *REAL),
    ),
    "degeneracy, max_rows": (
        lambda v: diagnostics.degeneracy(MODEL, X, max_rows=v),
        (None, *COUNT),
    ),
    "degeneracy, max_exact": (
        lambda v: diagnostics.degeneracy(MODEL, X, max_exact=v),
        (None, *WHOLE),
    ),
    "diagnose, batches": (
        lambda v: diagnostics.diagnose(MODEL, data=[(X, Y)], loss=nn.CrossEntropyLoss(), batches=v),
        (None, *COUNT),
    ),
    "signal, probes": (lambda v: diagnostics.signal(MODEL, X, probes=v), COUNT),
    "spectrum, probes": (
        lambda v: diagnostics.spectrum(diagnostics.jacobian(MODEL, X), probes=v),
        (1, None, *COUNT),
    ),
    "spectrum, steps": (
        lambda v: diagnostics.spectrum(diagnostics.jacobian(MODEL, X), steps=v),
        (None, *COUNT),
    ),
    "top_singular, count": (
        lambda v: diagnostics.top_singular(diagnostics.jacobian(MODEL, X), v),
        (None, *COUNT),
    ),
    "trace_k, probes": (
        lambda v: diagnostics.trace_k(diagnostics.jacobian(MODEL, X), v),
        (1, None, *COUNT),
    ),
    "watching, every": (lambda v: diagnostics.watching(MODEL, every=v), (None, *COUNT)),
    "watching, planned": (lambda v: diagnostics.watching(MODEL, planned=v), WHOLE),
}


@pytest.mark.parametrize("name", CASES)
def test_wrong_numbers_are_one_sentence(name: str) -> None:
    call, values = CASES[name]
    before = [p.clone() for p in MODEL.parameters()]
    for value in values:
        with pytest.raises(ps.PathspaceError) as caught:
            call(value)
        said = str(caught.value)
        assert said.endswith(".") and "\n" not in said and "not supported between" not in said, (
            value
        )
    assert all(torch.equal(a, b) for a, b in zip(before, MODEL.parameters(), strict=True))


def test_wrong_numbers_for_files_leave_none(tmp_path: Path) -> None:
    save_file(MODEL.state_dict(), tmp_path / "old.safetensors")
    for name in ("p", "tolerance"):
        for value in POSITIVE:
            with pytest.raises(ps.PathspaceError, match=f"balance_files found {name}="):
                ps.balance_files(
                    ps.trace(MODEL, X),
                    tmp_path / "old.safetensors",
                    tmp_path / "new.safetensors",
                    **{name: value},
                )
    assert [path.name for path in tmp_path.iterdir()] == ["old.safetensors"]


def test_numbers_of_numpy_are_numbers() -> None:
    import numpy as np

    expect_numbers("anything", "a number", a=np.float32(1), b=np.int64(2))
    expect_numbers("anything", "a whole number from 1 to 1,000,000", a=np.int64(2))
    with pytest.raises(
        ps.PathspaceError, match=r"anything found a=np.float32\(nan\), expected a number or None\."
    ):
        expect_numbers("anything", "a number", or_none=True, a=np.float32("nan"))
