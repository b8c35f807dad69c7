"""pathspace: rescaling symmetries of neural networks, proven, and used for training.

The reduction graph of a model: :func:`trace`, :class:`ReductionGraph`, :class:`WeightBlock`, :class:`Pin`.
Basis paths: :class:`Skeleton`, :class:`BasisPaths`, :class:`Path`.
Theorems: :func:`verify`, :class:`Certificate`; :func:`explain`, :class:`Explanation`.
Clips whose bounds move with the gauge: :func:`lift_clips`. Batch norms folded: :func:`fold_norms`.
Masks as files: :func:`save_masks`, :func:`load_masks`, :class:`Masks`.
The gauge: :func:`rescale`, :func:`canonicalise`, :func:`balance`, :func:`balancing`, :class:`Balancing`,
:func:`register_transport`; :func:`choose_gauge` for :class:`Balance`, :class:`Range`, :class:`Noise`,
:class:`ActivationRange`, :class:`Smooth`, :class:`Conditioning`, with a :class:`GaugeCertificate`.
The gauge at work: :func:`equalise`, :func:`fit_dtype`.
The gauge on checkpoints: :func:`rescale_files`, :func:`balance_files`.
Proofs as documents: :func:`proof`, judged by :func:`check`. Claims on trial: :func:`claim`, :class:`Claim`.
Path norms: :func:`path_norm`, :func:`path_statistics`. Symbols: :func:`symbolic`, :class:`SymbolicSpace`. Pictures:
:func:`draw`.
Rules for operations of your own: :func:`rule`. Models without numbers: :func:`without_weights`.
Errors: :class:`PathspaceError` and its kinds.
"""

from pathspace.balanced import Balancing, balance, balancing
from pathspace.basis import BasisPaths, Path
from pathspace.canonical import canonicalise
from pathspace.certificate import Certificate
from pathspace.channels import ChannelGroup, ChannelGroups, channels
from pathspace.checker import check
from pathspace.claims import Claim, claim
from pathspace.clips import lift_clips
from pathspace.compare import Comparison, compare
from pathspace.draw import draw
from pathspace.dtype_range import Fitted, fit_dtype
from pathspace.equalisation import Equalised, equalise
from pathspace.errors import CaptureError, InputError, InputTypeError, PathspaceError, UnsupportedError
from pathspace.explain import Explanation, explain
from pathspace.fold_norms import fold_norms
from pathspace.gauge_choice import Gauge, GaugeCertificate, choose_gauge
from pathspace.inference.registry import rule
from pathspace.masks import Masks, load_masks, save_masks
from pathspace.norms import path_norm, path_statistics
from pathspace.objectives import ActivationRange, Balance, Conditioning, Noise, Range, Smooth
from pathspace.proof import proof
from pathspace.rebasin import Matching
from pathspace.reduction import ReductionGraph, WeightBlock
from pathspace.rescale import rescale
from pathspace.skeleton import Skeleton
from pathspace.smoothing import SmoothingPair, smoothing_pairs, smoothing_recipe
from pathspace.streaming import balance_files, rescale_files
from pathspace.structure import Pin
from pathspace.symbolic import SymbolicSpace, symbolic
from pathspace.tracing import trace
from pathspace.transport import register_transport
from pathspace.verify import verify
from pathspace.without_values import without_weights

__version__ = "0.1.0"

__all__ = [
    "ActivationRange",
    "Balance",
    "Balancing",
    "BasisPaths",
    "CaptureError",
    "Certificate",
    "ChannelGroup",
    "ChannelGroups",
    "Claim",
    "Comparison",
    "Conditioning",
    "Equalised",
    "Explanation",
    "Fitted",
    "Gauge",
    "GaugeCertificate",
    "InputError",
    "InputTypeError",
    "Masks",
    "Matching",
    "Noise",
    "Path",
    "PathspaceError",
    "Pin",
    "Range",
    "ReductionGraph",
    "Skeleton",
    "Smooth",
    "SmoothingPair",
    "SymbolicSpace",
    "UnsupportedError",
    "WeightBlock",
    "balance",
    "balance_files",
    "balancing",
    "canonicalise",
    "channels",
    "check",
    "choose_gauge",
    "claim",
    "compare",
    "draw",
    "equalise",
    "explain",
    "fit_dtype",
    "fold_norms",
    "lift_clips",
    "load_masks",
    "path_norm",
    "path_statistics",
    "proof",
    "register_transport",
    "rescale",
    "rescale_files",
    "rule",
    "save_masks",
    "smoothing_pairs",
    "smoothing_recipe",
    "symbolic",
    "trace",
    "verify",
    "without_weights",
]
