"""Products of weights along the trees of a skeleton, and the factors of a step made of them.

With the prefix ``pre_u`` and the suffix ``s_v``, the products of weights along the two trees, a
step multiplies the gradient of a weight ``u -> v`` by ``1 / (pre_u s_v)^2``, or by the same without
the square. Factors that no step changes are stored with the tensors.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pathspace.errors import UnsupportedError
from pathspace.paths.skeleton import Skeleton

from .bounds import limited
from .layout import PLAIN, STATIC, find_held
from .sharding import Spread
from .slots import Slot


@dataclass(frozen=True)
class Manner:
    """The properties of a rule on which the products along the trees depend.

    Attributes:
        linear: whether a step has ``1 / scale`` instead of its square.
        cap: upper bound of the multipliers.
        relative: whether steps are relative to path values, without multipliers.
        way_out: further advice for the error about path values that are too small.
    """

    linear: bool = False
    cap: float | None = None
    relative: bool = False
    way_out: str = ""


def power(table: Tensor, ids: Tensor) -> Tensor:
    """``table[|id|] ** sign(id)``."""
    value = table[ids.abs()]
    return torch.where(ids < 0, value.reciprocal(), value)


def tree_products(
    owner: str, skeleton: Skeleton, slots: Sequence[Slot], spread: Spread, device: torch.device
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Prefixes and suffixes of all units, and the weights of their edges in both trees.

    Args:
        owner: the optimizer's class, for messages.
        skeleton: the skeleton, without dead units.
        slots: the tensors.
        spread: which of them count on this device.
        device: the device of path space.

    Raises:
        UnsupportedError: a skeleton weight is 0, NaN or infinite.
    """
    tables, counted = [], zip(slots, spread.counted, strict=True)
    slot_of = {slot.block: slot for slot, mine in counted if slot.block is not None and mine}
    for tree in (skeleton.tree_in, skeleton.tree_out):
        values = torch.zeros(len(tree.block), dtype=torch.float64)
        for block, units in tree.by_block():
            if block not in slot_of:
                continue
            slot, shape = slot_of[block], skeleton.graph.blocks[block].shape
            among, index = find_held(slot.part.indices, shape, tree.index[units])
            some = slot.held.detach().reshape(-1)[torch.from_numpy(index).to(slot.held.device)]
            values[torch.from_numpy(units[among])] = some.double().cpu()
        values = spread.sum(values.to(device)).cpu()
        # the root and dead units have no edge
        values[torch.from_numpy(tree.block < 0)] = 1
        bad = (values == 0) | ~values.isfinite()
        if bool(bad.any()):
            unit = int(bad.nonzero()[0])
            name, found = skeleton.graph.blocks[tree.block[unit]].name, float(values[unit])
            raise UnsupportedError(
                f"{owner} found a skeleton weight of {found:g} in {name!r}, expected "
                + (
                    "non-zero ones; choose the skeleton again from the model as it stands, or"
                    " init_skeleton(model, skeleton) first."
                    if found == 0
                    else "finite ones; load weights from before they diverged."
                )
            )
        tables.append(values)
    return skeleton.prefixes(tables[0]), skeleton.suffixes(tables[1]), tables[0], tables[1]


def inverse(skeleton: Skeleton, table: Tensor, ids: Tensor, linear: bool) -> Tensor:
    """``1 / table`` to the power in the step, for some ids; 0 at dead units,
    whose weights are constant.
    """
    lost = skeleton.lost
    values = power(table, ids).reciprocal()
    values = values.masked_fill_(torch.from_numpy(lost)[ids.abs()], 0.0) if lost.any() else values
    return values if linear else values.square()


def set_constants(
    skeleton: Skeleton,
    slots: Sequence[Slot],
    manner: Manner,
    balancing: Tensor,
    prefix: Tensor,
    suffix: Tensor,
) -> None:
    """Store the constant factors with the tensors: ``1 / s_head``, and ``1 / pre_tail``
    if no chain is involved.

    Args:
        skeleton: the skeleton.
        slots: the tensors.
        manner: properties of the rule.
        balancing: factors by unit to the balanced gauge.
        prefix: of all units.
        suffix: of all units.
    """
    cap, linear = manner.cap, manner.linear
    for slot in slots:
        head, tail = (
            inverse(skeleton, suffix, slot.part.head, linear),
            inverse(skeleton, prefix, slot.part.tail, linear),
        )
        if cap is not None:
            head = limited(head, power(balancing, slot.part.head).reciprocal(), cap, linear)
            tail = limited(tail, power(balancing, slot.part.tail), cap, linear)
        slot.head = (
            None if slot.part.kind == PLAIN or bool((head == 1).all()) else head.to(slot.held)
        )
        slot.tail = (
            None if slot.part.kind != STATIC or bool((tail == 1).all()) else tail.to(slot.held)
        )


def check_range(
    owner: str,
    manner: Manner,
    values: Tensor,
    factors: Iterable[tuple[torch.dtype, Sequence[Tensor]]],
    names: Sequence[str | None],
    spread: Spread,
) -> None:
    """Refuse products of skeleton weights that are too small to divide by.

    Args:
        owner: the optimizer's class, for messages.
        manner: properties of the rule.
        values: path values.
        factors: type of each tensor, and the factors of its gradient in a step.
        names: of the tensors.
        spread: how they are sharded.

    Raises:
        UnsupportedError: a quotient exceeds the range of a tensor's type.
    """
    if manner.relative:
        return
    bad = [manner.cap is None and not bool(values.square().reciprocal().isfinite().all())]
    for dtype, applied in factors:
        sizes = [float(factor.abs().amax()) for factor in applied if factor.numel()]
        numbers = torch.finfo(dtype)
        if manner.linear:
            # second moments of gradients as small as a rounding error must be representable
            sizes += [
                math.prod(sizes),
                (math.prod(sizes) * numbers.eps) * (math.prod(sizes) * numbers.eps),
            ]
        bad.append(not all(size <= numbers.max for size in sizes))
    everywhere = spread.sum(torch.tensor(bad, device=values.device).to(torch.int64)).tolist()
    if any(everywhere):
        shown = [f" at {name!r}" if name else "" for name in names]
        where = next((name for name, wrong in zip(shown, everywhere[1:], strict=True) if wrong), "")
        raise UnsupportedError(
            f"{owner} found products of skeleton weights so small that dividing by them"
            f" leads beyond the range of numbers{where}, expected larger ones; start with"
            f" init_skeleton(model, skeleton){manner.way_out}, or compute in float64."
        )


__all__ = ["Manner", "check_range", "inverse", "power", "set_constants", "tree_products"]
