"""Several processes are one run: they share its passes, agree on its numbers, and
the first of them speaks.
"""

from __future__ import annotations

import csv
import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning_fabric import Fabric
from torch import Tensor
from training_command import Noisy, exact, flat, numbers, stop_at, weights
from training_command import call as called_here

from pathspace.errors import InputError
from pathspace.training import ranks
from pathspace.training.launch import make_fabric, shutdown
from pathspace.training.penal import penalize
from pathspace.training.recipe import Recipe, prepare
from pathspace.training.trainer import Trainer


def recurrent(
    fabric: Fabric, optimizer: str, batch_size: int, accumulate: int, count: int
) -> tuple[Tensor, Any]:
    task = exact("digits-rows", count)
    model, chosen = prepare(task, Recipe(optimizer))
    trainer = Trainer(
        task, model, chosen, epochs=2, batch_size=batch_size, accumulate=accumulate, fabric=fabric
    )
    return weights_after(trainer)


def residual(fabric: Fabric) -> tuple[Tensor, Any]:
    """With the penal connection, and passes of 3 of 7 examples: the last leaves
    nothing for a second process.
    """
    task = exact("digits-images", 7)
    model = task.make_model(0).eval()
    # Batch norm would look at each process's examples.
    model.train = lambda mode=True: model  # type: ignore[method-assign]
    penalize(model, task.train.inputs[:2], tau=1e-3 * fabric.world_size)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return weights_after(Trainer(task, model, optimizer, epochs=2, batch_size=3, fabric=fabric))


def weights_after(trainer: Trainer) -> tuple[Tensor, Any]:
    history = trainer.fit()
    own = weights(trainer.model)
    # Every process sees the same numbers and holds the same weights.
    for other in ranks.gather(trainer.fabric, (numbers(history), own)):
        assert other[0] == numbers(history) and torch.equal(other[1], own)
    return own, [asdict(record) for record in history.records]


SETTINGS = [("sgd", 50, 1, 400), ("gsgd", 50, 1, 333), ("gmomentum", 32, 3, 333), ("sgd", 1, 2, 5)]


def everything(fabric: Fabric) -> list[tuple[Tensor, Any]]:
    torch.set_num_threads(1)
    return [*(recurrent(fabric, *setting) for setting in SETTINGS), residual(fabric)]


def noisy(fabric: Fabric, folder: Path | None, stop: int = 0) -> Trainer:
    task = exact("digits-rows", 200)
    model, optimizer = prepare(task, Recipe("gmomentum"))
    return Trainer(
        task,
        Noisy(model),
        optimizer,
        epochs=2,
        folder=folder,
        checkpoint_every=3,
        watch=stop_at(stop),
        fabric=fabric,
    )


def in_two_processes(fabric: Fabric, folder: Path) -> None:
    try:
        one_run(fabric, folder)
    finally:
        shutdown()


def one_run(fabric: Fabric, folder: Path) -> None:
    results = everything(fabric)
    ranks.first(fabric, lambda: torch.save(results, folder / "results.pt"))

    whole = noisy(fabric, None)
    expected = whole.fit()
    with pytest.raises(KeyboardInterrupt):
        noisy(fabric, folder, stop=11).fit()
    # Each process has noise of its own, and has it back.
    states = torch.load(folder / "checkpoint.pt", weights_only=True)["noise"]
    assert len(states) == 2 and not torch.equal(states[0]["cpu"], states[1]["cpu"])
    rest = noisy(fabric, folder)
    assert numbers(rest.fit(resume=True)) == numbers(expected)
    assert torch.equal(weights(rest.model), weights(whole.model))

    # A loss that overflows in one process ends the run of both, and so does an error.
    task = exact("digits-rows", 200)
    spoiled = replace(
        task, loss=lambda o, t: task.loss(o, t) * (math.inf if fabric.global_rank else 1.0)
    )
    model, optimizer = prepare(task, Recipe("sgd"))
    assert Trainer(spoiled, model, optimizer, epochs=2, fabric=fabric).fit().diverged

    def fail() -> None:
        if fabric.global_rank == 1:
            raise InputError("The second process found no data.")

    with pytest.raises(InputError, match="The second process"):
        ranks.everyone(fabric, fail)
    ranks.first(fabric, fail)


@pytest.mark.slow
def test_two_processes_are_one_run(tmp_path: Path) -> None:
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp_spawn")
    fabric.launch(in_two_processes, tmp_path)
    found = torch.load(tmp_path / "results.pt")
    wanted = everything(Fabric(accelerator="cpu", devices=1))
    assert len(found) == len(wanted) == len(SETTINGS) + 1
    for (weight, records), (expected, others) in zip(found, wanted, strict=True):
        torch.testing.assert_close(weight, expected, rtol=1e-9, atol=1e-12)
        for record, other in zip(records, others, strict=True):
            assert (record["epoch"], record["step"]) == (other["epoch"], other["step"])
            for key, exactly in (
                ("train_loss", 1e-10),
                ("valid_loss", 1e-10),
                ("valid_metric", 1e-6),
            ):
                # The metric of the task is a mean in float32.
                assert record[key] == pytest.approx(other[key], rel=exactly)


# ---- the command, through the launchers ----------------------------------------------------------

RUN = [
    "train",
    "digits-rows",
    "--hidden",
    "6",
    "--batch-size",
    "50",
    "--optimizer",
    "gsgd",
    "--precision",
    "64-true",
]
TORCHRUN = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]


def call(*words: object) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", *map(str, words)]
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=300, check=False
    )


def alone(*words: object) -> None:
    """One process, which is this one."""
    done = called_here(*words)
    assert done.exit_code == 0, done.output


def result(folder: Path) -> tuple[dict[str, Tensor], list[list[str]]]:
    state = torch.load(folder / "checkpoint.pt", weights_only=True)
    with open(folder / "metrics.csv", newline="") as file:
        return state["model"], [row[:5] for row in csv.reader(file)][1:]


@pytest.mark.slow
def test_both_launchers_end_where_one_process_does(tmp_path: Path) -> None:
    one, two, three = (tmp_path / name for name in ("one", "two", "three"))
    alone(*RUN, "--epochs", 1, "--out", one)
    two.mkdir()
    (two / "checkpoint.pt").write_bytes((one / "checkpoint.pt").read_bytes())

    alone(*RUN, "--epochs", 2, "--out", one, "--resume")
    # The library's own launcher goes on from the checkpoint of one process.
    mine = call("pathspace", *RUN, "--epochs", 2, "--out", two, "--resume", "--devices", 2)
    assert mine.returncode == 0, mine.stderr
    torchrun = call(*TORCHRUN, "pathspace", *RUN, "--epochs", 2, "--out", three, "--json", "-")
    assert torchrun.returncode == 0, torchrun.stderr
    # Told once, and JSON that is whole.
    assert mine.stdout.count("validation error") == 1 and mine.stderr == ""
    assert torchrun.stdout.count('"valid_error"') == 1

    expected, rows = result(one)
    for folder in (two, three):
        model, others = result(folder)
        for name, weight in expected.items():
            # Fabric hands the outputs of 64-true to the loss in float32.
            torch.testing.assert_close(model[name], weight, rtol=1e-5, atol=1e-6)
        for row, other in zip(rows, others, strict=True):
            assert [float(value) for value in other] == pytest.approx(
                [float(value) for value in row], rel=1e-6
            )
        assert {path.name for path in folder.iterdir()} == {
            "checkpoint.pt",
            "configuration.toml",
            "metrics.csv",
            "metrics.jsonl",
        }


@pytest.mark.slow
def test_an_error_of_two_processes_is_one_sentence(tmp_path: Path) -> None:
    done = call("pathspace", *RUN, "--out", tmp_path, "--resume", "--devices", 2)
    assert done.returncode == 2
    sentence = flat(done.stderr)
    assert (
        sentence.startswith("Error: There is no checkpoint")
        and sentence.count("There is no checkpoint") == 1
    )
    assert "Traceback" not in sentence and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"strategy": "fsdp"}, "There is no strategy 'fsdp'; choose one of: auto, ddp"),
        ({"precision": "half"}, "There is no precision 'half'; choose one of: 32-true"),
        (
            {"precision": "16-mixed"},
            "The device 'cpu' cannot compute in the precision 16-mixed; use --precision bf16-mixed",
        ),
        (
            {"device": "mps", "precision": "64-true"},
            "'mps' cannot compute in the precision 64-true; use --precision 32-true",
        ),
        ({"devices": 0}, "at least one device, found 0"),
    ],
)
def test_what_cannot_be_launched_is_one_sentence(wrong: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        make_fabric(**wrong)


def test_torchrun_and_devices_must_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (
        ("TORCHELASTIC_RUN_ID", "1"),
        ("LOCAL_WORLD_SIZE", "2"),
        ("WORLD_SIZE", "4"),
    ):
        monkeypatch.setenv(name, value)
    with pytest.raises(
        InputError, match="torchrun has started 2 processes on this machine, but --devices is 3"
    ):
        make_fabric(devices=3)


@pytest.mark.slow
def test_a_process_that_dies_takes_the_others_along_in_one_sentence(tmp_path: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    words = [
        *RUN,
        "--epochs",
        "2000",
        "--checkpoint-every",
        "2",
        "--out",
        str(tmp_path),
        "--devices",
        "2",
    ]
    command = [sys.executable, "-m", "pathspace", *words]
    main = subprocess.Popen(
        command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    while main.poll() is None and not (tmp_path / "checkpoint.pt").exists():
        time.sleep(0.05)
    children = Path(f"/proc/{main.pid}/task/{main.pid}/children").read_text().split()
    (child,) = (
        number
        for number in children
        if b"pathspace" in Path(f"/proc/{number}/cmdline").read_bytes()
    )
    os.kill(int(child), signal.SIGKILL)
    said = main.communicate(timeout=120)[1]
    # Fabric, which looks after its children every few seconds, may be faster
    # than the broken connection.
    assert main.returncode in (2, -signal.SIGKILL)
    assert main.returncode != 2 or flat(said).endswith(
        "the last checkpoint is complete: add --resume to continue."
    )
    assert said.count("\n") <= 1
    state = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    done = len(state["records"])
    alone(*RUN, "--epochs", done + 1, "--out", tmp_path, "--resume")
    assert len(result(tmp_path)[1]) == done + 1
