"""An upper bound on the number of scale symmetries, by a randomised null-space test.

Let ``P`` map log-scales per row and per column of each tensor, ``R`` of them, to log-scales per
scalar. A symmetry of that form is a vector ``a`` with ``sum_e w_e df/dw_e (P a)_e = 0`` for all
weights and inputs. For random inputs, weights and cotangents ``u_k`` let ``g_k = P^T (w * grad_w
<u_k, f>)`` be the rows of ``G``. Then

    ``H <= R - rank(G) - dim ker P``

for any sample: more samples can only increase the rank. A null vector outside the span of the found
units shows tensors with unexplained scales.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from scipy.sparse import csr_array
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..models.inputs import describe_inputs
from ..models.modes import InDouble, NoEps, precision
from ..models.nested import mapped
from ..models.running import LARGE, cast, run_forward
from ..models.stand_in import stand_in
from ..shown import Shown
from .bench import Inputs, Workbench, in_double
from .samples import Family, Sampler, Untested

# largest number of log-scales: one singular value decomposition
MOST_SCALES = 8_000
# processor time of the samples
MOST_SECONDS = 600.0
# singular values below this, relative to the largest, count as zero: errors make the bound
# larger, never smaller
ZERO = 1e-8
# smallest column norm, relative to the largest, that is normalised; rounding errors must be much
# smaller
EVEN = 1e-5
# samples beyond the number of columns
MARGIN, SHARE = 12, 0.1
# how often more samples are taken where the bound is open
ROUNDS = 3
# smallest number of runs, each with other weights and inputs; they go on until so many have shown
# no effect of a further scalar
RUNS, PATIENCE, MOST_RUNS = 12, 6, 60
# batch statistics normalise any two numbers to 1 and -1, so that batches are larger; large ones
# where their inputs are few
BATCH, LARGE_BATCH, FREE = 4, 32, 2_000
# largest number of rows of a tensor that are named
NAMED = 8
# what moves by less does not move
SILENT = 1e-8


@dataclass(frozen=True)
class UpperBound(Shown):
    """The result of the null-space test.

    Attributes:
        at_most: largest possible number of scale symmetries by rows and columns;
            ``None`` if nothing was tested.
        found: the number of units of the reduction graph.
        closed: whether both agree.
        evidence: figures in a sentence, or why nothing was tested.
        log_scales: ``R``, for scalars with an effect on the outputs.
        rank: rank of the sampled derivatives.
        redundant: ``dim ker P``.
        samples: number of sampled derivatives.
        smallest_kept: smallest singular value counted as non-zero, relative to the largest.
        largest_dropped: largest singular value counted as zero.
        without_effect: number of weights whose derivative is zero at every sample,
            which are removed first.
        left_over: tensors with scales that the found units do not explain,
            with their rows or columns.
        seconds: processor time.
        exact_found: the number of scale symmetries found for the unchanged
            model, every ``eps`` included.
        exact_at_most: the bound for these; ``None`` if it was not tested.
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
    exact_found: int | None = None
    exact_at_most: int | None = None


def upper_bound(bench: Workbench, most_seconds: float | None = None) -> UpperBound:
    """Bound the number of scale symmetries from above, with ``eps = 0`` in normalisations."""
    start = time.thread_time()
    deadline = start + (MOST_SECONDS if most_seconds is None else most_seconds)
    graph, found, exact = bench.graph, bench.graph.num_units, bench.graph.num_exact_units
    try:
        if bench.large:
            raise Untested(f"it needs a copy in float64, of at most {LARGE:,} weights")
        model, inputs = bench.model, bench.inputs
        if precision(model) != torch.float64:
            model = in_double(stand_in(model, share_tensors=False))
            inputs = cast(inputs, torch.float64)
        wide = replace(bench, model=model, inputs=_larger_batch(model, inputs))
        scales = Family(graph, MOST_SCALES)
        if not scales.tensors:
            raise Untested("the model has no floating-point parameter")
        with wide.without_eps() as layers:
            bound = _bounded(Sampler(wide, scales), deadline)
    except Untested as refusal:
        return UpperBound(None, found, None, f"not attempted: {refusal}")
    if not bench.depends_on_eps(layers):
        # without an eps both models, and both bounds, are the same
        return replace(bound, exact_found=exact, exact_at_most=bound.at_most)
    with NoEps(None):
        scales.units = csr_array(scales.units @ graph.exact)
        try:
            held = _bounded(Sampler(wide, scales), deadline)
        except Untested:
            return replace(bound, exact_found=exact)
    words = f"; with every eps unchanged {exact:,} found, at most {held.at_most:,}"
    return replace(
        bound,
        exact_found=exact,
        exact_at_most=held.at_most,
        evidence=bound.evidence + words,
        seconds=round(time.thread_time() - start, 3),
    )


def _larger_batch(model: nn.Module, inputs: Inputs) -> Inputs:
    """The same inputs in a larger batch, if the model takes it."""
    leaves = [leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, Tensor)]
    batched = [leaf for leaf in leaves if leaf.dim() and leaf.layout == torch.strided]
    if len({len(leaf) for leaf in batched}) != 1 or not len(batched[0]):
        return inputs
    free = FREE // max(1, sum(leaf[:1].numel() for leaf in batched))
    # (a token is one number, and as much work as a vector)
    few = all(leaf.is_floating_point() for leaf in batched)
    count = max(BATCH, 2 * len(batched[0]), min(free, LARGE_BATCH) if few else 0)

    def repeated(leaf: Tensor) -> Tensor:
        if not leaf.dim() or leaf.layout != torch.strided:
            return leaf
        return leaf[torch.arange(count) % len(leaf)]

    larger: Inputs = mapped(repeated, inputs)
    try:
        with InDouble():
            run_forward(model, *larger)
    except Exception:  # (the model's code may raise anything)
        return inputs
    return larger


def _bounded(sampler: Sampler, deadline: float) -> UpperBound:
    """The bound for one treatment of ``eps``."""
    scales, start = sampler.scales, time.thread_time()
    rows, found = np.zeros((0, scales.matrix.shape[1])), scales.units.shape[1]
    for number in range(1, ROUNDS + 1):
        rows = _sampled(sampler, rows, number, deadline)
        alive = csr_array(scales.matrix[sampler.alive])
        gram = (alive.T @ alive).toarray()
        # (what has no effect leaves rounding errors in its columns)
        values, table, size = _singular_values(rows * (gram.diagonal() != 0))
        used = int(np.count_nonzero(gram.diagonal()))
        rank = int((values >= ZERO).sum())
        # (log-scales that move no scalar: of each matrix its rows against its columns)
        idle = used - int(np.linalg.matrix_rank(gram, hermitian=True))
        # units that move nothing but scalars without effect are no null vectors here
        known = csr_array(scales.units[sampler.alive])
        moved = found if sampler.alive.all() else _rank((alive.T @ known).toarray())
        more = max(0, used - rank - idle - moved)
        if not more:
            break
    over = []
    if more:
        null = np.linalg.svd(table)[2][rank:].T / size[:, None]
        null = null / np.linalg.norm(null, axis=0)
        over = _left_over(scales, alive, known, null)
    kept, dropped = values[:rank], values[rank:]
    smallest, largest = float(min(kept, default=0.0)), float(max(dropped, default=0.0))
    dead = int((~sampler.alive[: scales.weights]).sum())
    words = (
        f"{found:,} found; at most {found + more:,} exist: {used:,} log-scales of rows and"
        f" columns, {idle:,} of them redundant, rank {rank:,} in {len(rows):,} samples at "
        + describe_inputs(*sampler.bench.inputs)
        + f"; singular values down to {smallest:.0e} of the largest"
        + (f", {largest:.0e} and below count as zero" if len(dropped) else "")
        + (f"; {dead:,} scalars without effect on the outputs removed" if dead else "")
        + ("; left over: " + ", ".join(entry["tensor"] for entry in over[:NAMED]) if over else "")
    )
    return UpperBound(
        at_most=found + more,
        found=found,
        closed=not more,
        evidence=words,
        log_scales=used,
        rank=rank,
        redundant=idle,
        samples=len(rows),
        smallest_kept=smallest,
        largest_dropped=largest,
        without_effect=dead,
        left_over=over,
        seconds=round(time.thread_time() - start, 3),
    )


def _sampled(sampler: Sampler, rows: np.ndarray, number: int, deadline: float) -> np.ndarray:
    """So many more samples that they can have full rank, ``number`` times as many in all."""
    start, begin = time.thread_time(), len(rows)
    blocks, count, runs, idle, empty = [rows], begin, 0, 0, 0
    wanted = number * int(rows.shape[1] * (1 + SHARE) + MARGIN)
    most = max(2, -(-(wanted - begin) // RUNS))
    while count < wanted or (idle < PATIENCE and runs < MOST_RUNS):
        known = int(sampler.alive.sum())
        block = sampler.draw(most)
        blocks.append(block)
        count, runs = count + len(block), runs + 1
        idle = idle + 1 if int(sampler.alive.sum()) == known else 0
        empty = 0 if len(block) else empty + 1
        if empty > 20 or (runs >= RUNS and 2 * sampler.wrong > sampler.taken):
            wrong = "its gradients are not those of its function (detached, or of its own backward"
            raise Untested(f"{wrong} pass)" if sampler.wrong else sampler.problem)
        each = (time.thread_time() - start) / (count - begin or 1)
        if runs > 3 and start + each * (wanted - begin) > deadline:
            raise Untested(f"{wanted:,} samples would take about {each * wanted:,.0f} seconds")
    return np.concatenate(blocks)


def _singular_values(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Relative singular values of even rows and columns, a triangle, and columns' norms."""
    # a column of small entries must not count as zero
    norms = np.linalg.norm(rows, axis=0)
    size = np.maximum(norms, EVEN * norms.max(initial=0) or 1.0)
    table = torch.from_numpy(rows / size)
    table /= table.norm(dim=1, keepdim=True).clamp_min(1e-300)
    triangle = torch.linalg.qr(table, mode="r").R
    values = torch.linalg.svdvals(triangle).numpy()
    return values / max(values.max(initial=0), 1e-300), triangle.numpy(), size


def _rank(table: np.ndarray) -> int:
    """Numerical rank of a matrix whose entries are of ordinary size."""
    return int(np.linalg.matrix_rank(table, tol=SILENT * max(table.shape))) if table.size else 0


def _left_over(
    scales: Family, alive: csr_array, known: csr_array, null: np.ndarray
) -> list[dict[str, Any]]:
    """Tensors, and their rows, that null vectors move beyond what any found unit moves.

    ``P^T P a`` is 0 in a tensor exactly where ``a`` moves none of its scalars. ``alive`` is ``P``
    for scalars with an effect, ``known`` has the log-scales of the same scalars by found units,
    ``null`` null vectors in columns.
    """
    # (less the nearest found unit to each null vector, by what both do to scalars)
    moves = (alive.T @ known).toarray()
    inverse = np.linalg.pinv((known.T @ known).toarray(), rtol=SILENT, hermitian=True)
    left = alive.T @ (alive @ null) - moves @ (inverse @ (moves.T @ null))
    result = []
    for tensor in scales.tensors:
        size = np.linalg.norm(left[tensor.columns], axis=1)
        if size.max(initial=0) > 1e-6:
            rows = np.flatnonzero(size > 1e-6 * size.max())
            named = rows[rows < tensor.rows].tolist()[:NAMED]
            result.append({"tensor": tensor.name, "size": float(size.max()), "rows": named})
    return sorted(result, key=lambda entry: -entry["size"])
