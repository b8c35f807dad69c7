# needs: accelerate
# %% [markdown]
# # Accelerate
#
# Make the graph and the optimizer from the plain model, then let Accelerate prepare both.

# %%
import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import pathspace as ps
from pathspace.training import GSGD, init_skeleton_

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
x = torch.randn(128, 8)
skeleton = ps.trace(model, x[:4]).skeleton()
init_skeleton_(model, skeleton)
optimizer = GSGD(model.named_parameters(), lr=0.05, skeleton=skeleton)
loader = DataLoader(TensorDataset(x, (x[:, :3]).argmax(1)), batch_size=16)

accelerator = Accelerator(cpu=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

# %%
losses = []
for _ in range(8):
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), targets)
        accelerator.backward(loss)
        optimizer.step()
        losses.append(loss.item())
print("the loss fell:", losses[-1] < losses[0] / 2)

# %% [markdown]
# Next: [the optimizers](../optimizers.md) with their states, also on several devices.
