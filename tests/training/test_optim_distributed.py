"""Two processes take the steps of one with the whole batch: by
DistributedDataParallel, and with shards.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from oracles.networks import OpRNN
from processes import once, two_processes
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import pathspace as ps
from pathspace.training import GSGD, GAdam, init_skeleton_

# several processes
pytestmark = pytest.mark.slow

Maker = Callable[[nn.Module, ps.Skeleton], torch.optim.Optimizer]
MAKERS: dict[str, Maker] = {
    "gsgd": lambda m, s: GSGD(m.named_parameters(), lr=0.05, skeleton=s),
    "momentum": lambda m, s: GSGD(
        m.named_parameters(), lr=0.02, momentum=0.9, weight_decay=0.1, skeleton=s
    ),
    "cap": lambda m, s: GSGD(
        m.named_parameters(), lr=torch.tensor(0.05), max_multiplier=1.0, skeleton=s
    ),
    "gadam": lambda m, s: GAdam(m.named_parameters(), lr=0.01, skeleton=s),
}


class Convolutions(nn.Module):
    """Tails that depend on the row (depthwise), channels fewer than processes, batch
    norm, a pinned read-out.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first, self.depthwise = (
            nn.Conv2d(1, 3, 3, padding=1),
            nn.Conv2d(3, 3, 3, padding=1, groups=3),
        )
        self.norm, self.single = (
            nn.BatchNorm2d(3, eps=1e-30, track_running_stats=False),
            nn.Conv2d(3, 1, 1),
        )
        self.head, self.last = nn.Linear(4, 3), nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.depthwise(torch.relu(self.first(x.view(-1, 1, 2, 2))))))
        return self.last(torch.tanh(self.head(torch.relu(self.single(x)).flatten(1))))


MODELS: dict[str, Callable[[], nn.Module]] = {
    # 7, 5 and 1 rows: uneven shards, and one that is empty
    "mlp": lambda: nn.Sequential(
        nn.Linear(4, 7), nn.ReLU(), nn.Linear(7, 5), nn.ReLU(), nn.Linear(5, 1)
    ),
    "convolutions": Convolutions,
    "rnn": lambda: nn.Sequential(
        nn.Unflatten(1, (2, 2)), OpRNN(2, 3, 1, batch_first=True, num_layers=2)
    ),
}
PAIRS = [(name, member) for name in MODELS for member in MAKERS]


def setting(name: str) -> tuple[nn.Module, Tensor, Tensor, ps.Skeleton]:
    torch.manual_seed(0)
    model = MODELS[name]().double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * parameter.sign())
    x, y = torch.randn(8, 4).double(), torch.randn(8, 1).double()
    skeleton = ps.trace(model, x).skeleton()
    init_skeleton_(model, skeleton)
    return model, x, y, skeleton


def sharded(model: nn.Module) -> nn.Module:
    """Shards of every layer, and of what is left."""
    mesh = init_device_mesh("cpu", (2,))
    for layer in model.children():
        if any(True for _ in layer.parameters()):
            fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor, steps: int = 5
) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()


def whole(model: nn.Module) -> dict[str, Tensor]:
    return {name: getattr(p, "full_tensor", p.detach)() for name, p in model.named_parameters()}


def part(rank: int, x: Tensor) -> Tensor:
    return x[4 * rank : 4 * rank + 4]


def work(rank: int, folder: Path) -> None:
    found: dict[str, object] = {}
    for name, member in PAIRS:
        model, x, y, skeleton = setting(name)
        optimizer = MAKERS[member](model, skeleton)
        if name == "mlp":
            train(DistributedDataParallel(model), optimizer, part(rank, x), part(rank, y))
            found[f"ddp {name} {member}"] = whole(model)
        model, x, y, skeleton = setting(name)
        # batch statistics are those of a process, so this one sees the whole batch everywhere
        share = (x, y) if name == "convolutions" else (part(rank, x), part(rank, y))
        sharded(model)
        optimizer = MAKERS[member](model, skeleton)
        train(model, optimizer, *share)
        found[f"fsdp {name} {member}"] = whole(model)
    found |= notice(rank) | resume(rank)
    torch.save(found, f"{folder}/{rank}.pt")


def notice(rank: int) -> dict[str, object]:
    """Weights of one device changed by somebody else, clipping by the norm of path gradients."""
    model, x, y, skeleton = setting("mlp")
    sharded(model)
    optimizer = MAKERS["gsgd"](model, skeleton)
    with torch.no_grad():
        # the rows of the last layer are all on device 0
        for parameter in model[4].parameters():
            parameter.mul_(1.5)
    nn.functional.mse_loss(model(part(rank, x)), part(rank, y)).backward()
    norm = optimizer.clip_path_grad_norm_(0.5)
    optimizer.step()
    return {"norm": norm, "clipped": whole(model), "guards": optimizer.clip_counts}


def resume(rank: int) -> dict[str, object]:
    """Each device saves and loads its own state."""
    model, x, y, skeleton = setting("mlp")
    sharded(model)
    optimizer = MAKERS["momentum"](model, skeleton)
    train(model, optimizer, part(rank, x), part(rank, y), 2)
    file = io.BytesIO()
    torch.save([model.state_dict(), optimizer.state_dict()], file)
    train(model, optimizer, part(rank, x), part(rank, y), 3)
    twin, _, _, skeleton = setting("mlp")
    sharded(twin)
    resumed = MAKERS["momentum"](twin, skeleton)
    file.seek(0)
    weights, state = torch.load(file, weights_only=False)
    twin.load_state_dict(weights)
    resumed.load_state_dict(state)
    train(twin, resumed, part(rank, x), part(rank, y), 3)
    return {"straight": whole(model), "resumed": whole(twin)}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, object]]:
    place = once(tmp_path_factory, "distributed", partial(two_processes, work))
    return [torch.load(place / f"{rank}.pt", weights_only=False) for rank in (0, 1)]


def compare(results: list[dict[str, object]], key: str, expected: dict[str, Tensor]) -> None:
    for result in results:
        found = result[key]
        assert isinstance(found, dict)
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert torch.equal(found[name], results[0][key][name])  # type: ignore[index]
            # (Adam divides sums in another order by their own small squares)
            torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("member", MAKERS)
def test_two_processes_take_the_steps_of_one(member: str, results: list[dict[str, object]]) -> None:
    model, x, y, skeleton = setting("mlp")
    train(model, MAKERS[member](model, skeleton), x, y)
    compare(results, f"ddp mlp {member}", whole(model))


@pytest.mark.parametrize(("name", "member"), PAIRS)
def test_shards_take_the_steps_of_the_whole(
    name: str, member: str, results: list[dict[str, object]]
) -> None:
    model, x, y, skeleton = setting(name)
    before = whole(model)
    start = nn.functional.mse_loss(model(x), y).item()
    before = {key: value.clone() for key, value in before.items()}
    train(model, MAKERS[member](model, skeleton), x, y)
    assert any(not torch.equal(before[key], value) for key, value in whole(model).items())
    assert nn.functional.mse_loss(model(x), y).item() < start
    compare(results, f"fsdp {name} {member}", whole(model))


def test_shards_notice_changed_weights_and_clip_by_the_whole_norm(
    results: list[dict[str, object]],
) -> None:
    model, x, y, skeleton = setting("mlp")
    optimizer = MAKERS["gsgd"](model, skeleton)
    with torch.no_grad():
        for parameter in model[4].parameters():
            parameter.mul_(1.5)
    nn.functional.mse_loss(model(x), y).backward()
    norm = optimizer.clip_path_grad_norm_(0.5)
    optimizer.step()
    assert norm > 0.5
    for result in results:
        torch.testing.assert_close(result["norm"], norm, rtol=1e-12, atol=0)
        assert torch.equal(result["guards"], optimizer.clip_counts)  # type: ignore[arg-type]
    compare(results, "clipped", whole(model))


def test_shards_resume_bitwise_each_with_its_own_state(results: list[dict[str, object]]) -> None:
    for result in results:
        straight, resumed = result["straight"], result["resumed"]
        assert all(torch.equal(straight[key], resumed[key]) for key in straight)  # type: ignore[index,attr-defined]
