"""Tasks of images, and ``imagenet``, whose photographs stay in files that the system maps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.functional import avg_pool2d

from pathspace.errors import InputError

from ..models import CifarResNet, DeepResNet, RecurrentCNN, ResidualCNN
from ..models.transformer import VisionTransformer, swin
from ..names import expect_known
from ..task import Split, Task, classes_task, register_task, seeded
from .digits import digits_splits
from .files import find, own_folder

# a task's name and the user's folder -> its splits
Splits = Callable[[str, str | None], Sequence[Split]]
NETWORKS: dict[str, Callable[..., nn.Module]] = {
    "residual": lambda depth, width, **more: ResidualCNN(
        blocks=depth, width=width, inner=width, **more
    ),
    "resnet": CifarResNet,
    "deep-resnet": partial(DeepResNet, small=True),
    "recurrent": lambda depth, **more: RecurrentCNN(layers=depth, **more),
}
# further settings of two networks, with their usual values
SETTINGS: dict[str, dict[str, Any]] = {
    "recurrent": {"dropout": 0.0, "overlapping": False},
    "resnet": {"scale": None, "drop": 0.0, "activity": 0.0},
}


def image_task(
    name: str,
    what: str,
    splits: Splits,
    classes: int = 10,
    *,
    hidden: int,
    network: str,
    depth: int,
    limit: int | None = None,
    pool: int = 1,
    dropout: float = 0.0,
    overlapping: bool = False,
    scale: float | None = None,
    drop: float = 0.0,
    activity: float = 0.0,
    data: str | None = None,
) -> Task:
    """Build the task of classifying images by a convolutional network."""
    expect_known("network", network, NETWORKS)
    given: dict[str, Any] = {"dropout": dropout, "overlapping": overlapping}
    given |= {"scale": scale, "drop": drop, "activity": activity}
    usual = {key: value for known in SETTINGS.values() for key, value in known.items()}
    used = {key: value for key, value in given.items() if value != usual[key]}
    for key in used.keys() - SETTINGS.get(network, {}).keys():
        raise InputError(
            f"Task '{name}' got {key} = {used[key]}, but its network '{network}' has no {key};"
            " leave it out, or choose another network."
        )
    train, *others = splits(name, data)
    parts = (Split(train.inputs[:limit], train.targets[:limit]), *others)
    if pool > 1:
        parts = tuple(Split(avg_pool2d(part.inputs, pool), part.targets) for part in parts)
    used |= {"channels": parts[0].inputs.shape[1], "width": hidden, "depth": depth}
    return classes_task(
        name,
        what,
        parts,
        "images",
        make_model=seeded(lambda: NETWORKS[network](outputs=classes, **used)),
        hopeless=1 - 5 / classes,
    )


def register_images(
    name: str, what: str, splits: Splits, hidden: int, network: str, depth: int, classes: int = 10
) -> None:
    """Register a task of images, with the usual size of its network."""
    usual = partial(image_task, hidden=hidden, network=network, depth=depth)
    register_task(name)(partial(usual, name, what, splits, classes))


register_images("digits-images", "8 x 8 handwritten digits", digits_splits, 8, "residual", 3)


IMAGENET = (
    "ImageNet-1k comes from image-net.org: save its images, cut to 224 x 224 pixels, as unsigned"
    " bytes of shape (N, 3, 224, 224) with numpy.save in train-images.npy and val-images.npy, and"
    " their classes from 0 to 999 in train-labels.npy and val-labels.npy, the training images in a"
    " random order"
)
CLASSES, SIDE = 1000, 224
# one of so many training images is a validation image; the paper's own are the test split
KEPT_APART = 100
# mean and standard deviation per channel of the training images, as all that publish them have it
MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
# name -> (width, layers) -> model
OF_PHOTOGRAPHS: dict[str, Callable[[int, int], nn.Module]] = {
    "deep-resnet": lambda width, layers: DeepResNet(layers, 3, width, CLASSES),
    # heads of 64 features, as every ViT has them
    "vit": lambda width, layers: VisionTransformer(
        SIDE, 16, 3, width, max(1, width // 64), layers, CLASSES
    ),
    "swin": lambda width, layers: swin(width, layers, CLASSES),
}


class OfBytes(nn.Module):
    """A network behind the normalisation of images of unsigned bytes."""

    mean: Tensor
    deviation: Tensor

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network
        for name, values in (("mean", MEAN), ("deviation", DEVIATION)):
            self.register_buffer(name, torch.tensor(values).view(3, 1, 1), persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        """Map images of shape (B, 3, Y, X) to the scores of the network."""
        scores: Tensor = self.network((images / 255 - self.mean) / self.deviation)
        return scores


@register_task("imagenet")
def imagenet(
    hidden: int = 64,
    network: str = "deep-resnet",
    depth: int = 50,
    smoothing: float = 0.0,
    data: str | None = None,
) -> Task:
    """Build the task: ImageNet's photographs by a network of the Markov-chain paper's Table 2."""
    expect_known("network", network, OF_PHOTOGRAPHS)
    folder = own_folder("imagenet", data, IMAGENET)
    images, labels = _read(folder, "train")
    kept = len(images) - max(1, len(images) // KEPT_APART)
    train, valid = (Split(images[part], labels[part]) for part in (slice(kept), slice(kept, None)))
    return classes_task(
        "imagenet",
        "ImageNet-1k",
        (train, valid, Split(*_read(folder, "val"))),
        "images",
        make_model=seeded(lambda: OfBytes(OF_PHOTOGRAPHS[network](hidden, depth))),
        loss=partial(functional.cross_entropy, label_smoothing=smoothing),
        hopeless=1 - 5 / CLASSES,
    )


def _read(folder: Path, part: str) -> tuple[Tensor, Tensor]:
    """Map the images and labels of one part; changes of them would stay in memory."""
    paths = [find(folder, (f"{part}-{what}.npy",), IMAGENET) for what in ("images", "labels")]
    try:
        images, labels = (np.load(path, mmap_mode="c") for path in paths)
    except (OSError, ValueError, EOFError) as error:
        raise InputError(
            f"The files '{paths[0]}' and '{paths[1]}' are not arrays of numpy; {IMAGENET}."
        ) from error
    fits = images.dtype == np.uint8 and images.shape[1:] == (3, SIDE, SIDE) and len(images) > 1
    fits = fits and labels.shape == images.shape[:1] and labels.dtype.kind in "iu"
    if not fits or labels.min() < 0 or labels.max() >= CLASSES:
        raise InputError(
            f"The files '{paths[0]}' and '{paths[1]}' have {images.dtype} of shape {images.shape}"
            f" and {labels.dtype} of shape {labels.shape}, expected uint8 of shape (N, 3, {SIDE},"
            f" {SIDE}) and N classes from 0 to {CLASSES - 1}; {IMAGENET}."
        )
    return torch.from_numpy(images), torch.from_numpy(labels.astype(np.int64))
