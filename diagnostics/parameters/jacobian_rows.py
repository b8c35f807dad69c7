"""Rows of the Jacobian of a model's outputs with respect to its parameters, in float64."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy.sparse import csr_array
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from pathspace.errors import InputError, UnsupportedError
from pathspace.models.copies import safe_deepcopy
from pathspace.models.inputs import arranged, check_inputs
from pathspace.models.running import evaluate
from pathspace.reduction import ReductionGraph

from ..shared.model_calls import differentiating, float64_errors_explained
from ..shared.real_tensors import in_float64, is_real
from ..shared.recomputation import without_recomputation
from ..shared.unchanged import unchanged
from .gauge_directions import gauge_directions, hashing, random_combinations

# number of rows of the Jacobian that are computed together, and of their scalars
_ROWS, _SCALARS = 32, 2**24


@dataclass(frozen=True)
class JacobianRows:
    """Rows of the Jacobian of all outputs, one column per scalar of the parameters.

    Attributes:
        twin: the float64 copy of the model that was run.
        parameters: name -> trainable parameter of the copy.
        starts: name -> its first column.
        outputs: number of scalars among the outputs.
        matrix: the rows; random combinations of rows if there are fewer than outputs. Of large
            models, the columns are hashed with random signs.
        exact: whether no column is hashed.
        squares: squared length of every column, before hashing.
        directions: the gauge directions as columns; nothing where there is no graph.
        tested: random combinations of them, where columns are hashed.
        moved: the rows times these combinations.
    """

    twin: nn.Module
    parameters: Mapping[str, Tensor]
    starts: Mapping[str, int]
    outputs: int
    matrix: np.ndarray
    exact: bool
    squares: np.ndarray
    directions: csr_array | None
    tested: csr_array | None
    moved: np.ndarray

    @property
    def live(self) -> np.ndarray:
        """Which columns are not zero."""
        found: np.ndarray = self.squares > 1e-28 * self.squares.max()
        return found


def jacobian_rows(
    model: nn.Module,
    inputs: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None,
    graph: ReductionGraph | None,
    max_rows: int,
    max_exact: int,
    seed: int,
) -> JacobianRows:
    """Compute rows of the Jacobian: as many as there are outputs, or enough for its rank.

    Args:
        model: any module, in its current mode; a float64 copy is used.
        inputs: the data, one batch.
        kwargs: keyword inputs.
        graph: the model's reduction graph, if it has one.
        max_rows: largest number of rows for large models.
        max_exact: largest number of parameters for whole columns.
        seed: seed of random combinations.

    Raises:
        InputError: the model has no trainable parameters, or its outputs depend on none.
        UnsupportedError: derivatives are not finite.
        CaptureError: the model does not run in float64.
    """
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
    ends = np.cumsum([value.numel() for value in parameters.values()]).tolist()
    starts = dict(zip(parameters, [0, *ends[:-1]], strict=True))
    total = ends[-1]
    with unchanged(twin), without_recomputation(), torch.enable_grad():
        with float64_errors_explained(model):
            result = evaluate(twin, parameters, args, named)
        parts = [v for v in tree_leaves(result) if is_real(v) and v.requires_grad]
        if not parts:
            raise InputError(
                f"No output of {type(model).__name__} depends on a trainable parameter, expected"
                " one."
            )
        outputs = torch.cat([value.reshape(-1) for value in parts])
        exact = total <= max_exact
        count = min(outputs.numel(), total + 10 if exact else max_rows)
        sketch = None if exact else 2 * count + 50
        directions = None if graph is None else gauge_directions(graph, starts, total)
        tested = None
        if sketch is not None and directions is not None:
            tested = random_combinations(directions, sketch, seed)
        with differentiating(model):
            matrix, squares, moved = _rows(
                outputs, list(parameters.values()), count, sketch, tested, seed
            )
    if not np.isfinite(matrix).all():
        raise UnsupportedError(
            f"Derivatives of {type(model).__name__} are not finite on these data, so they have no"
            " rank; check for an overflow, or for a square root, norm or logarithm of zero."
        )
    return JacobianRows(
        twin,
        parameters,
        starts,
        outputs.numel(),
        matrix,
        exact,
        squares,
        directions,
        tested,
        moved,
    )


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
