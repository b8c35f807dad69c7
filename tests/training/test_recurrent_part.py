"""Path space for the recurrent layers of a model alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from cases import network
from descent import descend
from torch import Tensor, nn

import pathspace as ps
from pathspace.errors import InputError, UnsupportedError
from pathspace.training import GSGD
from pathspace.training.experiments.models import ReluRNN
from pathspace.training.experiments.models.recurrent import StackedReluLM
from pathspace.training.experiments.recurrent_part import (
    RecurrentPart,
    recurrent_gsgd,
    recurrent_path_sgd,
)
from pathspace.training.optim.shell import Shell

TOKENS = torch.arange(10).reshape(2, 5) % 7


def language_model(layers: int = 2) -> StackedReluLM:
    torch.manual_seed(0)
    return StackedReluLM(
        7, embedding=3, hidden=4, layers=layers, dropout_inputs=0.3, weight_drop=0.2
    ).double()


def learn(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3) -> list[float]:
    model.eval()
    return descend(
        optimizer,
        lambda: model(TOKENS).logsumexp(-1).mean() - model(TOKENS)[..., 0].mean(),
        steps,
    )


def rescaled(model: StackedReluLM) -> StackedReluLM:
    """The same function: units of the first layer times 2 and more, by hand."""
    twin = language_model()
    twin.load_state_dict(model.state_dict())
    factor = torch.tensor([2.0, 0.5, 3.0, 0.25], dtype=torch.float64)
    with torch.no_grad():
        twin.rnn.weight_ih_l0.mul_(factor[:, None])
        twin.rnn.weight_hh_l0.mul_(factor[:, None] / factor)
        twin.rnn.weight_ih_l1.div_(factor)
    return twin


def weights(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def test_with_one_layer_gsgd_is_sgd() -> None:
    one, two = language_model(1), language_model(1)
    learn(one, recurrent_gsgd(one, 0.1, (TOKENS,)))
    learn(two, torch.optim.SGD(two.parameters(), lr=0.1))
    torch.testing.assert_close(weights(one), weights(two), rtol=1e-12, atol=1e-12)


def layers(rnn: nn.Module) -> nn.Module:
    """Recurrent layers of some kind as a model."""
    return network(lambda net, x: net.rnn(x)[0], rnn=rnn)


def test_gsgd_of_the_part_is_that_of_the_layers_as_a_model() -> None:
    one, two = language_model(), language_model()
    part = layers(two.rnn)
    graph = ps.trace(part, torch.ones(1, 5, 3, dtype=torch.float64))
    assert graph.num_units == 4
    inner = GSGD(part.named_parameters(), lr=0.1, skeleton=graph.skeleton())
    rest = torch.optim.SGD([*two.embedding.parameters(), *two.readout.parameters()], lr=0.1)
    expected = learn(two, Shell([inner, rest]))
    assert learn(one, recurrent_gsgd(one, 0.1, (TOKENS,))) == pytest.approx(expected, rel=1e-12)
    plain = language_model()
    by_sgd = learn(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    assert by_sgd != pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("make", [recurrent_gsgd, recurrent_path_sgd])
def test_steps_do_not_depend_on_the_scales_of_units_inside(make: object) -> None:
    one = language_model()
    two = rescaled(one)
    torch.testing.assert_close(one.eval()(TOKENS), two.eval()(TOKENS))
    # (the rate of Path-SGD itself is measured at the start; here it is the same for both)
    first, second = (make(each, 0.01, (TOKENS,)) for each in (one, two))  # type: ignore[operator]
    for here, there in zip(first.param_groups, second.param_groups, strict=True):
        there["lr"] = here["lr"]
    assert learn(one, first) == pytest.approx(learn(two, second), rel=1e-9)


def test_kappa_is_the_sum_over_paths_of_the_layers() -> None:
    """By hand for one layer of one unit, with ones at every step."""
    model = StackedReluLM(7, embedding=1, hidden=1, layers=1).double()
    with torch.no_grad():
        model.rnn.weight_ih_l0.fill_(2.0)
        model.rnn.weight_hh_l0.fill_(0.5)
    optimizer = recurrent_path_sgd(model, 0.1, (TOKENS,))
    inner, rest = optimizer.optimizers
    a, b, steps = 4.0, 0.25, 5
    # gamma^2 = a sum over t of (1 + b + ... + b^(t - 1))
    of_a = sum(b**k for t in range(steps) for k in range(t + 1))
    of_b = a * sum(k * b ** (k - 1) for t in range(steps) for k in range(1, t + 1))
    kappa = inner.path_norm.kappa(second=False)  # type: ignore[attr-defined]
    assert kappa["rnn.weight_ih_l0"].item() == pytest.approx(of_a)
    assert kappa["rnn.weight_hh_l0"].item() == pytest.approx(of_b)
    assert inner.param_groups[0]["lr"] == pytest.approx(0.1 * (of_a + of_b) / 2)
    assert rest.param_groups[0]["lr"] == 0.1


def test_steps_before_the_batch_and_models_without_one_stack() -> None:
    model = layers(nn.RNN(3, 4, nonlinearity="relu", bias=False))
    (example,) = RecurrentPart(model).example(model, (torch.randn(5, 2, 3),))
    assert torch.equal(example, torch.ones(5, 1, 3))
    with pytest.raises(InputError, match=r"Linear has 0 recurrent modules, expected one nn\.RNN"):
        recurrent_gsgd(nn.Linear(2, 2), 0.1, (torch.ones(1, 2),))
    two = nn.Sequential(ReluRNN(2, 3, 2), ReluRNN(2, 3, 2))
    with pytest.raises(InputError, match="Sequential has 2 recurrent modules"):
        recurrent_path_sgd(two, 0.1, (torch.ones(1, 4, 2),))


@pytest.mark.parametrize("make", [recurrent_gsgd, recurrent_path_sgd])
@pytest.mark.parametrize(
    ("rnn", "words"),
    [
        (nn.LSTM(5, 7), "of kind LSTM, .*choose an optimizer of torch"),
        (nn.GRU(5, 7), "of kind GRU, .*nonlinearity='relu'"),
        (nn.RNN(5, 7), "of kind tanh, .*no scale is free"),
    ],
)
def test_what_has_no_path_space_is_refused(
    make: Callable[..., Shell], rnn: nn.Module, words: str
) -> None:
    with pytest.raises(UnsupportedError, match=words):
        make(layers(rnn), 0.1, (torch.ones(1, 4, 5),))
