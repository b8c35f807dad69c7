"""Path norms against enumeration, against a forward pass written by hand, and
beyond the range of floats.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch
from cases import CASES, mlp, network
from oracles.alignment import aligned
from oracles.networks import OpRNN
from oracles.pathsets import enumerate_paths
from torch import Tensor, nn

import pathspace as ps
from pathspace.paths.norms import path_norm, path_statistics


def by_enumeration(model: nn.Module, args: tuple[Tensor, ...], p: float) -> float:
    graph = ps.trace(model, *args)
    paths = aligned(graph, enumerate_paths(model, *args))
    logs = graph.weights().abs().log().numpy()
    return float(np.exp(p * (paths @ logs)).sum()) ** (1 / p)


@pytest.mark.parametrize("p", [1, 2, 0.5])
@pytest.mark.parametrize("widths", [(3, 4, 2), (2, 3, 5, 2), (2, 4, 1, 3, 2)])
def test_norms_of_multilayer_networks_are_sums_over_enumerated_paths(
    widths: tuple[int, ...], p: float
) -> None:
    model, x = mlp(*widths), torch.randn(1, widths[0])
    assert path_norm(ps.trace(model, x), p) == pytest.approx(
        by_enumeration(model, (x,), p), rel=1e-12
    )


def test_norms_of_one_recurrent_layer_are_sums_over_enumerated_paths() -> None:
    """Read at the last step, every unrolled path passes other weights, in other numbers."""
    model, x = OpRNN(2, 1, 2, batch_first=True, bias=False), torch.randn(1, 5, 2)
    for p in (1, 2):
        assert path_norm(ps.trace(model, x), p) == pytest.approx(
            by_enumeration(model, (x,), p), rel=1e-12
        )


class Reference(nn.Module):
    """The all-positive network of a convolutional one, written by hand: sums for
    maxima, affine batch norms.
    """

    def __init__(self, model: nn.Sequential) -> None:
        super().__init__()
        self.layers = copy.deepcopy(model).double()
        for module in self.layers.modules():
            for parameter in module.parameters(recurse=False):
                if not isinstance(module, nn.BatchNorm2d):
                    parameter.data.abs_()

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if isinstance(layer, nn.MaxPool2d):
                x = (
                    nn.functional.avg_pool2d(x, layer.kernel_size, layer.stride, layer.padding)
                    * layer.kernel_size**2
                )
            elif isinstance(layer, nn.BatchNorm2d):
                gain = layer.weight / (layer.running_var + layer.eps).sqrt()
                shift = (layer.bias - gain * layer.running_mean).abs()
                x = x * gain.abs()[:, None, None] + shift[:, None, None]
            elif not isinstance(layer, nn.ReLU):
                x = layer(x)
        return x


def test_norms_of_convolutional_networks_are_forward_passes() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(3, 2, 1),
        nn.Conv2d(4, 5, 2),
        nn.ReLU(), nn.AvgPool2d(2), nn.Conv2d(5, 6, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1),
        nn.Flatten(), nn.Linear(6, 2),
    )  # fmt: skip
    model(torch.randn(16, 3, 12, 12))
    nn.init.normal_(model[1].weight)
    x = torch.randn(1, 3, 12, 12)
    graph = ps.trace(model.eval(), x)
    with torch.no_grad():
        expected = float(Reference(model)(torch.ones_like(x).double()).sum())
    assert path_norm(graph) == pytest.approx(expected, rel=1e-12)
    twice = ps.trace(model, torch.randn(2, 3, 12, 12))
    assert path_norm(twice) == pytest.approx(expected, rel=1e-12)
    with pytest.raises(ps.UnsupportedError, match="eval"):
        path_norm(ps.trace(model.train(), torch.randn(2, 3, 12, 12)))


POOLS = {
    "overhanging means": (nn.AvgPool1d(2, ceil_mode=True), 5),
    "means of unequal windows": (nn.AvgPool1d(3, 2, 1, count_include_pad=False), 6),
    "linear upsampling": (nn.Upsample(scale_factor=1.7, mode="linear"), 5),
}


@pytest.mark.parametrize("name", POOLS)
@pytest.mark.parametrize("p", [1, 2, 0.5])
def test_coefficients_of_fixed_linear_maps_are_weights_on_paths(name: str, p: float) -> None:
    layer, length = POOLS[name]
    model, x = (
        nn.Sequential(nn.Conv1d(1, 2, 1, bias=False), nn.ReLU(), layer).double(),
        torch.randn(1, 1, length).double(),
    )
    matrix = torch.autograd.functional.jacobian(
        lambda row: layer(row[None, None])[0, 0], torch.zeros(length).double()
    )
    weights = float((model[0].weight.detach().abs() ** p).sum())
    expected = (weights * float((matrix.abs() ** p).sum())) ** (1 / p)
    assert path_norm(ps.trace(model, x), p) == pytest.approx(expected, rel=1e-12)


ENDINGS = {
    "sigmoid": nn.Sigmoid(), "relu6": nn.ReLU6(), "softmax": nn.Softmax(-1), "gelu": nn.GELU(),
    "quotient": None
}  # fmt: skip


class Ended(nn.Module):
    """A body, something without paths, and a head."""

    def __init__(self, end: nn.Module | None) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 4))
        self.end, self.head = end, nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x)
        return self.head(x / x.sum(-1, keepdim=True) if self.end is None else self.end(x))


@pytest.mark.parametrize("name", ENDINGS)
@pytest.mark.parametrize("p", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_the_norm_of_a_part(name: str, p: float) -> None:
    """The body alone; all paths that end somewhere are those of the body and those of the head."""
    model, x = Ended(ENDINGS[name]).double(), torch.randn(1, 3).double()
    body, head = (
        path_norm(model.body, x, p=p),
        path_norm(model.head, torch.randn(1, 4).double(), p=p),
    )
    with pytest.raises(ps.UnsupportedError, match="until=") as caught:
        path_norm(model, x, p=p)
    assert len(str(caught.value).splitlines()) == 1
    assert path_norm(model, x, p=p, until="body") == pytest.approx(body, rel=1e-12)
    if model.end is not None:
        assert path_norm(ps.trace(model, x), p, until="end") == pytest.approx(body, rel=1e-12)
        fixed = (body**p + head**p) ** (1 / p)
        assert path_norm(model, x, p=p, until="fixed") == pytest.approx(fixed, rel=1e-12)
    inner = path_norm(nn.Sequential(*model.body[:2]), x, p=p)
    assert path_norm(model, x, p=p, until="body.1") == pytest.approx(inner, rel=1e-12)
    with pytest.raises(ps.InputError, match="body"):
        path_norm(model, x, until="nowhere")


def lengths(net: Any, x: Tensor) -> Tensor:
    """Roots and quotients between layers: features over their length, and a length itself."""
    x = net.second(net.first(x).relu().square().sqrt())
    return net.third(x / x.square().sum(-1, keepdim=True).sqrt())


def test_all_paths_that_end_do_not_feel_the_scales_of_units() -> None:
    layers = {"first": nn.Linear(3, 4), "second": nn.Linear(4, 4), "third": nn.Linear(4, 2)}
    model, x = network(lengths, **layers).double(), torch.randn(1, 3).double()
    graph = ps.trace(model, x)
    before = graph.path_norm(2, until="fixed")
    ps.rescale_(model, graph, torch.randn(graph.num_units).double())
    assert graph.path_norm(2, until="fixed") == pytest.approx(before, rel=1e-12)
    with pytest.raises(ps.UnsupportedError, match="sqrt"):
        graph.path_norm(2)


@pytest.mark.parametrize(
    "end", [nn.Sigmoid(), nn.ReLU6(), nn.Tanh(), nn.GELU(), nn.Softplus(), nn.Hardswish()]
)
def test_bounds_hold(end: nn.Module) -> None:
    model = Ended(end).double()
    bound = path_norm(model, torch.randn(1, 3).double(), bound=True)
    for _ in range(50):
        x, y = torch.randn(2, 1, 3).double()
        moved = float((model(x) - model(y)).detach().abs().sum())
        assert moved <= bound * float((x - y).abs().max())


@pytest.mark.parametrize(
    "name",
    [
        "mlp_prelu",
        "mlp_prelu_channels",
        "residual_mlp",
        "dense_mlp",
        "gated_product",
        "split_branches",
        "slices_and_flip",
    ],
)
def test_norms_of_branching_networks(name: str) -> None:
    """Enumerated path by path; and a rescaled network has the same norm."""
    model, args = CASES[name]()
    model = model.double()
    args = tuple(arg.double()[:1] for arg in args)
    graph = ps.trace(model, *args)
    for p in (1, 2):
        assert path_norm(graph, p) == pytest.approx(by_enumeration(model, args, p), rel=1e-10)
    before = path_norm(graph)
    ps.rescale_(model, graph, torch.randn(graph.num_units).double())
    assert path_norm(graph) == pytest.approx(before, rel=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("size", [1e4, 1e-4])
def test_norms_stay_finite_where_floats_do_not(size: float) -> None:
    depth, width = 120, 3
    model = mlp(*[width] * (depth + 1), bias=False)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(size)
    graph = ps.trace(model, torch.randn(1, width))
    exact = (depth + 1) * math.log(width) + depth * math.log(size)
    assert path_norm(graph, log=True) == pytest.approx(exact, rel=1e-6)
    if size > 1:
        with pytest.raises(ps.InputError, match="log=True"):
            path_norm(graph)
    else:
        assert path_norm(graph) == 0.0
    statistics = path_statistics(graph.skeleton())
    assert statistics.median == pytest.approx(depth * math.log(size), rel=1e-6)
    assert math.isfinite(statistics.log_norm)


@pytest.mark.parametrize(
    "name", ["mlp_2x3x5x2", "residual_cnn", "rnn_op", "gated_product", "tied_transposed"]
)
def test_statistics_are_those_of_the_values(name: str) -> None:
    model, args = CASES[name]()
    skeleton = ps.trace(model, *args).skeleton("magnitude")
    values = skeleton.basis().values().abs()
    found = path_statistics(skeleton, p=2)
    logs = values[values > 0].log()
    assert found.count == len(values)
    assert found.zeros == int((values == 0).sum())
    assert found.log_norm == pytest.approx(float(values.square().sum().log()) / 2, rel=1e-9)
    assert found.mean == pytest.approx(float(logs.mean()), rel=1e-9)
    assert found.largest == pytest.approx(float(logs.max()), rel=1e-9, abs=1e-9)
    assert found.smallest == pytest.approx(float(logs.min()), rel=1e-9)
    assert found.to_dict()["p"] == 2


def test_what_has_no_path_norm_is_refused() -> None:
    model, args = CASES["mlp_gelu"]()
    with pytest.raises(ps.UnsupportedError, match="gelu") as caught:
        path_norm(ps.trace(model, *args))
    assert len(str(caught.value).splitlines()) == 1
    model, args = CASES["mlp_3x4x2"]()
    for function in (path_norm, lambda graph, p: path_statistics(graph.skeleton(), p)):
        with pytest.raises(ps.InputError, match="positive"):
            function(ps.trace(model, *args), 0)
