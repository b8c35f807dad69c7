"""Everyday jobs where settings, types and shapes are not those that one thinks of first."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import network
from torch import Tensor, nn

import pathspace as ps
from pathspace import InputError, InputTypeError, UnsupportedError
from pathspace.diagnostics import gradients
from pathspace.fitting.quantise import quantised


def scaled(slope: float = 0.01, factor: float = 1.0, eps: float = 1e-5) -> nn.Module:
    """A number and a tensor that are not registered."""
    return network(
        lambda net, x: net.b(net.act(net.norm(net.a(x)))) * net.factor,
        a=nn.Linear(4, 6), b=nn.Linear(6, 3), norm=nn.BatchNorm1d(6, eps=eps),
        act=nn.LeakyReLU(slope), factor=torch.tensor(factor),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("settings", "same"),
    [({}, True), ({"slope": 0.9}, False), ({"factor": 5.0}, False), ({"eps": 1e-2}, False)],
)
def test_models_with_other_numbers_in_their_code_are_not_the_same(
    settings: dict[str, float], same: bool
) -> None:
    a, b = scaled().eval(), scaled(**settings).eval()
    b.load_state_dict(a.state_dict())
    x = torch.randn(5, 4)
    graph, groups = ps.trace(a, x), ps.channels(b, x)
    b = groups.permute({group.name: torch.randperm(len(group)) for group in groups.removable})
    ps.rescale_(b, graph, torch.randn(graph.num_units, dtype=torch.float64))
    found = ps.compare(a, b, graph)
    assert found.same is same and not found.differ
    assert found.outputs is not None and (found.outputs < 1e-4) is same


def twice(net: Any, x: Tensor) -> Tensor:
    """A layer is called twice, with zeros the second time."""
    h = torch.tanh(net.a(x))
    return net.c(net.b(h) + net.b(h * 0))


def test_all_calls_of_a_layer_count_in_a_match() -> None:
    model = network(twice, a=nn.Linear(4, 6), b=nn.Linear(6, 3), c=nn.Linear(3, 2))
    x = torch.randn(64, 4)
    groups = ps.channels(model, x)
    other = groups.permute({"a.weight": torch.tensor([3, 1, 5, 0, 2, 4])})
    found = groups.match(other, by="activations")
    assert found.before > 0.1 and found.after < 1e-5


@pytest.mark.parametrize(
    ("dtype", "phi"), [(torch.float16, 14.0), (torch.float32, 100.0), (torch.float32, -100.0)]
)
def test_scales_beyond_the_range_of_a_type_change_nothing(dtype: torch.dtype, phi: float) -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)).to(dtype)
    graph = ps.trace(model, torch.randn(5, 4, dtype=dtype))
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(InputError, match=r"beyond the range of torch\.float"):
        ps.rescale_(model, graph, torch.full((6,), phi))
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_weights_that_underflow_do_not_fit() -> None:
    model = nn.Sequential(
        nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 16, bias=False), nn.ReLU(), nn.Linear(16, 4)
    )
    graph, x = ps.trace(model, torch.randn(2, 8)), torch.randn(64, 8)
    ps.rescale_(model, graph, torch.cat([torch.full((32,), 9.0), torch.full((16,), -6.2)]))
    found = ps.fit_dtype(model, x, headroom=1)
    assert (found.fitted_before, found.fits) == (False, True)
    assert found.error < 0.01 < found.error_before
    after = ps.rescale_(copy.deepcopy(model), graph, found.phi)
    torch.testing.assert_close(after(x), found.model(x))


def test_steps_of_half_precision_are_equal() -> None:
    weight = torch.linspace(-1, 1, 300).bfloat16()
    expected = quantised(weight.double(), 8).bfloat16()
    assert torch.equal(quantised(weight, 8), expected)


def test_softplus_with_a_low_threshold_has_no_bound() -> None:
    assert ps.path_norm(nn.Softplus(), torch.zeros(1, 1), bound=True) == 1
    with pytest.raises(UnsupportedError, match="it jumps at its threshold"):
        ps.path_norm(nn.Softplus(threshold=1.0), torch.zeros(1, 1), bound=True)


def norms(first: nn.Module, second: nn.Module) -> nn.Sequential:
    for norm in (first, second):
        for module in norm.modules():
            if isinstance(module, nn.BatchNorm1d):
                module.running_mean.normal_()
                module.running_var.uniform_(0.5, 2)
    return nn.Sequential(first, nn.ReLU(), second).eval()


def test_norms_that_cannot_be_folded_are_left() -> None:
    """Beside one that can: computed weights, and a norm with a hook."""
    computed = nn.utils.parametrizations.weight_norm(nn.Linear(3, 5))
    hooked = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4))
    hooked[1].register_forward_hook(lambda _module, _given, out: 2 * out)
    plain = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    model = nn.Sequential(norms(nn.Sequential(computed, nn.BatchNorm1d(5)), hooked), plain).eval()
    x = torch.randn(6, 3)
    folded = ps.fold_norms(model, x)
    kinds = [type(module) for module in folded.modules()]
    assert (kinds.count(nn.BatchNorm1d), kinds.count(nn.Identity)) == (2, 1)
    torch.testing.assert_close(folded(x), model(x))


def test_a_norm_along_another_axis_is_not_folded() -> None:
    """Of one signal without a batch, channels of the convolution are samples of the norm."""
    model = nn.Sequential(nn.Conv1d(3, 5, 3), nn.BatchNorm1d(7)).eval()
    with pytest.raises(InputError, match="none that can be folded"):
        ps.fold_norms(model, torch.randn(3, 9))


MODEL = nn.Sequential(nn.Linear(3, 2))


def loss(y: Tensor, _: Any) -> Tensor:
    return y.square().sum()


def ones(count: int) -> list[tuple[Tensor, None]]:
    return [(torch.ones(2, 3), None)] * count


def phases() -> nn.Module:
    w = nn.Parameter(torch.ones(3, dtype=torch.cfloat))
    return network(lambda net, x: (x * net.w).abs(), w=w)


WRONG: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "no batches": (lambda: gradients(MODEL, loss, None), InputTypeError, "found NoneType in"),
    "a tensor": (lambda: gradients(MODEL, loss, torch.ones(2, 3)), InputTypeError, "found Tensor"),
    "tensors": (lambda: gradients(MODEL, loss, [torch.ones(2, 3)]), InputTypeError, "is a Tensor"),
    "numbers": (lambda: gradients(MODEL, loss, [5]), InputTypeError, "a batch that is a int"),
    "three": (lambda: gradients(MODEL, loss, [(1, 2, 3)]), InputTypeError, "a tuple of 3"),
    "complex": (lambda: gradients(phases(), loss, ones(2)), UnsupportedError, "complex parameter"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_end_in_a_sentence(name: str) -> None:
    act, kind, words = WRONG[name]
    with pytest.raises(kind) as caught:
        act()
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_the_spread_of_gradients_is_about_their_median() -> None:
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 1, bias=False))
    table = gradients(model, loss, ones(2))
    sizes = [row.rms for row in table]
    assert [row.spread for row in table] == pytest.approx([2 * size / sum(sizes) for size in sizes])
