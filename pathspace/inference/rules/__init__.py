"""Rules, by kind of operation; importing this package registers them all."""

from . import (
    contraction,
    convolution,
    functions,
    indexing,
    movement,
    normalization,
    pointwise,
    pooling,
    recurrent,
    reductions,
)
