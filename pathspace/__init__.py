"""pathspace: rescaling symmetries of neural networks, proven, and used for training.

The reduction graph of a model: :func:`trace`, :class:`ReductionGraph`, :class:`WeightBlock`, :class:`Pin`.
Basis paths: :class:`Skeleton`, :class:`BasisPaths`, :class:`Path`.
Theorems: :func:`verify`, :class:`Certificate`; :func:`explain`, :class:`Explanation`.
Masks as files: :func:`save_masks`, :func:`load_masks`, :class:`Masks`.
The gauge: :func:`rescale`.
Rules for operations of your own: :func:`rule`.
Errors: :class:`PathspaceError` and its kinds.
"""

from pathspace.basis import BasisPaths, Path
from pathspace.certificate import Certificate
from pathspace.errors import CaptureError, InputError, InputTypeError, PathspaceError, UnsupportedError
from pathspace.explain import Explanation, explain
from pathspace.inference.registry import rule
from pathspace.inference.semantics import Pin
from pathspace.masks import Masks, load_masks, save_masks
from pathspace.reduction import ReductionGraph, WeightBlock, trace
from pathspace.rescale import rescale
from pathspace.skeleton import Skeleton
from pathspace.verify import verify

__version__ = "0.1.0"

__all__ = [
    "BasisPaths",
    "CaptureError",
    "Certificate",
    "Explanation",
    "InputError",
    "InputTypeError",
    "Masks",
    "Path",
    "PathspaceError",
    "Pin",
    "ReductionGraph",
    "Skeleton",
    "UnsupportedError",
    "WeightBlock",
    "explain",
    "load_masks",
    "rescale",
    "rule",
    "save_masks",
    "trace",
    "verify",
]
