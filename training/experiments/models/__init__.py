"""Small example models, and the models of the papers.

Every function here returns ``(model, example_args)``. They are targets one can type, for example
``pathspace verify pathspace.training.experiments.models:residual_cnn``.
"""

from .cifar_resnet import CifarResNet, cifar_resnet
from .deep_resnet import DeepResNet, deep_resnet
from .language import StackedReluLM, language_model
from .loop_rnn import LoopRNN, loop_rnn
from .mlp import mlp
from .recurrent_cnn import RecurrentCNN, recurrent_cnn
from .residual import ResidualCNN, residual_cnn
from .rnn import ReluRNN, relu_rnn, stacked_rnn
from .swin import swin
from .toy import Toy, toy
from .transformer import CharacterGPT, VisionTransformer
from .translator import Translator, translator

__all__ = [
    "CharacterGPT",
    "CifarResNet",
    "DeepResNet",
    "LoopRNN",
    "RecurrentCNN",
    "ReluRNN",
    "ResidualCNN",
    "StackedReluLM",
    "Toy",
    "Translator",
    "VisionTransformer",
    "cifar_resnet",
    "deep_resnet",
    "language_model",
    "loop_rnn",
    "mlp",
    "recurrent_cnn",
    "relu_rnn",
    "residual_cnn",
    "stacked_rnn",
    "swin",
    "toy",
    "translator",
]
