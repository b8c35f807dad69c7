"""Optimizers on path values against torch's own optimizers on the vector of path
values, and their invariance.
"""

from __future__ import annotations

import pytest
import torch
from descent import descend
from oracles.adam import train_on_path_values
from torch import nn
from training_pairs import Problem, largest_difference

from pathspace import InputError, UnsupportedError
from pathspace.training import GSGD, GAdam, PathSGD

NETWORKS = [
    "mlp_2x4x1x3x2",
    "residual_mlp",
    "conv_gap",
    "conv_depthwise",
    "rnn_op",
    "rnn_op_2_layers",
    "batchnorm_conv",
    "batchnorm_cnn",
    "transformer_block",
    "gated_product",
    "tied_transposed",
]


@pytest.mark.parametrize("rule", ["modulo", "random"])
@pytest.mark.parametrize("name", NETWORKS)
def test_gadam_is_adam_on_path_values(name: str, rule: str) -> None:
    case = Problem(name, rule)
    # a tiny step, so that no path value comes near 0 (the oracle takes logarithms)
    settings = {"lr": 1e-3, "betas": (0.8, 0.95), "eps": 1e-6}
    expected = train_on_path_values(
        case.model, case.loss, case.oracle(), lambda v: torch.optim.Adam(v, **settings), 6
    )
    case.train(
        case.model, lambda m: GAdam(m.named_parameters(), skeleton=case.skeleton(m), **settings), 6
    )
    assert largest_difference(case.model, expected) < 1e-10


@pytest.mark.parametrize("rule", ["modulo", "random"])
@pytest.mark.parametrize(
    "more", [{}, {"dampening": 0.5}, {"nesterov": True}], ids=["plain", "dampening", "nesterov"]
)
@pytest.mark.parametrize("name", NETWORKS)
def test_momentum_is_that_of_path_values(name: str, more: dict[str, object], rule: str) -> None:
    case = Problem(name, rule)
    settings = {"lr": 1e-5, "momentum": 0.9, **more}
    expected = train_on_path_values(
        case.model, case.loss, case.oracle(), lambda v: torch.optim.SGD(v, **settings), 5
    )
    case.train(
        case.model, lambda m: GSGD(m.named_parameters(), skeleton=case.skeleton(m), **settings), 5
    )
    assert largest_difference(case.model, expected) < 1e-10


@pytest.mark.parametrize(
    "name", ["mlp_2x3x5x2", "rnn_op", "residual_mlp", "batchnorm_conv", "transformer_block"]
)
def test_weight_decay_acts_on_path_values(name: str) -> None:
    # (a gradient that is 0 but for rounding, say 1e-15, divided by the usual eps of 1e-8 would
    # depend on the processor)
    for make, like, more in (
        (GSGD, torch.optim.SGD, {}),
        (GAdam, torch.optim.AdamW, {"eps": 1e-6}),
    ):
        case = Problem(name)
        settings = {"lr": 1e-3, "weight_decay": 0.3, **more}
        expected = train_on_path_values(
            case.model,
            case.loss,
            case.oracle(),
            lambda v, like=like, settings=settings: like(v, **settings),
            3,
        )
        case.train(
            case.model,
            lambda m, make=make, settings=settings, case=case: make(
                m.named_parameters(), skeleton=case.skeleton(m), **settings
            ),
            3,
        )
        assert largest_difference(case.model, expected) < 1e-10


MEMBERS = {
    "gsgd": lambda m, s: GSGD(m.named_parameters(), lr=0.01, skeleton=s),
    "momentum": lambda m, s: GSGD(m.named_parameters(), lr=0.001, momentum=0.9, skeleton=s),
    "nesterov": lambda m, s: GSGD(
        m.named_parameters(), lr=0.001, momentum=0.9, nesterov=True, skeleton=s
    ),
    "dampening": lambda m, s: GSGD(
        m.named_parameters(), lr=0.002, momentum=0.9, dampening=0.5, skeleton=s
    ),
    "decay": lambda m, s: GSGD(m.named_parameters(), lr=0.01, weight_decay=0.1, skeleton=s),
    "cap": lambda m, s: GSGD(m.named_parameters(), lr=0.01, max_multiplier=0.5, skeleton=s),
    "cap_decay_momentum": lambda m, s: GSGD(
        m.named_parameters(),
        lr=0.01,
        momentum=0.5,
        weight_decay=0.1,
        max_multiplier=2.0,
        skeleton=s,
    ),
    "tensor_lr": lambda m, s: GSGD(
        m.named_parameters(), lr=torch.tensor(0.01), max_multiplier=2.0, skeleton=s
    ),
    "gadam": lambda m, s: GAdam(m.named_parameters(), lr=0.003, skeleton=s),
    "gadam_decay": lambda m, s: GAdam(
        m.named_parameters(), lr=0.003, eps=1e-2, weight_decay=0.1, skeleton=s
    ),
}


# where a rate of descent makes the loss jump about, rounding grows from step to
# step whatever the optimizer
GENTLE = {"transformer_block": 0.1}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["residual_mlp", "rnn_op_2_layers", "conv_gap", "batchnorm_cnn", "transformer_block"]
)
@pytest.mark.parametrize("member", MEMBERS)
def test_a_hundred_steps_do_not_see_the_scales(member: str, name: str) -> None:
    case = Problem(name, unit=True)

    def make(model: nn.Module) -> torch.optim.Optimizer:
        optimizer = MEMBERS[member](model, case.skeleton(model))
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] * GENTLE.get(name, 1.0)
        return optimizer

    runs = [case.train(m, make, 100) for m in case.twins(2)]
    assert runs[0][-1] < runs[0][0]
    assert runs[1] == pytest.approx(runs[0], rel=1e-9)


def test_clipping_by_the_norm_of_path_gradients_does_not_see_the_scales() -> None:
    case = Problem("rnn_op", unit=True)
    runs, norms = [], []
    for clip in (True, False):
        for model in case.twins(2):
            optimizer = GSGD(model.named_parameters(), lr=0.05, skeleton=case.skeleton(model))
            losses = []
            for _ in range(10):
                optimizer.zero_grad()
                value = case.loss(model)
                value.backward()
                if clip:
                    norms.append(float(optimizer.clip_path_grad_norm_(0.1)))
                else:
                    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
                losses.append(value.item())
            runs.append(losses)
    assert norms[0] > 0.1
    assert norms[10:] == pytest.approx(norms[:10], rel=1e-9)
    assert runs[1] == pytest.approx(runs[0], rel=1e-9)
    # the usual norm is not a function of path values
    assert abs(runs[3][-1] / runs[2][-1] - 1) > 1e-3


@pytest.mark.parametrize("member", [GSGD, GAdam])
def test_the_path_gradient_norm_is_that_of_the_oracle(member: type) -> None:
    case = Problem("rnn_op_2_layers")
    oracle = case.oracle()
    start = dict(case.model.named_parameters())
    vector = oracle.vector(start).detach()
    values = oracle.path_values(vector).requires_grad_()
    tensors = oracle.tensors(oracle.weights(values, vector[torch.from_numpy(oracle.fixed)]), start)
    (gradient,) = torch.autograd.grad(case.loss(case.model, start | tensors), values)
    optimizer = member(case.model.named_parameters(), skeleton=case.skeleton(case.model))
    case.loss(case.model).backward()
    norm = optimizer.clip_path_grad_norm_(1e-3)
    assert float(norm) == pytest.approx(float(gradient.norm()), rel=1e-10)
    assert float(optimizer.clip_path_grad_norm_(1.0)) == pytest.approx(1e-3, rel=1e-2)


# --- path values that cross zero


def test_a_path_value_that_changes_sign_is_carried_out_and_counted() -> None:
    case = Problem("mlp_2x3x5x2", unit=True)
    expected_sign, outcome = [], []
    for model in case.twins(2):
        optimizer = GSGD(model.named_parameters(), lr=8.0, skeleton=case.skeleton(model))
        case.step(model, optimizer)
        expected_sign.append(optimizer.clip_counts.tolist())
        outcome.append(case.loss(model).item())
    assert expected_sign[0] == expected_sign[1]
    assert expected_sign[0][0] > 0
    assert expected_sign[0][1] == 0
    assert outcome[1] == pytest.approx(outcome[0], rel=1e-9)


def test_a_path_value_that_would_become_zero_is_stopped_and_counted() -> None:
    model = nn.Sequential(
        nn.Linear(1, 1, bias=False), nn.ReLU(), nn.Linear(1, 1, bias=False)
    ).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1.0)
    import pathspace as ps

    skeleton = ps.trace(model, torch.ones(1, 1, dtype=torch.float64)).skeleton()
    optimizer = GSGD(model.named_parameters(), lr=1.0, skeleton=skeleton, min_ratio=1e-6)
    # f = v x with v = 1, L = v: dL/dv = 1, so v - 1 = 0 exactly
    model(torch.ones(1, 1, dtype=torch.float64)).sum().backward()
    optimizer.step()
    assert optimizer.clip_counts.tolist() == [1, 1]
    assert model[0].weight.item() == pytest.approx(1e-6)
    assert all(torch.isfinite(p).all() for p in model.parameters())


def test_a_bound_on_the_multiplier_makes_default_initialisation_usable() -> None:
    import pathspace as ps

    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1)
    )
    x = torch.randn(64, 8)
    y = x.square().mean(1, keepdim=True)
    start = [p.detach().clone() for p in model.parameters()]
    ends = {}
    for cap in (None, 1.0):
        with torch.no_grad():
            for p, value in zip(model.parameters(), start, strict=True):
                p.copy_(value)
        optimizer = GSGD(
            model.named_parameters(),
            lr=0.05,
            skeleton=ps.trace(model, x).skeleton(),
            max_multiplier=cap,
        )
        for _ in range(60):
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
        ends[cap] = loss.item()
    first = nn.functional.mse_loss(model(x) * 0, y).item()
    assert ends[1.0] < 0.5 * first
    assert not ends[None] < ends[1.0]


# --- Path-SGD


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["mlp_2x3x5x2", "residual_mlp", "rnn_first_input_nobias", "rnn_op", "rnn_op_2_layers"]
)
def test_kappa_is_that_of_all_paths(name: str) -> None:
    import pathspace as ps

    case = Problem(name)
    graph = ps.trace(case.model, *case.args)
    total = {key: torch.zeros_like(p).detach() for key, p in case.model.named_parameters()}
    for path in graph.paths():
        square = path.value**2
        for key, index, count in path.edges:
            # kappa = dG/dtheta + 2 theta d2G/dtheta2 of theta^count
            weight = case.model.get_parameter(key).detach()[index]
            total[key][index] += square * (count + 2 * count * (count - 1)) / weight**2
    model, example = case.model, tuple(a[:1] for a in case.args)
    optimizer = PathSGD(model.named_parameters(), model=model, example=example)
    for key, kappa in optimizer.path_norm.kappa().items():
        torch.testing.assert_close(kappa, total[key], rtol=1e-10, atol=0)
    plain = optimizer.path_norm.kappa(second=False)
    if name.startswith("rnn"):
        assert any(float((plain[key] - total[key]).abs().max()) > 1e-3 for key in plain)


@pytest.mark.parametrize("name", ["conv_fully", "conv_gap", "residual_cnn"])
def test_kappa_of_convolutions_is_half_the_second_derivative(name: str) -> None:
    """A tap is met at every position, by paths of their own: all of them are in the path
    norm of the whole output.
    """
    case = Problem(name)
    model, example = case.model, tuple(a[:1] for a in case.args)
    ones = tuple(torch.ones_like(a) for a in example)
    kappa = PathSGD(model.named_parameters(), model=model, example=example).path_norm.kappa()
    start = {key: p.detach() for key, p in model.named_parameters()}

    def norm(weight: torch.Tensor, key: str) -> torch.Tensor:
        squares = {k: v.square() for k, v in {**start, key: weight}.items()}
        return torch.func.functional_call(model, squares, ones).sum()

    for key, weight in start.items():
        hessian = torch.func.hessian(norm)(weight, key).reshape(weight.numel(), weight.numel())
        expected = 0.5 * hessian.diagonal().view(weight.shape)
        torch.testing.assert_close(kappa[key], expected, rtol=1e-10, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("second", [True, False])
@pytest.mark.parametrize("name", ["residual_mlp", "rnn_op", "conv_flatten_spatial"])
def test_path_sgd_does_not_see_the_scales(name: str, second: bool) -> None:
    case = Problem(name)
    example = tuple(a[:1] for a in case.args)
    runs = [
        case.train(
            m,
            lambda m: PathSGD(
                m.named_parameters(), lr=0.01, model=m, example=example, second=second
            ),
            20,
        )
        for m in case.twins(2)
    ]
    assert runs[0][-1] < runs[0][0]
    assert runs[1] == pytest.approx(runs[0], rel=1e-9)


class Passed(nn.Module):
    """A recurrence in depth, whose matrix the code reads once, in several ways."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form, self.enter, self.leave = form, nn.Linear(3, 4), nn.Linear(4, 2)
        self.weight = nn.Parameter(torch.rand(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.enter(x))
        if self.form == "transposed":
            weight = self.weight.T
            for _ in range(3):
                x = torch.relu(x @ weight)
        elif self.form == "power":
            x = x @ torch.linalg.matrix_power(self.weight, 2)
        elif self.form == "product":
            x = x @ (self.weight * self.weight)
        elif self.form == "square":
            x = x @ self.weight.square()
        else:
            left, right = self.weight.chunk(2)
            x = x[:, :2] @ left + x[:, 2:] @ right
        return self.leave(x)


@pytest.mark.parametrize("form", ["transposed", "power", "product", "square", "chunks"])
def test_weights_that_paths_pass_again_are_found(form: str) -> None:
    torch.manual_seed(0)
    model, x = Passed(form).double(), torch.ones(1, 3).double()
    norm = PathSGD(model.named_parameters(), model=model, example=(x,)).path_norm
    assert norm.reused == (() if form == "chunks" else ("weight",))
    start = {key: p.detach() for key, p in model.named_parameters()}

    def gamma(weight: torch.Tensor) -> torch.Tensor:
        squares = {key: p.square() for key, p in {**start, "weight": weight}.items()}
        return torch.func.functional_call(model, squares, (x,)).sum()

    hessian = torch.func.hessian(gamma)(start["weight"]).reshape(16, 16)
    torch.testing.assert_close(norm.kappa()["weight"].flatten(), hessian.diagonal() / 2)


class Halves(nn.Module):
    """Positive and negative parts, each with weights of its own; one column is not read."""

    def __init__(self, negative: bool) -> None:
        super().__init__()
        self.negative, self.enter, self.leave = negative, nn.Linear(3, 5), nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.enter(x)[:, :4]
        return self.leave(torch.cat([torch.relu(x), torch.relu(-x if self.negative else x)], 1))


def test_path_sgd_refuses_networks_of_which_it_would_train_a_half() -> None:
    model, x = Halves(True), torch.ones(1, 3)
    with pytest.raises(UnsupportedError, match=r"kappa 0 for 'leave\.weight'"):
        PathSGD(model.named_parameters(), model=model, example=(x,))
    model = Halves(False)
    kappa = PathSGD(model.named_parameters(), model=model, example=(x,)).path_norm.kappa()
    assert kappa["leave.weight"].all() and not kappa["enter.weight"][4].any()


def test_the_shared_weight_term_dominates_near_the_identity() -> None:
    rnn = nn.Sequential(nn.RNN(2, 8, nonlinearity="relu", bias=False, batch_first=True)).double()
    with torch.no_grad():
        rnn[0].weight_hh_l0.copy_(torch.eye(8))

    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = rnn[0]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.rnn(x)[0][:, -1]

    model = Last()
    norm = PathSGD(
        model.named_parameters(), model=model, example=(torch.ones(1, 30, 2).double(),)
    ).path_norm
    both, first = (norm.kappa(second)["rnn.weight_hh_l0"].diagonal() for second in (True, False))
    assert float(((both - first) / both).min()) > 0.9


def test_path_sgd_refuses_what_is_no_sum_over_paths() -> None:
    model = nn.Sequential(
        nn.Conv2d(1, 2, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(2, 1)
    )
    with pytest.raises(UnsupportedError, match="max_pool2d in the model"):
        PathSGD(model.named_parameters(), model=model, example=(torch.ones(1, 1, 4, 4),))
    linear = nn.Linear(1, 1)
    with pytest.raises(InputError, match="not the model's"):
        PathSGD([nn.Parameter(torch.ones(1))], model=linear, example=(torch.ones(1, 1),))


@pytest.mark.parametrize(("every", "renewed"), [(1, [0, 1, 2, 3, 4]), (2, [0, 2, 4]), (3, [0, 3])])
def test_path_sgd_renews_its_scaling_at_every_so_many_steps(
    every: int, renewed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4, bias=False), nn.ReLU(), nn.Linear(4, 2, bias=False))
    optimizer = PathSGD(
        model.named_parameters(), lr=0.01, model=model, example=(torch.randn(1, 3),), every=every
    )
    steps: list[int] = []
    kappa = optimizer.path_norm.kappa

    def noted(second: bool) -> object:
        steps.append(max((one.get("step", 0) for one in optimizer.state.values()), default=0))
        return kappa(second)

    monkeypatch.setattr(optimizer.path_norm, "kappa", noted)
    descend(optimizer, lambda: model(torch.randn(8, 3)).square().mean(), 5)
    assert steps == renewed
