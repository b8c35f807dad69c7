"""Two processes with DistributedDataParallel take the steps of one process with the whole batch."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import pathspace as ps
from training import GSGD, GAdam

MAKERS = {
    "gsgd": lambda m, s: GSGD(m.named_parameters(), lr=0.05, momentum=0.9, skeleton=s),
    "gadam": lambda m, s: GAdam(m.named_parameters(), lr=0.01, skeleton=s),
}


def setting() -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 7), nn.ReLU(), nn.Linear(7, 5), nn.ReLU(), nn.Linear(5, 1)).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.5 * parameter.sign())
    return model, torch.randn(8, 4).double(), torch.randn(8, 1).double()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
    for _ in range(5):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()


def work(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2, timeout=timedelta(seconds=60)
    )
    for name, make in MAKERS.items():
        model, x, y = setting()
        skeleton = ps.trace(model, x).skeleton()
        optimizer = make(model, skeleton)
        train(DistributedDataParallel(model), optimizer, x[4 * rank : 4 * rank + 4], y[4 * rank : 4 * rank + 4])
        torch.save(model.state_dict(), f"{folder}/{name}{rank}.pt")
    model, x, _ = setting()
    skeleton = ps.trace(model, x).skeleton()
    message = "none"
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    try:
        MAKERS["gsgd"](model, skeleton)
    except ps.UnsupportedError as error:
        message = str(error)
    Path(f"{folder}/refused{rank}.txt").write_text(message)
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("processes")
    mp.spawn(work, args=(str(place),), nprocs=2, join=True)
    return place


@pytest.mark.parametrize("name", MAKERS)
def test_two_processes_take_the_steps_of_one(name: str, folder: Path) -> None:
    model, x, y = setting()
    train(model, MAKERS[name](model, ps.trace(model, x).skeleton()), x, y)
    parts = [torch.load(folder / f"{name}{rank}.pt", weights_only=True) for rank in (0, 1)]
    for key, value in model.state_dict().items():
        assert torch.equal(parts[0][key], parts[1][key])
        torch.testing.assert_close(parts[0][key], value, rtol=1e-12, atol=1e-14)


def test_sharded_parameters_are_refused(folder: Path) -> None:
    for rank in (0, 1):
        message = (folder / f"refused{rank}.txt").read_text()
        assert "sharded over several devices" in message
        assert "DistributedDataParallel" in message
