# %% [markdown]
# # Train a GPT
#
# This notebook trains a small GPT on characters, with LayerNorm, attention and residual streams, by AdamW in the canonical gauge.

# %%
import torch
from torch import nn

import pathspace as ps
from pathspace.training import GaugeFixed

text = (ps.__doc__ + ps.trace.__doc__ + ps.verify.__doc__) * 4
letters = sorted(set(text))
codes = torch.tensor([letters.index(letter) for letter in text])
LENGTH = 24


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend, self.mix = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width)
        )

    def forward(self, x):
        parts = self.attend(self.norm1(x)).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        seen = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.mix(seen.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, width=32, heads=4, depth=2):
        super().__init__()
        self.token, self.place = nn.Embedding(len(letters), width), nn.Embedding(LENGTH, width)
        self.blocks, self.norm = (
            nn.Sequential(*(Block(width, heads) for _ in range(depth))),
            nn.LayerNorm(width),
        )
        self.leave = nn.Linear(width, len(letters))

    def forward(self, codes):
        x = self.token(codes) + self.place(torch.arange(codes.shape[1]))
        return self.leave(self.norm(self.blocks(x)))


torch.manual_seed(0)
model = GPT()
graph = ps.trace(model, codes[:LENGTH][None])
print(
    graph.num_units,
    "free scales, of which",
    graph.num_exact_units,
    "do not depend on the eps of a norm",
)

# %% [markdown]
# `GaugeFixed` wraps any optimizer of torch but LBFGS and Adafactor. Learning rates, schedules and clipping work as before.

# %%
optimizer = GaugeFixed(torch.optim.AdamW(model.parameters(), lr=3e-3), graph)
losses = []
for _ in range(60):
    starts = torch.randint(0, len(codes) - LENGTH - 1, (16,))
    batch = codes[starts[:, None] + torch.arange(LENGTH + 1)]
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    losses.append(loss.item())
print("the loss fell by more than a third:", losses[-1] < losses[0] * 2 / 3)

# %%
import matplotlib.pyplot as plt

figure, axes = plt.subplots(figsize=(6, 2.6), layout="constrained")
axes.plot(losses)
axes.set(xlabel="step", ylabel="loss")

# %% [markdown]
# Next: [gauge-fixed optimizers](../gauge-fixed.md), and [watch a run](../watching.md) for alarms while it trains.
