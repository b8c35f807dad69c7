"""Graphs without writes compute what the code computes that writes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import network
from torch import Tensor, nn

from pathspace.capture.capture import capture
from pathspace.capture.captured import Captured, place
from pathspace.capture.writes import writes
from tests.capture.test_in_place import UNITS, Written


def outputs(captured: Captured, inputs: list[Tensor]) -> list[Tensor]:
    """The outputs of a captured graph, run with the model's own tensors."""
    held = {"parameter": captured.parameters, "buffer": captured.buffers}
    given = iter(inputs)
    values = []
    for node in captured.graph.graph.nodes:
        if node.op == "placeholder":
            kind, name = captured.sources[node.name]
            own = held.get(kind, captured.constants).get(name if kind in held else node.name)
            values.append(next(given) if own is None else own)
    return captured.without_updates(captured.graph(*values))


@torch.no_grad()
@pytest.mark.parametrize("function", UNITS, ids=lambda function: function.__name__)
def test_the_graph_computes_what_the_code_computes(function: Callable[[Tensor], Tensor]) -> None:
    model, x = Written(function).double(), torch.randn(5, 3).double()
    captured = capture(model, (x,))
    assert not any(map(writes, captured.graph.graph.nodes))
    (found,) = outputs(captured, [x.clone()])
    torch.testing.assert_close(found, model(x.clone()))


def parts(_: nn.Module, x: Tensor) -> tuple[Tensor, ...]:
    """Writes into parts of parts, and reads them under other names."""
    y = x * 2
    with torch.no_grad():
        first, second = y.chunk(2, dim=1)
        first.t()[0] += 1
        second.unbind(1)[1].mul_(3)
    whole = torch.zeros(x.shape[0], 2, 4)
    whole[:, 1] = y
    whole.permute(2, 0, 1)[3, :, 0] = x[:, 0]
    whole.view(-1, 2)[0].fill_(7)
    first.zero_()
    return y.clone(), whole, first + 1, second.clone()


def test_parts_of_parts_are_written() -> None:
    model, x = network(parts), torch.randn(3, 4)
    with torch.no_grad():
        found, wanted = outputs(capture(model, (x,)), [x.clone()]), model(x.clone())
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other)


def kept(net: Any, x: Tensor) -> Tensor:
    """Changes a buffer, another one in place, and a parameter."""
    y = net.layer(x)
    net.count += 1
    net.mean = y.detach().mean(0)
    with torch.no_grad():
        net.layer.weight.clamp_(-1, 1)
    return y


def test_what_a_call_changes_is_known_and_stays() -> None:
    model, x = network(kept, layer=nn.Linear(3, 2)), torch.randn(4, 3)
    model.register_buffer("mean", torch.zeros(2))
    model.register_buffer("count", torch.tensor(0))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    captured = capture(model, (x,))
    assert captured.overwritten == {"mean", "count"}
    assert list(captured.written.values()) == ["layer.weight"]
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    (linear,) = (node for node in captured.graph.graph.nodes if "linear" in node.name)
    module, line = place(linear)
    assert module == "layer" and line.startswith(f"{__file__}:")
