# %% [markdown]
# # Sharded training with FSDP
#
# `GSGD` and `GAdam` work on parameters that `fully_shard` has sharded. Make the skeleton before or after `fully_shard`, and the optimizer after it.
# This notebook runs in one process; with `torchrun`, the same lines run in many.

# %%
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import pathspace as ps
from pathspace.training import GAdam, init_skeleton_

warnings.simplefilter("ignore")
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # torchrun sets this up elsewhere
mesh = init_device_mesh("cpu", (1,))

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3))
x = torch.randn(64, 8)
y = x[:, :3].argmax(1)
skeleton = ps.trace(model, x[:4]).skeleton()
init_skeleton_(model, skeleton)
for layer in (model[0], model[2], model[4]):
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = GAdam(model.named_parameters(), lr=0.01, skeleton=skeleton)
print(type(model[0].weight).__name__)

# %%
losses = []
for _ in range(30):
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
print("the loss fell:", losses[-1] < losses[0] / 2)
dist.destroy_process_group()

# %% [markdown]
# Next: [many devices](../many-devices.md), and how sums over shards are computed.
