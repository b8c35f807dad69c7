"""Hard promises of a run: kill -9 at any moment, damaged files, slips in a configuration."""

from __future__ import annotations

import csv
import io
import json
import multiprocessing
import os
import random
import resource
import signal
import struct
import subprocess
import sys
import time
import tomllib
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from training_command import call, flat

from pathspace.errors import InputError
from pathspace.training.experiments.config import read_config
from pathspace.training.experiments.reproduce.trial import Outcome, Trial
from pathspace.training.experiments.sweep import grid, ranked_points

RUN = ["train", "digits-rows", "--hidden", "6", "--epochs", "10", "--optimizer"]
MOMENTS = ["--checkpoint-every", "3", "--patience", "10"]


def run_command(words: list[str]) -> None:
    """What the script ``pathspace`` does, in a process of its own."""
    from pathspace.cli.main import main

    for stream in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
    sys.argv = ["pathspace", *words]
    main()


@pytest.fixture(scope="module")
def start() -> Callable[..., Any]:
    """Start commands without waiting for their imports every time: they come
    from a server that has them.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["pathspace.training.experiments.train_command"])

    def begin(*words: object) -> Any:
        process = context.Process(target=run_command, args=([str(word) for word in words],))
        process.start()
        return process

    return begin


def same(one: Any, other: Any) -> bool:
    """Equal in every key, every number and every bit of every tensor."""
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def stamp(path: Path) -> int:
    return path.stat().st_mtime_ns if path.exists() else 0


@pytest.mark.slow
def test_killed_ten_times_a_run_ends_with_bitwise_the_same(
    tmp_path: Path, start: Callable[..., Any]
) -> None:
    whole, part = tmp_path / "whole", tmp_path / "part"
    process = start(*RUN, "gmomentum", *MOMENTS, "--out", whole)
    process.join()
    assert process.exitcode == 0
    expected = torch.load(whole / "checkpoint.pt", weights_only=True)
    rng, inside, checkpoint = random.Random(0), 0, part / "checkpoint.pt"
    for _ in range(10):
        before = stamp(checkpoint)
        # Until a first checkpoint is there nothing can be resumed.
        process = start(
            *RUN, "gmomentum", *MOMENTS, "--out", part, *(["--resume"] if before else [])
        )
        # moments are counted in checkpoints, of which the run has 130: a clock says
        # nothing on a loaded machine
        for _ in range(rng.randint(1, 5)):
            while process.is_alive() and stamp(checkpoint) == before:
                time.sleep(0.001)
            before = stamp(checkpoint)
        time.sleep(rng.random() * 0.02)
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        assert process.exitcode == -signal.SIGKILL, "the run had ended before it was killed"
        # Never half a file: whatever the moment, the checkpoint can be read, and
        # it says where the run was.
        inside += torch.load(checkpoint, weights_only=True)["partial"]["steps"] > 0
    assert inside >= 5
    assert call(*RUN, "gmomentum", *MOMENTS, "--out", part, "--resume").exit_code == 0
    resumed = torch.load(checkpoint, weights_only=True)
    assert same(*(torch.load(folder / "best.pt", weights_only=True) for folder in (whole, part)))
    for state in (expected, resumed):
        # The only two things that a clock has a say in.
        state["records"] = [{**record, "seconds": 0} for record in state["records"]]
        state["partial"]["seconds"] = 0
    assert same(resumed, expected)
    tables = []
    for folder in (whole, part):
        with open(folder / "metrics.csv", newline="") as file:
            tables.append([[*row[:5], row[6]] for row in csv.reader(file)])
    assert tables[0] == tables[1] and len(tables[0]) == 11
    # What a killed write leaves behind is a hidden sibling, never one of the run's own
    # files; the next run clears it.
    assert {path.name for path in part.iterdir()} == {
        "best.pt",
        "checkpoint.pt",
        "configuration.toml",
        "metrics.csv",
        "metrics.jsonl",
    }


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "cannot be read: it is damaged or no checkpoint"),
        (b"PK\x03\x04 half a checkpoint", "cannot be read: it is damaged or no checkpoint"),
        (None, "is not a checkpoint of this version of pathspace"),
    ],
)
def test_foreign_checkpoint_is_one_sentence_and_stays(
    tmp_path: Path, content: bytes | None, sentence: str
) -> None:
    path = tmp_path / "checkpoint.pt"
    if content is None:
        torch.save({"state_dict": {"weight": torch.zeros(2)}, "epoch": 3}, path)
    else:
        path.write_bytes(content)
    before = path.read_bytes()
    result = call(*RUN, "sgd", "--out", tmp_path, "--resume")
    assert (
        result.exit_code == 2
        and sentence in flat(result.stderr)
        and "Traceback" not in result.output
    )
    assert path.read_bytes() == before


def test_damage_anywhere_in_a_checkpoint_is_noticed(tmp_path: Path) -> None:
    words = [*RUN[:5], "1", "--batch-size", "600", "--optimizer", "gmomentum", "--out", tmp_path]
    assert call(*words).exit_code == 0
    path = tmp_path / "checkpoint.pt"
    whole, rng = path.read_bytes(), random.Random(0)
    # Cut off, or one bit of a tensor turned: the first record that holds one, and others at random.
    for spoiled in (whole[:-1], whole[: len(whole) // 2], *(turned(whole, rng) for _ in range(5))):
        path.write_bytes(spoiled)
        result = call(*words, "--resume")
        assert result.exit_code == 2 and "cannot be read: it is damaged or no checkpoint" in flat(
            result.stderr
        )
        assert "Traceback" not in result.output and path.read_bytes() == spoiled
    path.write_bytes(whole)
    assert call(*words, "--resume").exit_code == 0


def turned(archive: bytes, rng: random.Random) -> bytes:
    """Turn one bit of one of the tensors of a file that torch has written."""
    with zipfile.ZipFile(io.BytesIO(archive)) as file:
        entry = rng.choice(
            [entry for entry in file.infolist() if "/data/" in entry.filename and entry.file_size]
        )
    # (a local header has 30 bytes, a name and padding)
    lengths = struct.unpack_from("<HH", archive, entry.header_offset + 26)
    start = entry.header_offset + 30 + sum(lengths)
    place = start + rng.randrange(entry.file_size)
    return (
        archive[:place] + bytes([archive[place] ^ (1 << rng.randrange(8))]) + archive[place + 1 :]
    )


def run_on_a_full_disk(room: int, said: Path, words: list[str]) -> None:
    """The command where no file may grow beyond ``room`` bytes; what it says goes
    to a file that is there.
    """
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, room))
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.dup2(os.open(said, os.O_WRONLY), 2)
    from pathspace.cli.main import main

    sys.argv = ["pathspace", *words]
    main()


@pytest.mark.slow
def test_full_disk_costs_one_sentence_and_no_file(
    tmp_path: Path, start: Callable[..., Any]
) -> None:
    words = [*RUN[:4], "--batch-size", "200", "--optimizer", "gmomentum"]
    part, whole, said = tmp_path / "part", tmp_path / "whole", tmp_path / "said"
    assert call(*words, "--epochs", 3, "--out", whole).exit_code == 0
    assert call(*words, "--epochs", 1, "--out", part).exit_code == 0
    before = (part / "checkpoint.pt").read_bytes()
    said.write_bytes(b"")
    more = [str(word) for word in (*words, "--epochs", 3, "--out", part, "--resume")]
    # Python ignores the signal that would end the process, so that a write fails
    # as it does on a full disk.
    process = multiprocessing.get_context("forkserver").Process(
        target=run_on_a_full_disk, args=(len(before) // 2, said, more)
    )
    process.start()
    process.join()
    sentence = flat(said.read_text())
    assert process.exitcode == 2 and sentence.startswith(
        f"Error: Cannot write '{part / 'checkpoint.pt'}': file too large"
    )
    assert (part / "checkpoint.pt").read_bytes() == before and "Traceback" not in sentence
    # Nothing half is left behind, and with room again the run ends where it would have.
    assert not [path for path in part.iterdir() if path.name.startswith(".")]
    assert call(*more).exit_code == 0
    one, two = (
        torch.load(folder / "checkpoint.pt", weights_only=True)["model"] for folder in (whole, part)
    )
    assert same(one, two)


@pytest.mark.slow
def test_standard_output_that_is_full_is_one_sentence(tmp_path: Path) -> None:
    words = [
        *RUN[:4],
        "--epochs",
        "1",
        "--batch-size",
        "600",
        "--optimizer",
        "sgd",
        "--out",
        str(tmp_path / "run"),
    ]
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "pathspace", *words, "--json", "-"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert done.returncode == 2 and "Cannot write to standard output" in flat(done.stderr)
    assert "Traceback" not in done.stderr and (tmp_path / "run/checkpoint.pt").exists()
    result = call(*words, "--overwrite", "--json", "/dev/full")
    assert result.exit_code == 2 and "'/dev/full': it is a device or a pipe" in flat(result.stderr)


@pytest.mark.parametrize(
    ("task", "sentence"),
    [
        ("mnist-28", "has no file 'train-images-idx3-ubyte'"),
        ("cifar10", "has no file"),
        ("ptb", "has no file"),
        ("enwik8", "has no file"),
        ("wmt16", "has no file"),
        ("catalogue", "has no"),
    ],
)
def test_empty_data_folder_is_one_sentence_before_any_file(
    tmp_path: Path, task: str, sentence: str
) -> None:
    (tmp_path / "data").mkdir()
    result = call("train", task, "--data", tmp_path / "data", "--out", tmp_path / "run")
    assert result.exit_code == 2 and sentence in flat(result.stderr), result.output
    assert flat(result.stderr).startswith("Error:") and not (tmp_path / "run").exists()


def test_truncated_idx_file_is_one_sentence_before_any_file(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    for part, count in (("train", 20), ("t10k", 10)):
        (data / f"{part}-images-idx3-ubyte").write_bytes(
            struct.pack(">4B3I", 0, 0, 8, 3, count, 28, 28) + bytes(count * 784)
        )
        (data / f"{part}-labels-idx1-ubyte").write_bytes(
            struct.pack(">4BI", 0, 0, 8, 1, count) + bytes(count)
        )
    words = [
        "train",
        "mnist-28",
        "--data",
        data,
        "--hidden",
        4,
        "--optimizer",
        "sgd",
        "--epochs",
        1,
    ]
    assert call(*words, "--out", tmp_path / "sound").exit_code == 0
    images = data / "train-images-idx3-ubyte"
    images.write_bytes(images.read_bytes()[:-1])
    result = call(*words, "--out", tmp_path / "run")
    assert (
        result.exit_code == 2
        and "train-images-idx3-ubyte" in flat(result.stderr)
        and "idx file" in flat(result.stderr)
    )
    assert "Traceback" not in result.output and not (tmp_path / "run").exists()


def test_checkpoint_of_another_run_is_refused(tmp_path: Path) -> None:
    words = [
        "train",
        "digits-rows",
        "--hidden",
        "4",
        "--batch-size",
        "600",
        "--epochs",
        "1",
        "--out",
        tmp_path,
    ]
    assert call(*words, "--optimizer", "sgd").exit_code == 0
    result = call(*words, "--optimizer", "adam", "--resume")
    assert (
        result.exit_code == 2
        and "was written with lr = 0.05, this run asks for lr = 0.002" in flat(result.stderr)
    )
    assert "resume with the same settings or choose another folder" in flat(result.stderr)


# ---- configuration -------------------------------------------------------------------------------


def test_configuration_sets_what_is_not_typed(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('optimizer = "sgd"\nlr = 1\nepochs = 2\nbatch-size = 600\nhidden = 4\n')
    out = tmp_path / "run"
    result = call(
        "train",
        "digits-rows",
        "--config",
        file,
        "--epochs",
        1,
        "--out",
        out,
        "--json",
        tmp_path / "r.json",
    )
    assert result.exit_code == 0, result.output
    settings = json.loads((tmp_path / "r.json").read_text())["settings"]
    chosen = {key: settings[key] for key in ("optimizer", "lr", "epochs", "batch_size", "hidden")}
    assert chosen == {"optimizer": "sgd", "lr": 1.0, "epochs": 1, "batch_size": 600, "hidden": 4}


def test_run_leaves_a_configuration_that_makes_the_same_run(tmp_path: Path) -> None:
    words = [
        "train",
        "digits-rows",
        "--hidden",
        4,
        "--batch-size",
        300,
        "--optimizer",
        "gmomentum",
        "--epochs",
        2,
    ]
    assert (
        call(*words, "--seed", 3, "--json", tmp_path / "1.json", "--out", tmp_path / "1").exit_code
        == 0
    )
    file = tmp_path / "1/configuration.toml"
    read = tomllib.loads(file.read_text())
    # Defaults are filled in, those of the optimizer too, and the versions are there.
    assert (read["task"], read["lr"], read["init"], read["seed"]) == (
        "digits-rows",
        0.01,
        "unit-skeleton",
        3,
    )
    assert read["versions"]["torch"] == torch.__version__ and read["versions"]["python"].startswith(
        "3."
    )
    assert not {"out", "resume", "json"} & read.keys()
    again = call(
        "train",
        "digits-rows",
        "--config",
        file,
        "--json",
        tmp_path / "2.json",
        "--out",
        tmp_path / "2",
    )
    assert again.exit_code == 0, again.output
    one, two = (json.loads((tmp_path / f"{name}.json").read_text()) for name in "12")
    assert {key for key in one if one[key] != two[key]} == {"seconds", "files"}
    assert (tmp_path / "2/configuration.toml").read_text() == file.read_text()
    # A resume that is refused leaves it as it was, one that is not brings it up to date.
    refused = call(*words, "--lr", 0.5, "--resume", "--out", tmp_path / "2")
    assert (
        refused.exit_code == 2
        and (tmp_path / "2/configuration.toml").read_text() == file.read_text()
    )
    more = call(
        "train", "digits-rows", "--config", file, "--epochs", 3, "--resume", "--out", tmp_path / "2"
    )
    assert (
        more.exit_code == 0
        and tomllib.loads((tmp_path / "2/configuration.toml").read_text())["epochs"] == 3
    )
    other = call("train", "digits-images", "--config", file, "--out", tmp_path / "3")
    assert other.exit_code == 2 and "is for another task than 'digits-images'" in flat(other.stderr)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            "learning_rate = 0.1",
            "has an unknown key 'learning_rate'; known are: accumulate, augment, batch_size",
        ),
        ("lr = 'fast'", "gives lr the value 'fast', expected a value of type float"),
        ("epochs = 1.5", "gives epochs the value 1.5, expected a value of type int"),
        ("epochs = true", "gives epochs the value True, expected a value of type int"),
        ("resume = 1", "gives resume the value 1, expected a value of type bool"),
        ("lr = ", "is not TOML"),
        ("optimizer = 'lion'", "There is no optimizer 'lion'"),
        ("epochs = 0", "found epochs=0, expected a whole number"),
        ("tau = -1", "found tau=-1, expected a number of at least 0"),
        ("diagnostics = 0", "found diagnostics=0, expected a whole number"),
        ("seed = -1", "found seed=-1, expected a whole number"),
        ("patience = 0", "found patience=0, expected a whole number"),
        ("[model]\nhidden = 3", "has an unknown key 'model'"),
        ("lr = nan", "The learning rate is nan"),
        ("devices = 2.0", "gives devices the value 2.0, expected a value of type int"),
        (None, "Cannot read the configuration"),
    ],
)
def test_slip_in_a_configuration_is_one_sentence(
    tmp_path: Path, text: str | None, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if text is not None:
        Path("run.toml").write_text(text)
    result = call("train", "digits-rows", "--hidden", 4, "--config", "run.toml", "--out", "run")
    assert (
        result.exit_code == 2
        and sentence in flat(result.stderr)
        and "Traceback" not in result.output
    )
    assert not Path("run").exists()


@pytest.mark.parametrize(
    "words",
    [["--tau", 0.1], ["--optimizer", "recurrent-gsgd", "--decay", -1]],
    ids=["tau", "decay"],
)
def test_a_refused_run_leaves_the_files_of_the_finished_one(
    tmp_path: Path, words: list[Any]
) -> None:
    run = ["train", "digits-rows", "--hidden", 4, "--batch-size", 600, "--epochs", 1]
    assert call(*run, "--out", tmp_path).exit_code == 0
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert call(*run, "--out", tmp_path, *words).exit_code == 2
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_whole_numbers_stand_for_floats(tmp_path: Path) -> None:
    (tmp_path / "x.toml").write_text("lr = 1\nresume = false\n")
    assert read_config(tmp_path / "x.toml", {"lr": float, "resume": bool}) == {
        "lr": 1,
        "resume": False,
    }


# ---- sweeps --------------------------------------------------------------------------------------


def test_sweep_runs_the_grid_once_and_writes_one_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [
        "sweep",
        "digits-rows",
        "--optimizer",
        "sgd",
        "--hidden",
        4,
        "--epochs",
        1,
        "--batch-size",
        600,
    ]
    words += ["--lr", 0.1, "--lr", 0.5, "--out", tmp_path / "sweep"]
    first = call(*words)
    assert first.exit_code == 0 and "1 epoch, 2 seeds" in first.output, first.output
    with open(tmp_path / "sweep" / "sweep.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [
        sorted(float(row["learning_rate"]) for row in rows),
        {row["seeds"] for row in rows},
    ] == [[0.1, 0.5], {"2"}]
    assert float(rows[0]["valid_error"]) <= float(rows[1]["valid_error"])
    table = (tmp_path / "sweep" / "sweep.csv").read_bytes()
    # A second time nothing is trained: all of it is known.
    monkeypatch.setattr(
        "pathspace.training.experiments.reproduce.trial.run_trial",
        lambda *_: pytest.fail("trained again"),
    )
    assert call(*words).exit_code == 0 and (tmp_path / "sweep" / "sweep.csv").read_bytes() == table


def test_cells_put_divergence_last_and_the_best_first() -> None:
    trials = grid(Trial("t", "sgd", 0.0, 0, 1), (0.1, 0.2), (0.0, 1.0), 2)
    values = {(0.1, 0.0): 0.5, (0.1, 1.0): 0.4, (0.2, 0.0): 0.1, (0.2, 1.0): 0.3}
    outcomes = [
        Outcome(
            (1.0,),
            (1.0,),
            (values[t.lr, t.tau],),
            1.0,
            diverged=(t.lr, t.tau, t.seed) == (0.2, 0.0, 1),
        )
        for t in trials
    ]
    found = ranked_points(trials, outcomes)
    assert [(c.lr, c.tau) for c in found] == [(0.2, 1.0), (0.1, 1.0), (0.1, 0.0), (0.2, 0.0)]
    assert found[-1].diverged == 1 and found[-1].valid.count == 1


def test_a_value_that_is_given_twice_is_no_second_measurement() -> None:
    base = Trial("t", "sgd", 0.0, 0, 1)
    assert grid(base, (0.1, 0.2, 0.1), (0.0, 0.0), 2) == grid(base, (0.1, 0.2), (0.0,), 2)


@pytest.mark.parametrize(
    ("rates", "taus", "expected"),
    [
        ((), (0.0,), "positive numbers"),
        ((0.0,), (0.0,), "positive numbers"),
        ((0.1,), (-1.0,), "numbers of at least 0"),
        ((float("nan"),), (0.0,), "positive numbers"),
    ],
)
def test_grid_without_sense_is_one_sentence(
    rates: tuple[float, ...], taus: tuple[float, ...], expected: str
) -> None:
    with pytest.raises(InputError, match=f"A sweep found .*, expected {expected}."):
        grid(Trial("t", "sgd", 0.0, 0, 1), rates, taus, 1)
