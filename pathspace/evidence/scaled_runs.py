"""Derivatives with respect to log-scales of rows and columns, without the gradients of the weights.

``y = W x`` with rows scaled by ``1 + a`` and columns by ``1 + b`` is ``(1 + a) * W ((1 + b) * x)``:
the factors multiply the activations instead of the weights. A backward pass then costs two thirds
and needs no sums over all weights. A parameter with any other use is scaled directly.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from .convolutions import CONVOLUTIONS, convolved
from .logscales import Family, ScaledTensor

# options of an embedding that make its result nonlinear in the rows
EMBEDDINGS = ("max_norm", "scale_grad_by_freq")


class ScaledRun(TorchFunctionMode):
    """A context in which every use of a tensor of the family is a use of the scaled tensor.

    Args:
        scales: the log-scales.
        tensors: name -> the tensor objects that the model uses.

    Example:
        >>> import torch, pathspace as ps
        >>> from pathspace.evidence.logscales import family
        >>> model = torch.nn.Linear(2, 3).double()
        >>> scales = family(ps.trace(model, torch.randn(1, 2).double()), model, statistics=False)
        >>> with ScaledRun(scales, dict(model.named_parameters())) as run:
        ...     output = model(torch.randn(1, 2).double())
        >>> [leaf.shape[0] for leaf in run.leaves]
        [3, 2, 3]
    """

    def __init__(self, scales: Family, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.of = [
            [torch.zeros(side.count, dtype=torch.float64).requires_grad_() for side in entry.sides]
            for entry in scales.entries
        ]
        self.where: dict[int, tuple[ScaledTensor, list[Tensor], Tensor, int, float]] = {}
        self.done: dict[int, Tensor] = {}
        self.widest = 1
        for entry, leaves in zip(scales.entries, self.of, strict=True):
            for name, times, shift in entry.factors:
                if name in tensors:
                    self.where[id(tensors[name])] = (entry, leaves, tensors[name], times, shift)

    @property
    def leaves(self) -> list[Tensor]:
        """One log-scale for each class of each side, all 0, in the family's order."""
        return [leaf for leaves in self.of for leaf in leaves]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = self._result(func, args, kwargs or {})
        if isinstance(result, Tensor):
            self.widest = max(self.widest, result.numel())
        return result

    def _result(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func in CONVOLUTIONS and len(args) >= 2:
            scaled = self._convolution(func, args, kwargs)
            if scaled is not None:
                return scaled
        if (
            func is F.linear
            and len(args) >= 2
            and (pair := self._pair(args[1], F.linear)) is not None
        ):
            rows, columns = pair
            bias = self._scaled(args[2] if len(args) > 2 else kwargs.get("bias"))
            result = F.linear(args[0] * (1 + columns), args[1]) * (1 + rows)
            return result if bias is None else result + bias
        if (
            func is F.embedding
            and len(args) == 2
            and kwargs.get("padding_idx") is None
            and not any(kwargs.get(key) for key in EMBEDDINGS)
        ):
            pair = self._pair(args[1], F.embedding)
            if pair is not None:
                return F.embedding(args[0], args[1]) * (1 + pair[0][args[0]][..., None] + pair[1])
        return func(*self._scaled(args), **self._scaled(kwargs))

    def _convolution(self, func: Any, args: Any, kwargs: Any) -> Any:
        spatial, transposed = CONVOLUTIONS[func]
        pair = self._pair(args[1], func)
        if pair is None:
            return None
        one, other = (leaf.reshape(-1, *[1] * spatial) for leaf in pair)
        entering, leaving = (one, other) if transposed else (other, one)
        rest = list(args[3:])
        bias = self._scaled(args[2] if len(args) > 2 else kwargs.get("bias"))
        more = {key: value for key, value in kwargs.items() if key != "bias"}
        if args[0].shape[-spatial - 1] != len(entering):
            return None
        x = args[0] * (1 + entering)
        result = convolved(func, x, args[1], *rest, **more) * (1 + leaving)
        return result if bias is None else result + bias.reshape(-1, *[1] * spatial)

    def _pair(self, weight: Any, func: Any) -> tuple[Tensor, Tensor] | None:
        """The log-scales of rows and columns of a weight; ``None`` if it has other log-scales."""
        entry, leaves, _, times, shift = self.where.get(id(weight), (None, [], None, 1, 0.0))
        if entry is None or len(leaves) != 2 or shift or times != 1:
            return None
        rows, columns = (side.index for side in entry.sides)
        plain = rows.numel() == len(rows) == weight.shape[0]
        straight = columns.numel() == columns.shape[1] == weight.shape[1]
        grouped = func in CONVOLUTIONS and columns.shape[:2] == weight.shape[:2]
        return (leaves[0], leaves[1]) if plain and (straight or grouped) else None

    def _scaled(self, value: Any) -> Any:
        """Nested arguments with every tensor of the family scaled."""
        if isinstance(value, Tensor):
            return self._tensor(value) if id(value) in self.where else value
        if isinstance(value, (list, tuple)) and any(
            isinstance(v, (Tensor, list, tuple)) for v in value
        ):
            held = [self._scaled(v) for v in value]
            return (
                held
                if isinstance(value, list)
                else type(value)(*held)
                if hasattr(value, "_fields")
                else tuple(held)
            )
        if isinstance(value, dict):
            return {key: self._scaled(v) for key, v in value.items()}
        return value

    def _tensor(self, value: Tensor) -> Tensor:
        if id(value) not in self.done:
            entry, leaves, _, times, shift = self.where[id(value)]
            total: Any = 0.0
            for side, leaf in zip(entry.sides, leaves, strict=True):
                total = total + leaf[side.index]
            total = torch.as_tensor(total).expand(entry.shape).reshape(value.shape)
            self.done[id(value)] = value + times * (value + shift) * total
        return self.done[id(value)]
