"""pathspace: rescaling symmetries of neural networks, proven, and used for training.

The reduction graph of a model: :func:`trace`, :class:`ReductionGraph`. Basis paths:
:class:`Skeleton`, :func:`symbolic`, :func:`draw`; masks as files: :func:`save_masks`,
:func:`load_masks`. Theorems: :func:`verify`, :class:`Certificate`; :func:`explain`. Proofs as
documents: :func:`proof`, judged by :func:`check`. The gauge: :func:`rescale` a copy, or in place
:func:`rescale_`, :func:`balance_`, :func:`canonicalise_`; :func:`balancing`,
:func:`register_transport`; on checkpoints :func:`rescale_files`, :func:`balance_files`. Whole
matrices: :func:`spaces` of features, :func:`rotate_`, :func:`rotate_files`, :func:`find_rotation`.
The gauge at work: :func:`equalise`, :func:`fit_dtype`, :func:`choose_gauge` for :class:`Balance`,
:class:`Range`, :class:`Noise`, :class:`ActivationRange`, :class:`Smooth`, :class:`Conditioning`.
For other tools: :func:`smoothing_pairs`, :func:`smoothing_recipe`, :func:`rotation_recipe`.
Channels: :func:`channels`, :func:`compare`, :func:`slice_stream`. Before a trace:
:func:`fold_norms`, :func:`lift_clips`, :class:`Carried`, :func:`without_weights`; :func:`rule` for
operations of your own. Path norms: :func:`path_norm`, :func:`path_statistics`. Errors:
:class:`PathspaceError` and its kinds. Types of results stand in the modules of the functions that
return them.
"""

import lazy_loader

__version__ = "0.1.0"

_found, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)


def __getattr__(name: str) -> object:
    try:
        return _found(name)
    except AttributeError:
        from .namespace import unknown_name

        raise AttributeError(unknown_name(__name__, name, __all__)) from None
