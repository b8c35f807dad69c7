"""Transformers with norms before the branches: one for small images, and
one that continues text.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class TransformerBlock(nn.Module):
    """``x + attention(norm(x))``, then ``x + mlp(norm(x))``; ``causal``: positions see only those
    before them.
    """

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.heads, self.causal = heads, causal

    def forward(self, stream: Tensor) -> Tensor:
        """Map (B, positions, width) to the same shape."""
        batch, length, width = stream.shape
        parts = self.qkv(self.attention_norm(stream)).view(
            batch, length, 3, self.heads, width // self.heads
        )
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        stream = stream + self.out(seen.transpose(1, 2).reshape(batch, length, width))
        result: Tensor = stream + self.mlp(self.mlp_norm(stream))
        return result


class VisionTransformer(nn.Module):
    """Patches, a class token, blocks, and a linear read-out of the class token; ``size`` and
    ``patch`` are heights and widths.
    """

    def __init__(
        self,
        size: int = 8,
        patch: int = 2,
        channels: int = 1,
        width: int = 32,
        heads: int = 2,
        layers: int = 2,
        outputs: int = 10,
    ) -> None:
        super().__init__()
        self.patches = nn.Conv2d(channels, width, patch, patch)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(0.02 * torch.randn(1, (size // patch) ** 2 + 1, width))
        self.blocks = nn.Sequential(
            *(TransformerBlock(width, heads, causal=False) for _ in range(layers))
        )
        self.norm, self.readout = nn.LayerNorm(width), nn.Linear(width, outputs)

    def forward(self, images: Tensor) -> Tensor:
        """Map images of shape (B, channels, size, size) to scores of shape (B, outputs)."""
        patches = self.patches(images).flatten(2).transpose(1, 2)
        stream = torch.cat([self.token.expand(len(images), -1, -1), patches], 1) + self.positions
        result: Tensor = self.readout(self.norm(self.blocks(stream))[:, 0])
        return result


class CharacterGPT(nn.Module):
    """Embeddings of characters and positions, causal blocks, and scores for the next character at
    every position, of which there are at most ``length``.
    """

    def __init__(
        self, characters: int, length: int, width: int = 32, heads: int = 2, layers: int = 2
    ) -> None:
        super().__init__()
        self.characters = nn.Embedding(characters, width)
        self.positions = nn.Embedding(length, width)
        self.blocks = nn.Sequential(
            *(TransformerBlock(width, heads, causal=True) for _ in range(layers))
        )
        self.norm, self.readout = nn.LayerNorm(width), nn.Linear(width, characters, bias=False)

    def forward(self, text: Tensor) -> Tensor:
        """Map numbers of characters, (B, T), to scores, (B, T, characters)."""
        places = torch.arange(text.shape[1], device=text.device)
        stream = self.blocks(self.characters(text) + self.positions(places))
        result: Tensor = self.readout(self.norm(stream))
        return result
