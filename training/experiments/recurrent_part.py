"""Path space for the recurrent layers of a model alone, and descent on the weights around them, as
the path-space paper trains its language models (section 5.2). The outputs of the layers have fixed
scales there, because the read-out is outside: the units of the last layer are not free.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pathspace.errors import InputError, UnsupportedError
from pathspace.reduction import trace

from ..optim import GSGD
from ..optim.shell import Shell
from ..path_norm import evaluating
from ..path_sgd import PathSGD


class RecurrentPart(nn.Module):
    """The recurrent layers of a model, one ``nn.RNN``, as a network: all inputs to all outputs."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        found = [module for module in model.modules() if isinstance(module, nn.RNNBase)]
        if len(found) != 1:
            raise InputError(
                f"The model {type(model).__name__} has {len(found)} recurrent modules, expected one"
                " nn.RNN; choose an optimizer for all weights."
            )
        kind = {"RNN_RELU": "", "RNN_TANH": "tanh"}.get(found[0].mode, found[0].mode)
        if kind:
            raise UnsupportedError(
                f"The model {type(model).__name__} has a recurrent module of kind {kind}, expected"
                " nn.RNN with nonlinearity='relu': no scale is free in others, so path space has"
                " nothing to add; choose an optimizer of torch.optim."
            )
        self.rnn = found[0]

    def forward(self, sequence: Tensor) -> Tensor:
        """Map the inputs of all steps to the outputs of the last layer at all steps."""
        states: Tensor = self.rnn(sequence)[0]
        return states

    @torch.no_grad()
    def example(self, model: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor]:
        """Return ones of the shape that one sample has where it enters the recurrent layers."""
        seen: list[Tensor] = []
        handle = self.rnn.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
        try:
            with evaluating(model):
                model(*inputs)
        finally:
            handle.remove()
        return (torch.ones_like(seen[0].narrow(0 if self.rnn.batch_first else 1, 0, 1)),)

    def joined(self, inner: torch.optim.Optimizer, model: nn.Module, lr: float) -> Shell:
        """Return the optimizer of the layers together with SGD for all other weights."""
        mine = {id(p) for p in self.parameters()}
        rest = [p for p in model.parameters() if id(p) not in mine]
        return Shell([inner, torch.optim.SGD(rest, lr=lr)])


def recurrent_gsgd(model: nn.Module, lr: float, inputs: tuple[Tensor, ...]) -> Shell:
    """Return G-SGD for the recurrent layers and SGD for the rest; with a single layer it is SGD."""
    part = RecurrentPart(model)
    skeleton = trace(part, *part.example(model, inputs)).skeleton()
    return part.joined(GSGD(part.named_parameters(), lr=lr, skeleton=skeleton), model, lr)


def recurrent_path_sgd(model: nn.Module, lr: float, inputs: tuple[Tensor, ...]) -> Shell:
    """Return Path-SGD for the recurrent layers, whose inputs can be set to one, and SGD for the
    rest.

    Both get comparable steps: the rate of Path-SGD is ``lr`` times the mean of ``kappa`` at the
    start, which grows with the numbers of steps and outputs.
    """
    part = RecurrentPart(model)
    example = part.example(model, inputs)
    inner = PathSGD(part.named_parameters(), lr=lr, model=part, example=example, second=False)
    kappa = torch.cat([value.flatten() for value in inner.path_norm.kappa(second=False).values()])
    for group in inner.param_groups:
        group["lr"] = lr * float(kappa.mean())
    return part.joined(inner, model, lr)
