"""Attention weights as the transition matrices of Markov chains over tokens.

Row t of a matrix P is a distribution over the tokens to which token t attends, with the result
``sum_t' P[t, t'] x_t'``. With a causal mask the first token is absorbing, and with a block mask
every block has its own stationary distribution: in both cases the stationary distribution has no
information about the model.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import networkx as nx
import numpy as np
import scipy.linalg
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from pathspace.errors import InputError, UnsupportedError
from pathspace.models.inputs import arranged, check_inputs

from ..shared.model_calls import called
from ..shared.unchanged import unchanged

_TOLERANCE = 1e-12


@dataclass(frozen=True)
class AttentionChain:
    """One transition matrix as a Markov chain.

    Attributes:
        matrix: row-stochastic, float64, shape (T, T).
        stationary: a stationary distribution, shape (T,): that of the only closed class, or the
            mean over several closed classes.
        closed_classes: the closed communicating classes; with more than one the stationary
            distribution is not unique.
        gap: spectral gap ``1 - |lambda_2|``.
        dobrushin: largest total variation distance between two rows: one step multiplies every
            difference of distributions by at most this factor.
        caveat: why the stationary distribution is not informative, or "".
    """

    matrix: np.ndarray
    stationary: np.ndarray
    closed_classes: tuple[tuple[int, ...], ...]
    gap: float
    dobrushin: float
    caveat: str

    def mixing_time(self, distance: float = 0.25, limit: int = 10_000) -> int | None:
        """Steps until every start is within ``distance`` (total variation) of the
        stationary distribution, or None.
        """
        power = np.eye(len(self.matrix))
        for step in range(1, limit + 1):
            power = power @ self.matrix
            if 0.5 * np.abs(power - self.stationary).sum(1).max() <= distance:
                return step
            if self.gap <= _TOLERANCE:
                return None
        return None


def analyse(matrix: Tensor | np.ndarray) -> AttentionChain:
    """Analyse one row-stochastic matrix as a Markov chain.

    Args:
        matrix: shape (T, T), rows summing to one.

    Returns:
        Stationary distribution, spectral gap, Dobrushin coefficient and caveats.

    Raises:
        InputError: not a square matrix with finite, non-negative rows that sum to one.

    Example:
        >>> chain = analyse(np.array([[0.9, 0.1], [0.5, 0.5]]))
        >>> chain.stationary.round(4).tolist(), round(chain.gap, 4), round(chain.dobrushin, 4)
        ([0.8333, 0.1667], 0.6, 0.4)
        >>> analyse(np.array([[1.0, 0.0], [0.3, 0.7]])).caveat
        'causal: token 0 is absorbing, so the stationary distribution is a point mass on it'

    Reference:
        Evolution of neural network, section 4.1.3.
    """
    p = np.asarray(
        matrix.detach().cpu() if isinstance(matrix, Tensor) else matrix, dtype=np.float64
    )
    if p.ndim != 2 or p.shape[0] != p.shape[1]:
        raise InputError(
            f"The matrix has shape {p.shape}, expected (T, T); self-attention has one token set."
        )
    lost = np.flatnonzero(~np.isfinite(p).all(1))
    if len(lost):
        raise InputError(
            f"{len(lost)} of {len(p)} rows of the matrix are not finite, the first is {lost[0]},"
            " expected distributions; a mask that hides all tokens from one token gives such a"
            " row: let the token attend to itself."
        )
    if (p < 0).any() or np.abs(p.sum(1) - 1).max() > 1e-3:
        raise InputError(
            "The rows of the matrix are not distributions; pass attention weights after the"
            " softmax."
        )
    p = p / p.sum(1, keepdims=True)
    graph = nx.from_numpy_array(np.where(p > _TOLERANCE, p, 0), create_using=nx.DiGraph)
    closed = tuple(tuple(sorted(c)) for c in nx.attracting_components(graph))
    parts = []
    for members in closed:
        inner = p[np.ix_(members, members)]
        inner = inner / inner.sum(1, keepdims=True)
        size = len(members)
        system = np.vstack([inner.T - np.eye(size), np.ones(size)])
        solution = np.zeros(len(p))
        solution[list(members)] = scipy.linalg.lstsq(system, np.append(np.zeros(size), 1.0))[0]
        parts.append(solution)
    moduli = np.sort(np.abs(scipy.linalg.eigvals(p)))[::-1]
    gap = 1 - float(moduli[1]) if len(p) > 1 else 1.0
    distances = 0.5 * np.abs(p[:, None, :] - p[None, :, :]).sum(-1)
    return AttentionChain(
        p, np.mean(parts, 0), closed, max(gap, 0.0), float(distances.max()), _caveat(p, closed)
    )


def _caveat(p: np.ndarray, closed: Sequence[Sequence[int]]) -> str:
    if len(closed) > 1:
        return (
            f"block mask: {len(closed)} closed classes, the stationary distribution is not unique"
            " and the gap is 0"
        )
    if len(p) > 1 and np.allclose(np.triu(p, 1), 0, atol=_TOLERANCE):
        return "causal: token 0 is absorbing, so the stationary distribution is a point mass on it"
    if len(closed) == 1 and len(closed[0]) == 1 and len(p) > 1:
        return (
            f"token {closed[0][0]} is absorbing, so the stationary distribution is a point mass"
            " on it"
        )
    return ""


def rollout(matrices: Sequence[Tensor], residual: bool = True) -> Tensor:
    """Attention of the last layer's tokens to the first layer's: ``prod (I/2 + P_l/2)``,
    later layers on the left.

    Args:
        matrices: one (T, T) matrix per layer, the first layer first; usually the mean over heads.
        residual: add the residual stream as I/2; without it all rows of the
            product become equal quickly.

    Returns:
        A row-stochastic matrix (T, T).

    Example:
        >>> p = torch.tensor([[0.5, 0.5], [0.25, 0.75]])
        >>> rollout([p, p], residual=False)
        tensor([[0.3750, 0.6250],
                [0.3125, 0.6875]])
    """
    if not matrices:
        raise InputError("There is no matrix for the rollout; pass one (T, T) matrix per layer.")
    sizes = {(tuple(p.shape), p.dtype) for p in matrices}
    if len(sizes) > 1 or matrices[0].ndim != 2 or len(matrices[0]) != matrices[0].shape[-1]:
        raise InputError(
            f"The matrices for the rollout have shapes {[tuple(p.shape) for p in matrices[:3]]} and"
            f" types {[str(p.dtype) for p in matrices[:3]]}, expected one square shape and one"
            " type; take the mean over heads of each layer."
        )
    total = torch.eye(matrices[0].shape[-1], dtype=matrices[0].dtype)
    for p in matrices:
        total = ((torch.eye(len(p), dtype=p.dtype) + p) / 2 if residual else p) @ total
    return total


class _Catch(TorchFunctionMode):
    """Computes the weights of every attention that runs."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            self.found.append(_weights(*args, **kwargs))
        elif func is F.multi_head_attention_forward:
            # (a second time, because its weights are those after dropout)
            wanted = inspect.signature(func).bind(*args, **kwargs)
            wanted.arguments |= {
                "training": False,
                "need_weights": True,
                "average_attn_weights": False,
            }
            attended = func(*wanted.args, **wanted.kwargs)[1]
            assert isinstance(attended, Tensor)  # asked for above
            self.found.append(attended if attended.ndim == 4 else attended.unsqueeze(0))
        result = func(*args, **kwargs)
        softmax = (
            getattr(func, "__name__", "") == "softmax"
            and isinstance(result, Tensor)
            and result.ndim == 4
        )
        # with a softmax over another dimension, rows are not distributions
        if softmax and kwargs.get("dim", args[1] if len(args) > 1 else None) in (-1, 3):
            # (a copy, because later code may overwrite it)
            self.found.append(result.clone())
        return result


def _weights(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,  # noqa: ARG001  (the signature is torch's)
    is_causal: bool = False,
    **options: Any,
) -> Tensor:
    """What attention without dropout makes of one-hot values; NaN where a mask hides all tokens."""
    each = torch.eye(key.shape[-2], dtype=query.dtype, device=query.device)
    each = each.expand(*value.shape[:-2], -1, -1)
    found = F.scaled_dot_product_attention(query, key, each, attn_mask, 0.0, is_causal, **options)
    return found.masked_fill(found.sum(-1, keepdim=True) == 0, torch.nan)


def attention_matrices(
    model: nn.Module, *inputs: Any, kwargs: Mapping[str, Any] | None = None
) -> list[Tensor]:
    """The attention weights of every attention layer of a running model.

    Args:
        model: any model built on ``scaled_dot_product_attention``, ``nn.MultiheadAttention`` or a
            softmax over four-dimensional scores.
        *inputs: positional inputs.
        kwargs: keyword inputs.

    Returns:
        One tensor (B, heads, T, T') per attention, in the order of execution, float64.

    Raises:
        UnsupportedError: no attention ran.
        CaptureError: the model raises an error on these inputs.

    Example:
        >>> layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
        >>> [p.shape for p in attention_matrices(layer, torch.randn(3, 5, 8))]
        [torch.Size([3, 2, 5, 5])]
    """
    catch = _Catch()
    args, named = arranged(model, inputs, kwargs)
    check_inputs(model, args, named)
    with unchanged(model), torch.no_grad(), catch:
        called(model, args, named)
    if not catch.found:
        raise UnsupportedError(
            f"No attention ran in {type(model).__name__}; its weights are found in"
            " scaled_dot_product_attention, nn.MultiheadAttention and softmax over"
            " four-dimensional scores."
        )
    return [weights.double() for weights in catch.found]
