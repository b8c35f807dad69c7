"""The statements of the learnable Markov chain paper, each as a check that can fail.

A check returns how often its premise and its conclusion hold on a model and data. If the printed
statement is wrong, there is a corrected one too.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pathspace.errors import InputError

from ..shared.model_calls import call
from .addition_hooks import Addition, Sites
from .efficiency import ChainRecord, tensors
from .observer import NodeTensors

if TYPE_CHECKING:
    from .nodes import Nodes

PerSample = Callable[[Any, Any], Tensor]


@dataclass(frozen=True)
class Check:
    """How often a premise holds, and how often the conclusion holds in these cases.

    Attributes:
        statement: the statement.
        cases: number of cases.
        premise: number of cases in which the premise holds.
        conclusion: number of those in which the conclusion holds.
    """

    statement: str
    cases: int
    premise: int
    conclusion: int

    @property
    def holds(self) -> bool | None:
        """Whether the conclusion holds whenever the premise does; ``None`` if
        the premise never holds.
        """
        return self.conclusion == self.premise if self.premise else None


def ideal_share(
    chain: Nodes,
    losses: PerSample,
    inputs: Any,
    targets: Any,
    *,
    eta: float,
    relative: bool = False,
) -> Tensor:
    """Share of samples with ``l(x_l - eta g_l) < l(x_l)`` for each node, with the
    rest of the chain run again.

    Args:
        chain: the traced chain; the model should be in eval mode, where samples do
            not influence each other.
        losses: ``losses(outputs, targets)``, one loss per sample, shape (B,).
        inputs: model inputs.
        targets: passed to ``losses``.
        eta: size of the step.
        relative: step along ``g^ = g/||g||`` instead of ``g``, so that ``eta`` is a length.

    Returns:
        Shares, shape (L,).

    Raises:
        InputError: ``losses`` does not return one loss per sample.

    Example:
        >>> from torch import nn
        >>> from pathspace.diagnostics import MarkovChain
        >>> layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, norm_first=True).eval()
        >>> x = torch.randn(4, 5, 8)
        >>> chain = MarkovChain.trace(layer, x)
        >>> ideal_share(chain, lambda y, t: y.square().sum((1, 2)), x, None, eta=1e-4)
        tensor([1., 1.], dtype=torch.float64)

    Reference:
        Learnable Markov chain paper, Appendix D and equation (9).
    """
    parts = tensors(chain, losses, inputs, targets)
    places = chain.samples()
    with torch.no_grad():
        before = _per_sample(losses(call(chain.model, inputs), targets), parts[0])
    shares = []
    known = chain.by_site()
    for node, part in zip(chain.nodes, parts, strict=True):
        step = (
            part.gradient / part.gradient.norm(dim=1, keepdim=True) if relative else part.gradient
        )

        def moved(addition: Addition, index: int = node.index, step: Tensor = step) -> Tensor:
            result = addition.run()
            if addition.site not in known or known[addition.site].index != index:
                return result
            change = places[index].back(step, result.shape).to(result.dtype)
            # in place, so that an in-place addition still overwrites its operand
            return result.sub_(eta * change)

        with torch.no_grad(), Sites(moved).following(chain.model):
            after = _per_sample(losses(call(chain.model, inputs), targets), part)
        shares.append((after < before).double().mean())
    return torch.stack(shares)


def _per_sample(value: Tensor, part: NodeTensors) -> Tensor:
    if value.shape != (len(part.gradient),):
        raise InputError(
            f"The losses have shape {tuple(value.shape)}, expected ({len(part.gradient)},), one per"
            " sample; use reduction='none' and average over everything but the samples."
        )
    return value.detach().double()


def lemma1(distance: Callable[[Tensor], Tensor], better: Tensor, worse: Tensor, mu: float) -> Check:
    """Mixtures of an ideal direction and the predicted one are ideal: for ``mu`` in [0, 1],
    not for every ``mu >= 0``.

    Premise ``l(better) <= l(worse)``, conclusion ``l(mu better + (1 - mu) worse) <=
    l(worse)``: quasi-convexity.

    Args:
        distance: ``l``, from points (N, D) to distances (N,).
        better: ``x + eta d``, shape (N, D).
        worse: ``x + eta z``, shape (N, D).
        mu: the mixture.

    Returns:
        The check.

    Example:
        >>> square = lambda x: x.square().sum(1)
        >>> good, bad = torch.zeros(1, 2), torch.ones(1, 2)
        >>> lemma1(square, good, bad, 0.5).holds, lemma1(square, good, bad, 3.0).holds
        (True, False)

    Reference:
        Learnable Markov chain paper, Definition 2, Lemma 1.
    """
    premise = distance(better) <= distance(worse)
    conclusion = distance(mu * better + (1 - mu) * worse) <= distance(worse)
    count = int((premise & conclusion).sum())
    return Check(f"Lemma 1 with mu = {mu}", len(better), int(premise.sum()), count)


def lemma2(record: ChainRecord, eta: float) -> tuple[Check, Check]:
    """Delta-convex implies efficient (true), and the converse (false).

    Args:
        record: an observed chain.
        eta: step of the ideal direction ``d_l = z_l - eta g^_l``.

    Returns:
        The lemma (premise ``delta* > 0``, conclusion ``eps(eta) > 0``) and the converse.

    Reference:
        Learnable Markov chain paper, Lemma 2.
    """
    convex, efficient = record.delta(eta) > 0, record.eps(eta) > 0
    both = int((convex & efficient).sum())
    total = record.samples
    return (
        Check(f"Lemma 2, eta = {eta}", total, int(convex.sum()), both),
        Check(f"converse of Lemma 2, eta = {eta}", total, int(efficient.sum()), both),
    )


@dataclass(frozen=True)
class Convergence:
    """Lemma 3 on a trajectory: premises, bound and final error."""

    delta: float
    diameter: float
    second_moment: float
    long_enough: bool
    step_small: bool
    bound: float
    error: float

    @property
    def premise(self) -> bool:
        """Whether one-point convexity holds, the step is small, and the chain is long enough."""
        return self.delta > 0 and self.step_small and self.long_enough

    @property
    def conclusion(self) -> bool:
        """Whether the final error is below the bound."""
        return self.error <= self.bound


def lemma3_step(length: int, delta: float, a: float) -> float:
    """The step of the corrected lemma, ``eta = (1 + a) log L / (delta L)``."""
    return (1 + a) * math.log(length) / (delta * length)


def lemma3(
    states: Tensor,
    directions: Tensor,
    target: Tensor,
    *,
    delta: float,
    a: float = 1.0,
    eta: float | None = None,
) -> Convergence:
    """Lemma 3 in its corrected form, on trajectories ``x_{l+1} = x_l + eta z_{l+1}``.

    Premises: ``<y - x_l, d_{l+1}> >= delta ||x_l - y||^2`` with ``d = E[z]`` (the printed
    Definition 4 never mentions y), ``eta = (1+a) log L / (delta L)`` with ``2 eta delta <= 1`` (the
    printed lemma takes full steps), and ``L^a log L >= D^2 delta^2 / ((1+a) Z^2)``. Conclusion:
    ``E||x_L - y||^2 <= (1+a) log L Z^2 / (delta^2 L)``.

    Args:
        states: ``x_0 ... x_L``, shape (L+1, N, D), N independent runs.
        directions: ``d_1 ... d_L``, the conditional means of the ``z_l``, shape (L, N, D).
        target: ``y``, shape (N, D) or (D,).
        delta: the constant of one-point convexity.
        a: the exponent.
        eta: the step; that of the premise by default.

    Returns:
        Premises, bound and final error.

    Reference:
        Learnable Markov chain paper, Lemma 3 and Appendix B, equations (13)-(17).
    """
    length = len(directions)
    gap = target - states[:-1]
    square = gap.square().sum(-1)
    measured = float(((gap * directions).sum(-1) / square).min())
    eta = lemma3_step(length, delta, a) if eta is None else eta
    z = (states[1:] - states[:-1]) / eta
    moment = float(z.square().sum(-1).mean(1).max())
    diameter = float(torch.cat([square, (target - states[-1]).square().sum(-1)[None]]).max()) ** 0.5
    return Convergence(
        delta=measured if measured < delta else delta,
        diameter=diameter,
        second_moment=moment,
        long_enough=length**a * math.log(length) >= diameter**2 * delta**2 / ((1 + a) * moment),
        step_small=2 * eta * delta <= 1,
        bound=(1 + a) * math.log(length) * moment / (delta**2 * length),
        error=float((states[-1] - target).square().sum(-1).mean()),
    )


def simulate_lemma3(
    length: int, *, full_steps: bool = False, delta: float = 1.0, a: float = 1.0, dim: int = 8,
    noise: float = 1.0, runs: int = 400, seed: int = 0,
) -> Convergence:  # fmt: skip
    """Monte Carlo of Lemma 3 with ``z_{l+1} = delta (y - x_l) + noise``: corrected, or
    with the printed full steps.

    Args:
        length: number of nodes L.
        full_steps: take ``x_{l+1} = x_l + z_{l+1}`` as printed.
        delta: one-point convexity.
        a: the exponent.
        dim: dimension of the states.
        noise: standard deviation of ``||z - E z||``.
        runs: number of chains.
        seed: seed of the noise.

    Returns:
        Premises, bound and final error, the latter averaged over runs.

    Example:
        >>> simulate_lemma3(200).conclusion, simulate_lemma3(1000, full_steps=True).conclusion
        (True, False)
    """
    generator = torch.Generator().manual_seed(seed)
    x = torch.zeros(runs, dim, dtype=torch.float64)
    target = torch.ones(dim, dtype=torch.float64) / dim**0.5
    eta = 1.0 if full_steps else lemma3_step(length, delta, a)
    states, means = [x], []
    for _ in range(length):
        means.append(delta * (target - x))
        z = means[-1] + noise / dim**0.5 * torch.randn(
            x.shape, generator=generator, dtype=torch.float64
        )
        x = x + eta * z
        states.append(x)
    found = lemma3(torch.stack(states), torch.stack(means), target, delta=delta, a=a, eta=eta)
    # (a full step is not that of the premise, whatever its size is)
    return replace(found, step_small=False) if full_steps else found


@dataclass(frozen=True)
class PenaltyGradient:
    """The exact gradient of ``lam * (one node's eps)^2``, compared with the penal
    connection that replaces it.

    Attributes:
        exact: ``2 lam (1 - c eta t)(-c eta g^ + c^3 eta t z)``, shape (B, D), ``c =
            1/||z||``, ``t = <z, g^>``.
        orthogonality: largest ``|cos(exact, z)|``: zero up to rounding, but 1
            for the penal connection.
        kept_over_ignored: ``||z-term|| / ||g-term||`` per sample, equal to ``|cos(z, g)|``.
        cancelling_tau: the tau that cancels the z-term, ``2 eta lam c^3 t (1
            - c eta t)``, shape (B,).
        best_tau: least-squares tau of ``exact ~ tau z``; zero.
    """

    exact: Tensor
    orthogonality: float
    kept_over_ignored: Tensor
    cancelling_tau: Tensor
    best_tau: Tensor


def penalty_gradient(
    direction: Tensor, gradient: Tensor, *, eta: float, lam: float
) -> PenaltyGradient:
    """The gradient that ``tau z`` approximates, for one node: appendix C with its signs corrected.

    Args:
        direction: ``z``, shape (B, D).
        gradient: ``g``, shape (B, D), held constant.
        eta: the step.
        lam: weight of the penalty.

    Returns:
        The exact gradient and its comparison with the penal connection.

    Example:
        >>> z, g = torch.randn(3, 5, dtype=torch.float64), torch.randn(3, 5, dtype=torch.float64)
        >>> penalty_gradient(z, g, eta=0.1, lam=1.0).orthogonality < 1e-12
        True

    Reference:
        Learnable Markov chain paper, equations (18)-(22).
    """
    unit = gradient / gradient.norm(dim=1, keepdim=True)
    c = 1 / direction.norm(dim=1, keepdim=True)
    t = (direction * unit).sum(1, keepdim=True)
    front = 2 * lam * (1 - c * eta * t)
    along_g, along_z = -front * c * eta * unit, front * c**3 * eta * t * direction
    exact = along_g + along_z
    cosine = (exact * direction).sum(1) / (exact.norm(dim=1) * direction.norm(dim=1))
    return PenaltyGradient(
        exact=exact,
        orthogonality=float(cosine.abs().max()),
        kept_over_ignored=along_z.norm(dim=1) / along_g.norm(dim=1),
        cancelling_tau=(front * c**3 * eta * t).squeeze(1),
        best_tau=(exact * direction).sum(1) / direction.square().sum(1),
    )


@dataclass(frozen=True)
class Lemma4:
    """ResNet's node compared with VGG's, ``z`` with ``z - x``, over (node, sample) pairs.

    Attributes:
        products: the statement for inner products ``<., d>``, as in the proof: it
            follows from the premise.
        cosines: the statement for the normalised vectors of Definition 3, as
            printed: it does not follow.
        premise_on_convex: share of the pairs of delta-convex samples in which premise
            (24), ``<x, d> >= 0``, holds.
    """

    products: Check
    cosines: Check
    premise_on_convex: float


def lemma4(parts: tuple[NodeTensors, ...]) -> Lemma4:
    """Check both forms of Lemma 4, with ``d = -g``.

    Args:
        parts: the tensors of a chain, from
            :func:`pathspace.diagnostics.chain.efficiency.tensors`; only nodes whose stream has
            the shape of the direction are used.

    Returns:
        Both checks, and how often the premise holds.

    Example:
        >>> z, x, d = (torch.tensor([v]) for v in ([1.0, 10.0], [0.5, 10.0], [1.0, 0.0]))
        >>> result = lemma4((NodeTensors(direction=z, stream=x, gradient=-d),))
        >>> result.products.holds, result.cosines.holds
        (True, False)

    Reference:
        Learnable Markov chain paper, Lemma 4, equations (24)-(29).
    """

    def cosine(a: Tensor, b: Tensor) -> Tensor:
        result: Tensor = (a * b).sum(1) / (a.norm(dim=1) * b.norm(dim=1))
        return result

    rows = []
    for part in parts:
        d, x, z = -part.gradient, part.stream, part.direction
        inner = ((x * d).sum(1), (z * d).sum(1), ((z - x) * d).sum(1))
        rows.append(torch.stack([*inner, cosine(z, d), cosine(z - x, d)]))
    xd, zd, wd, cos_z, cos_w = torch.stack(rows).unbind(1)
    premise = xd >= 0
    rounding = 1e-12 * (zd.abs() + wd.abs())
    products = premise & (zd >= wd - rounding)
    cosines = premise & (cos_z >= cos_w)
    convex = (zd > 0).all(0)
    counts = (premise.numel(), int(premise.sum()))
    return Lemma4(
        Check("Lemma 4, inner products", *counts, int(products.sum())),
        Check("Lemma 4, cosines", *counts, int(cosines.sum())),
        float(premise[:, convex].double().mean()) if convex.any() else math.nan,
    )
