"""Wrong arguments of optimizers end in one sentence, and change nothing."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import mlp, network
from descent import descend
from gauged import Lion
from torch import Tensor, nn, optim
from torch.utils.checkpoint import checkpoint

import pathspace as ps
from pathspace import InputError, InputTypeError, PathspaceError, UnsupportedError
from pathspace.training import GSGD, GAdam, GaugeFixed, PathSGD, PathSpace, init_skeleton_
from pathspace.training.optim.shell import Shell

X = torch.randn(16, 4, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
Call = Callable[[nn.Module, ps.ReductionGraph], Any]


def net() -> nn.Module:
    return mlp(4, 6, 2).double()


def step(model: nn.Module, optimizer: optim.Optimizer, x: Tensor = X) -> None:
    descend(optimizer, lambda: (model(x) - 1).square().mean())


def matrices(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.ndim > 1]


def biases(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.ndim == 1]


def path(kind: Callable[..., Any], **settings: Any) -> Call:
    return lambda model, graph: kind(
        model.named_parameters(), **{"lr": 0.1, "skeleton": graph.skeleton(), **settings}
    )


def path_sgd(**settings: Any) -> Call:
    return lambda model, _: PathSGD(
        model.parameters(), 0.1, **{"model": model, "example": (X,), **settings}
    )


def fixed(make: Callable[[nn.Module], Any], **settings: Any) -> Call:
    return lambda model, graph: GaugeFixed(make(model), graph, **settings)


def sgd(model: nn.Module) -> optim.Optimizer:
    return optim.SGD(model.parameters(), lr=0.1)


REFUSED: list[tuple[Call, str]] = [
    (path(GSGD, lr=-1.0), "lr=-1.0, expected a number of at least 0"),
    (path(GSGD, lr=torch.ones(2)), "lr=a Tensor, expected a number of at least 0"),
    (path(GSGD, momentum=-0.1), "momentum=-0.1"),
    (path(GSGD, weight_decay=-0.1), "weight_decay=-0.1"),
    (path(GSGD, nesterov=True), "nesterov=True, which needs momentum"),
    (path(GSGD, max_multiplier=0.0), "max_multiplier=0.0"),
    (path(GSGD, min_ratio=2.0), "min_ratio=2.0"),
    (path(GSGD, differentiable=True), "differentiable=True"),
    (path(GSGD, skeleton=None), "found a NoneType as its skeleton"),
    (path(GSGD, maximize="x"), "maximize='x', expected True or False"),
    (path(GAdam, relative=2), "relative=2, expected True or False"),
    (path(GSGD, relative=True, max_multiplier=1.0), "whose steps have no multipliers"),
    (path(GAdam, betas=(0.9, 1.0)), "GAdam found"),
    (path(GAdam, eps=-1.0), "GAdam found"),
    (lambda m, g: GSGD(iter(()), lr=0.1, skeleton=g.skeleton()), "GSGD found no parameters, exp"),
    (lambda m, g: init_skeleton_(m, 3), "a int as its skeleton"),
    (path_sgd(example=None), "PathSGD found a NoneType as its example, expected a tensor or a tu"),
    (path_sgd(example=(X.to("meta"),)), "PathSGD found 'an input' without values"),
    (path_sgd(reused=3), "reused=3, expected a list of names of parameters, or None"),
    (path_sgd(every=2.5), r"every=2\.5, expected a whole number from 1"),
    (path_sgd(second="x"), "second='x', expected True or False"),
    (path_sgd(model=mlp(4, 6, 2).double()), "not the model's"),
    (fixed(lambda m: m), "found an optimizer of type Sequential"),
    (lambda m, g: GaugeFixed(sgd(m), m), "GaugeFixed found a Sequential as its graph"),
    (fixed(sgd, norms="rows"), "norms='rows'"),
    (fixed(sgd, return_to="there"), "return_to='there'"),
    (fixed(sgd, model="x"), "a str as its model"),
    (fixed(sgd, model=mlp(4, 6, 2).double()), "no weight of the reduction graph among"),
    (lambda m, g: GaugeFixed([sgd(m)] * 2, g), "a parameter in two of its optimizers"),
    (lambda m, g: GaugeFixed(GaugeFixed(sgd(m), g), g), r"GaugeFixed as its optimizer.*unwrap"),
    (fixed(lambda m: optim.LBFGS(m.parameters())), "GaugeFixed found LBFGS"),
    (lambda m, g: PathSpace(optim.LBFGS(m.parameters()), g.skeleton()), "PathSpace found LBFGS"),
    (lambda m, g: PathSpace(optim.Muon(matrices(m)), g.skeleton()), "PathSpace found Muon"),
    (lambda m, g: PathSpace(path(GSGD)(m, g), g.skeleton()), "coordinates of its own"),
]


@pytest.mark.parametrize(("call", "words"), REFUSED)
@pytest.mark.filterwarnings("ignore:GSGD multiplies:UserWarning")
def test_wrong_arguments_are_refused_in_one_sentence(call: Call, words: str) -> None:
    model = net()
    graph, before = ps.trace(model, X), copy.deepcopy(model.state_dict())
    with pytest.raises(PathspaceError, match=words) as refused:
        call(model, graph)
    assert str(refused.value).count(". ") == 0
    if "unwrap" not in words:
        assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())


@pytest.mark.parametrize("bad", [-1.0, float("nan"), "1", None, True, torch.ones(2)])
def test_a_bound_of_the_norm_is_a_number_of_at_least_0(bad: object) -> None:
    model = net()
    optimizer = path(GSGD, max_multiplier=1.0)(model, ps.trace(model, X))
    model(X).square().mean().backward()
    before = [p.grad.clone() for p in model.parameters()]
    with pytest.raises((InputError, InputTypeError), match="norm_ found max_norm="):
        optimizer.clip_path_grad_norm_(bad)
    assert all(map(torch.equal, before, (p.grad for p in model.parameters())))
    # (measures the norm)
    assert optimizer.clip_path_grad_norm_(float("inf")) > 0


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("kind", [GSGD, GAdam, PathSGD])
def test_weights_without_values_are_refused(kind: type[Any], named: bool) -> None:
    with torch.device("meta"):
        model = net()
    skeleton = ps.trace(model, torch.ones(2, 4, dtype=torch.float64, device="meta")).skeleton()
    given = model.named_parameters() if named else model.parameters()
    more = {"model": model, "example": (X,)} if kind is PathSGD else {"skeleton": skeleton}
    words = f"{kind.__name__} found '0.weight' and others without values .* load or initialise"
    with pytest.raises(InputError, match=words):
        kind(given, lr=0.1, **more)


def test_joined_optimizers_take_no_groups_later() -> None:
    model = net()
    inner = [optim.Muon(matrices(model), lr=0.1), optim.AdamW(biases(model), lr=0.01)]
    for joined in (Shell(inner), GaugeFixed(inner, ps.trace(model, X))):
        with pytest.raises(InputError, match=r"(after it was made|expected all of them before)"):
            joined.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
        assert len(joined.param_groups) == 2
    with pytest.raises(InputError, match="not the model's"):
        alone = path_sgd()(model, None)
        alone.add_param_group({"params": [nn.Parameter(torch.ones(1))]})


# --- what Path-SGD cannot take


def gated(how: Callable[[Tensor, Tensor], Tensor]) -> nn.Module:
    def forward(model: Any, x: Tensor) -> Tensor:
        h = torch.relu(model.a(x))
        return model.c(how(h, torch.relu(model.b(h))))

    return network(forward, a=nn.Linear(3, 4), b=nn.Linear(4, 4), c=nn.Linear(4, 2))


def between(layer: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), layer, nn.Linear(4, 2))


def returned(outputs: Callable[[Tensor], Any]) -> nn.Module:
    return network(lambda model, x: outputs(model.layer(x)), layer=nn.Linear(3, 2))


STRANGE: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "a difference": (
        lambda: network(
            lambda model, x: model.b(torch.relu(model.a(x))) - model.c(x),
            a=nn.Linear(3, 4), b=nn.Linear(4, 2), c=nn.Linear(3, 2),
        ),
        "kappa negative for 'c",
    ),
    "slopes": (lambda: between(nn.PReLU()), "kappa 0 for '1.weight'"),
    "softmax": (lambda: nn.Sequential(nn.Linear(3, 2), nn.Softmax(-1)), "softmax"),
    "norm": (lambda: between(nn.LayerNorm(4)), "layer_norm"),
    "maxima": (lambda: nn.Sequential(nn.Linear(3, 4), nn.MaxPool1d(2)), "max_pool1d in the model"),
    "a gate": (lambda: gated(torch.mul), "aten.mul of values"),
    "a square": (lambda: gated(lambda x, y: x + y.square()), "aten.square of values"),
    "gates": (lambda: nn.GRU(3, 2), "gru"),
    "complex numbers": (
        lambda: returned(lambda y: torch.view_as_complex(torch.stack([y, y], -1))),
        "complex outputs of Network, expected real ones",
    ),
    "no tensor": (lambda: returned(lambda y: y.shape), "no tensor in the outputs of Network, exp"),
}  # fmt: skip


@pytest.mark.parametrize("name", STRANGE)
def test_path_sgd_refuses_networks_that_are_no_sums_over_paths(name: str) -> None:
    make, why = STRANGE[name]
    model = make()
    with pytest.raises(UnsupportedError, match=why):
        PathSGD(model.named_parameters(), model=model, example=(torch.ones(1, 3),))


class Doubled(torch.autograd.Function):
    """A function without ``setup_context``, as older code writes them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * grad


@pytest.mark.parametrize("checkpointed", [False, True])
def test_path_sgd_steps_through_functions_of_older_code(checkpointed: bool) -> None:
    """It needs their second derivatives only for weights that paths pass again."""

    def forward(model: Any, x: Tensor) -> Tensor:
        h = torch.relu(model.first(x))
        for _ in range(model.times):
            layer = model.inner
            h = checkpoint(layer, h, use_reentrant=False) if checkpointed else layer(h)
            h = torch.relu(Doubled.apply(h) if model.older else 2 * h)
        return model.last(h)

    parts = {"first": nn.Linear(4, 6), "inner": nn.Linear(6, 6), "last": nn.Linear(6, 2)}
    plain = network(forward, **parts, times=1, older=False).double()
    model = copy.deepcopy(plain)
    model.older = True
    for one in (plain, model):
        step(one, PathSGD(one.named_parameters(), 0.01, model=one, example=(X[:1],)))
    for one, other in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)
    model.times = 2
    words = r"PathSGD cannot take second derivatives of Network by 'inner\.(weight|bias)'"
    with pytest.raises(UnsupportedError, match=words):
        step(model, path_sgd(example=(X[:1],))(model, None))
    step(model, path_sgd(example=(X[:1],), second=False)(model, None))


@pytest.mark.parametrize("late", [False, True])
def test_path_sgd_refuses_sparse_gradients(late: bool) -> None:
    embedding = nn.Embedding(9, 6, sparse=not late)
    model, tokens = nn.Sequential(embedding, nn.Flatten(), nn.Linear(12, 3)), torch.ones(4, 2).int()
    before = copy.deepcopy(model)
    with pytest.raises(UnsupportedError, match=r"a sparse gradient of '0\.weight', .*use dense"):
        optimizer = PathSGD(model.parameters(), 0.1, model=model, example=(tokens[:1],))
        embedding.sparse = True
        step(model, optimizer, tokens)
    assert all(map(torch.equal, before.parameters(), model.parameters()))


# --- what a gauge that is kept fixed meets


@pytest.mark.parametrize("key", ["phi", "turns", "kinds", "targets", "norms", "return_to"])
def test_a_gauge_with_a_missing_or_damaged_part_is_refused(key: str) -> None:
    model = net()
    optimizer = GaugeFixed(optim.AdamW(model.parameters(), lr=0.01), ps.trace(model, X))
    step(model, optimizer)
    good = optimizer.state_dict()
    first = good["state"][0]
    without = {name: value for name, value in first["gauge"].items() if name != key}
    for bad in (without, {**without, key: None}, {**without, key: [1.0]}):
        with pytest.raises(InputError, match="GaugeFixed found a state"):
            state = {**good["state"], 0: {**first, "gauge": bad}}
            optimizer.load_state_dict({**good, "state": state})
    optimizer.load_state_dict(good)


class Strange(Lion):
    """Remembers what nobody has said how to rescale."""

    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            self.state[p]["whatever"] = torch.zeros_like(p)


def test_a_frozen_weight_or_an_unknown_buffer_is_named() -> None:
    model = net()
    graph = ps.trace(model, X)
    optimizer = GaugeFixed(sgd(model), graph)
    model[0].weight.requires_grad_(False)
    with pytest.raises(PathspaceError, match=r"'0\.weight' frozen since"):
        optimizer.step()
    model[0].weight.requires_grad_(True)
    with pytest.warns(UserWarning, match=r"2 trained parameters .*\(first: '0\.bias'\)"):
        GaugeFixed(optim.SGD(matrices(model), lr=0.1), graph)
    with pytest.raises(PathspaceError, match="register_transport"):
        GaugeFixed(Strange(model.parameters(), lr=0.1), graph).step()

    class Known(Strange):
        pass

    ps.register_transport(Known, {"whatever": 1})
    GaugeFixed(Known(model.parameters(), lr=0.1), graph).step()


def weights(model: nn.Module) -> Tensor:
    return nn.utils.parameters_to_vector(model.parameters()).detach().clone()


def test_a_step_that_is_interrupted_leaves_the_users_gauge() -> None:
    model = net()
    graph = ps.trace(model, X)
    ps.rescale_(model, graph, torch.linspace(-3, 3, graph.num_units).double())
    before = weights(model)

    def interrupted() -> float:
        raise KeyboardInterrupt

    fails: list[tuple[type[optim.Optimizer], Any, type[BaseException], str]] = [
        (optim.AdamW, interrupted, KeyboardInterrupt, "^$"),
        (Strange, None, UnsupportedError, "buffer 'whatever'"),
    ]
    for kind, closure, error, words in fails:
        optimizer = GaugeFixed(kind(model.parameters(), lr=0.1), graph, return_to="user")
        with pytest.raises(error, match=words):
            optimizer.step(closure)
        torch.testing.assert_close(weights(model), before, rtol=1e-12, atol=0)
