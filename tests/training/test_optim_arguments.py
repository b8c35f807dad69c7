"""Wrong arguments of optimizers, and states that are none, end in one sentence."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import pathspace as ps
from pathspace import InputError
from pathspace.training import GSGD, GAdam, GaugeFixed, PathSGD
from pathspace.training.optim.shell import Shell

X = torch.randn(16, 4, generator=torch.Generator().manual_seed(9), dtype=torch.float64)


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2)).double()


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    (model(X) - 1).square().mean().backward()
    optimizer.step()


def gauge_fixed(model: nn.Module) -> GaugeFixed:
    return GaugeFixed(torch.optim.AdamW(model.parameters(), lr=0.01), ps.trace(model, X))


def joined(model: nn.Module) -> Shell:
    weights, biases = ([p for p in model.parameters() if p.dim() == dims] for dims in (2, 1))
    return Shell([torch.optim.Muon(weights, lr=0.1), torch.optim.AdamW(biases, lr=0.01)])


WRAPPERS: dict[str, Callable[[nn.Module], Any]] = {
    "gauge-fixed": gauge_fixed,
    "joined": joined,
    "path-sgd": lambda model: PathSGD(model.parameters(), 0.01, model=model, example=(X,)),
}
NO_STATES = (None, [], "state", {}, {"state": {}}, {"param_groups": []}, {"state": None})


@pytest.mark.parametrize("kind", WRAPPERS)
def test_what_is_no_state_is_refused_and_nothing_changes(kind: str) -> None:
    model = mlp()
    optimizer = WRAPPERS[kind](model)
    step(model, optimizer)
    before = copy.deepcopy(optimizer.state_dict())
    for bad in NO_STATES:
        with pytest.raises(InputError, match=f"{type(optimizer).__name__} found a"):
            optimizer.load_state_dict(bad)
    after = optimizer.state_dict()
    assert str(after) == str(before)


@pytest.mark.parametrize("key", ["phi", "turns", "kinds", "targets", "norms", "return_to"])
def test_a_gauge_with_a_missing_or_damaged_part_is_refused(key: str) -> None:
    model = mlp()
    optimizer = gauge_fixed(model)
    step(model, optimizer)
    good = optimizer.state_dict()
    first = good["state"][0]
    gauge = first["gauge"]
    without = {name: value for name, value in gauge.items() if name != key}
    for bad in (without, {**gauge, key: None}, {**gauge, key: [1.0]}):
        with pytest.raises(InputError, match="GaugeFixed found a state"):
            state = {**good["state"], 0: {**first, "gauge": bad}}
            optimizer.load_state_dict({**good, "state": state})
    optimizer.load_state_dict(good)


@pytest.mark.parametrize("bad", [-1.0, float("nan"), "1", None, True, torch.ones(2)])
def test_a_bound_of_the_norm_is_a_number_of_at_least_0(bad: object) -> None:
    model = mlp()
    skeleton = ps.trace(model, X).skeleton()
    optimizer = GSGD(model.named_parameters(), lr=1e-3, skeleton=skeleton)
    model(X).square().mean().backward()
    before = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    with pytest.raises((InputError, ps.InputTypeError), match="norm_ found max_norm="):
        optimizer.clip_path_grad_norm_(bad)  # type: ignore[arg-type]
    kept = [p.grad for p in model.parameters()]
    for one, other in zip(kept, before, strict=True):
        assert isinstance(one, Tensor) and torch.equal(one, other)
    # (measures the norm)
    assert optimizer.clip_path_grad_norm_(float("inf")) > 0


def test_a_model_is_a_module_and_a_gauge_is_fixed_once() -> None:
    model = mlp()
    graph, plain = ps.trace(model, X), torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ps.InputTypeError, match="a str as its model"):
        GaugeFixed(plain, graph, model="x")  # type: ignore[arg-type]
    with pytest.raises(ps.InputTypeError, match=r"GaugeFixed as its optimizer.*unwrap"):
        GaugeFixed(GaugeFixed(plain, graph), graph)


def weights(model: nn.Module) -> Tensor:
    return nn.utils.parameters_to_vector(model.parameters()).detach().clone()


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.a = nn.Embedding(9, 6, sparse=True), nn.Linear(6, 8)
        self.b = nn.Linear(8, 3)

    def forward(self, ids: Tensor) -> Tensor:
        return self.b(torch.relu(self.a(self.words(ids).mean(1))))


def test_a_step_that_is_interrupted_leaves_the_users_gauge() -> None:
    model = mlp()
    graph = ps.trace(model, X)
    ps.rescale_(model, graph, torch.linspace(-3, 3, graph.num_units).double())
    plain = torch.optim.AdamW(model.parameters(), lr=0.01)
    optimizer = GaugeFixed(plain, graph, return_to="user")
    before = weights(model)

    def interrupted() -> float:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        optimizer.step(interrupted)
    torch.testing.assert_close(weights(model), before, rtol=1e-12, atol=0)

    ids, rows = torch.arange(12).remainder(9).view(3, 4), Words()
    sparse = torch.optim.SGD(rows.parameters(), lr=0.1)
    optimizer = GaugeFixed(sparse, ps.trace(rows, ids), return_to="user")
    rows(ids).square().sum().backward()
    before = weights(rows)
    with pytest.raises(ps.UnsupportedError, match=r"sparse gradient of 'words.weight'"):
        optimizer.step()
    assert torch.equal(weights(rows), before)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = rows(ids).square().sum()
        loss.backward()
        return loss

    optimizer.zero_grad()
    with pytest.raises(ps.UnsupportedError, match=r"sparse gradient of 'words.weight'"):
        optimizer.step(closure)
    torch.testing.assert_close(weights(rows), before)

    class Strange(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:  # type: ignore[override]
            self.state[model[0].weight]["unknown"] = torch.zeros_like(model[0].weight)

    before = weights(model)
    optimizer = GaugeFixed(Strange(model.parameters(), lr=0.1), graph, return_to="user")
    with pytest.raises(ps.UnsupportedError, match="buffer 'unknown'"):
        optimizer.step()
    torch.testing.assert_close(weights(model), before, rtol=1e-12, atol=0)


@pytest.mark.parametrize("way", ["canonical", "user"])
def test_only_the_last_wrapper_takes_steps(way: str) -> None:
    model = mlp()
    graph = ps.trace(model, X)
    plain = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    first = GaugeFixed(plain, graph, return_to=way)
    step(model, first)
    twin, copied = copy.deepcopy((model, first))
    step(twin, copied)
    second = GaugeFixed(plain, graph, return_to=way)
    for _ in range(2):
        with pytest.raises(InputError, match="GaugeFixed found a step after unwrap"):
            step(model, first)
        second.unwrap()
        first, second = second, copied
        model = twin


def test_parameters_belong_to_one_optimizer_of_the_model() -> None:
    model, other = mlp(), mlp()
    graph, plain = ps.trace(model, X), torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(InputError, match="no weight of the reduction graph among"):
        GaugeFixed(plain, graph, model=other)
    with pytest.raises(InputError, match="a parameter in two of its optimizers"):
        GaugeFixed([plain, plain], graph)
    both = joined(model)
    groups = len(both.param_groups)
    with pytest.raises(InputError, match="a parameter group after it was made"):
        both.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
    assert len(both.param_groups) == groups


def path_and_plain(model: nn.Module) -> Shell:
    first, last = model[0].parameters(), model[2].parameters()
    path = PathSGD(first, lr=0.01, model=model, example=(X[:1],), every=3)
    return Shell([path, torch.optim.SGD(last, lr=0.01)])


def test_joined_states_hold_what_their_optimizers_add() -> None:
    """PathSGD counts its steps, of which every third computes kappa anew."""
    straight = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2)).double()
    optimizer = path_and_plain(straight)
    for _ in range(4):
        step(straight, optimizer)
    resumed = copy.deepcopy(straight)
    again = path_and_plain(resumed)
    state = optimizer.state_dict()
    again.load_state_dict(copy.deepcopy(state))
    for model, one in ((straight, optimizer), (resumed, again)):
        for _ in range(4):
            step(model, one)
    for a, b in zip(straight.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_copies_follow_running_statistics_to_another_type(how: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    x = X.float()
    pair = model, GaugeFixed(torch.optim.SGD(model.parameters(), lr=0.0), ps.trace(model, x))
    twin, optimizer = copy.deepcopy(pair) if how == "deepcopy" else pickle.loads(pickle.dumps(pair))
    twin.double()
    graph = ps.trace(twin, X)
    ps.rescale_(twin, graph, torch.linspace(-2, 2, graph.num_units).double())
    before = twin.eval()(X).detach()
    for _ in range(6):
        step(twin, optimizer)
    torch.testing.assert_close(twin(X).detach(), before, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("make", [GSGD, GAdam])
def test_weights_without_values_are_refused(make: Callable[..., Any], named: bool) -> None:
    with torch.device("meta"):
        model = mlp()
        skeleton = ps.trace(model, torch.ones(2, 4, dtype=torch.float64)).skeleton()
    given = model.named_parameters() if named else model.parameters()
    words = f"{make.__name__} found '0.weight' and others without values .* load or initialise"
    with pytest.raises(InputError, match=words):
        make(given, lr=0.1, skeleton=skeleton)


def test_path_sgd_refuses_tensors_without_values() -> None:
    model, inputs = mlp(), torch.ones(1, 4, dtype=torch.float64, device="meta")
    with pytest.raises(InputError, match="PathSGD found 'an input' without values"):
        PathSGD(model.parameters(), 0.1, model=model, example=(inputs,))
    model = model.to("meta")
    with pytest.raises(InputError, match=r"PathSGD found '0\.weight' and others without values"):
        PathSGD(model.parameters(), 0.1, model=model, example=(inputs,))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"example": None}, "a NoneType as its example, expected a tensor or a tuple of inputs"),
        ({"example": {"input": X}}, "a dict as its example, expected a tensor"),
        ({"reused": 3}, "reused=3, expected a list of names of parameters, or None"),
        ({"reused": "0.weight"}, "reused='0.weight', expected a list of names"),
        ({"every": 2.5}, r"every=2\.5, expected a whole number from 1"),
        ({"every": 0}, "every=0, expected a whole number from 1"),
        ({"maximize": "x"}, "maximize='x', expected True or False"),
        ({"second": "x"}, "second='x', expected True or False"),
    ],
)
def test_settings_of_path_sgd_end_in_one_sentence(settings: dict[str, Any], words: str) -> None:
    model = mlp()
    with pytest.raises((InputError, ps.InputTypeError), match=f"PathSGD found {words}"):
        PathSGD(model.parameters(), 0.1, **{"model": model, "example": (X,), **settings})


class Doubled(torch.autograd.Function):
    """A function without ``setup_context``, as older code writes them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * grad


def keep_grad(layer: nn.Module, h: Tensor) -> Tensor:
    h = layer(h)
    h.retain_grad()
    return 2 * h


class Through(nn.Module):
    """Three layers, the middle one called by a function, which doubles its results."""

    def __init__(self, call: Callable[[nn.Module, Tensor], Tensor], tied: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.inner, self.last = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 2)
        self.call, self.times = call, 1 + tied

    def forward(self, x: Tensor) -> Any:
        h = torch.relu(self.first(x))
        for _ in range(self.times):
            h = torch.relu(self.call(self.inner, h))
        return self.last(h)


CALLS: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "plain": lambda layer, h: 2 * layer(h),
    "function": lambda layer, h: Doubled.apply(layer(h)),
    "retained": keep_grad,
    "checkpointed": lambda layer, h: 2 * checkpoint(layer, h, use_reentrant=False),
}


@pytest.mark.parametrize("name", CALLS)
def test_path_sgd_steps_through_whatever_can_be_differentiated(name: str) -> None:
    ends = []
    for call in (CALLS["plain"], CALLS[name]):
        model = Through(call).double()
        step(model, PathSGD(model.named_parameters(), 0.01, model=model, example=(X[:1],)))
        ends.append([parameter.detach() for parameter in model.parameters()])
    for one, other in zip(*ends, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)


def test_path_sgd_names_what_has_no_second_derivative() -> None:
    model = Through(CALLS["function"], tied=True).double()
    words = r"PathSGD cannot take second derivatives of Through by 'inner\.(weight|bias)'"
    with pytest.raises(ps.UnsupportedError, match=words):
        step(model, PathSGD(model.named_parameters(), 0.01, model=model, example=(X[:1],)))
    more = {"model": model, "example": (X[:1],), "second": False}
    step(model, PathSGD(model.named_parameters(), 0.01, **more))


@pytest.mark.parametrize(
    ("outputs", "words"),
    [
        (lambda y: torch.complex(y, y), "complex outputs of Returned, expected real ones"),
        (lambda y: y.shape, "no tensor in the outputs of Returned, expected real ones"),
    ],
)
def test_path_sgd_names_outputs_without_a_path_norm(outputs: Any, words: str) -> None:
    class Returned(nn.Linear):
        def forward(self, x: Tensor) -> Any:
            return outputs(super().forward(x))

    model = Returned(4, 2).double()
    with pytest.raises(ps.UnsupportedError, match=f"PathSGD found {words}"):
        PathSGD(model.named_parameters(), 0.1, model=model, example=(X[:1],))


@pytest.mark.parametrize("make", [GSGD, GAdam])
@pytest.mark.parametrize("name", ["maximize", "relative"])
def test_switches_are_true_or_false(make: Callable[..., Any], name: str) -> None:
    model = mlp()
    skeleton = ps.trace(model, X).skeleton()
    for bad in ("x", 2, None, 0.5):
        with pytest.raises(ps.InputTypeError, match=f"{name}={bad!r}, expected True or False"):
            make(model.named_parameters(), lr=0.1, skeleton=skeleton, **{name: bad})
    make(model.named_parameters(), lr=0.1, skeleton=skeleton, **{name: True})


@pytest.mark.parametrize("late", [False, True])
def test_path_sgd_refuses_sparse_gradients(late: bool) -> None:
    torch.manual_seed(0)
    embedding = nn.Embedding(9, 6, sparse=not late)
    model, tokens = nn.Sequential(embedding, nn.Flatten(), nn.Linear(12, 3)), torch.ones(4, 2).int()
    with pytest.raises(ps.UnsupportedError, match=r"a sparse gradient of '0\.weight', .*use dense"):
        optimizer = PathSGD(model.parameters(), 0.1, model=model, example=(tokens[:1],))
        embedding.sparse = True
        before = [p.detach().clone() for p in model.parameters()]
        model(tokens).square().mean().backward()
        optimizer.step()
    assert not late or all(map(torch.equal, before, model.parameters()))
