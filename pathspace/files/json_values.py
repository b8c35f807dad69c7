"""Values as JSON can hold them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor


def plain(value: Any) -> Any:
    """Values for JSON, at any depth: lists for tuples and tensors, and ``None`` for
    numbers that are not finite.

    Example:
        >>> plain({"sizes": (1, math.inf), 2: math.nan})
        {'sizes': [1, None], '2': None}
    """
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, Tensor):
        return plain(value.tolist())
    return None if isinstance(value, float) and not math.isfinite(value) else value
