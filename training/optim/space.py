"""The path space of an optimizer: the layout of its weights, with the products along the trees.

Factors by tail and head, path values and weights on the trees are computed from the weights once,
and again after changes of the weights by other code. The rule of a step determines how they change.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from pathspace.errors import UnsupportedError
from pathspace.paths.skeleton import Skeleton

from .bounds import balancing_factors, limits
from .frozen import held_chains
from .kernels import group_size, leaving, summed
from .layout import DYNAMIC, PLAIN, make_layout
from .matching import named
from .record import Record
from .sharding import find_spread, local, sharded, whole
from .slots import Groups, Slot, make_slots
from .tree_products import Manner, check_range, inverse, power, set_constants, tree_products
from .vectors import Parts, Vectors
from .versions import Versions


class PathSpace:
    """The weights of an optimizer with the trees of a skeleton.

    Args:
        owner: the optimizer's class, for messages.
        groups: its parameter groups.
        blocks: the block of every parameter.
        skeleton: the skeleton, without dead units.
        manner: properties of the rule.
        min_ratio: smallest absolute ratio of a path value to its current value.
        absent: block -> weight of the traced model that the optimizer does not have.
        before: the previous path space of these weights.

    Raises:
        UnsupportedError: path space is on several devices, a skeleton weight is 0, or
            path values are too small.
    """

    def __init__(
        self,
        owner: str,
        groups: Groups,
        blocks: Sequence[int | None],
        skeleton: Skeleton,
        manner: Manner,
        min_ratio: float,
        absent: Mapping[int, Tensor] = MappingProxyType({}),
        before: PathSpace | None = None,
    ) -> None:
        self.owner, self.given, self.skeleton = owner, list(blocks), skeleton
        self.manner, self.min_ratio = manner, min_ratio
        self.blocks = blocks = [*blocks, *absent]
        names = [
            *named(groups),
            *((skeleton.graph.blocks[block].name, p) for block, p in absent.items()),
        ]
        self.names = [name for name, _ in names]
        self.spread, self.cut = (
            find_spread(owner, names),
            any(sharded(parameter) for _, parameter in names),
        )
        held = [local(parameter) for _, parameter in names]
        fused = any(group.get("fused") for group in groups)
        index = torch.int32 if fused else torch.int64
        devices = {p.device for p, block in zip(held, blocks, strict=True) if block is not None}
        if len(devices) > 1:
            raise UnsupportedError(
                f"{owner} found path space spread over {', '.join(sorted(map(str, devices)))},"
                " expected one device; give every device a model of its own."
            )
        self.layout = make_layout(skeleton, held, blocks, self.spread, index)
        self.device = self.layout.first.device
        dtypes = [None if block is None else p.dtype for p, block in zip(held, blocks, strict=True)]
        self.vectors = Vectors(self.layout, dtypes, self.device, fused)
        count = sum(p.numel() for p in held)
        size = group_size(count, self.device)
        # with so few elements, the cost of a step is the number of operations
        self.few = count <= size
        self.slots = make_slots(groups, self.blocks, self.layout.parts, held, absent, size)
        self.versions = Versions(self.slots, self.cut)
        # factors by unit to the balanced gauge, and suffixes when it was computed; upper
        # bounds of factors by tail
        ids = (
            0
            if manner.cap is None
            else 1 + skeleton.graph.num_units + skeleton.graph.forms.shape[0]
        )
        self.balancing = torch.ones(ids, dtype=torch.float64)
        self.limits: Tensor | None = None
        self.suffix_then: Tensor | None = None
        if before is not None:
            self.balancing, self.suffix_then = before.balancing.clone(), before.suffix_then
            self.vectors.value.copy_(before.vectors.value)
        # replaces path values for relative steps
        self.one = torch.ones_like(self.vectors.value)
        self.one[0] = torch.inf
        self._find_groups()
        self.counts = torch.zeros(2, self.layout.count, dtype=torch.int32, device=self.device)
        # whether a state was loaded, and whether a tensor is frozen
        self.loaded = self.frozen = False
        # number of computations of the constant factors
        self.constants = 0
        self.held: Tensor | None = None
        self._freeze(
            [
                s.block is not None and not (s.given and s.parameter.requires_grad)
                for s in self.slots
            ]
        )
        self.resync()

    # --- tensors

    def _find_groups(self) -> None:
        """Assign to each chain the settings of the group of its first unit's entering edge."""
        group_of = {
            slot.block: slot.group for slot in self.slots if slot.block is not None and slot.given
        }
        blocks = self.skeleton.tree_in.block
        groups = [
            group_of.get(int(blocks[u]), 0) if u < len(blocks) else 0
            for u in self.layout.first.tolist()
        ]
        # with a single group, settings are numbers; otherwise vectors over chains
        self.one_group = groups[-1] if len(set(groups)) == 1 else None
        self.group_index = (
            None if self.one_group is not None else torch.tensor(groups, device=self.device)
        )

    def setting(self, groups: Groups, name: str, place: int | None = None) -> Any:
        """A setting of path space, or an element of a pair: a number, one-element
        tensor or vector over chains.
        """
        found = [group[name] if place is None else group[name][place] for group in groups]
        if self.one_group is not None:
            return found[self.one_group]
        assert self.group_index is not None
        values = [
            torch.as_tensor(value, dtype=torch.float64, device=self.device) for value in found
        ]
        return torch.stack([v.reshape(()) for v in values])[self.group_index]

    def rows(self, slot: Slot) -> int:
        """Number of rows of a tensor that are processed together (0: all,
        also for compiled steps).
        """
        return 0 if torch.compiler.is_compiling() else slot.rows

    def views(self, tensors: Iterable[Tensor]) -> list[Tensor]:
        """Tensors like the parameters, in the shapes of their views."""
        return [
            tensor if part.order is None and tensor.shape == part.view else part.shaped(tensor)
            for part, tensor in zip(self.layout.parts, tensors, strict=True)
        ]

    def weights(self) -> list[Tensor]:
        """The weights in the shapes of their views."""
        if torch.compiler.is_compiling():
            # a compiler needs the origin of these views
            views = self.views([slot.held.detach() for slot in self.slots])
            return [
                v if s.flat is not None else v.contiguous()
                for v, s in zip(views, self.slots, strict=True)
            ]
        return [
            s.weight if s.flat is not None else s.part.shaped(s.held.detach()).contiguous()
            for s in self.slots
        ]

    def moments(self, slot: Slot, state: dict[str, Any], key: str) -> Tensor:
        """A tensor of the state of a parameter, in the parameter's view.

        After loading a state or moving a parameter, the tensor can have
        another memory layout or type.
        """
        held = local(state[key])
        shaped = slot.part.shaped(held)
        if not torch.compiler.is_compiling() and (
            shaped.data_ptr() != held.data_ptr() or held.dtype != slot.held.dtype
        ):
            state[key] = torch.empty_like(slot.parameter).copy_(state[key])
            shaped = slot.part.shaped(local(state[key]))
        return shaped

    @cached_property
    def record(self) -> Record:
        """The part of a state for tails and for edges on the trees."""
        return Record(self.skeleton, self.blocks, self.vectors, self.cut)

    # --- products along the trees

    @torch.no_grad()
    def resync(self) -> None:
        """Recompute all products along the trees from the weights.

        Raises:
            UnsupportedError: a skeleton weight is 0, or path values are too small.
        """
        prefix, suffix, *tables = self._products()
        vectors, parts = self.vectors, self.vectors.kept
        value = (prefix * suffix)[self.layout.first.cpu()]
        if self.manner.cap is not None:
            self._balance(suffix, value)
        vectors.factor.copy_(self._factors_by_tail(prefix))
        vectors.value.copy_(value)
        parts.least.fill_(self.min_ratio)
        # the root has no path value: with infinity its ratio is 1
        vectors.value[0] = torch.inf
        parts.tree.copy_(self._tree_weights())
        if self.cut:
            self.record.start(
                inverse(
                    self.skeleton, prefix, torch.from_numpy(self.record.ids), self.manner.linear
                ),
                tables,
            )
        self._constants(prefix, suffix)
        factors = ((slot.held.dtype, self.applied(i)) for i, slot in enumerate(self.slots))
        check_range(self.owner, self.manner, vectors.value, factors, self.names, self.spread)
        self.versions.note()

    def _balance(self, suffix: Tensor, value: Tensor) -> None:
        """Compute the balanced gauge, which does not change if the network is only rescaled."""
        before, old = self.suffix_then, self.vectors.value.cpu()
        self.suffix_then = suffix
        if before is not None and torch.allclose(old[1:], value[1:], rtol=1e-4, atol=0.0):
            self.balancing *= (suffix / before).abs()
            return
        blocks = self.skeleton.graph.blocks
        tensors = {
            blocks[s.block].name: whole(s.parameter.detach())
            for s in self.slots
            if s.block is not None
        }
        self.balancing.copy_(balancing_factors(self.skeleton.graph, tensors))

    def recall(self) -> None:
        """Recompute the values that a state does not have, from its weights."""
        self._constants(*self._products()[:2])

    def _tree_weights(self) -> Tensor:
        """Current weights of the edges on the trees, in the order of the layout, in float64."""
        inside = [slot for slot in self.slots if slot.block is not None]
        some = [
            s.part.shaped(s.held.detach()).reshape(-1)[s.part.tree.long()].double() for s in inside
        ]
        return torch.cat(some) if some else torch.zeros(0, dtype=torch.float64)

    def _as_written(self) -> Tensor:
        """The tree weights rounded to the types of their tensors."""
        tree = self.vectors.kept.tree
        some = [
            tree[s.part.edges].to(s.held.dtype).double() for s in self.slots if s.block is not None
        ]
        return torch.cat(some) if some else tree

    def _products(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Prefixes and suffixes of all units, and the weights of their edges in both trees."""
        return tree_products(self.owner, self.skeleton, self.slots, self.spread, self.device)

    def _factors_by_tail(self, prefix: Tensor) -> Tensor:
        """``1 / pre`` of all tails that move, to the power in the step."""
        tails = self._moving_tails()
        return inverse(self.skeleton, prefix, tails, self.manner.linear).to(self.vectors.factor)

    def _moving_tails(self) -> Tensor:
        tails = [part.tail.reshape(-1) for part in self.layout.parts if part.kind == DYNAMIC]
        return torch.cat(tails) if tails else torch.zeros(0, dtype=torch.int64)

    def _constants(self, prefix: Tensor, suffix: Tensor) -> None:
        """Compute the constant factors: ``1 / s_head``, and ``1 / pre_tail``
        if no chain is involved.
        """
        self.constants += 1
        cap, linear = self.manner.cap, self.manner.linear
        if cap is not None:
            self.suffix_then = suffix
            self.limits = limits(power(self.balancing, self._moving_tails()), cap, linear).to(
                self.vectors.factor
            )
        set_constants(self.skeleton, self.slots, self.manner, self.balancing, prefix, suffix)

    def share(self, number: int) -> float:
        """The factor by which a bound reduces the step of a tensor with multiplier 1."""
        return 1.0 if self.slots[number].part.kind != PLAIN else min(1.0, self.manner.cap or 1.0)

    @property
    def bounded_factor(self) -> Tensor:
        """Bounded ``1 / pre`` to the power in the step, by tail."""
        factor = self.vectors.factor
        return factor if self.limits is None else factor.clamp(-self.limits, self.limits)

    def applied(self, number: int) -> list[Tensor]:
        """The factors of a tensor's gradient in a step, by head and by tail,
        which broadcast to its view.
        """
        slot = self.slots[number]
        if self.manner.relative:
            return [slot.part.shaped(slot.held.detach())] if slot.block is not None else []
        part, tail = slot.part, slot.tail
        if part.span is not None:
            tail = self.bounded_factor[part.span].view(part.tail.shape)
        return [side for side in (slot.head, part.spread(tail)) if side is not None]

    @property
    def scales(self) -> Tensor:
        """Divisors by chain that convert derivatives with respect to
        logarithms; infinite for the root.

        They are path values (bounded, for steps with ``1 / scale``), or 1 for relative steps.
        """
        value, cap = self.vectors.value, self.manner.cap
        if self.manner.relative:
            return self.one
        return (
            value
            if cap is None or not self.manner.linear
            else value.abs().clamp_(min=1 / cap).copysign_(value)
        )

    def divisors(self) -> Tensor:
        """Divisors by chain of the derivatives with respect to logarithms in a step:
        bounded squares of path values.
        """
        square, cap = self.scales.square(), self.manner.cap
        return square if cap is None or self.manner.linear else square.clamp_(min=1 / cap)

    # --- changes of the weights by other code

    def refresh(self) -> bool:
        """Update path space after other code has changed or frozen weights; otherwise
        without waiting for the device.

        Returns:
            Whether the memory of the weights has changed: then nothing is done,
            and a new layout is needed.
        """
        now = self.versions.look()
        if now != self.versions.seen or self.loaded:
            if self.versions.moved(now):
                return True
            # weights outside the trees can change freely; with shards, all devices decide together
            changed = self._tree_weights() != self._as_written()
            if bool(self.spread.sum(changed.any().to(torch.int64))):
                self.resync()
            elif self.loaded:
                self.recall()
            self.loaded = False
            self.versions.seen = now
        self.look_for_frozen()
        return False

    def look_for_frozen(self) -> None:
        """Find the frozen tensors of path space and the constant path values.

        Tensors without ``requires_grad`` are frozen, and all tensors are if none has a gradient.
        """
        parameters = [slot.parameter for slot in self.slots]
        # (a fast exit if nothing is frozen and all have gradients)
        if (
            self.held is None
            and not self.frozen
            and all(p.grad is not None and p.requires_grad for p in parameters)
        ):
            return
        asked = [slot.given and slot.parameter.requires_grad for slot in self.slots]
        inside = [slot.block is not None for slot in self.slots]
        reached = any(
            mine and one and slot.grad is not None
            for mine, one, slot in zip(inside, asked, self.slots, strict=True)
        )
        self._freeze(
            [mine and not (one and reached) for mine, one in zip(inside, asked, strict=True)]
        )

    def _freeze(self, still: list[bool]) -> None:
        if still == [slot.still for slot in self.slots]:
            return
        for slot, one in zip(self.slots, still, strict=True):
            slot.still = one
        self.frozen = any(still)
        blocks = [slot.block for slot in self.slots if slot.still and slot.block is not None]
        held = held_chains(self.skeleton, blocks, self.layout.count)
        self.held = torch.from_numpy(held).to(self.device) if held.any() else None

    # --- parts of a step

    def log_gradient(
        self, groups: Groups, parts: Parts, weights: Sequence[Tensor], grads: Sequence[Tensor]
    ) -> Tensor:
        """``c_k`` of all chains, shape ``(chains,)``; the root's entry is not used.

        Args:
            groups: the parameter groups.
            parts: the vectors.
            weights: the weights in the shapes of their views.
            grads: their gradients in the same shapes.
        """
        layout = self.layout
        entries = self._entries(weights, grads)
        total = parts.zero.clone() if not entries else parts.zero
        if entries:
            everything = torch.cat(entries).mul(parts.coefficient)
            if layout.signs is not None:
                everything.mul_(layout.signs)
            total = total.index_add(0, layout.target, everything)
        total = self.spread.sum(total)
        if any(group["maximize"] for group in groups):
            total = total * (1 - 2 * self.setting(groups, "maximize"))
        return total if self.held is None else total.masked_fill_(self.held, 0.0)

    def _entries(self, weights: Sequence[Tensor], grads: Sequence[Tensor]) -> list[Tensor]:
        """Sums of ``w g`` by tail, then the gradients of the edges on the trees."""
        chained = [i for i, slot in enumerate(self.slots) if slot.part.span is not None]
        if self.few and not torch.compiler.is_compiling() and chained:
            products = torch._foreach_mul(
                [weights[i] for i in chained], [grads[i] for i in chained]
            )
            sums = [summed(self.slots[i].part, p) for i, p in zip(chained, products, strict=True)]
        else:
            sums = [
                leaving(s.part, weights[i], grads[i], self.rows(s))
                for i in chained
                for s in (self.slots[i],)
            ]
        return sums + [
            grad.take(s.part.tree.long())
            for grad, s in zip(grads, self.slots, strict=True)
            if s.part.edges.stop > s.part.edges.start
        ]

    def carry(self, parts: Parts) -> None:
        """Apply the ratios to all vectors of path space."""
        self.vectors.carry(parts, self.counts, self.held, self.manner.linear, self.limits)
        if self.cut:
            self.record.follow(self.vectors.ratios, self.manner.linear)

    def finish(self, parts: Parts, weights: Sequence[Tensor]) -> None:
        """Write the tree weights, which are stored in float64, to the
        tensors, and write back copies.
        """
        if self.manner.linear:
            self.vectors.settle(parts)
        compiling = torch.compiler.is_compiling()
        for slot, weight, values in zip(self.slots, weights, parts.on_tree, strict=True):
            if values is not None:
                flat = weight.view(-1) if compiling or slot.flat is None else slot.flat
                flat.index_copy_(0, slot.part.tree.long(), values)
            if slot.flat is None:
                order = slot.part.order or tuple(range(slot.held.ndim))
                slot.held.detach().permute(order).copy_(
                    weight.view([slot.held.shape[d] for d in order])
                )
        if not compiling:
            self.versions.note_step()


__all__ = ["PathSpace"]
