"""``digits-images``: handwritten digits as images, for the convolutional networks of the papers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from pathspace.errors import InputError

from ..models import CifarResNet, DeepResNet, RecurrentCNN, ResidualCNN
from ..names import expect_known
from ..task import Split, Task, classes_task, register_task, seeded
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


# further settings of two networks, with their usual values
SETTINGS: dict[str, dict[str, Any]] = {
    "recurrent": {"dropout": 0.0, "overlapping": False},
    "resnet": {"scale": None, "drop": 0.0, "activity": 0.0},
}


def image_task(
    name: str,
    what: str,
    parts: Sequence[Split],
    network: str,
    width: int,
    depth: int,
    classes: int = 10,
    **settings: Any,
) -> Task:
    """Build the task of classifying images with a convolutional network; ``settings`` are those of
    :data:`SETTINGS`, also of other networks, as long as these have the usual values.
    """
    expect_known("network", network, NETWORKS)
    usual = {key: value for known in SETTINGS.values() for key, value in known.items()}
    used = {key: value for key, value in settings.items() if value != usual[key]}
    for key in used.keys() - SETTINGS.get(network, {}).keys():
        raise InputError(
            f"Task '{name}' got {key} = {used[key]}, but its network '{network}' has no {key};"
            " leave it out, or choose another network."
        )
    channels = parts[0].inputs.shape[1]
    return classes_task(
        name,
        what,
        parts,
        "images",
        make_model=seeded(lambda: NETWORKS[network](channels, classes, width, depth, **used)),
        hopeless=1 - 5 / classes,
    )


@register_task("digits-images")
def digits_images(
    hidden: int = 8,
    network: str = "residual",
    depth: int = 3,
    scale: float | None = None,
    drop: float = 0.0,
    activity: float = 0.0,
) -> Task:
    """Build the task: one 8 x 8 image in, one of ten digits out, by a convolutional network."""
    blocks: dict[str, Any] = {"scale": scale, "drop": drop, "activity": activity}
    what = "8 x 8 handwritten digits"
    return image_task("digits-images", what, image_splits(), network, hidden, depth, **blocks)
