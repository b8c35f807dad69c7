# %% [markdown]
# # Certify your model
#
# This notebook counts the free scales of a model,
# proves the count, and shows that a rescaled model computes the same function.

# %%
import torch
from torch import nn

import pathspace as ps

model = nn.Sequential(
    nn.Conv2d(1, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.MaxPool2d(2),
    nn.Conv2d(6, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(32, 10),
).eval()  # fmt: skip
x = torch.randn(4, 1, 8, 8)

# %% [markdown]
# `ps.verify` traces the unmodified model, checks three theorems and runs rescaled copies. It never changes the model.

# %%
certificate = ps.verify(model, x)
print(certificate.weights, "weights")
print(certificate.units, "free scales, of which", certificate.units_exact, "are exact in the unchanged model")
print(certificate.dimension, "independent path values; everything holds:", certificate.holds)

# %% [markdown]
# Each unit $v$ has a log-scale $\varphi(v)$. Every weight is multiplied by $e^{\varphi(\text{head}) - \varphi(\text{tail})}$, and the outputs do not change.

# %%
graph = ps.trace(model, x)
before = model(x).detach()
ps.rescale_(model, graph, torch.randn(graph.num_units))
print((model(x) - before).abs().max() < 1e-4 * before.abs().max())

# %% [markdown]
# The proof is a JSON document. A checker that shares no code with the library reads it and compares it with the model.

# %%
verdict = ps.check(ps.proof(graph.skeleton()), model=model, args=(x,))
print(verdict.accepted)

# %% [markdown]
# Which scales are fixed, and why? Here the outputs fix the scales of the last layer.

# %%
for reason in ps.explain(model, x).reasons[:3]:
    print(reason.parameter, reason.scales, reason.chain[0].reason)

# %% [markdown]
# Next: `pathspace verify net.py:Net --input 4x1x8x8 --proof proof.json`, then `pathspace check proof.json net.py:Net --input 4x1x8x8`.
