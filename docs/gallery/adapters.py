# %% [markdown]
# # Fine-tune with adapters
#
# A low-rank adapter adds $B A x$ to a frozen layer. Only the product matters: each rank has a free scale between $A$ and $B$, and
# Adam's step depends on it. The frozen weights leave no other scale.

# %%
import copy

import torch
from torch import nn

import pathspace as ps
from pathspace.training import GaugeFixed


class Adapted(nn.Module):
    """A frozen layer with an adapter of low rank beside it."""

    def __init__(self, layer, rank):
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.a = nn.Linear(layer.in_features, rank, bias=False)
        self.b = nn.Linear(rank, layer.out_features, bias=False)
        nn.init.zeros_(self.b.weight)

    def forward(self, x):
        return self.layer(x) + self.b(self.a(x))


torch.manual_seed(0)
base = nn.Sequential(nn.Linear(12, 32), nn.GELU(), nn.Linear(32, 4))
x, y = torch.randn(128, 12), torch.randint(0, 4, (128,))
model = nn.Sequential(Adapted(base[0], 4), nn.GELU(), Adapted(base[2], 4))
graph = ps.trace(model, x[:4])
print(
    sum(p.numel() for p in model.parameters() if p.requires_grad),
    "trained weights,",
    graph.num_units,
    "free scales",
)

# %% [markdown]
# Rescale the adapters after some steps: the function does not change. `GaugeFixed` takes the same steps from both copies.


# %%
def steps(network, gauge_fixed, count=20):
    optimizer = torch.optim.AdamW([p for p in network.parameters() if p.requires_grad], lr=0.01)
    if gauge_fixed:
        optimizer = GaugeFixed(optimizer, graph, model=network)
    for _ in range(count):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(network(x), y)
        loss.backward()
        optimizer.step()
    return loss.item()


steps(model, gauge_fixed=True)
for gauge_fixed in (False, True):
    first, second = copy.deepcopy(model), copy.deepcopy(model)
    with torch.no_grad():
        second[0].a.weight.mul_(20)
        second[0].b.weight.div_(20)
    apart = abs(steps(first, gauge_fixed) / steps(second, gauge_fixed) - 1)
    print(
        "gauge-fixed AdamW" if gauge_fixed else "AdamW",
        "copies end",
        "alike" if apart < 1e-3 else "apart",
    )

# %% [markdown]
# Next: [frozen weights and adapters](../gauge-fixed.md#frozen-weights-and-adapters).
