"""pathspace: rescaling symmetries of neural networks, proven, and used for training.

The reduction graph of a model: :func:`trace`, :class:`ReductionGraph`, :class:`WeightBlock`,
:class:`Pin`. Basis paths: :class:`Skeleton`, :class:`BasisPaths`, :class:`Path`. Theorems:
:func:`verify`, :class:`Certificate`; :func:`explain`, :class:`Explanation`. Clips whose bounds move
with the gauge: :func:`lift_clips`. Batch norms folded: :func:`fold_norms`. Masks as files:
:func:`save_masks`, :func:`load_masks`, :class:`Masks`. The gauge: :func:`rescale`,
:func:`canonicalise`, :func:`balance`, :func:`balancing`, :class:`Balancing`,
:func:`register_transport`; :func:`choose_gauge` for :class:`Balance`, :class:`Range`,
:class:`Noise`, :class:`ActivationRange`, :class:`Smooth`, :class:`Conditioning`, with a
:class:`GaugeCertificate`. The gauge at work: :func:`equalise`, :func:`fit_dtype`. The gauge on
checkpoints: :func:`rescale_files`, :func:`balance_files`. Proofs as documents: :func:`proof`,
judged by :func:`check`. Claims on trial: :func:`claim`, :class:`Claim`. Path norms:
:func:`path_norm`, :func:`path_statistics`. Symbols: :func:`symbolic`, :class:`SymbolicSpace`.
Pictures: :func:`draw`. Rules for operations of your own: :func:`rule`. Models without numbers:
:func:`without_weights`. Errors: :class:`PathspaceError` and its kinds.
"""

import lazy_loader

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
