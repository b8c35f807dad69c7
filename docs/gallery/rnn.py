# needs: sklearn
# %% [markdown]
# # Train an RNN in path space
#
# The papers train recurrent networks of ReLU units with G-SGD, gradient descent on path values. The initialisation matters more than the
# optimizer: with a unit skeleton every multiplier of the learning rate is 1.

# %%
import torch
from sklearn.datasets import load_digits
from torch import nn

import pathspace as ps
from pathspace.training import GSGD, init_skeleton_


class Rows(nn.Module):
    """Reads an image row by row."""

    def __init__(self):
        super().__init__()
        self.recurrent = nn.RNN(8, 32, nonlinearity="relu", batch_first=True)
        self.leave = nn.Linear(32, 10)

    def forward(self, x):
        return self.leave(self.recurrent(x)[0][:, -1])


digits = load_digits()
images, labels = torch.tensor(digits.images, dtype=torch.float32) / 16, torch.tensor(digits.target)
torch.manual_seed(0)
model = Rows()
graph = ps.trace(model, images[:4])
print(graph.num_weights, "weights,", graph.num_units, "free scales,", graph.dimension, "independent path values")

# %%
skeleton = graph.skeleton()
init_skeleton_(model, skeleton)
optimizer = GSGD(model.named_parameters(), lr=0.2, skeleton=skeleton)
for epoch in range(6):
    for batch in torch.randperm(1200).split(32):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images[batch]), labels[batch]).backward()
        optimizer.step()
with torch.no_grad():
    right = (model(images[1200:]).argmax(1) == labels[1200:]).float().mean()
print("right on the test images:", "more than 70 %" if right > 0.7 else f"{right:.0%}")

# %% [markdown]
# The step does not depend on the scales of the weights: a rescaled copy takes the same step.

# %%
import copy

losses = []
phi = torch.linspace(-1, 1, graph.num_units).double()
for rescaled in (False, True):
    other = copy.deepcopy(model).double()
    if rescaled:
        ps.rescale_(other, graph, phi)
    trees = ps.trace(other, images[:4].double()).skeleton()
    steps = GSGD(other.named_parameters(), lr=0.1, skeleton=trees)
    for _ in range(3):
        steps.zero_grad()
        loss = nn.functional.cross_entropy(other(images[:64].double()), labels[:64])
        loss.backward()
        steps.step()
    losses.append(loss.item())
print(abs(losses[0] / losses[1] - 1) < 1e-9)

# %% [markdown]
# Next: `pathspace train digits-rows --optimizer gsgd`, and [what keeps the invariance](../optimizers.md#what-keeps-the-invariance-and-what-does-not).
