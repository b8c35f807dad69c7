# %% [markdown]
# # Quantise: choose the best of all equal networks first
#
# All rescaled copies of a network compute the same function, but their rounding errors differ. `ps.equalise` chooses the copy with the least
# rounding noise, and keeps it only if the noise on your data decreases.

# %%
import torch
from torch import nn

import pathspace as ps

torch.manual_seed(0)
model = nn.Sequential(
    nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU6(), nn.Conv2d(16, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(256, 5)
).eval()
images = torch.randn(32, 3, 8, 8)

# %% [markdown]
# Batch norms are folded for deployment, and the bounds of ReLU6 are rescaled too. Both give free scales.

# %%
net = ps.lift_clips(ps.fold_norms(model, images), images)
graph = ps.trace(net, images[:2])
print(graph.num_units, "free scales")
net = ps.rescale_(net, graph, torch.randn(graph.num_units))  # as bad as training may leave it

# %%
found = ps.equalise(net, graph, bits=6, per="tensor", calibration=images)
print("helped:", found.helped)
print("signal over noise rose by more than 3 dB:", found.after > found.before + 3)

# %% [markdown]
# Small data types have a similar problem: values are outside the range of float16. `ps.fit_dtype` rescales them into it.

# %%
far = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))
x = torch.randn(256, 8)
ps.rescale_(far, ps.trace(far, x[:2]), torch.linspace(9, 14, 32))
fitted = ps.fit_dtype(far, x, torch.float16, headroom=4)
print("fits before:", fitted.fitted_before, "- fits now:", fitted.fits)

# %% [markdown]
# Next: `pathspace equalise net.py:net --bits 6 --calibration images.npy -o weights.safetensors`; [quantise and fit](../equalise.md).
