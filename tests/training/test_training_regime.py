"""What the papers' recipes ask of a run: schedules, decay, augmentation, dropped
weights, smoothed targets.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from pathspace.errors import InputError
from pathspace.training.experiments.models import StackedReluLM
from pathspace.training.experiments.recipe import (
    MARGIN,
    Recipe,
    augmentation,
    crop_and_flip,
    prepare,
    schedule,
)
from pathspace.training.experiments.reproduce.trial import Trial, run_trial
from pathspace.training.experiments.tasks import load_task
from pathspace.training.experiments.trainer import Training, lightning_trainer, run_epochs

SMALL = Trial("digits-rows", "sgd", 0.1, 0, 2, batch_size=400, options=(("hidden", 3),))


@pytest.mark.parametrize(
    ("name", "factors"),
    [
        ("linear", {0.0: 1.0, 0.25: 0.75}),
        ("linear 0.2", {0.0: 0.0, 0.1: 0.5, 0.2: 1.0, 0.6: 0.5, 1.0: 0.0}),
        ("constant 0.2", {0.0: 0.0, 0.1: 0.5, 0.2: 1.0, 1.0: 1.0}),
        ("drops 0.5 0.75 0.875", {0.0: 1.0, 0.499: 1.0, 0.5: 0.1, 0.8: 0.01, 0.9: 0.001}),
        ("cosine", {0.0: 1.0, 0.5: 0.5, 1.0: 0.0}),
        ("cosine 0.2", {0.0: 0.0, 0.1: 0.5, 0.2: 1.0, 0.6: 0.5, 1.0: 0.0}),
        ("inverse-root 0.25", {0.125: 0.5, 0.25: 1.0, 1.0: 0.5}),
    ],
)
def test_schedules_by_hand(name: str, factors: dict[float, float]) -> None:
    found = schedule(name)
    assert found is not None
    for share, factor in factors.items():
        assert found(share) == pytest.approx(factor, abs=1e-12)


@pytest.mark.parametrize(
    "name", ["", "step", "drops", "drops x", "drops 1.5", "cosine x", "cosine 0.1 0.2", "linear 1"]
)
def test_schedules_that_are_none_are_refused(name: str) -> None:
    with pytest.raises(InputError, match="no schedule"):
        schedule(name)


@pytest.mark.parametrize("kind", ["sgd", "gsgd", "gadam"])
def test_decay_is_handed_to_the_optimizer(kind: str) -> None:
    task, ends = load_task("digits-rows", hidden=3), []
    for decay in (0.0, 0.25):
        groups = prepare(task, Recipe(kind, decay=decay))[1].param_groups
        assert {group["weight_decay"] for group in groups} == {decay}
        trial = replace(SMALL, optimizer=kind, lr=0.01, epochs=1, decay=decay)
        ends.append(run_trial(trial).valid_losses)
    assert ends[0] != ends[1] and "decay" not in Recipe("sgd").settings()


def test_images_are_moved_and_mirrored() -> None:
    images = torch.arange(2.0 * 3 * 6 * 7).view(2, 3, 6, 7).repeat(40, 1, 1, 1) + 1
    padded = F.pad(images, (MARGIN,) * 4)
    seen = set()
    for before, after in zip(padded, crop_and_flip(images), strict=True):
        found = [
            (up, left, flipped)
            for up in range(2 * MARGIN + 1)
            for left in range(2 * MARGIN + 1)
            for flipped in (False, True)
            if torch.equal(
                after.flip(2) if flipped else after, before[:, up : up + 6, left : left + 7]
            )
        ]
        assert len(found) == 1
        seen.add(found[0])
    assert {flipped for *_, flipped in seen} == {False, True} and len(seen) > 40
    with pytest.raises(InputError, match="crop-flip"):
        augmentation("mixup")


def test_training_alone_is_augmented_and_repeats_itself() -> None:
    task, met = load_task("digits-images", hidden=2, depth=1), []

    def watch(images: Tensor) -> Tensor:
        met.append(len(images))
        return crop_and_flip(images)

    ends = []
    for _ in range(2):
        model = task.make_model(0)
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        run = Training(task, model, sgd, epochs=1, batch_size=600, augment=watch)
        ends.append(run_epochs(run, lightning_trainer(run))[-1].valid_loss)
    assert met == [600, len(task.train) - 600] * 2 and ends[0] == ends[1]
    trial = Trial("digits-images", "sgd", 0.1, 0, 1, 600, options=(("hidden", 2), ("depth", 1)))
    plain, augmented = (run_trial(replace(trial, augment=name)) for name in ("none", "crop-flip"))
    assert plain.valid_losses != augmented.valid_losses == (ends[0],)


def test_recurrent_weights_are_dropped_in_training_only() -> None:
    model = StackedReluLM(9, embedding=4, hidden=30, layers=2, weight_drop=0.5)
    tokens = torch.randint(9, (3, 6))
    plain = StackedReluLM(9, embedding=4, hidden=30, layers=2)
    plain.load_state_dict(model.state_dict())
    assert not torch.equal(model(tokens), plain(tokens))
    assert not torch.equal(model(tokens), model(tokens))
    torch.testing.assert_close(model.eval()(tokens), plain(tokens))
    # what is dropped has no gradient, and entering weights are never dropped
    model.train()(tokens).sum().backward()
    shares = {
        name: float((p.grad == 0).double().mean()) for name, p in model.rnn.named_parameters()
    }
    assert shares["weight_hh_l0"] > 0.3 and shares["weight_hh_l0"] > shares["weight_ih_l0"] + 0.2
