"""The models of the papers and of the leaderboard, and two examples ``(model, example_args)`` for
the command line, such as ``pathspace verify pathspace.training.experiments.models:residual_cnn``.

Example:
    >>> model, inputs = stacked_rnn()
    >>> model(*inputs).shape
    torch.Size([2, 4])
"""

import torch
from torch import Tensor, nn

from .recurrent import RecurrentCNN, ReluRNN, StackedReluLM
from .resnet import CifarResNet, DeepResNet, ResidualCNN, Toy
from .transformer import CharacterGPT, VisionTransformer, swin
from .translator import Translator

Example = tuple[nn.Module, tuple[Tensor, ...]]


def residual_cnn() -> Example:
    """Return a residual network of images, the same each time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return ResidualCNN(), (torch.randn(2, 3, 8, 8),)


def stacked_rnn() -> Example:
    """Return two layers of ``nn.RNN``, the same each time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return ReluRNN(6, 12, 4, layers=2), (torch.randn(2, 5, 6),)


__all__ = ["CharacterGPT", "CifarResNet", "DeepResNet", "RecurrentCNN", "ReluRNN", "ResidualCNN"]
__all__ += ["StackedReluLM", "Toy", "Translator", "VisionTransformer"]
__all__ += ["residual_cnn", "stacked_rnn", "swin"]
