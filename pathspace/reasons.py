"""Why scales are fixed: for every one, the shortest chain of operations that ties it to the root."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from pathspace.inference.assemble import Ends
from pathspace.inference.build import ends_of
from pathspace.inference.interpreter import interpret
from pathspace.inference.values import NEUTRAL
from pathspace.inference.witness import Chains, Step, Witness

if TYPE_CHECKING:
    from pathspace.structure import Structure

TOGETHER = "several relations fix it together, or other sizes of the inputs, or it moves no weight"


@dataclass(frozen=True)
class Reason:
    """Scales at one end of a parameter's edges that are fixed, and why.

    Attributes:
        parameter: the parameter whose edges enter (or leave) them.
        side: ``"out"`` for the scales that its edges enter, ``"in"`` for those that they leave.
        scales: how many scales have this chain.
        chain: from the operation that reads them to the one that fixes them.
    """

    parameter: str
    side: str
    scales: int
    chain: tuple[Step, ...]

    def __str__(self) -> str:
        return f"{self.side}: {self.scales:,} fixed by " + ", then ".join(map(str, self.chain))


def reasons(graph: Structure) -> tuple[Reason, ...]:
    """For every fixed scale of a traced model, the shortest chain of reasons to the root.

    The captured graph is walked through once more, with every equation between scales noted together with the operation
    that made it; a search in breadth, from the root, finds the shortest chains. Inputs and constants are the root
    itself; each fixed scale is listed once, at the first parameter whose edges enter it.

    Args:
        graph: of the model.

    Returns:
        Reasons in the order of the parameters, scales with equal chains counted together.

    Example:
        >>> import torch, pathspace as ps
        >>> model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.GELU(), torch.nn.Linear(4, 2))
        >>> found = ps.trace(model, torch.randn(1, 3)).reasons()
        >>> [(reason.parameter, reason.scales, [step.op for step in reason.chain]) for reason in found]
        [('0.weight', 4, ['aten.gelu']), ('2.weight', 2, ['output'])]
    """
    # what the analysis makes for itself has numbers, whatever is the default outside
    with torch.device("cpu"), torch.inference_mode(False):
        witness, _ = interpret(graph.captured, Witness, norm_eps=graph.norm_eps)
        raw = ends_of(witness)
        return _listed(graph, witness, raw)


def _listed(graph: Structure, witness: Witness, raw: Mapping[str, Ends]) -> tuple[Reason, ...]:
    chains = Chains(witness)
    found, seen, passed = [], *np.zeros((2, witness.equations.size), bool)
    for side in ("out", "in"):
        # weights before biases: each scale at the parameter that makes it
        for block in sorted(graph.blocks, key=lambda block: -len(block.shape)):
            if block.name not in raw:
                continue
            ids, final = (raw[block.name].head, block.head) if side == "out" else (raw[block.name].tail, block.tail)
            new = _fixed(ids, final)
            new = new[~seen[new]]
            if len(block.shape) == 1:
                # the scale of what a bias is added to was listed at the weight
                after = chains.before(new)
                seen[new], new = True, new[~passed[new] & ((after == 0) | ~seen[after])]
            seen[new] = passed[chains.before(new)] = True
            for chain, count in chains.of(new) if len(new) else ():
                steps = chain or (Step("relations", "", "", TOGETHER),)
                found.append(Reason(block.name, side, count, steps))
    order = {block.name: number for number, block in enumerate(graph.blocks)}
    return tuple(sorted(found, key=lambda reason: order[reason.parameter]))


def _fixed(ids: Tensor, final: Tensor) -> np.ndarray:
    """Numbers of the scales that were free when they were made and are fixed in the end."""
    shape = torch.broadcast_shapes(ids.shape, final.shape)
    ids, final = ids.expand(shape), final.expand(shape)
    return np.unique(ids[(final == 0) & (ids != 0) & (ids != NEUTRAL)].abs().numpy())


__all__ = ["Reason", "Step", "reasons"]
