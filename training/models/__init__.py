"""Small models that show what the library reads, and the models of the papers.

Every function here returns ``(model, example_args)``. They are targets one can type, for example
``pathspace verify training.models:residual_cnn``.
"""

from training.models.cifar_resnet import CifarResNet, cifar_resnet
from training.models.language import StackedReluLM, language_model
from training.models.loop_rnn import LoopRNN, loop_rnn
from training.models.mlp import mlp
from training.models.recurrent_cnn import RecurrentCNN, recurrent_cnn
from training.models.residual import ResidualCNN, residual_cnn
from training.models.rnn import ReluRNN, relu_rnn, stacked_rnn
from training.models.toy import Toy, toy
from training.models.translator import Translator, translator

__all__ = [
    "CifarResNet",
    "LoopRNN",
    "RecurrentCNN",
    "ReluRNN",
    "ResidualCNN",
    "StackedReluLM",
    "Toy",
    "Translator",
    "cifar_resnet",
    "language_model",
    "loop_rnn",
    "mlp",
    "recurrent_cnn",
    "relu_rnn",
    "residual_cnn",
    "stacked_rnn",
    "toy",
    "translator",
]
