# needs: sklearn
# %% [markdown]
# # Train a CNN so that scales do not matter
#
# Two copies of a network that compute the same function should train in the same way. With AdamW they do not; in the canonical gauge they do.

# %%
import copy

import torch
from sklearn.datasets import load_digits
from torch import nn

import pathspace as ps
from pathspace.training import GaugeFixed

digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
labels = torch.tensor(digits.target)
train, test = slice(0, 1200), slice(1200, None)


def cnn():
    return nn.Sequential(
        nn.Conv2d(1, 12, 3, padding=1), nn.BatchNorm2d(12), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(12, 24, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(24, 10),
    )  # fmt: skip


# %% [markdown]
# One network, and a copy with random scales: the same function.

# %%
torch.manual_seed(0)
first = cnn()
graph = ps.trace(first, images[:8])
second = ps.rescale_(copy.deepcopy(first), graph, torch.empty(graph.num_units).uniform_(-2, 2))
print(graph.num_units, "free scales")


def fit(model, gauge_fixed, epochs=1):
    model = copy.deepcopy(model).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    if gauge_fixed:
        optimizer = GaugeFixed(optimizer, graph, model=model)
    for epoch in range(epochs):
        for batch in torch.randperm(1200, generator=torch.Generator().manual_seed(epoch)).split(60):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images[batch]), labels[batch]).backward()
            optimizer.step()
    with torch.no_grad():
        return nn.functional.cross_entropy(model.train()(images[train]), labels[train]).item()


# %%
for gauge_fixed in (False, True):
    losses = [fit(model, gauge_fixed) for model in (first, second)]
    apart = abs(losses[0] / losses[1] - 1)
    print("gauge-fixed AdamW" if gauge_fixed else "AdamW", "copies end", "alike" if apart < 0.02 else "apart")

# %% [markdown]
# Next: [which optimizer, and when](../optimizers.md); `pathspace train digits-rows` trains a task of the library.
