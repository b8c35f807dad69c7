"""Optimizers that work on path values instead of weights, and the three of the evolution notes."""

from pathspace import register_transport
from pathspace.training.optim.gadam import GAdam
from pathspace.training.optim.gauge_fixed import GaugeFixed
from pathspace.training.optim.gsgd import GSGD
from pathspace.training.optim.initial import init_skeleton
from pathspace.training.optim.path_sgd import PathNorm, PathSGD
from pathspace.training.optim.simple import EMASGD, RescaleSGD, SignProp

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
