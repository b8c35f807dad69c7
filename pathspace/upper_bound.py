"""How many scale symmetries can there be at most? A randomised test from above.

Let ``P`` map log-scales per row and per column of each tensor, ``R`` of them, to log-scales per scalar. A symmetry of
that form is a vector ``a`` with ``sum_e w_e df/dw_e (P a)_e = 0`` for all weights and inputs. For random inputs,
weights and cotangents ``u_k`` let ``g_k = P^T (w * grad_w <u_k, f>)`` be the rows of ``G``. Then

    ``H <= R - rank(G) - dim ker P``

for any sample: more samples can only raise the rank. A null vector that the found units do not span names tensors whose
scales are left over.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from pathspace.capture import first_line, quiet
from pathspace.eps import precision, without_eps
from pathspace.invariance import LARGE, computing_in
from pathspace.left_over import NAMED, left_over, rank_of
from pathspace.logscales import Family, family
from pathspace.nested import leaves as leaves_of
from pathspace.nested import mapped
from pathspace.reduction import ReductionGraph
from pathspace.substitute import evaluate

# log-scales beyond which a factorisation of that size is not attempted, and seconds the samples may take
MOST_SCALES = 4_000
MOST_SECONDS = 300.0
# singular values below this share of the largest count as zero: that errs on the safe side
ZERO = 1e-8
# products w dL/dw below this share of a sample's largest are rounding errors
NOTHING = 1e-11
MARGIN = 12
ROUNDS = 3
COTANGENTS = 2


@dataclass(frozen=True)
class UpperBound:
    """What the null-space test found.

    Attributes:
        at_most: largest number of scale symmetries by rows and columns; ``None`` where nothing was tested.
        found: the number of units of the reduction graph.
        closed: whether both agree.
        evidence: figures in a sentence, or why nothing was tested.
        log_scales: ``R``, on scalars that the outputs feel.
        rank: of the sampled derivatives.
        redundant: ``dim ker P``.
        samples: how many derivatives were sampled.
        smallest_kept: smallest singular value counted as non-zero, relative to the largest.
        largest_dropped: largest singular value counted as zero.
        without_effect: scalars whose derivative is zero at every sample, taken out first.
        left_over: tensors with scales that the found units do not explain, and which rows or columns.
        seconds: time taken.
    """

    at_most: int | None
    found: int
    closed: bool | None
    evidence: str
    log_scales: int = 0
    rank: int = 0
    redundant: int = 0
    samples: int = 0
    smallest_kept: float = 0.0
    largest_dropped: float = 0.0
    without_effect: int = 0
    left_over: list[dict[str, Any]] = field(default_factory=list)
    seconds: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain Python values."""
        return asdict(self)


def upper_bound(
    graph: ReductionGraph,
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    seed: int = 0,
    most_seconds: float | None = None,
) -> UpperBound:
    """Bound the number of scale symmetries of a model from above, with ``eps = 0`` in its normalisations.

    Args:
        graph: its reduction graph.
        model: a float64 copy, which is left as it is.
        args: example inputs.
        kwargs: example inputs by keyword.
        seed: seed of inputs, weights and cotangents.
        most_seconds: not attempted where the samples would take longer (300 by default).

    Returns:
        The bound, or the reason why there is none.

    Example:
        >>> import torch, pathspace as ps
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU(), torch.nn.Linear(3, 1)).double()
        >>> x = torch.randn(4, 2).double()
        >>> bound = upper_bound(ps.trace(model, x), model, (x,), {})
        >>> bound.found, bound.at_most
        (3, 3)
    """
    start = time.perf_counter()
    found = graph.num_units
    most_seconds = MOST_SECONDS if most_seconds is None else most_seconds

    def nothing(reason: str) -> UpperBound:
        return UpperBound(None, found, None, f"not attempted: {reason}", seconds=round(time.perf_counter() - start, 3))

    if precision(model) != torch.float64 or graph.num_weights > LARGE:
        return nothing("it takes a copy in float64, which this model has none of")
    scales = family(graph, model, statistics=not model.training)
    if scales.size > MOST_SCALES:
        return nothing(
            f"{scales.size:,} rows and columns, and a factorisation is made for at most {MOST_SCALES:,}; test parts "
            "of the model"
        )
    sampler = _Sampler(graph, scales, model, args, kwargs, seed)
    with without_eps(model, graph.guards):
        try:
            rows = sampler.take(2 * COTANGENTS)
            pace = (time.perf_counter() - start) / max(1, sampler.tried)
            needed = scales.size - found + MARGIN
            if not len(rows):
                return nothing(sampler.problem or "no output depends on the weights by a finite derivative")
            if pace * needed > most_seconds:
                return nothing(f"{needed:,} samples would take about {pace * needed:,.0f} seconds")
            sampler.take(needed - len(sampler.rows))
            judged = _judge(scales, sampler)
            for _ in range(ROUNDS - 1):
                if judged.closed or time.perf_counter() - start > most_seconds:
                    break
                sampler.take(max(MARGIN, needed // 2))
                judged = _judge(scales, sampler)
        except RuntimeError as error:
            return nothing(f"the model cannot be differentiated ({first_line(error)})")
    if sampler.misled(scales):
        return nothing("its gradients are not its function's (detached, or of a backward pass of its own)")
    values = judged.__dict__ | {"seconds": round(time.perf_counter() - start, 3)}
    return UpperBound(**values)


class _Sampler:
    """Derivatives by all log-scales at random inputs, weights and cotangents."""

    def __init__(
        self,
        graph: ReductionGraph,
        scales: Family,
        model: nn.Module,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        seed: int,
    ) -> None:
        self.scales, self.model = scales, model
        self.example = (tuple(args), dict(kwargs))
        self.generator = torch.Generator().manual_seed(seed)
        wanted = {name for entry in scales.entries for name, _, _ in entry.factors}
        held = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
        self.weights = {name: held[name].detach() for name in wanted}
        self.buffers = {n: b.detach() for n, b in model.named_buffers(remove_duplicate=False) if n not in wanted}
        self.positive = {s.var for s in graph.statistics if s.var is not None}
        self.rows: list[Tensor] = []
        # the same sums of absolute values: what a row could be at most
        self.sizes: list[Tensor] = []
        self.largest = [torch.zeros(entry.shape, dtype=torch.float64) for entry in scales.entries]
        self.tried = 0
        self.problem = ""

    def take(self, count: int) -> list[Tensor]:
        """Sample until there are ``count`` more rows; samples that are not finite are left out."""
        wanted, misses = len(self.rows) + count, 0
        while len(self.rows) < wanted and misses < 20 + count:
            before = len(self.rows)
            for row, size in self._rows():
                self.rows.append(row)
                self.sizes.append(size)
            misses += len(self.rows) == before
        return self.rows

    def _rows(self) -> Iterator[tuple[Tensor, Tensor]]:
        number, self.tried = self.tried, self.tried + 1
        leaves = {name: value.requires_grad_() for name, value in self._weights(number).items()}
        buffers = {name: buffer.clone() for name, buffer in self.buffers.items()}
        with quiet(), computing_in(torch.float64), torch.enable_grad():
            torch.manual_seed(number)
            outputs = self._run(leaves | buffers, number)
            found = [
                leaf.reshape(-1)
                for leaf in leaves_of(outputs)
                if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.requires_grad
            ]
            if not found:
                self.problem = "no output depends on the weights by a derivative"
                return
            joined = torch.cat([leaf.double() for leaf in found])
            joined = joined[torch.isfinite(joined)]
            for k in range(COTANGENTS):
                cotangent = torch.randn(joined.shape, generator=self.generator, dtype=torch.float64)
                grads = torch.autograd.grad(
                    joined, list(leaves.values()), cotangent, retain_graph=k + 1 < COTANGENTS, allow_unused=True
                )
                known = {name: g for name, g in zip(leaves, grads, strict=True) if g is not None}
                products = [entry.products(leaves, known) for entry in self.scales.entries]
                size = max((float(p.abs().max()) for p in products if p.numel()), default=0.0)
                if not 0 < size < float("inf"):
                    continue
                products = [p / size for p in products]
                for held, p in zip(self.largest, products, strict=True):
                    torch.maximum(held, p.abs(), out=held)
                yield self.scales.sums(products), self.scales.sums([p.abs() for p in products])

    def _weights(self, number: int) -> dict[str, Tensor]:
        """The model's own weights twice, then weights around them, new ones, and new ones that hardly kill a unit."""
        drawn = {}
        for name, weight in self.weights.items():
            if number < 2 and bool(weight.any()):
                drawn[name] = weight.clone()
                continue
            noise = torch.randn(weight.shape, generator=self.generator, dtype=torch.float64)
            if name in self.positive:
                drawn[name] = weight.abs().clamp_min(1e-6) * (0.5 * noise).exp()
            else:
                spread = float(weight.square().mean().sqrt()) if weight.numel() else 0.0
                noise = (spread or 0.1) * noise
                kind = number % 3
                if kind == 2 and weight.dim() > 1:
                    # with more weights above 0 than below, rectifiers in a row let something through
                    noise = torch.where(torch.rand(noise.shape, generator=self.generator) < 0.8, noise.abs(), noise)
                drawn[name] = 0.7 * weight + 0.5 * noise if kind == 0 else noise
        return drawn

    def _run(self, tensors: Mapping[str, Tensor], number: int) -> Any:
        try:
            return evaluate(self.model, tensors, *self._inputs(number))
        except (RuntimeError, IndexError, ValueError):
            # not every number is an input
            return evaluate(self.model, tensors, *self.example)

    def _inputs(self, number: int) -> Any:
        """Inputs of many sizes: numbers between 0.01 and 100 times the example's, whole numbers from the example."""
        exponent = 4 * float(torch.rand((), generator=self.generator)) - 2

        def draw(leaf: Tensor) -> Tensor:
            if not leaf.numel() or leaf.layout != torch.strided:
                return leaf
            if leaf.is_floating_point():
                if not bool(torch.isfinite(leaf).all()):
                    return leaf
                if number % 2:
                    return leaf * 10**exponent
                spread = float(leaf.double().square().mean().sqrt()) or 1.0
                noise = torch.randn(leaf.shape, generator=self.generator, dtype=torch.float64)
                return (noise * spread * 10**exponent).to(leaf)
            if leaf.dtype == torch.bool or number % 2 or leaf.is_complex():
                return leaf
            order = torch.randint(leaf.numel(), leaf.shape, generator=self.generator)
            return leaf.reshape(-1)[order]

        return mapped(draw, self.example)

    def misled(self, scales: Family) -> bool:
        """Whether the model's own weights show derivatives along the found units."""
        units = torch.from_numpy(abs(scales.units).toarray().astype(np.float64))
        signed = torch.from_numpy(scales.units.toarray().astype(np.float64))
        if not units.shape[1]:
            return False
        rows, sizes = torch.stack(self.rows), torch.stack(self.sizes)
        along, most = (rows @ signed).abs(), sizes @ units
        return bool((along > 1e-6 * most + 1e-12).any())


def _judge(scales: Family, sampler: _Sampler) -> UpperBound:
    """Ranks, and what the found units do not explain."""
    alive = [held > NOTHING for held in sampler.largest]
    dead = sum(int((~mask).sum()) for mask in alive)
    used = scales.sums([mask.double() for mask in alive]) > 0
    redundant = sum(entry.redundant(mask) for entry, mask in zip(scales.entries, alive, strict=True))
    rows, sizes = torch.stack(sampler.rows)[:, used], torch.stack(sampler.sizes)[:, used]
    column = sizes.square().mean(0).sqrt().clamp_min(1e-300)
    length = (sizes / column).norm(dim=1, keepdim=True).clamp_min(1e-300)
    matrix = rows / column / length
    values = torch.linalg.svdvals(matrix)
    top = float(values[0]) if len(values) else 0.0
    kept = values > ZERO * top
    rank = int(kept.sum())
    width = int(used.sum())
    units = torch.from_numpy(scales.units.toarray().astype(np.float64))
    felt = units[used]
    # units that act only on scalars without effect are found, and cannot be seen here
    unseen = rank_of(units) - rank_of(_moving(scales, units, used, alive))
    at_most = width - rank - redundant + unseen
    found = scales.units.shape[1]
    over = [] if at_most <= found else left_over(scales, matrix, column, used, felt, alive)
    words = f"{found:,} found; at most {at_most:,} exist"
    words += f": {width:,} log-scales of rows and columns, {redundant:,} of them redundant, rank {rank:,} in "
    words += f"{len(rows):,} samples"
    dropped = float(values[rank]) / top if rank < len(values) and top else 0.0
    smallest = float(values[rank - 1]) / top if rank else 0.0
    words += f"; singular values down to {smallest:.0e} count, {dropped:.0e} and below are taken for zero"
    words += f"; {dead:,} scalars without effect on the outputs taken out" if dead else ""
    if over:
        words += "; left over: " + ", ".join(entry["tensor"] for entry in over[:NAMED])
    if at_most < found:
        words += "; fewer than found: the found units are no symmetries of these samples"
    return UpperBound(
        at_most, found, at_most == found, words, width, rank, redundant, len(rows), smallest, dropped, dead, over
    )


def _moving(scales: Family, units: Tensor, used: Tensor, alive: Sequence[Tensor]) -> Tensor:
    """The found units on what is felt, less what only the two sides of a tensor exchange: rows of ``P`` applied."""
    parts = [units.new_zeros(0, units.shape[1])]
    for entry, mask in zip(scales.entries, alive, strict=True):
        index = [side.index.expand(entry.shape)[mask] + side.start for side in entry.sides]
        if not len(index[0]):
            continue
        classes = torch.unique(torch.stack(index, 1), dim=0) if len(index) > 1 else torch.unique(index[0])[:, None]
        # as many pairs as span all: a star around the first class of every side would do, here all up to a limit
        if len(classes) > 4 * sum(side.count for side in entry.sides):
            order = torch.randperm(len(classes), generator=torch.Generator().manual_seed(0))
            classes = classes[order[: 4 * sum(side.count for side in entry.sides)]]
        parts.append(sum(units[column] for column in classes.T))  # type: ignore[arg-type]
    return torch.cat(parts)


__all__ = ["UpperBound", "upper_bound"]
