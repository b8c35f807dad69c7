"""An upper bound on the multipliers of a step, invariant under rescaling."""

from __future__ import annotations

import torch
from torch import Tensor

from pathspace import Skeleton
from pathspace.training.optim.layout import PLAIN, Layout


class Bounds:
    """Bounds by tail and by head: ``min(1, sqrt(cap) |p|)`` at either end of an edge, ``1 / p^2 <= cap`` for a chain.

    Of steps that take ``1 / scale`` itself: ``min(1, sqrt(cap |p|))``, ``1 / |p| <= cap``.

    Args:
        cap: the bound.
        skeleton: the skeleton.
        layout: the tensors.
        value: path values by chain, kept up to date by others.
        linear: whether a step takes ``1 / scale`` or its square.
    """

    def __init__(self, cap: float, skeleton: Skeleton, layout: Layout, value: Tensor, linear: bool) -> None:
        self.cap, self.layout, self.value, self.linear = cap, layout, value, linear
        chain, sign = (torch.from_numpy(table) for table in (skeleton.chain, skeleton.chain_sign))

        def ends(ids: Tensor) -> tuple[Tensor, Tensor | None]:
            """Chains of some ids, and where they move against them."""
            ids = ids.reshape(-1)
            flip = torch.where(ids < 0, -1, 1) * sign[ids.abs()] < 0
            found = chain[ids.abs()].to(value.device, torch.int32)
            return found, flip.to(value.device) if bool(flip.any()) else None

        self._tails = [ends(part.tail) for part in layout.parts]
        self._heads = [ends(part.head) for part in layout.parts]
        # the root's share of the bound, where no chain is at the tail
        self.shares = [
            1.0 if part.span is not None else min(1.0, cap ** (1.0 if part.kind == PLAIN else 0.5))
            for part in layout.parts
        ]

    def _at(self, end: tuple[Tensor, Tensor | None], keep: Tensor | None = None) -> Tensor:
        """The bound at one end, with 1 for the root's ``p``."""
        chains, flipped = end
        value = self.value.index_select(0, chains).abs_()
        if flipped is not None:
            value = torch.where(flipped, value.reciprocal(), value)
        value = torch.where(chains == 0, 1.0, value if keep is None else value * keep.abs())
        size = value.mul_(self.cap).sqrt_() if self.linear else value.mul_(self.cap**0.5)
        return size.clamp_(max=1.0)

    def tail(self, number: int) -> Tensor:
        """The bound by tail of one tensor, flat."""
        return self._at(self._tails[number])

    def head(self, number: int) -> Tensor:
        """The bound by head of one tensor, in the shape of its heads."""
        return self._at(self._heads[number]).view(self.layout.parts[number].head.shape)

    def limit(self, step: Tensor, keep: Tensor) -> None:
        """Bound the step by tail in place.

        Args:
            step: by tail, what gradients are multiplied by.
            keep: by tail, ``1 / R``: by these the change of path values is taken back.
        """
        for part, end in zip(self.layout.parts, self._tails, strict=True):
            if part.span is not None:
                step[part.span].mul_(self._at(end, keep[part.span]))


__all__ = ["Bounds"]
