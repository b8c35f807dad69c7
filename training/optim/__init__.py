"""Optimizers that work on path values instead of weights."""

from training.optim.gsgd import GSGD
from training.optim.initial import init_skeleton

__all__ = ["GSGD", "init_skeleton"]
