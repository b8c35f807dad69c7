"""The trainer: resuming changes nothing, divergence is a result, files are whole."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from training_command import Noisy, numbers, stop_at, table, weights

from pathspace.errors import InputError, UnsupportedError
from pathspace.training.checkpoint import protect_unfinished
from pathspace.training.experiments.tasks import load_task
from pathspace.training.history import EpochRecord, History
from pathspace.training.penal import penalize
from pathspace.training.recipe import OPTIMIZERS, Recipe, prepare, torch_names
from pathspace.training.task import Split, Task
from pathspace.training.trainer import Tick, Trainer

pytestmark = pytest.mark.usefixtures("one_core")


@pytest.fixture
def task() -> Task:
    return load_task("digits-rows", hidden=6)


def check_resuming(
    trainer: Callable[[int, Path | None], Trainer], epochs: int, begun: int, folder: Path
) -> None:
    """A run that is broken off after some epochs ends as one that is not, bit by bit."""
    whole = trainer(epochs, None)
    expected = whole.fit()
    trainer(begun, folder).fit()
    torch.rand(5)  # what happens in between does not matter
    rest = trainer(epochs, folder)
    assert numbers(rest.fit(resume=True)) == numbers(expected)
    assert torch.equal(weights(rest.model), weights(whole.model))


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", sorted(OPTIMIZERS))
def test_resumed_run_is_bitwise_the_uninterrupted_one(
    task: Task, tmp_path: Path, optimizer: str
) -> None:
    recipe = Recipe(optimizer, seed=3)

    def trainer(epochs: int, folder: Path | None) -> Trainer:
        model, chosen = prepare(task, recipe)
        return Trainer(
            task, model, chosen, epochs=epochs, seed=3, folder=folder, settings=recipe.settings()
        )

    check_resuming(trainer, 4, 2, tmp_path)


def test_resuming_restores_the_noise_of_the_model(task: Task, tmp_path: Path) -> None:
    def trainer(epochs: int, folder: Path | None) -> Trainer:
        model = Noisy(task.make_model(0))
        return Trainer(
            task, model, torch.optim.SGD(model.parameters(), lr=0.05), epochs=epochs, folder=folder
        )

    check_resuming(trainer, 3, 1, tmp_path)


@pytest.mark.parametrize("every", [None, 7, 1])
def test_interrupted_epoch_goes_on_where_the_checkpoint_stands(
    task: Task, tmp_path: Path, every: int | None
) -> None:
    steps: list[int] = []

    def trainer(watch: Callable[[Tick], None] | None, folder: Path | None) -> Trainer:
        model, optimizer = prepare(task, Recipe("sgd"))
        return Trainer(
            task,
            model,
            optimizer,
            epochs=3,
            folder=folder,
            watch=watch,
            checkpoint_every=every if folder else None,
        )

    whole = trainer(None, None)
    expected = whole.fit()
    with pytest.raises(KeyboardInterrupt):
        trainer(stop_at(50), tmp_path).fit()
    rest = trainer(lambda tick: steps.append(tick.step), tmp_path)
    assert numbers(rest.fit(resume=True)) == numbers(expected)
    assert torch.equal(weights(rest.model), weights(whole.model))
    # 38 steps are an epoch; the interrupt came before a checkpoint of step 50
    assert steps[0] == {None: 39, 7: 50, 1: 50}[every]


def test_a_schedule_of_the_penal_connection_goes_on(tmp_path: Path) -> None:
    task = load_task("digits-images")

    def trainer(epochs: int, folder: Path | None) -> Trainer:
        model, optimizer = prepare(task, Recipe("sgd"))
        inputs = task.train.inputs[:2]
        penalize(model, inputs, tau=lambda step: 1e-6 * step, optimizer=optimizer)
        return Trainer(task, model, optimizer, epochs=epochs, folder=folder)

    check_resuming(trainer, 2, 1, tmp_path)


class Counting:
    """A watcher with a state: sums up what it is told, and breaks a run off at some step."""

    def __init__(self, stop: int = 0) -> None:
        self.stop, self.losses = stop, 0.0

    def __call__(self, tick: Tick) -> None:
        self.losses += tick.loss
        if tick.step == self.stop:
            raise KeyboardInterrupt

    def state_dict(self) -> dict[str, float]:
        return {"losses": self.losses}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.losses = state["losses"]


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", [*sorted(OPTIMIZERS), *torch_names()])
@pytest.mark.parametrize("stop", [4, 41])
def test_resuming_inside_an_epoch_is_bitwise_exact(
    task: Task, tmp_path: Path, optimizer: str, stop: int
) -> None:
    recipe = Recipe(optimizer, seed=3)

    def trainer(folder: Path | None, watch: Counting) -> Trainer:
        model, chosen = prepare(task, recipe)
        noisy = Noisy(model)
        # GSGD knows its parameters, so that they may live in another module by now
        return Trainer(
            task, noisy, chosen, epochs=2, seed=3, folder=folder, watch=watch, checkpoint_every=3
        )

    whole, rest = trainer(None, Counting()), trainer(tmp_path, Counting())
    expected = whole.fit()
    with pytest.raises(KeyboardInterrupt):
        trainer(tmp_path, Counting(stop)).fit()
    torch.rand(5)
    assert numbers(rest.fit(resume=True)) == numbers(expected)
    assert torch.equal(weights(rest.model), weights(whole.model))
    assert isinstance(rest.watch, Counting) and isinstance(whole.watch, Counting)
    assert rest.watch.losses == whole.watch.losses


def test_same_seed_means_same_batches_for_every_optimizer(task: Task) -> None:
    def batches(optimizer: str, seed: int) -> list[Tensor]:
        seen: list[Tensor] = []
        model, chosen = prepare(task, Recipe(optimizer))
        model.register_forward_pre_hook(
            lambda _, args: seen.append(args[0]) if model.training else None
        )
        Trainer(task, model, chosen, epochs=2, batch_size=300, seed=seed).fit()
        return seen

    one, same, other = batches("sgd", 0), batches("gsgd", 0), batches("sgd", 1)
    assert len(one) == 8 and sum(len(batch) for batch in one) == 2 * 1197
    assert all(torch.equal(a, b) for a, b in zip(one, same, strict=True))
    assert not torch.equal(one[0], other[0]) and not torch.equal(one[0], one[4])


def test_callers_random_numbers_are_left_alone(task: Task, tmp_path: Path) -> None:
    model, optimizer = prepare(task, Recipe("sgd"))
    before = torch.get_rng_state()
    Trainer(task, model, optimizer, epochs=1, folder=tmp_path).fit()
    assert torch.equal(before, torch.get_rng_state())


def test_divergence_is_recorded_and_keeps_the_last_sound_checkpoint(
    task: Task, tmp_path: Path
) -> None:
    losses: list[Tensor] = []

    def overflowing(outputs: Tensor, targets: Tensor) -> Tensor:
        losses.append(task.loss(outputs, targets))
        # 38 steps and one look at the validation split make an epoch, so this is in the second
        return losses[-1] if len(losses) < 50 else losses[-1] * math.inf

    model, optimizer = prepare(task, Recipe("sgd"))
    history = Trainer(
        replace(task, loss=overflowing), model, optimizer, epochs=5, folder=tmp_path
    ).fit()
    assert history.diverged and len(history.records) == 2
    assert [row["status"] for row in table(tmp_path / "metrics.csv")] == ["ok", "diverged"]
    model, optimizer = prepare(task, Recipe("sgd"))
    rest = Trainer(task, model, optimizer, epochs=2, folder=tmp_path).fit(resume=True)
    assert rest.records[0] == history.records[0] and not rest.diverged


@pytest.mark.parametrize("optimizer", ["sgd", "gsgd"])
def test_runaway_steps_diverge_without_an_exception(task: Task, optimizer: str) -> None:
    model, chosen = prepare(task, Recipe(optimizer, lr=1.0, init="unit-skeleton"))
    unbounded = replace(task, loss=lambda outputs, targets: -outputs.square().mean())
    assert Trainer(unbounded, model, chosen, epochs=50).fit().diverged


@pytest.mark.parametrize("optimizer", ["sgd", "gsgd", "adam", "RMSprop", "NAdam"])
@pytest.mark.parametrize("setting", ["lr", "decay"])
def test_settings_beyond_single_precision_diverge(task: Task, optimizer: str, setting: str) -> None:
    """Torch raises an error of its own for them, in some optimizers."""
    model, made = prepare(task, Recipe(optimizer, **{setting: 1e300}))  # type: ignore[arg-type]
    assert Trainer(task, model, made, epochs=1).fit().diverged


def test_other_errors_of_a_step_are_not_hidden(task: Task) -> None:
    class Broken(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            raise RuntimeError("out of order")

    model, _ = prepare(task, Recipe("sgd"))
    with pytest.raises(RuntimeError, match="out of order"):
        Trainer(task, model, Broken(model.parameters(), lr=0.1), epochs=1).fit()


def test_validation_loss_alone_can_diverge() -> None:
    assert History((EpochRecord(1, 38, 1.0, math.inf, 0.9, 0.1),)).diverged
    assert not History((EpochRecord(1, 38, 1.0, 2.0, 0.9, 0.1),)).diverged
    assert not History().diverged


def test_metrics_file_is_the_history(task: Task, tmp_path: Path) -> None:
    model, optimizer = prepare(task, Recipe("sgd"))
    history = Trainer(task, model, optimizer, epochs=3, folder=tmp_path).fit()
    rows = table(tmp_path / "metrics.csv")
    assert list(rows[0]) == [
        "epoch",
        "step",
        "train_loss",
        "valid_loss",
        "valid_error",
        "seconds",
        "status",
    ]
    read = [
        EpochRecord(int(r["epoch"]), int(r["step"]), *map(float, list(r.values())[2:6]))
        for r in rows
    ]
    assert tuple(read) == history.records
    assert [record.step for record in read] == [38, 76, 114]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "checkpoint.pt",
        "metrics.csv",
        "metrics.jsonl",
    ]


def test_scores_are_means_over_examples(task: Task, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = prepare(task, Recipe("sgd"))
    trainer = Trainer(task, model, optimizer, epochs=1)
    with torch.no_grad():
        outputs = model(task.valid.inputs)
    expected = nn.functional.cross_entropy(outputs, task.valid.targets).item()
    wrong = int((outputs.argmax(1) != task.valid.targets).sum())
    monkeypatch.setattr("pathspace.training.trainer.EVALUATION_BATCH", 100)  # 240 = 100 + 100 + 40
    score = trainer.evaluate(task.valid)
    assert score.loss == pytest.approx(expected, rel=1e-6)
    assert score.metric == pytest.approx(wrong / 240, rel=1e-6)


def test_watcher_hears_of_every_step(task: Task) -> None:
    ticks: list[Tick] = []
    model, optimizer = prepare(task, Recipe("sgd"))
    Trainer(task, model, optimizer, epochs=2, batch_size=600, watch=ticks.append).fit()
    assert [(tick.step, tick.steps, tick.epoch) for tick in ticks] == [
        (1, 4, 1),
        (2, 4, 1),
        (3, 4, 2),
        (4, 4, 2),
    ]
    assert math.isnan(ticks[0].metric) and 0 <= ticks[-1].metric <= 1


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda path: path.unlink(), "no checkpoint"),
        (lambda path: path.write_bytes(path.read_bytes()[:500]), "cannot be read"),
        (lambda path: path.write_text("not a checkpoint"), "cannot be read"),
        (lambda path: torch.save({"weights": 1}, path), "not a checkpoint of this version"),
        (lambda path: None, "lr = 0.05, this run asks for lr = 0.1"),
    ],
)
def test_unfit_checkpoints_are_refused(
    task: Task, tmp_path: Path, spoil: Callable[[Path], object], words: str
) -> None:
    def trainer(lr: float) -> Trainer:
        recipe = Recipe("sgd", lr)
        return Trainer(
            task, *prepare(task, recipe), epochs=1, folder=tmp_path, settings=recipe.settings()
        )

    trainer(0.05).fit()
    spoil(tmp_path / "checkpoint.pt")
    with pytest.raises(InputError, match=words):
        trainer(0.1).fit(resume=True)


def test_nothing_to_resume_without_a_folder(task: Task) -> None:
    with pytest.raises(InputError, match="without a folder"):
        Trainer(task, *prepare(task, Recipe("sgd")), epochs=1).fit(resume=True)


@pytest.mark.parametrize(
    "wrong", [{"epochs": 0}, {"epochs": 1, "batch_size": 0}, {"epochs": 1, "checkpoint_every": 0}]
)
def test_empty_runs_are_refused(task: Task, wrong: dict[str, int]) -> None:
    with pytest.raises(InputError, match="=0, expected a whole number from 1"):
        Trainer(task, *prepare(task, Recipe("sgd")), **wrong)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"optimizer": "lion"}, "no optimizer 'lion'"),
        ({"optimizer": "LBFGS"}, "torch's LBFGS asks for the loss several times in a step"),
        ({"optimizer": "SparseAdam"}, "torch's SparseAdam takes sparse gradients only"),
        ({"optimizer": "Optimizer"}, "no optimizer 'Optimizer'"),
        ({"rule": "best"}, "no skeleton rule 'best'"),
        ({"init": "zero"}, "no starting point 'zero'"),
        ({"lr": 0.0}, "learning rate is 0.0"),
        ({"lr": math.nan}, "learning rate is nan"),
    ],
)
def test_wrong_recipes_are_told_in_one_sentence(wrong: dict[str, object], words: str) -> None:
    with pytest.raises(InputError, match=words):
        Recipe(**wrong)  # type: ignore[arg-type]


def test_torch_optimizers_are_found_by_name(task: Task) -> None:
    _, found = prepare(task, Recipe("NAdam", lr=0.004))
    assert type(found) is torch.optim.NAdam and found.param_groups[0]["lr"] == 0.004
    assert Recipe("RMSprop").rate == 0.01 and Recipe("RMSprop").init == "default"


def test_model_that_torch_refuses_is_one_sentence() -> None:
    # Muon takes matrices only, and the kernels of convolutions are none.
    with pytest.raises(
        InputError, match=r"torch's Muon refuses this model \(.*\); choose another optimizer\."
    ):
        prepare(load_task("digits-images", hidden=4), Recipe("Muon"))


def test_unit_skeleton_start_is_shared_by_sgd_and_gsgd(task: Task) -> None:
    (one, _), (two, _) = (
        prepare(task, Recipe(name, init="unit-skeleton", seed=5)) for name in ("sgd", "gsgd")
    )
    assert torch.equal(weights(one), weights(two))
    changed = (weights(one) != weights(task.make_model(5))).nonzero().flatten()
    # one entering and one leaving weight for each of the 6 units
    assert len(changed) == 12 and bool((weights(one)[changed].abs() == 1).all())


def test_modulo_skeleton_is_algorithm_1(task: Task) -> None:
    model, _ = prepare(load_task("digits-rows", hidden=12), Recipe("gsgd"))
    unit = [parameter.detach().abs() == 1 for parameter in model.parameters()]
    incoming, recurrent, outgoing = (mask.nonzero().tolist() for mask in unit)
    assert incoming == [[j, j % 8] for j in range(12)]
    assert recurrent == []
    assert sorted(outgoing) == sorted([j % 10, j] for j in range(12))


def test_random_skeleton_follows_the_seed(task: Task) -> None:
    vectors = [
        weights(prepare(task, Recipe("gsgd", rule="random", seed=seed))[0]).abs() == 1
        for seed in (0, 0, 1)
    ]
    assert torch.equal(vectors[0], vectors[1]) and not torch.equal(vectors[0], vectors[2])


def test_a_checkpoint_of_more_epochs_is_not_reported_as_a_run_of_fewer(
    task: Task, tmp_path: Path
) -> None:
    """The weights would be those of the later step, and the record that of the epoch before."""

    def trainer(epochs: int, **options: Any) -> Trainer:
        made = prepare(task, Recipe("sgd"))
        return Trainer(task, *made, epochs=epochs, folder=tmp_path, **options)

    trainer(3).fit()
    assert len(trainer(3).fit(resume=True).records) == 3
    with pytest.raises(InputError, match="3 whole epochs, this run asks for 2; give at least 3"):
        trainer(2).fit(resume=True)

    with pytest.raises(KeyboardInterrupt):
        trainer(2, watch=stop_at(38 + 20), checkpoint_every=10).fit()
    with pytest.raises(InputError, match=r"1 whole epochs and 12 steps, .* give at least 2"):
        trainer(1).fit(resume=True)
    assert len(trainer(2).fit(resume=True).records) == 2


def test_a_checkpoint_of_another_model_is_one_sentence(task: Task, tmp_path: Path) -> None:
    other = load_task("digits-rows", hidden=5)
    Trainer(task, *prepare(task, Recipe("sgd")), epochs=1, folder=tmp_path).fit()
    made = prepare(other, Recipe("sgd"))
    with pytest.raises(InputError, match="does not fit the model and the optimizer of this run"):
        Trainer(other, *made, epochs=2, folder=tmp_path).fit(resume=True)


@pytest.mark.parametrize(
    ("part", "value"),
    [
        ("records", None),
        ("records", [{}]),
        ("partial", {"x": 1}),
        ("settings", None),
        ("epochs", "x"),
        ("noise", None),
        ("best", {"a": 1}),
        ("model", {}),
        ("order", torch.zeros(3)),
    ],
)
def test_a_checkpoint_with_a_part_of_another_form_is_one_sentence(
    task: Task, tmp_path: Path, part: str, value: object
) -> None:
    Trainer(task, *prepare(task, Recipe("sgd")), epochs=1, folder=tmp_path).fit()
    state = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    torch.save({**state, part: value}, tmp_path / "checkpoint.pt")
    with pytest.raises(
        InputError, match=r"not a checkpoint of this version|does not fit the model"
    ):
        Trainer(task, *prepare(task, Recipe("sgd")), epochs=2, folder=tmp_path).fit(resume=True)
    if part not in ("model", "order"):
        protect_unfinished(tmp_path / "checkpoint.pt")


def test_what_would_train_nothing_is_refused(task: Task) -> None:
    model, optimizer = prepare(task, Recipe("sgd"))
    empty = Split(task.valid.inputs[:0], task.valid.targets[:0])
    for part in ("train", "valid"):
        with pytest.raises(InputError, match=f"no examples in the {part}"):
            Trainer(replace(task, **{part: empty}), model, optimizer, epochs=1)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="no examples in the split to evaluate"):
        Trainer(task, model, optimizer, epochs=1).evaluate(empty)
    twin, _ = prepare(task, Recipe("sgd"))
    with pytest.raises(InputError, match="found no parameter of ReluRNN in SGD"):
        Trainer(task, twin, optimizer, epochs=1)
    with pytest.raises(UnsupportedError, match="LBFGS, which asks for the loss several times"):
        Trainer(task, model, torch.optim.LBFGS(model.parameters()), epochs=1)
    with pytest.raises(InputError, match="3 inputs and 2 targets, expected one target for each"):
        Split(torch.zeros(3, 2), torch.zeros(2))
