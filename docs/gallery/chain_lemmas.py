# %% [markdown]
# # Statements about learnable Markov chains, as checks
#
# "Rethinking skip connection model as a learnable Markov chain" states lemmas about the branches $z_l$ of residual networks and the gradients $g_l$ at them. Here each is a
# function that counts how often premise and conclusion hold; [the page of claims](../claims-markov.md) has the results on trained networks.

# %%
import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from pathspace.diagnostics import MarkovChain
from pathspace.diagnostics.chain.addition_hooks import Sites
from pathspace.diagnostics.chain.efficiency import tensors
from pathspace.diagnostics.chain.observer import NodeTensors


class Check(NamedTuple):
    cases: int
    premise: int  # cases in which the premise holds
    conclusion: int  # those in which the conclusion holds, too

    @property
    def holds(self):
        return self.conclusion == self.premise if self.premise else None


# %% [markdown]
# **Appendix D.** A step from the state behind a node against the gradient lowers the loss. The rest of the network runs again.


# %%
def ideal_share(chain, losses, inputs, targets, *, eta, relative=False):
    """The share of samples with a lower loss at x_l - eta g_l, for each node; relative: along g / ||g||."""
    parts, places, known = tensors(chain, losses, inputs, targets), chain.samples(), chain.by_site()
    with torch.no_grad():
        before = losses(chain.model(inputs), targets).double()
    shares = []
    for node, part in zip(chain.nodes, parts, strict=True):
        step = part.gradient / part.gradient.norm(dim=1, keepdim=True) if relative else part.gradient

        def moved(addition, index=node.index, step=step):
            result = addition.run()
            if addition.site in known and known[addition.site].index == index:
                # in place, so that an in-place addition still overwrites its operand
                result.sub_(eta * places[index].back(step, result.shape).to(result.dtype))
            return result

        with torch.no_grad(), Sites(moved).following(chain.model):
            after = losses(chain.model(inputs), targets).double()
        shares.append((after < before).double().mean())
    return torch.stack(shares)


def losses(outputs, targets):
    """One loss for each sample."""
    return (outputs - targets).square().sum((1, 2))


model = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, norm_first=True).double().eval()
x, y = torch.randn(2, 20, 5, 8, dtype=torch.float64)
chain = MarkovChain.trace(model, x)
for eta in (1e-4, 100.0):
    print(ideal_share(chain, losses, x, y, eta=eta).tolist())

# %% [markdown]
# **Lemma 1.** Mixtures of a better point and a worse one are never worse than the worse one: for $\mu \le 1$, not for every $\mu \ge 0$.


# %%
def lemma1(distance, better, worse, mu):
    premise = distance(better) <= distance(worse)
    conclusion = distance(mu * better + (1 - mu) * worse) <= distance(worse)
    return Check(len(better), int(premise.sum()), int((premise & conclusion).sum()))


points = torch.randn(2, 500, 4, dtype=torch.float64)
print([lemma1(lambda v: v.square().sum(1), *points, mu).holds for mu in (0.3, 1.0, 3.0)])

# %% [markdown]
# **Lemma 2.** A chain whose directions all agree with descent has a positive efficiency. With directions $z - \eta \hat g$ and a small $\eta$ this is said of every chain.


# %%
def lemma2(record, eta):
    """The lemma and its converse, on every sample of an observed chain."""
    convex, efficient = record.delta(eta) > 0, record.eps(eta) > 0
    both = int((convex & efficient).sum())
    return (
        Check(record.samples, int(convex.sum()), both),
        Check(record.samples, int(efficient.sum()), both),
    )


record = chain.observe(losses, x, y)
for eta in (1e-3, 1e8):
    print(eta, lemma2(record, eta))

# %% [markdown]
# **Lemma 3.** Long chains come near the target $y$: with one-point convexity $\langle y - x, d \rangle \ge \delta \lVert y - x \rVert^2$ and steps
# $\eta = (1 + a) \log L / (\delta L)$, not with the full steps that are printed.


# %%
@dataclass
class Convergence:
    premise: bool
    bound: float
    error: float

    @property
    def conclusion(self):
        return self.error <= self.bound


def lemma3_step(length, delta, a):
    return (1 + a) * math.log(length) / (delta * length)


def lemma3(states, directions, target, *, delta, a=1.0, eta=None):
    """Lemma 3 on runs x_0 ... x_L, of shape (L + 1, runs, D), with the mean directions of every step."""
    length, gap = len(directions), target - states[:-1]
    square = gap.square().sum(-1)
    convex = float(((gap * directions).sum(-1) / square).min()) >= delta * (1 - 1e-9)
    eta = lemma3_step(length, delta, a) if eta is None else eta
    moment = float(((states[1:] - states[:-1]) / eta).square().sum(-1).mean(1).max())
    last = (target - states[-1]).square().sum(-1)
    diameter = float(torch.cat([square, last[None]]).max())
    long_enough = length**a * math.log(length) >= diameter * delta**2 / ((1 + a) * moment)
    return Convergence(
        convex and 2 * eta * delta <= 1 and long_enough,
        (1 + a) * math.log(length) * moment / (delta**2 * length),
        float(last.mean()),
    )


def simulate_lemma3(length, *, full_steps=False, delta=1.0, a=1.0, dim=8, noise=1.0, runs=400, seed=0):
    """Runs with z = delta (y - x) + noise."""
    generator = torch.Generator().manual_seed(seed)
    x, target = torch.zeros(runs, dim, dtype=torch.float64), torch.ones(dim, dtype=torch.float64) / dim**0.5
    eta = 1.0 if full_steps else lemma3_step(length, delta, a)
    states, means = [x], []
    for _ in range(length):
        means.append(delta * (target - x))
        drawn = torch.randn(x.shape, generator=generator, dtype=torch.float64)
        x = x + eta * (means[-1] + noise / dim**0.5 * drawn)
        states.append(x)
    return lemma3(torch.stack(states), torch.stack(means), target, delta=delta, a=a, eta=eta)


for length in (50, 200, 1000):
    right, printed = simulate_lemma3(length), simulate_lemma3(length, full_steps=True)
    print(length, right.premise, right.conclusion, printed.conclusion)

# %% [markdown]
# **Appendix C.** The penal connection adds $\tau z$ to the gradient, for that of $\lambda \epsilon^2$ of a node. The exact gradient is orthogonal to $z$, and the term
# that the appendix ignores is the larger one.


# %%
class PenaltyGradient(NamedTuple):
    exact: torch.Tensor
    orthogonality: float  # the largest |cos(exact, z)|: zero, and 1 for the penal connection
    kept_over_ignored: torch.Tensor  # |cos(z, g)|
    cancelling_tau: torch.Tensor  # the tau that cancels the term along z
    best_tau: torch.Tensor  # the tau z nearest to the exact gradient: zero


def penalty_gradient(z, g, *, eta, lam):
    unit, c = g / g.norm(dim=1, keepdim=True), 1 / z.norm(dim=1, keepdim=True)
    t = (z * unit).sum(1, keepdim=True)
    front = 2 * lam * (1 - c * eta * t)
    along_g, along_z = -front * c * eta * unit, front * c**3 * eta * t * z
    exact = along_g + along_z
    return PenaltyGradient(
        exact,
        float(((exact * z).sum(1) / (exact.norm(dim=1) * z.norm(dim=1))).abs().max()),
        along_z.norm(dim=1) / along_g.norm(dim=1),
        (front * c**3 * eta * t).squeeze(1),
        (exact * z).sum(1) / z.square().sum(1),
    )


found = penalty_gradient(*torch.randn(2, 200, 10, dtype=torch.float64), eta=0.1, lam=1.0)
print(found.orthogonality < 1e-12, float(found.best_tau.abs().max()) < 1e-14, bool((found.kept_over_ignored < 1).all()))

# %% [markdown]
# **Lemma 4.** A branch $z$ agrees with descent better than $z - x$ does, where $\langle x, d \rangle \ge 0$: true of inner products, false of cosines.


# %%
class Lemma4(NamedTuple):
    products: Check
    cosines: Check
    premise_on_convex: float  # how often <x, d> >= 0 where all branches agree with descent


def lemma4(parts):
    rows = []
    for part in parts:
        d, x, z = -part.gradient, part.stream, part.direction
        inner = [(v * d).sum(1) for v in (x, z, z - x)]
        lengths = [v.norm(dim=1) * d.norm(dim=1) for v in (z, z - x)]
        rows.append(torch.stack([*inner, inner[1] / lengths[0], inner[2] / lengths[1]]))
    xd, zd, wd, cos_z, cos_w = torch.stack(rows).unbind(1)
    premise, convex = xd >= 0, (zd > 0).all(0)
    products = premise & (zd >= wd - 1e-12 * (zd.abs() + wd.abs()))
    cosines = premise & (cos_z >= cos_w)
    counts = premise.numel(), int(premise.sum())
    share = float(premise[:, convex].double().mean()) if convex.any() else math.nan
    return Lemma4(Check(*counts, int(products.sum())), Check(*counts, int(cosines.sum())), share)


found = lemma4([NodeTensors(*torch.randn(3, 5000, 3, dtype=torch.float64))])
print(found.products.holds, found.cosines.holds)

# %% [markdown]
# Next: [the statements on trained networks](../claims-markov.md).
