"""Models whose code names a lower precision (``x.float()``,
``dtype=torch.float32``), computed in float64.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

LOWER = frozenset({torch.float32, torch.float16, torch.bfloat16})
CASTS = frozenset({torch.Tensor.float, torch.Tensor.half, torch.Tensor.bfloat16})


class InDouble(TorchFunctionMode):
    """Within: every cast to a lower floating point type is one to float64.

    Norms and softmaxes of language models are written so. Their rounding errors are larger than the
    derivatives that a null-space test has to tell from zero.

    Example:
        >>> import torch
        >>> with InDouble():
        ...     print(
        ...         torch.ones(1).double().float().dtype, torch.zeros(1, dtype=torch.float16).dtype
        ...     )
        torch.float64 torch.float64
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args = tuple(
            torch.float64 if isinstance(value, torch.dtype) and value in LOWER else value
            for value in args
        )
        kwargs = dict(kwargs or {})
        if kwargs.get("dtype") in LOWER:
            kwargs["dtype"] = torch.float64
        return func(*args, **kwargs) if func not in CASTS else torch.Tensor.double(*args, **kwargs)
