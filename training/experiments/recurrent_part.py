"""Path space for the recurrent layers of a model alone, and descent on the weights
of all that is around them.

The path-space paper trains its language models so (section 5.2). The outputs of the layers have
fixed scales there, because the read-out is outside: the units of the last layer are not free.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence

from pathspace.errors import InputError, InputTypeError, UnsupportedError, expect_arguments
from pathspace.reduction import trace

from ..optim import GSGD
from ..optim.shell import Shell
from ..path_norm import evaluating
from ..path_sgd import PathSGD

# of a model: one tensor, or all in order
Inputs = Tensor | tuple[Any, ...]


class RecurrentPart(nn.Module):
    """The recurrent layers of a model as a network of their own, from the inputs of
    all steps to all outputs.

    Args:
        model: has one stack of recurrent layers (``nn.RNN``).

    Raises:
        InputTypeError: the model is not a module.
        InputError: it has none, or several.
        UnsupportedError: it is an LSTM, a GRU or a tanh network, whose units have no free scales.

    Example:
        >>> from pathspace.training.experiments.models import ReluRNN
        >>> part = RecurrentPart(ReluRNN(inputs=8, hidden=5, outputs=10))
        >>> part(torch.ones(1, 7, 8)).shape
        torch.Size([1, 7, 5])
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        expect_arguments("RecurrentPart", model=model)
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
    def example(self, model: nn.Module, inputs: Inputs) -> tuple[Tensor]:
        """Return ones of the shape that one sample has where it enters the recurrent layers.

        Packed sequences give a sample of the longest length.
        """
        name = type(model).__name__
        inputs = (inputs,) if isinstance(inputs, Tensor) else inputs
        if not isinstance(inputs, tuple | list) or not inputs:
            raise InputTypeError(
                f"RecurrentPart found {'no' if inputs == () else f'a {type(inputs).__name__} as'}"
                f" inputs of {name}, expected a tensor or a tuple; pass the inputs of a batch."
            )
        seen: list[Any] = []

        def look(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            seen.append(args[0] if args else kwargs.get("input"))

        handle = self.rnn.register_forward_pre_hook(look, with_kwargs=True)
        try:
            with evaluating(model):
                model(*inputs)
        except (TypeError, ValueError, RuntimeError, IndexError) as error:
            first = next(iter(str(error).splitlines()), "")
            raise InputError(
                f"RecurrentPart found inputs on which {name}.forward raised"
                f" {type(error).__name__} ({first}), expected a batch that it takes; pass the"
                " inputs as a tuple."
            ) from error
        finally:
            handle.remove()
        if not seen:
            raise InputError(
                f"RecurrentPart found that {name} runs without its {type(self.rnn).__name__},"
                " expected layers that it uses; choose an optimizer for all weights."
            )
        (sequence, *_) = seen
        batch = 0 if self.rnn.batch_first else 1
        if isinstance(sequence, PackedSequence):
            sequence = pad_packed_sequence(sequence, self.rnn.batch_first)[0]
        # (a single sequence has no dimension of samples)
        one = sequence.narrow(batch, 0, 1) if sequence.dim() > 2 else sequence
        return (torch.ones_like(one),)

    def joined(self, inner: torch.optim.Optimizer, model: nn.Module, lr: float) -> Shell:
        """Return the optimizer of the layers together with SGD for all
        other weights of the model, if there are any.
        """
        mine = {id(p) for p in self.parameters()}
        rest = [p for p in model.parameters() if id(p) not in mine]
        return Shell([inner, *([torch.optim.SGD(rest, lr=lr)] if rest else [])])


def recurrent_gsgd(model: nn.Module, lr: float, inputs: Inputs) -> Shell:
    """Return G-SGD for the recurrent layers and SGD for the rest; with a single layer it is SGD."""
    part = RecurrentPart(model)
    skeleton = trace(part, *part.example(model, inputs)).skeleton()
    return part.joined(GSGD(part.named_parameters(), lr=lr, skeleton=skeleton), model, lr)


def recurrent_path_sgd(model: nn.Module, lr: float, inputs: Inputs) -> Shell:
    """Return Path-SGD for the recurrent layers, whose inputs can be set to
    one, and SGD for the rest.

    The size of ``kappa`` grows with the numbers of steps and outputs, while the rest of the model
    has a rate without it. Both get comparable steps: the rate of Path-SGD is ``lr`` times the mean
    of ``kappa`` at the start.
    """
    part = RecurrentPart(model)
    example = part.example(model, inputs)
    inner = PathSGD(part.named_parameters(), lr=lr, model=part, example=example, second=False)
    kappa = torch.cat([value.flatten() for value in inner.path_norm.kappa(second=False).values()])
    for group in inner.param_groups:
        group["lr"] = lr * float(kappa.mean())
    return part.joined(inner, model, lr)
