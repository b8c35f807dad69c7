"""The statements of the chain paper: which hold, which fail, and the corrected ones."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import scipy.optimize
import torch
from notebook import notebook
from torch import Tensor, nn

from pathspace.diagnostics import MarkovChain
from pathspace.diagnostics.chain.efficiency import observe, tensors
from pathspace.training import penalise_

page = notebook("chain_lemmas")
walks = notebook("chain_walk").walks


class Net(nn.Module):
    def __init__(self, depth: int = 3, width: int = 8) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(width), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width)
            )
            for _ in range(depth)
        )
        self.head = nn.Linear(width, 2)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            z = block(x)
            z += x
            x = z
        return self.head(x)


@pytest.fixture
def chain() -> tuple[MarkovChain, Tensor, Tensor]:
    torch.manual_seed(0)
    model, x = Net().double().eval(), torch.randn(40, 8, dtype=torch.float64)
    return MarkovChain.trace(model, x), x, torch.randn(40, 2, dtype=torch.float64)


def losses(y: Tensor, t: Tensor) -> Tensor:
    return (y - t).square().sum(1)


def test_ideal_share(chain: tuple[MarkovChain, Tensor, Tensor]) -> None:
    """Appendix D against a by-hand run of the last node, where only the head follows."""
    c, x, t = chain
    assert page.ideal_share(c, losses, x, t, eta=1e-4).tolist() == [1.0, 1.0, 1.0]
    parts = tensors(c, losses, x, t)
    model = c.model
    for eta, relative in ((0.5, False), (3.0, False), (2.0, True)):
        shares = page.ideal_share(c, losses, x, t, eta=eta, relative=relative)
        state = parts[2].stream + parts[2].direction
        g = parts[2].gradient
        step = g / g.norm(dim=1, keepdim=True) if relative else g
        better = losses(model.head(state - eta * step), t) < losses(model.head(state), t)
        assert shares[2] == better.double().mean()
    assert float(page.ideal_share(c, losses, x, t, eta=100.0).max()) < 0.5


def test_lemma1_needs_mu_below_one() -> None:
    a, b = torch.randn(2, 500, 4, dtype=torch.float64)
    square = lambda x: x.square().sum(1)  # noqa: E731
    for mu in (0.0, 0.3, 1.0):
        assert page.lemma1(square, a, b, mu).holds
    check = page.lemma1(square, a, b, 3.0)
    assert check.holds is False and 0 < check.conclusion < check.premise


def test_lemma2_and_its_converse(chain: tuple[MarkovChain, Tensor, Tensor]) -> None:
    c, x, t = chain
    record = observe(c, losses, x, t)
    for eta in (1e-3, 1.0, 30.0):
        assert page.lemma2(record, eta)[0].holds is not False
    assert page.lemma2(record, 1e-3)[0].premise == record.samples, (
        "a small eta makes every chain delta-convex"
    )
    assert page.lemma2(record, 1e8)[1].holds is False
    assert page.lemma2(record, 1e8)[0].premise == round(record.convex_share * record.samples)


def test_small_eta_tells_nothing_large_eta_is_the_cosine(
    chain: tuple[MarkovChain, Tensor, Tensor],
) -> None:
    c, x, t = chain
    record = observe(c, losses, x, t)
    defect = [float((1 - record.eps(eta)).mean()) for eta in (1e-4, 1e-3)]
    assert math.log10(defect[1] / defect[0]) == pytest.approx(2, abs=0.01)
    assert torch.allclose(record.eps(1e8), record.efficiency, atol=1e-6)


def test_lemma3_corrected_holds_and_printed_fails() -> None:
    errors = []
    for length in (50, 200, 1000):
        result = page.simulate_lemma3(length, seed=length)
        assert result.premise and result.conclusion
        errors.append(result.error)
        printed = page.simulate_lemma3(length, full_steps=True, seed=length)
        assert printed.error > 0.5
    assert errors[0] > errors[1] > errors[2]
    assert not page.simulate_lemma3(1000, full_steps=True).conclusion


def test_lemma3_as_printed_has_a_counterexample() -> None:
    """z = d = +v, -v, ... is delta-convex in the sense of Definition 4, and goes nowhere."""
    v = torch.tensor([1.0, 0.0], dtype=torch.float64)
    signs = torch.tensor([1.0, -1.0], dtype=torch.float64).repeat(500)
    eta = page.lemma3_step(1000, 1.0, 1.0)
    d = (signs[:, None] * v)[:, None]
    x = torch.cat([torch.zeros(1, 1, 2, dtype=torch.float64), eta * d.cumsum(0)])
    target = torch.tensor([1.9, 0.0], dtype=torch.float64)
    assert bool(((d * d).sum(-1) > 0.99 * d.square().sum(-1)).all()), "the premise of Definition 4"
    result = page.lemma3(x, d, target, delta=1.0)
    assert result.error > 3.5 and not result.conclusion
    assert not result.premise, "one-point convexity, the corrected premise, fails"


def test_appendix_c_against_autograd() -> None:
    z, g = torch.randn(2, 30, 40, dtype=torch.float64)
    eta, lam = 0.3, 0.7
    leaf = z.clone().requires_grad_()
    unit = g / g.norm(dim=1, keepdim=True)
    eps = 1 + eta * (leaf / leaf.norm(dim=1, keepdim=True) * -unit).sum(1)
    (want,) = torch.autograd.grad(lam * eps.square().sum(), leaf)
    result = page.penalty_gradient(z, g, eta=eta, lam=lam)
    assert float((result.exact - want).abs().max()) < 1e-15
    assert result.orthogonality < 1e-12
    cosine = (z * g).sum(1) / (z.norm(dim=1) * g.norm(dim=1))
    assert torch.allclose(result.kept_over_ignored, cosine.abs(), rtol=1e-10)
    assert float(result.best_tau.abs().max()) < 1e-15
    assert torch.equal(result.cancelling_tau > 0, cosine > 0), "negative on an efficient node"


def test_a_step_against_the_penalty_lowers_every_cosine() -> None:
    """Equation (6) with lambda > 0 is minimised by a less efficient chain."""
    z, g = torch.randn(2, 200, 10, dtype=torch.float64)
    moved = z - 0.01 * page.penalty_gradient(z, g, eta=0.1, lam=1.0).exact

    def efficiency(v: Tensor) -> Tensor:
        return -(v * g).sum(1) / (v.norm(dim=1) * g.norm(dim=1))

    assert bool((efficiency(moved) < efficiency(z)).all())
    shrunk = z - 0.01 * z
    assert float((efficiency(shrunk) - efficiency(z)).abs().max()) < 1e-12, (
        "tau z changes no cosine"
    )


def test_lemma4_both_ways(chain: tuple[MarkovChain, Tensor, Tensor]) -> None:
    c, x, t = chain
    result = page.lemma4(tensors(c, losses, x, t))
    assert result.products.holds and result.products.premise > 10
    assert result.cosines.premise == result.products.premise
    torch.manual_seed(0)
    from pathspace.diagnostics.chain.observer import NodeTensors

    z, s, g = torch.randn(3, 5000, 3, dtype=torch.float64)
    random = page.lemma4((NodeTensors(z, s, g),))
    assert random.products.holds and random.cosines.holds is False
    assert 0.7 < random.cosines.conclusion / random.cosines.premise < 0.95


def test_walk(chain: tuple[MarkovChain, Tensor, Tensor]) -> None:
    c, x, _ = chain
    ((_, points, folds),) = walks(c, x, sample=3)
    assert points.shape == (4, 2) and 0 <= folds <= 1
    model = c.model
    state, states = x[3:4], [x[3:4]]
    for block in model.blocks:
        state = state + block(state)
        states.append(state)
    true = torch.cat(states).detach()
    full = torch.cdist(true, true)
    plane = torch.cdist(points, points)
    assert bool((plane <= full + 1e-9).all()) and float(plane.max()) > 0.5 * float(full.max())
    steps = true.diff(dim=0)
    assert folds == pytest.approx(float(((steps[1:] * steps[:-1]).sum(1) < 0).double().mean()))


def squares(blocks: Sequence[nn.Module], x: Tensor) -> Tensor:
    """The sum of squared directions, written out."""
    total = torch.zeros((), dtype=torch.float64)
    for block in blocks:
        total = total + block(x).square().sum()
        x = x + block(x)
    return total


def later_pulls(model: Net, x: Tensor, tau: float) -> Tensor:
    """``<z_l, d/dx_l tau/2 sum over m > l of ||z_m||^2>`` for every node."""
    blocks, result = list(model.blocks), []
    for i, block in enumerate(blocks):
        z = block(x).detach()
        x = (x + z).detach().requires_grad_()
        later = tau / 2 * squares(blocks[i + 1 :], x)
        result.append(
            (z * torch.autograd.grad(later, x)[0]).sum() if i + 1 < len(blocks) else later
        )
    return torch.stack(result)


@pytest.mark.slow
def test_a_positive_efficiency_at_a_stationary_point_is_shrinkage() -> None:
    """There, sum <z, -g> is tau ||Z||^2 and what later penalties pull: no efficiency."""
    torch.manual_seed(0)
    tau = 0.02
    model, x = Net(2, 4).double(), torch.randn(12, 4, dtype=torch.float64)
    model.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2)).double()
    t = x @ torch.randn(4, 2, dtype=torch.float64)
    chain = MarkovChain.trace(model, x)
    penalise_(model, x, tau=tau)
    parameters = list(model.parameters())

    def value(vector: np.ndarray) -> tuple[float, np.ndarray]:
        nn.utils.vector_to_parameters(torch.from_numpy(vector.copy()), parameters)
        model.zero_grad()
        loss = losses(model(x), t).sum() + 0.01 * sum(
            p.square().sum() for p in model.head.parameters()
        )
        loss.backward()
        gradient = nn.utils.parameters_to_vector([p.grad for p in parameters if p.grad is not None])
        # the line search compares values, so the penalty must be in the value too
        with torch.no_grad():
            penalty = tau / 2 * squares(list(model.blocks), x)
        return float(loss.detach() + penalty), gradient.numpy()

    start = nn.utils.parameters_to_vector(parameters).detach().numpy()
    found = scipy.optimize.minimize(
        value, start, jac=True, method="BFGS", options={"gtol": 1e-8, "maxiter": 2000}
    )
    assert float(np.abs(value(found.x)[1]).max()) < 1e-6
    # the loss alone is observed, without the penalty
    record = observe(chain, losses, x, t)
    want = tau * record.direction_norms.square().sum(1) + later_pulls(model, x, tau)
    assert torch.allclose(-record.products.sum(1), want, atol=1e-6) and bool((want > 1e-3).all())
