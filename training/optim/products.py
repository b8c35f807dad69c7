"""What follows from the weights: products along the trees, kept from step to step, and when to look at them again."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from pathspace import UnsupportedError
from pathspace.training.optim.frozen import held_chains
from pathspace.training.optim.layout import DYNAMIC, PLAIN, STATIC
from pathspace.training.optim.matching import named
from pathspace.training.optim.sharding import Whole, local, version
from pathspace.training.optim.state import Remembered
from pathspace.training.optim.vectors import Parts


def power(table: Tensor, ids: Tensor) -> Tensor:
    """``table[|id|] ** sign(id)``."""
    value = table[ids.abs()]
    return torch.where(ids < 0, value.reciprocal(), value)


class Products(Remembered):
    """An optimizer that keeps the products along the trees of its skeleton.

    Factors by tail and head, path values and weights on the trees are made from the weights once, and again where
    someone else has changed those. What a step does to them is said elsewhere.
    """

    # whether a step takes ``1 / scale`` or its square; whether multipliers are bounded; what else to do if they are not
    _linear = False
    _capped = False
    _way_out = ""
    _owned: list[tuple[Tensor, int]]
    _parameters: list[Tensor]
    _factor: Tensor
    _value: Tensor
    _still: list[bool]
    _held: Tensor | None
    _counts: Tensor
    _kept: Parts

    @property
    def _tree(self) -> Tensor:
        """The weights on the trees, in float64."""
        return self._kept.tree

    @property
    def _least(self) -> Tensor:
        """The ratios by which path values come as close to 0 as they may."""
        return self._kept.least

    def _tree_weights(self) -> Tensor:
        """Present weights of the edges on the trees, in the order of the layout, in float64."""
        some = [
            part.shaped(p.detach()).reshape(-1)[part.tree].double()
            for part, p, block in zip(self._layout.parts, self._parameters, self._blocks, strict=True)
            if block is not None
        ]
        return torch.cat(some) if some else torch.zeros(0, dtype=torch.float64)

    @torch.no_grad()
    def resync(self) -> None:
        """Recompute all products along the trees from the weights.

        Called by itself when weights were changed by in-place operations other than this optimizer's (loading a model's
        state, clipping weights); call it after changing ``parameter.data``, which leaves no trace.

        Raises:
            UnsupportedError: a skeleton weight is 0.
        """
        prefix, suffix = self._products()
        self._factor.copy_(self._factors_by_tail(prefix))
        self._value.copy_((prefix * suffix)[self._layout.first.cpu()])
        self._least.fill_(self.min_ratio)
        # the root has no path value: dividing by infinity leaves its ratio at 1
        self._value[0] = torch.inf
        self._tree.copy_(self._tree_weights())
        self._constants(prefix, suffix)
        self._check_range()
        self._note_versions()

    def _products(self) -> tuple[Tensor, Tensor]:
        """Prefixes and suffixes of all units, from the weights."""
        skeleton, layout, tables = self.skeleton, self._layout, []
        place = {block: i for i, block in enumerate(self._blocks) if block is not None}
        for tree in (skeleton.tree_in, skeleton.tree_out):
            values = torch.zeros(len(tree.block), dtype=torch.float64)
            for block, units in tree.by_block():
                flat = self._parameters[place[block]].detach().reshape(-1)
                index = tree.index[units] - layout.parts[place[block]].offset
                held = (index >= 0) & (index < flat.numel())
                some = flat[torch.from_numpy(index[held]).to(flat.device)]
                values[torch.from_numpy(units[held])] = some.double().cpu()
            values = self._shards.sum(values.to(self._value.device)).cpu()
            # the root and dead units have no edge
            values[torch.from_numpy(tree.block < 0)] = 1
            bad = (values == 0) | ~values.isfinite()
            if bool(bad.any()):
                unit = int(bad.nonzero()[0])
                name, found = skeleton.graph.blocks[tree.block[unit]].name, float(values[unit])
                raise UnsupportedError(
                    f"{type(self).__name__} found a skeleton weight of {found:g} in {name!r}, expected "
                    + (
                        "non-zero ones; choose the skeleton anew from the model as it stands, or init_skeleton(model, "
                        "skeleton) first."
                        if found == 0
                        else "finite ones; load weights from before they diverged."
                    )
                )
            tables.append(values)
        return skeleton.prefixes(tables[0]), skeleton.suffixes(tables[1])

    def _factors_by_tail(self, prefix: Tensor) -> Tensor:
        """``1 / pre`` of all tails that move, to the power that a step takes."""
        tails = [part.tail.reshape(-1) for part in self._layout.parts if part.kind == DYNAMIC]
        ids = torch.cat(tails) if tails else torch.zeros(0, dtype=torch.int64)
        return self._power(self._inverse(prefix, ids)).to(self._factor)

    def _inverse(self, table: Tensor, ids: Tensor) -> Tensor:
        """``1 / table`` for some ids; 0 where they depend on a dead unit, so that weights at it stay."""
        lost = self.skeleton.lost
        values = power(table, ids).reciprocal()
        return values.masked_fill_(torch.from_numpy(lost)[ids.abs()], 0.0) if lost.any() else values

    def _check_range(self) -> None:
        """Refuse products of skeleton weights so small that what a step divides by them is no number.

        Raises:
            UnsupportedError: naming the first tensor.
        """
        bad = [not self._capped and not bool(self._value.square().reciprocal().isfinite().all())]
        for i, parameter in enumerate(self._parameters):
            sizes = [float(factor.abs().amax()) for factor in self._multipliers(i) if factor.numel()]
            numbers = torch.finfo(parameter.dtype)
            if self._linear:
                # squares of moments are kept: those of gradients as small as one rounding should be numbers
                sizes += [math.prod(sizes), (math.prod(sizes) * numbers.eps) * (math.prod(sizes) * numbers.eps)]
            bad.append(not all(size <= numbers.max for size in sizes))
        everywhere = self._shards.sum(torch.tensor(bad, device=self._value.device).to(torch.int64)).tolist()
        if any(everywhere):
            names = [f" at {name!r}" if name else "" for name, _ in named(self.param_groups)]
            where = next((name for name, wrong in zip(names, everywhere[1:], strict=True) if wrong), "")
            raise UnsupportedError(
                f"{type(self).__name__} found products of skeleton weights so small that dividing by them leads beyond "
                f"the range of numbers{where}, expected larger ones; start with init_skeleton(model, skeleton)"
                f"{self._way_out}, or compute in float64."
            )

    def _multipliers(self, number: int) -> list[Tensor]:
        """By head and by tail, what a step multiplies the gradient of a tensor by."""
        span = self._layout.spans[number]
        tail = self._tail[number] if span is None else self._factor[slice(*span)]
        return [factor for factor in (self._head[number], tail) if factor is not None]

    def _constants(self, prefix: Tensor, suffix: Tensor) -> None:
        """Factors that a step never changes: ``1 / s_head``, and ``1 / pre_tail`` where no chain is involved."""
        self._head: list[Tensor | None] = []
        self._tail: list[Tensor | None] = []
        for part, (parameter, _) in zip(self._layout.parts, self._owned, strict=True):
            head, tail = self._inverse(suffix, part.head), self._inverse(prefix, part.tail)
            for values, kept, wanted in (
                (head, self._head, part.kind != PLAIN),
                (tail, self._tail, part.kind == STATIC),
            ):
                factor = self._power(values)
                # with a bound, the bounded product is rounded, not its factors
                exact = factor.to(parameter.device) if self._capped and kept is self._head else factor.to(parameter)
                kept.append(exact if wanted and not bool((factor == 1).all()) else None)

    def _power(self, scale: Tensor) -> Tensor:
        """The factor a step takes from ``1 / scale``: its square for gradient descent."""
        return scale if self._linear else scale.square()

    def _note_versions(self) -> None:
        self._seen = self._look()

    def _look(self) -> list[tuple[int, int, tuple[int, ...]]]:
        """Where the weights are, how often they were written to, and how they lie."""
        if type(self._shards) is not Whole:
            pairs = [(version(p), local(p)) for p, _ in self._owned]
            return [(held.data_ptr(), count, held.stride()) for count, held in pairs]
        return [(p.data_ptr(), p._version, p.stride()) for p in self._parameters]

    def _check_versions(self) -> None:
        """Look after weights that were changed by someone else, without asking the device for anything."""
        if torch.compiler.is_compiling():
            return
        now = self._look()
        if now != self._seen:
            if any(new[::2] != old[::2] for new, old in zip(now, self._seen, strict=True)):
                self._connect()
            else:
                # weights off the trees may change freely; with shards, all devices decide together
                changed = self._tree_weights() != self._as_written()
                if bool(self._shards.sum(changed.any().to(torch.int64))):
                    self.resync()
                elif any(count < 0 for _, count, _ in self._seen):
                    self._recall()
            self._note_versions()
        # quickly, where all moved and all have gradients
        if any(self._still) or any(p.grad is None or not p.requires_grad for p, _ in self._owned):
            self._look_for_frozen([p.grad for p, _ in self._owned])

    def _recall(self) -> None:
        """Recompute what a state does not hold, from the weights that belong to it."""
        prefix, suffix = self._products()
        if self._stale:
            self._factor.copy_(self._factors_by_tail(prefix))
            self._stale = False
        self._constants(prefix, suffix)

    def _look_for_frozen(self, grads: Sequence[Tensor | None]) -> None:
        """Note which tensors of path space are not to move, and which path values stay with them.

        Those that ask for no gradient; all of them where no gradient has reached any (before the first step, where
        none is known, those that ask for one do).
        """
        inside = [block is not None for block in self._blocks]
        asked = [parameter.requires_grad for parameter, _ in self._owned]
        reached = any(i and a and g is not None for i, a, g in zip(inside, asked, grads, strict=True))
        unknown = all(grad is None for grad in grads)
        still = [i and not (a and (reached or unknown)) for i, a in zip(inside, asked, strict=True)]
        if still == self._still:
            return
        self._still, self._held = still, None
        frozen = [block for block, s in zip(self._blocks, still, strict=True) if s and block is not None]
        held = held_chains(self.skeleton, frozen, self._layout.count)
        if held.any():
            self._held = torch.from_numpy(held).to(self._value.device)

    def _as_written(self) -> Tensor:
        """The tree weights as the tensors hold them: rounded to their types."""
        some = [
            value.to(p.dtype).double()
            for value, p, block in zip(
                self._tree.split(list(self._layout.trees)), self._parameters, self._blocks, strict=True
            )
            if block is not None
        ]
        return torch.cat(some) if some else self._tree
