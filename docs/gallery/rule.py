# %% [markdown]
# # Write a rule for an operation of your own
#
# The library reads a model operation by operation. An operation without a rule fixes the scales around it. This is safe,
# but it misses symmetries. This notebook defines an operation, shows the missed symmetries, and adds the rule.

# %%
import torch
from torch import Tensor, nn

import pathspace as ps


@torch.library.custom_op("gallery::two_slopes", mutates_args=())
def two_slopes(x: Tensor, slope: float) -> Tensor:
    """A rectifier with slope 1 above 0 and another below."""
    return torch.where(x > 0, x, slope * x)


@two_slopes.register_fake
def _(x: Tensor, slope: float) -> Tensor:
    return torch.empty_like(x)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter, self.leave = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x):
        return self.leave(two_slopes(self.enter(x), 0.1))


model, x = Net(), torch.randn(2, 3)
graph = ps.trace(model, x)
print(graph.num_units, [(pin.op, pin.reason) for pin in graph.pinned])

# %% [markdown]
# The function is positively homogeneous: $f(s x) = s f(x)$ for $s > 0$. A rule says so with one of the primitives of
# `semantics`: `activation` lets the scale through, position by position.


# %%
@ps.rule("gallery.two_slopes", kind="activation", degree=(1,), elementwise=True)
def two_slopes_rule(semantics, x, slope):
    return semantics.activation(x)


graph = ps.trace(model, x)
print(graph.num_units, graph.pinned)

# %% [markdown]
# Is the rule true? `ps.verify` tests it: it rescales the running model and compares the outputs. A wrong rule would fail here.

# %%
torch.library.register_autograd(
    "gallery::two_slopes",
    lambda ctx, grad: (torch.where(ctx.saved_tensors[0] > 0, grad, ctx.slope * grad), None),
    setup_context=lambda ctx, inputs, output: (
        ctx.save_for_backward(inputs[0]), setattr(ctx, "slope", inputs[1])),
)  # fmt: skip
certificate = ps.verify(model, x)
print(certificate.units, certificate.holds)

# %% [markdown]
# The rule of a rectifier of degree 2, $f(s x) = s^2 f(x)$, would return `semantics.product((2, semantics.activation(x)))`.
# [All primitives](../reduction-graph.md#a-rule-for-an-operation-of-your-own) are in one table.

# %% [markdown]
# Next: [all operations with their rules](../operations.md), and `pathspace explain net.py:Net --input 2x3` for the scales that are still fixed.
