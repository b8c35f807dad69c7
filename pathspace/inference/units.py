"""Solve the equations, remove scales that change no weight, and number the units."""

from __future__ import annotations

import numpy as np
import torch
from scipy.sparse import csr_array, eye_array
from torch import Tensor

from ..capture.captured import Captured
from ..graph.growing import SpanningTreeBuilder
from ..graph.parts import Pin, Statistic, WeightBlock, signed_rows, sums_of
from ..graph.structure import Structure
from .assemble import Ends, assemble, combine, extended, shrink, whole_region
from .elimination import scattered
from .gathered import fold
from .registry import facts_of
from .relations import Relations, Solution
from .scales import Scales
from .sides import varying
from .union_find import lookup
from .values import NEUTRAL, distinct, has_zeros

Pair = tuple[Tensor, Tensor]
POWERS_ONLY = "weights meet different powers of this scale, and never the scale itself"
TOO_HIGH = "this scale is a power above 2^31 of another"


def build_graph(
    captured: Captured,
    scales: Scales,
    norm_eps: str = "ignore",
    traced: int | None = None,
    raw: dict[str, Ends] | None = None,
) -> Structure:
    """Build the reduction graph from the records of an interpretation.

    Of the uses of weights, the first ``traced`` belong to ``captured``; those at other sizes
    restrict the scales and are not edges. ``raw`` is :func:`ends_of`, if it is known already.
    """
    raw = ends_of(scales, traced) if raw is None else raw
    solution = effective(scales.equations, [ends.here() for ends in raw.values()])
    if scales.equations.too_high:
        scales.pins.append(Pin("power", "", "", TOO_HIGH, scales.equations.too_high))
    solution = _named(solution, raw, scales)
    while True:
        graph = _graph(captured, scales, raw, solution, norm_eps)
        stuck = _stuck(graph)
        if not len(stuck):
            return graph
        scales.pins.append(Pin("power", "", "", POWERS_ONLY, len(stuck)))
        solution = solution.fixed(stuck)


def ends_of(scales: Scales, traced: int | None = None) -> dict[str, Ends]:
    """Ends of every used parameter; adds the equations of its several uses."""
    raw = assemble(scales, traced)
    for name in list(raw):
        if scales.virtual.get(name, name) in scales.pinned_parameters:
            # a weight in one use and pinned in another: its factor must be 1
            ends = raw.pop(name)
            scales.equations.unify(ends.tail, ends.head)
    for table, uses in fold(
        scales, {name: (ends.tail, ends.head) for name, ends in raw.items()}
    ).items():
        raw[table] = _with_gathers(table, uses, raw, scales)
    return {name: ends for name, ends in raw.items() if name not in scales.virtual}


def unused_in_part(captured: Captured, scales: Scales, raw: dict[str, Ends]) -> bool:
    """Whether operations read a parameter of path space of which a scalar is unused, before
    equations are solved.

    What no operation reads has no use at other sizes with the same operations, either.
    """
    for name in captured.read_parameters():
        if name in raw:
            if has_zeros(raw[name].here()[0]):
                return True
        elif name not in scales.pinned_parameters:
            return True
    return False


def tells_positions_apart(graph: Structure) -> bool:
    """Whether entries that operations select from a parameter, as many as an input has positions,
    have scales of their own: at other sizes they may meet other entries.
    """
    captured = graph.captured
    shapes = [shown.shape for shown in captured.examples().values() if isinstance(shown, Tensor)]
    sizes = {size for shape in shapes for size in shape}
    selected = {
        name
        for name, users in captured.read_parameters().items()
        if any(facts_of(user.target).kind in ("pick", "part", "split") for user in users)
    }
    return any(
        block.shape[dim] in sizes
        for block in graph.blocks
        if block.name in selected
        for dim in varying(block.tail) | varying(block.head)
    )


def _with_gathers(table: str, uses: list[Pair], raw: dict[str, Ends], scales: Scales) -> Ends:
    """Ends of a table whose rows are selected by data, and which may have other uses."""
    own, shape = raw.get(table), scales.shapes[table]
    every = uses if own is None else [*uses, (own.tail, own.head)]
    whole = whole_region(shape)
    tail, head = combine([(whole, *ends) for ends in every], shape, scales.equations)
    if any(
        raw[name].beyond is None
        for name, own_table in scales.virtual.items()
        if own_table == table and name in raw
    ):
        return Ends(tail, head)
    new = tail != NEUTRAL if own is None else (tail != NEUTRAL) & (own.here()[0] == NEUTRAL)
    return Ends(tail, head, new if bool(new.any()) else None)


def _graph(
    captured: Captured, scales: Scales, raw: dict[str, Ends], solution: Solution, norm_eps: str
) -> Structure:
    classes = torch.from_numpy(solution.classes)
    aliases: dict[str, list[str]] = {}
    for name, first in captured.canonical.items():
        if name != first:
            aliases.setdefault(first, []).append(name)
    blocks, beyond = [], {}
    own = {name: raw[name].here() for name in captured.parameters if name in raw}
    for name, (tail, head) in own.items():
        unused = tail == NEUTRAL if has_zeros(tail) else None
        if unused is not None:
            # (of all scalars, with those that only larger inputs use)
            both = raw[name].tail, raw[name].head
            seen = (torch.where(ids == NEUTRAL, NEUTRAL, lookup(classes, ids)) for ids in both)
            start, end = map(extended, seen)
            beyond[name] = start, end
        blocks.append(
            WeightBlock(
                name=name,
                shape=scales.shapes[name],
                tail=shrink(lookup(classes, tail)),
                head=shrink(lookup(classes, head)),
                unused=unused,
                aliases=tuple(aliases.get(name, ())),
                shift=scales.shifts.get(name, 0.0),
            )
        )
    inexact = _met(solution, [lookup(classes, ids) for ids in scales.approximate])
    used = tuple(block for block in blocks if block.num_edges)
    known = {block.name for block in used} | set(scales.pinned_parameters)
    return Structure(
        blocks=used,
        num_units=solution.units,
        pinned=tuple(scales.pins),
        unused=tuple(name for name in captured.parameters if name not in known),
        has_cuts=bool(scales.cuts) or scales.observes,
        approximate=np.flatnonzero(solution.units_in(np.flatnonzero(inexact))[1:]) + 1,
        exact=exact_subgroup(solution, inexact),
        folded_eps=tuple(sorted(set(scales.folded_eps))),
        statistics=tuple(
            Statistic(mean, var, lookup(classes, ids), eps)
            for mean, var, ids, eps in scales.running()
        ),
        forms=solution.forms,
        norm_eps=norm_eps,
        affine=scales.affine,
        beyond=beyond,
        captured=captured,
        parameters=captured.parameters,
    )


def _named(solution: Solution, raw: dict[str, Ends], scales: Scales) -> Solution:
    """The solution without derived classes that no weight, statistic or normalisation has; units
    that occur only as multiples, such as squares of a root, are divided by what is common.
    """
    count = solution.units
    if not solution.forms.shape[0]:
        return solution
    classes = torch.from_numpy(solution.classes)
    spoken = [ids for ends in raw.values() for ids in (ends.tail, ends.head)]
    spoken += [*(entry[2] for entry in scales.running()), *scales.cuts]
    own = _met(solution, [lookup(classes, ids) for ids in spoken])
    met = own | _met(solution, [lookup(classes, ids) for ids in scales.approximate])
    forms = csr_array(solution.forms.multiply(met[count + 1 :, None]))
    columns = csr_array(forms.T)
    columns.eliminate_zeros()
    common = np.ones(count, np.int64)
    filled = np.flatnonzero(np.diff(columns.indptr))
    common[filled] = np.gcd.reduceat(columns.data, columns.indptr[filled])
    common[own[1 : count + 1]] = 1
    forms.data = forms.data // common[forms.indices]
    return Solution.of(solution.classes, sums_of(forms))


def _stuck(graph: Structure) -> np.ndarray:
    """Units that a spanning tree cannot reach: every edge has a power of their scale."""
    once = np.zeros(graph.num_units + 1, bool)
    expand = graph.expand
    met = np.zeros(expand.shape[0], bool)
    for block in graph.blocks:
        for ids in (block.tail, block.head):
            met[np.abs(ids.numpy())] = True
    rows = expand[np.flatnonzero(met)]
    once[rows.indices[np.abs(rows.data) == 1]] = True
    rare = np.flatnonzero(~once[1:]) + 1
    if not len(rare):
        return rare
    return np.intersect1d(
        rare, SpanningTreeBuilder(graph, entering=True, rule="modulo", seed=0, blind=True).reach()
    )


def effective(equations: Relations, raw: list[Pair]) -> Solution:
    """Solve, and fix scales that change no weight, so that the remaining units act independently.

    Gauges that change no weight satisfy ``phi(head) = phi(tail)`` on every edge: they solve
    another system of the same kind.
    """
    solution = equations.resolve()
    while len(trivial := _trivial(solution, raw)):
        solution = solution.fixed(trivial)
    return solution


def _trivial(solution: Solution, raw: list[Pair]) -> np.ndarray:
    """Base units to fix, one for each direction that changes no weight."""
    classes = torch.from_numpy(solution.classes)
    system = _defined(solution, [lookup(classes, ids) for pair in raw for ids in pair])
    for tail, head in raw:
        near, far = lookup(classes, tail), lookup(classes, head)
        if has_zeros(tail):
            # (scalars that are not used impose nothing)
            near = torch.where(tail == NEUTRAL, NEUTRAL, near)
        system.unify(near, far)
    kernel = system.resolve()
    if system.incomplete:
        # (directions may be missing, so that all scales in sums are fixed)
        return np.unique(solution.forms.indices).astype(np.int64) + 1
    if kernel.units == 0:
        return np.zeros(0, np.int64)
    # for each trivial direction one variable that moves only with it
    own, first = np.unique(np.abs(kernel.classes[: solution.units + 1]), return_index=True)
    chosen = first[(own > 0) & (own <= kernel.units)]
    # if there are no such variables, fix one unit and repeat
    return chosen if len(chosen) else first[own > 0][:1]


def _met(solution: Solution, classes: list[Tensor]) -> np.ndarray:
    met = np.zeros(1 + solution.units + solution.forms.shape[0], bool)
    for ids in classes:
        met[distinct(ids).abs().numpy().reshape(-1)] = True
    return met


def exact_subgroup(solution: Solution, met: np.ndarray) -> csr_array:
    """Gauge transformations that keep the classes ``met``: an integer basis, ``(H, free)``."""
    count = solution.units
    if not met[count + 1 :].any():
        return csr_array(eye_array(count, dtype=np.int64, format="csr")[:, ~met[1 : count + 1]])
    fixed = torch.from_numpy(np.flatnonzero(met))
    system = _defined(solution, [fixed])
    system.unify(fixed, torch.zeros_like(fixed))
    kernel = system.resolve()
    return csr_array(signed_rows(kernel.sums, kernel.classes[1 : count + 1])[:, 1:])


def _defined(solution: Solution, ends: list[Tensor]) -> Relations:
    """Relations of the classes: derived ones that occur are sums of units; the others are 0."""
    system, first = Relations(), solution.units + 1
    met = _met(solution, ends)[first:]
    system.size = first + len(met)
    absent = torch.from_numpy(first + np.flatnonzero(~met))
    system.unify(absent, torch.zeros_like(absent))
    own = first + np.flatnonzero(met)
    sums = csr_array(solution.sums[own])
    sums.resize(len(own), system.size)
    system.add(csr_array(sums - scattered(own, system.size).T))
    return system
