"""Random architectures against brute force: `PYTHONPATH=tests python
tests/brute_force.py --count 10000`.

Every architecture is drawn from a seed, traced by the library, and enumerated path by path by an
oracle that shares no code with it. Five statements are compared: every weight on a path is an edge
and every edge lies on a path; every path is a circulation of the reduction graph; the exact rank of
all paths is the dimension; the basis has that rank; and every path equals the integer combination
of basis paths that the library gives for it. Draws that repeat an architecture, or have too many
paths to enumerate, are replaced.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from oracles.alignment import aligned, incidence
from oracles.exact import exact_rank
from oracles.networks import Case, RandomConv, RandomDag, random_rnn
from oracles.pathsets import enumerate_paths

import pathspace as ps
from pathspace.inference.unrolled import unroll

MOST_PATHS = 3_000
FAMILIES = ("dag", "tied", "conv", "rnn")
RULES = ("modulo", "magnitude", "random")


def draw(family: str, seed: int) -> tuple[Any, ...]:
    """The specification of a random architecture: plain integers."""
    generator = np.random.default_rng([FAMILIES.index(family), seed])

    def pick(*values: Any) -> Any:
        return values[int(generator.integers(len(values)))]

    def upto(low: int, high: int) -> int:
        return int(generator.integers(low, high + 1))

    if family == "dag":
        nodes = [
            (pick(0, 0, 0, 1, 2), upto(0, 6), upto(1, 4), upto(0, 1)) for _ in range(upto(1, 6))
        ]
        return upto(1, 3), upto(1, 2), tuple(nodes)
    if family == "tied":
        nodes = [
            (pick(0, 0, 1, 2, 3, 4, 4), upto(0, 6), upto(1, 3), upto(0, 1))
            for _ in range(upto(2, 5))
        ]
        return upto(1, 2), upto(1, 2), tuple(nodes)
    if family == "conv":
        layers = [(upto(0, 4), upto(1, 3), pick(1, 1, 3), upto(0, 1)) for _ in range(upto(1, 4))]
        return upto(1, 2), upto(1, 2), tuple(layers), bool(upto(0, 1))
    hidden = tuple(upto(1, 3) for _ in range(upto(1, 3)))
    return (
        upto(1, 3),
        hidden,
        upto(1, 2),
        upto(2, 4),
        bool(upto(0, 1)),
        bool(upto(0, 1)),
        pick("op", "zeros", "none"),
    )


def build(family: str, spec: tuple[Any, ...], seed: int) -> Case:
    """The network of a specification, and example inputs."""
    if family == "rnn":
        return random_rnn(*spec, seed)
    model = (RandomConv if family == "conv" else RandomDag)(*spec, seed)
    return model, model.example()


def disagreement(family: str, spec: tuple[Any, ...], seed: int) -> str | None:
    """What differs between the library and brute force on one architecture; `None` if nothing does.

    Raises:
        OverflowError: too many paths to enumerate.
    """
    model, args = build(family, spec, seed)
    graph = ps.trace(model, *args)
    if len(list(islice(unroll(graph).walks(), MOST_PATHS + 1))) > MOST_PATHS:
        raise OverflowError
    enumeration = enumerate_paths(model, *args)
    if len(enumeration.matrix) > MOST_PATHS:
        raise OverflowError
    try:
        paths = aligned(graph, enumeration)
    except ValueError as error:
        return str(error)
    if not paths.any(0).all():
        return "an edge lies on no path"
    if (paths @ incidence(graph)).any():
        return "a path is not a circulation"
    rank = exact_rank(paths)
    if rank != graph.dimension:
        return f"the paths have rank {rank}, the dimension is {graph.dimension}"
    basis = graph.skeleton(RULES[seed % 3], seed).basis()
    matrix = basis.counting_matrix().toarray().astype(np.int64)
    if len(basis) != rank or exact_rank(matrix) != rank:
        return f"{len(basis)} basis paths of rank {exact_rank(matrix)}, the paths have rank {rank}"
    if (basis.coefficients(paths) @ matrix != paths).any():
        return "a path is not the combination of basis paths it should be"
    return None


def run(count: int, first: int = 0, seconds: float = float("inf")) -> dict[str, Any]:
    """Compare `count` distinct random architectures, the families in turn."""
    start = time.perf_counter()
    seen: set[tuple[Any, ...]] = set()
    compared: Counter[str] = Counter()
    wrong: list[dict[str, Any]] = []
    large = repeated = 0
    seed = first
    while sum(compared.values()) < count and time.perf_counter() - start < seconds:
        family = FAMILIES[seed % 4]
        spec = draw(family, seed)
        if (family, *spec) in seen:
            repeated += 1
        else:
            seen.add((family, *spec))
            try:
                problem = disagreement(family, spec, seed)
                compared[family] += 1
                if problem:
                    wrong.append(
                        {"family": family, "seed": seed, "problem": problem, "spec": repr(spec)}
                    )
                    print(wrong[-1], flush=True)
            except OverflowError:
                large += 1
        seed += 1
        if seed % 500 == 0:
            print(
                f"{sum(compared.values()):,} compared, {len(wrong)} disagree",
                file=sys.stderr,
                flush=True,
            )
    return {
        "compared": sum(compared.values()),
        "families": dict(compared),
        "disagreements": wrong,
        "too_many_paths": large,
        "repeated": repeated,
        "first_seed": first,
        "next_seed": seed,
        "seconds": round(time.perf_counter() - start),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    result = run(options.count, options.first, options.seconds)
    text = json.dumps(result, indent=2)
    print(text)
    if options.json is not None:
        options.json.write_text(text + "\n")
    sys.exit(bool(result["disagreements"]))
