"""One G-SGD step by brute force: gradient descent on the values of basis paths,
differentiated through w(v).

Nothing of the closed form is used. The basis paths of two spanning trees are written down as
integer rows, the weights outside `T_out` are expressed by path values with the exact inverse of the
(unimodular) square of rows over those weights, `|w| = exp(inverse (log|v| - fixed))`, signs by
parity, and autograd takes dL/dv through that map and through the real model. Then `v <- v - lr
dL/dv` and back to weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn

from oracles.exact import integer_inverse

Edge = tuple[int, int]
"""Tail and head unit of a scalar weight; 0 is the root."""
Step = tuple[int, bool]


def signed_walk(
    unit: int, edges: Sequence[Edge], tree: dict[int, Step], towards_root: bool
) -> dict[int, int]:
    """The walk between `unit` and the root along a tree of a directed graph, as signed edge counts.

    `tree[v] = (edge, forward)`. For `T_in` (walk root -> unit) a forward edge enters v; for
    `T_out` (`towards_root`, walk unit -> root) a forward edge leaves v; the others are
    walked backwards and count -1.
    """
    counts: dict[int, int] = {}
    for _ in range(len(tree) + 1):
        if unit == 0:
            return counts
        edge, forward = tree[unit]
        tail, head = edges[edge]
        if (tail if towards_root == forward else head) != unit:
            raise ValueError(
                f"tree edge {edge} = {edges[edge]} does not touch unit {unit} as stated"
            )
        counts[edge] = counts.get(edge, 0) + (1 if forward else -1)
        unit = head if towards_root == forward else tail
    raise ValueError("the tree has a cycle")


def ends(edges: Sequence[Edge], units: int) -> tuple[np.ndarray, np.ndarray]:
    """Tails and heads of a directed graph as rows over the units, `(m, H)`
    each; the root's are zero.
    """
    rows = np.eye(units + 1, dtype=np.int64)[:, 1:]
    tails, heads = np.array(edges, dtype=np.int64).reshape(-1, 2).T
    return rows[tails], rows[heads]


def basis_rows(
    tails: np.ndarray, heads: np.ndarray, tree_in: Sequence[int], tree_out: Sequence[int]
) -> np.ndarray:
    """The integer rows of the two-tree basis: distinct non-zero p_v by unit, then
    P(e) for e in neither tree.

    `pre(v)` is the only vector on `T_in` with boundary +v, `suf(v)` the only one on `T_out`
    with boundary -v: both are rows of the exact inverse of the tree's square of the incidence
    matrix, whichever way its edges point. Nothing changes where an end of an edge is an
    integer combination of units.
    """
    (edges, units), every = tails.shape, {*tree_in, *tree_out}
    prefix, suffix = (np.zeros((units, edges), dtype=np.int64) for _ in range(2))
    for walks, tree, sign in ((prefix, list(tree_in), 1), (suffix, list(tree_out), -1)):
        walks[:, tree] = sign * integer_inverse((heads - tails)[tree])
    rows: list[np.ndarray] = []
    for p in prefix + suffix:
        if p.any() and not any(np.array_equal(p, row) or np.array_equal(p, -row) for row in rows):
            rows.append(p)
    through = np.eye(edges, dtype=np.int64) + tails @ prefix + heads @ suffix
    rows += [through[e] for e in range(edges) if e not in every]
    return np.array(rows, dtype=np.int64).reshape(len(rows), edges)


@dataclass(frozen=True, eq=False)
class PathProblem:
    """A network seen from its reduction graph: where each scalar weight
    sits, and two spanning trees.

    `tails` and `heads` are `(m, H)`: the log-scale of each end of each edge as an integer
    combination of those of the units (a single 1, or nothing for the root, in a directed
    graph). `slots[i] = (parameter name, flat index)` of edge i; `tree_in` and `tree_out` hold
    one edge number per unit.
    """

    tails: np.ndarray
    heads: np.ndarray
    slots: Sequence[tuple[str, int]]
    tree_in: Sequence[int]
    tree_out: Sequence[int]
    rows: np.ndarray = field(init=False)
    fixed: np.ndarray = field(init=False)
    free: np.ndarray = field(init=False)
    inverse: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        fixed = np.array(sorted(self.tree_out), dtype=np.int64)
        free = np.setdiff1d(np.arange(len(self.slots)), fixed)
        rows = basis_rows(self.tails, self.heads, self.tree_in, self.tree_out)
        derived = {
            "rows": rows,
            "fixed": fixed,
            "free": free,
            "inverse": integer_inverse(rows[:, free]),
        }
        for name, value in derived.items():
            object.__setattr__(self, name, value)

    def vector(self, weights: dict[str, Tensor]) -> Tensor:
        return torch.stack([weights[name].reshape(-1)[index] for name, index in self.slots])

    def tensors(self, vector: Tensor, like: dict[str, Tensor]) -> dict[str, Tensor]:
        """The parameter tensors that hold the edge weights of `vector`,
        elsewhere the values of `like`.
        """
        places: dict[str, list[tuple[int, int]]] = {}
        for edge, (name, index) in enumerate(self.slots):
            places.setdefault(name, []).append((index, edge))
        result = {}
        for name, pairs in places.items():
            flat, numbers = (torch.tensor(column) for column in zip(*pairs, strict=True))
            result[name] = (
                like[name].flatten().index_copy(0, flat, vector[numbers]).reshape(like[name].shape)
            )
        return result

    def path_values(self, weights: Tensor) -> Tensor:
        powers = torch.from_numpy(self.rows).to(weights)
        signs = torch.where(torch.from_numpy(self.rows % 2 == 1), weights.sign(), 1.0).prod(1)
        return signs * torch.exp(powers @ weights.abs().log())

    def weights(self, values: Tensor, fixed: Tensor) -> Tensor:
        """Edge weights from path values and the constant weights of `T_out`;
        differentiable in `values`.
        """
        inverse = torch.from_numpy(self.inverse)
        rows_fixed = torch.from_numpy(self.rows[:, self.fixed])
        logs = inverse.to(values) @ (values.abs().log() - rows_fixed.to(values) @ fixed.abs().log())
        known = torch.where(rows_fixed % 2 == 1, fixed.sign(), 1.0).prod(1) * values.detach().sign()
        signs = torch.where(inverse % 2 == 1, known, 1.0).prod(1)
        vector = torch.zeros(len(self.slots), dtype=values.dtype)
        vector = vector.index_copy(0, torch.from_numpy(self.fixed), fixed)
        return vector.index_copy(0, torch.from_numpy(self.free), signs * logs.exp())


@dataclass(frozen=True)
class OracleStep:
    """Parameters after one step, the loss before it, path values before it and dL/dv."""

    parameters: dict[str, Tensor]
    loss: float
    values: Tensor
    gradient: Tensor


def gsgd_step(
    model: nn.Module,
    loss: Callable[[nn.Module, dict[str, Tensor]], Tensor],
    problem: PathProblem,
    lr: float,
) -> OracleStep:
    """Take one step `v <- v - lr dL/dv` from the model's present float64 parameters;
    the model is not changed.

    `loss(model, parameters)` is expected to evaluate the model by `torch.func.functional_call`.
    """
    start = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    vector = problem.vector(start)
    fixed = vector[torch.from_numpy(problem.fixed)]
    values = problem.path_values(vector).requires_grad_()
    value = loss(model, start | problem.tensors(problem.weights(values, fixed), start))
    (gradient,) = torch.autograd.grad(value, values)
    with torch.no_grad():
        moved = problem.weights(values - lr * gradient, fixed)
        after = start | problem.tensors(moved, start)
    return OracleStep(after, float(value.detach()), values.detach(), gradient)
