"""Optimizers that work on path values instead of weights, and the three of the evolution notes."""

from pathspace.gauge.transport import register_transport

from .gadam import GAdam
from .gauge_fixed import GaugeFixed
from .gsgd import GSGD
from .initial import init_skeleton
from .path_sgd import PathNorm, PathSGD
from .simple import EMASGD, RescaleSGD, SignProp

# moments of gradients with respect to path values, which no rescaling changes
register_transport(GAdam, {"exp_avg": 0, "exp_avg_sq": 0})
# relative steps average derivatives with respect to logarithms of path values
register_transport(GSGD, {"momentum_buffer": lambda optimizer: 0 if optimizer.relative else 1})

__all__ = [
    "EMASGD",
    "GSGD",
    "GAdam",
    "GaugeFixed",
    "PathNorm",
    "PathSGD",
    "RescaleSGD",
    "SignProp",
    "init_skeleton",
]
