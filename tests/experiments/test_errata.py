"""What the page of errata says of smaller formulas, against autograd through weights as
functions of path values.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import pytest
import torch
from cases import mlp, network
from oracles.networks import LoopRNN
from torch import Tensor

import pathspace as ps
from pathspace.training import GSGD

INPUTS, HIDDEN, OUTPUTS, STEPS, RATE = 3, 5, 2, 4, 1e-6


def loss(enter: Tensor, stay: Tensor, leave: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """The network of eq. (1) and (2), squared error at every step."""
    state, total = torch.zeros(len(x), HIDDEN).double(), torch.zeros(()).double()
    for t in range(x.shape[1]):
        state = torch.relu(x[:, t] @ enter.T + state @ stay.T)
        total = total + (state @ leave.T - y[:, t]).square().mean()
    return total


@dataclass
class Step:
    """One hidden layer, its gradients on weights and on path values, and the weights after
    the step on path values.
    """

    weights: list[Tensor]
    grads: list[Tensor]
    masks: tuple[Tensor, Tensor]
    by_path: list[Tensor]  # dL/dv of p_s, and of the paths of all entries of W^i, W^r, W^o
    after: list[Tensor]

    @property
    def d(self) -> Tensor:
        return (self.weights[0] * self.masks[0]).sum(1)

    @property
    def s(self) -> Tensor:
        return (self.weights[2] * self.masks[1]).sum(0)

    @property
    def ratio(self) -> Tensor:
        """R of eq. (17): new over old value of the skeleton's path of each unit."""
        return 1 - RATE * self.by_path[0] / (self.d * self.s)

    def error(self, place: int, printed: Tensor, where: Tensor | None = None) -> float:
        """How far a printed step is from the true one, relative to the true one."""
        where = torch.ones_like(printed, dtype=torch.bool) if where is None else where
        right = self.after[place] - self.weights[place]
        wrong = printed - self.after[place]
        return float(wrong[where].norm() / right[where].norm())


def draw(seed: int, unit: bool) -> Step:
    """A network from a seed, with leaving skeleton weights of size one or as they come."""
    make = torch.Generator().manual_seed(seed)
    shapes = ((HIDDEN, INPUTS), (HIDDEN, HIDDEN), (OUTPUTS, HIDDEN))
    weights = [torch.randn(shape, generator=make).double() / 2 for shape in shapes]
    units = torch.arange(HIDDEN)
    into, out = (torch.zeros(shape).double() for shape in (shapes[0], shapes[2]))
    into[units, units % INPUTS] = 1
    out[units % OUTPUTS, units] = 1
    if unit:
        weights[2] = torch.where(out > 0, weights[2].sign(), weights[2])
    x, y = (torch.randn(8, STEPS, n, generator=make).double() for n in (INPUTS, OUTPUTS))
    given = [w.clone().requires_grad_() for w in weights]
    grads = list(torch.autograd.grad(loss(*given, x, y), given))
    # path values, with the leaving skeleton weights held
    s = (weights[2] * out).sum(0)
    d = (weights[0] * into).sum(1)
    values = [d * s, weights[0] * s[:, None], weights[1] * d * s[:, None], weights[2] * d]
    values = [value.clone().requires_grad_() for value in values]

    def back(chain: Tensor, first: Tensor, second: Tensor, third: Tensor) -> list[Tensor]:
        d = chain / s
        return [
            torch.where(into > 0, d[:, None], first / s[:, None]),
            second / d / s[:, None],
            torch.where(out > 0, weights[2], third / d),
        ]

    by_path = list(torch.autograd.grad(loss(*back(*values), x, y), values))
    after = back(
        *(value.detach() - RATE * grad for value, grad in zip(values, by_path, strict=True))
    )
    return Step(weights, grads, (into, out), by_path, after)


SEEDS = range(40)


def test_the_corrected_step_is_exact() -> None:
    """Eq. (10), (13) to (15), (17), (18), (20) to (23), one hidden layer, with (11),
    (12) and (16) corrected.
    """
    for seed in SEEDS:
        step = draw(seed, False)
        (into, out), d, s = step.masks, step.d, step.s
        rests = (s[:, None], d * s[:, None], d)
        for grad, path, rest in zip(step.grads, step.by_path[1:], rests, strict=True):
            free = path != 0
            torch.testing.assert_close((grad / rest)[free], path[free])
        moved = step.weights[0] - RATE * step.by_path[1] / s[:, None]
        enter = torch.where(into > 0, step.weights[0] * step.ratio[:, None], moved)
        stay = (step.weights[1] - RATE * step.by_path[2] / rests[1]) / step.ratio
        leave = torch.where(
            out > 0, step.weights[2], (step.weights[2] - RATE * step.by_path[3] / d) / step.ratio
        )
        for place, moved in enumerate((enter, stay, leave)):
            assert step.error(place, moved) < 1e-6


@pytest.mark.parametrize("unit", [True, False])
def test_eq_11_divides_by_the_wrong_product(unit: bool) -> None:
    """``D_ns`` is needed where ``v_ps0`` is printed; they agree in size only where
    ``|s| = 1``, and not in sign.
    """
    errors, right = [], []
    for seed in SEEDS:
        step = draw(seed, unit)
        moved = step.weights[1] - RATE * step.by_path[2] / (step.d * step.s)
        errors.append(step.error(1, moved / step.ratio))
        moved = step.weights[1] - RATE * step.by_path[2] / (step.d * step.s[:, None])
        right.append(step.error(1, moved / step.ratio))
    assert max(right) < 1e-6
    assert 0.7 < float(np.median(errors)) < 2.5 and max(errors) > 1.5


def test_eq_12_lacks_the_division_by_the_leaving_skeleton_weight() -> None:
    for unit in (True, False):
        errors, right = [], []
        for seed in SEEDS:
            step = draw(seed, unit)
            free = step.masks[0] == 0
            errors.append(step.error(0, step.weights[0] - RATE * step.grads[0], free))
            right.append(
                step.error(0, step.weights[0] - RATE * step.grads[0] / step.s[:, None] ** 2, free)
            )
        assert max(right) < 1e-6
        assert max(errors) < 1e-6 if unit else float(np.median(errors)) > 0.5


def test_the_unnumbered_formula_lacks_a_division_and_sums_too_much() -> None:
    """``dL/dv_ps0``: eq. (16) divides by ``dv/dw_s0``, and only paths through
    ``w_s0`` belong into the sum.
    """
    for seed in SEEDS:
        step = draw(seed, False)
        into, out = step.masks
        enter, stay, leave = (w * g for w, g in zip(step.weights, step.grads, strict=True))
        through = stay.sum(0) + (leave * (1 - out)).sum(0)
        of_skeleton = (step.grads[0] * into).sum(1)
        numbered = (of_skeleton - through / step.d) / step.s
        torch.testing.assert_close(numbered, step.by_path[0])
        unnumbered = of_skeleton - through / step.d
        assert not torch.allclose(unnumbered, step.by_path[0], rtol=1e-3)
        everything = (enter * (1 - into)).sum() + stay.sum() + (leave * (1 - out)).sum()
        assert not torch.allclose(
            (of_skeleton - everything / step.d) / step.s, step.by_path[0], rtol=1e-3
        )


def test_outputs_are_sums_over_active_paths() -> None:
    """Eq. (3), by enumeration; and the matrix of activations, which fits between
    ``W^o`` and the sum only.
    """
    make = torch.Generator().manual_seed(0)
    enter, stay, leave = (
        torch.randn(shape, generator=make).double() for shape in ((3, 2), (3, 3), (2, 3))
    )
    x, state, active = torch.randn(4, 2, generator=make).double(), torch.zeros(3).double(), []
    for t in range(4):
        before = enter @ x[t] + stay @ state
        active.append((before > 0).double())
        state = torch.relu(before)
    outputs = leave @ state
    total = torch.zeros(2).double()
    for t in range(4):
        for units in itertools.product(range(3), repeat=4 - t):
            value = math.prod(stay[b, a] for a, b in itertools.pairwise(units))
            status = math.prod(active[t + place][unit] for place, unit in enumerate(units))
            total += leave[:, units[-1]] * value * status * (enter[units[0]] @ x[t])
    torch.testing.assert_close(total, outputs)
    torch.testing.assert_close(leave @ torch.diag(active[-1]) @ before, outputs)
    with pytest.raises(RuntimeError, match=r"shape|size"):
        (leave @ before) @ torch.diag(active[-1])


def test_the_example_of_figure_5() -> None:
    plain, once = np.array([1, 0, 0, 1, 0]), np.array([1, 0, 1, 1, 0])
    assert (plain + 3 * once + plain - 4 * plain).tolist() == [1, 0, 3, 1, 0]


@pytest.mark.parametrize("steps", range(4))
def test_the_output_node_of_a_path_over_s_steps_has_index_s_plus_2(steps: int) -> None:
    """Weights twice as large make the value of a path larger by two for each of its edges, and
    the index of its last node is their number.
    """
    model = LoopRNN(2, [3], 2, bias=False, out_bias=False).double()
    for weight in model.parameters():
        weight.data.abs_()
    x = torch.zeros(1, steps + 1, 2).double()
    x[:, 0] = 1
    once = model(x)
    for weight in model.parameters():
        weight.data *= 2
    torch.testing.assert_close(model(x), 2 ** (steps + 2) * once)


@pytest.mark.parametrize("first_only", [False, True])
def test_reading_once_and_answering_once_costs_a_dimension(first_only: bool) -> None:
    """All paths pass the recurrent matrix as often, so that it can be scaled against what
    leaves. Those of the reduction graph without it are then no paths of the network.
    """
    model = LoopRNN(2, [3], 2, bias=False, zeros=False, first_only=first_only, out_bias=False)
    model, x, hidden = model.double(), torch.randn(5, 4, 2).double(), 3
    certificate = ps.verify(model, x)
    assert certificate.holds
    assert certificate.rank == certificate.weights - hidden - first_only
    graph = ps.trace(model, x)
    names = [block.name for block in graph.blocks for _ in range(int(np.prod(block.shape)))]
    places = [i for i, name in enumerate(names) if name.startswith("w_h")]
    without = [path for path in graph.paths() if not path.counting_vector[places].any()]
    assert bool(without) is not first_only
    once = model(x)
    model.w_h[0].weight.data *= 2
    assert torch.allclose(model(x), 2**3 * once) is first_only


@pytest.mark.parametrize("base", [0, 1])
def test_algorithm_1_counts_units_from_one_and_columns_from_zero(base: int) -> None:
    """``for j = 1 to n: M[j][j % m] = 1`` leaves a unit out where arrays begin at 0,
    and asks for column 0 at 1.
    """
    units, inputs = 6, 3
    rows, columns = range(base, base + units), range(base, base + inputs)
    asked = [(j, j % inputs) for j in range(1, units + 1)]
    inside = [(j, k) for j, k in asked if j in rows and k in columns]
    assert len(inside) < units and {j for j, _ in inside} != set(rows)
    # with both counts from zero each unit has its entry
    assert {j for j, k in ((j, j % inputs) for j in range(units)) if k < inputs} == set(
        range(units)
    )


def test_p_3_ends_at_the_second_step() -> None:
    """Below eq. (4), ``p_3`` passes ``w_33`` once: an output of the first step has no
    such path, the second has.
    """

    class First(LoopRNN):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x)[:, 0]

    recurrent = []
    for kind in (First, LoopRNN):
        graph = ps.trace(
            kind(2, [1], 2, last=False, bias=False, out_bias=False), torch.randn(1, 2, 2)
        )
        names = [block.name for block in graph.blocks for _ in range(int(np.prod(block.shape)))]
        places = [i for i, name in enumerate(names) if name.startswith("w_h")]
        recurrent.append(any(path.counting_vector[places].any() for path in graph.paths()))
    assert recurrent == [False, True]
    # eq. (4) itself is right: w_23 w_33 w_36 in terms of the four others
    w = {
        key: Fraction(value)
        for key, value in zip(("13", "23", "33", "35", "36"), (2, 3, 5, 7, 11), strict=True)
    }
    p2, p3, p4, p5 = (
        np.prod([w[k] for k in keys])
        for keys in (("23", "35"), ("13", "33", "35"), ("13", "36"), ("13", "35"))
    )
    assert w["23"] * w["33"] * w["36"] == p2 * p3 * p4 / p5**2


@pytest.mark.parametrize("widths", [(3, 4, 4, 2), (2, 3, 5, 4, 3)])
def test_theorem_2_needs_all_signs_of_the_leaving_tree_in_stacks(widths: tuple[int, ...]) -> None:
    """Turn the sign of a unit below the last hidden layer: path values and all of ``W^o``
    stay, activations do not.
    """
    model, x = mlp(*widths, bias=False).double(), torch.randn(64, widths[0]).double()
    skeleton = ps.trace(model, x).skeleton()
    values, signs, outputs = skeleton.basis().values(), skeleton.signs(), model(x)
    last = model[-1].weight.detach().clone()
    with torch.no_grad():
        model[0].weight[0] *= -1
        model[2].weight[:, 0] *= -1
    turned = ps.trace(model, x).skeleton()
    torch.testing.assert_close(turned.basis().values(), values)
    assert torch.equal(model[-1].weight, last)
    assert not torch.allclose(model(x), outputs)
    # what tells them apart is the sign of one more weight of the leaving tree, and with
    # it the function comes back
    assert int((turned.signs() != signs).sum()) == 1
    for name, weight in turned.basis().rebuild(values, signs).items():
        model.get_parameter(name).data.copy_(weight)
    torch.testing.assert_close(model(x), outputs)


def test_one_hidden_layer_needs_the_signs_of_w_o_only() -> None:
    """As Theorem 2 says: with them each unit's activation follows,
    whatever signs the weights have.
    """
    model, x = mlp(3, 6, 2, bias=False).double(), torch.randn(64, 3).double()
    skeleton = ps.trace(model, x).skeleton()
    assert {name for name, mask in skeleton.outgoing.items() if mask.any()} == {"2.weight"}
    values, signs, outputs = skeleton.basis().values(), skeleton.signs(), model(x)
    for name, weight in skeleton.basis().rebuild(values, signs).items():
        model.get_parameter(name).data.copy_(weight)
    torch.testing.assert_close(model(x), outputs)


@pytest.mark.parametrize("layers", [1, 2, 4])
def test_recurrent_layers_alone_have_no_free_scale_in_the_last_one(layers: int) -> None:
    rnn = torch.nn.RNN(4, HIDDEN, layers, nonlinearity="relu", bias=False, batch_first=True)
    model = network(lambda net, x: net.rnn(x)[0], rnn=rnn).double()
    x = torch.randn(2, STEPS, 4).double()
    skeleton = ps.trace(model, x).skeleton()
    assert skeleton.graph.num_units == (layers - 1) * HIDDEN
    if layers > 1:
        return
    before = [p.detach().clone() for p in model.parameters()]
    model(x).square().sum().backward()
    GSGD(model.named_parameters(), lr=RATE, skeleton=skeleton).step()
    for old, new in zip(before, model.parameters(), strict=True):
        assert new.grad is not None
        torch.testing.assert_close(new.detach(), old - RATE * new.grad, rtol=0, atol=1e-15)


def test_states_follow_from_path_values_and_signs_of_leaving_weights() -> None:
    """Eq. (24): ``o = F / W^o``, with F by the induction of appendix C.2 from path values alone."""
    for seed in SEEDS:
        enter, stay, leave = draw(seed, False).weights
        k = torch.arange(HIDDEN) % OUTPUTS
        s = leave[k, torch.arange(HIDDEN)]
        # i -> j -> k(j), for all inputs; i -> j' -> j -> k(j), for the first input
        short = enter * s[:, None]
        long = stay * enter[:, 0] * s[:, None]
        x = torch.randn(STEPS, INPUTS, generator=torch.Generator().manual_seed(seed)).double()
        found, state = torch.zeros(HIDDEN).double(), torch.zeros(HIDDEN).double()
        for step in x:
            active = (s.sign() * found > 0).double()
            found = short @ step + (long / short[:, 0]) @ (found * active)
            before = enter @ step + stay @ state
            state = torch.relu(before)
            torch.testing.assert_close(before, found / s)


def test_as_many_paths_lie_in_the_skeleton_as_one_layer_has_nodes() -> None:
    """All hidden nodes of a network with one hidden layer, fewer of a stack."""
    for widths, paths in (((3, 4, 2), 4), ((2, 5, 3), 5), ((3, 3, 3, 3), 3), ((2, 2, 2, 2, 2), 2)):
        graph = ps.trace(mlp(*widths, bias=False), torch.randn(1, widths[0]))
        masks = graph.skeleton("modulo").masks
        mask = np.concatenate([masks[block.name].reshape(-1).numpy() for block in graph.blocks])
        rows = np.array([path.counting_vector for path in graph.paths()])
        assert (rows @ ~mask == 0).sum() == paths
        assert (paths == sum(widths[1:-1])) == (len(widths) == 3)


def test_independent_paths_can_leave_a_sign_open() -> None:
    """One hidden node, two inputs, two outputs: of 8 paths, 4 are a basis. Some independent ones
    give squares of the others alone, and two networks that differ.
    """
    weights = np.array(
        [0.7, -1.3, 0.4, 1.1, -0.6]
    )  # two that enter, one that stays, two that leave
    paths = {
        (i, r, k): np.eye(5, dtype=int)[[i, 3 + k]].sum(0) + r * np.eye(5, dtype=int)[2]
        for i, r, k in itertools.product((0, 1), repeat=3)
    }

    def value(path: tuple[int, ...], w: np.ndarray) -> float:
        return float(np.prod(w ** paths[path]))

    open_, bases = [], 0
    for chosen in itertools.combinations(paths, 4):
        rows = np.array([paths[path] for path in chosen])
        if np.linalg.matrix_rank(rows) < 4:
            continue
        # exponents of each path in the chosen ones
        powers = np.linalg.lstsq(rows.T, np.array([*paths.values()]).T, rcond=None)[0]
        whole = np.allclose(powers, powers.round())
        bases += whole
        if not whole:
            assert np.allclose(2 * powers, (2 * powers).round())
            open_.append(chosen)
    assert bases > len(open_) > 0
    even = tuple(path for path in paths if sum(path) % 2 == 0)
    assert even in open_
    other = weights * np.array([1, -1, -1, 1, -1])
    for path in paths:
        same = value(path, weights) == pytest.approx(value(path, other))
        assert same == (path in even)
        assert abs(value(path, weights)) == pytest.approx(abs(value(path, other)))
