"""training: optimizers, tasks and experiments that use what :mod:`pathspace` finds.

Optimizers: :class:`GSGD`, and :func:`init_skeleton` to start from.
"""

from training.optim import GSGD, init_skeleton

__all__ = ["GSGD", "init_skeleton"]
