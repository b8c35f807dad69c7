"""``pathspace reproduce --cluster``: trials on the workers of a Dask
cluster, of which one is killed.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from distributed import LocalCluster
from training_command import call, flat

from pathspace.errors import InputError
from pathspace.training.experiments.reproduce import EXPERIMENTS, Setting
from pathspace.training.experiments.reproduce.trial import Outcome, Trial, run_trial
from pathspace.training.experiments.reproduce.trial_cache import (
    TRIALS,
    TrialCache,
    connected,
    run_all,
    run_here,
)

SMALL = Trial("digits-rows", "sgd", 0.1, 0, 1, batch_size=400, options=(("hidden", 3),))
WORKER = """
import asyncio, sys
from distributed import Worker

async def work():
    async with Worker(sys.argv[1], nthreads=2, dashboard=False) as worker:
        await worker.finished()

asyncio.run(work())
"""
# A worker that takes trials and ends none. It needs no library, so that it starts at once.
STUCK = """
import sys, time
from pathlib import Path
from types import ModuleType

def run_here(trial, key, folder):
    Path("begun").touch()
    time.sleep(1000)

for name in ("pathspace", "{0}.trial_cache", "{0}.trial"):
    sys.modules[name] = ModuleType(name)
sys.modules["{0}.trial_cache"].run_here = run_here
sys.modules["{0}.trial"].Trial = type("Trial", (), {{}})
""".format("pathspace.training.experiments.reproduce")


@pytest.fixture
def cluster() -> Iterator[LocalCluster]:
    """A scheduler without workers."""
    with LocalCluster(n_workers=0, dashboard_address=None, protocol="tcp://") as cluster:
        yield cluster


@contextmanager
def worker(
    cluster: LocalCluster, folder: Path, first: str = ""
) -> Iterator[subprocess.Popen[bytes]]:
    """A worker in a process and a folder of its own."""
    folder.mkdir()
    process = subprocess.Popen(
        [sys.executable, "-c", first + WORKER, cluster.scheduler_address], cwd=folder
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def wait_for(what: str, holds: Callable[[], object]) -> None:
    """Wait until a function returns something true."""
    end = time.monotonic() + 300
    while not holds():
        assert time.monotonic() < end, f"waited for {what}"
        time.sleep(0.01)


def kill(process: subprocess.Popen[bytes], folder: Path) -> None:
    """Kill a worker that is in the middle of a trial."""
    wait_for("a trial of the worker", (folder / "begun").exists)
    process.kill()


def same(first: Outcome, second: Outcome) -> bool:
    return replace(first, seconds=0.0) == replace(second, seconds=0.0)


@pytest.mark.slow
def test_another_worker_runs_the_trials_of_one_that_is_killed(
    cluster: LocalCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trials = [replace(SMALL, seed=seed, test=True) for seed in range(4)]
    found: list[Outcome] = []

    def run(setting: Setting) -> None:
        found.extend(setting.run(trials))
        raise InputError("This experiment has no record.")

    monkeypatch.setitem(EXPERIMENTS, "small", replace(EXPERIMENTS["smnist"], name="small", run=run))
    monkeypatch.setattr("pathspace.training.experiments.cli.known_experiment", lambda name: name)
    (tmp_path / "caller").mkdir()
    monkeypatch.chdir(tmp_path / "caller")
    with worker(cluster, tmp_path / "stuck", STUCK) as victim, worker(cluster, tmp_path / "sound"):
        wait_for("both workers", lambda: len(cluster.scheduler.workers) == 2)
        with ThreadPoolExecutor() as pool:
            killed = pool.submit(kill, victim, tmp_path / "stuck")
            place = ("--cluster", cluster.scheduler_address, "--out", "records")
            result = call("reproduce", "small", "--scale", "fetched", *place)
            killed.result()
    assert "This experiment has no record." in result.output
    assert victim.returncode == -signal.SIGKILL and len(found) == 4
    assert all(same(ours, run_trial(trial)) for ours, trial in zip(found, trials, strict=True))
    # what ended is in the caller's folder and in the journal, with the provenance of the worker
    journal = Path("records/small-trials.jsonl")
    lines = [json.loads(line) for line in journal.read_text().splitlines()]
    assert {line["key"] for line in lines} == {trial.key for trial in trials}
    assert lines[0]["provenance"]["processor"]
    assert [TrialCache("empty", journal).find(trial) for trial in trials] == found
    assert [TrialCache(TRIALS).find(trial) for trial in trials] == found
    assert not list((tmp_path / "stuck" / TRIALS).glob("*.json"))


@pytest.mark.slow
def test_clusters_that_fail_end_in_a_sentence(cluster: LocalCluster, tmp_path: Path) -> None:
    cluster.scheduler.allowed_failures = 0
    address = cluster.scheduler_address
    with worker(cluster, tmp_path / "stuck", STUCK) as victim, ThreadPoolExecutor() as pool:
        killed = pool.submit(kill, victim, tmp_path / "stuck")
        with (
            pytest.raises(
                InputError,
                match="Several workers died during the same trial, the last one at tcp://",
            ),
            connected(address, 300) as workers,
        ):
            run_all([SMALL], TrialCache(None), elsewhere=workers)
        killed.result()
    with pytest.raises(
        InputError, match=r"has no worker; start some with dask worker tcp://.* --nthreads 1"
    ):
        connected(address, 0.1).__enter__()


def test_what_a_worker_finds_at_home_is_what_was_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    first, second = (run_here(SMALL, SMALL.key, TRIALS) for _ in range(2))
    assert first == second and same(Outcome.from_dict(first["outcome"]), run_trial(SMALL))
    with pytest.raises(
        InputError, match="A worker has other data for 'digits-rows' than the machine that asks"
    ):
        run_here(SMALL, "other", TRIALS)


def test_wrong_clusters_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        "pathspace.training.experiments.reproduce.trial_cache.connected.__wrapped__.__defaults__",
        (0.2,),
    )
    nobody = "No Dask scheduler answers at"
    there = ("--cluster", "tcp://127.0.0.1:1")
    for words, message in (
        (("race", *there), f"{nobody} 'tcp://127.0.0.1:1'; start one"),
        (("toy", *there), "'toy' with --jobs 1 found --cluster"),
        (("race", *there, "--jobs", 2), "'race' with --jobs 2 found --cluster"),
    ):
        result = call("reproduce", *words)
        assert result.exit_code == 2 and message in flat(result.stderr), result.output
    monkeypatch.setattr(
        "pathspace.training.experiments.reproduce.trial_cache.find_spec", lambda _: None
    )
    with pytest.raises(
        InputError,
        match=r"Dask distributed is not installed; run pip install 'pathspace\[cluster\]'",
    ):
        connected("tcp://127.0.0.1:1").__enter__()
