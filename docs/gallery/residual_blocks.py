# %% [markdown]
# # Many small branches
#
# A residual block $z' = z + r(z)$ with a small branch is close to the identity. Is a stack of $m$ of them? With $e_l = \lVert \partial r_l / \partial z \rVert$ the
# Jacobian of the stack is $I + \sum_l \partial r_l / \partial z + R$, and $\lVert R \rVert \le \prod (1 + e_l) - 1 - \sum e_l$: the condition is $m e \ll 1$, not $e \ll 1$.

# %%
import math
from dataclasses import dataclass

import torch
from scipy.sparse import identity
from scipy.sparse.linalg import aslinearoperator
from torch import nn

from pathspace.diagnostics import jacobian, top_singular


def norm(operator):
    """The spectral norm of an operator, from its products with vectors."""
    return top_singular(operator, 1)[0].value


@dataclass
class ResidualControl:
    branches: list[float]  # ||dr_l/dz||
    span: float  # || Jacobian of the stack ||
    bound: float  # product of the blocks' norms, at least the span
    first_order: float  # || sum_l dr_l/dz ||
    remainder: float
    remainder_bound: float


def residual_control(blocks, z):
    one = aslinearoperator(identity(z.numel()))
    span, steps = jacobian(blocks, z), []
    for block in blocks:
        steps.append(jacobian(block, z))
        z = block(z).detach()
    branches = [norm(step - one) for step in steps]
    linear = sum((step - one for step in steps[1:]), steps[0] - one)
    return ResidualControl(
        branches,
        norm(span),
        math.prod(norm(step) for step in steps),
        norm(linear),
        norm(span - one - linear),
        math.prod(1 + e for e in branches) - 1 - sum(branches),
    )


class Block(nn.Module):
    def __init__(self, scale, norm=False):
        super().__init__()
        self.norm = nn.LayerNorm(6) if norm else nn.Identity()
        self.branch, self.scale = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)), scale

    def forward(self, z):
        return z + self.scale * self.branch(self.norm(z))


def stack(scale, depth=4, norm=False):
    torch.manual_seed(0)
    return nn.Sequential(*[Block(scale, norm) for _ in range(depth)]).double(), torch.randn(1, 6).double()


# %% [markdown]
# Two blocks are close to the first-order picture, forty of the same size are not.

# %%
for depth in (2, 40):
    found = residual_control(*stack(0.1, depth))
    print(f"{depth} branches add up to {sum(found.branches):.2g}, remainder {found.remainder:.2g} of at most {found.remainder_bound:.2g}")

# %% [markdown]
# The derivative of a branch behind a norm falls with the standard deviation of what is normalised.

# %%
for size in (1.0, 4.0, 16.0):
    blocks, z = stack(1.0, 1, norm=True)
    print(round(residual_control(blocks, size * z).branches[0], 3))

# %% [markdown]
# Next: the gain of every layer and the gain from the output back: [signal propagation](../signal-propagation.md).
