"""Why scales are fixed: for each, the shortest chain of operations that connects it to the root."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from .assemble import Ends
from .build import ends_of
from .interpreter import interpret
from .values import NEUTRAL
from .witness import Chains, ReasonLink, Witness

if TYPE_CHECKING:
    from ..graph.structure import Structure

TOGETHER = "several relations fix it together, or other sizes of the inputs, or it moves no weight"


@dataclass(frozen=True)
class Reason:
    """Fixed scales at one end of a parameter's edges, and why they are fixed.

    Attributes:
        parameter: the name of the parameter.
        side: ``"out"`` for scales at the heads of its edges, ``"in"`` for scales at their tails.
        scales: how many scales have this chain.
        chain: operations from the one that reads these scales to the one that fixes them.
    """

    parameter: str
    side: str
    scales: int
    chain: tuple[ReasonLink, ...]

    def __str__(self) -> str:
        return f"{self.side}: {self.scales:,} fixed by " + ", then ".join(map(str, self.chain))


def reasons(graph: Structure) -> tuple[Reason, ...]:
    """For every fixed scale of a traced model, the shortest chain of operations to the root.

    The captured graph is interpreted again, and each equation between scales is stored with
    its operation. A breadth-first search from the root finds the shortest chains. Inputs
    and constants are the root itself. Each fixed scale is listed once, at the first
    parameter whose edges enter it.

    Args:
        graph: the reduction graph of the model.

    Returns:
        Reasons in the order of the parameters; scales with equal chains share one.

    Example:
        >>> import torch, pathspace as ps
        >>> model = torch.nn.Sequential(
        ...     torch.nn.Linear(3, 4), torch.nn.GELU(), torch.nn.Linear(4, 2)
        ... )
        >>> found = ps.trace(model, torch.randn(1, 3)).reasons()
        >>> [
        ...     (reason.parameter, reason.scales, [step.op for step in reason.chain])
        ...     for reason in found
        ... ]
        [('0.weight', 4, ['aten.gelu']), ('2.weight', 2, ['output'])]
    """
    # the tensors of the analysis need values, even if the default device is meta
    with torch.device("cpu"), torch.inference_mode(False):
        witness, _ = interpret(graph.captured, Witness, norm_eps=graph.norm_eps)
        raw = ends_of(witness)
        return _listed(graph, witness, raw)


def _listed(graph: Structure, witness: Witness, raw: Mapping[str, Ends]) -> tuple[Reason, ...]:
    chains = Chains(witness)
    found, seen, passed = [], *np.zeros((2, witness.equations.size), bool)
    for side in ("out", "in"):
        # weights before biases: list each scale at the parameter that creates it
        for block in sorted(graph.blocks, key=lambda block: -len(block.shape)):
            if block.name not in raw:
                continue
            ids, final = (
                (raw[block.name].head, block.head)
                if side == "out"
                else (raw[block.name].tail, block.tail)
            )
            new = _fixed(ids, final)
            new = new[~seen[new]]
            if len(block.shape) == 1:
                # the scale of the sum with a bias was listed at the weight
                after = chains.before(new)
                seen[new], new = True, new[~passed[new] & ((after == 0) | ~seen[after])]
            seen[new] = passed[chains.before(new)] = True
            for chain, count in chains.of(new) if len(new) else ():
                steps = chain or (ReasonLink("relations", "", "", TOGETHER),)
                found.append(Reason(block.name, side, count, steps))
    order = {block.name: number for number, block in enumerate(graph.blocks)}
    return tuple(sorted(found, key=lambda reason: order[reason.parameter]))


def _fixed(ids: Tensor, final: Tensor) -> np.ndarray:
    """Ids of the scales that were free when they were created and are fixed in the end."""
    shape = torch.broadcast_shapes(ids.shape, final.shape)
    ids, final = ids.expand(shape), final.expand(shape)
    return np.unique(ids[(final == 0) & (ids != 0) & (ids != NEUTRAL)].abs().numpy())
