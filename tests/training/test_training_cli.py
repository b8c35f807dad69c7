"""``pathspace train`` and ``pathspace demo`` as users meet them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from training_command import app, call, flat
from typer.main import get_command

import pathspace.training.experiments.demo
from pathspace.training.experiments.names import TASKS
from pathspace.training.trainer import Trainer

SMALL = ["train", "digits-rows", "--hidden", "5", "--epochs", "2"]


@pytest.mark.parametrize("optimizer", ["gsgd", "sgd", "momentum", "adam"])
def test_train_prints_a_table_and_writes_its_files(tmp_path: Path, optimizer: str) -> None:
    result = call(
        *SMALL,
        "--optimizer",
        optimizer,
        "--out",
        tmp_path / "run",
        "--json",
        tmp_path / "result.json",
    )
    assert result.exit_code == 0, result.output
    assert "test error" in result.output and optimizer in result.output
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [
        "checkpoint.pt",
        "configuration.toml",
        "metrics.csv",
        "metrics.jsonl",
    ]
    record = json.loads((tmp_path / "result.json").read_text())
    assert record["settings"]["optimizer"] == optimizer and record["epochs_done"] == 2
    assert 0 < record["test_error"] < 1 and record["diverged"] is False


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16-mixed", "64-true"])
@pytest.mark.parametrize("optimizer", ["gsgd", "adam"])
def test_other_precisions_train_and_resume_exactly(
    tmp_path: Path, precision: str, optimizer: str
) -> None:
    words = [
        *SMALL[:-2],
        "--optimizer",
        optimizer,
        "--precision",
        precision,
        "--json",
        "-",
        "--epochs",
    ]
    whole = json.loads(call(*words, 2, "--out", tmp_path / "whole").stdout)
    assert call(*words, 1, "--out", tmp_path / "part").exit_code == 0
    rest = json.loads(call(*words, 2, "--out", tmp_path / "part", "--resume").stdout)
    assert whole["settings"]["precision"] == precision and not whole["diverged"]
    assert {key for key in whole if whole[key] != rest[key]} == {"seconds", "files"}
    # It is another run than that in float32, and says so.
    refused = call(*SMALL, "--optimizer", optimizer, "--out", tmp_path / "part", "--resume")
    assert refused.exit_code == 2 and f"written with precision = {precision}" in flat(
        refused.stderr
    )


def test_json_alone_goes_to_standard_output(tmp_path: Path) -> None:
    result = call(*SMALL, "--out", tmp_path, "--json", "-")
    record = json.loads(result.stdout)
    assert record["settings"]["init"] == "unit-skeleton" and "test error" in result.stderr


def test_default_folder_names_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert call(*SMALL, "--optimizer", "sgd", "--lr", "0.1", "--seed", "7").exit_code == 0
    assert (tmp_path / "runs/digits-rows-sgd-lr0.1-seed7/metrics.csv").is_file()


def interrupt_in_epoch(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    epoch = Trainer._epoch

    def interrupted(self: Trainer, history: Any) -> Any:
        if len(history.records) + 1 == number:
            raise KeyboardInterrupt
        return epoch(self, history)

    monkeypatch.setattr(Trainer, "_epoch", interrupted)


def test_interrupted_run_is_resumed_to_the_same_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["train", "digits-rows", "--hidden", "5", "--epochs", "4", "--json", "-"]
    whole = json.loads(call(*words, "--out", tmp_path / "whole").stdout)
    with monkeypatch.context() as patch:
        interrupt_in_epoch(3, patch)
        result = call(*words, "--out", tmp_path / "part")
    assert result.exit_code == 130
    assert "--resume" in result.output and flat(result.stderr).count("Interrupted") == 1
    refused = call(*words, "--out", tmp_path / "part")
    assert refused.exit_code == 2 and "unfinished run, 2 of 4 epochs" in flat(refused.stderr)
    rest = json.loads(call(*words, "--out", tmp_path / "part", "--resume").stdout)
    different = {key for key in whole if whole[key] != rest[key]}
    assert different == {"seconds", "files"}


def test_overwrite_starts_afresh_and_a_finished_run_goes_on_with_more_epochs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["train", "digits-rows", "--hidden", "5", "--out", tmp_path]
    with monkeypatch.context() as patch:
        interrupt_in_epoch(2, patch)
        assert call(*words, "--epochs", 3).exit_code == 130
    assert call(*words, "--epochs", 1, "--overwrite").exit_code == 0
    assert call(*words, "--epochs", 1).exit_code == 0
    result = call(*words, "--epochs", 2, "--resume", "--json", "-")
    assert json.loads(result.stdout)["epochs_done"] == 2


def test_interrupt_before_the_first_epoch_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt_in_epoch(1, monkeypatch)
    result = call(*SMALL, "--out", tmp_path)
    assert result.exit_code == 130 and "nothing is kept" in flat(result.output)


def test_diverged_run_is_a_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "pathspace.training.experiments.tasks.digits.functional.cross_entropy",
        lambda o, t: o.sum() * float("nan"),
    )
    result = call(*SMALL, "--out", tmp_path, "--json", tmp_path / "result.json")
    record = json.loads((tmp_path / "result.json").read_text())
    assert result.exit_code == 0 and "diverged" in result.output
    assert record["diverged"] is True and record["test_error"] is None


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            ["train", "mnist"],
            (
                "There is no task 'mnist' (did you mean mnist1d or mnist-98 or mnist-28?); choose"
                " one of: bible-characters, bible-words, catalogue"
            ),
        ),
        (["train", "digits-rows", "--optimizer", "lion"], "There is no optimizer 'lion'"),
        (["train", "digits-rows", "--lr", "-1"], "The learning rate is -1.0"),
        (["train", "digits-rows", "--device", "abacus"], "There is no device 'abacus'"),
        (
            ["train", "digits-rows", "--device", "cuda"],
            "The device 'cuda' is not available here; use --device cpu",
        ),
        (["train", "digits-rows", "--strategy", "fsdp"], "There is no strategy 'fsdp'"),
        (["train", "digits-rows", "--precision", "half"], "There is no precision 'half'"),
        (
            ["train", "digits-images", "--tau", "1", "--precision", "16-mixed", "--device", "auto"],
            "16-mixed",
        ),
        (["train", "digits-rows", "--out", "/dev/null/x"], "Cannot make the folder '/dev/null/x'"),
        (
            ["train", "digits-rows", "--json", "no/such/folder.json"],
            "Cannot write 'no/such/folder.json'",
        ),
        (
            ["train", "digits-rows", "--out", "empty", "--resume"],
            "There is no checkpoint 'empty/checkpoint.pt'",
        ),
        (["train", "digits-rows", "--epochs", "0"], "epochs"),
        (["train", "digits-rows", "--rule", "best"], "rule"),
        (["demo", "--out", "/dev/null/x"], "Cannot make the folder '/dev/null/x'"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(
    words: list[str], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = call(*words)
    assert result.exit_code == 2
    assert sentence in flat(result.stderr) and "Traceback" not in result.output
    assert flat(result.stderr).startswith("Error:")


def test_help_teaches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    text = flat(call("train", "--help").output)
    for word in (
        "--optimizer",
        "--resume",
        "--rule",
        "--init",
        "Algorithm 1",
        "digits-rows",
        "130 interrupted",
    ):
        assert word in text
    assert "demo" in call("--help").output


def test_names_in_the_help_are_those_that_exist() -> None:
    from typing import get_args

    from pathspace.training.experiments import train_cli
    from pathspace.training.experiments.tasks import task_names
    from pathspace.training.recipe import OPTIMIZERS, Init, Rule

    text = flat(call("train", "--help").output)
    assert all(name in text for name in (*OPTIMIZERS, *task_names()))
    assert tuple(train_cli.SkeletonRule) == get_args(Rule) and tuple(train_cli.Init) == get_args(
        Init
    )


def test_demo_passes_its_options_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}

    def record(out: str, **options: Any) -> bool:
        given.update(options, out=out)
        return False

    monkeypatch.setattr(pathspace.training.experiments.demo, "run_demo", record)
    assert call("demo", "--out", tmp_path, "--seeds", 2).exit_code == 1
    assert (given["out"], given["seeds"]) == (str(tmp_path), 2)


def test_interrupted_demo_ends_with_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(out: str, **options: Any) -> bool:
        raise KeyboardInterrupt

    monkeypatch.setattr(pathspace.training.experiments.demo, "run_demo", interrupted)
    result = call("demo", "--out", tmp_path)
    assert result.exit_code == 130 and "Interrupted" in result.output


def test_the_help_names_every_task() -> None:
    parameters = get_command(app).commands["train"].params
    said = next(parameter.help for parameter in parameters if parameter.name == "task")
    assert set(TASKS) <= set(re.findall(r"[\w-]*\w", said))
