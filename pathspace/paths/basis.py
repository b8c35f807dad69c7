"""Basis paths of two spanning trees: counting vectors, values, and integer
coefficients of every other path.

For ``e = (u -> v)`` let ``P(e) = pre(u) + e + suf(v)``, and for a unit ``p_v = pre(v) + suf(v)``.
The distinct non-zero ``p_v``, together with ``P(e)`` for the edges in neither tree, are ``m - H``
integer vectors, and every circulation is ``z = sum_e z_e P(e) - sum_v f_v p_v`` with ``f_v`` the
flow of ``z`` through ``v``.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np
import torch
from scipy.sparse import csr_array
from torch import Tensor

from ..errors import InputError
from ..gauge.moves import moved
from ..graph.parts import idle
from ..graph.spanning_tree import SpanningTree
from ..graph.structure import Structure
from ..shown import WIDTH, Shown, shorten, text_table
from .counting_vectors import WORD, coefficient_maps, counting_matrix, whole_product
from .two_trees import TwoTrees

if TYPE_CHECKING:
    import sympy
    from rich.table import Table

# paths that a table shows
ROWS = 8


@dataclass(frozen=True, eq=False)
class Path(Shown):
    """A closed walk through the root, as counts of how often it uses each weight.

    Attributes:
        graph: the reduction graph.
        numbers: edge numbers, increasing, each once.
        counts: how often the walk uses each (negative: against its direction); ``int64``, or Python
            integers if 64 bits are not enough.
        order: edge numbers in the order in which the walk passes them; empty if it is known by
            its counts alone.
    """

    graph: Structure = field(repr=False)
    numbers: np.ndarray
    counts: np.ndarray
    order: tuple[int, ...] = field(default=(), repr=False)

    @classmethod
    def from_edges(cls, graph: Structure, edges: Iterable[int]) -> Path:
        """The path along a sequence of edges; numbers below 0 are constants."""
        order = tuple(edge for edge in edges if edge >= 0)
        numbers, counts = np.unique(order, return_counts=True)
        return cls(graph, numbers.astype(np.int64), counts.astype(np.int64), order)

    @property
    def edges(self) -> tuple[tuple[str, tuple[int, ...], int], ...]:
        """``(parameter name, index, count)`` for every weight passed."""
        counted = zip(self.numbers.tolist(), self.counts.tolist(), strict=True)
        return tuple((*self._weight(number), count) for number, count in counted)

    @property
    def walk(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """``(parameter name, index)`` of every weight in the order in which the path passes
        them; the ``s``-th pass of a recurrent weight leads to step ``s`` after the input.
        """
        return tuple(map(self._weight, self.order))

    def _weight(self, number: int) -> tuple[str, tuple[int, ...]]:
        block, flat = self.graph.locate(number)
        shape = self.graph.blocks[block].shape
        index = tuple(int(i) for i in np.unravel_index(flat, shape)) if shape else ()
        return self.graph.blocks[block].name, index

    @property
    def counting_vector(self) -> np.ndarray:
        """``c_p``: how often the path passes each of the ``m`` edges."""
        vector = np.zeros(self.graph.num_weights, self.counts.dtype)
        vector[self.numbers] = self.counts
        return vector

    @property
    def value(self) -> float:
        """``v_p = prod_e w_e^(c_e)``."""
        result = 1.0
        for name, index, count in self.edges:
            block = self.graph.blocks[self.graph.index[name]]
            result *= float(block.values(self.graph.parameters[name][index].double())) ** count
        return result

    @property
    def monomial(self) -> sympy.Expr:
        """The value as a sympy monomial in the weights."""
        import sympy

        return sympy.Mul(*(symbol(name, index) ** count for name, index, count in self.edges))

    def __repr__(self) -> str:
        return f"Path({shorten(str(self), WIDTH)!r})"

    def __str__(self) -> str:
        parts = []
        for name, index, count in self.edges:
            place = f"{name}[{','.join(map(str, index))}]"
            parts.append(place if count == 1 else f"{place}^{count}")
        return " ".join(parts)


def symbol(name: str, index: Sequence[int]) -> sympy.Symbol:
    """The sympy symbol of one scalar weight."""
    import sympy

    return sympy.Symbol(f"{name}[{','.join(map(str, index))}]", real=True, nonzero=True)


@dataclass(frozen=True, eq=False)
class BasisPaths(Shown):
    """The ``m - H`` basis paths of a skeleton: the distinct ``p_k``, then ``P(e)`` for
    edges outside both trees.

    Example:
        >>> import torch, pathspace as ps
        >>> from torch.nn import Linear, ReLU, Sequential
        >>> model = Sequential(Linear(2, 2, bias=False), ReLU(), Linear(2, 1, bias=False))
        >>> basis = ps.trace(model, torch.randn(1, 2)).skeleton().basis()
        >>> for path in basis:
        ...     print(path)
        0.weight[0,0] 2.weight[0,0]
        0.weight[1,1] 2.weight[0,1]
        0.weight[0,1] 2.weight[0,0]
        0.weight[1,0] 2.weight[0,1]
        >>> basis.counting_matrix().shape
        (4, 6)
    """

    skeleton: TwoTrees

    def __repr__(self) -> str:
        return f"BasisPaths({len(self):,} paths of a skeleton by rule {self.skeleton.rule!r})"

    def __rich__(self) -> Table:
        more = f", the first {ROWS} of them" if len(self) > ROWS else ""
        rows = [(str(path), f"{path.value:.4g}") for path in islice(self, ROWS)]
        return text_table(f"{len(self):,} basis paths{more}", ("path", "value"), rows, right=(1,))

    @property
    def graph(self) -> Structure:
        """The reduction graph."""
        return self.skeleton.graph

    @cached_property
    def tree_edges(self) -> np.ndarray:
        """Numbers of the edges in either tree, increasing."""
        return self.skeleton.edges()

    def __len__(self) -> int:
        return self.skeleton.num_chains + self.graph.num_weights - len(self.tree_edges)

    def __iter__(self) -> Iterator[Path]:
        return (self[i] for i in range(len(self)))

    def __getitem__(self, i: int) -> Path:
        i = operator.index(i)
        if not -len(self) <= i < len(self):
            raise IndexError(f"basis has {len(self)} paths, found index {i}")
        i %= len(self)
        if i < self.skeleton.num_chains:
            tail = head = int(self.skeleton.representatives[i])
            total, back = Counter[int](), 1
        else:
            # the i-th number that is not among the sorted tree edges
            rank = i - self.skeleton.num_chains
            gaps = self.tree_edges - np.arange(len(self.tree_edges))
            edge = rank + int(np.searchsorted(gaps, rank, side="right"))
            block, flat = self.graph.locate(edge)
            tail, head = map(int, self.graph.blocks[block].ends_at(np.array(flat)))
            # where one tree serves both ways, the suffix is the prefix walked back
            back = -1 if self.graph.forms.shape[0] else 1
            total = Counter({edge: 1})
        self._walk(total, self.skeleton.tree_in, tail)
        self._walk(total, self.skeleton.tree_out, head, back)
        numbers = np.array(sorted(edge for edge, count in total.items() if count), np.int64)
        counts = [total[edge] for edge in numbers.tolist()]
        large = any(abs(count) >= WORD for count in counts)
        return Path(self.graph, numbers, np.array(counts, object if large else np.int64))

    def _walk(self, total: Counter[int], tree: SpanningTree, end: int, sign: int = 1) -> None:
        """Count the edges from a signed id along a tree."""
        pending = [(abs(end), sign if end > 0 else -sign)]
        while pending:
            unit, sign = pending.pop()
            if unit > self.graph.num_units:
                row = self.graph.expand[[unit]]
            elif unit:
                number = int(self.graph.edge_numbers(int(tree.block[unit]), tree.index[[unit]])[0])
                own, row = sign * int(tree.own[unit]), tree.rest[[unit]]
                total[number] += own if tree.forward[unit] else -own
                pending.append((int(tree.parent[unit]), own * int(tree.other[unit])))
            else:
                continue
            others = zip(row.indices.tolist(), row.data.tolist(), strict=True)
            pending += [(other, sign * count) for other, count in others]

    def counting_matrix(self) -> csr_array:
        """Counting vectors of all basis paths, sparse ``int64`` of shape ``(m - H, m)``.

        Raises:
            UnsupportedError: the matrix would have more than 200 million entries, or
                an entry beyond 64 bits.
        """
        return counting_matrix(self.skeleton)

    def coefficients(self, counting_vector: np.ndarray) -> np.ndarray:
        """Integer coefficients of a path (any circulation) in the basis.

        ``z = sum_i a_i basis[i]`` holds exactly: the coefficient of ``P(e)`` is ``z_e``, that of
        ``p_k`` collects the tree edges and the flow.

        Args:
            counting_vector: integers of length ``m``, or several rows of them.

        Returns:
            Integers of length ``m - H`` (or as many rows).

        Raises:
            InputError: wrong length, or not a circulation (inflow and outflow of a unit differ).
            UnsupportedError: a coefficient might not fit into 64 bits.
        """
        z = np.asarray(counting_vector)
        m = self.graph.num_weights
        if z.ndim not in (1, 2) or z.shape[-1] != m or not np.issubdtype(z.dtype, np.integer):
            raise InputError(
                f"coefficients found an array of shape {z.shape} and type {z.dtype}, expected {m}"
                " integers, one count per weight (or several rows of them)."
            )
        rows = np.atleast_2d(z).astype(np.int64)
        incidence, linear = self._linear
        net = np.asarray(whole_product(rows, incidence))
        if net[:, 1:].any():
            row, unit = np.argwhere(net[:, 1:])[0]
            raise InputError(
                f"coefficients found a vector that enters unit {unit + 1} {net[row, unit + 1]:+d}"
                " times more often than it leaves it; expected the counting vector of a path,"
                " which leaves every unit as often as it enters."
            )
        result = np.asarray(whole_product(rows, linear))
        return result.reshape((*z.shape[:-1], len(self)))

    @cached_property
    def _linear(self) -> tuple[csr_array, csr_array]:
        return coefficient_maps(self.skeleton)

    def values(self) -> Tensor:
        """Values of the basis paths at the model's weights, float64 of length ``m - H``."""
        skeleton, graph = self.skeleton, self.graph
        prefix, suffix = skeleton.prefixes(), skeleton.suffixes()
        parts = [(prefix * suffix)[torch.from_numpy(skeleton.representatives)]]
        for i, block in enumerate(graph.blocks):
            weight = block.values(graph.parameters[block.name].double()).cpu()
            value = weight * signed_power(prefix, block.tail) * signed_power(suffix, block.head)
            parts.append(value.reshape(-1)[self.in_no_tree(i)])
        return torch.cat(parts)

    def in_no_tree(self, block: int) -> Tensor:
        """Flat mask of a block's edges outside both trees."""
        entry = self.graph.blocks[block]
        free = torch.zeros(entry.numel, dtype=torch.bool)
        free[entry.used] = True
        free[torch.from_numpy(np.concatenate(self.skeleton.positions(entry.name)))] = False
        return free

    def monomials(self) -> list[sympy.Expr]:
        """The basis path values as sympy monomials in the weights (small graphs)."""
        return [path.monomial for path in self]

    def rebuild(self, values: Tensor, signs: Tensor) -> dict[str, Tensor]:
        """Weights of a network with given basis path values; its ``T_out`` weights
        are the signs (Theorem 2).

        Args:
            values: values of the basis paths, shape ``(m - H,)``, non-zero where
                they belong to a ``p_k``.
            signs: signs of the ``T_out`` weights, shape ``(num_units,)``.

        Returns:
            Parameter name -> float64 tensor (and running statistics, rescaled with their
            channels). With the values and signs of a model, the network computes the same function
            with the same activations.

        Raises:
            InputError: wrong shapes, or a vanishing ``p_k``.
        """
        skeleton, graph = self.skeleton, self.graph
        if tuple(values.shape) != (len(self),) or tuple(signs.shape) != (graph.num_units,):
            raise InputError(
                f"rebuild found values of shape {tuple(values.shape)} and signs of shape"
                f" {tuple(signs.shape)}, expected ({len(self)},) and ({graph.num_units},)."
            )
        values, one = values.double(), torch.ones(1, dtype=torch.float64)
        chains = torch.cat([one, values[: skeleton.num_chains]])
        if bool((chains == 0).any()):
            raise InputError(
                "rebuild found a skeleton path of value 0, expected non-zero values; the weights"
                " behind it are not determined."
            )
        suffix = skeleton.suffixes(torch.cat([one, signs.double()]))
        through = signed_power(chains, torch.from_numpy(skeleton.chain * skeleton.chain_sign))
        prefix = through / suffix
        result, free = {}, [self.in_no_tree(i) for i in range(len(graph.blocks))]
        outside = values[skeleton.num_chains :].split([int(mask.sum()) for mask in free])
        for i, block in enumerate(graph.blocks):
            own = block.values(graph.parameters[block.name].double()).cpu()
            entering, leaving = skeleton.positions(block.name)
            path = own.reshape(-1).clone()
            path[free[i]] = outside[i]
            heads = block.head.expand(block.shape).reshape(-1)[entering]
            path[entering] = signed_power(through, heads)
            scale = signed_power(prefix, block.tail) * signed_power(suffix, block.head)
            weight = torch.where(idle(block), own, path.reshape(block.shape) / scale).reshape(-1)
            weight[leaving] = signs.double()[torch.from_numpy(skeleton.tree_out.block[1:] == i)]
            result[block.name] = weight.reshape(block.shape) - block.shift
        buffers = graph.captured.buffers
        scale = prefix / skeleton.prefixes()
        for statistic in graph.statistics:
            for name, exponent in statistic.powers.items():
                own = signed_power(scale, statistic.units).abs() ** exponent
                buffer = buffers[name].detach().double().cpu()
                result[name] = moved(buffer, own, torch.ones_like(own), graph.shifts.get(name, 0.0))
        return result


def signed_power(table: Tensor, ids: Tensor) -> Tensor:
    """``table[|id|] ** sign(id)``: the scale an id stands for (1 for the root)."""
    positive = table[ids.abs()]
    return torch.where(ids < 0, positive.reciprocal(), positive)
