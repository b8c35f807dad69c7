# needs: timm
# %% [markdown]
# # Models of timm
#
# The library works on any classification model of timm, by name, without modification.

# %%
import timm
import torch

import pathspace as ps

torch.manual_seed(0)
model = timm.create_model("resnet10t", num_classes=10).eval()
x = torch.randn(2, 3, 32, 32)
graph = ps.trace(model, x)
print(f"{graph.num_weights:,} weights, {graph.num_units:,} free scales, of which {graph.num_exact_units:,} are exact")

# %%
with torch.no_grad():
    before = model(x)
    ps.rescale_(model, graph, torch.randn(graph.num_units), exact=True)
    print(torch.allclose(model(x), before, rtol=1e-3, atol=1e-3))

# %% [markdown]
# Channels that can be removed, also in residual stages:

# %%
groups = ps.channels(model, x)
print(len(groups), "groups of channels; the largest has", max(len(group) for group in groups), "channels")

# %% [markdown]
# Next: `pathspace verify timm:resnet50`, `pathspace masks timm:resnet50 -o masks.safetensors`.
