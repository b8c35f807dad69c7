# %% [markdown]
# # The walk of a sample through a residual network
#
# The branches of a residual network move the stream step by step. Does the walk of a sample fold back, and do its steps agree with descent on the loss?

# %%
from itertools import groupby
from typing import NamedTuple

import numpy as np
import torch
from matplotlib import pyplot as plt
from torch import nn

from pathspace.diagnostics import MarkovChain
from pathspace.diagnostics.chain.addition_hooks import Sites


class Walk(NamedTuple):
    names: tuple[str, ...]
    points: torch.Tensor  # in the plane of the walk's principal directions
    folds: float  # share of steps that turn back


def walks(chain, inputs, sample=0):
    """The first stream plus the sum of the directions so far, cut where the shape of the states changes."""
    places, known, seen = chain.samples(), chain.by_site(), {}

    def note(addition):
        node = known.get(addition.site)
        if node is not None:
            stream, branch = node.split(addition)
            rows = [places[node.index].rows(part, len(inputs))[sample].double() for part in (stream, branch)]
            seen[node.index] = (rows[0].clone(), node.scale * rows[1])
        return addition.run()

    with torch.no_grad(), Sites(note).following(chain.model):
        chain.model(inputs)
    found = []
    for _, run in groupby(sorted(seen), key=lambda index: len(seen[index][0])):
        indices = list(run)
        steps = torch.stack([seen[index][1] for index in indices])
        points = torch.cat([seen[indices[0]][0][None], seen[indices[0]][0] + steps.cumsum(0)])
        centred = points - points.mean(0)
        plane = centred @ torch.linalg.svd(centred, full_matrices=False)[2][:2].T
        turns = ((steps[1:] * steps[:-1]).sum(1) < 0).double()
        names = tuple(chain.nodes[index].name for index in indices)
        # (one node has one direction)
        plane = nn.functional.pad(plane, (0, 2 - plane.shape[1]))
        found.append(Walk(names, plane, float(turns.mean()) if len(turns) else 0.0))
    return found


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.branch = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))

    def forward(self, x):
        return x + self.branch(x)


model = nn.Sequential(*[Block() for _ in range(8)], nn.Linear(16, 3)).double()
x, y = torch.randn(64, 16).double(), torch.randint(0, 3, (64,))
chain = MarkovChain.trace(model, x)
(walk,) = walks(chain, x)
print(len(walk.names), "nodes,", tuple(walk.points.shape), f"{walk.folds:.0%} of the steps turn back")

# %%
plt.figure(figsize=(4.5, 3.5), layout="constrained")
px, py = walk.points.numpy().T
plt.quiver(px[:-1], py[:-1], np.diff(px), np.diff(py), np.arange(len(px) - 1), angles="xy", scale_units="xy", scale=1)
plt.xlabel("first principal direction")
plt.ylabel("second principal direction")
plt.margins(0.25);

# %% [markdown]
# Cosines of the branches with descent, over the samples: median, and 5 to 95 %.

# %%
record = chain.observe(nn.functional.cross_entropy, x, y)
low, median, high = record.quantiles((0.05, 0.5, 0.95)).numpy()
plt.figure(figsize=(4.5, 3), layout="constrained")
plt.axvline(0, color="grey", linewidth=1)
plt.hlines(range(len(low)), low, high, alpha=0.4, linewidth=4)
plt.plot(median, range(len(low)), "o")
plt.yticks(range(len(low)), record.names)
plt.gca().invert_yaxis()
plt.xlabel("cosine of direction and descent");

# %% [markdown]
# Next: what the cosines say, and the penal connection that raises them: [Markov chains](../markov-chain.md).
