# %% [markdown]
# # Order and chaos
#
# Does a small perturbation of the input grow or shrink through the layers, or through time? The growth exponent is the mean of $\log(|dz_{l+1}| / |dz_l|)$. Its sign
# separates order from chaos; an inequality at every step does not.

# %%
import copy
import math
from fnmatch import fnmatch

import torch
from matplotlib import pyplot as plt
from scipy.optimize import brentq
from torch import nn
from torch.func import jvp

from pathspace.diagnostics import Estimate
from pathspace.diagnostics.signal.meanfield import gaussian_mean, slope


def perturbed(model, x, layers=None, at=..., directions=4, seed=0):
    """Log sizes of perturbations at the outputs of layers, or at the time steps of a recurrent layer."""
    recurrent = isinstance(model, nn.RNNBase)
    layers = layers or [m for m in model.modules() if isinstance(m, nn.Linear | nn.RNNBase)]
    generator, logs = torch.Generator().manual_seed(seed), []

    def outputs(x):
        found = []
        hooks = [m.register_forward_hook(lambda _m, _a, out: found.append(out)) for m in layers]
        model(x)
        for hook in hooks:
            hook.remove()
        return list(found[0][0]) if recurrent else found

    for _ in range(directions):
        noise = torch.randn(x.shape, generator=generator, dtype=torch.float64)
        start = torch.zeros_like(noise)
        start[at] = noise[at]
        # by forward differentiation: exact, and the perturbation has no size
        tangents = jvp(outputs, (x.double(),), (start,))[1]
        logs.append(torch.stack([tangent.square().mean(-1).sqrt().log() for tangent in tangents]))
    return torch.cat(logs, 1)


def growth_exponent(model, x, burn_in=None, **options):
    """The mean growth per step behind a burn-in, with an error over perturbations."""
    logs = perturbed(model, x, **options)
    # the first state of a loop is zero, and no perturbation reaches it
    logs = logs[int(logs.isfinite().any(1).nonzero()[0]) :]
    first = (len(logs) - 1) // 4 if burn_in is None else burn_in
    return Estimate.of(((logs[-1] - logs[first]) / (len(logs) - 1 - first)).tolist())


def redraw(model, scale, bias=0.0, pattern="*weight", seed=0):
    """A float64 copy with fresh weights of variance scale^2 / fan_in, and biases of variance bias^2."""
    twin, generator = copy.deepcopy(model).double(), torch.Generator().manual_seed(seed)
    for name, parameter in twin.named_parameters():
        size = scale / math.sqrt(parameter[0].numel()) if fnmatch(name, pattern) else bias
        if fnmatch(name, pattern) or "bias" in name:
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.data.copy_(size * noise)
    return twin


def mean_exponent(model, scale, x, bias=0.0, pattern="*weight", draws=4, **options):
    """The exponent at a scale of the weights, over several draws; all scales have the same random numbers."""
    twins = [redraw(model, scale, bias, pattern, seed) for seed in range(draws)]
    found = [growth_exponent(twin, x, seed=seed, **options) for seed, twin in enumerate(twins)]
    return Estimate.of([one.value for one in found])


def critical_point(model, x, low, high, tolerance=1e-3, **options):
    """The scale at which the exponent changes its sign, with an error; None where it does not."""

    def exponent(scale):
        return mean_exponent(model, scale, x, **options).value

    if exponent(low) * exponent(high) > 0:
        return None
    scale = brentq(exponent, low, high, xtol=tolerance * low)
    steepness = (exponent(1.02 * scale) - exponent(scale / 1.02)) / (1.02 * scale - scale / 1.02)
    return Estimate(scale, mean_exponent(model, scale, x, **options).error / steepness, 1)


# %% [markdown]
# Wide random networks have a theory. Pre-activations of a wide layer are normal with variance $q' = s^2 \mathrm{E}\,\phi(\sqrt q g)^2 + b^2$, and at its fixed
# point the square of a perturbation grows by $s^2 \mathrm{E}\,\phi'(\sqrt q g)^2$.


# %%
def theory(activation, scale, bias=0.0):
    q, last, steep = 1.0, 0.0, slope(activation)
    for _ in range(1000):  # (at the critical scale it takes for ever)
        if abs(q - last) > 1e-13 * q and 1e-12 < q < 1e12:
            q, last = scale**2 * gaussian_mean(lambda z: activation(z) ** 2, q) + bias**2, q
    q = min(max(q, 1e-12), 1e12)
    return 0.5 * math.log(scale**2 * gaussian_mean(lambda z: steep(z) ** 2, q))


def critical_scale(activation, bias=0.0, low=0.05, high=10.0):
    return brentq(lambda scale: theory(activation, scale, bias), low, high, xtol=1e-10)


print(round(critical_scale(torch.relu), 6), round(critical_scale(torch.tanh, bias=0.3), 3))

# %% [markdown]
# A chain of 30 ReLU layers against the theory of infinite width.

# %%
torch.manual_seed(0)
chain = nn.Sequential(*[layer for _ in range(30) for layer in (nn.Linear(128, 128, bias=False), nn.ReLU())])
x = torch.randn(4, 128)
found = critical_point(chain, x, low=1.2, high=1.7, directions=1)
print(f"{found.value:.2f}")
scales = (1.1, 1.25, 1.4, 1.55, 1.7)
measured = [mean_exponent(chain, scale, x, directions=1) for scale in scales]
plt.figure(figsize=(5.2, 3.2), layout="constrained")
plt.errorbar(scales, [one.value for one in measured], [2 * one.error for one in measured], fmt="o", label="measured")
plt.plot(scales, [theory(torch.relu, scale) for scale in scales], label="infinite width")
plt.axhline(0, color="black", linewidth=0.8)
plt.axvline(found.value, color="black", linestyle="--", label=f"critical {found.value:.2f}")
plt.xlabel("weight scale s (variance s² / fan in)")
plt.ylabel("growth exponent")
plt.legend();

# %% [markdown]
# Below the edge the exponent of a recurrent network is the logarithm of its spectral radius; the perturbation is that of the first time step.

# %%
rnn = redraw(nn.RNN(120, 120, bias=False), 0.8, pattern="weight_hh*", seed=1)
impulse = torch.zeros(400, 2, 120)
impulse[0] = 1e-3 * torch.randn(2, 120)
radius = float(torch.linalg.eigvals(rnn.weight_hh_l0.detach()).abs().max())
print(abs(growth_exponent(rnn, impulse, at=0, directions=2).value - math.log(radius)) < 0.01)

# %% [markdown]
# Next: variance and gain of every layer of your own network: [signal propagation](../signal-propagation.md).
