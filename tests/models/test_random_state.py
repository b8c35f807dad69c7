"""Random states of torch are the user's before and after a call, those of GPUs too."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import pathspace as ps
from pathspace import diagnostics
from pathspace.models.isolation import seed_torch, torch_kept


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.5), nn.ReLU(), nn.Linear(6, 3))


CALLS: dict[str, Callable[[nn.Sequential, Tensor], object]] = {
    "trace": lambda m, x: ps.trace(m, x).skeleton(),
    "verify": ps.verify,
    "proof": lambda m, x: ps.check(ps.proof(ps.trace(m, x).skeleton(), "net"), model=m, args=(x,)),
    "norm": lambda m, x: ps.path_norm(m.eval(), x),
    "channels": lambda m, x: ps.channels(m, x).remove(keep=0.5),
    "gauge": lambda m, x: ps.choose_gauge(m, ps.trace(m, x), ps.Noise(), x),
    "equalise": lambda m, x: ps.equalise(m, ps.trace(m, x), calibration=x, trials=2),
    "degeneracy": diagnostics.degeneracy,
    "signal": diagnostics.signal,
    "cost": diagnostics.cost,
    "report": diagnostics.report,
    "conserved": lambda m, x: diagnostics.conserved(ps.trace(m, x)),
}


@pytest.mark.parametrize("name", CALLS)
def test_seeds_and_states_stay_those_of_the_user(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = net(), torch.randn(5, 4)
    state, seeds = torch.get_rng_state(), list[int]()
    # torch would keep such a seed for a GPU that is not in use yet, in place of the user's
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeds.append)
    CALLS[name](model, x)
    assert seeds == []
    assert torch.equal(torch.get_rng_state(), state)


def test_the_generators_of_gpus_in_use_are_seeded_and_restored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seeds, forked = list[int](), list[list[int]]()
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeds.append)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    fork = torch.random.fork_rng

    def recorded(devices: range) -> object:
        forked.append(list(devices))
        return fork(devices=[])

    monkeypatch.setattr(torch.random, "fork_rng", recorded)
    with torch_kept(3):
        one = torch.rand(2)
    seed_torch(3)
    assert (seeds, forked) == ([3, 3], [[0, 1]])
    torch.manual_seed(3)
    assert torch.equal(torch.rand(2), one)
