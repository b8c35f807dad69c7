"""Path space for the recurrent layers of a model alone, and descent on the weights
of all that is around them.

The path-space paper trains its language models so (section 5.2). The outputs of the layers have
fixed scales there, because the read-out is outside: the units of the last layer are not free.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pathspace import trace
from pathspace.errors import InputError
from pathspace.training.optim import GSGD, PathSGD
from pathspace.training.optim.joined import Joined
from pathspace.training.optim.path_sgd import evaluating


class RecurrentPart(nn.Module):
    """The recurrent layers of a model as a network of their own, from the inputs of
    all steps to all outputs.

    Args:
        model: has one stack of recurrent layers (``nn.RNN``).

    Raises:
        InputError: it has none, or several.

    Example:
        >>> from pathspace.training.experiments.models import ReluRNN
        >>> part = RecurrentPart(ReluRNN(inputs=8, hidden=5, outputs=10))
        >>> part(torch.ones(1, 7, 8)).shape
        torch.Size([1, 7, 5])
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        found = [module for module in model.modules() if isinstance(module, nn.RNNBase)]
        if len(found) != 1:
            raise InputError(
                f"The model {type(model).__name__} has {len(found)} recurrent modules, expected one"
                " nn.RNN; choose an optimizer for all weights."
            )
        self.rnn = found[0]

    def forward(self, sequence: Tensor) -> Tensor:
        """Map the inputs of all steps to the outputs of the last layer at all steps."""
        states: Tensor = self.rnn(sequence)[0]
        return states

    @torch.no_grad()
    def example(self, model: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor]:
        """Return ones of the shape that one sample has where it enters the recurrent layers.

        Args:
            model: the whole model.
            inputs: its inputs.
        """
        seen: list[Tensor] = []
        with (
            evaluating(model),
            self.rnn.register_forward_pre_hook(lambda _, args: seen.append(args[0])),
        ):
            model(*inputs)
        return (torch.ones_like(seen[0].narrow(0 if self.rnn.batch_first else 1, 0, 1)),)

    def joined(self, inner: torch.optim.Optimizer, model: nn.Module, lr: float) -> Joined:
        """Return the optimizer of the layers together with SGD for all
        other weights of the model.
        """
        mine = {id(p) for p in self.parameters()}
        return Joined(
            [inner, torch.optim.SGD([p for p in model.parameters() if id(p) not in mine], lr=lr)]
        )


def recurrent_gsgd(model: nn.Module, lr: float, inputs: tuple[Tensor, ...]) -> Joined:
    """Return G-SGD for the recurrent layers and SGD for the rest; with a single layer it is SGD.

    Args:
        model: has one stack of recurrent layers.
        lr: learning rate of both.
        inputs: example inputs of the model.

    Example:
        >>> from pathspace.training.experiments.models import ReluRNN
        >>> model = ReluRNN(inputs=8, hidden=5, outputs=10, layers=2)
        >>> [
        ...     type(one).__name__
        ...     for one in recurrent_gsgd(model, 0.1, (torch.ones(1, 7, 8),)).optimizers
        ... ]
        ['GSGD', 'SGD']
    """
    part = RecurrentPart(model)
    skeleton = trace(part, *part.example(model, inputs)).skeleton()
    return part.joined(GSGD(part.named_parameters(), lr=lr, skeleton=skeleton), model, lr)


def recurrent_path_sgd(model: nn.Module, lr: float, inputs: tuple[Tensor, ...]) -> Joined:
    """Return Path-SGD for the recurrent layers, whose inputs can be set to
    one, and SGD for the rest.

    The size of ``kappa`` grows with the numbers of steps and outputs, while the rest of the model
    has a rate without it. Both get comparable steps: the rate of Path-SGD is ``lr`` times the mean
    of ``kappa`` at the start.

    Args:
        model: has one stack of recurrent layers.
        lr: learning rate of the rest.
        inputs: example inputs of the model; tokens, too.

    Example:
        >>> from pathspace.training.experiments.models import ReluRNN
        >>> model = ReluRNN(inputs=8, hidden=5, outputs=10, layers=2)
        >>> [
        ...     type(one).__name__
        ...     for one in recurrent_path_sgd(model, 0.1, (torch.ones(1, 7, 8),)).optimizers
        ... ]
        ['PathSGD', 'SGD']
    """
    part = RecurrentPart(model)
    example = part.example(model, inputs)
    inner = PathSGD(part.named_parameters(), lr=lr, model=part, example=example, second=False)
    kappa = torch.cat([value.flatten() for value in inner.path_norm.kappa(second=False).values()])
    for group in inner.param_groups:
        group["lr"] = lr * float(kappa.mean())
    return part.joined(inner, model, lr)
