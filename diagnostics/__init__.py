"""diagnostics: how does this network behave?

Markov chain: :class:`MarkovChain`, the residual additions of a model as a learnable chain;
:class:`ChainRecord`. Conservation: :func:`conserved`, the quantities that gradient flow keeps
constant, one per unit. Signal: :func:`signal` and :func:`gradients` by layer, :func:`jacobian` and
its spectrum (:func:`trace_k`, :func:`top_singular`, :func:`spectrum`). Parameters:
:func:`degeneracy`, :func:`cost`. Page: :func:`report` measures a model
with all diagnostics and returns a :class:`Report`, one self-contained HTML page; :func:`versus`
compares two models on one page. Diagnosis: :func:`diagnose`, with your own checkpoint, data and
loss. Training: :func:`watching` measures a training loop (:class:`Watching`) and raises each
:class:`Alarm` with its cause. Results: :class:`Table`, whose ``changes`` compares
two runs or checkpoints, and :class:`Estimate`.
"""

import lazy_loader

from pathspace.namespace import keep_functions

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
keep_functions(__name__, __all__)
