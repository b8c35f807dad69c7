"""training: optimizers, tasks and experiments that use what :mod:`pathspace` finds.

Optimizers on path values: :class:`GSGD` and :class:`GAdam`, with :func:`init_skeleton` to start from;
:class:`PathSGD`. Any optimizer in the canonical gauge: :class:`GaugeFixed`.
Which one to begin with: :func:`suggest`, :class:`Advice`.
From the evolution notes: :class:`EMASGD`, :class:`RescaleSGD`, :class:`SignProp`.
Markov chain: :func:`penalize`, the penal connection. Epochs, checkpoints and resuming: :class:`Trainer`.
"""

from typing import TYPE_CHECKING, Any

from pathspace.namespace import keep_functions
from pathspace.training.optim import (
    EMASGD,
    GSGD,
    GAdam,
    GaugeFixed,
    PathNorm,
    PathSGD,
    RescaleSGD,
    SignProp,
    init_skeleton,
)
from pathspace.training.penal import penalize
from pathspace.training.suggest import Advice, suggest

if TYPE_CHECKING:
    from pathspace.training.trainer import Trainer

__all__ = [
    "EMASGD",
    "GSGD",
    "Advice",
    "GAdam",
    "GaugeFixed",
    "PathNorm",
    "PathSGD",
    "RescaleSGD",
    "SignProp",
    "Trainer",
    "init_skeleton",
    "penalize",
    "suggest",
]
keep_functions(__name__, __all__)


def __getattr__(name: str) -> Any:
    # the trainer brings Lightning Fabric along, which optimizers do not need
    if name == "Trainer":
        from pathspace.training.trainer import Trainer

        return Trainer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
