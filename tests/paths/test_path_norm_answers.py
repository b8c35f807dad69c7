"""Path norms against coefficients and paths counted by hand, around operations
for which a rule alone does not say enough.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pathspace as ps
from pathspace.paths.norms import path_sensitivity

pytestmark = pytest.mark.filterwarnings("ignore")


class Net(nn.Module):
    """A function of inputs, parameters and buffers."""

    def __init__(self, function: Callable[..., Any], **held: Any) -> None:
        super().__init__()
        self.function = function
        for name, value in held.items():
            if isinstance(value, nn.Parameter | nn.Module):
                setattr(self, name, value)
            else:
                self.register_buffer(name, value)

    def forward(self, *inputs: Any) -> Any:
        return self.function(self, *inputs)


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).double()


PLACES = torch.tensor([[0, 1, 0, 0, 2, 2]])
# name -> a function that is affine in x, each pair of elements joined by one path at most
AFFINE: dict[str, tuple[Callable[..., Tensor], dict[str, Tensor]]] = {
    "full_like": (lambda net, x: x + torch.full_like(x, 3.0), {}),
    "lerp": (lambda net, x: torch.lerp(x, net.w, 0.3), {"w": draw(6)}),
    "index_add": (
        lambda net, x: torch.index_add(net.w, 1, torch.tensor([0, 1]), x[:, :2], alpha=3),
        {"w": draw(1, 6)},
    ),
    "scatter": (lambda net, x: x.scatter(1, torch.tensor([[0, 1]]), 5.0), {}),
    "scatter_reduce": (
        lambda net, x: torch.scatter_reduce(
            x.new_zeros(1, 3), 1, PLACES, x, "mean", include_self=False
        ),
        {},
    ),
    "fill": (lambda net, x: filled(x), {}),
    "whole numbers": (lambda net, x: torch.cat([x, net.k], 1), {"k": torch.tensor([[-3, 2]])}),
}


def filled(x: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    y[:, 2:4] = x[:, :2]
    y[:, 0].fill_(4.0)
    return y


@pytest.mark.parametrize("name", AFFINE)
@pytest.mark.parametrize("p", [1, 2, 0.5])
def test_coefficients_and_constants_are_weights_on_paths(name: str, p: float) -> None:
    function, held = AFFINE[name]
    net, x = Net(function, **held), draw(1, 6)
    slopes = torch.autograd.functional.jacobian(net, torch.zeros_like(x))
    start = net(torch.zeros_like(x)).double()
    expected = float((slopes.abs() ** p).sum() + (start.abs() ** p).sum()) ** (1 / p)
    assert ps.path_norm(net, x, p=p, batch_dim=None) == pytest.approx(expected, rel=1e-9)


W = torch.tensor([[2.0, 0.0], [-1.0, 3.0]]).double()
BRANCHES: dict[str, Callable[[Tensor], Tensor]] = {
    "x - relu(x)": lambda h: h - h.relu(),
    "x - |x|": lambda h: h - h.abs(),
    "relu(x) - leaky(x)": lambda h: h.relu() - F.leaky_relu(h),
}


@pytest.mark.parametrize("name", BRANCHES)
@pytest.mark.parametrize("p", [1, 2])
def test_two_branches_have_the_paths_of_both(name: str, p: float) -> None:
    """A rectifier has the sums of its operand, but is another branch."""
    net = Net(lambda net, x: BRANCHES[name](F.linear(x, net.w)), w=nn.Parameter(W.clone()))
    expected = float(2 * (W.abs() ** p).sum()) ** (1 / p)
    assert ps.path_norm(net, draw(1, 2), p=p) == pytest.approx(expected, rel=1e-12)


def test_rows_that_the_example_reads() -> None:
    table = nn.Embedding(5, 3, padding_idx=0).double()
    net = nn.Sequential(table, nn.Linear(3, 2, bias=False).double())
    with torch.no_grad():
        rows = (table.weight.abs() @ net[1].weight.abs().T).sum(1)
    ids = torch.tensor([[3, 3, 1, 0]])
    for model in (net, ps.trace(net, ids)):
        inputs = (ids,) if isinstance(model, nn.Module) else ()
        assert ps.path_norm(model, *inputs) == pytest.approx(float(2 * rows[3] + rows[1]))
    bags = nn.Sequential(nn.EmbeddingBag(5, 3, mode="mean").double(), net[1])
    with pytest.raises(ps.UnsupportedError, match="bags divide or weigh rows"):
        ps.path_norm(bags, torch.tensor([[1, 2, 4]]))


def test_rows_that_data_choose() -> None:
    """Any expert may be chosen: all of them are on paths, as in a maximum."""
    experts = nn.Parameter(draw(3, 2, 2))
    total = float(experts.detach().abs().sum())
    chosen = Net(lambda net, x: (net.w[x.argmax(1)] @ x[..., None])[..., 0], w=experts)
    assert ps.path_norm(chosen, draw(1, 2)) == pytest.approx(total)
    given = Net(lambda net, x, k: F.linear(x, net.w[k]), w=experts)
    with pytest.raises(ps.CaptureError, match="depends on the values of tensors"):
        ps.path_norm(given, draw(1, 2), torch.tensor(1))


def test_sums_at_places_that_data_choose() -> None:
    def added(alpha: float) -> Net:
        def forward(net: Net, x: Tensor) -> Tensor:
            return x.new_zeros(1, 2).index_add(1, x[0].argsort(), F.linear(x, net.w), alpha=alpha)

        return Net(forward, w=nn.Parameter(W.clone()))

    assert ps.path_norm(added(1), draw(1, 2)) == pytest.approx(2 * float(W.abs().sum()))
    with pytest.raises(ps.UnsupportedError, match="multiplies by a factor"):
        ps.path_norm(added(-3), draw(1, 2))


SENSED: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "transposed": lambda net, x: (x @ net.w.T).relu() @ net.v.T,
    "sorted": lambda net, x: F.linear(F.linear(x, net.w).sort(1)[0], net.v),
    "largest": lambda net, x: F.linear(F.linear(x, net.w)[:, None].amax(1), net.v),
    "sliced weights": lambda net, x: F.linear(
        torch.index_add(F.linear(x, net.w), 1, torch.tensor([0, 1]), net.v[:1, :2], alpha=3.0),
        net.v,
    ),
}


@pytest.mark.parametrize("name", SENSED)
def test_sensitivities_are_derivatives_of_the_norm(name: str) -> None:
    """Through rules, measured maps and views of weights, too."""
    net = Net(SENSED[name], w=nn.Parameter(draw(4, 3)), v=nn.Parameter(draw(2, 4)))
    x = draw(1, 3)
    graph = ps.trace(net, x)
    expected = {}
    for key, weight in net.named_parameters():
        flat, slopes = weight.data.view(-1), torch.zeros(weight.numel()).double()
        for i, value in enumerate(flat.tolist()):
            sides = []
            for moved in (value + 1e-5, value - 1e-5):
                flat[i] = moved
                sides.append(ps.path_norm(graph, 2, batch_dim=None) ** 2)
            flat[i] = value
            slopes[i] = (sides[0] - sides[1]) / ((value + 1e-5) ** 2 - (value - 1e-5) ** 2)
        expected[key] = slopes.reshape(weight.shape)
    most = max(float(slopes.max()) for slopes in expected.values())
    found = path_sensitivity(graph)
    for key, slopes in expected.items():
        assert torch.allclose(found[key], slopes / most, atol=1e-6)
    assert math.isclose(max(float(each.max()) for each in found.values()), 1.0)


BOUNDED: dict[str, Callable[[Tensor], Tensor]] = {
    "steep leaky": lambda x: F.leaky_relu(x, 3.0),
    "steep random": lambda x: F.rrelu(x, 2.0, 3.0),
    "clip": lambda x: x.clamp(-1, 2),
    "extremes": lambda x: torch.minimum(x, x.flip(1)) + x.sort(1)[0],
    "length": lambda x: x.norm(dim=1),
    "deviation": lambda x: x.std(1),
    "mixture": lambda x: torch.lerp(x, x.relu(), 0.3),
    "tiles": lambda x: F.max_pool1d(x[:, None], 2),
}
UNBOUNDED: dict[str, Callable[[Tensor], Tensor]] = {
    "layer norm": lambda x: F.layer_norm(x, (3,)),
    "square": lambda x: x.square(),
    "product": lambda x: x.prod(1),
    "cosine": lambda x: F.cosine_similarity(x, x.flip(1) + 1),
    "sign": lambda x: x.sign(),
    "mask": lambda x: x.flip(1) * (x > 0),
    "choice": lambda x: torch.where(x > 0, x, x.flip(1)),
    "position": lambda x: x.flip(1).gather(1, x.argmax(1, keepdim=True)),
    "angle": lambda x: torch.atan2(x, x.flip(1)),
    "noise": lambda x: x + torch.randn_like(x),
    "half norm": lambda x: x.norm(p=0.5, dim=1),
    "dropout": lambda x: F.dropout(x, 0.5, training=True),
    "moving bound": lambda x: x.clamp(max=x.square()),
}


@pytest.mark.parametrize("name", BOUNDED)
def test_bounds_hold_for_inputs_of_all_sizes(name: str) -> None:
    net = Net(lambda net, x: BOUNDED[name](net.first(x)), first=nn.Linear(3, 3).double())
    bound = ps.path_norm(net, draw(1, 3), bound=True)
    for size in (1e-2, 1.0, 1e2):
        for step in (1e-4, 1e-1, 1.0):
            for _ in range(20):
                x = size * torch.randn(1, 3).double()
                y = x + size * step * torch.randn(1, 3).double()
                moved = float((net(x) - net(y)).detach().abs().sum())
                assert moved <= bound * float((x - y).abs().max()) * (1 + 1e-9)


@pytest.mark.parametrize("name", UNBOUNDED)
def test_what_has_no_largest_slope_is_refused(name: str) -> None:
    net = Net(lambda net, x: UNBOUNDED[name](net.first(x)), first=nn.Linear(3, 3).double())
    with pytest.raises(ps.UnsupportedError) as caught:
        ps.path_norm(net, draw(1, 3), bound=True)
    assert len(str(caught.value).splitlines()) == 1


def test_ranges_of_numbers() -> None:
    layer = nn.Linear(2, 2, bias=False).double()
    net, x = nn.Sequential(layer), draw(1, 2)
    graph = ps.trace(net, x)
    with torch.no_grad():
        layer.weight.copy_(W)
    skeleton = graph.skeleton()
    log = math.log(float((W.abs().sum(1) ** 20).sum())) + 20 * 55 * math.log(10)
    power = Net(lambda net, x: (F.linear(x, net.w) * 1e55) ** 20, w=layer.weight)
    assert ps.path_norm(power, x, log=True) == pytest.approx(log)
    total = Net(lambda net, x: (x * 1e30).sum(1, dtype=torch.float32))
    assert ps.path_norm(total, x.float(), p=2) == pytest.approx(2**0.5 * 1e30)
    with pytest.raises(ps.InputError, match="at most p="):
        ps.path_norm(net, x, p=3000)
    for wrong in (3, -3):
        with pytest.raises(ps.InputError, match="batch_dim"):
            ps.path_norm(net, x, batch_dim=wrong)
    with pytest.raises(ps.InputTypeError, match="batch_dim"):
        ps.path_norm(net, x, batch_dim=1.5)  # type: ignore[call-overload]
    with pytest.raises(ps.InputError, match="further arguments"):
        ps.path_norm(graph, 1, False, 0, None)  # type: ignore[call-overload]
    with pytest.raises(ps.InputError, match="until='fixed'"):
        ps.path_norm(net, x, until="fixed", bound=True)
    for value in (math.nan, math.inf):
        with torch.no_grad():
            layer.weight[0, 0] = value
        for function in (ps.path_norm, path_sensitivity, ps.path_statistics):
            given: Any = skeleton if function is ps.path_statistics else graph
            with pytest.raises(ps.InputError, match="NaN or infinite"):
                function(given)


MASK = torch.tensor([[1, 1, 0], [1, 0, 1], [1, 1, 1]]).bool()


@pytest.mark.parametrize("p", [1, 2])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"scale": 2.0},
        {"is_causal": True},
        {"attn_mask": MASK},
        {"attn_mask": draw(3, 3).masked_fill(~MASK, -math.inf)},
    ],
    ids=lambda options: "".join(options),
)
def test_attention_is_what_it_is_written_out(options: dict[str, Any], p: float) -> None:
    """Its scores end paths with their scale, and without masked entries."""

    def written(net: Any, q: Tensor, k: Tensor) -> Tensor:
        scores = q @ k.mT * options.get("scale", 0.5)
        if options.get("is_causal"):
            scores = scores.masked_fill(~torch.ones(3, 3).bool().tril(), -math.inf)
        mask = options.get("attn_mask")
        if mask is not None:
            masked = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else None
            scores = scores + mask if masked is None else masked
        return scores.softmax(-1) @ k

    def fused(net: Any, q: Tensor, k: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, k, **options)

    inputs = draw(1, 2, 3, 4), draw(1, 2, 3, 4)
    one, two = (ps.path_norm(Net(f), *inputs, p=p, until="fixed") for f in (written, fused))
    assert one == pytest.approx(two)
