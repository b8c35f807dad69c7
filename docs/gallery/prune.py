# %% [markdown]
# # Prune whole channels
#
# `ps.channels` finds the slices that can be removed from a model together, also with residual connections, gates and norms. Its `remove` returns a
# smaller module of the same class.

# %%
import copy

import torch
from torch import nn

import pathspace as ps


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter, self.norm = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.branch = nn.Sequential(nn.Conv2d(16, 24, 1), nn.SiLU(), nn.Conv2d(24, 16, 1))
        self.leave = nn.Linear(16, 5)

    def forward(self, x):
        h = torch.relu(self.norm(self.enter(x)))
        return self.leave((h + self.branch(h)).mean((2, 3)))


torch.manual_seed(0)
model, x = Residual().eval(), torch.randn(2, 3, 8, 8)
groups = ps.channels(model, x)
for group in groups:
    print(len(group), "channels:", ", ".join(f"{name}[{dim}]" for name, dim in group.slices))

# %% [markdown]
# Half of the channels are kept. The library runs the smaller model and the masked model, and compares both, before it returns.

# %%
smaller = groups.remove(keep=0.5)
print(
    sum(p.numel() for p in model.parameters()),
    "->",
    sum(p.numel() for p in smaller.parameters()),
    "weights",
)
print(torch.allclose(smaller(x), groups.masked(keep=0.5)(x), atol=1e-5))

# %% [markdown]
# The ranking of channels should not depend on scales. With `"paths"`, all rescaled copies keep the same channels.

# %%
plain, x = (
    nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, 3)),
    torch.randn(4, 6),
)
graph = ps.trace(plain, x)
rescaled = ps.rescale_(copy.deepcopy(plain), graph, torch.randn(graph.num_units))
for by in ("weights", "paths"):
    orders = []
    for found in (ps.channels(plain, x), ps.channels(rescaled, x)):
        orders.append(
            {name: scores.argsort().tolist() for name, scores in found.importance(by).items()}
        )
    print(by, "same order:", orders[0] == orders[1])

# %% [markdown]
# Next: `pathspace prune net.py:net --keep 0.5 -o smaller.pt`; [channels](../channels.md).
