"""The 1797 digits of scikit-learn, 8 x 8 pixels, read step by step in place of MNIST."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial

import numpy as np
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor

from pathspace.errors import InputError

from ..models.recurrent import ReluRNN
from ..names import TASKS
from ..task import Split, Task, classes_task, register_task, seeded

TEST_SIZE, VALID_SIZE = 360, 240
# The split is part of the task and does not depend on the seed of a run.
SPLIT_SEED = 0
# The same holds for the permutation of the pixels.
PERMUTATION_SEED = 0


@cache
def split_indices() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return which digits are for training (1197), validation (240), testing (360); stratified."""
    labels = load_digits().target
    rest, test = train_test_split(
        np.arange(len(labels)), test_size=TEST_SIZE, random_state=SPLIT_SEED, stratify=labels
    )
    train, valid = train_test_split(
        rest, test_size=VALID_SIZE, random_state=SPLIT_SEED, stratify=labels[rest]
    )
    return train, valid, test


@cache
def image_splits() -> list[Split]:
    """Return the three splits as images of shape (N, 1, 8, 8)."""
    data = load_digits()
    images = torch.tensor(data.images / 16, dtype=torch.float32).unsqueeze(1)
    labels = torch.tensor(data.target, dtype=torch.int64)
    return [Split(images[part], labels[part]) for part in split_indices()]


def read_in_steps(images: Tensor, steps: int, permuted: bool) -> Tensor:
    """Cut all pixels, in order or in one fixed random order, into ``steps`` equal pieces."""
    pixels = images.flatten(1)
    if permuted:
        order = np.random.default_rng(PERMUTATION_SEED).permutation(pixels.shape[1])
        pixels = pixels[:, torch.from_numpy(order)]
    return pixels.view(len(images), steps, -1)


def digits_splits(name: str, data: str | None) -> list[Split]:
    """Return the digits for a task, which reads no folder."""
    if data is not None:
        raise InputError(f"Task '{name}' brings its data along; leave out --data.")
    return image_splits()


def sequence_task(
    name: str,
    what: str,
    splits: Callable[[str, str | None], Sequence[Split]],
    steps: int,
    hidden: int = 100,
    limit: int | None = None,
    data: str | None = None,
) -> Task:
    """Build the task of ten classes of images that a ReLU RNN reads step by step."""
    permuted = name.endswith("-permuted")
    train, *others = splits(name, data)
    parts = [
        Split(read_in_steps(part.inputs, steps, permuted), part.targets)
        for part in (Split(train.inputs[:limit], train.targets[:limit]), *others)
    ]
    features = parts[0].inputs.shape[2]
    order = ", pixels shuffled by one permutation," if permuted else ""
    pieces = f"{steps} steps of {features} pixel{'s' if features > 1 else ''}"
    return classes_task(
        name,
        f"{what}{order} read in {pieces}",
        parts,
        "images",
        make_model=seeded(lambda: ReluRNN(inputs=features, hidden=hidden, outputs=10)),
        hopeless=0.5,
    )


def register_sequences(
    what: str, splits: Callable[[str, str | None], Sequence[Split]], **steps: int
) -> None:
    """Register tasks of sequences, by the steps of each name, in order and permuted."""
    for stem, count in steps.items():
        for name in TASKS.keys() & {stem, f"{stem}-permuted"}:
            register_task(name)(partial(sequence_task, name, what, splits, count))


register_sequences(
    "8 x 8 handwritten digits", digits_splits, **{"digits-rows": 8, "digits-pixels": 64}
)
