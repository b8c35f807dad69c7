"""Numbers that code reads from buffers, and rows that data choose."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import mlp, network
from rescaled import change, traced
from torch import Tensor, nn

import pathspace as ps
from pathspace.diagnostics import MarkovChain, degeneracy, report


def holding(
    forward: Callable[[Any, Tensor], Tensor],
    inputs: int = 3,
    units: int = 4,
    hidden: int | None = None,
    **buffers: Tensor,
) -> Any:
    """Two layers, buffers, and code of one's own."""
    layers = {"a": nn.Linear(inputs, units), "b": nn.Linear(hidden or units, 2)}
    model = network(forward, **layers)
    for name, buffer in buffers.items():
        model.register_buffer(name, buffer.clone())
    return model


def codec(net: Any, x: Tensor) -> Tensor:
    """A convolution that computes its padding from buffers, as audio codecs do."""
    total = net.kernel - net.stride
    frames = torch.ceil((x.shape[-1] - net.kernel + total) / net.stride + 1).long() - 1
    more = frames * net.stride + net.kernel - total - x.shape[-1]
    left = total // 2
    assert max(left, total - left + more) >= more
    h = torch.nn.functional.pad(x, (left, total - left + more))
    return net.leave(torch.relu(net.enter(h)))


@pytest.mark.parametrize("length", [7, 8, 11])
def test_padding_that_follows_from_buffers_is_followed(length: int) -> None:
    model = network(codec, enter=nn.Conv1d(2, 4, 5, stride=2), leave=nn.Conv1d(4, 3, 1)).double()
    model.register_buffer("stride", torch.tensor(2))
    model.register_buffer("kernel", torch.tensor(5))
    x = torch.randn(2, 2, length).double()
    graph = traced(model, x, units=4)
    assert not graph.pinned
    (result,) = graph.captured.graph.graph.find_nodes(op="output")[0].args[0]
    assert result.meta["val"].shape == model(x).shape
    assert change(model, graph, torch.cat([x, x], -1)[..., :-1]) < 1e-9


def written_first(net: Any) -> int:
    net.count += 1
    return int(net.count)


def derived(net: Any) -> int:
    doubled = net.count * 2
    net.count += 1
    return int(doubled // 2)


def drawn(net: Any) -> int:
    return int(torch.randint_like(net.count, 9))


def counting(number: Callable[[Any], int]) -> Any:
    """Decides by a buffer, which the call may change."""
    return holding(
        lambda net, x: net.b(torch.relu(net.a(x)) if number(net) % 2 else torch.tanh(net.a(x))),
        count=torch.tensor(3),
    )


@pytest.mark.parametrize("number", [written_first, derived, drawn])
def test_numbers_that_differ_from_call_to_call_are_refused(number: Callable[[Any], int]) -> None:
    model = counting(number)
    with pytest.raises(ps.CaptureError, match="depends on the values of tensors"):
        ps.trace(model, torch.randn(2, 3))
    assert model.count == 3


def test_numbers_that_stay_are_read() -> None:
    assert ps.trace(counting(lambda net: int(net.count)), torch.randn(2, 3)).num_units == 4


CHOSEN = torch.tensor([True, False, True])


@pytest.mark.parametrize("mask", [None, CHOSEN, lambda: torch.arange(3) % 2 == 0])
def test_loops_over_numbers_that_stay_are_followed(mask: Any) -> None:
    """A mask that is a buffer, one from outside, or one made in forward."""

    def forward(net: Any, x: Tensor) -> Tensor:
        own = net.mask if mask is None else mask() if callable(mask) else mask
        chosen = [x[:, i] for i, wanted in enumerate(own) if wanted]
        return net.b(torch.relu(net.a(torch.stack(chosen, 1))))

    graph = ps.trace(holding(forward, inputs=2, mask=CHOSEN), torch.randn(5, 3))
    assert graph.num_units == 4 and not graph.pinned


def acting(net: Any, x: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
    """An actor, whose distribution checks what it is given."""
    chances = torch.distributions.Categorical(logits=net.actor(x))
    return chances.log_prob(action), chances.entropy()


def test_checks_of_distributions_decide_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    # (torch.compile switches them off for good)
    monkeypatch.setattr(torch.distributions.Distribution, "_validate_args", True)
    model = network(acting, actor=mlp(4, 8, 3))
    given = torch.randn(5, 4), torch.randint(0, 3, (5,))
    assert ps.trace(model, *given).num_units == 8 and ps.verify(model, *given).holds
    with pytest.raises(ValueError, match="within the support"):
        model(given[0], torch.full((5,), 7))


MASK = torch.arange(40) % 3 > 0
MASKS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "columns": lambda h, mask: h[:, mask],
    "of two dimensions": lambda h, mask: h.unflatten(1, (8, 5))[:, mask.unflatten(0, (8, 5))],
    "repeated": lambda h, mask: h[:, mask] + h[:, mask].flip(1),
}


def masked(name: str) -> Any:
    """Features picked by a mask that is a buffer."""
    pick = MASKS[name]
    hidden = pick(torch.zeros(1, 40), MASK).shape[1]
    return holding(
        lambda net, x: net.b(pick(torch.relu(net.a(x)), net.mask)),
        units=40, hidden=hidden, mask=MASK,
    ).double()  # fmt: skip


@pytest.mark.parametrize("name", MASKS)
def test_features_picked_by_a_known_mask_have_their_units(name: str) -> None:
    model, x = masked(name), torch.randn(5, 3).double()
    picked = MASKS[name](torch.arange(40.0)[None], MASK).unique().numel()
    # (of the sum with its reverse, two features share a unit)
    picked = 13 if name == "repeated" else picked
    assert not traced(model, x, units=picked).pinned
    assert ps.verify(model, x).holds


# --- rows that data choose: by masks, by positions of what is not zero, by the values they hold


Use = Callable[[Any, Tensor, Tensor], Tensor]


def written(model: Any, x: Tensor, m: Tensor) -> Tensor:
    out = torch.zeros(len(x), 2, dtype=x.dtype)
    out[m] = model.b(model.a(x).relu()[m])
    return out


def own(model: Any, x: Tensor, _: Tensor) -> Tensor:
    h = model.a(x).relu()
    return model.b(h[h[:, 0] > 0])


# use, whether its path norm counts all rows that may be chosen
USES: dict[str, tuple[Use, bool]] = {
    "rows of the input": (lambda f, x, m: f.b(f.a(x[m]).relu()), True),
    "rows written": (written, True),
    "rows of the output": (lambda f, x, m: f.b(f.a(x).relu())[m].mean(0), True),
    "by own values": (own, True),
    "positions": (lambda f, x, m: f.b(f.a(x).relu())[m.nonzero()[:, 0]], False),
}


def choosing(use: str) -> nn.Module:
    """A function of the input and of a mask that it gives."""
    return network(
        lambda net, x: USES[use][0](net, x, x[..., 0] > 0), a=nn.Linear(3, 8), b=nn.Linear(8, 2)
    ).double()


@pytest.mark.slow
@pytest.mark.parametrize("use", USES)
def test_models_that_choose_rows_have_their_units(use: str) -> None:
    model, x = choosing(use), torch.randn(6, 3, dtype=torch.float64)
    graph = traced(model, x, units=8)
    assert not graph.pinned and change(model, graph, torch.randn(9, 3).double()) < 1e-9
    assert ps.verify(model, x).holds
    groups = ps.channels(model, x)
    # (the channel that decides stays)
    kept = 4 + (use == "by own values")
    assert sum(p.numel() for p in groups.remove(keep=0.5).parameters()) == kept * (3 + 1 + 2) + 2
    assert report(model, x) and degeneracy(model, x).rank and not len(MarkovChain.trace(model, x))


@pytest.mark.parametrize("use", USES)
def test_a_path_norm_counts_every_row_or_is_refused(use: str) -> None:
    model, x = choosing(use), torch.randn(6, 3, dtype=torch.float64)
    if USES[use][1]:
        assert ps.path_norm(model, x, batch_dim=None) > 1
    else:
        with pytest.raises(ps.UnsupportedError, match="how many positions there are"):
            ps.path_norm(model, x, batch_dim=None)
