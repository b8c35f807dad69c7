"""``digits-rows``: handwritten digits read one row of pixels at a time.

The sequential image task of the path-space paper at a size that trains in seconds on one core: the 1797
digits that come with scikit-learn (8 x 8 pixels) in place of MNIST (28 x 28). Nothing is downloaded.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch.nn import functional

from pathspace.errors import InputError
from training.models.rnn import ReluRNN
from training.tasks.task import Split, Task, error_rate, register_task

TEST_SIZE, VALID_SIZE = 360, 240
# The split belongs to the task, not to a run: it does not move with the seed of a run.
SPLIT_SEED = 0


def split_indices() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return which of the 1797 digits are for training (1197), validation (240) and testing (360).

    The split is stratified: every part holds the ten digits in nearly the same proportions.

    Returns:
        Three integer arrays, pairwise disjoint, that together hold 0..1796.

    Example:
        >>> [len(part) for part in split_indices()]
        [1197, 240, 360]
    """
    labels = load_digits().target
    rest, test = train_test_split(np.arange(len(labels)), test_size=TEST_SIZE, random_state=SPLIT_SEED, stratify=labels)
    train, valid = train_test_split(rest, test_size=VALID_SIZE, random_state=SPLIT_SEED, stratify=labels[rest])
    return train, valid, test


@cache
def _splits() -> tuple[Split, Split, Split]:
    data = load_digits()
    images = torch.tensor(data.images / 16, dtype=torch.float32)
    labels = torch.tensor(data.target, dtype=torch.int64)
    train, valid, test = (Split(images[part], labels[part]) for part in split_indices())
    return train, valid, test


@register_task("digits-rows")
def digits_rows(hidden: int = 100) -> Task:
    """Build the task: 8 steps of 8 pixels in, one of ten digits out, by a ReLU RNN.

    Args:
        hidden: hidden units of the RNN.

    Returns:
        The task; its metric is the error rate.

    Raises:
        InputError: ``hidden`` is not positive.

    Reference:
        Path Space for Recurrent Neural Networks with ReLU Activations, section 5.1 and appendix A.1.

    Example:
        >>> task = digits_rows()
        >>> task.train.inputs.shape, task.valid.inputs.shape, task.test.inputs.shape
        (torch.Size([1197, 8, 8]), torch.Size([240, 8, 8]), torch.Size([360, 8, 8]))
    """
    if hidden < 1:
        raise InputError(f"Task 'digits-rows' got hidden = {hidden}; give at least 1 hidden unit.")
    train, valid, test = _splits()

    def make_model(seed: int) -> ReluRNN:
        # The caller's random numbers stay as they were.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return ReluRNN(inputs=8, hidden=hidden, outputs=10)

    return Task(
        name="digits-rows",
        description=(
            f"8 x 8 handwritten digits read row by row (8 steps of 8 pixels); "
            f"{len(train)} training, {len(valid)} validation and {len(test)} test images"
        ),
        train=train,
        valid=valid,
        test=test,
        make_model=make_model,
        loss=functional.cross_entropy,
        metric=error_rate,
        metric_name="error",
        hopeless=0.5,
    )
