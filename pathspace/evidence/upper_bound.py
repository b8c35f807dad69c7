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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import torch
from scipy.sparse import csr_array, hstack
from torch import Tensor, nn

from ..capture.refusals import no_derivative
from ..capture.sizes import Inputs
from ..models.inputs import describe_inputs
from ..models.modes import NoEps, precision, without_eps
from ..models.nested import leaves
from ..models.running import LARGE, cast
from ..models.stand_in import repeatable, stand_in
from ..reduction import ReductionGraph
from .logscales import Family, family
from .null_space import pivots, smallest
from .sample_sizes import sample_sizes
from .samples import AT_ONCE, NOTHING, Sampler
from .unexplained_scales import NAMED, unexplained_tensors

# limits on the number of log-scales beside the known null vectors: for any factorisation
# (MOST_SCALES), for all singular values (MOST_VALUES)
MOST_SCALES = 20_000
# above FAR * MOST_SCALES, scalars without effect are not even searched for
FAR = 2
MOST_VALUES = 1_500
# numbers of singular values below the limit: enough to ask for more samples, and counted
# at most in a large matrix
ENOUGH, MOST_ZERO = 24, 384
# processor time of the samples
MOST_SECONDS = 600.0
# singular values below this, relative to the largest, count as zero: errors make the
# bound larger, never smaller
ZERO = 1e-8
# smallest column norm, relative to the largest, that is normalised; rounding
# errors must be much smaller
EVEN = 1e-5
# samples beyond the number of columns; in a large matrix as a share of it, because a
# square one is ill-conditioned
MARGIN, SHARE = 12, 0.25
ROUNDS = 3
# smallest number of draws of weights and inputs
DRAWS = 12


@dataclass(frozen=True)
class UpperBound:
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
        without_effect: number of scalars whose derivative is zero at every sample,
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

    def to_dict(self) -> dict[str, Any]:
        """All attributes as plain Python values."""
        return asdict(self)


def upper_bound(
    graph: ReductionGraph,
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    seed: int = 0,
    most_seconds: float | None = None,
) -> UpperBound:
    """Bound the number of scale symmetries of a model from above, with ``eps =
    0`` in its normalisations.

    Args:
        graph: its reduction graph.
        model: a copy, in float64 if it runs so; it is not changed.
        args: example inputs.
        kwargs: example inputs by keyword.
        seed: seed of inputs, weights and cotangents.
        most_seconds: limit on the processor time of the samples (600 by default).

    Returns:
        The bound, or the reason why there is none.

    Example:
        >>> import torch, pathspace as ps
        >>> model = torch.nn.Sequential(
        ...     torch.nn.Linear(2, 3), torch.nn.ReLU(), torch.nn.Linear(3, 1)
        ... ).double()
        >>> x = torch.randn(4, 2).double()
        >>> bound = upper_bound(ps.trace(model, x), model, (x,), {})
        >>> bound.found, bound.at_most
        (3, 3)
    """
    start = time.thread_time()
    most_seconds = MOST_SECONDS if most_seconds is None else most_seconds
    if graph.num_weights > LARGE:
        reason = f"it needs a copy in float64, which is limited to {LARGE:,} weights"
        return UpperBound(None, graph.num_units, None, f"not attempted: {reason}")
    if precision(model) != torch.float64:
        # a model with casts to a lower precision runs in float64 if they are ignored
        written = graph.captured.written.values()
        model = repeatable(stand_in(model, share_tensors=False).double(), written)
        args, kwargs = cast(args, torch.float64), cast(kwargs, torch.float64)
    scales = family(graph, model, statistics=not model.training)
    if not scales.size:
        return UpperBound(
            None, graph.num_units, None, "not attempted: the model has no floating-point parameter"
        )
    try:
        everything = [torch.ones(entry.shape, dtype=torch.bool) for entry in scales.entries]
        known = pivots(csr_array(hstack([scales.units, scales.exchanged(everything)])))
        _expect_few(scales.size, len(known), FAR * MOST_SCALES)
    except (_Refused, ValueError) as refusal:
        return UpperBound(None, graph.num_units, None, f"not attempted: {refusal}")
    sizes = list(sample_sizes(model, args, kwargs))

    def bounded(units: csr_array, limit: float) -> tuple[UpperBound, Sampler]:
        begin = time.thread_time()
        sampler = _sampler(
            lambda inputs: Sampler(graph, scales, model, inputs, seed), sizes, units, limit / 4
        )
        try:
            bound = _bounded(scales, units, sampler, limit)
            while not bound.closed and sampler.surprised and time.thread_time() - begin < limit / 2:
                sampler.surprised = False
                sampler.look(limit / 4)
                bound = _bounded(scales, units, sampler, limit)
        except _Refused as refusal:
            bound = UpperBound(None, units.shape[1], None, f"not attempted: {refusal}")
        return replace(bound, seconds=round(time.thread_time() - begin, 3)), sampler

    with without_eps(model, graph.folded_eps):
        bound, sampler = bounded(scales.units, most_seconds)
    if bound.at_most is None:
        return bound
    rows, sizes = sampler.rows, [sampler.examples]
    spent = time.thread_time() - start
    exact, as_it_stands = graph.num_exact_units, Sampler(graph, scales, model, sizes[0], seed)
    with NoEps(None):
        as_it_stands.whole()
    same = all(torch.equal(one, other) for one, other in zip(rows, as_it_stands.rows, strict=False))
    if exact == graph.num_units and same:
        # without an eps both models, and both bounds, are the same
        return replace(bound, exact_found=exact, exact_at_most=bound.at_most)
    if spent > most_seconds / 2:
        return replace(bound, exact_found=exact)
    with NoEps(None):
        held, _ = bounded(csr_array(scales.units @ graph.exact), most_seconds - spent)
    words = bound.evidence
    if held.at_most is not None:
        words += f"; with every eps unchanged {exact:,} found, at most {held.at_most:,}"
    seconds = round(time.thread_time() - start, 3)
    return replace(
        bound, exact_found=exact, exact_at_most=held.at_most, evidence=words, seconds=seconds
    )


def _sampler(
    make: Callable[[Sequence[Inputs]], Sampler],
    sizes: Sequence[Sequence[Inputs]],
    units: csr_array,
    seconds: float,
) -> Sampler:
    """A sampler with its first samples, at the smallest inputs that show as many
    effects as the given inputs.
    """
    given = sizes[-1][0]
    for examples in sizes:
        sampler = make(examples)
        try:
            sampler.look(seconds)
            cut = _numbers(examples[0]) < _numbers(given)
            if (
                sampler.rows
                and not (cut and not sampler.covers(given))
                and not sampler.misled(units)
            ):
                break
        except Exception as error:
            # the model does not run at these sizes, or its own backward pass raises
            sampler.problem = f"the model cannot be differentiated ({no_derivative(error)})"
    return sampler


def _numbers(inputs: Inputs) -> int:
    """Number of elements of the inputs."""
    return sum(leaf.numel() for leaf in leaves(inputs) if isinstance(leaf, Tensor))


class _Refused(Exception):
    """The reason why nothing is tested."""


def _expect_few(width: int, known: int, most: int) -> None:
    if width - known > most:
        raise _Refused(
            f"{width:,} rows and columns less {known:,} known, and a factorisation is made for at"
            f" most {MOST_SCALES:,}; test parts of the model"
        )


def _bounded(scales: Family, units: csr_array, sampler: Sampler, most_seconds: float) -> UpperBound:
    """The bound for one treatment of ``eps``."""
    start = time.thread_time()
    try:
        if not sampler.rows:
            raise _Refused(
                sampler.problem or "no output depends on the weights by a finite derivative"
            )
        alive = [held > NOTHING for held in sampler.largest]
        used = scales.sums([mask.double() for mask in alive]) > 0
        column = torch.stack(sampler.sizes).square().mean(0).sqrt().clamp_min(1e-300)
        known = csr_array(hstack([units, scales.exchanged(alive)]))[used.numpy()]
        pivot = pivots(known)
        width = int(used.sum())
        rest = torch.from_numpy(np.setdiff1d(np.arange(width), pivot))
        _expect_few(width, len(pivot), MOST_SCALES)
        if sampler.misled(units):
            raise _Refused(
                "its gradients are not those of its function (detached, or of its own backward"
                " pass)"
            )
        places = torch.nonzero(used)[:, 0][rest]
        rows = _rows(
            sampler, column, used, places, units, most_seconds - (time.thread_time() - start)
        )
        for number in range(ROUNDS):
            last = number == ROUNDS - 1 or time.thread_time() - start > most_seconds / 2
            values, vectors = _smallest(rows, sampler.seed, last)
            if last or not bool((values < ZERO).any()):
                break
            more = _rows(
                sampler, column, used, places, units, most_seconds, max(MARGIN, len(rows) // 2)
            )
            rows = torch.cat([rows, more])
    except (_Refused, ValueError) as error:
        raise _Refused(str(error)) from None
    except Exception as error:
        raise _Refused(f"the model cannot be differentiated ({no_derivative(error)})") from None
    free = values < ZERO
    independent = len(pivots(units))
    at_most, found = independent + int(free.sum()), units.shape[1]
    over = []
    if bool(free.any()):
        more = torch.zeros(width, int(free.sum()), dtype=torch.float64)
        more[rest] = vectors[:, free] / column[places][:, None]
        over = unexplained_tensors(scales, more, used, units, alive)
    rank = len(rest) - int(free.sum())
    dead = sum(int((~mask).sum()) for mask in alive)
    redundant = known.shape[1] - found
    words = f"{found:,} found; at most {at_most:,} exist"
    words += (
        f": {width:,} log-scales of rows and columns, {redundant:,} of them redundant, rank"
        f" {rank:,} in "
    )
    words += f"{len(rows) + len(sampler.rows):,} samples"
    smallest_kept = float(values[~free].min()) if bool((~free).any()) else 0.0
    dropped = float(values[free].max()) if bool(free.any()) else 0.0
    words += " at " + " and ".join(describe_inputs(*inputs) for inputs in sampler.examples)
    words += (
        f"; singular values down to {smallest_kept:.0e} of the largest beside the known null"
        " vectors"
    )
    words += f", {dropped:.0e} and below count as zero" if bool(free.any()) else ""
    words += f"; {dead:,} scalars without effect on the outputs removed" if dead else ""
    if over:
        words += "; left over: " + ", ".join(entry["tensor"] for entry in over[:NAMED])
    return UpperBound(
        at_most, found, at_most == found, words, width, rank, redundant,
        len(rows) + len(sampler.rows), smallest_kept, dropped, dead, over,
    )  # fmt: skip


def _rows(
    sampler: Sampler,
    column: Tensor,
    used: Tensor,
    places: Tensor,
    units: csr_array,
    most_seconds: float,
    count: int | None = None,
) -> Tensor:
    """Enough samples of the derivatives with respect to the log-scales that are not pivots."""
    if count is None:
        count = len(places) + max(
            MARGIN, int(SHARE * len(places)) if len(places) > MOST_VALUES else 0
        )
    found, blocks, idle = 0, [torch.zeros(0, len(places), dtype=torch.float64)], 0
    start, most = time.thread_time(), max(2, min(AT_ONCE, count // DRAWS))
    while found < count:
        block = sampler.batch(column, used, units, most)[:, places]
        blocks.append(block[: count - found])
        found += len(blocks[-1])
        idle = 0 if len(block) else idle + 1
        if idle > 20:
            if sampler.quick:
                # whole samples come with upper bounds of their derivatives
                sampler.quick, idle = False, 0
                continue
            raise _Refused("its derivatives are not finite, or are rounding errors")
        passed = time.thread_time() - start
        if found and len(blocks) > 3 and passed / found * count > most_seconds:
            raise _Refused(
                f"{count:,} samples would take about {passed / found * count:,.0f} seconds"
            )
    return torch.cat(blocks)


def _smallest(rows: Tensor, seed: int, last: bool) -> tuple[Tensor, Tensor]:
    """The smallest singular values (or all, if that is fast) relative to the
    largest, and their vectors.

    Args:
        rows: samples.
        seed: seed of the first vectors of an iteration.
        last: whether all that count as zero are needed, or a few.

    Raises:
        ValueError: too many values count as zero.
    """
    count = rows.shape[1]
    if not count:
        return torch.ones(0, dtype=torch.float64), torch.zeros(0, 0, dtype=torch.float64)
    # normalise columns, so that a column of small entries does not count as zero
    size = rows.norm(dim=0)
    size = size.clamp_min(EVEN * float(size.max()) or 1.0)
    triangle = rows / size
    triangle /= triangle.norm(dim=1, keepdim=True).clamp_min(1e-300)
    triangle = torch.linalg.qr(triangle, mode="r").R
    if count <= MOST_VALUES:
        _, values, vectors = torch.linalg.svd(triangle)
        values, vectors = values / values[0].clamp_min(1e-300), vectors.T
    else:
        values, vectors = smallest(triangle, ZERO, seed, ENOUGH, MOST_ZERO if last else ENOUGH)
        if last and len(values) < count and not bool((values > ZERO).any()):
            raise ValueError(
                f"more than {len(values)} of {count:,} singular values are next to zero"
            )
    return values, vectors / size[:, None]
