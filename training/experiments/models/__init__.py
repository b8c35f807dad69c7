"""Small example models, and the models of the papers.

The functions return ``(model, example_args)``. They are targets one can type, for example
``pathspace verify pathspace.training.experiments.models:residual_cnn``.

Example:
    >>> model, inputs = relu_rnn()
    >>> model(*inputs).shape
    torch.Size([2, 10])
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from .cifar_resnet import CifarResNet
from .deep_resnet import DeepResNet
from .language import StackedReluLM
from .loop_rnn import LoopRNN
from .recurrent_cnn import RecurrentCNN
from .residual import ResidualCNN
from .rnn import ReluRNN
from .swin import swin
from .toy import Toy
from .transformer import CharacterGPT, VisionTransformer
from .translator import Translator

Example = tuple[nn.Module, tuple[Tensor, ...]]


def _example(build: Callable[[], Example]) -> Callable[[], Example]:
    """An example that is the same each time, and leaves the global random state alone."""

    def made() -> Example:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return build()

    return made


def _mlp() -> Example:
    hidden = nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, 20), nn.ReLU()
    return nn.Sequential(*hidden, nn.Linear(20, 5)), (torch.randn(4, 8),)


# layers of unequal width, with biases
mlp = _example(_mlp)
# the classifier of the task digits-rows, and two sequences of 8 steps
relu_rnn = _example(lambda: (ReluRNN(8, 100, 10), (torch.randn(2, 8, 8),)))
# two layers of nn.RNN
stacked_rnn = _example(lambda: (ReluRNN(6, 12, 4, layers=2), (torch.randn(2, 5, 6),)))
loop_rnn = _example(lambda: (LoopRNN(6, 14, 3), (torch.randn(2, 5, 6),)))
residual_cnn = _example(lambda: (ResidualCNN(), (torch.randn(2, 3, 8, 8),)))
toy = _example(lambda: (Toy(), (torch.randn(4, 2),)))
language_model = _example(
    lambda: (StackedReluLM(12, embedding=6, hidden=8), (torch.randint(12, (2, 5)),))
)
recurrent_cnn = _example(
    lambda: (RecurrentCNN(1, 6, 10, layers=2).eval(), (torch.randn(2, 1, 8, 8),))
)
cifar_resnet = _example(lambda: (CifarResNet(20, width=4).eval(), (torch.randn(2, 3, 8, 8),)))
translator = _example(
    lambda: (Translator(20, 4, 8, 2, 12, layers=1), (torch.randint(1, 20, (2, 9)),))
)

__all__ = ["CharacterGPT", "CifarResNet", "DeepResNet", "LoopRNN", "RecurrentCNN", "ReluRNN"]
__all__ += ["ResidualCNN", "StackedReluLM", "Toy", "Translator", "VisionTransformer"]
__all__ += ["cifar_resnet", "language_model", "loop_rnn", "mlp", "recurrent_cnn"]
__all__ += ["relu_rnn", "residual_cnn", "stacked_rnn", "swin", "toy", "translator"]
