"""Optimizers that work on path values instead of weights, and the three of the evolution notes."""

from pathspace.training.optim.gadam import GAdam
from pathspace.training.optim.gsgd import GSGD
from pathspace.training.optim.initial import init_skeleton
from pathspace.training.optim.path_sgd import PathNorm, PathSGD
from pathspace.training.optim.simple import EMASGD, RescaleSGD, SignProp

__all__ = ["EMASGD", "GSGD", "GAdam", "PathNorm", "PathSGD", "RescaleSGD", "SignProp", "init_skeleton"]
