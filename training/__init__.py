"""training: optimizers, tasks and experiments that use what :mod:`pathspace` finds.

Optimizers on path values: :class:`GSGD` and :class:`GAdam`, with :func:`init_skeleton` to start from;
:class:`PathSGD`; and, from the evolution notes, :class:`EMASGD`, :class:`RescaleSGD`, :class:`SignProp`.
Markov chain: :func:`penalize`, the penal connection.
"""

from pathspace.training.optim import EMASGD, GSGD, GAdam, PathNorm, PathSGD, RescaleSGD, SignProp, init_skeleton
from pathspace.training.penal import penalize

__all__ = ["EMASGD", "GSGD", "GAdam", "PathNorm", "PathSGD", "RescaleSGD", "SignProp", "init_skeleton", "penalize"]
