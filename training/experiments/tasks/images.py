"""Tasks of images by convolutional networks: one builder for the data of all sources."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import nn
from torch.nn.functional import avg_pool2d

from pathspace.errors import InputError

from ..models import CifarResNet, DeepResNet, RecurrentCNN, ResidualCNN
from ..names import expect_known
from ..task import Split, Task, classes_task, register_task, seeded
from .digits import digits_splits

# a task's name and the user's folder -> its splits
Splits = Callable[[str, str | None], Sequence[Split]]
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
    channels = parts[0].inputs.shape[1]
    return classes_task(
        name,
        what,
        parts,
        "images",
        make_model=seeded(lambda: NETWORKS[network](channels, classes, hidden, depth, **used)),
        hopeless=1 - 5 / classes,
    )


def register_images(
    name: str, what: str, splits: Splits, hidden: int, network: str, depth: int, classes: int = 10
) -> None:
    """Register a task of images, with the usual size of its network."""
    usual = partial(image_task, hidden=hidden, network=network, depth=depth)
    register_task(name)(partial(usual, name, what, splits, classes))


register_images("digits-images", "8 x 8 handwritten digits", digits_splits, 8, "residual", 3)
