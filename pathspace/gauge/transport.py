"""Rescaling of the optimizer's buffers with the weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.optim import ASGD, LBFGS, Adafactor, Optimizer, RMSprop, Rprop

from ..errors import InputError, UnsupportedError

# Power of the gradient in each buffer: if w becomes f w, its gradient g becomes g / f.
Power = int | Callable[[Any], int]
_REGISTERED: dict[type[Optimizer], dict[str, Power]] = {
    Optimizer: {
        **dict.fromkeys(
            ("momentum_buffer", "exp_avg", "exp_inf", "grad_avg", "prev", "average"), 1
        ),
        **dict.fromkeys(("exp_avg_sq", "max_exp_avg_sq", "square_avg", "sum", "kappa"), 2),
        # an average of squared steps
        "acc_delta": -2,
    },
    # a gradient divided by its size
    RMSprop: {"momentum_buffer": 0},
    # an average of weights; step sizes
    ASGD: {"ax": -1},
    Rprop: {"step_size": -1},
}
# Buffers with one number per parameter, which have no scale.
_COUNTS = frozenset(["step", "mu_product", "mu", "eta"])


def register_transport(kind: type[Optimizer], powers: Mapping[str, Power]) -> None:
    """Declare how the buffers of an optimizer change when the weights are rescaled.

    If a weight becomes ``f w``, a buffer of power ``n`` is multiplied by ``f^-n``. The power is 1
    for averages of gradients, 2 for averages of their squares, 0 for buffers without a scale, and
    -1 for buffers in the unit of the weight. Subclasses inherit the declaration. The buffers of
    ``torch.optim`` are declared already, except those of Adafactor (averages over rows and columns)
    and LBFGS, which cannot be rescaled by weight.

    Args:
        kind: the class of the optimizer.
        powers: key in ``optimizer.state[parameter]`` -> power, or a function of the
            optimizer that returns it.

    Raises:
        InputError: a power is neither an integer nor a function.

    Example:
        >>> import torch, pathspace as ps
        >>> class Lion(torch.optim.Optimizer):
        ...     pass
        >>> ps.register_transport(Lion, {"slow_average": 1})
    """
    for key, power in powers.items():
        if not isinstance(power, int) and not callable(power):
            raise InputError(
                f"register_transport found power {power!r} for buffer {key!r}, expected an integer "
                "or a function of the optimizer."
            )
    _REGISTERED[kind] = {**_REGISTERED.get(kind, {}), **powers}


def expect_transport(owner: str, optimizer: Optimizer) -> None:
    """Refuse the optimizers of torch whose state cannot be rescaled weight by weight."""
    # (a history of all weights together, averages over rows and columns)
    if isinstance(optimizer, LBFGS | Adafactor):
        raise UnsupportedError(
            f"{owner} found {type(optimizer).__name__}, expected one whose buffers have the"
            " shapes of the weights; use another, such as AdamW."
        )


def transported(optimizer: Optimizer, parameter: Tensor) -> Iterator[tuple[Tensor, int]]:
    """An optimizer's buffers for a parameter that have its shape, each with its power."""
    kind = type(optimizer)
    for key, buffer in optimizer.state.get(parameter, {}).items():
        if not isinstance(buffer, Tensor) or key in _COUNTS:
            continue
        if buffer.dim() == 0 and parameter.dim() > 0:
            continue
        known = (_REGISTERED[base] for base in kind.__mro__ if base in _REGISTERED)
        power = next((powers[key] for powers in known if key in powers), None)
        if power is None or buffer.shape != parameter.shape:
            raise UnsupportedError(
                f"{kind.__name__} keeps a buffer {key!r} of shape {tuple(buffer.shape)} for a"
                f" weight of shape {tuple(parameter.shape)}, and pathspace does not know how it"
                " scales with the weight; declare it with ps.register_transport, or drop the"
                " optimizer's state."
            )
        yield buffer, power if isinstance(power, int) else power(optimizer)
