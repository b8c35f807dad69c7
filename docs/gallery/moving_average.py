# %% [markdown]
# # Averages of gradients
#
# Momentum with decay $\beta$ averages gradients: $g \leftarrow \beta g + (1 - \beta) \nabla$. How much noise remains, which learning rates are stable, and which
# decay suits the noise of your gradients?

# %%
import cmath
import itertools
import math

import numpy as np
import torch
from scipy.sparse.linalg import LinearOperator, eigsh
from torch import nn

from pathspace.diagnostics import gradients


def stationary_variance(decay):
    """The share of the noise of independent gradients that an average keeps."""
    return (1 - decay) / (1 + decay)


def sampling_factor(batch, population):
    """Variance of the mean of a batch drawn without replacement over that of one sample."""
    return (population - batch) / (population - 1) / batch


def stability_limit(decay, curvature):
    """The largest stable learning rate on a quadratic: it grows with the decay."""
    return 2 * (1 + decay) / ((1 - decay) * curvature)


def monotone_limit(decay, curvature):
    """The largest learning rate without oscillation: it falls, and this is the cost of a large decay."""
    return (1 - math.sqrt(decay)) / ((1 + math.sqrt(decay)) * curvature)


def contraction(decay, rate, curvature):
    """The factor per step of the distance to the minimum, after many steps."""
    trace = 1 + decay - (1 - decay) * rate * curvature
    root = cmath.sqrt(trace**2 - 4 * decay)
    return max(abs(trace + root), abs(trace - root)) / 2


def quadratic_probe(decay, rate, curvature=1.0, steps=300):
    """Whether descent on h x^2 / 2 from x = 1 diverges, and on how many steps the loss rises."""
    x, g, sizes, places = 1.0, 0.0, [1.0], [1.0]
    for _ in range(steps):
        g = decay * g + (1 - decay) * curvature * x
        x -= rate * g
        sizes.append(math.hypot(x, rate * g))
        places.append(abs(x))
        if abs(x) > 1e100:
            break
    half = len(sizes) // 2
    diverged = max(sizes[half + half // 2 :]) > max(sizes[half : half + half // 2 + 1])
    return diverged, sum(b > a for a, b in itertools.pairwise(places))


for decay in (0.0, 0.9, 0.99):
    limit = stability_limit(decay, 1.0)
    print(decay, round(stationary_variance(decay), 4), round(limit, 6), round(contraction(decay, limit, 1.0), 9))

# %% [markdown]
# A learning rate of 37 is stable at a decay of 0.9, but the loss rises on many steps.

# %%
print([quadratic_probe(0.9, rate) for rate in (0.98 * monotone_limit(0.9, 1.0), 37.0, 39.0)])

# %% [markdown]
# The largest curvature of the loss of a network, by Lanczos with products of the Hessian.


# %%
def curvature(model, loss, x, y):
    parameters = list(model.parameters())
    slopes = torch.autograd.grad(loss(model(x), y), parameters, create_graph=True)
    flat = torch.cat([slope.reshape(-1) for slope in slopes])

    def product(vector):
        found = torch.autograd.grad(flat, parameters, torch.as_tensor(vector).reshape(-1).to(flat), retain_graph=True)
        return torch.cat([part.reshape(-1) for part in found]).double().numpy()

    start = np.random.default_rng(0).normal(size=len(flat))
    operator = LinearOperator((len(flat), len(flat)), matvec=product, dtype=np.float64)
    return float(eigsh(operator, k=1, which="LA", v0=start, return_eigenvectors=False)[0])


model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)).double()
x = torch.randn(256, 3).double()
y = x[:, :1] + torch.randn(256, 1).double()
loss = nn.functional.mse_loss
print(f"{curvature(model, loss, x, y):.3f}")

# %% [markdown]
# The noise of your gradients, and the smallest decay after which noise and signal are of one size.


# %%
def suggested_decay(model, loss, batches, ratio=1.0, most=0.999):
    rows, noise, signal = gradients(model, loss, batches), 0.0, 0.0
    for row in rows:
        noise += math.prod(row.shape) * row.noise
        signal += math.prod(row.shape) * (row.rms**2 - row.noise / len(batches))
    share = ratio * max(signal, 0.0) / noise
    return min(max((1 - share) / (1 + share), 0.0), most)


batches = [(x[i : i + 8], y[i : i + 8]) for i in range(0, 256, 8)]
print(f"{suggested_decay(model, loss, batches):.2f}")

# %% [markdown]
# Next: [gradients and their noise](../signal-propagation.md) for every tensor.
