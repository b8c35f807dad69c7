"""Tasks: the split is what it says, and stays it."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

from pathspace.errors import InputError
from pathspace.training.experiments.task import _BUILDERS
from pathspace.training.experiments.tasks import load_task, register_task, task_names
from pathspace.training.experiments.tasks.digits import read_in_steps, split_indices


def test_split_is_that_of_recorded_runs() -> None:
    assert [len(part) for part in split_indices()] == [1197, 240, 360]
    text = b"".join(part.astype("<i8").tobytes() for part in split_indices())
    assert hashlib.sha256(text).hexdigest().startswith("d5d5947cfe2772ad")


def test_examples_are_rows_of_pixels_between_0_and_1() -> None:
    task = load_task("digits-rows", hidden=4)
    inputs = torch.cat([split.inputs for split in (task.train, task.valid, task.test)])
    assert inputs.shape == (1797, 8, 8) and inputs.min() == 0 and inputs.max() == 1
    assert np.allclose(task.test.inputs.numpy() * 16, load_digits().images[split_indices()[2]])


def test_model_depends_on_the_seed_alone() -> None:
    task = load_task("digits-rows", hidden=4)
    before = torch.get_rng_state()
    first, same, other = (
        torch.nn.utils.parameters_to_vector(task.make_model(seed).parameters())
        for seed in (1, 1, 2)
    )
    assert torch.equal(first, same) and not torch.equal(first, other)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("mnist", {}, "no task 'mnist'"),
        ("digits-rows", {"depth": 3}, "no option 'depth'"),
        ("digits-rows", {"data": "x"}, "brings its data along"),
        ("digits-images", {"network": "deep-residual"}, "no network 'deep-residual'"),
        ("digits-images", {"dropout": 0.5}, "its network 'residual' has no dropout"),
        ("number-words", {"hidden": 3}, "give an even number"),
    ],
)
def test_wrong_options_are_told_in_one_sentence(
    name: str, options: dict[str, object], words: str
) -> None:
    with pytest.raises(InputError, match=words) as caught:
        load_task(name, **options)
    assert str(caught.value).count("\n") == 0


@pytest.mark.parametrize(
    ("name", "steps"), [("digits-rows-permuted", 8), ("digits-pixels-permuted", 64)]
)
def test_permuted_tasks_shuffle_every_image_alike(name: str, steps: int) -> None:
    plain, permuted = load_task(name.removesuffix("-permuted"), hidden=4), load_task(name, hidden=4)
    assert permuted.train.inputs.shape == (1197, steps, 64 // steps)
    # one image of 64 different values tells the order, which all images share
    order = read_in_steps(torch.arange(64.0).view(1, 8, 8), steps, permuted=True).flatten().long()
    assert sorted(order.tolist()) == list(range(64)) and order.tolist() != list(range(64))
    for split, shuffled in ((plain.train, permuted.train), (plain.test, permuted.test)):
        assert torch.equal(split.inputs.flatten(1)[:, order], shuffled.inputs.flatten(1))


def test_registry_takes_new_tasks() -> None:
    task = load_task("digits-rows", hidden=4)
    register_task("registry-test")(lambda: task)
    try:
        assert "registry-test" in task_names() and load_task("registry-test") is task
    finally:
        del _BUILDERS["registry-test"]
