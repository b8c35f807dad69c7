"""Degeneracy: directions in parameter space that do not change the outputs,
counted, explained and named.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy.sparse import csr_array
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from pathspace import ReductionGraph, trace
from pathspace.checkpointing import never_recomputed
from pathspace.diagnostics.feature_spaces import added_vectors, feature_spaces
from pathspace.diagnostics.gauge_directions import (
    confirmed,
    count_broken,
    gauge_directions,
    gauge_rank,
    hashing,
    random_combinations,
)
from pathspace.diagnostics.model_calls import differentiating, float64_errors_explained
from pathspace.diagnostics.real_tensors import in_float64, is_real
from pathspace.diagnostics.symmetries import Attribution, Symmetry, attribute
from pathspace.diagnostics.tables import Table
from pathspace.diagnostics.unchanged import unchanged
from pathspace.diagnostics.weight_norms import Straight
from pathspace.errors import (
    AT_LEAST_1,
    SEED,
    InputError,
    PathspaceError,
    UnsupportedError,
    expect_arguments,
    expect_numbers,
)
from pathspace.functional_call import evaluate
from pathspace.inputs import arranged, check_inputs
from pathspace.refusals import check_capturable
from pathspace.safe_deepcopy import safe_deepcopy

MAX_EXACT = 3000
# number of rows of the Jacobian that are computed together, and of their scalars
_ROWS, _SCALARS = 32, 2**24


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
        symmetries: causes beside rescaling, see :mod:`pathspace.diagnostics.symmetries`.
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
    twin = safe_deepcopy(model).double()
    args, named = tree_map(in_float64, arranged(model, inputs, kwargs))
    check_inputs(model, args, named)
    parameters: dict[str, Tensor] = {
        name: value for name, value in twin.named_parameters() if value.requires_grad
    }
    if not parameters:
        raise InputError(
            f"There are no trainable parameters in {type(model).__name__} to count directions of."
        )
    with unchanged(twin), never_recomputed(), torch.enable_grad():
        with float64_errors_explained(model):
            result = evaluate(twin, parameters, args, named)
        parts = [v for v in tree_leaves(result) if is_real(v) and v.requires_grad]
        if not parts:
            raise InputError(
                f"No output of {type(model).__name__} depends on a trainable parameter, expected"
                " one."
            )
        outputs = torch.cat([value.reshape(-1) for value in parts])
        starts = np.concatenate(
            [[0], np.cumsum([value.numel() for value in parameters.values()])]
        ).astype(int)
        total = int(starts[-1])
        places = dict(zip(parameters, starts[:-1], strict=True))
        directions = None if graph is None else gauge_directions(graph, places, total)
        exact = total <= max_exact
        rows = min(outputs.numel(), total + 10 if exact else max_rows)
        sketch = None if exact else 2 * rows + 50
        tested = (
            None
            if exact or directions is None
            else random_combinations(directions, 2 * rows + 50, seed)
        )
        with differentiating(model):
            matrix, squares, moved = _rows(
                outputs, list(parameters.values()), rows, sketch, tested, seed
            )
    if not np.isfinite(matrix).all():
        raise UnsupportedError(
            f"Derivatives of {type(model).__name__} are not finite on these data, so they have no"
            " rank; check for an overflow, or for a square root, norm or logarithm of zero."
        )
    live = squares > 1e-28 * squares.max()
    dead = int((~live).sum())
    if exact:
        lengths = np.sqrt(np.where(live, squares, 1.0))
        scaled = matrix[:, live] / lengths[live]
        # the triangular factor has the same null space, and at most as many rows as columns
        scaled = np.linalg.qr(scaled, mode="r") if len(scaled) > scaled.shape[1] else scaled
        _, singular, right = np.linalg.svd(scaled, full_matrices=True)
    else:
        singular = np.linalg.svd(matrix, compute_uv=False)
    relative = singular / singular.max(initial=1e-300)
    rank = int((relative > tolerance).sum())
    free = int(live.sum()) - rank
    gauge, gauge_share, rest_share = 0, None, None
    found: list[Symmetry] = []
    if exact:
        basis = np.zeros((int(live.sum()), 0))
        if directions is not None:
            basis = confirmed(
                directions, live, lengths, scaled, tolerance * singular.max(initial=1.0), notes
            )
            gauge, gauge_share = basis.shape[1], _spread(basis, live, total)
        straight = Straight.of(parameters, places, live)
        null, basis = (
            straight.turned(vectors, live, lengths) for vectors in (right[rank:].T, basis)
        )
        work = Attribution(null, basis, live, lengths)
        # all outputs are independent: directions that they do not determine have no other cause
        if rank < outputs.numel():
            spaces = () if graph is None else feature_spaces(graph.captured)
            added = set() if graph is None else added_vectors(graph.captured)
            attribute(twin, straight.parameters, places, spaces, added, work)
        found = work.found
        known = directions is not None
        rest_share = _spread(work.unexplained[live], live, total) if known else None
    elif graph is not None and directions is not None and tested is not None:
        broken = count_broken(tested, moved, np.sqrt(squares), notes)
        gauge = max(0, gauge_rank(graph, directions, live) - broken)
    symmetric = sum(each.directions for each in found)
    needed = free - gauge - symmetric
    lacking = int(live.sum()) - gauge - symmetric - outputs.numel()
    undetermined = min(needed, max(0, lacking)) if needed > 0 else 0
    if not exact and rows < outputs.numel() and rank == rows:
        undetermined = needed
        notes.append(
            f"All {rows} combinations of outputs were independent, so the rank may be larger; raise"
            " max_rows."
        )
    if undetermined:
        notes.append(
            f"The deficit is bounded by the sample: its {outputs.numel()} outputs cannot determine "
            f"{int(live.sum()) - gauge} parameters, so more data would lower it."
        )
    table = []
    for name, (a, b) in zip(parameters, itertools.pairwise(starts), strict=True):
        shares = (
            None if share is None else float(share[a:b].sum())
            for share in (gauge_share, rest_share)
        )
        table.append(DegenerateTensor(name, int(b - a), int((~live[a:b]).sum()), *shares))
    kept_values, dropped = relative[:rank], relative[rank:]
    return Degeneracy(
        total,
        outputs.numel(),
        rank,
        total - rank,
        dead,
        gauge,
        symmetric,
        undetermined,
        max(0, needed - undetermined),
        tolerance,
        float(kept_values.min(initial=1.0)),
        float(dropped.max(initial=0.0)),
        "exact" if exact else "randomised",
        Table("degeneracy by parameter", tuple(table), tuple(notes)),
        tuple(found),
        tuple(notes),
    )


def _traced(model: nn.Module, inputs: Any, kwargs: Any, notes: list[str]) -> ReductionGraph | None:
    try:
        return trace(model, *inputs, kwargs=kwargs)
    except PathspaceError as error:
        notes.append(f"Gauge directions are not known, because the model was not captured: {error}")
        return None


def _rows(
    outputs: Tensor,
    parameters: list[Tensor],
    count: int,
    sketch: int | None,
    tested: csr_array | None,
    seed: int,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """``count`` rows of the Jacobian (random combinations if fewer than all), and the
    squared length of its columns.

    The third array is their product with the tested directions, which is computed
    before columns are hashed.
    """
    generator = torch.Generator().manual_seed(seed)
    total = sum(parameter.numel() for parameter in parameters)
    mixed = count < outputs.numel()
    hashed = None if sketch is None else hashing(total, sketch, seed)
    matrix, squares = np.zeros((count, sketch or total)), np.zeros(total)
    moved = np.zeros((count, 0 if tested is None else tested.shape[1]))
    together = max(1, min(_ROWS, _SCALARS // total))
    for first in range(0, count, together):
        size = min(together, count - first)
        if mixed:
            cotangents = torch.randn(
                (size, *outputs.shape), generator=generator, dtype=outputs.dtype
            ).to(outputs)
        else:
            cotangents = torch.eye(
                size, outputs.numel(), dtype=outputs.dtype, device=outputs.device
            )
            cotangents = cotangents.roll(first, 1)
        rows = _pulled_back(outputs, parameters, cotangents)
        squares += (rows**2).sum(0)
        if tested is not None:
            moved[first : first + size] = rows @ tested
        matrix[first : first + size] = rows if hashed is None else rows @ hashed
    return matrix, squares, moved


def _pulled_back(outputs: Tensor, parameters: list[Tensor], cotangents: Tensor) -> np.ndarray:
    """Rows of the Jacobian: for each cotangent, the gradients with respect to
    all parameters in one row.
    """

    def gradients(cotangent: Tensor, together: bool) -> Tensor:
        found = torch.autograd.grad(
            outputs,
            parameters,
            cotangent,
            retain_graph=True,
            allow_unused=True,
            is_grads_batched=together,
        )
        lead = cotangent.shape[:1] if together else ()
        parts = (
            outputs.new_zeros((*lead, p.numel())) if g is None else g.reshape(*lead, -1)
            for g, p in zip(found, parameters, strict=True)
        )
        return torch.cat([part.double().cpu() for part in parts], -1)

    try:
        with warnings.catch_warnings(action="ignore"):
            return np.asarray(gradients(cotangents, True).numpy())
    except RuntimeError:
        # some derivatives cannot be batched
        return np.asarray(torch.stack([gradients(each, False) for each in cotangents]).numpy())


def _spread(basis: np.ndarray, live: np.ndarray, total: int) -> np.ndarray:
    share = np.zeros(total)
    share[live] = (basis**2).sum(1)
    return share
