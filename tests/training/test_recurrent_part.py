"""Path space for the recurrent layers of a model alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from descent import descend
from slow_names import slow_names
from torch import Tensor, nn

import pathspace as ps
from pathspace.errors import InputError, PathspaceError
from pathspace.training import GSGD
from pathspace.training.experiments.models import ReluRNN
from pathspace.training.experiments.models.language import StackedReluLM
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


def test_gsgd_of_the_part_is_that_of_the_layers_as_a_model() -> None:
    class Whole(nn.Module):
        def __init__(self, rnn: nn.RNN) -> None:
            super().__init__()
            self.rnn = rnn

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.rnn(x)[0]
            return result

    one, two = language_model(), language_model()
    part = Whole(two.rnn)
    graph = ps.trace(part, torch.ones(1, 5, 3, dtype=torch.float64))
    assert graph.num_units == 4
    inner = GSGD(part.named_parameters(), lr=0.1, skeleton=graph.skeleton())
    rest = torch.optim.SGD([*two.embedding.parameters(), *two.readout.parameters()], lr=0.1)
    expected = learn(two, recurrent_gsgd(one, 0.1, (TOKENS,)).__class__([inner, rest]))
    assert learn(one, recurrent_gsgd(one, 0.1, (TOKENS,))) == pytest.approx(expected, rel=1e-12)
    plain = language_model()
    assert learn(plain, torch.optim.SGD(plain.parameters(), lr=0.1)) != pytest.approx(
        expected, rel=1e-4
    )


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
    class Steps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.RNN(3, 4, nonlinearity="relu", bias=False)

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.rnn(x)[0]
            return result

    model = Steps()
    (example,) = RecurrentPart(model).example(model, (torch.randn(5, 2, 3),))
    assert torch.equal(example, torch.ones(5, 1, 3))
    with pytest.raises(InputError, match=r"Linear has 0 recurrent modules, expected one nn\.RNN"):
        recurrent_gsgd(nn.Linear(2, 2), 0.1, (torch.ones(1, 2),))
    with pytest.raises(InputError, match="Sequential has 2 recurrent modules"):
        recurrent_path_sgd(
            nn.Sequential(ReluRNN(2, 3, 2), ReluRNN(2, 3, 2)), 0.1, (torch.ones(1, 4, 2),)
        )


class Sorts(nn.Module):
    """A model that hands a sequence to its recurrent layers in one way or another."""

    def __init__(self, rnn: nn.Module | None = None, how: str = "") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rnn = rnn or nn.RNN(5, 7, 2, nonlinearity="relu", batch_first=True)
        self.out, self.how = nn.Linear(7, 3), how

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "unused":
            return self.out(x.new_zeros(len(x), 7))
        if self.how == "keyword":
            return self.out(self.rnn(input=x)[1][-1])
        if self.how == "packed":
            lengths = torch.full((len(x),), x.shape[1])
            packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)
            return self.out(self.rnn(packed)[1][-1])
        return self.out(self.rnn(x)[1][-1])


SEQUENCES = torch.randn(6, 4, 5, generator=torch.Generator().manual_seed(3))
MAKE = pytest.mark.parametrize("make", [recurrent_gsgd, recurrent_path_sgd])


@MAKE
@pytest.mark.parametrize(
    "how",
    slow_names(
        ["keyword", "packed", "a tensor", "a list", "samples alone"], ["a tensor", "packed"]
    ),
)
def test_ways_to_hand_over_a_sequence_take_the_same_steps(
    make: Callable[..., Shell], how: str
) -> None:
    inputs = {
        "a tensor": SEQUENCES,
        "a list": [SEQUENCES],
        "samples alone": (SEQUENCES[0],),
    }.get(how, (SEQUENCES,))
    ends = []
    for model, given in ((Sorts(), (SEQUENCES,)), (Sorts(how=how), inputs)):
        optimizer = make(model, 0.01, given)
        for _ in range(3):
            optimizer.zero_grad()
            model(SEQUENCES).square().mean().backward()
            optimizer.step()
        ends.append(weights(model))
    torch.testing.assert_close(*ends)


@MAKE
def test_recurrent_layers_may_be_the_whole_model(make: Callable[..., Shell]) -> None:
    model = Sorts().rnn
    optimizer = make(model, 0.01, (SEQUENCES,))
    before = weights(model)
    model(SEQUENCES)[0].square().mean().backward()
    optimizer.step()
    assert len(optimizer.optimizers) == 1
    assert not torch.equal(before, weights(model))


@MAKE
@pytest.mark.parametrize(
    ("model", "inputs", "words"),
    [
        ("x", (SEQUENCES,), r"found a str as its model, expected a torch\.nn\.Module"),
        (Sorts(), (), "found no inputs of Sorts, expected a tensor or a tuple"),
        (Sorts(), None, "found a NoneType as inputs of Sorts"),
        (Sorts(), (SEQUENCES, SEQUENCES), r"Sorts\.forward raised TypeError .*expected a batch"),
        (Sorts(), (SEQUENCES[..., :2],), r"Sorts\.forward raised \w+Error .*expected a batch"),
        (Sorts(how="unused"), (SEQUENCES,), "runs without its RNN, expected layers that it uses"),
        (Sorts(nn.LSTM(5, 7)), (SEQUENCES,), "of kind LSTM, .*choose an optimizer of torch"),
        (Sorts(nn.GRU(5, 7)), (SEQUENCES,), "of kind GRU, .*nonlinearity='relu'"),
        (Sorts(nn.RNN(5, 7)), (SEQUENCES,), "of kind tanh, .*no scale is free"),
    ],
)
def test_what_has_no_path_space_is_refused(
    make: Callable[..., Shell], model: object, inputs: object, words: str
) -> None:
    with pytest.raises(PathspaceError, match=words):
        make(model, 0.01, inputs)
