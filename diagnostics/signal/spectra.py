"""Spectra of Jacobians, computed from products ``J u`` and ``v J`` without the matrix."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from scipy.sparse.linalg import LinearOperator
from torch import Tensor, nn

from pathspace.errors import AT_LEAST_1, COUNT, SEED, InputError, expect_arguments, expect_numbers

from ..shared.layers import record_layers
from ..shared.linear_maps import Jacobian, Products, as_products, to_host
from ..shared.model_calls import differentiating
from ..shared.selection import select
from ..shared.tables import Estimate

_SMALL = 64
# numbers of steps after which convergence of the singular values is tested
_CHECKS = (30, 60, 120, 240, 480)


def jacobian(
    model: nn.Module,
    *inputs: Any,
    kwargs: Mapping[str, Any] | None = None,
    start: str | None = None,
    end: str | None = None,
) -> Jacobian:
    """The Jacobian from the output of one layer to the output of another.

    Args:
        model: any module, in its current mode.
        *inputs: one batch; one sample for the Jacobian of one sample.
        kwargs: keyword inputs.
        start: the layer whose (first) output is z; the first floating-point input
            of the model by default.
        end: the layer whose (last) output is y; the output of the model by default.

    Returns:
        The operator.

    Raises:
        InputError: a layer does not exist or was not called, or y does not depend on z.

    Example:
        >>> model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
        >>> jacobian(model, torch.randn(1, 3), start="0").shape
        (2, 5)
    """
    expect_arguments("jacobian", model=model)
    wanted = [name for name in (start, end) if name is not None]
    named = dict(model.named_modules())
    for name in wanted:
        if name not in named:
            raise InputError(
                f"jacobian found no layer {name!r} in {type(model).__name__}; see named_modules()."
            )
    run = record_layers(model, inputs, kwargs, select(model, names=wanted) if wanted else {})
    calls = {name: [call for call in run.calls if call.name == name] for name in wanted}
    for name, found in calls.items():
        if not found:
            raise InputError(
                f"jacobian: {type(model).__name__} does not call the layer {name!r} on these"
                " inputs."
            )
    if start is None and not run.inputs:
        raise InputError(
            "jacobian found no floating-point input; name the layer to start from, such as an"
            " embedding."
        )
    source = run.inputs[0] if start is None else calls[start][0].sink
    with differentiating(model):
        return Jacobian(run.output if end is None else calls[end][-1].output, source)


def trace_k(operator: LinearOperator, probes: int = 32, seed: int = 0) -> Estimate:
    """Estimate ``tr K = ||J||_F^2 / N``, the expected ratio ``Var[vJ] / Var[v]``.

    It averages ``|vJ|^2 / N`` over random signs v (Hutchinson's estimator), with variance
    ``2 sum_{i != j} K_ij^2 / probes``.

    Args:
        operator: the Jacobian, shape ``(M, N)``.
        probes: products with ``J^T``.
        seed: of the random signs.

    Returns:
        The estimate with its standard error.

    Raises:
        InputError: fewer than two probes.

    Example:
        >>> from scipy.sparse.linalg import aslinearoperator
        >>> matrix = np.random.default_rng(0).normal(size=(30, 40))
        >>> trace_k(aslinearoperator(matrix), 100).agrees((matrix**2).sum() / 40)
        True
    """
    expect_arguments("trace_k", operator=operator)
    expect_numbers("trace_k", "a whole number from 2 to 1,000,000", probes=probes)
    expect_numbers("trace_k", SEED, seed=seed)
    rows, columns = operator.shape
    random, products = np.random.default_rng(seed), as_products(operator)
    signs = (products.put(random.integers(0, 2, rows) * 2.0 - 1) for _ in range(probes))
    sizes = torch.stack([products.pull(v).square().sum() / columns for v in signs])
    return Estimate.of(to_host(sizes).tolist())


class _Krylov:
    """Golub-Kahan bidiagonalisation ``A P = Q B`` with full reorthogonalisation, on
    the device of the products.

    A maps the smaller space to the larger one; B is upper bidiagonal. Where a length is 0,
    the iteration continues with a random direction and the entry 0, so that multiple
    singular values are all found.

    Args:
        operator: the map.
        start: the first vector of P.
        steps: the largest number of steps.
    """

    def __init__(self, operator: Products, start: Tensor, steps: int) -> None:
        rows, columns = operator.shape
        self.wide = rows <= columns
        self.there: Callable[[Tensor], Tensor] = operator.pull if self.wide else operator.push
        self.back: Callable[[Tensor], Tensor] = operator.push if self.wide else operator.pull
        self.steps, self.random = 0, torch.Generator(start.device).manual_seed(0)
        self.inner = start.new_zeros(steps + 1, min(rows, columns))
        self.outer = start.new_zeros(steps, max(rows, columns))
        self.lengths = start.new_zeros(2, steps)
        self.inner[0] = start / start.norm()

    def go_on(self, steps: int) -> Tensor:
        """The diagonal and the superdiagonal of B after ``steps`` steps in
        total, shape ``(2, steps)``.
        """
        for i in range(self.steps, steps):
            self.lengths[0, i], self.outer[i] = self._unit(
                self.there(self.inner[i]), self.outer[:i]
            )
            self.lengths[1, i], self.inner[i + 1] = self._unit(
                self.back(self.outer[i]), self.inner[: i + 1]
            )
        self.steps = steps
        return self.lengths[:, :steps]

    def _unit(self, vector: Tensor, known: Tensor) -> tuple[Tensor, Tensor]:
        vector = vector - known.T @ (known @ vector)
        # NaN does not count as zero, so that it is reported
        gone = vector.norm() <= 1e-12 * self.lengths.amax()
        vector = torch.where(gone, torch.empty_like(vector).normal_(generator=self.random), vector)
        for _ in range(2):
            vector = vector - known.T @ (known @ vector)
        length = vector.norm()
        return torch.where(gone, 0.0, length), vector / length


@dataclass(frozen=True)
class Singular:
    """One singular value.

    Attributes:
        value: of J.
        error: ``|J^T u - value w|`` for its computed vectors; an exact
            singular value lies within it.
    """

    value: float
    error: float


def top_singular(
    operator: LinearOperator, count: int = 6, seed: int = 0, tolerance: float = 1e-8
) -> tuple[Singular, ...]:
    """The largest singular values, by Golub-Kahan bidiagonalisation with full reorthogonalisation.

    At most 480 steps are computed; where values are too close together for convergence, the errors
    are larger. The host waits for the device only after 30, 60, 120, 240 and 480 steps.

    Args:
        operator: the Jacobian.
        count: number of singular values.
        seed: of the start vector.
        tolerance: relative accuracy of the vectors, limited by the operator's own rounding errors.

    Returns:
        Singular values in decreasing order, each with its residual as error bound.

    Example:
        >>> from scipy.sparse.linalg import aslinearoperator
        >>> [round(s.value, 6) for s in top_singular(aslinearoperator(np.diag([3.0, 2.0, 1.0])), 2)]
        [3.0, 2.0]
    """
    expect_arguments("top_singular", operator=operator)
    expect_numbers("top_singular", COUNT, count=count)
    expect_numbers("top_singular", SEED, seed=seed)
    expect_numbers("top_singular", "a number of at least 0", tolerance=tolerance)
    products, small = as_products(operator), min(operator.shape)
    count = min(count, small)
    if small <= _SMALL or count >= small:
        left, values, right = np.linalg.svd(to_host(products.rows()), full_matrices=False)
        triples = [products.put(side[:count]).view(count, -1) for side in (left.T, right)]
    else:
        start = products.put(np.random.default_rng(seed).normal(size=small))
        values, *triples = _largest(products, start, count, max(tolerance, 100 * products.rounding))
    on_device = products.put(values[:count])
    errors = [
        torch.maximum((products.pull(u) - s * w).norm(), (products.push(w) - s * u).norm())
        for u, s, w in zip(triples[0], on_device, triples[1], strict=True)
    ]
    found = to_host(torch.stack(errors)).tolist() if errors else []
    return tuple(
        Singular(float(value), error) for value, error in zip(values[:count], found, strict=True)
    )


def _largest(
    operator: Products, start: Tensor, count: int, tolerance: float
) -> tuple[np.ndarray, Tensor, Tensor]:
    """The largest singular values, with left and right vectors in rows."""
    checks = [steps for steps in _CHECKS if count <= steps < len(start)]
    most = min(len(start), max(_CHECKS[-1], 2 * count))
    krylov = _Krylov(operator, start, most)
    for steps in [*checks, most]:
        diagonal, above = to_host(krylov.go_on(steps))
        left, values, right = np.linalg.svd(np.diag(diagonal) + np.diag(above[:-1], 1))
        residuals = np.abs(above[-1] * left[-1, :count])
        if (residuals <= tolerance * values[0]).all():
            break
    outer = operator.put(left.T[:count]).view(count, -1) @ krylov.outer[:steps]
    inner = operator.put(right[:count]).view(count, -1) @ krylov.inner[:steps]
    return (values[:count], inner, outer) if krylov.wide else (values[:count], outer, inner)


@dataclass(frozen=True, eq=False)
class Spectrum:
    """The distribution of the squared singular values of J, from stochastic Lanczos quadrature.

    Attributes:
        shape: of J.
        nodes: Ritz values of the smaller of ``J J^T`` and ``J^T J``, shape ``(probes, steps)``.
        weights: their weights; each row has the sum 1.
    """

    shape: tuple[int, int]
    nodes: np.ndarray = field(repr=False)
    weights: np.ndarray = field(repr=False)

    def mean(self, function: Callable[[np.ndarray], np.ndarray]) -> Estimate:
        """Mean of a function over the ``min(M, N)`` squared singular values."""
        return Estimate.of((function(self.nodes) * self.weights).sum(1).tolist())

    def trace_k(self) -> Estimate:
        """``tr K = sum sigma^2 / N``."""
        mean, factor = self.mean(lambda x: x), min(self.shape) / self.shape[1]
        return Estimate(mean.value * factor, mean.error * factor, mean.samples)

    def below(self, sigma: float) -> Estimate:
        """Share of the ``min(M, N)`` singular values below ``sigma``."""
        return self.mean(lambda x: (x < sigma**2) * 1.0)

    @property
    def largest(self) -> float:
        """The largest Ritz value's root, a lower bound of the largest singular
        value that converges fast.
        """
        return math.sqrt(max(float(self.nodes.max()), 0.0))

    def density(self, grid: np.ndarray, width: float | None = None) -> np.ndarray:
        """Density of singular values on a grid, with a normal curve around every node.

        Args:
            grid: singular values.
            width: standard deviation of the curves; 3 % of the largest singular value by default.

        Returns:
            The density, like ``grid``.
        """
        width = 0.03 * self.largest if width is None else width
        sigma = np.sqrt(np.clip(self.nodes, 0, None)).reshape(-1)
        weight = self.weights.reshape(-1) / len(self.nodes)
        # reflected at zero, because singular values are not negative
        curves = sum(np.exp(-((grid[:, None] - s * sigma) ** 2) / (2 * width**2)) for s in (1, -1))
        return np.asarray(curves @ weight) / (width * math.sqrt(2 * math.pi))


def spectrum(operator: LinearOperator, probes: int = 8, steps: int = 40, seed: int = 0) -> Spectrum:
    """Stochastic Lanczos quadrature: ``f`` averaged over eigenvalues is ``sum_k w_k
    f(theta_k)`` over probes.

    Each probe is a random direction; ``steps`` Golub-Kahan steps with full reorthogonalisation
    give a bidiagonal matrix, whose squared singular values are the nodes and whose right
    singular vectors' first components, squared, are the weights. Moments up to ``2 steps - 1``
    are exact for the probe.

    Args:
        operator: the Jacobian.
        probes: random directions.
        steps: Lanczos steps, two products each.
        seed: of the directions.

    Returns:
        The spectrum.

    Raises:
        InputError: fewer than two probes, or one step.

    Example:
        >>> from scipy.sparse.linalg import aslinearoperator
        >>> found = spectrum(aslinearoperator(np.diag([1.0, 2.0])), probes=2, steps=5)
        >>> round(found.largest, 9)
        2.0

    Reference:
        Golub and Welsch (1969); Ubaru, Chen, Saad: Fast estimation of tr(f(A)) via stochastic
        Lanczos quadrature (2017).
    """
    expect_arguments("spectrum", operator=operator)
    expect_numbers("spectrum", "a whole number from 2 to 1,000,000", probes=probes)
    expect_numbers("spectrum", AT_LEAST_1, steps=steps)
    expect_numbers("spectrum", SEED, seed=seed)
    products, size = as_products(operator), min(operator.shape)
    steps, random = min(steps, size), np.random.default_rng(seed)
    starts = [products.put(random.normal(size=size)) for _ in range(probes)]
    lengths = to_host(
        torch.stack([_Krylov(products, start, steps).go_on(steps) for start in starts])
    )
    tables = [np.diag(diagonal) + np.diag(above[:-1], 1) for diagonal, above in lengths]
    _, values, vectors = np.linalg.svd(np.stack(tables))
    return Spectrum(operator.shape, values**2, vectors[:, :, 0] ** 2)
