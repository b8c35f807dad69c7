"""The penal connection per sample, in one process and in two, and its settings, against the loss
with the penalty written into it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
from processes import two_processes
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from pathspace.errors import InputError, InputTypeError, UnsupportedError
from pathspace.training import penalise_

TAU = 0.3


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner, self.outer = nn.LayerNorm(4), nn.Linear(4, 4), nn.Linear(4, 4)

    def branch(self, x: Tensor) -> Tensor:
        return self.outer(torch.relu(self.inner(self.norm(x))))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.branch(x)


class Stack(nn.Module):
    """Two blocks behind a linear layer; `read` finds the samples in the input."""

    def __init__(
        self, read: Callable[[Any], Tensor] = lambda x: x, reentrant: bool = False
    ) -> None:
        super().__init__()
        self.read, self.reentrant = read, reentrant
        self.stem = nn.Linear(4, 4)
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, given: Any) -> Tensor:
        x = self.stem(self.read(given))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True) if self.reentrant else block(x)
        return x

    def explicit(self, x: Tensor, tau: float = TAU) -> Tensor:
        """Loss and penalty, the mean over samples."""
        x, penalty = self.stem(x), torch.zeros((), dtype=x.dtype)
        for block in self.blocks:
            z = block.branch(x)  # type: ignore[operator]
            x, penalty = x + z, penalty + z.square().sum()
        return x.square().mean() + tau / 2 * penalty / len(x)


def model(**options: Any) -> Stack:
    torch.manual_seed(0)
    return Stack(**options).double()


def gradients(net: nn.Module, loss: Tensor) -> list[Tensor]:
    net.zero_grad()
    loss.backward()
    return [p.grad.clone() for p in net.parameters() if p.grad is not None]


def test_samples_are_counted_in_nested_inputs() -> None:
    net, x = model(read=lambda given: given[0]["x"]), torch.randn(5, 4).double()
    wanted = gradients(net, net.explicit(x))
    given = [{"flag": 1, "x": x}, torch.ones(7, 7)]
    penalise_(net, given, tau=TAU, per="sample")
    torch.testing.assert_close(gradients(net, net(given).square().mean()), wanted)


def test_inputs_without_samples_are_refused() -> None:
    net = model(read=lambda given: given[None])
    penalise_(net, torch.randn(4).double(), tau=TAU, per="sample", batch_dim=1)
    with pytest.raises(UnsupportedError, match=r"found no tensor with a dimension 1 .* per='sum'"):
        net(torch.randn(4).double())


def test_a_recomputed_block_knows_the_forward_that_it_belongs_to() -> None:
    """Reentrant checkpointing runs blocks again after other forwards, with another tau."""
    net, batches = model(reentrant=True), [torch.randn(n, 4).double() for n in (2, 7, 3)]
    strengths = [0.1, 0.7, 0.2]
    losses = [net.explicit(x, tau) for x, tau in zip(batches, strengths, strict=True)]
    wanted = gradients(net, torch.stack(losses).sum())
    factor = [1.0]
    penalise_(net, batches[0], tau=TAU, per="sample", scale=lambda: factor[0])
    losses = []
    for x, tau in zip(batches, strengths, strict=True):
        net.penal_connection.tau, factor[0] = tau / 2, 2.0
        losses.append(net(x).square().mean())
    net.penal_connection.tau, factor[0] = 5.0, 3.0
    net(torch.randn(50, 4).double())
    torch.testing.assert_close(gradients(net, torch.stack(losses).sum()), wanted)
    assert net.penal_connection.tau == 5.0


@pytest.mark.parametrize("bad", [float("nan"), "0.1", None])
@pytest.mark.parametrize("what", ["tau", "scale"])
def test_settings_are_numbers_or_functions_that_return_one(what: str, bad: Any) -> None:
    net, x = model(), torch.randn(5, 4).double()
    settings: dict[str, Any] = {"tau": TAU, "per": "sample"}
    with pytest.raises((InputError, InputTypeError), match=f"{what}"):
        penalise_(model(), x, **settings | {what: bad})
    penalise_(net, x, **settings | {what: (lambda step: bad) if what == "tau" else lambda: bad})
    with pytest.raises(InputError, match=f"The function {what} of the penal connection returned"):
        net(x)


def work(rank: int, folder: Path) -> None:
    for order in ("penalised first", "wrapped first"):
        net, x = model(), torch.randn(8, 4).double()
        wrapped = DistributedDataParallel(net) if order == "wrapped first" else net
        penalise_(net, x, tau=TAU, per="sample")
        if order == "penalised first":
            wrapped = DistributedDataParallel(net)
        found = gradients(net, wrapped(x[4 * rank : 4 * rank + 4]).square().mean())
        torch.save(found, folder / f"{order}{rank}.pt")


@pytest.mark.slow
def test_two_processes_find_the_gradient_of_one(tmp_path: Path) -> None:
    two_processes(work, tmp_path)
    net, x = model(), torch.randn(8, 4).double()
    wanted = gradients(net, net.explicit(x))
    files = list(tmp_path.glob("*first*.pt"))
    assert len(files) == 4
    for file in files:
        torch.testing.assert_close(torch.load(file), wanted, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("inner_first", [True, False])
def test_an_addition_belongs_to_one_connection(inner_first: bool) -> None:
    net, x = model(), torch.randn(5, 4).double()
    first, second = (net.blocks[0], net) if inner_first else (net, net.blocks[0])
    penalise_(first, x, tau=TAU)
    with pytest.raises(InputError, match=r"belong to the penal connection of another module"):
        penalise_(second, x, tau=TAU)
    first.penal_connection.remove()
    penalise_(second, x, tau=TAU)


def test_a_replaced_block_is_refused() -> None:
    """Without hooks its additions would have no penalty; within a wrapper it keeps them."""
    net, x = model(), torch.randn(5, 4).double()
    wanted = gradients(net, net.explicit(x))
    penalise_(net, x, tau=TAU, per="sample")
    inner = net.blocks[0]
    net.blocks[0] = nn.Sequential(inner)
    torch.testing.assert_close(gradients(net, net(x).square().mean()), wanted)
    net.blocks[0] = Block().double()
    with pytest.raises(UnsupportedError, match=r"'blocks\.0' of Stack was replaced after penal"):
        net(x)
    net.blocks[0] = inner
    torch.testing.assert_close(gradients(net, net(x).square().mean()), wanted)


def test_two_threads_do_not_run_one_penalised_model_at_once() -> None:
    """The second one is refused, and the first one keeps its gradient."""
    net, x = model(), torch.randn(5, 4).double()
    wanted = gradients(net, net.explicit(x))
    penalise_(net, x, tau=TAU, per="sample")
    refused: list[BaseException] = []

    def other() -> None:
        try:
            net(x)
        except UnsupportedError as error:
            refused.append(error)

    def meanwhile(*_: object) -> None:
        thread = Thread(target=other)
        thread.start()
        thread.join()

    handle = net.blocks[1].register_forward_pre_hook(meanwhile)
    torch.testing.assert_close(gradients(net, net(x).square().mean()), wanted)
    assert len(refused) == 1 and "give each thread a copy" in str(refused[0])
    handle.remove()
    meanwhile()
    assert len(refused) == 1
