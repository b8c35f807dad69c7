"""What optimizers remember about a weight, and how it follows the weight's scale."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor
from torch.optim import ASGD, Optimizer, RMSprop, Rprop

from pathspace.errors import InputError, UnsupportedError

# By the power of the gradient: where w becomes f w, its gradient g becomes g / f.
_BY_NAME: Mapping[str, int] = {
    **dict.fromkeys(("momentum_buffer", "exp_avg", "exp_inf", "grad_avg", "prev"), 1),
    **dict.fromkeys(("exp_avg_sq", "max_exp_avg_sq", "square_avg", "sum", "kappa"), 2),
}
# Numbers that are kept for each parameter, whatever its shape.
_COUNTS = frozenset(["step", "mu_product", "mu", "eta"])
_REGISTERED: dict[type[Optimizer], dict[str, int]] = {
    # a gradient over its own size
    RMSprop: {"momentum_buffer": 0},
    # an average of weights; sizes of steps
    ASGD: {"ax": -1},
    Rprop: {"step_size": -1},
}


def register_transport(kind: type[Optimizer], powers: Mapping[str, int]) -> None:
    """Say how the buffers of an optimizer follow a rescaling of the weights.

    Where a weight becomes ``f w``, a buffer of power ``n`` becomes ``f^-n`` times what it was: 1 for averages of
    gradients, 2 for averages of their squares, 0 for what has no scale, -1 for what is measured like the weight.
    Subclasses follow, and names that ``torch.optim`` uses are known.

    Args:
        kind: the class of the optimizer.
        powers: key in ``optimizer.state[parameter]`` -> power.

    Raises:
        InputError: a power is no integer.

    Example:
        >>> import torch, pathspace as ps
        >>> class Lion(torch.optim.Optimizer):
        ...     pass
        >>> ps.register_transport(Lion, {"slow_average": 1})
    """
    for key, power in powers.items():
        if not isinstance(power, int):
            raise InputError(f"register_transport found power {power!r} for buffer {key!r}, expected an integer.")
    _REGISTERED[kind] = {**_REGISTERED.get(kind, {}), **powers}


def transported(optimizer: Optimizer, parameter: Tensor) -> Iterator[tuple[Tensor, int]]:
    """Buffers that an optimizer keeps for a parameter in its shape, each with its power.

    Raises:
        UnsupportedError: a buffer of which nobody said how it scales.
    """
    kind = type(optimizer)
    for key, buffer in optimizer.state.get(parameter, {}).items():
        if not isinstance(buffer, Tensor) or (buffer.dim() == 0 and parameter.dim() > 0) or key in _COUNTS:
            continue
        own = next((_REGISTERED[base] for base in kind.__mro__ if key in _REGISTERED.get(base, {})), _BY_NAME)
        if key not in own or buffer.shape != parameter.shape:
            raise UnsupportedError(
                f"{kind.__name__} keeps a buffer {key!r} of shape {tuple(buffer.shape)} for a weight of shape "
                f"{tuple(parameter.shape)}, and pathspace does not know how it scales with the weight; declare it "
                f"with ps.register_transport, rescale before training, or drop the optimizer's state."
            )
        yield buffer, own[key]


__all__ = ["register_transport", "transported"]
