"""What is measured of each node during the backward pass: its direction is stored until the
gradient at its state arrives, then a few numbers per sample.

For node l and one sample, with ``g_l = dLoss/dx_l``, these are ``c_l = <z_l, -g_l> / (||z_l||
||g_l||)``, the norms of ``z_l``, ``x_{l-1}`` and ``g_l``, and ``<z_l, g_l>``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pathspace.errors import InputError, UnsupportedError

from ..shared.sample_rows import batch_size
from .addition_hooks import Addition, Sites
from .check_traced import Traced
from .nodes import ChainNode, Nodes

# what a record has for each node and sample
MEASURES = ("cosines", "direction_norms", "stream_norms", "gradient_norms", "products")


@dataclass(frozen=True)
class NodeTensors:
    """Direction, stream and gradient of one node, flattened per sample, each of shape (B, D)."""

    direction: Tensor
    stream: Tensor
    gradient: Tensor


@dataclass
class ObservedPass:
    """One forward pass and its backward pass, of a number of samples."""

    samples: int
    held: set[int] = field(default_factory=set)
    rows: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    tensors: dict[int, NodeTensors] = field(default_factory=dict)
    queued: bool = False
    closed: bool = False


class Observer:
    """Stores every node's direction until the gradient of its ``x_l`` arrives, then
    a few numbers per sample.
    """

    def __init__(
        self,
        chain: Nodes,
        done: Callable[[ObservedPass], None],
        keep: bool = False,
        batch_dim: int = 0,
    ) -> None:
        if not chain.nodes:
            raise InputError(
                f"{chain.sentence()[:-1]}, so there is nothing to observe; choose a residual model."
            )
        self.chain, self.done, self.keep, self.batch_dim = chain, done, keep, batch_dim
        self.places, count = chain.samples(batch_dim), batch_size(chain.example, batch_dim)
        for node, place in zip(chain.nodes, self.places, strict=True):
            place.split(node.shape, count)
        self.nodes = chain.by_site()
        # recomputation may call a module again; the number of the call is ignored if only
        # one call makes the addition
        self.once = {
            place: nodes[0]
            for place, nodes in chain.by_place().items()
            if chain.calls_at(place) == 1
        }
        self.current = ObservedPass(count)
        self.traced = Traced(chain)
        self.sites = Sites(self._meet, self.begin, self.traced.check)

    def finish(self) -> None:
        """Finish the last pass, also before the next one, even if some of its
        gradients did not arrive.
        """
        self._close(self.current)
        self.current = ObservedPass(self.current.samples)

    def begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Finish the last pass and begin one with other inputs."""
        self.finish()
        self.current.samples = batch_size((args, kwargs), self.batch_dim)

    def _close(self, current: ObservedPass) -> None:
        if current.rows and not current.closed:
            current.closed = True
            self.done(current)

    def _find(self, addition: Addition) -> ChainNode | None:
        return self.once.get(addition.site.place) or self.nodes.get(addition.site)

    def _meet(self, addition: Addition) -> Tensor:
        node, current = self._find(addition), self.current
        if node is None:
            self.traced.check_addition(addition)
        if node is None or (node.index in current.held and torch._C._current_graph_task_id() != -1):
            return addition.run()
        stream, part = node.split(addition)
        overwritten = addition.in_place and node.direction == 0
        direction = part.detach().clone() if overwritten else part.detach()
        version = direction._version
        with torch.no_grad():
            count = current.samples
            norm = self._flat(stream.detach(), node, count).norm(dim=1).double()
            kept = self._flat(stream.detach().clone(), node, count) if self.keep else None
        result = addition.run()
        if result.requires_grad:
            current.held.add(node.index)
            result.register_hook(
                partial(self._arrive, current, node, direction, version, norm, kept)
            )
        return result

    def _flat(self, value: Tensor, node: ChainNode, samples: int) -> Tensor:
        """One row per sample."""
        flat = self.places[node.index].rows(value, samples)
        return flat if flat.dtype == torch.float64 else flat.float()

    @torch.no_grad()
    def _arrive(
        self,
        current: ObservedPass,
        node: ChainNode,
        direction: Tensor,
        version: int,
        norm: Tensor,
        kept: Tensor | None,
        gradient: Tensor,
    ) -> None:
        if node.index in current.rows:
            return
        if direction._version != version:
            raise UnsupportedError(
                f"The direction of node {node.name!r} ({node.source}) was overwritten before its"
                " gradient arrived; replace the in-place operation after the addition by an"
                " ordinary one."
            )
        count = current.samples
        z, g = self._flat(direction, node, count), self._flat(gradient, node, count)
        z = z * node.scale if node.scale != 1 else z
        largest = g.abs().amax()
        # normalise first, because squares of small float32 gradients underflow
        unit = torch.where((largest > 0) & largest.isfinite(), largest, torch.ones_like(largest))
        g = g / unit
        length, push = z.norm(dim=1).double(), g.norm(dim=1).double()
        product = torch.linalg.vecdot(z, g).double()
        cosine = (-product / (length * push)).clamp(-1, 1)
        unit = unit.double()
        values = (cosine, length, norm, push * unit, product * unit)
        current.rows[node.index] = dict(zip(MEASURES, values, strict=True))
        if kept is not None:
            current.tensors[node.index] = NodeTensors(z.clone(), kept, g * unit.to(g.dtype))
        if not current.queued:
            current.queued = True
            torch.autograd.Variable._execution_engine.queue_callback(partial(self._ended, current))

    def _ended(self, current: ObservedPass) -> None:
        current.queued = False
        if len(current.rows) == len(self.chain.nodes):
            self._close(current)

    def measured(self, current: ObservedPass) -> dict[str, Tensor]:
        """The numbers of one pass by name, shape (L, B); NaN where no gradient arrived."""
        blank = torch.full_like(
            max((row["cosines"] for row in current.rows.values()), key=len), torch.nan
        )
        rows = [current.rows.get(node.index, {}) for node in self.chain.nodes]
        # the only wait for the device
        table = torch.stack(
            [row.get(name, blank).to(blank.device) for name in MEASURES for row in rows]
        ).cpu()
        return dict(zip(MEASURES, table.split(len(rows)), strict=True))
