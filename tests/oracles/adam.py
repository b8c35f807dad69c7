"""Adam on path values by brute force: torch's own Adam on the vector of path values,
differentiated through w(v).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from oracles.gsgd import PathProblem


def train_on_path_values(
    model: nn.Module,
    loss: Callable[[nn.Module, dict[str, Tensor]], Tensor],
    problem: PathProblem,
    make: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
    steps: int,
) -> dict[str, Tensor]:
    """Let any torch optimizer move path values; the weights of `T_out` stay as they are.

    Returns the weights after some steps; the model is not changed. Parameters
    outside path space stay, too.
    """
    start = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    vector = problem.vector(start)
    fixed = vector[torch.from_numpy(problem.fixed)]
    values = nn.Parameter(problem.path_values(vector).detach())
    optimizer = make([values])
    for _ in range(steps):
        optimizer.zero_grad()
        loss(model, start | problem.tensors(problem.weights(values, fixed), start)).backward()
        optimizer.step()
    with torch.no_grad():
        return start | problem.tensors(problem.weights(values, fixed), start)
