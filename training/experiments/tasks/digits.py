"""Handwritten digits read step by step: ``digits-rows`` (8 steps), ``digits-pixels``
(64), each also permuted.

The sequential image task of the path-space paper at a size that trains in seconds on one
core: the 1797 digits that come with scikit-learn (8 x 8 pixels) in place of MNIST (28 x
28). Nothing is downloaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial

import numpy as np
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor

from pathspace.errors import InputError

from ..models.recurrent import ReluRNN
from ..task import Split, Task, classes_task, register_task, seeded

TEST_SIZE, VALID_SIZE = 360, 240
# The split is part of the task and does not depend on the seed of a run.
SPLIT_SEED = 0
# The same holds for the permutation of the pixels.
PERMUTATION_SEED = 0


def split_indices() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return which of the 1797 digits are for training (1197), validation (240) and testing (360).

    The split is stratified: every part holds the ten digits in nearly the same proportions.
    """
    return stratified(load_digits().target, TEST_SIZE, VALID_SIZE)


def stratified(
    labels: np.ndarray, tests: int, valids: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return which examples are for training, validation and testing; each part holds the
    classes in nearly the same proportions.

    Example:
        >>> [len(part) for part in stratified(np.arange(100) % 10, 20, 10)]
        [70, 10, 20]
    """
    rest, test = train_test_split(
        np.arange(len(labels)), test_size=tests, random_state=SPLIT_SEED, stratify=labels
    )
    train, valid = train_test_split(
        rest, test_size=valids, random_state=SPLIT_SEED, stratify=labels[rest]
    )
    return train, valid, test


@cache
def _splits() -> tuple[Split, Split, Split]:
    data = load_digits()
    images = torch.tensor(data.images / 16, dtype=torch.float32)
    labels = torch.tensor(data.target, dtype=torch.int64)
    train, valid, test = (Split(images[part], labels[part]) for part in split_indices())
    return train, valid, test


def _rows_task(name: str, steps: int, permuted: bool, hidden: int = 100) -> Task:
    if hidden < 1:
        raise InputError(f"Task '{name}' got hidden = {hidden}; give at least 1 hidden unit.")
    parts = [Split(read_in_steps(part.inputs, steps, permuted), part.targets) for part in _splits()]
    return sequence_task(name, "8 x 8 handwritten digits", parts, hidden, permuted)


def read_in_steps(images: Tensor, steps: int, permuted: bool) -> Tensor:
    """Cut images into sequences: all pixels in order, or in one fixed random
    order, ``steps`` equal pieces.

    Reference:
        Path Space for Recurrent Neural Networks with ReLU Activations, appendix A.1.
    """
    pixels = images.flatten(1)
    if permuted:
        order = np.random.default_rng(PERMUTATION_SEED).permutation(pixels.shape[1])
        pixels = pixels[:, torch.from_numpy(order)]
    return pixels.view(len(images), steps, -1)


def sequence_task(
    name: str, what: str, parts: Sequence[Split], hidden: int, permuted: bool
) -> Task:
    """Build the task of telling ten digits apart with a ReLU RNN that reads them step by step."""
    steps, features = parts[0].inputs.shape[1:]
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


for _name, _steps in (("digits-rows", 8), ("digits-pixels", 64)):
    register_task(_name)(partial(_rows_task, _name, _steps, False))
    register_task(f"{_name}-permuted")(partial(_rows_task, f"{_name}-permuted", _steps, True))


def image_splits() -> tuple[Split, Split, Split]:
    """Return the three splits as images of shape (N, 1, 8, 8), for convolutional networks."""
    train, valid, test = (Split(part.inputs.unsqueeze(1), part.targets) for part in _splits())
    return train, valid, test
