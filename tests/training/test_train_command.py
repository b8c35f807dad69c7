"""``pathspace train``: runs that are killed, several processes, files, sentences."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from training_command import call, flat

from pathspace.errors import InputError
from pathspace.training.experiments import run_folder, train_command
from pathspace.training.experiments.reproduce.trial import Trial, run_trial
from pathspace.training.experiments.run_folder import LAST
from pathspace.training.experiments.trainer import Training

pytestmark = pytest.mark.usefixtures("one_core")
ROWS = ["train", "digits-rows", "--hidden", 5, "--batch-size", 200]
COMMAND = """
import sys
from pathspace.cli.main import main
from pathspace.training.experiments import run_folder
run_folder.CHECKPOINT_SECONDS = 0.0
main()
"""


def start(*words: object) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", COMMAND, *map(str, words)]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def same(one: Any, other: Any) -> bool:
    """Equal in every key, every number and every bit of every tensor."""
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def table(folder: Path) -> list[dict[str, str]]:
    with (folder / "metrics.csv").open(newline="") as file:
        return [{**row, "seconds": ""} for row in csv.DictReader(file)]


@pytest.mark.slow
def test_a_run_that_is_killed_at_any_moment_ends_bitwise_the_same(tmp_path: Path) -> None:
    words = [*ROWS[:4], "--optimizer", "gmomentum", "--epochs", 20, "--patience", 20, "--out"]
    whole, part = tmp_path / "whole", tmp_path / "part"
    assert call(*words, whole).exit_code == 0
    for kills in range(3):
        process = start(*words, part, *(["--resume"] if kills else []))
        before = (part / LAST).stat().st_mtime_ns if kills else 0
        while process.poll() is None and not (
            (part / LAST).exists() and (part / LAST).stat().st_mtime_ns > before
        ):
            time.sleep(0.01)
        time.sleep(0.05 * kills)
        os.kill(process.pid, signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL, "the run had ended before it was killed"
        # never half a file
        assert torch.load(part / LAST, weights_only=True)["global_step"] > 0
    assert call(*words, part, "--resume").exit_code == 0
    one, two = (torch.load(folder / LAST, weights_only=True) for folder in (whole, part))
    for key in ("state_dict", "optimizer_states", "global_step"):
        assert same(one[key], two[key])
    assert same(one["run"]["noise"], two["run"]["noise"]) and table(part) == table(whole)
    names = {"best.ckpt", "last.ckpt", "result.json", "metrics.csv"}
    assert {path.name for path in part.iterdir()} == names
    assert run_folder.CHECKPOINT_SECONDS <= 60


@pytest.mark.slow
def test_two_processes_are_one_run(tmp_path: Path) -> None:
    words = [*ROWS, "--precision", "64-true", "--accumulate", 2, "--epochs"]
    for count in (1, 2):
        files = ("--json", tmp_path / f"{count}.json", "--out", tmp_path / f"{count}")
        command = [sys.executable, "-m", "pathspace", *words, 2, *files, "--devices", count]
        done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    one, two = (json.loads((tmp_path / f"{count}.json").read_text()) for count in (1, 2))
    for name in ("train_loss", "valid_loss", "test_loss", "test_error"):
        assert one[name] == pytest.approx(two[name], rel=1e-9)
    # a run goes on with another number of processes
    assert call(*words, 3, "--out", tmp_path / "2", "--resume").exit_code == 0


@pytest.mark.slow
def test_a_process_that_dies_ends_the_run_in_one_sentence(tmp_path: Path) -> None:
    words = [*ROWS, "--epochs", 10**6, "--devices", 2, "--out", tmp_path / "run"]
    command = [sys.executable, "-m", "pathspace", *map(str, words)]
    with (
        (tmp_path / "said").open("w") as said,
        subprocess.Popen(command, stdout=said, stderr=said) as process,
    ):
        while process.poll() is None and not (tmp_path / "run" / LAST).exists():
            time.sleep(0.01)
        child = subprocess.check_output(["pgrep", "-P", str(process.pid)], text=True)
        os.kill(int(child.split()[0]), signal.SIGKILL)
        assert process.wait() == 2
    assert "Another process of this run has failed" in flat((tmp_path / "said").read_text())


def test_a_last_pass_that_leaves_nothing_for_a_process_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = train_command.load_task("digits-rows", hidden=3)
    model = run.make_model(0)
    training = Training(run, model, torch.optim.SGD(model.parameters()), epochs=1, batch_size=4)

    class Several:
        world_size = 2

    monkeypatch.setattr(Training, "trainer", Several())
    with pytest.raises(InputError, match="of which the last has 1; choose another batch size"):
        training.setup("fit")


def test_a_run_prints_a_table_and_writes_its_files(tmp_path: Path) -> None:
    done = call(*ROWS, "--epochs", 2, "--out", tmp_path, "--json", tmp_path / "r.json")
    assert done.exit_code == 0 and "digits-rows with gsgd" in done.output, done.output
    result = json.loads((tmp_path / "r.json").read_text())
    rows = table(tmp_path)
    assert [row["epoch"] for row in rows] == ["1", "2"]
    for name in ("train_loss", "valid_loss", "valid_error"):
        assert float(rows[1][name]) == result[name]
    assert result["epoch_of_weights"] == 2 and result["settings"]["optimizer"] == "gsgd"
    assert result["versions"]["torch"] == torch.__version__
    assert json.loads((tmp_path / "result.json").read_text()) == result
    # another run is not overwritten
    again = call(*ROWS, "--epochs", 2, "--out", tmp_path)
    assert again.exit_code == 2 and "add --resume to continue it, --overwrite" in flat(again.stderr)
    assert call(*ROWS, "--epochs", 2, "--out", tmp_path, "--overwrite").exit_code == 0
    # a finished run goes on, but not with other settings
    assert call(*ROWS, "--epochs", 3, "--out", tmp_path, "--resume").exit_code == 0
    assert len(table(tmp_path)) == 3
    other = call(*ROWS, "--epochs", 3, "--out", tmp_path, "--resume", "--lr", 1)
    assert "with lr = 0.05, this run asks for lr = 1.0" in flat(other.stderr)


def test_json_alone_goes_to_standard_output_and_is_that_of_a_trial(tmp_path: Path) -> None:
    words = ["--optimizer", "gsgd", "--schedule", "linear", "--clip", 0.1, "--decay", 0.01]
    done = call(*ROWS, *words, "--epochs", 1, "--out", tmp_path, "--json", "-")
    result = json.loads(done.stdout)
    options = {"schedule": "linear", "clip": 0.1, "decay": 0.01, "options": (("hidden", 5),)}
    outcome = run_trial(Trial("digits-rows", "gsgd", 0.05, 0, 1, 200, **options))  # type: ignore[arg-type]
    assert (result["train_loss"],) == outcome.train_losses
    assert (result["valid_loss"],) == outcome.valid_losses
    assert {"schedule", "clip", "decay"} <= result["settings"].keys()


def test_a_diverged_run_is_a_result(tmp_path: Path) -> None:
    done = call(*ROWS, "--optimizer", "sgd", "--lr", 1e30, "--out", tmp_path, "--json", "-")
    result = json.loads(done.stdout)
    assert done.exit_code == 0 and result["diverged"] and "test_loss" not in result


def test_ctrl_c_ends_with_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # (a process that runs in the background may ignore the signal)
    before = signal.default_int_handler
    signal.signal(signal.SIGINT, before)
    step = Training.training_step

    def interrupted(self: Training, batch: Any, index: int) -> Any:
        if self.global_step == 8:
            raise KeyboardInterrupt
        return step(self, batch, index)

    with monkeypatch.context() as patch:
        patch.setattr(Training, "training_step", interrupted)
        done = call(*ROWS, "--out", tmp_path)
    assert done.exit_code == 130 and "add --resume to continue" in flat(done.output)
    assert signal.getsignal(signal.SIGINT) is before
    assert call(*ROWS, "--out", tmp_path, "--epochs", 2, "--resume").exit_code == 0


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["mnist"], "There is no task 'mnist' (did you mean mnist"),
        (["digits-rows", "--optimizer", "lion"], "There is no optimizer 'lion'"),
        (["digits-rows", "--epochs", "0"], "greater than or equal to 1"),
        (["digits-rows", "--lr", "-1"], "found lr=-1.0, expected a positive number"),
        (["digits-rows", "--schedule", "cosine 2"], "There is no schedule 'cosine 2'"),
        (["digits-rows", "--optimizer", "Rprop", "--clip", "1"], "from the signs of gradients"),
        (["digits-rows", "--optimizer", "path-sgd", "--decay", "0.1"], "path-sgd has no weight"),
        (["digits-rows", "--augment", "crop-flip"], "examples of shape (8, 8), expected images"),
        (["digits-rows", "--dropout", "0.5"], "Task 'digits-rows' has no option 'dropout'"),
        (["digits-images", "--tau", "1", "--precision", "16-mixed"], "use bf16-mixed"),
        (["digits-rows", "--json", "no/such/folder.json"], "Cannot write 'no/such/folder.json'"),
        (["mnist-28", "--data", "."], "has no file 'train-images-idx3-ubyte'"),
        (["digits-rows", "--out", "/dev/null/x"], "Cannot make the folder '/dev/null/x'"),
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_is_written(
    words: list[str], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = call("train", *words)
    assert done.exit_code == 2 and sentence in flat(done.stderr), done.output
    assert flat(done.stderr).startswith("Error:") and not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--device", "abacus"], "Lightning cannot use the device 'abacus'"),
        (["--precision", "half"], "with the precision half"),
        (["--out", "empty", "--resume"], "There is no checkpoint 'empty/last.ckpt'"),
    ],
)
def test_what_is_not_there_is_one_sentence(
    words: list[str], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = call(*ROWS, *words)
    assert done.exit_code == 2 and sentence in flat(done.stderr), done.output
