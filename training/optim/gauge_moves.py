"""Tensors that are moved along the gauge, with the states of the optimizers around them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from pathspace.gauge.moves import move_, moved
from pathspace.gauge.transport import transported
from pathspace.graph.structure import Structure

from .canonical_gauge import Canonical
from .matching import Place
from .shell import Shell
from .sweeps import UnitSet, unit_sets


class GaugeMoves(Shell):
    """A shell that moves the tensors of its model: the part of
    :class:`pathspace.training.GaugeFixed` that knows no settings.
    """

    norms: str
    return_to: str
    sets: list[UnitSet]
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

    def _find_sets(self) -> None:
        """Create the sets of units that are treated together."""
        self.sets = unit_sets(self._graph, self._canonical, self._device, self.norms)

    def _short(self) -> dict[str, Tensor]:
        """Copies of the weights in half precision, which two moves would round."""
        return {
            name: self._tensors[name].clone()
            for name in self._asked
            if torch.finfo(self._tensors[name].dtype).bits < 32
        }

    def _carried_back(
        self, own: Mapping[str, Tensor], there: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """The weights in the user's gauge after a step: those before it and the change, rounded
        once.

        Args:
            own: the weights before the step in the user's gauge.
            there: the same in the canonical gauge.
        """
        if not own:
            return {}
        factors, ends = self._graph.gauge_factors(-self._phi.cpu()), {}
        for name, before in own.items():
            up, down = (side.to(self._device) for side in factors[name])
            change = self._tensors[name].float() - there[name].float()
            ends[name] = before.float().add_(moved(change, up, down)).to(before.dtype)
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
            self._find_sets()

    def _copies(self, phi: Tensor) -> dict[str, Tensor]:
        """Copies of the tensors that a gauge transformation changes."""
        ones = {
            name: bool((up == down).all())
            for name, (up, down) in self._graph.gauge_factors(phi.cpu()).items()
        }
        return {
            name: tensor.clone()
            for name, tensor in self._tensors.items()
            if not ones.get(name, True)
        }

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
            tensor, there = (
                self._tensors[name],
                moved(before, up, down, self._graph.shifts.get(name, 0.0)),
            )
            address, count = written(tensor)
            # (a loaded weight may be equal to one that was rescaled, for example after steps of
            # rate 0 in a run with the same seed)
            loaded = address == self._written[name][0] and count != self._written[name][1]
            if not loaded and torch.equal(tensor, there.to(tensor)):
                tensor.copy_(before)
        self._given = {}

    def _sweep(self) -> None:
        """Sweep one set of units."""
        chosen = self.sets[self._turns % len(self.sets)]
        self._turns += 1
        change, factors = chosen.step(self._tensors)
        stay = self.return_to == "user"
        scaled: list[tuple[Tensor, Tensor]] = []
        shifted: dict[float, list[tuple[Tensor, Tensor]]] = {}
        for side, factor, followed in factors:
            tensor = self._tensors.get(side.name)
            if tensor is None:
                continue
            if stay and not isinstance(tensor, nn.Parameter):
                # running statistics have the gauge in which the model runs
                continue
            if side.shift:
                shifted.setdefault(side.shift, []).append((tensor, factor))
            else:
                scaled.append((tensor, factor))
            if followed is not None:
                scaled += [
                    (buffer, followed**-power)
                    for buffer, power in self._buffers_of(tensor)
                    if power
                ]
        for shift, pairs in shifted.items():
            move_together_(pairs, shift)
        if scaled:
            rows = [in_rows(tensor, factor.to(tensor.dtype)) for tensor, factor in scaled]
            torch._foreach_mul_([tensor for tensor, _ in rows], [factor for _, factor in rows])
        self._phi[chosen.units] += change

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

    def _buffers(self) -> list[tuple[Tensor, int]]:
        return [
            pair
            for block in self._graph.blocks
            for pair in self._buffers_of(self._tensors[block.name])
        ]

    def _move(
        self,
        phi: Tensor,
        state: bool = False,
        weights: bool = False,
        gradients: bool = False,
        statistics: bool | None = None,
    ) -> None:
        """Apply a gauge transformation.

        Args:
            phi: its log-scales.
            state: move the state of the optimizers.
            weights: move the parameters.
            gradients: move their gradients.
            statistics: move running statistics; ``None``: with the weights of a model that
                remains in the canonical gauge.
        """
        if statistics is None:
            statistics = weights and self.return_to == "canonical"
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


def in_rows(tensor: Tensor, factor: Tensor) -> tuple[Tensor, Tensor]:
    """Kernels and their factors along inner dimensions as matrices, whose long
    rows are multiplied faster.
    """
    if factor.dim() < 3 or len(factor) > 1 or not tensor.is_contiguous():
        return tensor, factor
    return tensor.view(len(tensor), -1), factor.expand(1, *tensor.shape[1:]).reshape(1, -1)


def written(tensor: Tensor) -> tuple[int, int]:
    """Address of a tensor, and how often it was changed in place."""
    return tensor.data_ptr(), tensor._version


__all__ = ["GaugeMoves", "written"]


def move_together_(pairs: Sequence[tuple[Tensor, Tensor]], constant: float) -> None:
    """:func:`move_` for many short tensors as one vector, which is far quicker."""
    for kind in {tensor.dtype for tensor, _ in pairs}:
        some = [(tensor, factor) for tensor, factor in pairs if tensor.dtype == kind]
        factors = torch.cat([factor.expand(tensor.shape).reshape(-1) for tensor, factor in some])
        values = torch.cat([tensor.detach().reshape(-1) for tensor, _ in some])
        after = moved(values, factors, torch.ones_like(factors), constant)
        for (tensor, _), part in zip(some, after.split([t.numel() for t, _ in some]), strict=True):
            tensor.copy_(part.view(tensor.shape))
