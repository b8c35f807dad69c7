"""The long vectors of a step, and their update by the ratios of path values.

One float64 buffer has, concatenated, the coefficients of entries in the sums of chains (-1 for each
tail, then the weights on the trees), the step by tail and ``1 / R`` by tail.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .layout import Layout


@dataclass(frozen=True)
class Parts:
    """Views of the vectors of an optimizer.

    Attributes:
        both: ratios of all chains, then their reciprocals, shape ``(2, chains)``.
        ratio: the first row, the ratios.
        inverse: the second row, their reciprocals.
        zero: 0 for all chains.
        least: smallest allowed ratios, at which path values reach their limits.
        coefficient: coefficients of entries in the sums of chains: -1 for each tail, then
            the weights on the trees.
        tree: the weights on the trees.
        step: factors of gradients, by tail.
        keep: ``1 / R``, by tail.
        rounded: type other than float64 -> tree weights, step and ``1 / R`` in this type.
        exact: the same in float64.
        columns: for every tensor, ``1 / R`` and the step by tail, in its shape and type.
        on_tree: for every tensor, its weights on the trees, in its type.
    """

    both: Tensor
    ratio: Tensor
    inverse: Tensor
    zero: Tensor
    least: Tensor
    coefficient: Tensor
    tree: Tensor
    step: Tensor
    keep: Tensor
    rounded: tuple[Tensor, ...]
    exact: Tensor
    columns: tuple[tuple[Tensor, Tensor] | None, ...]
    on_tree: tuple[Tensor | None, ...]


class Vectors:
    """The vectors by chain, by tail and by tree edge.

    Args:
        layout: the index vectors.
        dtypes: the type of every tensor; ``None`` for those outside path space.
        device: the device of the tensors.
        fused: whether kernels round values, so that no rounded vectors are needed.

    Attributes:
        factor: ``1 / pre`` of the tails to the power in the step, shape ``(tails,)``.
        value: path values ``p_k``, infinite for the root, shape ``(chains,)``.
    """

    def __init__(
        self,
        layout: Layout,
        dtypes: Sequence[torch.dtype | None],
        device: torch.device,
        fused: bool = False,
    ) -> None:
        def vector(size: int, dtype: torch.dtype = torch.float64) -> Tensor:
            return torch.ones(size, dtype=dtype, device=device)

        self.layout, self.dtypes = layout, tuple(dtypes)
        self.factor, self.value, self.one = vector(layout.tails), vector(layout.count), vector(1)
        self.limits = vector(2 * layout.count).view(2, layout.count).zero_()
        # ratios and reciprocals
        self.ratios = vector(2 * layout.count)
        self.buffer = vector(3 * layout.tails + layout.edges)
        self.buffer[: layout.tails] = -1
        self.rounded = {} if fused else self.make_rounded()
        self.kept = self.cut()

    @property
    def parts(self) -> Parts:
        """Views of the vectors, created again for a compiler, which cannot start from views."""
        return self.cut() if torch.compiler.is_compiling() else self.kept

    def make_rounded(self) -> dict[torch.dtype, Tensor]:
        """Memory for the tree weights, step and ``1 / R`` in each type other than float64."""
        others = {dtype for dtype in self.dtypes if dtype is not None} - {torch.float64}
        exact = self.buffer[self.layout.tails :]
        return {dtype: torch.empty_like(exact, dtype=dtype) for dtype in sorted(others, key=str)}

    def cut(self) -> Parts:
        """Create the views."""
        layout, buffer = self.layout, self.buffer
        # (compiled steps use whole tensors)
        rounded = (
            self.make_rounded()
            if not self.rounded and torch.compiler.is_compiling()
            else self.rounded
        )
        tails, edges = layout.tails, layout.edges
        both = self.ratios.view(2, layout.count)
        exact = buffer[tails:]
        tree, step, keep = exact.split([edges, tails, tails])
        columns: list[tuple[Tensor, Tensor] | None] = []
        on_tree: list[Tensor | None] = []
        for part, dtype in zip(layout.parts, self.dtypes, strict=True):
            mine = exact if dtype is None else rounded.get(dtype, exact)
            on_tree.append(mine[part.edges] if part.edges.stop > part.edges.start else None)
            by_tail = mine[edges:].view(2, tails)
            span, shape = part.span, part.tail.shape
            columns.append(
                None
                if span is None
                else (by_tail[1, span].view(shape), by_tail[0, span].view(shape))
            )
        return Parts(
            both=both,
            ratio=both[0],
            inverse=both[1],
            zero=self.limits[0],
            least=self.limits[1],
            coefficient=buffer[: tails + edges],
            tree=tree,
            step=step,
            keep=keep,
            rounded=tuple(rounded.values()),
            exact=exact,
            columns=tuple(columns),
            on_tree=tuple(on_tree),
        )

    def carry(
        self,
        parts: Parts,
        counts: Tensor,
        held: Tensor | None,
        linear: bool,
        limits: Tensor | None,
    ) -> None:
        """Apply the ratios to all vectors, and prepare the factors of the tensors.

        Args:
            parts: the vectors.
            counts: numbers of sign changes, and of values stopped before 0, by
                chain; they are increased.
            held: mask of constant chains; ``None`` if there are none.
            linear: whether the step has ``1 / pre`` instead of its square. Then :attr:`factor` is
                updated later, by :meth:`settle`.
            limits: upper bounds of the factors of a step, by tail.
        """
        ratio, size = parts.ratio, torch.abs(parts.ratio, out=parts.inverse)
        if held is not None:
            ratio.masked_fill_(held, 1.0)
            size.masked_fill_(held, 1.0)
        counts.add_(parts.both <= self.limits)
        torch.copysign(torch.maximum(size, parts.least, out=size), ratio, out=ratio)
        parts.least.div_(size)
        self.value.mul_(ratio)
        torch.reciprocal(ratio, out=parts.inverse)
        torch.index_select(self.ratios, 0, self.layout.of_tails, out=parts.keep)
        # 1 / (pre^n R): the factor of the step that includes the change of the
        # tail; then 1 / (pre R)^n
        torch.mul(self.factor, parts.keep, out=parts.step)
        bounded = None if limits is None else self.factor.clamp(-limits, limits).mul_(parts.keep)
        if not linear:
            torch.mul(parts.step, parts.keep, out=self.factor)
        if bounded is not None:
            parts.step.copy_(bounded)
        factors = self.ratios.index_select(0, self.layout.of_edges)
        edges = self.layout.edges
        parts.tree.mul_(factors[:edges])
        if len(factors) > edges:
            parts.tree.mul_(factors[edges:])
        for rounded in parts.rounded:
            rounded.copy_(parts.exact)

    def settle(self, parts: Parts) -> None:
        """Update :attr:`factor` at the end of a step with ``1 / pre``, when the old
        value is no longer needed.
        """
        torch.mul(self.factor, parts.keep, out=self.factor)


__all__ = ["Parts", "Vectors"]
