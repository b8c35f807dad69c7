"""Rules, by kind of operation; importing this package registers them all."""

from . import (
    attention,
    contraction,
    convolution,
    creation,
    homogeneous,
    indexing,
    joining,
    movement,
    nonhomogeneous,
    normalization,
    pointwise,
    pooling,
    recurrent,
    reductions,
    spatial,
)
