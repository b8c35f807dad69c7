"""Modules and tensors where torch does not look for them: in lists, and under names of methods."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import network
from torch import Tensor, nn

import pathspace as ps
from pathspace.models.running import evaluate


def listed(blocks: Any, own: Callable[[Any], Any]) -> Any:
    """Blocks in a plain list or dictionary, their parameters in a list of torch's."""

    def forward(net: Any, x: Tensor) -> Tensor:
        for block in own(net):
            x = torch.relu(block(x))
        return net.head(x)

    model = network(forward, blocks=blocks, head=nn.Linear(4, 2))
    model.held = nn.ParameterList([p for block in own(model) for p in block.parameters()])
    return model


def blocks_in_a_list() -> Any:
    return listed([nn.Linear(3, 4), nn.Linear(4, 4)], lambda net: net.blocks)


def blocks_in_a_dictionary() -> Any:
    """A dictionary with tuples, and a block inside a block."""
    blocks = {"first": (nn.Sequential(nn.Linear(3, 4)), nn.Linear(4, 4))}
    return listed(blocks, lambda net: net.blocks["first"])


def tensors_in_a_list() -> Any:
    """Weights that ``forward`` reads from a list."""

    def forward(net: Any, x: Tensor) -> Tensor:
        return torch.relu(x @ net.read[0].T) @ net.read[1]["second"][0].T

    first, second = nn.Parameter(torch.randn(4, 3)), nn.Parameter(torch.randn(2, 4))
    return network(forward, first=first, second=second, read=[first, {"second": (second,)}])


def names_of_methods() -> Any:
    """Modules under names of methods of ``nn.Module``."""

    def forward(net: Any, x: Tensor) -> Tensor:
        first, norm, second = net._modules["modules"]
        return second(torch.relu(norm(first(x))))

    model = network(forward)
    layers = [nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)]
    model._modules["modules"] = nn.ModuleList(layers)
    return model


EVERY = pytest.mark.parametrize(
    "make", [blocks_in_a_list, blocks_in_a_dictionary, tensors_in_a_list, names_of_methods]
)


def example(make: Callable[[], nn.Module]) -> tuple[nn.Module, Tensor]:
    return make().eval(), torch.randn(5, 3)


@EVERY
def test_other_values_are_used_and_the_model_stays(make: Callable[[], nn.Module]) -> None:
    model, x = example(make)
    before = model(x)
    for name, parameter in model.named_parameters():
        changed = parameter.detach() + 1
        outputs = evaluate(model, {name: changed}, (x,))
        with torch.no_grad():
            parameter += 1
            assert torch.equal(outputs, model(x)), name
            parameter -= 1
    torch.testing.assert_close(model(x), before)


@EVERY
def test_a_rescaling_that_changes_outputs_is_seen(make: Callable[[], nn.Module]) -> None:
    model, x = example(make)
    assert ps.verify(model, x).holds
    assert ps.trace(model, x).num_units >= 4


@EVERY
def test_removal_gives_what_masking_gives(make: Callable[[], nn.Module]) -> None:
    model, x = example(make)
    groups = ps.channels(model, x)
    smaller, masked = groups.remove(keep=0.5), groups.masked(keep=0.5)
    torch.testing.assert_close(smaller(x), masked(x))
    assert sum(p.numel() for p in smaller.parameters()) < sum(p.numel() for p in model.parameters())


def test_what_no_optimizer_trains_is_said() -> None:
    model, x = example(blocks_in_a_list)
    del model.held
    with pytest.warns(UserWarning, match=r"Network holds modules .* blocks\[0\], blocks\[1\];"):
        graph = ps.trace(model, x)
    assert set(graph.parameters) == {"head.weight", "head.bias"}


def test_nothing_is_said_of_modules_that_are_registered_or_not_run() -> None:
    model, x = example(blocks_in_a_list)
    model.teacher = [nn.Linear(3, 2)]  # type: ignore[assignment]
    model.register_buffer("shift", torch.ones(3))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ps.trace(model, x)
