"""Tensors that are moved along the gauge, with the states of the optimizers around them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from pathspace.gauge.moves import move_, moved
from pathspace.gauge.transport import transported
from pathspace.graph.structure import Structure

from .canonical_gauge import EVERY, Canonical, Sweep
from .matching import Place
from .shell import Shell


class GaugeMoves(Shell):
    """A shell that moves the tensors of its model: the part of
    :class:`pathspace.training.GaugeFixed` that knows no settings.
    """

    norms: str
    return_to: str
    sweep: Sweep
    # the trained tensors by name, with running statistics, and where these are
    _tensors: dict[str, Tensor]
    _places: dict[str, Place]
    # the names of the trained ones, and whether they ask for gradients
    _asked: dict[str, bool]
    _graph: Structure
    _canonical: Canonical
    # log-scales from the user's gauge to the canonical one
    _phi: Tensor
    _device: torch.device
    _turns: int
    # until the first step, for states that belong to the weights as they were
    _given: dict[str, Tensor]
    _written: dict[str, tuple[int, int]]

    def _find_sweep(self) -> None:
        """Create the sweep over all units."""
        self.sweep = Sweep(self._graph, self._canonical, self._device, self.norms)

    def _copies(self) -> dict[str, Tensor]:
        """Copies of the weights."""
        return {block.name: self._tensors[block.name].clone() for block in self._graph.blocks}

    def _carried_back(
        self, own: Mapping[str, Tensor], there: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """The weights in the user's gauge after a step: those before it and the change, rounded
        once.

        Args:
            own: the weights before the step in the user's gauge.
            there: the same in the canonical gauge.
        """
        factors, ends = self._graph.gauge_factors(-self._phi.cpu()), {}
        for name, before in own.items():
            up, down = (side.to(self._device) for side in factors[name])
            kind = torch.promote_types(before.dtype, torch.float32)
            change = self._tensors[name].to(kind) - there[name].to(kind)
            ends[name] = before.to(kind).add_(moved(change, up, down)).to(before.dtype)
        return ends

    def _follow(self) -> None:
        """Follow the model to another device or type: parameters remain the same
        objects there, buffers do not.
        """
        for name, (module, own) in self._places.items():
            self._tensors[name] = getattr(module(), own, self._tensors[name])
        device = next(
            (self._tensors[block.name].device for block in self._graph.blocks), self._device
        )
        if device != self._device:
            self._device, self._phi = device, self._phi.to(device)
            self._find_sweep()

    @torch.no_grad()
    def _give_back(self, phi: Tensor) -> None:
        """Undo the rescaling at construction in tensors that nothing has changed since:
        a state belongs to them.

        Args:
            phi: the log-scales of that rescaling.
        """
        factors = self._graph.gauge_factors(phi)
        for name, before in self._given.items():
            up, down = (side.to(before.device) for side in factors[name])
            tensor = self._tensors[name]
            there = moved(before, up, down, self._graph.shifts.get(name, 0.0))
            address, count = written(tensor)
            # (a loaded weight may be equal to one that was rescaled, for example after steps of
            # rate 0 in a run with the same seed)
            loaded = address == self._written[name][0] and count != self._written[name][1]
            if not loaded and torch.equal(tensor, there.to(tensor)):
                tensor.copy_(before)
        self._given = {}

    def _sweep(self) -> None:
        """Sweep all units, at some steps; what the model holds is moved if it stays there."""
        due = self._turns % EVERY == 0
        self._turns += 1
        if not due or not self.sweep.sides:
            return
        change, factors = self.sweep.step(self._tensors)
        for side, factor, followed in factors:
            tensor = self._tensors.get(side.name)
            if tensor is None:
                continue
            if self.return_to == "canonical" and side.shift:
                move_(tensor, factor, torch.ones_like(factor), side.shift)
            elif self.return_to == "canonical":
                tensor.mul_(factor.to(tensor.dtype))
            if followed is not None:
                for buffer, power in self._buffers_of(tensor):
                    buffer.mul_((followed**-power).to(buffer.dtype))
        self._phi += change

    def _buffers_of(self, tensor: Tensor) -> Iterable[tuple[Tensor, int]]:
        for one in self.optimizers:
            if tensor in one.state:
                return transported(one, tensor)
        return ()

    def _fresh(self, tensor: Tensor) -> bool:
        """Whether a state is that of no step, such as Adagrad's first sums:
        constants without a scale.
        """
        return any(
            one.state[tensor].get("step", 1) == 0 for one in self.optimizers if tensor in one.state
        )

    def _move(
        self,
        phi: Tensor,
        state: bool = False,
        weights: bool = False,
        gradients: bool = False,
        statistics: bool = False,
    ) -> None:
        """Apply a gauge transformation to the states of the optimizers, the parameters, their
        gradients, and running statistics.
        """
        for name, (head, tail) in self._graph.gauge_factors(phi.cpu()).items():
            tensor = self._tensors.get(name)
            if tensor is None:
                continue
            up, down = head.to(self._device), tail.to(self._device)
            if not isinstance(tensor, nn.Parameter):
                if statistics:
                    move_(tensor, up, down, self._graph.shifts.get(name, 0.0))
                continue
            if gradients and tensor.grad is not None and not tensor.grad.is_sparse:
                move_(tensor.grad, down, up)
            if state and not self._fresh(tensor):
                for buffer, power in self._buffers_of(tensor):
                    buffer.mul_(((down / up) ** power).to(buffer.dtype))
            if weights:
                move_(tensor, up, down, self._graph.shifts.get(name, 0.0))


def written(tensor: Tensor) -> tuple[int, int]:
    """Address of a tensor, and how often it was changed in place."""
    return tensor.data_ptr(), tensor._version
