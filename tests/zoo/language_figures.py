"""What the library does to real language models, with text: parts of `zoo.trained_figures`."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from real_models import MODELS, with_adapters
from torch import nn

import pathspace as ps
from pathspace.training import GaugeFixed
from zoo.subject import Subject, change

Facts = dict[str, Any]
BATCHES, STEPS, RATE = 6, 18, 1e-3
# of the factors of the adapters in the second run
SMALLER = 1 / 30


@torch.no_grad()
def the_smoothing(subject: Subject) -> Facts:
    """Pairs of modules between which outliers can be moved, by the names of their modules."""
    pairs = ps.smoothing_pairs(subject.graph)
    units = torch.cat([pair.units for pair in pairs if pair.exact]) - 1
    phi = torch.zeros(subject.graph.num_units, dtype=torch.float64)
    phi[units] = subject.graph.random_powers(seed=1, largest=2)[units]
    moved = ps.rescale(subject.model, subject.graph, phi)

    def kind(names: tuple[str, ...]) -> str:
        return ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in names))

    return {
        "pairs": len(pairs),
        "exact": sum(pair.exact for pair in pairs),
        "change": change(subject.outputs(subject.model), subject.outputs(moved)),
        "kinds": Counter(f"{kind(pair.writers)} to {kind(pair.readers)}" for pair in pairs),
        "left_out": Counter(re.sub(r"\.\d+\.", ".*.", p.left_out) for p in pairs if p.left_out),
    }


@torch.no_grad()
def the_pruning(subject: Subject, keep: float = 0.75) -> Facts:
    """A quarter of the channels left out."""
    groups, reads = ps.channels(subject.model, kwargs=subject.kwargs), MODELS[subject.name]
    small = groups.remove(keep=keep)

    def queries(model: nn.Module) -> int:
        first = reads.adapted[0] + ".weight"
        return next(len(p) for name, p in model.named_parameters() if name.endswith(first))

    return {
        "hidden": [m.config.intermediate_size for m in (subject.model, small)],
        "queries": [queries(m) for m in (subject.model, small)],
        "parameters": [sum(p.numel() for p in m.parameters()) for m in (subject.model, small)],
        "change": change(subject.outputs(groups.masked(keep=keep)), subject.outputs(small)),
        "refused": list(groups.refused.values()),
        "quality": [reads.quality(m) for m in (subject.model, small)],
        "by_paths": reads.quality(groups.remove(keep=keep, by="paths")),
    }


@torch.no_grad()
def the_float16(subject: Subject) -> Facts:
    """The model as trained and two copies with large scales, fitted and rounded."""
    reads, found = MODELS[subject.name].quality, {}
    for spread in (0.0, 2.0, 3.0):
        model = subject.moved(0, spread=spread)
        fitted = ps.fit_dtype(model, subject.kwargs)
        fixed = [row for row in fitted.table if row.kind == "fixed scales"]
        extreme = max(fixed, key=lambda row: row.largest_after)
        found[str(spread)] = {
            "change": change(subject.outputs(model), subject.outputs(fitted.model)),
            "fits": [fitted.fitted_before, fitted.fits],
            "error": finite(fitted.error_before, fitted.error),
            "fixed": [extreme.name, extreme.largest_after],
            "quality": finite(*(reads(m.to(torch.float16)) for m in (model, fitted.model))),
        }
    return {"float32": reads(subject.model), **found}


def finite(*numbers: float) -> list[float | None]:
    """What a file can hold: no number where one is lost."""
    return [number if math.isfinite(number) else None for number in numbers]


def adapter_runs(
    name: str, model: nn.Module, batches: int = BATCHES, steps: int = STEPS
) -> Iterator[tuple[str, float, list[float]]]:
    """Adapters in a model, trained by AdamW with and without the canonical gauge, from two equal
    starts: the kind, the factor of the first matrix, and the losses before and after.
    """
    reads = MODELS[name]
    with_adapters(model, reads.adapted)
    graph = ps.trace(model, kwargs=reads.inputs(2))
    trained = {key: p for key, p in model.named_parameters() if p.requires_grad}
    begun = {key: p.detach().clone() for key, p in trained.items()}

    @torch.no_grad()
    def loss() -> float:
        return sum(float(reads.loss(model, step)) for step in range(batches)) / batches

    for factor in (1.0, SMALLER):
        for kind in ("AdamW", "GaugeFixed(AdamW)"):
            with torch.no_grad():
                for key, p in trained.items():
                    p.copy_(begun[key] * (factor if key.endswith(".a") else 1))
            optimizer: torch.optim.Optimizer = torch.optim.AdamW(trained.values(), lr=RATE)
            if kind != "AdamW":
                optimizer = GaugeFixed(optimizer, graph)
            losses = [loss()]
            for step in range(steps):
                optimizer.zero_grad()
                reads.loss(model, step % batches).backward()
                optimizer.step()
            yield kind, factor, [*losses, loss()]


def the_adapters(name: str) -> Facts:
    """Low-rank adapters trained on plain text."""
    model, runs = MODELS[name].model(), []
    for kind, factor, losses in adapter_runs(name, model):
        quality = MODELS[name].quality(model)
        runs.append({"optimizer": kind, "factor": factor, "losses": losses, "quality": quality})
    weights = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return {"weights": weights, "runs": runs}


PARTS = {
    "smoothing": lambda name: the_smoothing(Subject(name)),
    "pruning": lambda name: the_pruning(Subject(name)),
    "float16": lambda name: the_float16(Subject(name)),
    "adapters": the_adapters,
}
