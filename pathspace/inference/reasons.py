"""Why scales are fixed: for each, the shortest chain of operations that connects it to the root."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from scipy.sparse import coo_array, csr_array, vstack
from scipy.sparse.csgraph import breadth_first_order, connected_components, dijkstra
from torch import Tensor

from ..models.values import on_cpu
from .assemble import Ends
from .handwritten_norms import constant_behind
from .interpreter import interpret
from .relations import Relations, renaming
from .scales import Scales
from .union_find import Pairs
from .units import ends_of
from .values import NEUTRAL, ROOT, Value

if TYPE_CHECKING:
    from ..graph.structure import Structure

TOGETHER = "several relations fix it together, or other sizes of the inputs, or it moves no weight"


@dataclass(frozen=True)
class Reason:
    """Fixed scales at one end of a parameter's edges, and why they are fixed.

    Attributes:
        parameter: the name of the parameter.
        side: ``"out"`` for scales at the heads of its edges, ``"in"`` for scales at their tails.
        scales: how many scales have this chain.
        chain: operations from the one that reads these scales to the one that fixes them.
    """

    parameter: str
    side: str
    scales: int
    chain: tuple[ReasonLink, ...]

    def __str__(self) -> str:
        return f"{self.side}: {self.scales:,} fixed by " + ", then ".join(map(str, self.chain))


def reasons(graph: Structure) -> tuple[Reason, ...]:
    """For every fixed scale of a traced model, the shortest chain of operations to the root.

    The captured graph is interpreted again, and each equation between scales is stored with
    its operation. Each fixed scale is listed once, at the first parameter whose edges enter it.
    """
    with on_cpu():
        witness, _ = interpret(graph.captured, Witness, norm_eps=graph.norm_eps)
        raw = ends_of(witness)
        return _listed(graph, witness, raw)


def _listed(graph: Structure, witness: Witness, raw: Mapping[str, Ends]) -> tuple[Reason, ...]:
    chains = Chains(witness)
    found, seen, passed = [], *np.zeros((2, witness.equations.size), bool)
    for side, end in (("out", "head"), ("in", "tail")):
        # weights before biases: list each scale at the parameter that creates it
        for block in sorted(graph.blocks, key=lambda block: -len(block.shape)):
            if block.name not in raw:
                continue
            new = _fixed(getattr(raw[block.name], end), getattr(block, end))
            new = new[~seen[new]]
            if len(block.shape) == 1:
                # the scale of the sum with a bias was listed at the weight
                after = chains.before(new)
                seen[new], new = True, new[~passed[new] & ((after == 0) | ~seen[after])]
            seen[new] = passed[chains.before(new)] = True
            for chain, count in chains.of(new) if len(new) else ():
                steps = chain or (ReasonLink("relations", "", "", TOGETHER),)
                found.append(Reason(block.name, side, count, steps))
    order = {block.name: number for number, block in enumerate(graph.blocks)}
    return tuple(sorted(found, key=lambda reason: order[reason.parameter]))


def _fixed(ids: Tensor, final: Tensor) -> np.ndarray:
    shape = torch.broadcast_shapes(ids.shape, final.shape)
    ids, final = ids.expand(shape), final.expand(shape)
    return np.unique(ids[(final == 0) & (ids != 0) & (ids != NEUTRAL)].abs().numpy())


SHARED = "the scales that meet there are one"
PRODUCT = "scales of a product add up"
USES = "all uses of a weight have one factor"
OTHER = "an input, or something else of fixed scale"
OPPOSITE = "its scale would equal its own inverse"
FIXED = "its result depends on the scale of its operand"
OUTPUT = "outputs of the model have a fixed scale"


@dataclass(frozen=True)
class ReasonLink:
    """One link of a chain of reasons.

    Attributes:
        op: name of the operation.
        module: path of the module that runs it ("" for the model itself).
        source: file and line, if known.
        reason: its condition on the scales of its operands.
    """

    op: str
    module: str
    source: str
    reason: str

    def __str__(self) -> str:
        place = " ".join(
            part for part in (f"in {self.module}" if self.module else "", self.source) if part
        )
        return f"{self.op}{' ' + place if place else ''} ({self.reason})"


NOWHERE = ReasonLink("", "", "", "")


class _Noted(Relations):
    def __init__(self, step: Callable[[str], int]) -> None:
        super().__init__()
        self.step = step
        self.pairs: list[tuple[np.ndarray, np.ndarray, int]] = []
        self.rows: list[tuple[csr_array, int]] = []

    def unify(self, left: Tensor, right: Tensor) -> Pairs | None:
        pairs = super().unify(left, right)
        if pairs is not None:
            one, other = pairs
            root = (one == ROOT) | (other == ROOT)
            for some, kind in ((root, FIXED), (~root, SHARED)):
                if some.any():
                    self.pairs.append((one[some], other[some], self.step(kind)))
        return pairs

    def add(self, relations: csr_array) -> None:
        super().add(relations)
        self.rows.append((relations, self.step(PRODUCT)))


class Witness(Scales):
    """Scales with the origin of every equation."""

    def __init__(self, offsets: dict[str, int], shapes: dict[str, tuple[int, ...]]) -> None:
        super().__init__(offsets, shapes)
        self.steps_taken: dict[ReasonLink, int] = {}
        self._reason, self._fixing = "", False
        self.noted = _Noted(self._step)
        self.equations = self.noted

    def _step(self, kind: str) -> int:
        place = self.place
        step = ReasonLink(place.op, place.module, place.source, self._reason or self._said(kind))
        return self.steps_taken.setdefault(step, len(self.steps_taken))

    def _said(self, kind: str) -> str:
        """The reason of an operation that gives none itself."""
        if self.place.op.startswith("uses of"):
            return USES
        if kind != FIXED:
            return kind
        if self.place.op == "output":
            return OUTPUT + self._fed_back(self.place.result)
        if self._fixing or self.place.node is None:
            return FIXED
        return f"shares one scale with {constant_behind(self.place.node, self.sources)[0] or OTHER}"

    def _fed_back(self, output: Tensor) -> str:
        inputs = {
            node.name: node.meta.get("val")
            for node in (self.graph.nodes if self.graph is not None else ())
            if node.op == "placeholder" and self.sources.get(node.name, ("",))[0] == "input"
        }
        alike = [n for n, val in inputs.items() if getattr(val, "shape", None) == output.shape]
        if len(inputs) < 2 or not alike:
            return ""
        return (
            f"; if one call gives it to the next as the state {alike[-1]!r}, trace"
            " pathspace.Carried"
        )

    def pin(self, values: Iterable[Value], reason: str) -> None:
        """Fix scales for a given reason."""
        self._reason = reason
        super().pin(values, reason)
        self._reason = ""

    def fix(self, value: Tensor) -> None:
        """Fix scales."""
        self._fixing = True
        super().fix(value)
        self._fixing = False


class Chains:
    """Shortest chains of equations from ids to the root."""

    def __init__(self, witness: Witness) -> None:
        self.steps = [*witness.steps_taken]
        self._size = witness.equations.size
        noted = witness.noted
        for rows, _ in noted.rows:
            rows.resize(rows.shape[0], self._size)
        none = csr_array((0, self._size), dtype=np.int64)
        self._rows = csr_array(vstack([none, *(rows for rows, _ in noted.rows)], format="csr"))
        counts = [rows.shape[0] for rows, _ in noted.rows]
        self._step_of_row = np.repeat(np.array([step for _, step in noted.rows], int), counts)
        # left and right sides of equations, and their steps
        self._sides = np.zeros((3, 0), np.int64)
        self._add(*((left, right, np.full(len(left), step)) for left, right, step in noted.pairs))
        self._search()
        while self._derive():
            self._search()

    def _add(self, *equations: tuple[np.ndarray, np.ndarray, np.ndarray]) -> None:
        self._sides = np.concatenate([self._sides, *map(np.stack, equations)], 1)

    def _node(self, ids: np.ndarray) -> np.ndarray:
        return np.asarray(2 * np.abs(ids) + (ids < 0))

    def _search(self) -> None:
        left, right, steps = self._sides
        rows = np.concatenate([self._node(left), self._node(-left), [0]])
        columns = np.concatenate([self._node(right), self._node(-right), [1]])
        step = np.concatenate([steps, steps, [-1]])
        count = 2 * self._size
        graph = coo_array((np.ones(len(rows), bool), (rows, columns)), shape=(count, count)).tocsr()
        self._graph = graph
        _, self._label = connected_components(graph, directed=False)
        order, before = breadth_first_order(graph, 0, directed=False, return_predecessors=True)
        # for each node the next one on the way to the root, and the first step between them
        self._before, self._via = np.zeros(count, np.int64), np.full(count, -1)
        self._before[order[1:]] = before[order[1:]]
        for start, end in ((columns, rows), (rows, columns)):
            way = np.flatnonzero((self._before[end] == start) & (end > 1))[::-1]
            self._via[end[way]] = step[way]

    def _derive(self) -> bool:
        """Add equations that follow from relations and opposite scales; whether there are any."""
        known = self._sides.shape[1]
        plus, minus = self._label[0::2], self._label[1::2]
        turned = np.flatnonzero((plus == minus) & (plus != plus[0]))
        if len(turned):
            own = turned[np.unique(plus[turned], return_index=True)[1]]
            self._add((own, np.zeros_like(own), np.full(len(own), len(self.steps))))
            # (at the place of the first equation between opposite scales)
            crossed = np.flatnonzero(np.sign(self._sides[:2, :known]).prod(0) < 0)
            place = self.steps[self._sides[2, crossed[0]]] if len(crossed) else NOWHERE
            self.steps.append(replace(place, reason=OPPOSITE))
        if self._rows.shape[0]:
            # the class of each id, with its sign; 0 is the root
            lead, sign = np.minimum(plus, minus), np.where(plus <= minus, 1, -1)
            self._follow(np.where(lead == lead[0], 0, 1 + lead) * sign)
        return self._sides.shape[1] > known

    def _follow(self, classes: np.ndarray) -> None:
        """Add what relations say of ids where a single class or two are left in them."""
        rows, count = self._rows, 1 + 2 * self._size
        sums = csr_array(rows @ renaming(classes, count))
        sums.eliminate_zeros()
        terms = np.diff(sums.indptr)
        row = np.repeat(np.arange(len(terms)), np.diff(rows.indptr))
        keys, first = np.unique(row * count + np.abs(classes[rows.indices]), return_index=True)

        def met(some: np.ndarray, place: int) -> tuple[np.ndarray, np.ndarray]:
            """An id of a class that is left in a row, and its coefficient there."""
            start = sums.indptr[some] + place
            ids = rows.indices[first[np.searchsorted(keys, some * count + sums.indices[start])]]
            return ids.astype(np.int64), sums.data[start] * np.sign(classes[ids])

        # how far each is from the root, or -1
        far = dijkstra(self._graph, directed=False, indices=0, unweighted=True)[0::2]
        depth = np.where(np.isinf(far), -1, far)[rows.indices]
        alone, both = np.flatnonzero(terms == 1), np.flatnonzero(terms == 2)
        # the link to the root goes through the term that was fixed last
        last = np.lexsort((depth, row))[rows.indptr[1:] - 1][alone]
        fixed = np.where(depth[last] < 0, 0, rows.indices[last])
        self._add((met(alone, 0)[0], fixed, self._step_of_row[alone]))
        (one, times), (two, others) = met(both, 0), met(both, 1)
        even = np.abs(times) == np.abs(others)
        sides = one, -two * np.sign(times * others), self._step_of_row[both]
        self._add(tuple(side[even] for side in sides))

    def before(self, ids: np.ndarray) -> np.ndarray:
        """The next id on the chain to the root (a positive number); 0 without a chain."""
        return np.asarray(self._before[2 * np.abs(ids)] // 2)

    def of(self, ids: np.ndarray) -> list[tuple[tuple[ReasonLink, ...], int]]:
        """Chains of ids (positive), each with how many have it; an empty one without one."""
        current, columns = 2 * np.abs(ids), []
        while (current > 1).any():
            columns.append(self._via[current])
            current = self._before[current]
        table = np.stack(columns, 1) if columns else np.full((len(ids), 1), -1)
        rows, first, counts = np.unique(table, axis=0, return_index=True, return_counts=True)
        found = []
        for place in np.argsort(first):
            chain: list[ReasonLink] = []
            for number in rows[place]:
                if number >= 0 and (not chain or chain[-1] != self.steps[number]):
                    chain.append(self.steps[number])
            found.append((tuple(chain), int(counts[place])))
        return found
