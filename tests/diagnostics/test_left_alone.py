"""Diagnostics leave a model as it was, and measure checkpointed models like others."""

from __future__ import annotations

import copy
import itertools
import random
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch
from cases import Autoencoder, network, recomputed
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import pathspace as ps
import pathspace.diagnostics as ds
from pathspace.fitting.calibration import Calibrated

X, Y = torch.randn(10, 4, generator=torch.Generator().manual_seed(0)), torch.arange(10) % 3
BATCHES = [(X[:5], Y[:5]), (X[5:], Y[5:])]
loss = nn.functional.cross_entropy


class Stateful(nn.Module):
    """Changes, when it runs, all that a model can hold."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("mean", torch.zeros(4))
        self.plain = torch.zeros(4)
        self.generator, self.count = torch.Generator().manual_seed(3), 0
        self.log: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        h = self.last = self.a(x).relu()
        self.log.append(h)
        self.mean = 0.9 * self.mean + 0.1 * h.detach().mean(0)
        self.plain.add_(1)
        h = h * torch.rand(4, generator=self.generator) * random.random() * float(np.random.rand())
        h = h + checkpoint(lambda x: self.norm(self.b(x)).relu(), h, use_reentrant=False)
        return self.c(nn.functional.dropout(h, 0.5, self.training))


def state(model: Stateful) -> dict[str, Any]:
    attributes = {
        (name, key): value if isinstance(value, int) else id(value)
        for name, module in model.named_modules()
        for key, value in vars(module).items()
    }
    return {
        "attributes": attributes,
        "bindings": {name: id(buffer) for name, buffer in model.named_buffers()},
        "buffers": {name: value.tolist() for name, value in model.state_dict().items()},
        "plain": model.plain.tolist(),
        "log": len(model.log),
        "own generator": model.generator.get_state().tolist(),
        "torch": torch.get_rng_state().tolist(),
        "python": random.getstate(),
        "numpy": np.random.get_state()[1].tolist(),
        "gradients": [parameter.grad for parameter in model.parameters()],
        "hooks": [len(part._forward_hooks) for part in model.modules()],
    }


@pytest.mark.slow
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    "measure",
    [
        lambda model: ds.signal(model, X),
        lambda model: ds.gradients(model, loss, BATCHES),
        lambda model: ds.trace_k(ds.jacobian(model, X), 4),
        lambda model: ds.cost(model, X),
        lambda model: ds.degeneracy(model, X),
        lambda model: ds.report(model, X),
        lambda model: ds.diagnose(model, data=BATCHES, loss=loss),
        lambda model: ds.MarkovChain.trace(model, X).observe(loss, X, Y),
        lambda model: ps.trace(model, X),
        lambda model: Calibrated(model, X).sensitivity(),
    ],
)
def test_all_that_running_changes_is_restored(
    measure: Callable[[nn.Module], Any], training: bool
) -> None:
    with suppress(ps.CaptureError):
        # (imports may draw random numbers)
        measure(Stateful().train(training))
    model = Stateful().train(training)
    before = state(model)
    with suppress(ps.CaptureError):
        measure(model)
    after = state(model)
    assert [key for key in before if after[key] != before[key]] == []
    copy.deepcopy(model)


@pytest.mark.slow
@pytest.mark.parametrize("reentrant", [True, False])
def test_derivatives_of_checkpointed_functions_are_those_of_the_function(reentrant: bool) -> None:
    plain, model = half(None).double(), half(reentrant).double()
    model.load_state_dict(plain.state_dict())
    x = torch.randn(40, 4).double()
    found = [ds.degeneracy(net, x) for net in (plain, model)]
    assert found[0].rank == found[1].rank and found[0].gauge == found[1].gauge > 0


def two(forward: Callable[[Any, Tensor], Tensor]) -> nn.Module:
    return network(forward, a=nn.Linear(4, 4), b=nn.Linear(4, 4), c=nn.Linear(4, 3))


def constrained(net: Any, x: Tensor) -> Tensor:
    """Bounds the norm of its weights where it uses them."""
    net.a.weight.data.copy_(torch.renorm(net.a.weight.data, 2, 0, 0.1))
    net.c.weight.data = torch.renorm(net.c.weight.data, 2, 0, 0.1)
    return net.c(net.a(x).relu())


def test_weights_that_a_model_writes_stay() -> None:
    model = two(constrained)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    ds.signal(model, X)
    ds.gradients(model, loss, BATCHES)
    Calibrated(model, X).sensitivity()
    held = Calibrated(model, [X, X])
    assert float(held.noise(dict(model.named_parameters())).max()) == 0
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def plain(net: Any, x: Tensor) -> Tensor:
    return net.c(net.b(net.a(x).relu()).relu())


def mistaken(outputs: Tensor, targets: Tensor) -> Tensor:
    raise KeyError("no such class")


@pytest.mark.parametrize(
    ("measure", "match"),
    [
        (lambda: ds.gradients(two(plain), mistaken, BATCHES), "The loss raised KeyError on"),
        (lambda: ds.gradients(two(plain), lambda *_: 3.0, BATCHES), "The loss returned a float"),
        (lambda: ds.gradients(two(plain), loss, [(X[:, :3], Y)]), "forward raised RuntimeErr"),
        (lambda: ds.signal(two(plain), X[:0]), "inputs with no samples"),
        (lambda: ds.degeneracy(two(plain), X[:0]), "inputs with no samples"),
        (lambda: ds.gradients(two(plain), loss, [(X[:0], Y[:0])]), "inputs with no samples"),
        (lambda: ds.cost(nn.LazyLinear(3), X), "'weight' and others without a shape yet"),
        (lambda: ps.fit_dtype(two(plain).to("meta"), X), "'a.weight' and others without values"),
        (lambda: ps.fit_dtype(torch.jit.script(nn.Linear(4, 3)), X), "that it was made of"),
    ],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_what_cannot_be_measured_is_told_in_a_sentence(
    measure: Callable[[], Any], match: str
) -> None:
    with pytest.raises(ps.PathspaceError, match=match):
        measure()


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_batches_that_do_not_reach_a_weight_have_the_gradient_zero(order: list[int]) -> None:
    # one layer is read or the other
    model = network(
        lambda net, x: net.a(x) if len(x) > 5 else net.b(x), a=nn.Linear(4, 3), b=nn.Linear(4, 3)
    )
    cuts = [(X[:6], Y[:6]), (X[6:], Y[6:]), (X[2:9], Y[2:9])]
    batches = [cuts[place] for place in order]
    for row in ds.gradients(model, loss, batches):
        weight = dict(model.named_parameters())[row.parameter]
        losses = (loss(model(x), y) for x, y in batches)
        slopes = [torch.autograd.grad(one, weight, materialize_grads=True)[0] for one in losses]
        found = torch.stack(slopes).double()
        assert row.rms == pytest.approx(float(found.mean(0).square().mean().sqrt()))
        assert row.noise == pytest.approx(float(found.var(0).mean()))


def half(reentrant: bool | None) -> nn.Module:
    """Two layers inside of a checkpoint, with dead units after the first."""

    def forward(net: Any, x: Tensor) -> Tensor:
        return net.out(recomputed(lambda h: net.b(h).relu(), net.up(x).relu(), reentrant=reentrant))

    model = network(forward, up=nn.Linear(4, 8), b=nn.Linear(8, 8), out=nn.Linear(8, 3))
    nn.init.constant_(model.b.bias[:3], -100)
    return model


def test_watching_sees_dead_units_inside_of_checkpoints() -> None:
    shares = {}
    for reentrant in (None, True, False):
        torch.manual_seed(0)
        model = half(reentrant)
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        with ds.watching(model) as watched:
            for _ in range(2):
                optimizer.zero_grad()
                loss(model(X), Y).backward()
                optimizer.step()
        shares[reentrant] = [row["dead_share_largest"] for row in watched.rows]
    assert shares[None] == shares[True] == shares[False] and shares[None][0] >= 3 / 8


def test_scales_that_only_several_weights_determine_together_have_no_skeleton() -> None:
    twice = nn.Linear(3, 3, bias=False)
    model = nn.Sequential(
        nn.Linear(4, 3), Autoencoder(3, 3), twice, nn.ReLU(), twice, Autoencoder(3, 3),
        nn.Linear(3, 2),
    ).double()  # fmt: skip
    graph = ps.trace(model, X.double())
    with pytest.raises(ps.UnsupportedError, match=r"no tree for \d units \(the first is '0"):
        graph.skeleton()
