"""Whether random elements of the groups of spaces leave the outputs of a model unchanged.

A matrix ``A`` of the group of a space acts on positions along dimensions of parameters: by ``A`` on
those that write the features, by ``A^-T`` on those that read them (``dual``), after gains moved
there and became 1. Random elements of all spaces act at once: where one group changes outputs, so
do almost all products of elements. A document that claims too large a group, forgets a reader or a
gain, or takes the wrong matrix is rejected.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from .bench import Runner, could_change, relative_change
from .document import Rejected, require
from .spaces import FreeSpace, MovedGain, check_places

# draws of weights and inputs, each with other elements
DRAWS = 4
# changes of the outputs up to so many times the precision of their coarsest type count as rounding
ROUNDING, LOOSEST = 1e3, 0.1


def rotate_copy(spaces: Sequence[FreeSpace], ties: Sequence[str], *given: Any) -> str:
    """Check that random elements of all groups do not change the outputs of a copy, at the model's
    own weights and inputs and at others; why no change could be visible, or ``""``.
    """
    bench = _Bases(spaces, ties, *given)
    before = bench.begin()
    compared = could_change(before) and bench.compare(before)
    for number in range(1, DRAWS + 1):
        drawn = bench.draw(number, "unit")
        if drawn is not None:
            compared = bench.compare(drawn) or compared
    return "" if compared else "all outputs are 0, or rounding errors"


class _Types(TorchDispatchMode):
    """The floating-point types of all results."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found = {torch.float64}

    def __torch_dispatch__(self, func, _types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        if getattr(result, "dtype", torch.int64).is_floating_point:
            self.found.add(result.dtype)
        return result


class _Bases(Runner):
    """A copy of a model whose ties are cut, and the spaces of a document."""

    def __init__(self, spaces: Sequence[FreeSpace], ties: Sequence[str], *given: Any) -> None:
        super().__init__(*given)
        self.spaces = spaces
        for name in ties:
            require(name in self.named, f"the model has no parameter {name}")
            path, _, key = name.rpartition(".")
            own = self.named[name]
            twin = torch.nn.Parameter(own.detach().clone(), own.requires_grad)
            self.model.get_submodule(path)._parameters[key] = twin
            # (one module may have several names)
            self.named = dict(self.model.named_parameters(remove_duplicate=False))
        check_places(spaces, self.named, ())
        with _Types() as types:
            self.run()
        self.eps = max(torch.finfo(kind).eps for kind in types.found)
        self.tolerance = max(self.tolerance, min(ROUNDING * self.eps, LOOSEST))

    def compare(self, before: torch.Tensor) -> bool:
        """Let random elements of all groups act: whether the outputs do not change.

        Nothing can be said where a gain is 0, or the last digits of weights change as much.
        """
        of_slices = (
            (space, gain) for space in self.spaces for p in space.slices for gain in p.gains
        )
        divisors = (self._gains(space, gain) for space, gain in of_slices if gain.power < 0)
        if any(bool((gains == 0).any()) for gains in divisors):
            return False
        drawn = [self._element(space) for space in self.spaces]
        if self._gap(before, drawn) <= self.tolerance:
            return True
        if self.rounds(before, self.eps):
            return False
        # the one to blame
        still = [torch.eye(space.size).double()[None] for space in self.spaces]
        alone = [[*still[:k], each, *still[k + 1 :]] for k, each in enumerate(drawn)]
        gaps = [self._gap(before, elements) for elements in alone]
        space, gap = max(zip(self.spaces, gaps, strict=True), key=lambda pair: pair[1])
        raise Rejected(
            f"random elements of {space.group}({space.size}) on the space {space.name} change the"
            f" model's outputs by {gap:.1e}"
        )

    def _element(self, space: FreeSpace) -> Any:
        """A random matrix for each block: orthogonal, and more for groups without a length."""
        n, count = space.size, space.count
        x = torch.randn(count, n, n, generator=self.generator, dtype=torch.float64)
        if space.turn is not None:
            turn = torch.zeros(n, n, dtype=torch.float64)
            partners, signs = map(torch.from_numpy, space.turn)
            turn[torch.arange(n), partners] = signs.double()
            x = x - turn @ x @ turn
        if space.group == "O1":
            ones = torch.full((n, n), 1 / n, dtype=torch.float64)
            centre = torch.eye(n, dtype=torch.float64) - ones
            x = centre @ x @ centre + ones
        left, sizes, right = torch.linalg.svd(x)
        element = left @ right
        if space.group in ("GL", "complex", "scales"):
            size = torch.randn(count, 1, 1, generator=self.generator, dtype=torch.float64)
            element = (size / 2).exp() * (element + 0.5 * x / sizes[:, :1, None])
        return element

    def _doubles(self, name: str) -> Any:
        return self.named[name].detach().to("cpu", torch.float64, copy=True).contiguous()

    def _gains(self, space: FreeSpace, gain: MovedGain) -> Any:
        """What a gain is in the model's sum, for every position of a slice; 1 for none."""
        where = torch.from_numpy(gain.positions)
        gains = self._doubles(gain.parameter).reshape(-1) + space.shifts[gain.parameter]
        return torch.where(where < 0, 1.0, gains[where])

    def _changed(self, elements: Sequence[Any]) -> dict[str, Any]:
        """All parameters that elements change, one for each space."""
        new: dict[str, Any] = {}
        for space, matrix in zip(self.spaces, elements, strict=True):
            dual = torch.linalg.inv(matrix).mT
            for part in space.slices:
                for name in (part.parameter, *(gain.parameter for gain in part.gains)):
                    if name not in new:
                        new[name] = self._doubles(name)
                rows = new[part.parameter].movedim(part.dim, 0)
                at = torch.from_numpy(part.positions.reshape(-1))
                values = rows[at].reshape(*part.positions.shape, -1)
                for gain in part.gains:
                    values = values * self._gains(space, gain)[..., None] ** gain.power
                    used = torch.from_numpy(gain.positions[gain.positions >= 0])
                    new[gain.parameter].view(-1)[used] = 1.0 - space.shifts[gain.parameter]
                rows[at] = ((dual if part.dual else matrix) @ values).reshape(rows[at].shape)
        return new

    def _gap(self, before: torch.Tensor, elements: Sequence[torch.Tensor]) -> float:
        """How much elements change the outputs."""
        new = self._changed(elements)
        return relative_change(before, self.run([(self.named[name], new[name]) for name in new]))
