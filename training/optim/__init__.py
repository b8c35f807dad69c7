"""Optimizers that work on path values instead of weights, and the three of the evolution notes."""

from training.optim.gadam import GAdam
from training.optim.gsgd import GSGD
from training.optim.initial import init_skeleton
from training.optim.path_sgd import PathNorm, PathSGD
from training.optim.simple import EMASGD, RescaleSGD, SignProp

__all__ = ["EMASGD", "GSGD", "GAdam", "PathNorm", "PathSGD", "RescaleSGD", "SignProp", "init_skeleton"]
