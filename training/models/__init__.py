"""Small models that show what the library reads: every function here returns ``(model, example_args)``.

They are targets one can type, for example ``pathspace verify training.models:residual_cnn``.
"""

from training.models.loop_rnn import LoopRNN, loop_rnn
from training.models.mlp import mlp
from training.models.residual import ResidualCNN, residual_cnn
from training.models.rnn import ReluRNN, relu_rnn, stacked_rnn

__all__ = ["LoopRNN", "ReluRNN", "ResidualCNN", "loop_rnn", "mlp", "relu_rnn", "residual_cnn", "stacked_rnn"]
