"""training: optimizers that use what :mod:`pathspace` finds.

Any optimizer of torch on path values: :class:`PathSpace`; :class:`GSGD` and :class:`GAdam` are this
with SGD and AdamW, :func:`init_skeleton_` is a start for them. :class:`PathSGD`, with
:class:`PathNorm`. An optimizer of torch in the canonical gauge: :class:`GaugeFixed`. Which one to
begin with: :func:`suggest`, :class:`Advice`. Markov chain: :func:`penalise_`, the penal connection.
"""

import lazy_loader

from pathspace.namespace import keep_functions

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
keep_functions(__name__, __all__)
