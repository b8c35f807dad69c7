"""Transformers with norms before the branches: for images, and one that continues text."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from pathspace.errors import InputError


class TransformerBlock(nn.Module):
    """``x + attention(norm(x))``, then ``x + mlp(norm(x))``; ``causal``: none looks ahead."""

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
    """Patches, a class token, blocks, and a linear read-out of the class token."""

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
    """Embeddings, causal blocks, and scores for the next character at every position."""

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


# blocks of the stages but the third, which has the rest; features of a head
STAGE, HEAD = 2, 32


class Scores(nn.Module):
    """A classifier of transformers, from images to scores alone."""

    def __init__(self, classifier: nn.Module) -> None:
        super().__init__()
        self.classifier = classifier

    def forward(self, images: Tensor) -> Tensor:
        """Map images of shape (B, 3, Y, X) to scores of shape (B, outputs)."""
        scores: Tensor = self.classifier(images).logits
        return scores


def swin(width: int = 96, layers: int = 24, outputs: int = 1000) -> nn.Module:
    """Return a Swin transformer of four stages for images of 224 x 224, with patches of 4 x 4 and
    windows of 7 x 7 of them, as the library transformers has it (Liu et al., Swin transformer,
    section 3.3).
    """
    try:
        from transformers import SwinConfig, SwinForImageClassification
    except ImportError as error:
        raise InputError(
            "The Swin transformer needs the package transformers, which is not installed;"
            " run: pip install 'pathspace[demo]'."
        ) from error
    third = layers - 3 * STAGE
    if width < HEAD or width % HEAD or third < 1:
        raise InputError(
            f"A Swin transformer got width = {width} and layers = {layers}; give a multiple of"
            f" {HEAD} and at least {3 * STAGE + 1} layers, such as 96 and 24."
        )
    config = SwinConfig(
        embed_dim=width,
        depths=(STAGE, STAGE, third, STAGE),
        num_heads=[width // HEAD * 2**stage for stage in range(4)],
        num_labels=outputs,  # type: ignore[call-arg]
        # as the others: no dropout, also of whole branches
        drop_path_rate=0.0,
    )
    return Scores(SwinForImageClassification(config))
