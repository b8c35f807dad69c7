"""Construction of a spanning tree of the reduction graph, breadth first,
without a list of all edges.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import cache, cached_property
from typing import Any

import numpy as np
import torch
from torch import nn

from ..errors import InputError, UnsupportedError
from ..models.values import has_values
from .edge_rows import EdgeRows
from .spanning_tree import SpanningTree, changes, other_factors, single
from .structure import Structure

CHUNK = 1 << 22
STAR = 200_000
# sizes this close count as equal, so that rounding does not change the trees of rescaled copies
TIES = 1e-5
SMALLEST = np.finfo(np.float64).tiny
# rule "magnitude": an edge must have at least this size relative to the largest, as
# long as there are such edges
LARGE = 0.1


class SpanningTreeBuilder:
    """Builds one spanning tree breadth first, by one rule; ``blind`` reads no weights, and units
    that are known to be ``dead`` need no edge.

    Edges of weight 0 come last; units with no other connection are dead. Frozen weights come first,
    because they fix a scale already. With the rule ``"magnitude"`` a unit waits for an edge that is
    not small beside its largest one, in the gauge ``phi``; where this stops the growth, the limit
    is lowered.
    """

    def __init__(
        self,
        graph: Structure,
        entering: bool,
        rule: str,
        seed: int,
        blind: bool = False,
        phi: np.ndarray | None = None,
        dead: np.ndarray | None = None,
    ) -> None:
        self.graph, self.rule, self.entering, self.blind = graph, rule, entering, blind
        self.phi = np.zeros(graph.num_units) if phi is None else phi
        self.random = np.random.default_rng([seed, int(entering)])
        self.tree = SpanningTree(graph.num_units + 1)
        if dead is not None:
            self.tree.dead[:] = dead
        self._reached = self.tree.dead.copy()
        self._look(np.array([0]))
        # the rows of a block, with the units that need an edge at the near side
        self.rows = cache(lambda i, forward: EdgeRows(graph.blocks[i], entering == forward))
        self._floor, self._next_floor = (LARGE if rule == "magnitude" and not blind else 0.0), 0.0

    def grow(self) -> SpanningTree:
        """Build the whole tree, which reaches every unit."""
        left = self.reach()
        if len(left):
            raise UnsupportedError(
                f"skeleton found no tree for {len(left)} units (the first is"
                f" {self.graph.activation(int(left[0]))!r}): their scales multiply, as where a tied"
                " layer follows another one, so that no weight connects one of them alone; use"
                " rescale, balance or GaugeFixed, which need no skeleton."
            )
        return self.tree

    def reach(self) -> np.ndarray:
        """Grow as far as possible, forward edges first; the units not reached."""
        blocks = list(range(len(self.graph.blocks)))
        matrices = [i for i in blocks if len(self.graph.blocks[i].shape) > 1]
        stages = []
        for forward in (True, False):
            for chosen in (matrices, blocks):
                frozen = list(filter(self._frozen, chosen))
                if len(frozen) < len(chosen):
                    stages.append((frozen, forward, False))
                stages.append((chosen, forward, True))
        zeros = self.blind
        while not self._reached.all():
            self._next_floor = 0.0
            if any(self._round(*stage, zeros) for stage in stages):
                if self._floor:
                    self._floor = LARGE
                continue
            if self._next_floor:
                self._floor = LARGE * self._next_floor
                continue
            if self._joint_round(zeros):
                continue
            if zeros:
                break
            self.tree.dead[:] = ~self._reached
            zeros = True
        return np.flatnonzero(~self._reached)

    def _parameter(self, block: int) -> nn.Parameter:
        return self.graph.parameters[self.graph.blocks[block].name]

    def _frozen(self, block: int) -> bool:
        return not self.blind and not self._parameter(block).requires_grad

    @cached_property
    def logs(self) -> np.ndarray:
        """Log-scales of all ids in the gauge in which sizes are compared."""
        every: np.ndarray = self.graph.expand @ np.concatenate([np.zeros(1), self.phi])
        return every

    @cached_property
    def largest(self) -> tuple[np.ndarray, np.ndarray]:
        """Sizes of each unit's largest edge in a gauge, of all and of forward ones."""
        every, along = np.zeros((2, len(self._reached)))
        for forward, into in ((True, along), (False, every)):
            for block in range(len(self.graph.blocks)):
                rows = self.rows(block, forward)
                units = np.abs(rows.near)
                position = np.flatnonzero((units > 0) & (units < len(into)))
                size = self._largest(block, rows, position, ~rows.dead)[2]
                np.maximum.at(into, units[position], size)
        return np.maximum(every, along), along

    def _look(self, units: np.ndarray) -> None:
        """Note that units are reached, and which ids: of a product all of its factors are."""
        self._reached[units] = True
        self.reached = abs(self.graph.expand) @ ~self._reached == 0

    def _connect(self, units: np.ndarray, **edges: Any) -> None:
        """Put the edges of units into the tree."""
        for name, values in edges.items():
            getattr(self.tree, name)[units] = values
        self.tree.rounds.append(units)
        self._look(units)

    def _round(self, blocks: list[int], forward: bool, choosy: bool, zeros: bool) -> bool:
        found: list[tuple[np.ndarray, ...]] = []
        for block in blocks:
            rows = self.rows(block, forward)
            # (what leads to a product of units is left to joint rounds)
            units = np.abs(rows.near)
            wanted = (units < len(self._reached)) & ~self.reached[units]
            if not wanted.any():
                continue
            open_ = self.reached[np.abs(rows.far)] & ~rows.dead
            wanted &= np.asarray(open_.any(1))[rows.which]
            position = np.flatnonzero(wanted)
            flat, column, score = self._pick(block, rows, position, open_)
            near, far = rows.near[position], rows.far[rows.which[position], column % open_.shape[1]]
            kept = (score >= 0) | zeros
            if self._floor and choosy:
                largest = self.largest[forward][np.abs(near)]
                share = score / np.maximum(largest, SMALLEST)
                large = (share >= self._floor) | (score <= 0)
                small = share[kept & ~large].max(initial=0.0)
                self._next_floor = max(self._next_floor, float(small))
                kept &= large
            every = (np.full(len(near), block), near, flat, far, score)
            found.append(tuple(each[kept] for each in every))
        if not any(len(entry[0]) for entry in found):
            return False
        source, near, flat, far, score = map(np.concatenate, zip(*found, strict=True))
        # one edge per unit: the best score, and the first of equal ones
        lacking = np.abs(near)
        top = np.full(len(self._reached), -np.inf)
        np.maximum.at(top, lacking, score)
        good = np.flatnonzero(score >= top[lacking] - TIES * np.abs(top[lacking]))
        units, first = np.unique(lacking[good], return_index=True)
        best = good[first]
        own, other = (np.where(ids[best] < 0, -1, 1) for ids in (near, far))
        edges = {"block": source[best], "index": flat[best], "parent": np.abs(far[best])}
        self._connect(units, forward=forward, own=own, other=other, **edges)
        return True

    def _joint_round(self, zeros: bool) -> bool:
        """Use edges whose ends together lack exactly one unit."""
        for block, entry in enumerate(self.graph.blocks):
            flat = entry.places
            if len(flat) > STAR:
                # one line of scalars along every dimension shows every pair of ends up to a shift
                steps = [math.prod(entry.shape[d + 1 :]) for d in range(len(entry.shape))]
                lines = zip(entry.shape, steps, strict=True)
                on_lines = np.concatenate([np.arange(n) * step for n, step in lines])
                flat = np.intersect1d(flat, on_lines)
            parameter = self._parameter(block)
            if not zeros and has_values(parameter):
                values = parameter.detach().reshape(-1)[torch.from_numpy(flat)]
                flat = flat[(values != 0).cpu().numpy()]
            change = changes(self.graph, *entry.ends_at(flat))
            units, chosen, own = single(change, self._reached)
            if not len(units):
                continue
            self.tree.rest = self.tree.rest + other_factors(units, change[chosen], own)
            self._connect(units, block=block, index=flat[chosen], forward=True, own=own)
            return True
        return False

    def _pick(
        self, block: int, rows: EdgeRows, position: np.ndarray, open_: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """One open column for each row: positions, columns, and scores (-1: weight 0)."""
        if self.rule == "magnitude":
            return self._largest(block, rows, position, open_)
        every = open_.sum(1)
        count, first = (table[rows.which[position]] for table in (every, np.cumsum(every) - every))
        total = count * rows.repeats
        turn = position % total if self.rule == "modulo" else self.random.integers(total)
        width = open_.shape[1]
        column = np.flatnonzero(open_)[first + turn % count] % width + turn // count * width
        score = (
            np.zeros(len(position)) if self.rule == "modulo" else self.random.random(len(position))
        )
        flat = rows.flat(position, column * rows.shape[2] + rows.tap)
        parameter = self._parameter(block)
        if self.blind or not has_values(parameter):
            return flat, column, score
        # a skeleton weight must not be 0: take the first of its row that is not
        weight = self.graph.blocks[block].values(parameter).reshape(-1)
        zero = np.flatnonzero((weight[torch.from_numpy(flat)] == 0).cpu().numpy())
        if len(zero):
            flat[zero], column[zero], size = self._largest(block, rows, position[zero], open_)
            score[zero] = np.where(size >= 0, score[zero], -1)
        return flat, column, score

    def _largest(
        self, block: int, rows: EdgeRows, position: np.ndarray, open_: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """For each row its largest open edge, else its first that is not 0."""
        weight = self.graph.blocks[block].values(self._parameter(block))
        table = weight.permute(rows.order).reshape(rows.shape)
        step = max(1, CHUNK // max(1, rows.shape[1] * rows.shape[2]))
        cells, scores = [np.zeros(0, np.int64)], [np.zeros(0)]
        measured = self.rule == "magnitude"
        if measured:
            near, far = (self.logs[np.abs(ids)] * np.sign(ids) for ids in (rows.near, rows.far))
        # sizes in the gauge of ``logs``, which are equal for all rescaled copies of the network
        side = 1.0 if rows.entering else -1.0
        for start in range(0, len(position), step):
            part = position[start : start + step]
            size = table[torch.from_numpy(part)].abs().double().cpu().numpy()
            if measured:
                factor = np.exp(
                    side * (near[part][:, None] - np.tile(far[rows.which[part]], rows.repeats))
                )
                size = size * factor[:, :, None]
            else:
                size = (size != 0).astype(np.float64)
            shut = ~np.tile(open_[rows.which[part]], rows.repeats)
            # an edge of weight 0 is taken if there is no other; an unused scalar never
            size = np.where(shut[:, :, None], -2.0, np.where(size == 0, -1.0, size)).reshape(
                len(part), -1
            )
            top = size.max(1)
            cells.append(np.argmax(size >= np.where(top > 0, top * (1 - TIES), top)[:, None], 1))
            scores.append(top)
        cell = np.concatenate(cells)
        return rows.flat(position, cell), cell // rows.shape[2], np.concatenate(scores)


def tree_of_edges(
    graph: Structure,
    entering: bool,
    edges: Mapping[int, np.ndarray],
    dead: np.ndarray | None = None,
) -> SpanningTree:
    """The tree with given edges, block -> flat positions, which grows where all others are unused;
    without ``dead`` (units without an edge) the weights say which are.
    """
    blocks = []
    for number, block in enumerate(graph.blocks):
        others = torch.ones(block.shape, dtype=torch.bool)
        others.view(-1)[torch.from_numpy(edges[number])] = False
        blocks.append(replace(block, unused=others))
    alone = replace(graph, blocks=tuple(blocks))
    builder = SpanningTreeBuilder(alone, entering, "modulo", 0, blind=dead is not None, dead=dead)
    if len(left := builder.reach()):
        raise InputError(
            f"The masks reach {graph.num_units - len(left)} of {graph.num_units} units of the"
            " reduction graph, expected one edge for each; load masks of this architecture."
        )
    return builder.tree
