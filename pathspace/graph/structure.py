"""The structure of a model: units, and one edge for every scalar weight,
stored per weight tensor.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np
import torch
from scipy.sparse import csr_array
from torch import Tensor, nn

from ..capture.captured import Captured
from ..errors import InputError, UnsupportedError
from ..models.finite import expect_scales
from .parts import Pin, Slice, Statistic, WeightBlock, owner, sums_of

if TYPE_CHECKING:
    import networkx as nx


MAX_SCALAR_EDGES = 100_000
LOG_2 = math.log(2)


def _power(log: Tensor) -> Tensor:
    """``exp(log)``, exact for multiples of ``log 2`` up to rounding."""
    factor, exponent = log.exp(), log.detach() / LOG_2
    whole = exponent.round()
    exact = (exponent - whole).abs() <= 4 * torch.finfo(log.dtype).eps * whole.abs()
    return factor + torch.where(exact, whole.exp2() - factor.detach(), 0)


@dataclass(frozen=True, eq=False)
class Structure:
    """The reduction graph of a model (Definition 3 of the path-space paper, generalised to
    units that share a scale).

    Attributes:
        blocks: one per parameter tensor in path space.
        num_units: ``H``, the number of units (free scales) with at least one edge.
        pinned: operations that fix scales, each with its place and reason.
        unused: parameters that do not influence the outputs.
        has_cuts: whether a normalisation cuts paths; some basis paths are then closed walks of the
            graph, not paths of the network.
        approximate: ids of the units in a scale that is free only for ``eps = 0``, because a
            normalisation by statistics of the data follows it.
        exact: integer matrix ``(H, num_exact_units)``: ``phi = exact @ xi`` are the gauge
            transformations that are exact for the unchanged model, every ``eps`` included.
        folded_eps: source lines, each with a small constant that was read as the ``eps`` of a
            normalisation written out by hand.
        forms: integer matrix ``(derived, H)``: id ``H + 1 + i`` has the log-scale ``forms[i] @
            phi`` (products of activations, matrices reused in depth); empty for most models.
        norm_eps: how the ``eps`` of normalisation layers was treated.
        affine: whether the sum of a parameter and a constant can have a free scale.
        statistics: running statistics that are rescaled with their channels.
        beyond: name -> (tail, head) of all scalars of a parameter that is used in part, for larger
            inputs that use more of it: as captured there, or like the used scalars next to them.
        captured: the captured graph.
        parameters: name -> parameter of the model (not a copy).
        range: the input sizes for which the graph was derived, in words.
        modules: path -> module of the model (not a copy), for the modules that hold
            parameters or running statistics.

    Example:
        >>> import torch, pathspace as ps
        >>> model = torch.nn.Sequential(
        ...     torch.nn.Linear(4, 3), torch.nn.ReLU(), torch.nn.Linear(3, 2)
        ... )
        >>> graph = ps.trace(model, torch.randn(1, 4))
        >>> graph.num_weights, graph.num_units, graph.dimension
        (23, 3, 20)
    """

    blocks: tuple[WeightBlock, ...]
    num_units: int
    pinned: tuple[Pin, ...]
    unused: tuple[str, ...]
    has_cuts: bool
    approximate: np.ndarray = field(repr=False)
    exact: csr_array = field(repr=False)
    folded_eps: tuple[tuple[str, float], ...] = field(repr=False)
    statistics: tuple[Statistic, ...]
    forms: csr_array = field(repr=False)
    norm_eps: str
    beyond: Mapping[str, tuple[Tensor, Tensor]] = field(repr=False)
    captured: Captured = field(repr=False)
    parameters: Mapping[str, nn.Parameter] = field(repr=False)
    range: str = ""
    affine: bool = True
    modules: Mapping[str, nn.Module] = field(default_factory=dict, repr=False)

    @cached_property
    def num_weights(self) -> int:
        """``m``: number of scalar weights in path space."""
        return sum(block.num_edges for block in self.blocks)

    @property
    def dimension(self) -> int:
        """``m - H``: the number of independent path values (Theorem 3)."""
        return self.num_weights - self.num_units

    @property
    def num_exact_units(self) -> int:
        """Dimension of the gauge group that is exact with every ``eps`` as it is."""
        return int(self.exact.shape[1])

    @property
    def exact_dimension(self) -> int:
        """``m`` minus :attr:`num_exact_units`: dimension of the path space at the exact level."""
        return self.num_weights - self.num_exact_units

    @cached_property
    def shifts(self) -> dict[str, float]:
        """Tensor name -> the constant ``c``, for tensors of which ``p + c``
        scales instead of ``p``.

        The ``eps`` of running variances, and the 1 of norms that multiply by ``1 + weight``.
        """
        found = {
            entry.var: entry.eps for entry in self.statistics if entry.var is not None and entry.eps
        }
        return found | {block.name: block.shift for block in self.blocks if block.shift}

    def exact_part(self, phi: Tensor) -> Tensor:
        """The nearest log-scales to ``phi`` that preserve the function
        exactly, every ``eps`` included.

        Args:
            phi: log-scales of the units, shape ``(num_units,)``.

        Returns:
            The orthogonal projection of ``phi`` on ``exact @ xi``, shape ``(num_units,)``. In a
            graph without products of scales this sets the log-scales of approximate units to 0.

        Raises:
            InputError: ``phi`` has another shape, or is not finite.

        Example:
            >>> import torch, pathspace as ps
            >>> model = torch.nn.Sequential(
            ...     torch.nn.Linear(2, 1), torch.nn.LayerNorm(1), torch.nn.Linear(1, 1)
            ... )
            >>> graph = ps.trace(model, torch.randn(1, 2))
            >>> graph.num_units, graph.num_exact_units, graph.exact_part(torch.ones(2)).tolist()
            (2, 1, [0.0, 1.0])
        """
        expect_scales("exact_part", phi, self.num_units)
        wanted = phi.detach().cpu().double().numpy()
        if self.exact.nnz == self.num_exact_units:
            # each column of ``exact`` is one unit
            return torch.from_numpy(self.exact @ (self.exact.T @ wanted)).to(phi)
        # (the result is in the subspace even if the solution is inexact)
        from scipy.sparse.linalg import lsqr  # slow to import

        solution = lsqr(self.exact.astype(np.float64), wanted, atol=1e-14, btol=1e-14)[0]
        return torch.from_numpy(self.exact @ solution).to(phi)

    @cached_property
    def expand(self) -> csr_array:
        """Log-scales of ids as sums of those of root and units, ``(H + 1 + derived, H + 1)``."""
        return sums_of(self.forms)

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Number of the first edge of each block; edges go by block, then in C order."""
        return (0, *accumulate(block.num_edges for block in self.blocks))

    @cached_property
    def index(self) -> dict[str, int]:
        """Parameter name (or alias) -> position of its block."""
        return {
            name: i for i, block in enumerate(self.blocks) for name in (block.name, *block.aliases)
        }

    @property
    def whole_ends(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Name -> (tail, head) of all scalars of a parameter, those of larger inputs included."""
        return {block.name: (block.tail, block.head) for block in self.blocks} | dict(self.beyond)

    def edge_numbers(self, block: int, flat: np.ndarray) -> np.ndarray:
        """Edge numbers of the scalars at flat positions of a block's tensor."""
        flat = np.asarray(flat, np.int64)
        used = self.blocks[block].used
        rank = flat if isinstance(used, slice) else (np.cumsum(used) - 1)[flat]
        return np.asarray(self.offsets[block] + rank, np.int64)

    def locate(self, edge: int) -> tuple[int, int]:
        """Block and flat position of an edge number."""
        block = int(np.searchsorted(self.offsets, edge, side="right")) - 1
        local, used = edge - self.offsets[block], self.blocks[block].used
        return block, local if isinstance(used, slice) else int(np.flatnonzero(used)[local])

    def ends(self) -> tuple[np.ndarray, np.ndarray]:
        """Tail and head ids of all edges, two arrays of shape ``(m,)`` (for small graphs)."""
        parts = [block.ends_at(block.places) for block in self.blocks]
        tails, heads = np.concatenate([np.zeros((2, 0), np.int64), *parts], axis=1)
        return tails, heads

    def weights(self) -> Tensor:
        """Values of all edges in order, float64, shape ``(m,)``."""
        every = ((block, self.parameters[block.name].double()) for block in self.blocks)
        parts = (block.values(own).cpu().reshape(-1)[block.used] for block, own in every)
        return torch.cat([torch.zeros(0, dtype=torch.float64), *parts])

    def gauge(self, phi: Tensor) -> dict[str, Tensor]:
        """Factors that multiply every parameter and leave the function unchanged.

        ``w_e <- w_e exp(phi(head e) - phi(tail e))`` with ``phi(root) = 0``. For a tensor in
        :attr:`shifts`, the factor is that of ``p + c``; :meth:`gauge_affine` gives its
        complete transformation.

        Args:
            phi: log-scales of the units, shape ``(num_units,)``.

        Returns:
            Parameter or buffer name -> factor tensor, broadcastable to it (running
            statistics follow their channels).

        Raises:
            InputError: ``phi`` has another shape, or is not finite.

        Example:
            >>> import torch, pathspace as ps
            >>> model = torch.nn.Sequential(
            ...     torch.nn.Linear(2, 1), torch.nn.ReLU(), torch.nn.Linear(1, 1)
            ... )
            >>> factors = ps.trace(model, torch.randn(1, 2)).gauge(torch.tensor([1.0]).log())
            >>> {name: factor.tolist() for name, factor in factors.items()}
            {'0.weight': [[1.0]], '0.bias': [1.0], '2.weight': [[1.0]], '2.bias': [1.0]}
        """
        expect_scales("gauge(phi)", phi, self.num_units)
        return {name: head / tail for name, (head, tail) in self.gauge_factors(phi).items()}

    def gauge_affine(self, phi: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        """The complete gauge transformation of every tensor: ``p <- a p + b``.

        ``a`` is the factor of :meth:`gauge`, and ``b = (a - 1) c`` for the tensors in
        :attr:`shifts`, 0 for all others. A running variance becomes ``s^2 (var + eps) - eps``,
        which can be negative; a normalisation uses only ``var + eps``, which remains positive.

        Args:
            phi: log-scales of the units, shape ``(num_units,)``.

        Returns:
            Parameter or buffer name -> ``(a, b)``, broadcastable to it.

        Raises:
            InputError: ``phi`` has another shape, or is not finite.

        Example:
            >>> import torch, pathspace as ps
            >>> model = torch.nn.Sequential(
            ...     torch.nn.Linear(2, 1), torch.nn.BatchNorm1d(1, eps=0.5)
            ... ).eval()
            >>> graph = ps.trace(model, torch.randn(1, 2))
            >>> a, b = graph.gauge_affine(torch.tensor([2.0]).log())["1.running_var"]
            >>> a.tolist(), b.tolist()
            ([4.0], [1.5])
        """
        return {
            name: (a, (a - 1) * self.shifts.get(name, 0.0)) for name, a in self.gauge(phi).items()
        }

    def gauge_factors(self, phi: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        """Name -> ``exp(phi(head))`` and ``exp(phi(tail))``, shaped like the ids."""
        derived = torch.from_numpy(self.forms @ phi.detach().cpu().double().numpy()).to(phi)
        table = torch.cat([phi.new_zeros(1), phi, derived])

        def log(ids: Tensor) -> Tensor:
            ids = ids.to(table.device)
            return table[ids.abs()] * ids.sign()

        factors = {
            name: (_power(log(head)), _power(log(tail)))
            for name, (tail, head) in self.whole_ends.items()
        }
        for statistic in self.statistics:
            own = log(statistic.units)
            for name, times in statistic.powers.items():
                factors[name] = (_power(times * own), torch.ones_like(own))
        return factors

    def slices(self, unit: int) -> tuple[Slice, ...]:
        """The scalars that a unit's scale changes: ``tensor[index]`` is multiplied by
        ``exp(power * phi[unit - 1])``.

        Weights that enter the unit have power 1, weights that leave it -1, running variances 2. A
        tensor with the unit at both ends has a slice for each. For tensors in :attr:`shifts`, the
        tensor plus its constant is multiplied.

        Args:
            unit: its id, ``1 .. H``.

        Raises:
            InputError: there is no such unit.

        Example:
            >>> import torch, pathspace as ps
            >>> model = torch.nn.Sequential(
            ...     torch.nn.Linear(2, 3), torch.nn.ReLU(), torch.nn.Linear(3, 1)
            ... )
            >>> graph = ps.trace(model, torch.randn(1, 2))
            >>> for part in graph.slices(2):
            ...     print(part.name, model.get_parameter(part.name)[part.index].numel(), part.power)
            0.weight 2 1
            0.bias 1 1
            2.weight 1 -1
        """
        if not 1 <= unit <= self.num_units:
            raise InputError(f"slices found unit {unit}, expected one of 1 to {self.num_units}.")
        power = self.expand[:, [unit]].toarray().reshape(-1)
        sides = [
            (name, ids, sign)
            for name, (tail, head) in self.whole_ends.items()
            for ids, sign in ((head, 1), (tail, -1))
        ]
        for entry in self.statistics:
            sides += [(name, entry.units, times) for name, times in entry.powers.items()]
        found = []
        for name, ids, sign in sides:
            powers = torch.from_numpy(power)[ids.abs()] * ids.sign() * sign
            for value in powers.unique().tolist():
                if value:
                    # (torch has an index along dimension 0 also for a tensor without dimensions)
                    places = (powers == value).nonzero(as_tuple=True)[: powers.dim()]
                    whole = (
                        slice(None) if ids.shape[dim] == 1 else place
                        for dim, place in enumerate(places)
                    )
                    found.append(Slice(name, tuple(whole), int(value)))
        return tuple(found)

    def module(self, block: WeightBlock | str) -> nn.Module:
        """The module of the model that holds a block's parameter.

        Args:
            block: one of :attr:`blocks`, or the name of a parameter.

        Raises:
            InputError: the graph has no such block.

        Example:
            >>> import torch, pathspace as ps
            >>> graph = ps.trace(torch.nn.Sequential(torch.nn.Linear(2, 3)), torch.randn(1, 2))
            >>> graph.module(graph.blocks[0])
            Linear(in_features=2, out_features=3, bias=True)
        """
        name = block if isinstance(block, str) else block.name
        path = owner(name)
        if path not in self.modules:
            raise InputError(
                f"module found no parameter {name!r} in the reduction graph, expected a block's"
                " name."
            )
        return self.modules[path]

    def activation(self, unit: int) -> str:
        """A name for a unit: the first module that computes it, and the position of
        the unit among its outputs.

        Args:
            unit: its id, ``1 .. H``.

        Example:
            >>> import torch, pathspace as ps
            >>> model = torch.nn.Sequential(
            ...     torch.nn.Linear(2, 3), torch.nn.ReLU(), torch.nn.Linear(3, 1)
            ... )
            >>> ps.trace(model, torch.randn(1, 2)).activation(2)
            '0[1]'
        """
        part = max(self.slices(unit), key=lambda part: part.power > 0)
        places = [str(int(index[0])) for index in part.index if isinstance(index, Tensor)]
        path = owner(part.name)
        return f"{path or 'model'}[{', '.join(places)}]" if places else path

    def to_networkx(self) -> nx.MultiDiGraph:
        """The scalar graph: nodes ``0..H`` (0 is the root), and one edge per weight with
        name, flat index, value, number and layer; a unit has the layer that writes it first.

        Raises:
            UnsupportedError: more than 100,000 weights, or opposite scales, which a
                directed graph cannot show.
        """
        if self.num_weights > MAX_SCALAR_EDGES:
            raise UnsupportedError(
                f"to_networkx found {self.num_weights:,} edges in the reduction graph, expected at"
                f" most {MAX_SCALAR_EDGES:,}; use graph.blocks instead."
            )
        import networkx as nx

        tails, heads = self.ends()
        if (tails < 0).any() or (heads < 0).any():
            raise UnsupportedError(
                "to_networkx found weights that relate opposite scales (a matrix used together with"
                " its transpose), which a directed graph cannot represent; use graph.blocks"
                " instead."
            )
        result = nx.MultiDiGraph()
        result.add_nodes_from(range(self.num_units + 1))
        blocks = enumerate(self.blocks)
        places = ((i, flat) for i, block in blocks for flat in block.places.tolist())
        columns = (places, tails.tolist(), heads.tolist(), self.weights().tolist())
        for number, ((i, flat), tail, head, weight) in enumerate(zip(*columns, strict=True)):
            name = self.blocks[i].name
            layer = name.rpartition(".")[0]
            facts = {"name": name, "index": flat, "weight": weight, "number": number}
            result.add_edge(tail, head, key=(i, flat), layer=layer, **facts)
            if head:
                result.nodes[head].setdefault("layer", layer)
        return result
