"""Numbers that code reads from buffers: constants as long as the same call does not write them."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import pathspace as ps


class Codec(nn.Module):
    """A convolution that computes its padding from buffers, as audio codecs do."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Conv1d(2, 4, 5, stride=2), nn.Conv1d(4, 3, 1)
        self.register_buffer("stride", torch.tensor(2))
        self.register_buffer("kernel", torch.tensor(5))

    def forward(self, x: Tensor) -> Tensor:
        total = self.kernel - self.stride
        frames = torch.ceil((x.shape[-1] - self.kernel + total) / self.stride + 1).long() - 1
        more = frames * self.stride + self.kernel - total - x.shape[-1]
        left = total // 2
        assert max(left, total - left + more) >= more
        return self.leave(torch.relu(self.enter(nn.functional.pad(x, (left, total - left + more)))))


@pytest.mark.parametrize("length", [7, 8, 11])
def test_padding_that_follows_from_buffers_is_followed(length: int) -> None:
    model, x = Codec().double(), torch.randn(2, 2, length, dtype=torch.float64)
    graph = ps.trace(model, x)
    assert graph.num_units == 4 and not graph.pinned
    (result,) = graph.captured.graph.graph.find_nodes(op="output")[0].args[0]
    assert result.meta["val"].shape == model(x).shape
    twin = copy.deepcopy(model)
    ps.rescale_(twin, graph, torch.randn(4, dtype=torch.float64))
    for given in (x, torch.cat([x, x], -1)[..., :-1]):
        assert torch.allclose(twin(given), model(given))


class Scaled(nn.Module):
    """Sets its scale from the first batch, and notes that it has."""

    def __init__(self, done: int) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 4), nn.Linear(4, 2)
        self.scale = nn.Parameter(torch.ones(4))
        self.register_buffer("done", torch.tensor(done, dtype=torch.uint8))

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        if self.done.item() == 0:
            with torch.no_grad():
                self.scale.copy_(1 / h.std(0))
                self.done.fill_(1)
        return self.b(torch.relu(h * self.scale))


def test_a_start_that_depends_on_data_is_traced_once_it_is_over() -> None:
    x = torch.randn(5, 3)
    with pytest.raises(ps.CaptureError, match="depends on the values of tensors"):
        ps.trace(Scaled(0), x)
    assert ps.trace(Scaled(1), x).num_units == 8


class Counter(nn.Module):
    """Decides by a buffer, in ways in which the call itself changes it."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.a, self.b, self.how = nn.Linear(3, 4), nn.Linear(4, 2), how
        self.count: Tensor
        self.register_buffer("count", torch.tensor(3))

    def number(self) -> int:
        count = self.count
        if self.how == "set":
            self.count = count + 1
        elif self.how == "written by a view":
            count.view(-1).add_(1)
            return int(count)
        elif self.how == "written later by a view":
            found = int(count)
            count.view(-1).add_(1)
            return found
        elif self.how == "drawn":
            return int(torch.randint_like(count, 9))
        elif self.how != "constant":
            doubled = count * 2
            if self.how == "written first":
                count += 1
            found = int(doubled // 2 if self.how == "derived" else count)
            if self.how != "written first":
                count += 1
            return found
        return int(count)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return self.b(torch.relu(h) if self.number() % 2 else torch.tanh(h))


@pytest.mark.parametrize(
    "how",
    [
        "written first",
        "written later",
        "written by a view",
        "written later by a view",
        "derived",
        "set",
        "drawn",
    ],
)
def test_numbers_that_differ_from_call_to_call_are_refused(how: str) -> None:
    model = Counter(how)
    with pytest.raises(ps.CaptureError, match="depends on the values of tensors"):
        ps.trace(model, torch.randn(2, 3))
    assert model.count == 3


def test_numbers_that_stay_are_read() -> None:
    assert ps.trace(Counter("constant"), torch.randn(2, 3)).num_units == 4


class Listed(nn.Module):
    """Goes through a mask of its own, or through numbers made in forward."""

    def __init__(self, how: str) -> None:
        super().__init__()
        mask = torch.tensor([True, False, True])
        if how == "buffer":
            self.register_buffer("mask", mask)
        else:
            self.mask = mask if how == "attribute" else None
        self.a, self.b = nn.Linear(2, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.arange(3) % 2 == 0 if self.mask is None else self.mask
        chosen = [x[:, i] for i, wanted in enumerate(mask) if wanted]
        return self.b(torch.relu(self.a(torch.stack(chosen, 1))))


@pytest.mark.parametrize("how", ["buffer", "attribute", "made"])
def test_loops_over_numbers_that_stay_are_followed(how: str) -> None:
    graph = ps.trace(Listed(how), torch.randn(5, 3))
    assert graph.num_units == 4 and not graph.pinned


class Acting(nn.Module):
    """An actor, whose distribution checks what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.actor = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))

    def forward(self, x: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        chances = torch.distributions.Categorical(logits=self.actor(x))
        return chances.log_prob(action), chances.entropy()


def test_checks_of_distributions_decide_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    # (torch.compile switches them off for good)
    monkeypatch.setattr(torch.distributions.Distribution, "_validate_args", True)
    model, given = Acting(), (torch.randn(5, 4), torch.randint(0, 3, (5,)))
    assert ps.trace(model, *given).num_units == 8 and ps.verify(model, *given).holds
    with pytest.raises(ValueError, match="within the support"):
        model(given[0], torch.full((5,), 7))


MASK = torch.arange(40) % 3 > 0
MASKS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "columns": lambda h, mask: h[:, mask],
    "the others": lambda h, mask: h[:, ~mask],
    "of two dimensions": lambda h, mask: h.unflatten(1, (8, 5))[:, mask.unflatten(0, (8, 5))],
    "beside positions": lambda h, mask: h.unflatten(1, (4, 10))[:, mask[:4], torch.tensor([1])],
    "repeated": lambda h, mask: h[:, mask] + h[:, mask].flip(1),
}


class Masked(nn.Module):
    """Features picked by a mask that is a buffer, which a call may write."""

    def __init__(self, name: str, writes: bool = False) -> None:
        super().__init__()
        self.pick, self.writes = MASKS[name], writes
        self.register_buffer("mask", MASK.clone())
        self.a = nn.Linear(3, 40)
        self.b = nn.Linear(self.pick(torch.zeros(1, 40), self.mask).shape[1], 2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.b(self.pick(torch.relu(self.a(x)), self.mask))
        if self.writes:
            self.mask.copy_(self.mask.flip(0))
        return y


@pytest.mark.parametrize("name", MASKS)
def test_features_picked_by_a_known_mask_have_their_units(name: str) -> None:
    model, x = Masked(name).double(), torch.randn(5, 3, dtype=torch.float64)
    certificate = ps.verify(model, x)
    assert certificate.holds, certificate
    picked = model.pick(torch.arange(40.0)[None], MASK).unique().numel()
    # (of the sum with its reverse, two features share a unit)
    picked = 13 if name == "repeated" else picked
    assert certificate.units == picked
    graph = ps.trace(model, x)
    assert not graph.pinned and graph.num_units == picked


def test_a_mask_that_the_call_writes_is_not_relied_on() -> None:
    model, x = Masked("columns", writes=True), torch.randn(5, 3)
    graph = ps.trace(model, x)
    twin = copy.deepcopy(model)
    ps.rescale_(twin, graph, torch.randn(graph.num_units, dtype=torch.float64))
    for _ in range(2):
        assert torch.allclose(twin(x), model(x), atol=1e-5)
