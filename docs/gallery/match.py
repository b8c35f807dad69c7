# %% [markdown]
# # Match two networks
#
# Two trained networks of one architecture have their channels in different orders and at different scales. The library can align both.

# %%
import copy

import torch
from torch import nn

import pathspace as ps

torch.manual_seed(0)
first = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, 3))
x = torch.randn(64, 6)
graph, groups = ps.trace(first, x[:4]), ps.channels(first, x[:4])

# %% [markdown]
# A copy with another order and other scales: every tensor differs, the function does not.

# %%
order = {"0.weight": torch.randperm(16), "2.weight": torch.randperm(12)}
second = ps.rescale_(groups.permute(order), graph, torch.randn(graph.num_units))
print(torch.allclose(first(x), second(x), atol=1e-5), torch.allclose(first[0].weight, second[0].weight))
print("same up to order and scales:", ps.compare(first, second, graph).same)

# %% [markdown]
# Match a network that is close, but not equal: its channels return to the order of the first network.

# %%
near = copy.deepcopy(groups.permute(order))
with torch.no_grad():
    for parameter in near.parameters():
        parameter.add_(0.02 * torch.randn_like(parameter))
matched = groups.match(near)
print("the distance fell to less than a fifth:", matched.after < matched.before / 5)
print("same function:", torch.allclose(matched.model(x), near(x), atol=1e-5))
print(ps.compare(first, near, graph).same)

# %% [markdown]
# Next: `pathspace match net.py:net a.safetensors b.safetensors -o matched.safetensors`, and `pathspace compare`.
