"""Optimizers in coordinates of a network: path values, or a gauge that is kept."""

from pathspace.gauge.transport import register_transport

from .descents import GSGD, GAdam
from .gauge_fixed import GaugeFixed
from .path_space import PathSpace

# moments of gradients by path values, which no rescaling changes
register_transport(
    PathSpace,
    dict.fromkeys(
        (
            *("momentum_buffer", "exp_avg", "exp_inf", "grad_avg", "prev", "exp_avg_sq"),
            *("max_exp_avg_sq", "square_avg", "sum", "acc_delta", "ax", "step_size"),
        ),
        0,
    ),
)

__all__ = [
    "GSGD",
    "GAdam",
    "GaugeFixed",
    "PathSpace",
]
