"""The path space of small graphs as sympy matrices, relations between path values and LaTeX."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from ..errors import InputError, UnsupportedError, expect_arguments
from ..shown import Shown
from .basis import BasisPaths, Path, symbol
from .counting_vectors import coefficient_maps
from .two_trees import TwoTrees

if TYPE_CHECKING:
    import sympy

MOST_WEIGHTS = 200


@dataclass(frozen=True, eq=False)
class SymbolicSpace(Shown):
    """The path space of a small graph as sympy objects; a notebook shows it as LaTeX.

    Columns of matrices are weights in edge order, rows of the counting matrix are basis paths.

    Example:
        >>> import torch, pathspace as ps
        >>> from torch.nn import Linear, ReLU, Sequential
        >>> model = Sequential(Linear(2, 1, bias=False), ReLU(), Linear(1, 2, bias=False))
        >>> graph = ps.trace(model, torch.randn(1, 2))
        >>> space = symbolic(graph.skeleton())
        >>> space.counting_matrix
        Matrix([
        [1, 0, 1, 0],
        [0, 1, 1, 0],
        [1, 0, 0, 1]])
        >>> space.gauge_generators
        Matrix([[1, 1, -1, -1]])
        >>> path = next(
        ...     path for path in graph.paths() if str(path) == "0.weight[0,1] 2.weight[1,0]"
        ... )
        >>> print(space.equation(path))
        v(0.weight[0,1] 2.weight[1,0]) = v_2 * v_3 / v_1
    """

    skeleton: TwoTrees

    @cached_property
    def basis(self) -> BasisPaths:
        """The basis paths ``v_1, v_2, ...``."""
        return BasisPaths(self.skeleton)

    @cached_property
    def weights(self) -> tuple[sympy.Symbol, ...]:
        """One symbol per scalar weight."""
        graph = self.skeleton.graph
        every = Path.from_edges(graph, range(graph.num_weights))
        return tuple(symbol(name, index) for name, index, _ in every.edges)

    @cached_property
    def values(self) -> tuple[sympy.Symbol, ...]:
        """Symbols ``v_1 ... v_(m - H)`` for the basis path values."""
        import sympy

        return tuple(sympy.symbols(f"v_1:{len(self.basis) + 1}", real=True, nonzero=True))

    @cached_property
    def counting_matrix(self) -> sympy.Matrix:
        """How often each basis path passes each weight, ``(m - H, m)``."""
        return _matrix(self.basis.counting_matrix().toarray())

    @cached_property
    def gauge_generators(self) -> sympy.Matrix:
        """Change of the log-weights by each unit's log-scale, ``(H, m)``: +1 in, -1 out."""
        incidence, _ = coefficient_maps(self.skeleton)
        return _matrix(incidence.toarray()[:, 1:].T)

    @cached_property
    def free(self) -> tuple[int, ...]:
        """Edge numbers of the weights outside ``T_out``; there are as many as basis paths."""
        fixed = self.skeleton.edges(self.skeleton.tree_out)
        return tuple(np.setdiff1d(np.arange(self.skeleton.graph.num_weights), fixed).tolist())

    @cached_property
    def inverse(self) -> sympy.Matrix:
        """Inverse of the counting matrix on the weights outside ``T_out``: integers,
        because it is unimodular.

        With the weights of ``T_out`` at 1, weight ``free[i]`` is ``prod_j v_j^(inverse[i, j])``.
        """
        return self.counting_matrix[:, list(self.free)].inv()

    def relation(self, path: Path | np.ndarray | Sequence[int]) -> sympy.Eq:
        """The equation of a path's value and a monomial in basis path values.

        Args:
            path: a path of the same graph, or its counting vector.

        Returns:
            ``monomial in weights = product of powers of v_i``.

        Raises:
            InputError: the vector is not a closed walk.
        """
        import sympy

        vector = self._vector(path)
        left = sympy.Mul(*(w ** int(c) for w, c in zip(self.weights, vector, strict=True) if c))
        powers = self.basis.coefficients(vector)
        right = sympy.Mul(*(v ** int(c) for v, c in zip(self.values, powers, strict=True) if c))
        return sympy.Eq(left, right, evaluate=False)

    def equation(self, path: Path | np.ndarray | Sequence[int]) -> str:
        """The same as text, like equation (4) of the path-space paper."""
        vector = self._vector(path)
        powers = self.basis.coefficients(vector)

        def product(sign: int) -> str:
            parts = [(i + 1, sign * int(c)) for i, c in enumerate(powers) if sign * c > 0]
            return " * ".join(f"v_{i}" if c == 1 else f"v_{i}^{c}" for i, c in parts)

        top, bottom = product(1) or "1", product(-1)
        bottom = f"({bottom})" if " * " in bottom else bottom
        numbers = np.flatnonzero(vector)
        shown = Path(self.skeleton.graph, numbers, vector[numbers])
        return f"v({shown}) = {top}" + (f" / {bottom}" if bottom else "")

    def check(self, path: Path | np.ndarray | Sequence[int]) -> bool:
        """Whether the relation is an identity in the weights, with monomials for all ``v_i``."""
        equation = self.relation(path)
        put = dict(zip(self.values, self.basis.monomials(), strict=True))
        return bool((equation.lhs / equation.rhs.subs(put, simultaneous=True)).equals(1))

    def latex(self) -> str:
        """The basis path values, the counting matrix and the gauge generators as LaTeX."""
        import sympy

        lines = [rf"v_{{{i + 1}}} &= {_latex(path)}" for i, path in enumerate(self.basis)]
        aligned = r"\begin{aligned}" + r" \\ ".join(lines) + r"\end{aligned}"
        return (
            rf"{aligned} \qquad C = {sympy.latex(self.counting_matrix)} \qquad G ="
            rf" {sympy.latex(self.gauge_generators)}"
        )

    def _repr_latex_(self) -> str:
        return f"$\\displaystyle {self.latex()}$"

    def _vector(self, path: Path | np.ndarray | Sequence[int]) -> np.ndarray:
        if isinstance(path, Path):
            if path.graph is not self.skeleton.graph:
                raise InputError(
                    "relation found a path of another graph, expected a path of the skeleton's"
                    " graph."
                )
            return path.counting_vector
        return np.asarray(path, np.int64)


def symbolic(skeleton: TwoTrees) -> SymbolicSpace:
    """The path space of a small graph in symbols.

    Args:
        skeleton: two spanning trees of a graph of at most 200 weights.

    Returns:
        Matrices, relations and LaTeX.

    Raises:
        UnsupportedError: the graph has more than 200 weights.
    """
    expect_arguments("symbolic", skeleton=skeleton)
    if skeleton.graph.num_weights > MOST_WEIGHTS:
        raise UnsupportedError(
            f"symbolic found {skeleton.graph.num_weights:,} weights, expected at most"
            f" {MOST_WEIGHTS}; use basis.counting_matrix() and basis.coefficients() instead."
        )
    return SymbolicSpace(skeleton)


def _matrix(rows: np.ndarray) -> sympy.Matrix:
    import sympy

    return sympy.Matrix(*rows.shape, [int(x) for x in rows.reshape(-1)])


def _latex(path: Path) -> str:
    parts = []
    for name, index, count in path.edges:
        text = name.replace("_", r"\_")
        place = ",".join(map(str, index))
        power = "" if count == 1 else f"^{{{count}}}"
        parts.append(rf"w_{{\mathrm{{{text}}}[{place}]}}{power}")
    return r"\, ".join(parts) or "1"
