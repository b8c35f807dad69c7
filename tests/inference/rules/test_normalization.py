"""Units of normalisations: free as the model stands, eps included, or at eps = 0 only; and those
of groups of channels.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from cases import network
from descent import descend
from rescaled import change, traced
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

import pathspace as ps

EPS = 1e-3


def conv_net(eps: float = EPS) -> nn.Sequential:
    first = nn.Conv2d(1, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6, eps, momentum=0.2)
    second = nn.Conv2d(6, 5, 3), nn.BatchNorm2d(5, eps, momentum=0.2)
    return nn.Sequential(*first, nn.ReLU(), *second, nn.ReLU(), nn.Flatten(), nn.Linear(5 * 36, 10))


@pytest.fixture(scope="module")
def digits() -> tuple[nn.Sequential, Tensor]:
    """A small network as training leaves it: its running variances lie around eps."""
    torch.manual_seed(0)
    x = torch.tensor(load_digits().images[:256], dtype=torch.float32)[:, None] / 160
    y = torch.tensor(load_digits().target[:256])
    model = conv_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    descend(optimizer, lambda: F.cross_entropy(model(x), y), 60)
    assert float(model[1].running_var.median()) < 1e-2, model[1].running_var
    return model.eval(), x[:32]


def normal(graph: ps.ReductionGraph, seed: int = 0) -> Tensor:
    return torch.randn(
        graph.num_units, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )


@pytest.mark.parametrize("deviation", [0.0, 0.3, 1.0])
def test_a_trained_network_with_frozen_batch_norm_is_rescaled_exactly(
    digits: tuple[nn.Sequential, Tensor], deviation: float
) -> None:
    model, x = digits
    graph = ps.trace(model, x)
    assert graph.num_exact_units == graph.num_units == 22
    for _ in range(3):
        assert change(model, graph, x, spread=deviation) <= (1e-5 if deviation else 0)
        assert change(copy.deepcopy(model).double(), graph, x.double(), spread=deviation) <= 1e-12


def test_the_variance_may_become_negative_and_its_sum_with_eps_stays_positive(
    digits: tuple[nn.Sequential, Tensor],
) -> None:
    model, x = digits
    graph = ps.trace(model, x)
    small = ps.rescale_(copy.deepcopy(model), graph, torch.full((22,), -1.0))
    assert float(small[1].running_var.min()) < 0 < float((small[1].running_var + EPS).min())
    torch.testing.assert_close(small(x), model(x), rtol=1e-4, atol=1e-4)
    a, b = graph.gauge_affine(torch.full((22,), -1.0))["1.running_var"]
    torch.testing.assert_close(a * model[1].running_var + b, small[1].running_var)
    # everything else torch makes of such a network agrees
    fused = nn.utils.fuse_conv_bn_eval(small[0], small[1])
    torch.testing.assert_close(fused(x), small[1](small[0](x)), rtol=1e-4, atol=1e-4)


def test_rescaling_there_and_back_is_the_identity_and_compositions_add_up(
    digits: tuple[nn.Sequential, Tensor],
) -> None:
    model, x = digits
    double, graph = copy.deepcopy(model).double(), ps.trace(model, x)
    one, two = normal(graph, 1), normal(graph, 2)
    both = ps.rescale_(ps.rescale_(copy.deepcopy(double), graph, one), graph, two)
    at_once = ps.rescale_(copy.deepcopy(double), graph, one + two)
    back = ps.rescale_(both, graph, -one - two)
    for name, tensor in double.state_dict().items():
        torch.testing.assert_close(back.state_dict()[name], tensor, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(at_once.state_dict()[name].shape, tensor.shape)


def test_batch_norm_in_training_is_exact_at_eps_zero_only(
    digits: tuple[nn.Sequential, Tensor],
) -> None:
    model, x = digits
    training = copy.deepcopy(model).train()
    graph = ps.trace(training, x)
    assert (graph.num_units, graph.num_exact_units, len(graph.approximate)) == (22, 11, 11)
    assert change(training, graph, x) > 1e-3
    assert change(training, graph, x, exact=True) < 1e-5
    # in evaluation mode the same rescaling is exact, and steps of training move the
    # statistics of both alike
    assert change(copy.deepcopy(training).eval(), graph, x) < 1e-5
    phi = normal(graph)
    moved = ps.rescale_(copy.deepcopy(training), graph, phi)
    with torch.no_grad():
        for _ in range(3):
            training(x), moved(x)
    assert float((moved[1].running_var + EPS).min()) > 0
    scale = phi[graph.statistics[0].units - 1].exp()
    torch.testing.assert_close(
        moved[1].running_mean.double(), scale * training[1].running_mean.double()
    )


# what follows the first layer -> units, and how many of them are exact as the model stands
LAYERS: dict[str, tuple[Callable[[], nn.Module], int, int]] = {
    "nothing": (nn.ReLU, 6, 6),
    "layer norm": (lambda: nn.LayerNorm(6), 7, 6),
    "RMS norm": (lambda: nn.RMSNorm(6, 1e-5), 7, 6),
    "batch norm": (lambda: nn.BatchNorm1d(6), 12, 12),
    "batch norm without statistics": (lambda: nn.BatchNorm1d(6, track_running_stats=False), 12, 6),
}


@pytest.mark.parametrize("name", LAYERS)
def test_a_certificate_states_both_levels(name: str) -> None:
    make, units, exact = LAYERS[name]
    model, x = (
        nn.Sequential(nn.Linear(3, 6), make(), nn.ReLU(), nn.Linear(6, 2)).eval(),
        0.1 * torch.randn(16, 3),
    )
    certificate = ps.verify(model, x)
    graph = ps.trace(model, x)
    assert certificate.holds
    assert (
        (certificate.units, certificate.units_exact)
        == (graph.num_units, graph.num_exact_units)
        == (units, exact)
    )
    assert certificate.dimension_exact == graph.exact_dimension == graph.num_weights - exact
    document = json.loads(certificate.to_json())
    assert document["units_exact"] == exact and document["level"] == certificate.level
    levels = document["levels"]
    assert levels["exact"]["dimension"] == graph.num_weights - exact and levels["holds"]
    changes = {
        key: [entry["change"] for entry in levels[key]["changes"]] for key in ("exact", "all")
    }
    assert [entry["deviation"] for entry in levels["exact"]["changes"]] == [1.0, 3.0]
    assert max(changes["exact"]) < 1e-8
    assert (min(changes["all"]) > 1e-8) == (exact < units)
    # oracle: the same rescaling by hand, in float64
    double = copy.deepcopy(model).double()
    assert change(double, graph, x.double(), exact=True) < 1e-11
    assert (change(double, graph, x.double()) > 1e-8) == (exact < units)
    table = str(certificate)
    assert ("holds at eps = 0" if exact < units else "holds exactly") in " ".join(table.split())
    assert "exact units" in table


def product(net: Any, x: Tensor) -> Tensor:
    """The product of two layers is normalised: of their scales, only the ratio is free with eps."""
    x = (net.a(x) * net.b(x)).expand(-1, 4) * torch.linspace(0.5, 2, 4)
    return net.c(F.rms_norm(x, (4,), eps=EPS))


def test_of_multiplied_scales_the_exact_level_is_a_subspace() -> None:
    a, b = (nn.Linear(3, 1, bias=False) for _ in range(2))
    model, x = (
        network(product, a=a, b=b, c=nn.Linear(4, 2)).double(),
        0.1 * torch.randn(6, 3).double(),
    )
    graph = ps.trace(model, x)
    assert (graph.num_units, graph.num_exact_units) == (2, 1)
    assert abs(int(graph.exact.toarray().sum())) == 0 and np.abs(graph.exact.toarray()).max() == 1
    phi = torch.tensor([2.0, 0.0]).double()
    torch.testing.assert_close(graph.exact_part(phi), torch.tensor([1.0, -1.0]).double())
    assert change(model, graph, x, exact=True) < 1e-12 < 1e-3 < change(model, graph, x)
    assert ps.verify(model, x).units_exact == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_sum_that_its_type_cannot_hold_stays_positive(
    digits: tuple[nn.Sequential, Tensor], dtype: torch.dtype
) -> None:
    model, x = digits
    graph = ps.trace(model, x)
    tiny = ps.rescale_(copy.deepcopy(model).to(dtype), graph, torch.full((22,), -9.0))
    assert float((tiny[1].running_var.double() + EPS).min()) > 0
    assert bool(tiny(x.to(dtype)).isfinite().all())


def two(second: float) -> nn.Module:
    """One batch norm's statistics read by two calls, each with an eps of its own."""

    def forward(net: Any, x: Tensor) -> Tensor:
        norm = net.norm
        for layer, eps in ((net.a, EPS), (net.b, second)):
            x = F.batch_norm(
                layer(x), norm.running_mean, norm.running_var, norm.weight, norm.bias, eps=eps
            )
        return net.c(F.relu(x))

    a, b, c = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2)
    model = network(forward, a=a, b=b, c=c, norm=nn.BatchNorm1d(4))
    model.norm.running_var.uniform_(1e-4, 1e-2)
    return model.double().eval()


@pytest.mark.parametrize(("second", "units"), [(EPS, 8), (1e-5, 4)])
def test_norms_that_share_statistics_have_to_agree_on_eps(second: float, units: int) -> None:
    model, x = two(second), torch.randn(6, 3).double()
    graph = traced(model, x, units=units, within=1e-11)
    assert graph.num_exact_units == units
    assert any("different eps" in pin.reason for pin in graph.pinned) == (units == 4)
    assert ps.verify(model, x).holds


def residual(net: Any, x: Tensor) -> Tensor:
    x = net.i(x)
    x = x + net.c(F.silu(net.n(x)))
    return net.o(F.silu(net.m(x)))


@pytest.mark.parametrize(("groups", "width"), [(1, 4), (2, 4), (2, 6), (3, 6), (4, 4)])
def test_both_operands_of_a_sum_have_the_units_of_its_groups(groups: int, width: int) -> None:
    """One unit per group, at every weight that writes the stream."""
    i, c, o = nn.Conv2d(2, width, 1), nn.Conv2d(width, width, 1), nn.Conv2d(width, 2, 1)
    n, m = (nn.GroupNorm(groups, width, eps=0.0) for _ in range(2))
    model = network(residual, i=i, n=n, c=c, m=m, o=o).double().eval()
    graph = traced(model, torch.randn(2, 2, 5, 5).double(), units=groups)
    heads = {block.name: block.head.reshape(-1).tolist() for block in graph.blocks}
    assert heads["i.weight"] == heads["c.weight"] == heads["i.bias"] == heads["c.bias"]
    assert len(set(heads["c.weight"])) == groups
