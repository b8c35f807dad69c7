"""What is written into memory with several names is seen under all of them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import cases
import pytest
import torch
from rescaled import change, traced
from torch import Tensor, nn
from torch.nn import functional as F

import pathspace as ps

# two layers of 3 inputs and 4 units, and an operation between them
Written = partial(cases.Between, features=4, inputs=3, units=4)


def divided_slice(h: Tensor) -> Tensor:
    h = h.abs()
    h[:, :2].div_(h[:, 2:])
    return h


def divided_behind_a_transpose(h: Tensor) -> Tensor:
    h = h.abs()
    other, view = h.clone(), h.t()
    h /= other.flip(-1)
    return view.t()


def root_of_a_slice(h: Tensor) -> Tensor:
    h = h.abs()
    part = h.view(-1, 2, 2)
    part[:, 0].sqrt_()
    return h.square()


def added_into_zeros(h: Tensor) -> Tensor:
    sums = torch.zeros(h.shape[0], 4, dtype=h.dtype)
    sums[:, :2].add_(F.relu(h[:, 2:]))
    return sums + F.relu(h)


def saturated_slice(h: Tensor) -> Tensor:
    h = h + 0
    h[:, :2].tanh_()
    return h


def multiplied_without_gradient(h: Tensor) -> Tensor:
    h = h.abs()
    with torch.no_grad():
        h[:, :2].mul_(h[:, 2:])
    return h


def assigned_without_gradient(h: Tensor) -> Tensor:
    with torch.no_grad():
        result = torch.zeros_like(h)
        result[:, :2] = F.relu(h)[:, :2]
        result[:, 2:] = F.relu(h)[:, 2:]
    return result


def multiplied_in_a_region(h: Tensor) -> Tensor:
    h = h.abs()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=False):
        h[:, :2].mul_(h[:, 2:])
    return h


def only_name(h: Tensor) -> Tensor:
    return F.relu(h).mul_(2.0).neg_().clamp_(max=0.0)


# how many scales stay free
UNITS = {
    divided_slice: 4, divided_behind_a_transpose: 4, root_of_a_slice: 4, added_into_zeros: 2,
    saturated_slice: 2,
    multiplied_without_gradient: 4, assigned_without_gradient: 4, multiplied_in_a_region: 4,
    only_name: 4,
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("function", UNITS, ids=lambda function: function.__name__)
def test_what_is_written_is_seen_under_every_name(function: Callable[[Tensor], Tensor]) -> None:
    traced(Written(function).double(), torch.randn(5, 3).double(), units=UNITS[function])


def test_numbers_in_place_of_nan_are_constants() -> None:
    x = torch.cat([torch.randn(4, 3), -torch.ones(2, 3)]).double()
    # (a quotient may be infinite, in whose place the largest number would
    # stand: a constant as well)
    for nan, units in ((1.0, 0), (0.0, 4)):
        model = Written(
            lambda h, nan=nan: torch.nan_to_num(
                h.relu() * (h.relu() / h.relu()), nan=nan, posinf=0.0, neginf=0.0
            )
        ).double()
        traced(model, x, units=units)


def test_a_mean_that_is_not_filled_yet_is_no_mask() -> None:
    model, x = Written(lambda h: F.relu(h) - model.center).double(), torch.randn(5, 3).double()
    model.register_buffer("center", torch.zeros(1, 4).double())
    assert ps.trace(model, x).num_units == 0


@pytest.mark.parametrize(("kernel", "stride"), [(2, 2), (3, 2), (4, 4), (5, 3), (1, 1)])
def test_transposed_convolutions_with_one_tap_per_output(kernel: int, stride: int) -> None:
    front = nn.Linear(3, 8), nn.ReLU(), nn.Unflatten(1, (2, 2, 2))
    grow = nn.ConvTranspose2d(2, 3, kernel, stride)
    decoder = nn.Sequential(*front, grow, nn.ReLU(), nn.Conv2d(3, 1, 1)).double()
    x = torch.randn(4, 3).double()
    assert not traced(decoder, x, units=5).pinned
    assert ps.verify(decoder, x).holds


def test_parameters_in_the_same_memory_are_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    model[2].weight.data = model[0].weight.data
    with pytest.raises(
        ps.InputError, match=r"'0.weight' and '2.weight' in the same memory; make them one"
    ):
        ps.trace(model, torch.randn(2, 4))
    model[2].weight = model[0].weight
    assert ps.trace(model, torch.randn(2, 4)).num_weights == 16 + 8


def test_masks_that_torch_would_compare_are_taken_as_they_are() -> None:
    mask = nn.Transformer.generate_square_subsequent_mask(3)
    layers = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(4, 2, 4), 1, enable_nested_tensor=False
    )
    assert ps.trace(layers, torch.randn(3, 2, 4), kwargs={"mask": mask}).num_units == 13


@pytest.mark.parametrize("factor", [1, 0.5])
def test_weights_that_are_multiplied_in_place_keep_their_scales(factor: float) -> None:
    """As language models do before they compute in half precision."""

    def forward(net: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            net.b.weight.mul_(factor)
        return net.b(net.a(x).relu())

    x = torch.randn(5, 3).double()
    model = cases.network(forward, a=nn.Linear(3, 4), b=nn.Linear(4, 2)).double()
    certificate = ps.verify(copy.deepcopy(model), x, upper_bound=True)
    assert certificate.holds and certificate.units == certificate.units_at_most == 4
    assert change(model, ps.trace(model, x), x, x) < 1e-12


@pytest.mark.parametrize("groups", [1, 2])
def test_a_kernel_along_one_axis_leaves_scales_along_the_other(groups: int) -> None:
    """A kernel over time for each head, the same for all of the head's features."""

    def forward(net: Any, x: Tensor) -> Tensor:
        heads = net.a(x).unflatten(-1, (2, 3)).transpose(1, 2)
        return net.b((heads + net.along(heads)).relu().transpose(1, 2).flatten(2))

    along = nn.Conv2d(2, 2, (3, 1), padding=(1, 0), groups=groups, bias=False)
    model = cases.network(forward, a=nn.Linear(3, 6), b=nn.Linear(6, 2), along=along).double()
    x = torch.randn(4, 5, 3).double()
    # heads that are mixed share the scale of each feature, up to one factor for each head
    traced(model, x, units=6 if groups == 2 else 4)
    certificate = ps.verify(model, x, upper_bound=True)
    assert certificate.holds and certificate.units == certificate.units_at_most
