# %% [markdown]
# # Grow a network
#
# By how much can new parameters lower the loss of a trained network? With the old parameters frozen and the outputs linear in the new ones, the answer is a
# least-squares problem: the loss falls by $\tfrac12 b^\top A^+ b$, with the second moment (not the covariance) $A = \mathrm{E}[J^\top J]$ of the derivatives $J$
# of the outputs, $b = \mathrm{E}[J^\top (y - f)]$, and the pseudoinverse $A^+$.

# %%
from dataclasses import dataclass
from fnmatch import fnmatch

import numpy as np
import torch
from scipy.optimize import least_squares
from torch import nn
from torch.autograd.functional import hessian, jacobian
from torch.func import functional_call


@dataclass
class Growth:
    loss: float  # E |f - y|^2 / 2, before
    predicted: float  # decrease at the optimum of the linearised model
    linear_step: float  # decrease after exactly this step
    measured: float  # decrease after fitting the new parameters
    rank: int  # how many of them have an effect of first order
    curvature: float  # smallest eigenvalue of the Hessian at the start

    @property
    def saddle(self):
        return self.predicted < 1e-12 * self.loss and self.curvature < -1e-12


def predict_growth(model, pattern, x, y):
    """The decrease of the loss by the parameters whose names match, from their values now."""
    new = {name: p.detach() for name, p in model.named_parameters() if fnmatch(name, pattern)}
    sizes = [p.numel() for p in new.values()]
    start = torch.cat([p.reshape(-1) for p in new.values()])

    def error(flat):
        parts = zip(new.items(), torch.as_tensor(flat).split(sizes), strict=True)
        values = {name: part.view_as(p) for (name, p), part in parts}
        return (functional_call(model, values, x) - y).reshape(-1) / len(y) ** 0.5

    def loss(flat):
        return error(flat).square().sum() / 2

    def slope(flat):
        return jacobian(error, torch.as_tensor(flat)).numpy()

    before, now = float(loss(start).detach()), error(start).detach().numpy()
    left, singular, right = np.linalg.svd(slope(start), full_matrices=False)
    rank = int((singular > max(1e-12 * singular[0], 1e-14)).sum())
    image = -left[:, :rank].T @ now
    step = torch.from_numpy(right[:rank].T @ (image / singular[:rank]))
    after = float(loss(start + step).detach())
    exact = {"x_scale": "jac", "xtol": 1e-15, "ftol": 1e-15, "gtol": 1e-15, "max_nfev": 200}
    fitted = least_squares(lambda flat: error(flat).detach().numpy(), start.numpy(), slope, **exact)
    return Growth(
        before,
        float(image @ image) / 2,
        before - after,
        before - min(fitted.cost, after),
        rank,
        float(torch.linalg.eigvalsh(hessian(loss, start))[0]),
    )


# %% [markdown]
# A hidden layer with more units, as parameters of their own. With random incoming and zero outgoing weights the outputs do not change and are linear in the new
# outgoing weights.


# %%
class Widened(nn.Module):
    def __init__(self, into, activation, out, units, zero=False, seed=0):
        super().__init__()
        self.into, self.activation, self.out = into, activation, out
        torch.manual_seed(seed)
        self.new_into = nn.Linear(into.in_features, units).double()
        self.new_out = nn.Linear(units, out.out_features, bias=False).double()
        for parameter in [*self.new_out.parameters(), *(self.new_into.parameters() if zero else ())]:
            nn.init.zeros_(parameter)

    def forward(self, x):
        return self.out(self.activation(self.into(x))) + self.new_out(self.activation(self.new_into(x)))


torch.manual_seed(0)
net = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)).double()
x = torch.randn(80, 2).double()
y = torch.sin(2 * x[:, :1]) + x[:, 1:] ** 2
features = torch.cat([net[:2](x), torch.ones(80, 1).double()], 1).detach()
best = torch.linalg.lstsq(features, y).solution  # the output layer is at its best fit
with torch.no_grad():
    net[2].weight.copy_(best[:3].T)
    net[2].bias.copy_(best[3])

for units in (1, 4, 8):
    found = predict_growth(Widened(*net, units), "new_out.*", x, y)
    print(units, round(found.predicted, 3), abs(found.measured - found.predicted) < 1e-10)

# %% [markdown]
# New units with all weights zero do not lower the loss to first order: they start at a saddle.

# %%
found = predict_growth(Widened(*net, 1, zero=True), "new_*", x, y)
print(found.predicted < 1e-14, found.saddle)

# %% [markdown]
# Next: what one step of training costs before and after growth: `pathspace.diagnostics.cost` in [signal propagation](../signal-propagation.md#depth-or-width).
