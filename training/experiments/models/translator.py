"""An encoder-decoder transformer for short sentences."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn


def sinusoids(length: int, width: int) -> Tensor:
    """Return the position codes ``sin(t / 10000^(2i/width))`` and cosines, (length, width)."""
    angles = torch.arange(length)[:, None] * torch.exp(
        -math.log(1e4) * torch.arange(0, width, 2) / width
    )
    return torch.stack([angles.sin(), angles.cos()], dim=2).flatten(1)


class Translator(nn.Module):
    """Encoder and decoder layers, and one embedding for both languages.

    A pair is one row of tokens: ``source`` places of the source sentence, then the target sentence
    shifted by one. Token 0 pads. Norms are inside the branches, dropout is also in their middle,
    and the read-out has weights of its own. The ``original`` of Vaswani et al. has norms after the
    sums, dropout at the ends of the branches alone, and a read-out with the embedding's weights.
    """

    places: Tensor

    def __init__(
        self,
        vocabulary: int,
        source: int,
        width: int = 64,
        heads: int = 4,
        inner: int = 128,
        layers: int = 2,
        longest: int = 256,
        dropout: float = 0.0,
        original: bool = False,
    ) -> None:
        super().__init__()
        self.source = source
        self.embedding = nn.Embedding(vocabulary, width)
        nn.init.normal_(self.embedding.weight, std=width**-0.5)
        common: dict[str, Any] = {"dropout": dropout, "batch_first": True}
        common["norm_first"] = not original
        self.encoder = nn.ModuleList(
            nn.TransformerEncoderLayer(width, heads, inner, **common) for _ in range(layers)
        )
        # norms after the sums leave nothing to do for one at the end
        self.encoder_norm = nn.Identity() if original else nn.LayerNorm(width)
        self.decoder = nn.ModuleList(
            nn.TransformerDecoderLayer(width, heads, inner, **common) for _ in range(layers)
        )
        self.decoder_norm = nn.Identity() if original else nn.LayerNorm(width)
        self.readout = nn.Linear(width, vocabulary, bias=not original)
        if original:
            self.readout.weight = self.embedding.weight
            for layer in (*self.encoder, *self.decoder):
                _drop_ends_only(layer)
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("places", sinusoids(max(longest, source), width), persistent=False)

    def forward(self, pairs: Tensor) -> Tensor:
        """Map (B, source + T) to scores of the next target token, (B, T, vocabulary)."""
        source, target = pairs[:, : self.source], pairs[:, self.source :]
        hidden = torch.zeros(source.shape, device=source.device).masked_fill(source == 0, -math.inf)
        # No query may look at a place ahead of its own.
        ahead = torch.full((target.shape[1],) * 2, -math.inf, device=source.device).triu(1)
        memory = self._embed(source)
        for layer in self.encoder:
            memory = layer(memory, src_key_padding_mask=hidden)
        memory, state = self.encoder_norm(memory), self._embed(target)
        for layer in self.decoder:
            state = layer(state, memory, tgt_mask=ahead, memory_key_padding_mask=hidden)
        result: Tensor = self.readout(self.decoder_norm(state))
        return result

    def _embed(self, tokens: Tensor) -> Tensor:
        scale = self.embedding.embedding_dim**0.5
        result: Tensor = self.dropout(
            self.embedding(tokens) * scale + self.places[: tokens.shape[1]]
        )
        return result


def _drop_ends_only(layer: nn.Module) -> None:
    """Switch off the dropout of attention weights and of a feed-forward branch's inner units."""
    for part in layer.modules():
        if isinstance(part, nn.MultiheadAttention):
            part.dropout = 0.0
    inner = layer.dropout
    assert isinstance(inner, nn.Dropout)
    inner.p = 0.0
