"""Rules, by kind of operation; importing this package registers them all."""

from pathspace.inference.rules import (
    contraction,
    movement,
    nonhomogeneous,
    normalization,
    pointwise,
    pooling,
    recurrent,
)

__all__ = ["contraction", "movement", "nonhomogeneous", "normalization", "pointwise", "pooling", "recurrent"]
