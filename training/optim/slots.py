"""The tensors of an optimizer in the views of their layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from .kernels import rows_of_group
from .layout import PLAIN, Part

Groups = Sequence[dict[str, Any]]


@dataclass(eq=False)
class Slot:
    """One tensor of an optimizer.

    Attributes:
        parameter: the parameter.
        group: the position of its group.
        block: its block of the graph; ``None`` outside path space.
        part: its layout.
        held: its part on this device.
        weight: the same in the part's view.
        flat: the view as one row of the same memory; ``None`` if a copy is needed and written back.
        rows: number of rows that are processed together (0: all).
        head: ``1 / s_head`` to the power in the step; ``None`` for 1.
        tail: ``1 / pre_tail`` if no chain is involved.
        still: whether it is frozen.
        given: whether the optimizer has it; otherwise it is a constant weight of the traced model.
    """

    parameter: Tensor
    group: int
    block: int | None
    part: Part
    held: Tensor
    weight: Tensor
    flat: Tensor | None
    rows: int
    head: Tensor | None = None
    tail: Tensor | None = None
    still: bool = False
    given: bool = True

    @property
    def grad(self) -> Tensor | None:
        """Its gradient, if the optimizer has it."""
        return self.parameter.grad if self.given else None

    @property
    def idle(self) -> bool:
        """Whether this step does not change it."""
        return self.still or (self.part.kind == PLAIN and self.parameter.grad is None)


def make_slots(
    groups: Groups,
    blocks: Sequence[int | None],
    parts: Sequence[Part],
    held: Sequence[Tensor],
    absent: Mapping[int, Tensor],
    size: int,
) -> list[Slot]:
    """One slot for each parameter of the groups, then for each weight that the
    optimizer does not have.

    Args:
        groups: the parameter groups.
        blocks: the block of every tensor.
        parts: the layout of every tensor.
        held: the part of every tensor on this device.
        absent: block -> weight of the traced model that the optimizer does not have.
        size: number of weights that are processed together.
    """
    owned = [(p, g) for g, group in enumerate(groups) for p in group["params"]]
    given = len(owned)
    owned += [(p, 0) for p in absent.values()]
    slots: list[Slot] = []
    for (parameter, g), block, part, tensor in zip(owned, blocks, parts, held, strict=True):
        weight = part.shaped(tensor.detach())
        dense = weight.data_ptr() == tensor.data_ptr() and weight.is_contiguous()
        flat = weight.view(-1) if dense else None
        rows = rows_of_group(part, size)
        slots.append(
            Slot(parameter, g, block, part, tensor, weight, flat, rows, given=len(slots) < given)
        )
    return slots


__all__ = ["Groups", "Slot", "make_slots"]
