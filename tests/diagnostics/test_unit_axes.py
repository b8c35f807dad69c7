"""Units are counted along the axis of channels or features, in every layout."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from zoo.attention import Patches

from pathspace.diagnostics import cost, signal
from pathspace.diagnostics.shared.unit_axes import unit_axis

MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], list[int]]] = {
    "images": (lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()), (2, 3, 8, 9), [4, 4]),
    "instance norm": (lambda: nn.Sequential(nn.InstanceNorm2d(3), nn.ReLU()), (3, 8, 9), [3, 3]),
    "features": (lambda: nn.Sequential(nn.Linear(3, 4), nn.ReLU()), (2, 7, 3), [4, 4]),
    "flattened": (lambda: nn.Sequential(nn.Conv1d(3, 4, 2), nn.Flatten()), (2, 3, 5), [4, 16]),
    "one number": (lambda: nn.Sequential(nn.Linear(3, 1), nn.Flatten(0)), (5, 3), [1, 5]),
    "patches": (lambda: nn.Sequential(Patches(6, 4), nn.GELU()), (2, 3, 16, 16), [6, 6]),
}


@pytest.mark.parametrize("name", MODELS)
def test_units_are_counted_where_they_are(name: str) -> None:
    build, shape, units = MODELS[name]
    assert signal(build(), torch.randn(shape), probes=2).column("units") == units


@pytest.mark.parametrize("shape", [(1, 3, 8, 9), (3, 8, 9)])
def test_dead_channels_are_dead_with_and_without_a_batch(shape: tuple[int, ...]) -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3))
    with torch.no_grad():
        net[0].weight[:2], net[0].bias[:2] = 0, -1
    assert signal(net, torch.randn(shape), probes=2).column("dead") == [2, 2, 0]


def test_a_single_sample_has_one_axis() -> None:
    assert unit_axis(nn.Linear(2, 3), torch.ones(3)) == 0
    assert unit_axis(nn.ReLU(), torch.ones(2, 3)) is None


@pytest.mark.parametrize("groups", [1, 4, 8])
@pytest.mark.parametrize("kind", [nn.Conv2d, nn.ConvTranspose2d])
def test_gradients_of_grouped_convolutions_take_as_many_products_as_they_do(
    kind: type[nn.Module], groups: int
) -> None:
    """The gradient of the weight, and that of the input where it is asked for."""
    last = kind(8, 16, 3, groups=groups, bias=False)
    places = 6 * 6 if kind is nn.Conv2d else 8 * 8
    products = places * 9 * 8 * 16 // groups
    alone = cost(last, torch.randn(1, 8, 8, 8))
    assert (alone.forward, alone.multiplications) == (products, 2 * products)
    first = nn.Conv2d(8, 8, 1, bias=False)
    both = cost(nn.Sequential(first, last), torch.randn(1, 8, 8, 8))
    assert both.multiplications == 3 * products + 2 * 8 * 8 * 8 * 8


def test_frozen_parameters_take_memory_and_their_gradients_none() -> None:
    model = nn.Sequential(nn.Linear(100, 100), nn.ReLU(), nn.Linear(100, 10))
    whole = cost(model, torch.randn(4, 100))
    model[0].requires_grad_(False)
    part = cost(model, torch.randn(4, 100))
    assert whole.bytes - part.bytes == 4 * 100 * 101 + 4 * (whole.saved - part.saved)
