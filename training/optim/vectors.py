"""The few long vectors that a step works on, and the passage of path values from one step to the next.

One buffer in float64 holds, end to end, what entries are multiplied by where chains sum them (-1 for each tail, then
the weights on the trees), the step by tail and ``1 / R`` by tail.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pathspace.training.optim.layout import Layout


@dataclass(frozen=True)
class Parts:
    """Views of the vectors that an optimizer keeps.

    Attributes:
        both: ratios of all chains and their sizes, then reciprocals, shape ``(2, chains)``.
        ratio: the first row: what chains are multiplied by.
        inverse: the second: what they are divided by.
        zero: 0 for all chains.
        least: smallest ratios allowed: by those, path values come as close to 0 as they may.
        coefficient: by tail -1, then the weights on the trees: by these, entries are multiplied where chains sum them.
        tree: the weights on the trees.
        step: by tail, what gradients are multiplied by.
        keep: by tail, ``1 / R``.
        rounded: by type other than float64, the tree weights, step and ``1 / R``.
        exact: the same in float64.
        columns: of every tensor, ``1 / R`` and the step by tail, in its shape and type.
        on_tree: of every tensor, its weights on the trees, in its type.
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
    """What is kept by chain, by tail and by tree edge.

    Args:
        layout: the index vectors.
        dtypes: the type of every tensor; ``None`` for those outside path space.
        device: where the tensors are.
        fused: whether kernels round numbers as they write them, so that no rounded vectors are kept.

    Attributes:
        factor: by tail, ``1 / pre`` to the power that a step takes, shape ``(tails,)``.
        value: path values ``p_k``, the root's infinite, shape ``(chains,)``.
    """

    def __init__(
        self, layout: Layout, dtypes: Sequence[torch.dtype | None], device: torch.device, fused: bool = False
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
        """Views of the vectors; a compiler wants to see where they come from, and cannot start from a view."""
        return self.cut() if torch.compiler.is_compiling() else self.kept

    def make_rounded(self) -> dict[torch.dtype, Tensor]:
        """Room for the tree weights, step and ``1 / R`` by type other than float64."""
        others = {dtype for dtype in self.dtypes if dtype is not None} - {torch.float64}
        exact = self.buffer[self.layout.tails :]
        return {dtype: torch.empty_like(exact, dtype=dtype) for dtype in sorted(others, key=str)}

    def cut(self) -> Parts:
        """Cut the vectors into parts."""
        layout, buffer = self.layout, self.buffer
        # a compiled step is one on whole tensors
        rounded = self.make_rounded() if not self.rounded and torch.compiler.is_compiling() else self.rounded
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
            columns.append(None if span is None else (by_tail[1, span].view(shape), by_tail[0, span].view(shape)))
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
        """Carry out the ratios on everything that is kept by unit, and prepare what the tensors need.

        Args:
            parts: the vectors.
            counts: by chain, how often its value changed sign, and how often it was stopped before 0; added to.
            held: chains that stay; ``None``: none of them.
            linear: whether a step takes ``1 / pre`` or its square. In the first case :attr:`factor` is left as it was,
                for :meth:`settle`.
            limits: by tail, the largest size of the factor of a step.
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
        # 1 / (pre^n R): the step that comes together with the change of the tail; then 1 / (pre R)^n
        torch.mul(self.factor, parts.keep, out=parts.step)
        bounded = None if limits is None else self.factor.clamp(-limits, limits).mul_(parts.keep)
        if not linear:
            torch.mul(parts.step, parts.keep, out=self.factor)
        if bounded is not None:
            parts.step.copy_(bounded)
        for factor in self.ratios.index_select(0, self.layout.of_edges).split(max(1, self.layout.edges)):
            parts.tree.mul_(factor)
        for rounded in parts.rounded:
            rounded.copy_(parts.exact)

    def settle(self, parts: Parts) -> None:
        """The rest of a step that takes ``1 / pre`` itself: its factor, once nobody needs the old one."""
        torch.mul(self.factor, parts.keep, out=self.factor)


__all__ = ["Parts", "Vectors"]
