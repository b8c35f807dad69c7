"""Random changes of training images (augmentation)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from pathspace.errors import InputError

from .names import expect_known

MARGIN = 4


def crop_and_flip(images: Tensor) -> Tensor:
    """Shift each image by up to four pixels, zeros at the border; mirror half of the images."""
    if images.dim() != 4:
        raise InputError(
            f"The augmentation crop-flip found examples of shape {tuple(images.shape[1:])},"
            " expected images of shape (channels, Y, X); leave it out, or choose a task of images."
        )
    count, _, height, width = images.shape
    padded = functional.pad(images, (MARGIN,) * 4)
    up, left = torch.randint(2 * MARGIN + 1, (2, count))
    rows = up[:, None] + torch.arange(height)
    columns = left[:, None] + torch.arange(width)
    mirrored = torch.rand(count) < 0.5
    columns[mirrored] = columns[mirrored].flip(1)
    place = torch.arange(count)[:, None, None]
    # (B, Y, X, channels): indices beside a slice come first
    moved = padded[place, :, rows[:, :, None], columns[:, None, :]]
    return moved.permute(0, 3, 1, 2).contiguous()


def augmentation(name: str) -> Callable[[Tensor], Tensor] | None:
    """Return the augmentation of this name, ``None`` for ``none``."""
    expect_known("augmentation", name, ("none", "crop-flip"))
    return crop_and_flip if name == "crop-flip" else None
