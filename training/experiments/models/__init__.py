"""Small example models, and the models of the papers.

Every function here returns ``(model, example_args)``. They are targets one can type, for example
``pathspace verify pathspace.training.experiments.models:residual_cnn``.
"""

from pathspace.training.experiments.models.cifar_resnet import CifarResNet, cifar_resnet
from pathspace.training.experiments.models.deep_resnet import DeepResNet, deep_resnet
from pathspace.training.experiments.models.language import StackedReluLM, language_model
from pathspace.training.experiments.models.loop_rnn import LoopRNN, loop_rnn
from pathspace.training.experiments.models.mlp import mlp
from pathspace.training.experiments.models.recurrent_cnn import RecurrentCNN, recurrent_cnn
from pathspace.training.experiments.models.residual import ResidualCNN, residual_cnn
from pathspace.training.experiments.models.rnn import ReluRNN, relu_rnn, stacked_rnn
from pathspace.training.experiments.models.swin import swin
from pathspace.training.experiments.models.toy import Toy, toy
from pathspace.training.experiments.models.transformer import CharacterGPT, VisionTransformer
from pathspace.training.experiments.models.translator import Translator, translator

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
