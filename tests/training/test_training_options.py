"""The options of ``pathspace train`` that the papers' recipes need: schedule, decay, clip,
augmentation, dropout.
"""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning_fabric import Fabric
from lightning_fabric.plugins.precision import MixedPrecision
from training_command import call, flat

from pathspace.errors import InputError
from pathspace.training import Trainer
from pathspace.training.experiments.augment import crop_and_flip
from pathspace.training.experiments.reproduce.trial import Trial, run_trial
from pathspace.training.experiments.tasks import load_task
from pathspace.training.recipe import Recipe, prepare
from pathspace.training.schedules import schedule

ROWS = ["digits-rows", "--hidden", 5, "--batch-size", 200]
IMAGES = ["digits-images", "--hidden", 2, "--batch-size", 300]
WORDS = ["number-words", "--hidden", 8, "--batch-size", 1000]
OPTIONS: dict[str, list[Any]] = {
    "drops": [*ROWS, "--schedule", "drops 0.3 0.6", "--optimizer", "gmomentum"],
    "linear": [*ROWS, "--schedule", "linear 0.4", "--optimizer", "AdamW"],
    "cosine": [*ROWS, "--schedule", "cosine 0.3", "--optimizer", "gadam"],
    "warm-up": [*ROWS, "--schedule", "constant 0.5", "--optimizer", "path-sgd"],
    "decay": [*ROWS, "--decay", 0.3, "--optimizer", "gsgd"],
    "decay of torch": [*ROWS, "--decay", 0.3, "--optimizer", "AdamW"],
    "clip": [*ROWS, "--clip", 0.01, "--optimizer", "gsgd"],
    "augment": [*IMAGES, "--augment", "crop-flip", "--optimizer", "sgd"],
    "dropout": [*WORDS, "--dropout", 0.4, "--optimizer", "adam"],
    "all": [
        *(*IMAGES, "--schedule", "cosine 0.2", "--decay", 1e-3, "--clip", 0.5),
        *("--augment", "crop-flip", "--optimizer", "momentum", "--accumulate", 2),
    ],
}


def train(*words: object) -> dict[str, Any]:
    result = call("train", *words, "--json", "-")
    assert result.exit_code == 0, result.output
    return dict(json.loads(result.stdout))


def state(folder: Path) -> dict[str, Any]:
    """The checkpoint of a run without its times, every tensor as a list."""
    found = torch.load(folder / "checkpoint.pt", weights_only=True)
    for record in (*found["records"], found["partial"]):
        record["seconds"] = 0

    def plain(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.tolist()
        if isinstance(value, dict):
            return {key: plain(one) for key, one in value.items()}
        return [plain(one) for one in value] if isinstance(value, list | tuple) else value

    return dict(plain(found))


@pytest.mark.slow
@pytest.mark.parametrize("words", OPTIONS.values(), ids=OPTIONS.keys())
def test_a_run_with_the_option_that_is_interrupted_ends_as_one_that_is_not(
    words: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [*words, "--epochs", 2, "--checkpoint-every", 1, "--out"]
    whole = train(*words, tmp_path / "whole")
    adjust = Trainer._adjust

    def interrupted(self: Trainer, step: int) -> None:
        if step == 1:
            raise KeyboardInterrupt
        adjust(self, step)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_adjust", interrupted)
        assert call("train", *words, tmp_path / "part").exit_code == 130
    assert state(tmp_path / "part")["partial"]["steps"] == 1
    rest = train(*words, tmp_path / "part", "--resume")
    assert {key for key in whole if whole[key] != rest[key]} == {"seconds", "files"}
    assert state(tmp_path / "part") == state(tmp_path / "whole")


@pytest.mark.parametrize(
    ("words", "settings"),
    [
        (OPTIONS["drops"], {"optimizer": "gmomentum", "lr": 0.01, "schedule": "drops 0.3 0.6"}),
        (OPTIONS["decay"], {"optimizer": "gsgd", "lr": 0.05, "decay": 0.3}),
        (OPTIONS["clip"], {"optimizer": "gsgd", "lr": 0.05, "clip": 0.01}),
        (OPTIONS["augment"], {"optimizer": "sgd", "lr": 0.05, "augment": "crop-flip"}),
    ],
)
def test_the_options_are_those_of_the_papers_recipes(
    words: list[Any], settings: dict[str, Any], tmp_path: Path
) -> None:
    record = train(*words, "--epochs", 2, "--out", tmp_path)
    asked = {key: value for key, value in settings.items() if key != "lr"}
    assert asked.items() <= record["settings"].items()
    options = (("hidden", words[2]),)
    trial = Trial(words[0], seed=0, epochs=2, batch_size=words[4], options=options, **settings)
    outcome = run_trial(trial)
    assert record["valid_loss"] == outcome.valid_losses[-1]
    assert record["train_loss"] == outcome.train_losses[-1]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["drops", "decay", "clip", "augment", "dropout"])
def test_each_option_changes_the_run_and_stands_in_its_records(name: str, tmp_path: Path) -> None:
    words, epochs = OPTIONS[name], ["--epochs", 2]
    with_it = call("train", *words, *epochs, "--out", tmp_path / "with", "--json", tmp_path / "x")
    record = json.loads((tmp_path / "x").read_text())
    option, value = words[5].removeprefix("--"), words[6]
    without = train(*words[:5], *words[7:], *epochs, "--out", tmp_path / "without")
    assert record["settings"][option] == value and option not in without["settings"]
    assert record["train_loss"] != without["train_loss"]
    # in the table, in the configuration, and a run by it is the same
    assert f"{option} {value}" in flat(with_it.output.replace("│", " "))
    written = tomllib.loads((tmp_path / "with" / "configuration.toml").read_text())
    assert written[option] == value
    file = tmp_path / "with" / "configuration.toml"
    again = train(words[0], "--config", file, "--out", tmp_path / "again")
    assert again["train_loss"] == record["train_loss"]
    # a checkpoint with the option is none of a run without it
    refused = call("train", *words[:5], *words[7:], *epochs, "--out", tmp_path / "with", "--resume")
    assert refused.exit_code == 2 and f"was written with {option} = {value}" in flat(refused.stderr)


def test_a_run_with_a_schedule_has_the_number_of_epochs_it_began_with(tmp_path: Path) -> None:
    words = [*ROWS, "--optimizer", "sgd", "--schedule", "linear", "--out", tmp_path]
    assert call("train", *words, "--epochs", 1).exit_code == 0
    result = call("train", *words, "--epochs", 2, "--resume")
    assert result.exit_code == 2
    sentence = flat(result.stderr)
    assert "with schedule_epochs = 1, this run asks for schedule_epochs = 2" in sentence


def test_every_record_says_the_decay_that_an_optimizer_has_by_itself(tmp_path: Path) -> None:
    task = load_task("digits-rows", hidden=3)
    for recipe, decay in (
        (Recipe("AdamW"), 0.01),
        (Recipe("AdamW", decay=0.0), 0.0),
        (Recipe("Adam"), 0.0),
        (Recipe("path-sgd"), 0.0),
    ):
        assert recipe.decay == decay and recipe.settings().get("decay", 0.0) == decay
        _, optimizer = prepare(task, recipe)
        assert {group.get("weight_decay", 0.0) for group in optimizer.param_groups} == {decay}
    train(*ROWS, "--optimizer", "AdamW", "--epochs", 1, "--out", tmp_path)
    assert tomllib.loads((tmp_path / "configuration.toml").read_text())["decay"] == 0.01


def test_the_clip_is_that_of_the_gradient_without_the_loss_scale() -> None:
    task = load_task("digits-rows", hidden=4)
    ends = []
    for scale in (2.0**4, 2.0**10):
        model = task.make_model(0)
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        mixed = MixedPrecision("16-mixed", "cpu", scaler)
        fabric = Fabric(accelerator="cpu", devices=1, plugins=[mixed])
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        Trainer(task, model, optimizer, epochs=1, batch_size=400, clip=0.01, fabric=fabric).fit()
        ends.append(torch.nn.utils.parameters_to_vector(model.parameters()).detach())
    start = torch.nn.utils.parameters_to_vector(task.make_model(0).parameters()).detach()
    # three steps of this length
    assert 0.02 < float((ends[0] - start).norm()) < 0.0301
    torch.testing.assert_close(*ends, rtol=0, atol=1e-3)


def test_settings_of_a_trainer_name_its_clip_and_the_epochs_of_a_schedule() -> None:
    task = load_task("digits-rows", hidden=3)
    model, optimizer = prepare(task, Recipe("sgd"))
    plain = Trainer(task, model, optimizer, epochs=3)
    assert not {"clip", "schedule_epochs"} & plain.settings.keys()
    full = Trainer(task, model, optimizer, epochs=3, clip=0.5, schedule=schedule("linear"))
    assert (full.settings["clip"], full.settings["schedule_epochs"]) == (0.5, 3)


def test_inputs_that_are_no_images_cannot_be_cropped() -> None:
    with pytest.raises(InputError, match=r"examples of shape \(8, 8\), expected images"):
        crop_and_flip(torch.zeros(2, 8, 8))


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["digits-rows", "--schedule", "step"], "There is no schedule 'step'; choose one of: con"),
        (["digits-rows", "--schedule", "cosine 2"], "There is no schedule 'cosine 2'"),
        (["digits-rows", "--optimizer", "Rprop", "--schedule", "linear"], "from the signs"),
        (["digits-rows", "--optimizer", "Rprop", "--clip", "1"], "from the signs of gradients"),
        (["digits-rows", "--optimizer", "path-sgd", "--decay", "0.1"], "path-sgd has no weight"),
        (["digits-rows", "--optimizer", "recurrent-path-sgd", "--decay", "0.1"], "no weight decay"),
        (["digits-rows", "--optimizer", "Rprop", "--decay", "0.1"], "Rprop has no weight decay"),
        (["digits-rows", "--clip", "0"], "found clip=0.0, expected a positive number or None"),
        (["digits-rows", "--augment", "mixup"], "There is no augmentation 'mixup'"),
        (["digits-rows", "--augment", "crop-flip"], "examples of shape (8, 8), expected images"),
        (["number-words", "--augment", "crop-flip"], "expected images of shape (channels, Y, X)"),
        (["digits-rows", "--dropout", "0.5"], "Task 'digits-rows' has no option 'dropout'"),
        (["number-words", "--dropout", "2"], "dropout"),
        (["number-words", "--config", "x.toml"], "found dropout=2.0, expected a number from 0"),
    ],
)
def test_options_that_make_no_sense_are_refused_before_anything_is_written(
    words: list[str], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("x.toml").write_text("dropout = 2.0")
    result = call("train", *words)
    assert result.exit_code == 2 and sentence in flat(result.stderr), result.output
    assert [path.name for path in tmp_path.iterdir()] == ["x.toml"]
