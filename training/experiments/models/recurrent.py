"""The recurrent networks of the path-space paper: of sequences, of texts and of images."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout as dropped


class ReluRNN(nn.Module):
    """A stack of ReLU recurrent layers without biases, and a read-out of the last step."""

    def __init__(self, inputs: int, hidden: int, outputs: int, layers: int = 1) -> None:
        super().__init__()
        self.rnn = nn.RNN(inputs, hidden, layers, nonlinearity="relu", bias=False, batch_first=True)
        self.readout = nn.Linear(hidden, outputs, bias=False)

    def forward(self, sequence: Tensor) -> Tensor:
        """Map sequences of shape (B, T, inputs) to scores of shape (B, outputs)."""
        states, _ = self.rnn(sequence)
        result: Tensor = self.readout(states[:, -1])
        return result


class StackedReluLM(nn.Module):
    """Embedding, stacked ReLU recurrent layers without biases, a linear read-out of every step.

    Dropout acts before the read-out, on the embedded tokens (``dropout_inputs``) and between
    layers; ``dropout_words`` drops the embedding of some tokens everywhere, and ``weight_drop``
    leaves out a share of the recurrent weights in each training pass.
    """

    def __init__(
        self,
        vocabulary: int,
        embedding: int = 400,
        hidden: int = 1550,
        layers: int = 4,
        dropout: float = 0.0,
        dropout_inputs: float = 0.0,
        dropout_layers: float = 0.0,
        dropout_words: float = 0.0,
        weight_drop: float = 0.0,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, embedding)
        self.rnn = nn.RNN(
            embedding,
            hidden,
            layers,
            nonlinearity="relu",
            bias=False,
            batch_first=True,
            dropout=dropout_layers if layers > 1 else 0.0,
        )
        self.readout = nn.Linear(hidden, vocabulary)
        self.enter, self.leave = nn.Dropout(dropout_inputs), nn.Dropout(dropout)
        self.dropout_words, self.weight_drop = dropout_words, weight_drop

    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens of shape (B, T) to scores of the next token, shape (B, T, vocabulary)."""
        embedded = self.embedding(tokens)
        if self.training and self.dropout_words:
            share = 1 - self.dropout_words
            kept = torch.empty(self.embedding.num_embeddings, device=tokens.device)
            embedded = embedded * (kept.bernoulli_(share) / share)[tokens].unsqueeze(-1)
        states = self._recur(self.enter(embedded))
        result: Tensor = self.readout(self.leave(states))
        return result

    def _recur(self, entering: Tensor) -> Tensor:
        if not (self.training and self.weight_drop):
            states: Tensor = self.rnn(entering)[0]
            return states
        rnn = self.rnn
        weights = [
            dropped(weight, self.weight_drop) if name.startswith("weight_hh") else weight
            for name, weight in rnn.named_parameters()
        ]
        first = entering.new_zeros(rnn.num_layers, len(entering), rnn.hidden_size)
        return torch.rnn_relu(
            entering, first, weights, False, rnn.num_layers, rnn.dropout, True, False, True
        )[0]


class RecurrentConv(nn.Module):
    """``h_t = relu(norm_t(F x + R h_(t-1)))`` for t = 1..unfold, ``h_0 = relu(norm_0(F x))``: two
    kernels for all steps, and batch statistics of its own for each, as states differ.
    """

    def __init__(self, inputs: int, width: int, unfold: int) -> None:
        super().__init__()
        self.enter = nn.Conv2d(inputs, width, 3, padding=1, bias=False)
        self.recur = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for _ in range(unfold + 1))

    def forward(self, images: Tensor) -> Tensor:
        """Map (B, inputs, Y, X) to (B, width, Y, X)."""
        entering = self.enter(images)
        state = torch.relu(self.norms[0](entering))
        for norm in list(self.norms)[1:]:
            state = torch.relu(norm(entering + self.recur(state)))
        return state


class RecurrentCNN(nn.Module):
    """A convolution, recurrent layers with pooling between them, and a linear read-out of the
    maximum, with dropout before it.

    With ``overlapping`` the image is halved as Liang and Hu do: by maxima over 3 x 3, after the
    first layer and in the middle of the recurrent ones; otherwise by maxima over 2 x 2, after each
    of the first two recurrent layers.
    """

    def __init__(
        self,
        channels: int,
        width: int,
        outputs: int,
        layers: int = 4,
        unfold: int = 3,
        dropout: float = 0.0,
        overlapping: bool = False,
    ) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(channels, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()
        )
        # after how many recurrent layers the image is halved
        halved = (0, layers // 2) if overlapping else (1, 2)
        body: list[nn.Module] = []
        for done in range(layers + 1):
            if done:
                body.append(RecurrentConv(width, width, unfold))
            if done in halved:
                body.append(nn.MaxPool2d(3, 2, padding=1) if overlapping else nn.MaxPool2d(2))
        self.body = nn.Sequential(*body)
        self.dropout = nn.Dropout(dropout)
        self.readout = nn.Linear(width, outputs)

    def forward(self, images: Tensor) -> Tensor:
        """Map images of shape (B, channels, Y, X) to scores of shape (B, outputs)."""
        result: Tensor = self.readout(self.dropout(self.body(self.stem(images)).amax(dim=(2, 3))))
        return result
