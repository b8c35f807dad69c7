# %% [markdown]
# # Attention as a Markov chain
#
# Each row of an attention matrix is a distribution over the tokens that a token attends to. A head is then the transition matrix of a Markov chain over tokens,
# with a stationary distribution, a spectral gap and a mixing time.

# %%
import networkx as nx
import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode


class Attention(TorchFunctionMode):
    """Keeps the weights of every attention that runs, without dropout, as (samples, heads, T, T')."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func is F.scaled_dot_product_attention:
            query, key, value, *masks = args
            one_hot = torch.eye(key.shape[-2], dtype=query.dtype).expand(*value.shape[:-2], -1, -1)
            self.found.append(func(query, key, one_hot, *masks, **{**kwargs, "dropout_p": 0.0}))
        elif func is F.multi_head_attention_forward:
            wanted = {"training": False, "need_weights": True, "average_attn_weights": False}
            self.found.append(func(*args, **{**kwargs, **wanted})[1])
        elif getattr(func, "__name__", "") == "softmax" and result.ndim == 4:
            self.found.append(result.clone())
        return result


def analyse(matrix):
    """Stationary distribution, spectral gap, contraction of differences, and the closed classes."""
    p = np.asarray(matrix, dtype=np.float64)
    p = p / p.sum(1, keepdims=True)
    graph = nx.from_numpy_array(np.where(p > 1e-12, p, 0), create_using=nx.DiGraph)
    closed = sorted(sorted(members) for members in nx.attracting_components(graph))
    # a stationary distribution is a left eigenvector of 1; with several closed classes it is not unique
    system = np.vstack([p.T - np.eye(len(p)), np.ones(len(p))])
    stationary = np.linalg.lstsq(system, np.append(np.zeros(len(p)), 1.0), rcond=None)[0]
    gap = 1 - np.sort(np.abs(np.linalg.eigvals(p)))[-2]
    dobrushin = 0.5 * np.abs(p[:, None] - p[None]).sum(-1).max()
    return stationary, gap, dobrushin, closed


def mixing_time(matrix, distance=0.25, limit=10_000):
    """Steps until every start is this near the stationary distribution (total variation)."""
    p, stationary = np.asarray(matrix, dtype=np.float64), analyse(matrix)[0]
    power = np.eye(len(p))
    for step in range(1, limit + 1):
        power = power @ p
        if 0.5 * np.abs(power - stationary).sum(1).max() <= distance:
            return step
    return None


def rollout(matrices):
    """Attention of the last layer's tokens to the first layer's, with the residual stream as I / 2."""
    total = torch.eye(len(matrices[0]), dtype=matrices[0].dtype)
    for p in matrices:
        total = (torch.eye(len(p), dtype=p.dtype) + p) / 2 @ total
    return total


model = nn.TransformerEncoder(
    nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2, enable_nested_tensor=False
).double()
x = torch.randn(3, 5, 8).double()
with Attention() as attention, torch.no_grad():
    model(x)
print([tuple(weights.shape) for weights in attention.found])

# %% [markdown]
# One head of the first layer. The stationary distribution is that which many steps reach.

# %%
head = attention.found[0][0, 0].numpy()
stationary, gap, dobrushin, closed = analyse(head)
print(np.abs(np.linalg.matrix_power(head, 200)[0] - stationary).max() < 1e-12, 0 < gap <= 1, 1 - gap <= dobrushin)
print(closed, mixing_time(head))
print(tuple(rollout([weights[0].mean(0) for weights in attention.found]).shape))

# %% [markdown]
# With a causal mask the first token is absorbing, and with a mask of blocks every block has its own stationary distribution: in both cases the distribution says
# nothing about the model.

# %%
causal = np.tril(head) / np.tril(head).sum(1, keepdims=True)
print(analyse(causal)[3], np.abs(analyse(causal)[0]).round(6))
print(analyse(np.kron(np.eye(2), head))[3])

# %% [markdown]
# Next: residual branches as steps of a learnable Markov chain: [Markov chains](../markov-chain.md).
