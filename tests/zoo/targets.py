"""Trained networks as targets of commands: `pathspace equalise zoo/targets.py:crepe`."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from zoo.signals import face, frames
from zoo.trained import load


def crepe() -> tuple[nn.Module, Tensor]:
    """CREPE, tiny, and 24 notes."""
    return load("crepe-tiny")[0], frames(*(55.0 * 2 ** (k / 6) for k in range(24)))


def mtcnn() -> tuple[nn.Module, Tensor]:
    """The second stage of MTCNN, and pictures of a face."""
    return load("mtcnn-rnet")[0], (face(24, 12) * 255 - 127.5) / 128


def lite0() -> tuple[nn.Module, Tensor]:
    """EfficientNet-Lite0, and two small images of noise."""
    return load("efficientnet-lite0")[0], torch.randn(
        2, 3, 64, 64, generator=torch.Generator().manual_seed(0)
    )


__all__ = ["crepe", "lite0", "mtcnn"]
