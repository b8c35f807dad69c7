"""Degeneracy: directions in parameter space that do not change the outputs,
counted, explained and named.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import nn

from pathspace.errors import AT_LEAST_1, SEED, PathspaceError, expect_arguments, expect_numbers
from pathspace.models.refusals import check_capturable
from pathspace.reduction import ReductionGraph, trace

from ..shared.tables import Table
from .feature_spaces import added_vectors, feature_spaces
from .gauge_directions import confirmed, count_broken, gauge_rank
from .jacobian_rows import JacobianRows, jacobian_rows
from .symmetries import Attribution, Symmetry, attribute
from .weight_norms import Straight

MAX_EXACT = 3000


@dataclass(frozen=True)
class DegenerateTensor:
    """The contribution of one parameter tensor to the degeneracy.

    Attributes:
        parameter: its name.
        size: number of scalars.
        dead: number of scalars on which no output depends, on these data.
        gauge: share of the gauge directions in this tensor; the shares of all tensors add
            up to the gauge dimension.
        unexplained: share of the unexplained directions; the shares add up to their number.
    """

    parameter: str
    size: int
    dead: int
    gauge: float | None
    unexplained: float | None


@dataclass(frozen=True)
class Degeneracy:
    """``p - rank(df/dtheta)`` on data, split by cause.

    Attributes:
        parameters: p, number of trainable scalars.
        outputs: number of output scalars on the data.
        rank: of the Jacobian of all outputs by all parameters.
        deficit: ``parameters - rank = dead + gauge + symmetric + undetermined + unexplained``.
        dead: number of parameters on which no output depends, on these data.
        gauge: independent rescaling directions beyond the dead ones (dead units have none left).
        symmetric: directions of other symmetries, listed by cause in ``symmetries``; 0 if
            the method is randomised.
        undetermined: directions that remain only because there are fewer outputs than parameters.
        unexplained: the rest: other symmetries, units that are linear on these data, coincidences.
        tolerance: singular values below ``tolerance * largest`` count as zero;
            columns have unit length.
        smallest_kept: smallest singular value counted, relative to the largest.
        largest_dropped: largest one not counted; the rank is reliable if the gap
            between the two is wide.
        method: ``"exact"`` or ``"randomised"`` (then ``rank`` is a lower bound and
            ``deficit`` an upper one).
        tensors: the parameters involved.
        symmetries: causes beside rescaling, see :mod:`pathspace.diagnostics.parameters.symmetries`.
            Permutations of units are symmetries, too, but discrete: they have no directions.
        notes: restrictions, one sentence each.
    """

    parameters: int
    outputs: int
    rank: int
    deficit: int
    dead: int
    gauge: int
    symmetric: int
    undetermined: int
    unexplained: int
    tolerance: float
    smallest_kept: float
    largest_dropped: float
    method: str
    tensors: Table[DegenerateTensor]
    symmetries: tuple[Symmetry, ...]
    notes: tuple[str, ...]

    @property
    def bounded_by_sample(self) -> bool:
        """Whether there are too few outputs to determine all parameters:
        ``deficit`` is then an upper bound.
        """
        return self.undetermined > 0

    @property
    def clear(self) -> bool:
        """Whether the counted and the dropped singular values differ by a
        factor of at least 1000.
        """
        return self.largest_dropped * 1000 < self.smallest_kept


def degeneracy(
    model: nn.Module,
    *inputs: Any,
    kwargs: Mapping[str, Any] | None = None,
    tolerance: float = 1e-9,
    graph: ReductionGraph | None = None,
    max_rows: int = 2000,
    seed: int = 0,
    max_exact: int = MAX_EXACT,
) -> Degeneracy:
    """Count and explain the directions of parameter space that do not
    change any output on the data.

    The Jacobian of all outputs with respect to all parameters is computed in float64; dead columns
    are removed and the others scaled to unit length. Rescaling directions ``dw_e = w_e (phi(head e)
    - phi(tail e))`` come from the reduction graph, and count only if the Jacobian confirms them. If
    there are more outputs than parameters, random combinations of outputs are used, which have the
    same rank. Above ``max_exact`` parameters the columns are hashed with random signs, and at most
    ``max_rows`` combinations are used: the rank is then a lower bound.

    Args:
        model: any module, in its current mode; a float64 copy is used.
        *inputs: the data, one batch.
        kwargs: keyword inputs.
        tolerance: limit for zero singular values, relative to the largest.
        graph: the model's reduction graph; by default it is traced here.
        max_rows: largest number of rows for large models.
        seed: seed of random combinations.
        max_exact: largest number of parameters for the whole Jacobian; the cost of its
            singular values is cubic.

    Returns:
        The number of directions of each cause, with the parameters involved.

    Raises:
        InputError: the model has no trainable parameters, or its outputs depend on none.
        UnsupportedError: derivatives are not finite.
        CaptureError: the model does not run in float64.

    Example:
        >>> import torch
        >>> _ = torch.manual_seed(0)
        >>> model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))
        >>> found = degeneracy(model, torch.randn(200, 3))
        >>> (
        ...     found.deficit,
        ...     found.gauge,
        ...     found.dead,
        ...     found.unexplained,
        ... )  # one direction per hidden unit
        (4, 4, 0, 0)

    Reference:
        Evolution of neural network, sections 3.2 and 3.3. The definition there, by the scalar loss,
        is vacuous; this one uses the outputs.
    """
    expect_arguments("degeneracy", model=model)
    expect_arguments("degeneracy", or_none=True, graph=graph)
    expect_numbers("degeneracy", "a number of at least 0", tolerance=tolerance)
    expect_numbers("degeneracy", SEED, seed=seed, max_exact=max_exact)
    expect_numbers("degeneracy", AT_LEAST_1, max_rows=max_rows)
    check_capturable(model)
    notes: list[str] = []
    graph = _traced(model, inputs, kwargs, notes) if graph is None else graph
    jacobian = jacobian_rows(model, inputs, kwargs, graph, max_rows, max_exact, seed)
    explained = (_exactly if jacobian.exact else _by_samples)(jacobian, graph, tolerance, notes)
    rank, live, total = explained.rank, jacobian.live, len(jacobian.squares)
    symmetric = sum(each.directions for each in explained.symmetries)
    determined = int(live.sum()) - explained.gauge
    needed = determined - rank - symmetric
    lacking = determined - symmetric - jacobian.outputs
    undetermined = min(needed, max(0, lacking)) if needed > 0 else 0
    rows = len(jacobian.matrix)
    if not jacobian.exact and rows < jacobian.outputs and rank == rows:
        undetermined = needed
        notes.append(
            f"All {rows} combinations of outputs were independent, so the rank may be larger; raise"
            " max_rows."
        )
    if undetermined:
        notes.append(
            f"The deficit is bounded by the sample: its {jacobian.outputs} outputs cannot determine"
            f" {determined} parameters, so more data would lower it."
        )
    return Degeneracy(
        total,
        jacobian.outputs,
        rank,
        total - rank,
        int((~live).sum()),
        explained.gauge,
        symmetric,
        undetermined,
        max(0, needed - undetermined),
        tolerance,
        float(explained.relative[:rank].min(initial=1.0)),
        float(explained.relative[rank:].max(initial=0.0)),
        "exact" if jacobian.exact else "randomised",
        _by_parameter(jacobian, explained, notes),
        explained.symmetries,
        tuple(notes),
    )


@dataclass(frozen=True)
class _Explained:
    """The rank, and the causes of directions that lower it.

    Attributes:
        relative: singular values relative to the largest.
        rank: how many of them are not zero.
        gauge: number of gauge directions.
        symmetries: other causes.
        gauge_share: how much of the gauge directions lies in every scalar.
        rest_share: the same of unexplained directions.
    """

    relative: np.ndarray
    rank: int
    gauge: int = 0
    symmetries: tuple[Symmetry, ...] = ()
    gauge_share: np.ndarray | None = None
    rest_share: np.ndarray | None = None


def _exactly(
    jacobian: JacobianRows, graph: ReductionGraph | None, tolerance: float, notes: list[str]
) -> _Explained:
    """Explain every null vector of the Jacobian."""
    live, directions = jacobian.live, jacobian.directions
    lengths = np.sqrt(np.where(live, jacobian.squares, 1.0))
    scaled: Any = jacobian.matrix[:, live] / lengths[live]
    # the triangular factor has the same null space, and at most as many rows as columns
    scaled = np.linalg.qr(scaled, mode="r") if len(scaled) > scaled.shape[1] else scaled
    _, singular, right = np.linalg.svd(scaled, full_matrices=True)
    relative, rank = _relative(singular, tolerance)
    basis = np.zeros((int(live.sum()), 0))
    if directions is not None:
        limit = tolerance * singular.max(initial=1.0)
        basis = confirmed(directions, live, lengths, scaled, limit, notes)
    gauge = basis.shape[1]
    gauge_share = None if directions is None else _spread(basis, live)
    straight = Straight.of(jacobian.parameters, jacobian.starts, live)
    null, basis = (straight.turned(vectors, live, lengths) for vectors in (right[rank:].T, basis))
    work = Attribution(null, basis, live, lengths)
    # all outputs are independent: directions that they do not determine have no other cause
    if rank < jacobian.outputs:
        spaces = () if graph is None else feature_spaces(graph.captured)
        added = set() if graph is None else added_vectors(graph.captured)
        attribute(jacobian.twin, straight.parameters, jacobian.starts, spaces, added, work)
    rest_share = None if directions is None else _spread(work.unexplained[live], live)
    return _Explained(relative, rank, gauge, tuple(work.found), gauge_share, rest_share)


def _by_samples(
    jacobian: JacobianRows, graph: ReductionGraph | None, tolerance: float, notes: list[str]
) -> _Explained:
    """Count the gauge directions that random combinations do not refute."""
    relative, rank = _relative(np.linalg.svd(jacobian.matrix, compute_uv=False), tolerance)
    if graph is None or jacobian.directions is None or jacobian.tested is None:
        return _Explained(relative, rank)
    broken = count_broken(jacobian.tested, jacobian.moved, np.sqrt(jacobian.squares), notes)
    gauge = max(0, gauge_rank(graph, jacobian.directions, jacobian.live) - broken)
    return _Explained(relative, rank, gauge)


def _relative(singular: np.ndarray, tolerance: float) -> tuple[np.ndarray, int]:
    relative = singular / singular.max(initial=1e-300)
    return relative, int((relative > tolerance).sum())


def _by_parameter(jacobian: JacobianRows, explained: _Explained, notes: list[str]) -> Table[Any]:
    rows, dead = [], ~jacobian.live
    for name, parameter in jacobian.parameters.items():
        first, size = jacobian.starts[name], parameter.numel()
        part = slice(first, first + size)
        shares = (
            None if share is None else float(share[part].sum())
            for share in (explained.gauge_share, explained.rest_share)
        )
        rows.append(DegenerateTensor(name, size, int(dead[part].sum()), *shares))
    return Table("degeneracy by parameter", tuple(rows), tuple(notes))


def _traced(model: nn.Module, inputs: Any, kwargs: Any, notes: list[str]) -> ReductionGraph | None:
    try:
        return trace(model, *inputs, kwargs=kwargs)
    except PathspaceError as error:
        notes.append(f"Gauge directions are not known, because the model was not captured: {error}")
        return None


def _spread(basis: np.ndarray, live: np.ndarray) -> np.ndarray:
    share = np.zeros(len(live))
    share[live] = (basis**2).sum(1)
    return share
