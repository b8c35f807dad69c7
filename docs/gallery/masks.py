# %% [markdown]
# # Skeleton masks for a new architecture
#
# A *skeleton* is a set of weights, at least one for each free scale, that gives a basis of the path values.
# The papers choose it by hand for plain stacks; here it follows from the model, for any architecture.

# %%
import torch
from torch import nn

import pathspace as ps


class TwoStreams(nn.Module):
    """Two streams of unequal depth that meet in a sum, and a gate in front of the output."""

    def __init__(self):
        super().__init__()
        self.short = nn.Linear(5, 8)
        self.long = nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 8))
        self.gate, self.leave = nn.Linear(5, 8), nn.Linear(8, 3)

    def forward(self, x):
        h = torch.relu(self.short(x) + self.long(x))
        return self.leave(h * torch.sigmoid(self.gate(x)))


model, x = TwoStreams(), torch.randn(2, 5)
graph = ps.trace(model, x)
print(graph.num_weights, "weights,", graph.num_units, "free scales")

# %% [markdown]
# The skeleton is the union of two spanning trees: `T_in` has one edge into each unit, `T_out` has one edge out of each unit.

# %%
skeleton = graph.skeleton(rule="magnitude")
for name, mask in skeleton.masks.items():
    print(f"{name:16} {int(mask.sum()):3} of {mask.numel()} weights")

# %% [markdown]
# The two trees give a basis of path values. Their number is the number of weights minus the number of free scales.

# %%
basis = skeleton.basis()
print(len(basis), graph.dimension)
print(basis[0])

# %% [markdown]
# Masks are stored as safetensors, with the shapes and names of the parameters.

# %%
import tempfile
from pathlib import Path

with tempfile.TemporaryDirectory() as folder:
    file = Path(folder) / "masks.safetensors"
    ps.save_masks(skeleton, file)
    loaded = ps.load_masks(file)
print(loaded.header["weights"], loaded.header["units"])
print(all(mask.equal(skeleton.masks[name]) for name, mask in loaded.masks.items()))

# %% [markdown]
# Next: `pathspace masks net.py:TwoStreams --input 2x5 -o masks.safetensors`, and `pathspace draw` for a picture.
