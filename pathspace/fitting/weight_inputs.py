"""What a model multiplies by each of its weights, while it runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

# operation -> positions of the input and of the weight, and the dimension of the weight that is
# summed over
PRODUCTS: dict[Any, tuple[int, int, int]] = {
    torch.nn.functional.linear: (0, 1, -1),
    torch.addmm: (1, 2, -2),
    **dict.fromkeys(
        (torch.matmul, torch.mm, Tensor.matmul, Tensor.mm, Tensor.__matmul__), (0, 1, -2)
    ),
}

LINEAR = ("input", "weight", "bias")

# name of a weight, its dimension along which is summed, and the input with that dimension last
# -> what is multiplied in its place
Look = Callable[[str, int, Tensor], Tensor]


class WeightInputs(TorchFunctionMode):
    """Show ``look`` the input of every product with a weight, and multiply what it returns."""

    def __init__(self, tensors: Mapping[str, Tensor], look: Look) -> None:
        super().__init__()
        self._names = {
            tensor.untyped_storage().data_ptr(): (name, tensor)
            for name, tensor in tensors.items()
            if tensor.dim() > 1
        }
        self._look = look

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.nn.functional.linear and kwargs:
            # (by keyword or not, it is the same product)
            args = (*args, *(kwargs.pop(key) for key in LINEAR[len(args) :] if key in kwargs))
        if func in PRODUCTS:
            place, weight, dim = PRODUCTS[func]
            if len(args) > weight and isinstance(args[weight], Tensor) and args[weight].dim() == 2:
                seen = self._seen(args[place], args[weight], dim)
                args = (*args[:place], seen, *args[place + 1 :])
        return func(*args, **(kwargs or {}))

    def _seen(self, given: Tensor, factor: Tensor, dim: int) -> Tensor:
        name, weight = self._names.get(factor.untyped_storage().data_ptr(), ("", factor))
        if not name or weight.shape not in (factor.shape, factor.mT.shape):
            return given
        # (the weight itself, or transposed)
        own = dim % 2 if weight.stride() == factor.stride() else (dim + 1) % 2
        return self._look(name, own, given)
