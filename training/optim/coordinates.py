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
from .layout import held_chains, make_layout
from .scaling import (
    Factors,
    Item,
    by_tail,
    enter_,
    leave_,
    leave_exactly_,
    leave_relatively_,
    restore_,
)
from .settings import Manner
from .tensors import (
    Layout,
    PathTensor,
    Spread,
    as_gradient,
    fill,
    like,
    local,
    local_gradient,
    whole,
)
from .trees import TreeProducts

HALF = (torch.float16, torch.bfloat16)


@dataclass(eq=False)
class Inside:
    """What a step needs again when it leaves.

    Attributes:
        products: the products along the trees.
        scale: factors of all tensors by tail, then by head.
        chains: the path values of chains.
        values: the same as the optimizer sees them.
        moved: the entered tensors, each with its local part in the shape of the step.
        before: their weights before the step, where they are needed.
        grads: the gradients to be put back.
        lent: for the entered tensors, the gradient that was divided in place, and its numbers at
            edges on the trees.
    """

    products: TreeProducts
    scale: Factors
    chains: Tensor
    values: Tensor
    moved: list[tuple[PathTensor, Tensor]]
    before: list[Tensor | None]
    grads: list[tuple[Tensor, Tensor | None]]
    lent: list[tuple[Tensor, Tensor | None] | None]


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
        rooted = manner.cap is not None and manner.cap < 1
        self.layout: Layout = make_layout(skeleton, entries, spread, groups, rooted)
        self.entries = self.layout.entries
        self.device = self.layout.first.device
        self.count = self.layout.first.shape[1]
        self.every = self.layout.signs.new_ones(self.count, dtype=torch.float64)
        # (parameters in one memory)
        self.values = [nn.Parameter(self.every[chains]) for chains in self.layout.chains]
        self.held: Tensor | None = None
        self.waits: list[Tensor | None] = [None] * groups
        self._still: list[bool] = []
        self._resting = True
        self.look_for_frozen()

    # --- frozen weights

    def look_for_frozen(self) -> None:
        """Find the frozen tensors of path space and the constant path values.

        Tensors without ``requires_grad`` are frozen, and all tensors are if none has a gradient.
        """
        # (a fast exit if nothing is frozen and all have gradients)
        if (
            self.held is None
            and not self._resting
            and all(
                entry.parameter.requires_grad and entry.parameter.grad is not None
                for entry in self.entries
            )
        ):
            return
        asked = [
            entry.block is not None and entry.given and entry.parameter.requires_grad
            for entry in self.entries
        ]
        reached = any(
            one and entry.grad is not None for one, entry in zip(asked, self.entries, strict=True)
        )
        still = [
            entry.block is not None and not (one and reached)
            for one, entry in zip(asked, self.entries, strict=True)
        ]
        if still == self._still:
            return
        self._still, self._resting = still, any(still)
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

    def products(self) -> TreeProducts:
        """The products of the weights along both trees."""
        return TreeProducts.of(self.owner, self.layout, self.skeleton, self.spread)

    def start(self) -> dict[str, Tensor]:
        """What belongs to the start of a run: the smallest path values and, for a bound, the
        balanced gauge.
        """
        products = self.products()
        found = {"least": products.chains(self.layout).abs() * self.manner.min_ratio}
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
        products = self.products()
        products.expect_numbers(self.owner, self.layout, self.skeleton)
        if self.manner.relative:
            return
        kept = self.start()
        power, scale = self.manner.power, self.scale(products, kept)
        values = products.chains(self.layout)
        bad = [self.manner.cap is None and not bool(values.square().reciprocal().isfinite().all())]
        pieces = scale.split_with_sizes(self.layout.sizes)
        for entry in self.entries:
            numbers, largest = torch.finfo(entry.parameter.dtype), []
            for side in (entry.tails, entry.heads):
                if side is not None and pieces[side[0]].numel():
                    largest.append(float(pieces[side[0]].abs().min().reciprocal()) ** power)
            if power == 1 and largest:
                # second moments of gradients as small as a rounding error must be representable
                both = float(np.prod(largest))
                largest += [both, (both * numbers.eps) * (both * numbers.eps)]
            bad.append(not all(size <= numbers.max for size in largest))
        everywhere = self.spread.sum(torch.tensor(bad, device=self.device).to(torch.int64)).tolist()
        if any(everywhere):
            shown = [f" at {entry.name!r}" if entry.name else "" for entry in self.entries]
            found = zip(shown, everywhere[1:], strict=True)
            where = next((name for name, wrong in found if wrong), "")
            way_out = "" if self.manner.cap else ", pass max_multiplier=1.0"
            raise UnsupportedError(
                f"{self.owner} found products of skeleton weights so small that dividing by them"
                f" leads beyond the range of numbers{where}, expected larger ones; start with"
                f" init_skeleton_(model, skeleton){way_out}, or compute in float64."
            )

    def scale(self, products: TreeProducts, kept: dict[str, Tensor]) -> Tensor:
        """Factors of all tensors: ``pre`` by tail, then ``s`` by head; bounded from below."""
        table = products.table
        scale = table.index_select(0, self.layout.factors)
        if self.manner.cap is None:
            return scale
        # 1 / scale^power in the balanced gauge is at most the root of the bound, at each end
        count = len(table) // 4
        balanced = kept["balanced"]
        to_balanced = table[count : 2 * count].abs() / balanced
        least = torch.cat(
            [to_balanced.reciprocal(), to_balanced, to_balanced, to_balanced.reciprocal()]
        )
        most = self.manner.cap ** (0.5 / self.manner.power)
        least = least.index_select(0, self.layout.factors) / most
        return torch.maximum(scale.abs(), least).copysign_(scale)

    def chain_values(self, values: Tensor) -> Tensor:
        """The path values of all chains as the optimizer sees them: bounded from below, or 1 for
        relative steps.
        """
        if self.manner.relative:
            return torch.ones_like(values)
        if self.manner.cap is None:
            return values
        return (
            values.abs().clamp_(min=self.manner.cap ** (-1 / self.manner.power)).copysign_(values)
        )

    # --- a step

    def enter(self, kept: dict[str, Tensor], exact: bool) -> Inside:
        """Replace weights and gradients by path values and theirs.

        Args:
            kept: a result of :meth:`start`.
            exact: whether weights must come back exactly from a step that does not change them.
        """
        products = self.products()
        chains = products.chains(self.layout)
        scale = Factors(self.scale(products, kept), self.layout.sizes)
        inside = Inside(products, scale, chains, self.chain_values(chains), [], [], [], [])
        items: list[Item] = []
        for entry in self.entries:
            gradient = local_gradient(entry.parameter) if entry.given else None
            if entry.still:
                # (a gradient from before it was frozen)
                if gradient is not None:
                    inside.grads.append((entry.parameter, entry.grad))
                continue
            if entry.block is None and (entry.tails is None or gradient is None):
                continue
            weight = entry.seen(local(entry.parameter))
            if gradient is not None:
                gradient = like(weight, entry.seen(gradient))
            items.append((entry, weight, gradient))
            keeps = self.manner.relative or exact or weight.dtype in HALF
            inside.before.append(weight.clone() if keeps else None)
            inside.grads.append((entry.parameter, entry.grad))
        inside.moved = [(entry, weight) for entry, weight, _ in items]
        self._write(inside, items)
        return inside

    def _write(self, inside: Inside, items: list[Item]) -> None:
        """Write path values and gradients into the tensors and into the parameters of chains."""
        layout, none = self.layout, inside.values
        taken = {
            id(entry): gradient.take(entry.where)
            for entry, _, gradient in items
            if gradient is not None and entry.count
        }
        parts = [
            taken[id(entry)] if id(entry) in taken else none.new_zeros(entry.count)
            for entry in self.entries
            if entry.count
        ]
        by_edge = torch.cat([none[:0], *parts]) * inside.products.here
        if self.manner.relative:
            totals, written = self._enter_relatively(items)
        else:
            totals, written = enter_(items, inside.scale, layout.alive)
        places = {id(items[i][0]): total for i, total in totals.items()}
        sums = [
            places[id(entry)] if id(entry) in places else none.new_zeros(entry.sums)
            for entry in self.entries
            if entry.sums
        ]
        everything = torch.cat([*sums, by_edge]).mul_(layout.signs)
        total = torch.zeros_like(none).index_add_(0, layout.target, everything)
        total = self.spread.sum(total)
        if self.held is not None:
            total.masked_fill_(self.held, 0.0)
        total /= inside.values
        self.every.copy_(inside.values)
        for chains, value, moves in zip(layout.chains, self.values, self._moves, strict=True):
            value.grad = total[chains] if moves else None
        for parameter, _ in inside.grads:
            parameter.grad = None
        for (entry, _, given), gradient in zip(items, written, strict=True):
            lent = given if gradient is given and (entry.tails or entry.heads) else None
            inside.lent.append(None if lent is None else (lent, taken.get(id(entry))))
            if gradient is not None:
                if entry.count:
                    flat = gradient.view(-1) if gradient.is_contiguous() else None
                    if flat is not None:
                        flat.index_fill_(0, entry.where, 0)
                    else:
                        gradient.put_(entry.where, gradient.new_zeros(entry.count))
                entry.parameter.grad = as_gradient(entry, gradient)

    def _enter_relatively(self, items: list[Item]) -> tuple[dict[int, Tensor], list[Tensor | None]]:
        """Gradients by logarithms of path values, for weights that stand at 1."""
        written = [None if g is None else w * g for _, w, g in items]
        totals = {
            i: by_tail(items[i][0], product)
            for i, product in enumerate(written)
            if product is not None and items[i][0].sums
        }
        for _, weight, _ in items:
            weight.fill_(1)
        return totals, written

    def leave(self, inside: Inside, kept: dict[str, Tensor]) -> None:
        """Replace path values by weights again.

        Args:
            inside: a result of :meth:`enter`.
            kept: a result of :meth:`start`, with the numbers of clipped path values.
        """
        layout = self.layout
        ratio = self._ratios(inside, kept)
        ratios = torch.cat([ratio, ratio.reciprocal()])
        turned = Factors(
            ratios.index_select(0, layout.of_tails), layout.sizes[: layout.tail_pieces]
        )
        plain = []
        for (entry, weight), before, lent in zip(
            inside.moved, inside.before, inside.lent, strict=True
        ):
            if before is None:
                plain.append((entry, weight, lent[0] if lent else None))
            elif self.manner.relative:
                leave_relatively_(entry, weight, before, turned)
            else:
                leave_exactly_(entry, weight, before, inside.scale, turned)
                if lent is not None:
                    restore_(entry, lent[0], inside.scale)
        leave_(plain, inside.scale, turned)
        tree = inside.products.here
        for places in layout.of_edges:
            tree = tree * ratios.index_select(0, places)
        rounded: dict[torch.dtype, dict[int, Tensor]] = {}
        with_edges = [id(entry) for entry in self.entries if entry.count]
        for entry, weight in inside.moved:
            if entry.count:
                if weight.dtype not in rounded:
                    pieces = tree.to(weight.dtype).split_with_sizes(layout.edge_counts)
                    rounded[weight.dtype] = dict(zip(with_edges, pieces, strict=True))
                fill(weight, entry.where, rounded[weight.dtype][id(entry)])
        for (entry, _), lent in zip(inside.moved, inside.lent, strict=True):
            if lent is not None and lent[1] is not None:
                fill(lent[0], entry.where, lent[1])
        for parameter, gradient in inside.grads:
            parameter.grad = gradient

    def _ratios(self, inside: Inside, kept: dict[str, Tensor]) -> Tensor:
        """``R`` of all chains; counts sign changes, and path values stopped before 0."""
        ratio = self.every / inside.values
        if self.held is not None:
            ratio.masked_fill_(self.held, 1.0)
        least, size = kept["least"] / inside.chains.abs(), ratio.abs()
        kept["counts"] += torch.stack([ratio, size - least]) <= 0
        # (a ratio of -0 is that of a value stopped at 0)
        return torch.maximum(size, least).copysign_(ratio.add_(0.0))

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


__all__ = ["Inside", "PathCoordinates"]
