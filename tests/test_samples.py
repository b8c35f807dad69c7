"""Samples of the null-space test are derivatives of the model itself, at any
geometry and at other sizes.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pathspace as ps
from pathspace.evidence.convolutions import convolved
from pathspace.evidence.logscales import family
from pathspace.evidence.sample_sizes import sample_sizes


@pytest.mark.parametrize(
    ("func", "shape", "kernel", "how"),
    [
        (F.conv1d, (2, 3, 9), (4, 3, 3), {"stride": 2, "padding": 2}),
        (F.conv1d, (2, 4, 9), (4, 1, 3), {"groups": 4, "dilation": 2}),
        (F.conv2d, (2, 4, 7, 6), (6, 2, 3, 2), {"stride": (2, 1), "padding": (1, 0), "groups": 2}),
        (F.conv2d, (1, 2, 2, 2), (3, 2, 3, 3), {"padding": 1}),
        (F.conv2d, (1, 2, 9, 9), (3, 2, 7, 7), {"stride": 4, "padding": 3}),
        (F.conv2d, (2, 2, 5, 5), (3, 2, 3, 3), {"padding": "same"}),
        (F.conv3d, (1, 2, 4, 5, 4), (2, 2, 2, 3, 1), {"padding": (0, 1, 0), "dilation": (1, 2, 1)}),
        (
            F.conv_transpose2d,
            (1, 4, 3, 3),
            (4, 2, 3, 3),
            {"stride": 2, "output_padding": 1, "groups": 2},
        ),
    ],
)
@pytest.mark.parametrize("together", [True, False])
def test_convolutions_have_the_gradients_of_torch(
    func: Any, shape: Any, kernel: Any, how: Any, together: bool
) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(shape).double().requires_grad_(), torch.randn(kernel).double()
    ours, theirs = convolved(func, x, weight, **how), func(x, weight, None, **how)
    assert torch.equal(ours, theirs)
    cotangents = torch.randn(3, *ours.shape).double()

    def ours_by_x(cotangent: Tensor) -> Tensor:
        return torch.autograd.grad(ours, x, cotangent, retain_graph=True)[0]

    found = (
        torch.vmap(ours_by_x)(cotangents)
        if together
        else torch.stack([*map(ours_by_x, cotangents)])
    )
    for row, cotangent in zip(found, cotangents, strict=True):
        torch.testing.assert_close(
            row, torch.autograd.grad(theirs, x, cotangent, retain_graph=True)[0]
        )


def shapes(model: nn.Module, *args: Tensor, **kwargs: Tensor) -> list[list[tuple[int, ...]]]:
    return [
        [tuple(tensor.shape) for inputs in sizes for tensor in (*inputs[0], *inputs[1].values())]
        for sizes in sample_sizes(model, args, kwargs)
    ]


def test_images_are_cut_as_far_as_the_model_takes_them() -> None:
    halves = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.PixelUnshuffle(8), nn.Flatten(2), nn.AdaptiveAvgPool1d(1)
    )
    assert shapes(halves, torch.randn(2, 3, 64, 64)) == [
        [(2, 3, 40, 40), (4, 3, 40, 40)],
        [(2, 3, 48, 48), (4, 3, 48, 48)],
        [(2, 3, 64, 64), (4, 3, 64, 64)],
        [(4, 3, 64, 64)],
        [(2, 3, 64, 64)],
    ]
    # a linear layer over all pixels, and features that only look like pixels
    assert shapes(
        nn.Sequential(nn.Flatten(), nn.Linear(3 * 50 * 50, 2)), torch.randn(9, 3, 50, 50)
    )[0][0][1:] == (
        3,
        50,
        50,
    )
    assert shapes(nn.Linear(64, 2), torch.randn(2, 7, 64))[0][0] == (2, 7, 64)


def test_batches_grow_where_the_model_lets_them() -> None:
    class Fixed(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.reshape(3, 4)

    assert shapes(nn.Linear(5, 2), torch.randn(3, 5)) == [[(3, 5), (32, 5)], [(32, 5)], [(3, 5)]]
    assert shapes(Fixed(), torch.randn(3, 4)) == [[(3, 4)]]


def test_many_weights_are_sampled_on_one_image_in_evaluation_mode() -> None:
    model = nn.Sequential(nn.Conv2d(3, 500, 27, padding=13), nn.ReLU(), nn.Conv2d(500, 2, 1))
    assert shapes(model.eval(), torch.randn(3, 3, 40, 40))[0] == [(1, 3, 33, 33), (2, 3, 33, 33)]
    assert shapes(model.train(), torch.randn(3, 3, 40, 40))[0] == [(3, 3, 33, 33), (6, 3, 33, 33)]


def test_a_batch_of_two_does_not_open_the_bracket() -> None:
    # batch norm of two numbers is 1 and -1, whatever they are
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2))
    certificate = ps.verify(model, torch.randn(2, 3), upper_bound=True)
    assert certificate.units_at_most == certificate.units == 8
    assert "32x3" in certificate.upper_bound["evidence"]


def test_batching_rules_that_are_wrong_are_not_used() -> None:
    """Torch's batched backward pass of ``cdist`` gives other gradients than one by one."""

    class Far(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = (
                nn.Sequential(nn.Linear(3, n), nn.ReLU(), nn.Linear(n, 6)) for n in (8, 7)
            )

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return torch.cdist(self.left(x), self.right(y))

    torch.manual_seed(0)
    certificate = ps.verify(Far(), torch.randn(4, 3), torch.randn(3, 3), upper_bound=True)
    assert certificate.units == certificate.units_at_most == 15


def test_norms_by_running_statistics_are_differentiated_by_them() -> None:
    torch.manual_seed(0)
    norm = nn.InstanceNorm2d(4, affine=True, track_running_stats=True)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), norm, nn.ReLU(), nn.Conv2d(4, 2, 1)).eval()
    certificate = ps.verify(model, torch.randn(2, 3, 6, 6), upper_bound=True)
    assert certificate.units == certificate.units_at_most == 8


def test_a_kernel_of_which_few_taps_are_used_is_looked_at_by_channels() -> None:
    """Seen at one pixel, a depthwise kernel has a used tap and others: a
    third kind of log-scales.
    """
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 900, 1), nn.ReLU(), nn.Conv2d(900, 900, 5, padding=2, groups=900), nn.ReLU()
    )
    graph = ps.trace(model, torch.randn(2, 3, 1, 1), sizes="given")
    kernel = next(
        entry for entry in family(graph, model, statistics=True).entries if entry.name == "2.weight"
    )
    assert len(kernel.sides) == 3
    rows, columns, _, count = kernel.exchanged(torch.ones(kernel.shape, dtype=torch.bool))
    assert count == 2 * 900 == len(set(columns.tolist()))
    assert len(set(rows.tolist())) == sum(side.count for side in kernel.sides)
