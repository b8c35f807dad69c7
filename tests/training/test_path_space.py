"""Any optimizer of torch on path values: torch's own on the vector of path values, rescaled copies,
resumed runs, and weights that other code has written.
"""

from __future__ import annotations

import copy
import io
import itertools
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from descent import descend
from oracles.adam import train_on_path_values
from slow_names import slow_names
from torch import Tensor, nn, optim
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from training_pairs import Problem, largest_difference

import pathspace as ps
from pathspace.training import GSGD, GAdam, GaugeFixed, PathSGD, PathSpace

Make = Callable[[Any], optim.Optimizer]

KINDS: dict[str, Make] = {
    "Adadelta": lambda p: optim.Adadelta(p, lr=1e-2),
    "Adafactor": lambda p: optim.Adafactor(p, lr=1e-4),
    "Adagrad": lambda p: optim.Adagrad(p, lr=1e-3, eps=1e-6),
    "Adam": lambda p: optim.Adam(p, lr=1e-4, amsgrad=True),
    "AdamW": lambda p: optim.AdamW(p, lr=1e-4),
    "Adamax": lambda p: optim.Adamax(p, lr=1e-4),
    "ASGD": lambda p: optim.ASGD(p, lr=1e-5),
    "NAdam": lambda p: optim.NAdam(p, lr=1e-4),
    "RAdam": lambda p: optim.RAdam(p, lr=1e-4),
    "RMSprop": lambda p: optim.RMSprop(p, lr=1e-5, momentum=0.5, centered=True),
    "Rprop": lambda p: optim.Rprop(p, lr=1e-6, step_sizes=(1e-9, 1e-4)),
    "SGD": lambda p: optim.SGD(p, lr=1e-5, momentum=0.9, nesterov=True, weight_decay=0.1),
}
NETWORKS = [
    "mlp_2x4x1x3x2",
    "conv_gap",
    "residual_cnn",
    "rnn_op_2_layers",
    "transformer_block",
    "tied_transposed",
]


@pytest.mark.parametrize("kind", ["Adagrad", "RMSprop", "NAdam", "SGD"])
@pytest.mark.parametrize("name", NETWORKS)
def test_it_is_the_optimizer_on_the_vector_of_path_values(name: str, kind: str) -> None:
    case = Problem(name)
    expected = train_on_path_values(case.model, case.loss, case.oracle(), KINDS[kind], 4)
    case.train(
        case.model,
        lambda m: PathSpace(KINDS[kind](m.named_parameters()), case.skeleton(m)),
        4,
    )
    assert largest_difference(case.model, expected) < 1e-9


@pytest.mark.parametrize("kind", slow_names(KINDS, KINDS.keys() - {"Adam", "SGD"}))
@pytest.mark.parametrize("name", slow_names(["residual_mlp", "rnn_op"], ["residual_mlp"]))
def test_a_hundred_steps_do_not_see_the_scales(name: str, kind: str) -> None:
    case = Problem(name, unit=True)
    runs = [
        case.train(m, lambda m: PathSpace(KINDS[kind](m.named_parameters()), case.skeleton(m)), 100)
        for m in case.twins(2)
    ]
    assert runs[0][-1] < runs[0][0]
    # (a running variance and the sign of a gradient amplify rounding)
    assert runs[1] == pytest.approx(runs[0], rel=1e-7)


@pytest.mark.parametrize("kind", [GSGD, GAdam])
def test_the_gradients_stay_those_of_the_weights(kind: type[Any]) -> None:
    case = Problem("conv_gap", unit=True)
    optimizer = kind(case.model.named_parameters(), lr=1e-3, skeleton=case.skeleton(case.model))
    case.loss(case.model).backward()
    before = [p.grad.clone() for p in case.model.parameters()]
    optimizer.step()
    for p, gradient in zip(case.model.parameters(), before, strict=True):
        assert torch.equal(p.grad, gradient)


# --- weights that other code writes


def net(seed: int = 0, sizes: tuple[int, ...] = (4, 3, 2)) -> nn.Module:
    torch.manual_seed(seed)
    layers = [nn.Linear(*pair) for pair in itertools.pairwise(sizes)]
    return nn.Sequential(*[part for layer in layers for part in (layer, nn.ReLU())][:-1])


X = torch.randn(8, 4, generator=torch.Generator().manual_seed(3))


def go(model: nn.Module, optimizer: optim.Optimizer, steps: int = 3, x: Tensor = X) -> None:
    descend(optimizer, lambda: model(x).square().mean(), steps)


def gsgd(model: nn.Module, **more: Any) -> GSGD:
    skeleton = ps.trace(model, X[:2]).skeleton()
    return GSGD(model.named_parameters(), lr=0.1, skeleton=skeleton, max_multiplier=1.0, **more)


def test_averaged_weights_are_swapped_in_and_out_through_data() -> None:
    model = net()
    optimizer = gsgd(model, momentum=0.9)
    go(model, optimizer)
    kept = [p.detach().clone() for p in model.parameters()]
    for p in model.parameters():
        p.data.mul_(0.5)
    go(model, optimizer, 1)
    for p, old in zip(model.parameters(), kept, strict=True):
        assert not torch.allclose(p, old)
        p.data = old.clone()
    twin = copy.deepcopy((model, optimizer))
    go(model, optimizer)
    go(*twin)
    for p, q in zip(model.parameters(), twin[0].parameters(), strict=True):
        assert torch.equal(p, q)


def test_a_weight_of_zero_on_a_tree_is_refused_before_anything_changes() -> None:
    model = net()
    optimizer = gsgd(model)
    go(model, optimizer)
    model[0].weight.data.zero_()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ps.UnsupportedError, match="found a skeleton weight of 0"):
        go(model, optimizer)
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())


# --- resumed runs


@pytest.fixture
def one_process() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


WRAPPED: dict[str, Callable[[nn.Module], optim.Optimizer]] = {
    "without state": gsgd,
    "momentum": lambda m: gsgd(m, momentum=0.9),
    "adam": lambda m: GAdam(
        m.named_parameters(), lr=0.01, skeleton=ps.trace(m, X[:2]).skeleton(), max_multiplier=1.0
    ),
    "two": lambda m: PathSpace(
        [optim.SGD(m[0].parameters(), lr=0.01), optim.NAdam(m[2].parameters(), lr=0.01)],
        ps.trace(m, X[:2]).skeleton(),
        max_multiplier=1.0,
    ),
    "gauge": lambda m: GaugeFixed(optim.AdamW(m.parameters(), lr=0.01), ps.trace(m, X[:2])),
    "gauge without state": lambda m: GaugeFixed(
        optim.SGD(m.parameters(), lr=0.01), ps.trace(m, X[:2])
    ),
}


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("kind", WRAPPED)
def test_runs_go_on_bitwise_from_the_states_of_torchs_checkpoints(kind: str) -> None:
    model = net()
    optimizer = WRAPPED[kind](model)
    go(model, optimizer)
    weights, state = copy.deepcopy(get_state_dict(model, optimizer))
    file = io.BytesIO()
    torch.save((weights, state), file)
    file.seek(0)
    weights, state = torch.load(file)
    other = net(1)
    resumed = WRAPPED[kind](other)
    set_state_dict(other, resumed, model_state_dict=weights, optim_state_dict=state)
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q)
    go(model, optimizer)
    go(other, resumed)
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q)


# --- the shell


def test_a_step_of_the_optimizer_inside_warns_until_it_is_unwrapped() -> None:
    model = net()
    inner = optim.SGD(model.parameters(), lr=0.01)
    for shell in (PathSpace, GaugeFixed):
        graph = ps.trace(model, X[:2])
        wrapped: Any = (
            shell(inner, graph)
            if shell is GaugeFixed
            else shell(inner, graph.skeleton(), max_multiplier=1.0)
        )
        with pytest.warns(UserWarning, match=f"{shell.__name__} found a step of its inner SGD"):
            go(model, inner, 1)
        assert wrapped.unwrap() is inner
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            go(model, inner, 1)
        with pytest.raises(ps.InputError, match="step after unwrap"):
            go(model, wrapped, 1)


def test_what_does_not_fit_is_refused() -> None:
    model = net()
    skeleton = ps.trace(model, X[:2]).skeleton()
    for kind in (optim.LBFGS, optim.SparseAdam):
        with pytest.raises(ps.UnsupportedError, match=f"PathSpace found {kind.__name__}"):
            PathSpace(kind(model.parameters()), skeleton)
    matrices = [p for p in model.parameters() if p.ndim > 1]
    with pytest.raises(ps.UnsupportedError, match="PathSpace found Muon"):
        PathSpace(optim.Muon(matrices, lr=0.1), skeleton)
    with pytest.raises(ps.UnsupportedError, match="coordinates of its own"):
        PathSpace(gsgd(model), skeleton)


def test_masks_of_another_architecture_are_refused(tmp_path: Path) -> None:
    model, path = net(), tmp_path / "masks.safetensors"
    ps.save_masks(ps.trace(model, X[:2]).skeleton("random", seed=4), path)
    masks = ps.load_masks(path)
    found = masks.skeleton(ps.trace(model, X[:2]))
    assert (found.rule, found.seed) == ("random", 4)
    assert all(torch.equal(found.masks[name], mask) for name, mask in masks.masks.items())
    with pytest.raises(ps.InputError, match=r"found a mask of shape \(3, 4\) of '0\.weight'"):
        masks.skeleton(ps.trace(net(0, (4, 5, 2)), X[:2]))
    for mask in masks.incoming.values():
        mask.zero_()
    with pytest.raises(ps.InputError, match="reach 0 of 3 units"):
        masks.skeleton(ps.trace(model, X[:2]))


def test_a_gauge_names_what_it_cannot_fix() -> None:
    model = net(0, (4, 6, 2))
    matrices = [p for p in model.parameters() if p.ndim > 1]
    with pytest.warns(UserWarning, match=r"2 trained parameters .*\(first: '0\.bias'\)"):
        GaugeFixed(optim.SGD(matrices, lr=0.1), ps.trace(model, X[:2]))


@pytest.mark.parametrize("rows", [2, 8])
@pytest.mark.parametrize("first", [True, False])
def test_path_sgd_takes_the_step_of_one_sample(rows: int, first: bool) -> None:
    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.RNN(3, 4, nonlinearity="relu", batch_first=first)

        def forward(self, x: Tensor) -> Tensor:
            return self.rnn(x)[0]

    torch.manual_seed(0)
    model, found = Last().double(), []
    for count in (1, rows):
        shape = (count, 5, 3) if first else (5, count, 3)
        optimizer = PathSGD(model.parameters(), model=model, example=torch.ones(shape).double())
        found.append(optimizer.path_norm.kappa())
    for name, kappa in found[0].items():
        torch.testing.assert_close(found[1][name], kappa, rtol=1e-12, atol=0)
