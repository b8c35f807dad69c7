# %% [markdown]
# # Diagnose a broken run
#
# A model does not learn. Is the cause the rate, the data, the initialisation or a frozen layer? `watching` measures a training loop without changing it
# and names causes instead of symptoms.

# %%
import logging

import torch
from torch import nn

from pathspace.diagnostics import watching

logging.getLogger("pathspace").setLevel(logging.ERROR)  # alarms are also logged; here we print them
x, y = torch.randn(256, 20), torch.randint(0, 3, (256,))


def train(rate, scale=1.0, steps=20):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(20, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 3)
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    with watching(model, every=10) as watch:
        for _ in range(steps):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(scale * x), y).backward()
            optimizer.step()
    return watch


# %% [markdown]
# A rate that is too large makes units dead. The alarm names the rate; dead units are its consequence.

# %%
watch = train(rate=0.5)
for alarm in watch.causes:
    print(alarm.kind, "->", alarm.advice)

# %% [markdown]
# Inputs that are not normalised:

# %%
for alarm in train(rate=1e-3, scale=1000.0).causes:
    print(alarm.kind, "->", alarm.advice)

# %% [markdown]
# A healthy run raises no alarm.

# %%
print(train(rate=1e-3).causes)

# %% [markdown]
# Next: `pathspace diagnose net.py:Net --data net.py:loader --loss cross_entropy` checks a model without a run; [all alarms](../watching.md#alarms).
