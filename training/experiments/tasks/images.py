"""``digits-images``: handwritten digits as images, for the convolutional networks of the papers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn
from torch.nn import functional

from pathspace.errors import InputError

from ..models.cifar_resnet import CifarResNet
from ..models.deep_resnet import DeepResNet
from ..models.recurrent_cnn import RecurrentCNN
from ..models.residual import ResidualCNN
from ..task import Split, Task, error_rate, register_task, seeded
from .digits import image_splits

# name -> (channels of the images, classes, width, depth) -> model
NETWORKS: dict[str, Callable[..., nn.Module]] = {
    "residual": lambda channels, classes, width, depth: ResidualCNN(
        channels, width, width, classes, depth
    ),
    "resnet": lambda channels, classes, width, depth, **more: CifarResNet(
        depth, channels, width, classes, **more
    ),
    "deep-resnet": lambda channels, classes, width, depth: DeepResNet(
        depth, channels, width, classes, small=True
    ),
    "recurrent": lambda channels, classes, width, depth, **more: RecurrentCNN(
        channels, width, classes, depth, **more
    ),
}


def image_task(
    name: str,
    what: str,
    parts: Sequence[Split],
    network: str,
    width: int,
    depth: int,
    classes: int = 10,
    dropout: float = 0.0,
    blocks: Mapping[str, float] | None = None,
    overlapping: bool = False,
) -> Task:
    """Build the task of classifying images with a convolutional network."""
    if network not in NETWORKS:
        raise InputError(f"There is no network '{network}'; choose one of: {', '.join(NETWORKS)}.")
    if width < 1 or depth < 1:
        raise InputError(
            f"Task '{name}' got hidden = {width} and depth = {depth}; give at least 1 of each."
        )
    given = {"dropout": dropout, "overlapping": overlapping}
    recurrent: dict[str, Any] = {key: value for key, value in given.items() if value}
    if recurrent and network != "recurrent":
        key, value = next(iter(recurrent.items()))
        raise InputError(
            f"Task '{name}' got {key} = {value}, but its network '{network}' has no {key}; leave it"
            " out, or choose the network 'recurrent'."
        )
    if blocks and network != "resnet":
        raise InputError(
            f"Task '{name}' got {', '.join(blocks)}, but its network '{network}' has none of them."
        )
    extra = recurrent or dict(blocks or {})
    train, valid, test = parts
    channels = train.inputs.shape[1]

    return Task(
        name=name,
        description=(
            f"{what}; {len(train)} training, {len(valid)} validation and {len(test)} test images"
        ),
        train=train,
        valid=valid,
        test=test,
        make_model=seeded(lambda: NETWORKS[network](channels, classes, width, depth, **extra)),
        loss=functional.cross_entropy,
        metric=error_rate,
        metric_name="error",
        hopeless=1 - 5 / classes,
    )


def settings_of_blocks(scale: float | None, drop: float, activity: float) -> dict[str, float]:
    """The settings of
    :class:`pathspace.training.experiments.models.cifar_resnet.BasicBlock` that are in use.

    Example:
        >>> settings_of_blocks(None, 0.1, 0.0)
        {'drop': 0.1}
    """
    used = {} if scale is None else {"scale": scale}
    return used | {key: value for key, value in (("drop", drop), ("activity", activity)) if value}


@register_task("digits-images")
def digits_images(
    hidden: int = 8,
    network: str = "residual",
    depth: int = 3,
    scale: float | None = None,
    drop: float = 0.0,
    activity: float = 0.0,
) -> Task:
    """Build the task: one 8 x 8 image in, one of ten digits out, by a convolutional network.

    Example:
        >>> digits_images().train.inputs.shape
        torch.Size([1197, 1, 8, 8])
    """
    blocks = settings_of_blocks(scale, drop, activity)
    what = "8 x 8 handwritten digits"
    return image_task("digits-images", what, image_splits(), network, hidden, depth, blocks=blocks)
