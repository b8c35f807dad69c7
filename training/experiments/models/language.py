"""The stacked ReLU RNN language model of the path-space paper."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout


class StackedReluLM(nn.Module):
    """Embedding, stacked ReLU recurrent layers, a linear read-out of every step.

    The defaults are the paper's sizes. Dropout acts on the embedded tokens, between the layers and
    before the read-out; whole words of the embedding can be dropped, too. The recurrent layers have
    no biases, as in the paper's equations.

    Args:
        vocabulary: number of tokens.
        embedding: features per token.
        hidden: units of every recurrent layer.
        layers: recurrent layers.
        dropout: before the read-out.
        dropout_inputs: on the embedded tokens.
        dropout_layers: between recurrent layers.
        dropout_words: share of the tokens whose embedding is dropped everywhere.
        weight_drop: share of the recurrent weights that each training pass leaves out.

    Reference:
        Path Space for Recurrent Neural Networks with ReLU Activations, section 5.2,
        appendix A.2 and Table 3.

    Example:
        >>> StackedReluLM(27, embedding=5, hidden=6, layers=2)(
        ...     torch.zeros(3, 4, dtype=torch.int64)
        ... ).shape
        torch.Size([3, 4, 27])
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
            kept = torch.empty(self.embedding.num_embeddings, device=tokens.device).bernoulli_(
                1 - self.dropout_words
            )
            embedded = embedded * (kept / (1 - self.dropout_words))[tokens].unsqueeze(-1)
        states = self._recur(self.enter(embedded))
        result: Tensor = self.readout(self.leave(states))
        return result

    def _recur(self, entering: Tensor) -> Tensor:
        if not (self.training and self.weight_drop):
            states: Tensor = self.rnn(entering)[0]
            return states
        rnn = self.rnn
        weights = [
            dropout(weight, self.weight_drop) if name.startswith("weight_hh") else weight
            for name, weight in rnn.named_parameters()
        ]
        first = entering.new_zeros(rnn.num_layers, len(entering), rnn.hidden_size)
        return torch.rnn_relu(
            entering, first, weights, False, rnn.num_layers, rnn.dropout, True, False, True
        )[0]
