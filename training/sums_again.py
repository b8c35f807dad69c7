"""Sums before a ReLU, found again in the backward pass from the ReLU's output and the
entries that it sets to 0.

Of ``s = x + z`` and ``y = max(s, 0)`` autograd keeps ``x`` and ``y``. Where ``y`` is not 0, ``s``
is ``y``; so only the entries of ``s`` up to 0 are kept, packed, and ``z = s - x`` is exactly what
it would be with all of ``s``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.weak import WeakTensorKeyDictionary

from pathspace.errors import UnsupportedError

_IN_PLACE = frozenset([torch.relu_, Tensor.relu_])
RELUS = frozenset([F.relu, torch.relu, Tensor.relu]) | _IN_PLACE


class Before:
    """Computes ``s - x`` again in the backward pass, where ``s`` is the sum before a ReLU.

    Args:
        stream: ``x``, which autograd keeps.
    """

    def __init__(self, stream: Tensor) -> None:
        self.operands: tuple[Tensor, ...] = (stream.detach(),)
        self.version = 0
        self.direction: Tensor | None = None

    def made(self, total: Tensor) -> None:
        """Note the sum, until the ReLU keeps what is needed of it."""
        self.operands, self.version = (*self.operands, total.detach()), total._version

    def __call__(self, *_: Tensor) -> Tensor:
        """The direction; once for each time that a gradient passes the ReLU."""
        found, self.direction = self.direction, None
        if found is None and self.operands and self.operands[1]._version == self.version:
            return self.operands[1] - self.operands[0]
        if found is None:
            raise UnsupportedError(
                "A sum of the penalised model was read by a ReLU alone when it was traced, and now"
                " gradients reach it by another way only; call penalize with inputs, and in the"
                " mode, in which the model is trained."
            )
        return found


class SumsAgain:
    """Remembers which tensors are sums that a ReLU is expected to take, until it does.

    Example:
        >>> sums, x, z = SumsAgain(), torch.zeros(2), torch.tensor([-1.0, 2.0], requires_grad=True)
        >>> before = Before(x)
        >>> s = sums.expect(x + z, before)
        >>> sums.run(F.relu, (s,), {}).sum().backward()
        >>> before()
        tensor([-1.,  2.])
    """

    def __init__(self) -> None:
        self.known = WeakTensorKeyDictionary()

    def expect(self, total: Tensor, before: Before) -> Tensor:
        """Note a sum that has been computed.

        Args:
            total: ``s``.
            before: what its gradient asks for the direction.
        """
        before.made(total)
        self.known[total] = before
        return total

    def run(self, relu: Callable[..., Tensor], args: tuple[Any, ...], kwargs: Any) -> Tensor:
        """Call one of :data:`RELUS`, which keeps what is needed of a sum that was announced."""
        if torch.compiler.is_compiling():
            return relu(*args, **kwargs)
        values = dict(zip(("input", "inplace"), args, strict=False)) | kwargs
        before = self.known.pop(values["input"], None)
        if before is None or values["input"]._version != before.version:
            return relu(*args, **kwargs)
        in_place = relu in _IN_PLACE or bool(values.get("inplace"))
        return _Relu.apply(values["input"], before, in_place)  # type: ignore[no-any-return, no-untyped-call]

    def __reduce__(self) -> tuple[type[SumsAgain], tuple[()]]:
        """Copies, also those in files, remember nothing."""
        return SumsAgain, ()


class _Relu(torch.autograd.Function):
    """ReLU that keeps the entries which it sets to 0."""

    @staticmethod
    def forward(ctx: Any, total: Tensor, before: Before, in_place: bool) -> Tensor:
        low = total[total <= 0]
        result = total.relu_() if in_place else total.relu()
        if in_place:
            ctx.mark_dirty(total)
        ctx.before = before
        ctx.save_for_backward(result, low, before.operands[0])
        before.operands = ()  # for autograd to free
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        result, low, stream = ctx.saved_tensors
        ctx.before.direction = result.detach().masked_scatter(result == 0, low).sub_(stream)
        return torch.ops.aten.threshold_backward(gradients[0], result, 0), None, None


__all__ = ["RELUS", "Before", "SumsAgain"]
