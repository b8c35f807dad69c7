"""The role of every parameter of a model: in path space, pinned by an operation, or unused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from torch import nn

from ..inference.reasons import Reason
from ..reduction import ReductionGraph, trace
from ..shown import Shown, text_table

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True)
class ParameterStatus:
    """One parameter's account; the three counts add up to its size.

    Attributes:
        name: the parameter, under its first name.
        shape: its shape.
        path_space: scalars that are edges of the reduction graph.
        pinned: scalars consumed by an operation that fixed them.
        unused: scalars that do not influence the outputs.
        free_in: whether some edge leaves a unit with a free scale.
        free_out: whether some edge enters one.
        by: the operation that pinned it, with module and line, or "".
    """

    name: str
    shape: tuple[int, ...]
    path_space: int
    pinned: int
    unused: int
    free_in: bool
    free_out: bool
    by: str

    @property
    def status(self) -> str:
        """``"path space"``, ``"pinned"`` or ``"unused"``: the first that applies to a part."""
        return "path space" if self.path_space else "pinned" if self.pinned else "unused"


@dataclass(frozen=True)
class Explanation(Shown):
    """The account of all parameters, and the graph it was read from.

    Attributes:
        graph: the reduction graph.
        parameters: one entry per parameter.

    Its :attr:`reasons` say, for every fixed scale, what ties it to the root.
    """

    graph: ReductionGraph
    parameters: tuple[ParameterStatus, ...]

    @property
    def totals(self) -> dict[str, int]:
        """Scalars in path space, pinned and unused."""
        return {
            key: sum(getattr(entry, key) for entry in self.parameters)
            for key in ("path_space", "pinned", "unused")
        }

    @cached_property
    def reasons(self) -> tuple[Reason, ...]:
        """For every fixed scale, the shortest chain of operations to the root."""
        return self.graph.reasons()

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values."""
        return {
            "totals": self.totals,
            "parameters": [asdict(entry) for entry in self.parameters],
            "reasons": [asdict(entry) for entry in self.reasons],
            "pinned": [asdict(entry) for entry in self.graph.pinned],
        }

    def __rich__(self) -> Table:
        totals, rows = self.totals, []
        title = (
            f"{totals['path_space']:,} scalars in path space, {totals['pinned']:,} outside it,"
            f" {totals['unused']:,} unused; {len(self.graph.pinned):,} operations fix scales"
        )
        for entry in self.parameters:
            shape = "x".join(map(str, entry.shape)) or "scalar"
            free, why = "", [entry.by] if entry.by else []
            if entry.path_space:
                ends = {"in": entry.free_in, "out": entry.free_out}
                free = " and ".join(end for end in ends if ends[end]) or "none"
                if entry.unused:
                    why.append(f"{entry.unused:,} of its scalars unused")
            why += [str(reason) for reason in self.reasons if reason.parameter == entry.name]
            rows.append((entry.name, shape, entry.status, free, "\n".join(why)))
        return text_table(title, ("parameter", "shape", "status", "scales", "why"), rows)


def explain(
    model: nn.Module, *args: Any, kwargs: Mapping[str, Any] | None = None, norm_eps: str = "ignore"
) -> Explanation:
    """Account for every parameter of a model.

    Args:
        model: any module.
        *args: example inputs.
        kwargs: example inputs by keyword.
        norm_eps: see :func:`pathspace.trace`.

    Returns:
        The explanation; printing it shows a table.

    Raises:
        CaptureError: the model fails on these inputs or cannot be captured.

    Example:
        >>> import torch, pathspace as ps
        >>> model = torch.nn.Sequential(
        ...     torch.nn.Linear(3, 4), torch.nn.GELU(), torch.nn.Linear(4, 2)
        ... )
        >>> explanation = ps.explain(model, torch.randn(1, 3))
        >>> explanation.totals
        {'path_space': 26, 'pinned': 0, 'unused': 0}
        >>> [(pin.op, pin.elements) for pin in explanation.graph.pinned]
        [('aten.gelu', 4)]
        >>> [
        ...     (each.parameter, each.scales, [step.op for step in each.chain])
        ...     for each in explanation.reasons
        ... ]
        [('0.weight', 4, ['aten.gelu']), ('2.weight', 2, ['output'])]
    """
    return account(trace(model, *args, kwargs=kwargs, norm_eps=norm_eps))


def account(graph: ReductionGraph) -> Explanation:
    """Account for every parameter of a traced model."""
    places: dict[str, str] = {}
    for pin in graph.pinned:
        parts = (pin.op, pin.module and f"in {pin.module}", pin.source)
        for name in pin.parameters:
            places.setdefault(name, " ".join(part for part in parts if part))
    entries = []
    for name, parameter in graph.parameters.items():
        block = graph.blocks[graph.index[name]] if name in graph.index else None
        edges = block.num_edges if block is not None else 0
        by, size = places.get(name, ""), parameter.numel()
        pinned = size if block is None and by else 0
        ends = [] if block is None else [block.tail, block.head]
        free_in, free_out = [bool(ids.any()) for ids in ends] or [False, False]
        counts = edges, pinned, size - edges - pinned
        shape = tuple(parameter.shape)
        entries.append(ParameterStatus(name, shape, *counts, free_in, free_out, by))
    return Explanation(graph, tuple(entries))
