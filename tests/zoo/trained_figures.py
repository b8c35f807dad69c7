"""Everything the library does, done to every trained network: `python -m zoo.trained_figures
[NAME ...]` from `tests/`.

Rows are kept in `docs/data/trained.json` as they come; names that are given are measured again,
without names what is missing. Then the page is written.
"""

from __future__ import annotations

import json
import math
import re
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from benchmarks.measure import alone, peak
from real_models import MODELS
from torch import Tensor, nn
from torch.nn import functional as F

import pathspace as ps
from pathspace.diagnostics import MarkovChain, report
from pathspace.errors import first_line
from pathspace.evidence.explain import account
from pathspace.files.writing import write_text
from pathspace.training import GSGD
from zoo.language_figures import PARTS as WITH_TEXT
from zoo.subject import Subject, change, flat
from zoo.trained import TRAINED
from zoo.trained_page import DATA, PAGE, render

RATES = (10.0, 1.0, 1e-1, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6, 1e-7, 1e-8)
FEW = (1.0, 1e-3, 1e-6, 1e-9, 1e-12)
STEPS = 5
Facts = dict[str, Any]


@torch.no_grad()
def rescaling(name: str, dtype: torch.dtype, exact: bool = True, seeds: int = 3) -> float:
    """Change of the outputs by random rescalings, in the network as it stands."""
    subject = Subject(name, dtype)
    before = subject.outputs(subject.model)
    copies = (subject.moved(seed, exact=exact) for seed in range(seeds))
    return max(change(before, subject.outputs(one)) for one in copies)


def the_graph(name: str) -> Facts:
    """What is in path space, what is not, and why."""
    graph = Subject(name).graph
    totals = account(graph).totals
    return {
        **{key: getattr(graph, f"num_{key}") for key in ("weights", "units", "exact_units")},
        "dimension": graph.dimension,
        "other": {key: count for key, count in totals.items() if key != "path_space" and count},
        "pins": dict(Counter(f"{pin.op}: {pin.reason}" for pin in graph.pinned)),
    }


def the_certificate(name: str) -> Facts:
    """What `verify` says, with the bound from above."""
    subject = Subject(name)
    found = ps.verify(subject.model, *subject.args, kwargs=subject.kwargs, upper_bound=True)
    parts = (found.theorem1, found.theorem2, found.theorem3, found.invariance)
    return {
        "holds": found.holds,
        "theorems": [part["holds"] for part in parts],
        **{key: getattr(found, key) for key in ("units_exact", "units_at_most", "method")},
        "evidence": found.upper_bound["evidence"],
    }


def the_proof(name: str) -> Facts:
    """What the independent checker says about the proof."""
    subject = Subject(name)
    skeleton = subject.graph.skeleton()
    given = {"model": subject.model, "args": subject.args, "kwargs": subject.kwargs}
    verdict = ps.check(ps.proof(skeleton), **given)
    return {key: getattr(verdict, key) for key in ("accepted", "reason", "compared")}


def the_report(name: str) -> Facts:
    """The page about it, and the parts that do not apply."""
    subject = Subject(name)
    found = report(subject.model, *subject.args, kwargs=subject.kwargs)
    return {
        "kilobytes": len(found.html) // 1024,
        "absent": {k: v["absent"] for k, v in found.facts.items() if v.get("absent")},
    }


def the_rescaling(name: str) -> Facts:
    """Change of the outputs by rescaling, in both precisions, and with all units."""
    return {
        "float32": rescaling(name, torch.float32),
        "float64": rescaling(name, torch.float64),
        "all_units": rescaling(name, torch.float64, exact=False),
    }


@torch.no_grad()
def the_balance(name: str) -> Facts:
    """Sum of squares in path space before and after, and what changed."""
    subject = Subject(name, torch.float64)
    found = ps.balancing(subject.model, subject.graph)
    model = ps.balance_(subject.copy(), subject.graph)
    return {
        "before": squares(subject.model, subject.graph),
        "after": squares(model, subject.graph),
        "left_alone": {why: len(units) for why, units in found.left_alone.items()},
        "change": change(subject.outputs(subject.model), subject.outputs(model)),
    }


def squares(model: nn.Module, graph: ps.ReductionGraph) -> float:
    """Sum of squares of all weights in path space."""
    own = dict(model.named_parameters(remove_duplicate=False))
    total = 0.0
    for block in graph.blocks:
        square = own[block.name].detach().double().square()
        keep = 1 if block.unused is None else (~block.unused.expand(block.shape)).double()
        total += float((square * keep).sum())
    return total


def the_path_norm(name: str) -> Facts:
    """Logarithm of the L1 and L2 path norm, and how rescaling changes it."""
    subject = Subject(name, torch.float64)

    def norm(model: nn.Module, p: float) -> float:
        return ps.path_norm(
            model, *subject.args, kwargs=subject.kwargs, p=p, log=True, until="fixed"
        )

    found = [norm(subject.copy(), p) for p in (1, 2)]
    return {
        "log_l1": found[0],
        "log_l2": found[1],
        "change": abs(norm(subject.moved(0), 2) - found[1]),
    }


def the_chain(name: str) -> Facts:
    """What the network is as a Markov chain, and how efficient its nodes are."""
    subject = Subject(name)
    chain = MarkovChain.trace(subject.model, *subject.args, kwargs=subject.kwargs)
    facts: Facts = {"sentence": chain.sentence(), "nodes": len(chain)}
    if len(chain):
        target = wanted(subject)
        inputs = subject.args if subject.args else subject.kwargs
        record = chain.observe(
            lambda outputs, target: F.mse_loss(flat(outputs), target), inputs, target
        )
        facts["cosines"] = record.cosines.mean(1).tolist()
    return facts


def wanted(subject: Subject) -> Tensor:
    """What to train for: the outputs of a copy whose weights are a hundredth away."""
    model, generator = subject.copy(), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(
                1 + 0.01 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
            )
        return subject.outputs(model)


Make = Callable[[nn.Module, float], torch.optim.Optimizer]


def trained_by(
    subject: Subject, model: nn.Module, target: Tensor, optimizer: torch.optim.Optimizer
) -> list[float]:
    """The losses before and after a few steps."""
    losses = []
    for _ in range(STEPS + 1):
        optimizer.zero_grad()
        loss = F.mse_loss(subject.outputs(model), target)
        losses.append(loss.item())
        if len(losses) <= STEPS:
            loss.backward()
            optimizer.step()
    return [losses[0], losses[-1]]


def at_best_rate(subject: Subject, target: Tensor, make: Make) -> Facts:
    """The rate, among powers of ten, with the smallest loss at the end, and its losses."""
    tried = {}
    for rate in RATES if TRAINED[subject.name].fast else FEW:
        model = subject.copy()
        tried[rate] = trained_by(subject, model, target, make(model, rate))
    ends = {rate: end if math.isfinite(end) else math.inf for rate, (_, end) in tried.items()}
    rate = min(ends, key=lambda rate: ends[rate])
    return {"rate": rate, "losses": tried[rate]}


def the_sgd(name: str) -> Facts:
    """A few steps of plain SGD."""
    subject = Subject(name, torch.float64)
    return at_best_rate(
        subject, wanted(subject), lambda model, rate: torch.optim.SGD(model.parameters(), rate)
    )


def the_gsgd(name: str) -> Facts:
    """A few steps of G-SGD, and the same from a rescaled copy."""
    subject = Subject(name, torch.float64)
    target, skeleton = wanted(subject), subject.graph.skeleton(rule="magnitude")

    def make(model: nn.Module, rate: float) -> torch.optim.Optimizer:
        return GSGD(model.named_parameters(), lr=rate, skeleton=skeleton)

    found, model = at_best_rate(subject, target, make), subject.moved(0)
    _, end = trained_by(subject, model, target, make(model, found["rate"]))
    return found | {"parting": abs(end / found["losses"][1] - 1)}


def the_canonical(name: str) -> Facts:
    """Change of the outputs by the canonical form."""
    subject = Subject(name, torch.float64)
    with torch.no_grad():
        model = ps.canonicalise_(subject.copy(), subject.graph.skeleton())
        return {"change": change(subject.outputs(subject.model), subject.outputs(model))}


ORDER = [the_graph, the_certificate, the_proof, the_report, the_rescaling, the_balance]
ORDER += [the_canonical, the_path_norm, the_chain, the_sgd, the_gsgd]
PARTS = {function.__name__.removeprefix("the_"): function for function in ORDER}


def parts_of(name: str) -> dict[str, Callable[[str], Facts]]:
    """What is done to a network."""
    return PARTS | (WITH_TEXT if name in MODELS else {})


def measured(name: str, part: str) -> Facts:
    """One part; a refusal becomes its sentence, and any other exception is marked as a fault."""
    warnings.simplefilter("ignore")
    start = time.process_time()
    try:
        found = parts_of(name)[part](name)
    except ps.PathspaceError as error:
        # where a package lies on this machine is nobody's business
        found = {"refused": re.sub(r"/[\w./-]*/(?:site-packages|tests)/", "", str(error))}
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{last.filename.split('/')[-1]}:{last.lineno}"
        found = {"fault": f"{type(error).__name__}: {first_line(error)} ({where})"}
    return {**found, "seconds": time.process_time() - start, "gigabytes": peak() / 2**30}


def main(names: list[str]) -> None:
    """Measure the networks that are named, or else what is missing, and write the page."""
    for name in names or TRAINED:
        for part in parts_of(name):
            rows: dict[str, Facts] = json.loads(DATA.read_text())
            if names or part not in rows.get(name, {}):
                rows.setdefault(name, {})[part] = alone(measured, name, part)
                print(f"{name} {part}: {json.dumps(rows[name][part])[:600]}", flush=True)
                kept = {name: rows[name] for name in TRAINED if name in rows}
                write_text(json.dumps(kept, indent=1), str(DATA))
    rows = json.loads(DATA.read_text())
    whole = {name: row for name, row in rows.items() if set(row) >= set(parts_of(name))}
    write_text(render(whole).rstrip(), str(PAGE))


if __name__ == "__main__":
    main(sys.argv[1:])
