"""The recurrent networks of the path-space paper: ReLU units, no biases,
read out at the last step.
"""

from __future__ import annotations

from torch import Tensor, nn


class ReluRNN(nn.Module):
    """A stack of ReLU recurrent layers, and a linear read-out of the last step.

    ``h_t = relu(W_i x_t + W_r h_(t-1))``, ``h_0 = 0``, ``y = W_o h_T``. The paper's equations
    (1) and (2) have no biases, so none is the default: the network is then positively
    homogeneous in its input, too.

    Args:
        inputs: features per step.
        hidden: units per layer.
        outputs: scores per sequence.
        layers: recurrent layers, stacked.
        bias: give the recurrent layers and the read-out biases.

    Reference:
        Path Space for Recurrent Neural Networks with ReLU Activations, equations (1) and (2).

    Example:
        >>> import torch
        >>> ReluRNN(inputs=8, hidden=5, outputs=10)(torch.zeros(2, 7, 8)).shape
        torch.Size([2, 10])
    """

    def __init__(
        self, inputs: int, hidden: int, outputs: int, layers: int = 1, bias: bool = False
    ) -> None:
        super().__init__()
        self.rnn = nn.RNN(inputs, hidden, layers, nonlinearity="relu", bias=bias, batch_first=True)
        self.readout = nn.Linear(hidden, outputs, bias=bias)

    def forward(self, sequence: Tensor) -> Tensor:
        """Map sequences of shape (B, T, inputs) to scores of shape (B, outputs)."""
        states, _ = self.rnn(sequence)
        result: Tensor = self.readout(states[:, -1])
        return result
