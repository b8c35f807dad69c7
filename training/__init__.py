"""training: optimizers, tasks and experiments that use what :mod:`pathspace` finds.

Optimizers on path values: :class:`GSGD` and :class:`GAdam`, with :func:`init_skeleton` to start
from; :class:`PathSGD`. An optimizer of torch in the canonical gauge: :class:`GaugeFixed`. Which
one to begin with: :func:`suggest`, :class:`Advice`. From the evolution notes: :class:`EMASGD`,
:class:`RescaleSGD`, :class:`SignProp`. Markov chain: :func:`penalize`, the penal connection.
"""

import lazy_loader

from pathspace.namespace import keep_functions

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
keep_functions(__name__, __all__)
