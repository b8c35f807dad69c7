r"""Path values in place of weights: enter before a step of any optimizer, leave after it.

With ``pre`` and ``s`` the products of weights along the two trees and ``p_k`` the path values of
the chains, the values of basis paths are ``v_e = pre_tail w_e s_head`` of the edges in neither
tree, and the ``p_k``. With ``lambda_e = w_e dL/dw_e`` their gradients are::

    dL/dv_e = dL/dw_e / (pre_tail s_head)
    dL/dp_k = c_k / p_k
    c_k = sum over e in T_in \\ T_out entering k of lambda_e
        - sum over e not in T_out leaving k of lambda_e

After the step of the optimizer, with the ratios ``R_k = p_k' / p_k``::

    w_e <- v_e' / (pre_tail s_head) / R_tail                  edges in neither tree
    w_e <- w_e R_head / R_tail                                edges of T_in that are not in T_out

and the weights on ``T_out`` are constant. Nothing is remembered from one step to the next.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from pathspace.errors import UnsupportedError
from pathspace.paths.skeleton import Skeleton

from .canonical_gauge import canonical
from .layout import Layout, held_chains
from .settings import Manner
from .tensors import (
    HALF,
    LENT,
    Entered,
    PathTensor,
    Spread,
    as_gradient,
    by_column,
    factors_of,
    known,
    local,
    local_gradient,
    summed,
    whole,
)
from .trees import TreeProducts, expect_tree_weights

# products of two such numbers are numbers of float32
SMALL = 1e-18


@dataclass(eq=False)
class Inside:
    """What a step needs again when it leaves.

    Attributes:
        products: the products along the trees.
        values: the path values of chains, as the optimizer sees them.
        straight: whether weights stand as they are, with gradients divided twice.
        items: what has entered of each tensor.
        grads: the gradients to be put back.
    """

    products: TreeProducts
    values: Tensor
    straight: bool
    items: list[Entered]
    grads: list[tuple[Tensor, Tensor | None]]


class PathCoordinates:
    """The coordinates of one set of tensors.

    Args:
        owner: the optimizer's class, for messages.
        skeleton: the skeleton, without dead units.
        entries: the tensors.
        spread: how they are sharded.
        groups: number of parameter groups.
        manner: how a step depends on path values.

    Attributes:
        every: the path values of all chains in a step.
        slope: their gradients.
        values: for each group, the parameter of its chains' path values.
        held: mask of the constant chains; ``None`` if there are none.
        waits: the same for the chains of each group.
    """

    def __init__(
        self,
        owner: str,
        skeleton: Skeleton,
        entries: Sequence[PathTensor],
        spread: Spread,
        groups: int,
        manner: Manner,
    ) -> None:
        self.owner, self.skeleton, self.spread, self.manner = owner, skeleton, spread, manner
        devices = {local(e.parameter).device for e in entries if e.block is not None}
        if len(devices) > 1:
            raise UnsupportedError(
                f"{owner} found path space spread over {', '.join(sorted(map(str, devices)))},"
                " expected one device; give every device a model of its own."
            )
        self.layout = Layout(skeleton, entries, spread, groups, manner.cap)
        self.entries = self.layout.entries
        self.device = self.layout.tree.device
        self.count = self.layout.count
        self.every = torch.ones_like(self.layout.ratio)
        self.slope = torch.zeros_like(self.every)
        # (parameters in one memory)
        self.values = [nn.Parameter(self.every[chains]) for chains in self.layout.chains]
        self._slopes = [self.slope[chains] for chains in self.layout.chains]
        self.held: Tensor | None = None
        self.waits: list[Tensor | None] = [None] * groups
        self._short = any(entry.parameter.dtype in HALF for entry in entries)
        self._still: list[bool] = []
        self.look_for_frozen()

    # --- frozen weights

    def look_for_frozen(self) -> None:
        """Find the frozen tensors of path space and the constant path values.

        Tensors without ``requires_grad`` are frozen, and all tensors are if none has a gradient.
        """
        reached = any(
            entry.block is not None and entry.grad is not None and entry.parameter.requires_grad
            for entry in self.entries
        )
        still = [
            entry.block is not None
            and not (reached and entry.given and entry.parameter.requires_grad)
            for entry in self.entries
        ]
        if still == self._still:
            return
        self._still = still
        for entry, one in zip(self.entries, still, strict=True):
            entry.still = one
        blocks = [entry.block for entry in self.entries if entry.still and entry.block is not None]
        held = held_chains(self.skeleton, self.layout.chain, blocks)
        self.held = torch.from_numpy(held).to(self.device) if held.any() else None
        self.waits = [
            self.held[chains] if self.held is not None and bool(self.held[chains].any()) else None
            for chains in self.layout.chains
        ]
        self._moves = [waits is None or not bool(waits.all()) for waits in self.waits]

    # --- products and factors

    def start(self) -> dict[str, Tensor]:
        """What belongs to the start of a run: the smallest path values and, for a bound, the
        balanced gauge.
        """
        products = TreeProducts.of(self.owner, self.layout, self.spread)
        found = {"least": products.chains.abs() * self.manner.min_ratio}
        if self.manner.cap is not None:
            blocks = self.skeleton.graph.blocks
            tensors = {
                blocks[entry.block].name: whole(entry.parameter.detach())
                for entry in self.entries
                if entry.block is not None
            }
            phi = canonical(self.skeleton.graph, tensors).phi
            ids = np.concatenate([np.zeros(1), phi, self.skeleton.graph.forms @ phi])
            # (the suffix in the balanced gauge, which neither steps nor rescalings change)
            count = len(ids)
            suffix = products.table[count : 2 * count].abs()
            found["balanced"] = suffix / torch.from_numpy(ids).exp().to(suffix)
        return found

    @torch.no_grad()
    def expect_range(self) -> None:
        """Refuse weights on the trees that are not finite, 0, or too small to divide by.

        Raises:
            UnsupportedError: one is 0, NaN or infinite, or a quotient exceeds the range of a
                tensor's type.
        """
        products = TreeProducts.of(self.owner, self.layout, self.spread)
        expect_tree_weights(self.owner, self.layout)
        if self.manner.relative:
            return
        kept = self.start()
        power, scale = self.manner.power, self.scale(products, kept)
        values = products.chains
        bad = [self.manner.cap is None and not bool(values.square().reciprocal().isfinite().all())]
        self.layout.scale.fill(scale)
        for entry in self.entries:
            numbers = torch.finfo(entry.parameter.dtype)
            least = [side.abs().min().double() for side in entry.factors]
            sizes = [float(one**-power) for one in least]
            if power == 1 and sizes:
                # second moments of gradients as small as a rounding error must be representable
                both = float(np.prod(sizes))
                sizes += [both, (both * numbers.eps) ** 2]
            bad.append(max(sizes, default=0.0) > numbers.max)
        everywhere = self.spread.sum(torch.tensor(bad, device=self.device).to(torch.int64)).tolist()
        if any(everywhere):
            found = zip(self.entries, everywhere[1:], strict=True)
            where = next((f" at {entry.name!r}" for entry, bad in found if bad and entry.name), "")
            way_out = "" if self.manner.cap else ", pass max_multiplier=1.0"
            raise UnsupportedError(
                f"{self.owner} found products of skeleton weights so small that dividing by them"
                f" leads beyond the range of numbers{where}, expected larger ones; start with"
                f" init_skeleton_(model, skeleton){way_out}, or compute in float64."
            )

    def scale(
        self, products: TreeProducts, kept: dict[str, Tensor], squared: bool = False
    ) -> Tensor:
        """Factors of all tensors, or their squares: ``pre`` by tail, then ``s`` by head; bounded
        from below.
        """
        table, factors = products.table, self.layout.factors
        if self.manner.cap is None:
            return (products.squares if squared else table).index_select(0, factors)
        # 1 / scale^power in the balanced gauge is at most the root of the bound, at each end
        count = len(table) // 4
        balanced = kept["balanced"]
        to_balanced = table[count : 2 * count].abs() / balanced
        least = torch.cat(
            [to_balanced.reciprocal(), to_balanced, to_balanced, to_balanced.reciprocal()]
        )
        most = self.manner.cap ** (0.5 / self.manner.power)
        least = least.index_select(0, factors) / most
        scale = table.index_select(0, factors)
        scale = torch.maximum(scale.abs(), least).copysign_(scale)
        return scale * scale if squared else scale

    def chain_values(self, values: Tensor) -> Tensor:
        """The path values of all chains as the optimizer sees them: bounded from below, or 1 for
        relative steps.
        """
        if self.manner.relative:
            return torch.ones_like(values)
        if self.manner.cap is None:
            return values
        least = self.manner.cap ** (-1 / self.manner.power)
        return values.abs().clamp_(min=least).copysign_(values)

    # --- a step

    def enter(
        self, kept: dict[str, Tensor], *, exact: bool = False, straight: bool = False
    ) -> Inside:
        """Replace weights and gradients by path values and theirs.

        Args:
            kept: a result of :meth:`start`.
            exact: whether weights must come back exactly from a step that does not change them.
            straight: whether the step adds multiples of gradients and weights alone, so that
                weights can take it as they are, with gradients divided twice.
        """
        layout = self.layout
        products = TreeProducts.of(self.owner, self.layout, self.spread)
        values = self.chain_values(products.chains)
        keeps = self.manner.relative or exact
        # (an underflow would divide gradients of 0 by 0)
        straight = straight and not keeps and not self._short and products.least > SMALL
        layout.scale.fill(self.scale(products, kept, straight))
        inside = Inside(products, values, straight, [], [])
        sums: list[Tensor] = []
        edges: list[Tensor] = []
        for entry in self.entries:
            grad, total, some = entry.grad, None, None
            if entry.block is None and (grad is None or not entry.factors):
                continue
            if grad is not None:
                inside.grads.append((entry.parameter, grad))
                if entry.still:
                    # (that of a frozen weight is from before)
                    entry.parameter.grad = None
            if not entry.still:
                weight = local(entry.parameter)
                half = weight.dtype in HALF
                before, factors = weight.clone() if keeps or half else None, factors_of(entry, half)
                item = Entered(entry, weight, before, factors)
                inside.items.append(item)
                if grad is not None:
                    own = local_gradient(entry.parameter, grad)
                    total, some = self._give(item, own, straight)
                if self.manner.relative:
                    weight.fill_(1)
                elif not straight:
                    for factor in factors:
                        weight.mul_(factor)
            if entry.sums:
                sums.append(values.new_zeros(entry.sums) if total is None else total)
            if entry.count:
                edges.append(values.new_zeros(entry.count) if some is None else some)
        self._give_chains(inside, sums, edges)
        return inside

    def _give(
        self, item: Entered, grad: Tensor, straight: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        """Give a parameter its gradient by path values.

        Returns:
            The sums of ``w dL/dw`` by tail, and the gradient at the edges on the trees.
        """
        entry, relative = item.entry, self.manner.relative
        some = grad.take(entry.where) if entry.count else None
        total = summed(entry, item.weight, grad) if entry.sums else None
        if relative:
            written = item.weight * grad
        else:
            # (gradients that are large are divided in place, and multiplied back)
            large = grad.numel() > LENT and entry.dead is None and item.before is None
            if large and grad.stride() == item.weight.stride():
                item.lent = grad, some
            written = grad if item.factors or item.lent else grad.clone()
            for number, factor in enumerate(item.factors):
                written = written.div_(factor) if number or item.lent else written / factor
        if entry.dead is not None:
            written.masked_fill_(entry.dead, 0.0)
        if written.dtype != item.weight.dtype:
            written = written.to(item.weight.dtype)
        if entry.count and not straight:
            # (where weights stand as they are, those on the trees are written over)
            written.put_(entry.where, entry.nothing)
        entry.parameter.grad = as_gradient(entry, written)
        return total, some

    def _give_chains(self, inside: Inside, sums: list[Tensor], edges: list[Tensor]) -> None:
        """Give the parameters of chains their values and gradients."""
        layout, values = self.layout, inside.values
        if sums or edges:
            layout.given.copy_(torch.cat([*sums, *edges]).mul_(layout.signs))
            layout.given_edges.mul_(inside.products.here)
        total = self.spread.sum(self.slope.zero_().index_add_(0, layout.target, layout.given))
        if self.held is not None:
            total.masked_fill_(self.held, 0.0)
        total /= values
        self.every.copy_(values)
        for value, slope, moves in zip(self.values, self._slopes, self._moves, strict=True):
            value.grad = slope if moves else None

    def leave(self, inside: Inside, kept: dict[str, Tensor]) -> None:
        """Replace path values by weights again.

        Weights are divided by their factors: a product with the reciprocals would let weights that
        rest drift, by rounding.

        Args:
            inside: a result of :meth:`enter`.
            kept: a result of :meth:`start`, with the numbers of clipped path values.
        """
        self._find_ratios(inside, kept)
        self.layout.turn(inside.products.here)
        for item in inside.items:
            entry, weight = item.entry, item.weight
            if item.before is not None:
                self._leave_exactly(item, item.before, entry.turn)
            else:
                for factor in () if inside.straight else item.factors:
                    weight.div_(factor)
                if entry.turn is not None:
                    weight.div_(by_column(entry, entry.turn))
            if entry.count:
                weight.put_(entry.where, entry.tree)
            if item.lent is not None:
                grad, some = item.lent
                for factor in item.factors:
                    grad.mul_(factor)
                if some is not None:
                    grad.put_(entry.where, some)
        for parameter, gradient in inside.grads:
            parameter.grad = gradient

    def _leave_exactly(self, item: Entered, before: Tensor, turn: Tensor | None) -> None:
        """Write ``(w + (v' - v) / scale) / R_tail``, which leaves a weight as it was where nothing
        moved; for relative steps ``w v' / R_tail``.
        """
        kind = torch.promote_types(before.dtype, torch.float32)
        if self.manner.relative:
            change = item.weight * before
        else:
            start = before.clone()
            for factor in item.factors:
                start.mul_(factor)
            change = item.weight.to(kind) - start.to(kind)
            for factor in item.factors:
                change /= factor
            change += before
        item.weight.copy_(change if turn is None else change / turn)

    def _find_ratios(self, inside: Inside, kept: dict[str, Tensor]) -> None:
        """``R`` of all chains; counts sign changes, and path values stopped before 0."""
        ratio = torch.div(self.every, inside.values, out=self.layout.ratio)
        if self.held is not None:
            ratio.masked_fill_(self.held, 1.0)
        sizes = inside.products.chains.abs()
        if known(torch.addcmul(kept["least"], ratio, sizes, value=-1).max()) < 0:
            return
        least, size = kept["least"] / sizes, ratio.abs()
        kept["counts"] += torch.stack([ratio, size - least]) <= 0
        # (a ratio of -0 is that of a value stopped at 0)
        torch.maximum(size, least, out=size)
        ratio.copy_(size.copysign_(ratio.add_(0.0)))

    def gradient_norm(self) -> Tensor:
        """The norm of all gradients inside a step."""
        parts = [value.grad.square().sum() for value in self.values if value.grad is not None]
        own = [
            local(entry.grad).double().square().sum()
            for entry, counted in zip(self.entries, self.spread.counted, strict=True)
            if counted and entry.grad is not None
        ]
        none = self.values[0].new_zeros(())
        shared = self.spread.sum(torch.stack([none, *own]).sum())
        return torch.stack([shared, *parts]).sum().sqrt()
