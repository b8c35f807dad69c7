"""Spectra of Jacobians that are never formed: everything from products J u and v J."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from scipy.linalg import eigh_tridiagonal
from scipy.sparse.linalg import ArpackError, LinearOperator, svds
from torch import Tensor, nn

from pathspace.diagnostics.layers import observe, select
from pathspace.diagnostics.tables import Estimate
from pathspace.errors import InputError, UnsupportedError

_SMALL = 64
_RESTARTS, _STEPS = 60, 120


class Jacobian(LinearOperator):
    """The Jacobian ``dy/dz`` between two tensors of one autograd graph, as a scipy operator of shape ``(M, N)``.

    ``rmatvec(v)`` is the vector-Jacobian product ``v J``; ``matvec(u)`` is ``J u``, the derivative of ``v J`` by v. A
    batch is one map: its Jacobian holds those of its samples as diagonal blocks (but for batch norm in train mode).

    Args:
        target: y.
        source: z, of which y is a function.

    Raises:
        InputError: y does not depend on z.

    Example:
        >>> z = torch.tensor([1.0, 2.0]).double().requires_grad_()
        >>> jacobian = Jacobian(torch.stack([z[0] * z[1], z[0] ** 2, z[1]]), z)
        >>> jacobian.shape, (jacobian @ np.array([1.0, 0.0])).tolist(), jacobian.rmatvec(np.array([1.0, 0, 0])).tolist()
        ((3, 2), [2.0, 2.0, 0.0], [2.0, 1.0])
    """

    def __init__(self, target: Tensor, source: Tensor) -> None:
        self.target, self.source = target, source
        with torch.enable_grad():
            self._cotangent = torch.zeros_like(target, requires_grad=True)
            (pulled,) = torch.autograd.grad(target, source, self._cotangent, create_graph=True, allow_unused=True)
        if pulled is None:
            raise InputError("The target does not depend on the source; choose a source that lies before it.")
        self._pulled = pulled
        # relative error of one product: what a tolerance cannot go below
        self.rounding = torch.finfo(target.dtype).eps
        super().__init__(np.dtype(np.float64), (target.numel(), source.numel()))

    def _rmatvec(self, v: np.ndarray) -> np.ndarray:
        (back,) = torch.autograd.grad(
            self.target, self.source, _like(v, self.target), retain_graph=True, allow_unused=True
        )
        return _flat(back, self.source)

    def _matvec(self, u: np.ndarray) -> np.ndarray:
        if not self._pulled.requires_grad:
            return np.zeros(self.shape[0])
        try:
            (pushed,) = torch.autograd.grad(
                self._pulled, self._cotangent, _like(u, self.source), retain_graph=True, allow_unused=True
            )
        except RuntimeError as error:
            raise UnsupportedError(
                f"J u cannot be computed, because an operation has no second derivative: {str(error).splitlines()[0]}"
            ) from error
        return _flat(pushed, self.target)

    def dense(self) -> np.ndarray:
        """The explicit matrix, for small shapes."""
        rows, columns = self.shape
        if rows <= columns:
            return np.stack([self._rmatvec(row) for row in np.eye(rows)])
        return np.stack([self._matvec(column) for column in np.eye(columns)], 1)


def _like(values: np.ndarray, tensor: Tensor) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values)).reshape(tensor.shape).to(tensor)


def _flat(value: Tensor | None, like: Tensor) -> np.ndarray:
    if value is None:
        return np.zeros(like.numel())
    found = value.detach().reshape(-1).double().cpu().numpy()
    if not np.isfinite(found).all():
        raise UnsupportedError(
            "A product with the Jacobian is not finite, so it has no spectrum; look for an overflow, or for a square "
            "root, norm or logarithm of zero in the model."
        )
    return found


def jacobian(
    model: nn.Module,
    *inputs: Any,
    kwargs: Mapping[str, Any] | None = None,
    start: str | None = None,
    end: str | None = None,
) -> Jacobian:
    """The Jacobian from the output of one layer to the output of another.

    Args:
        model: any module, in the mode it is in.
        *inputs: one batch; one sample for the Jacobian of one sample.
        kwargs: keyword inputs.
        start: the layer whose (first) output is z; the first floating-point input of the model by default.
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
    wanted = [name for name in (start, end) if name is not None]
    named = dict(model.named_modules())
    for name in wanted:
        if name not in named:
            raise InputError(f"jacobian found no layer {name!r} in {type(model).__name__}; see named_modules().")
    run = observe(model, inputs, kwargs, select(model, names=wanted) if wanted else {})
    calls = {name: [call for call in run.calls if call.name == name] for name in wanted}
    for name, found in calls.items():
        if not found:
            raise InputError(f"jacobian: {type(model).__name__} does not call the layer {name!r} on these inputs.")
    if start is None and not run.inputs:
        raise InputError("jacobian found no floating-point input; name the layer to start from, such as an embedding.")
    source = run.inputs[0] if start is None else calls[start][0].sink
    return Jacobian(run.output if end is None else calls[end][-1].output, source)


def trace_k(operator: LinearOperator, probes: int = 32, method: str = "hutchinson", seed: int = 0) -> Estimate:
    """Estimate ``tr K = ||J||_F^2 / N``, the expected ratio ``Var[vJ] / Var[v]``.

    ``"hutchinson"`` averages ``|vJ|^2 / N`` over random signs v, with variance ``2 sum_{i != j} K_ij^2 / probes``.
    ``"hutch++"`` spends a third of the products on the range of a sketch of ``J J^T``, whose trace it takes
    exactly, and a third on Hutchinson's estimator of the rest; better where few singular values matter.

    Args:
        operator: the Jacobian, shape ``(M, N)``.
        probes: products with ``J^T`` (Hutchinson), or with ``J J^T`` (Hutch++).
        method: one of the two.
        seed: of the random signs.

    Returns:
        The estimate with its standard error.

    Raises:
        InputError: unknown method, or too few probes for an error bar.

    Example:
        >>> from scipy.sparse.linalg import aslinearoperator
        >>> matrix = np.random.default_rng(0).normal(size=(30, 40))
        >>> trace_k(aslinearoperator(matrix), 100).agrees((matrix**2).sum() / 40)
        True

    Reference:
        Meyer, Musco, Musco, Woodruff: Hutch++ (2021), algorithm 1.
    """
    rows, columns = operator.shape
    if method not in ("hutchinson", "hutch++"):
        raise InputError(f"trace_k found method={method!r}, expected 'hutchinson' or 'hutch++'.")
    if probes < (2 if method == "hutchinson" else 6):
        raise InputError(f"trace_k found probes={probes}, expected at least 2 (hutchinson) or 6 (hutch++).")
    random = np.random.default_rng(seed)

    def signs() -> np.ndarray:
        return random.integers(0, 2, rows) * 2.0 - 1

    if method == "hutchinson":
        return Estimate.of([float((operator.rmatvec(signs()) ** 2).sum()) / columns for _ in range(probes)])
    third = min(probes // 3, rows)
    sketch = np.stack([operator.matvec(operator.rmatvec(signs())) for _ in range(third)], 1)
    basis = _range(sketch)
    known = sum(float((operator.rmatvec(vector) ** 2).sum()) for vector in basis.T) / columns
    if basis.shape[1] >= min(rows, columns):
        return Estimate(known, 0.0, third)
    rest = []
    for _ in range(max(2, probes // 3)):
        v = signs()
        rest.append(float((operator.rmatvec(v - basis @ (basis.T @ v)) ** 2).sum()) / columns)
    remainder = Estimate.of(rest)
    return Estimate(known + remainder.value, remainder.error, remainder.samples)


def _range(matrix: np.ndarray) -> np.ndarray:
    """Orthonormal basis of the columns; columns that a low rank makes dependent are left out."""
    left, singular, _ = np.linalg.svd(matrix, full_matrices=False)
    return left[:, singular > 1e-10 * max(singular.max(initial=0.0), 1e-300)]


@dataclass(frozen=True)
class Singular:
    """One singular value.

    Attributes:
        value: of J.
        error: ``|J^T u - value w|`` for its computed vectors; an exact singular value lies within it.
    """

    value: float
    error: float


def top_singular(
    operator: LinearOperator, count: int = 6, seed: int = 0, tolerance: float = 1e-8
) -> tuple[Singular, ...]:
    """The largest singular values, by implicitly restarted Lanczos on ``J^T J`` (ARPACK).

    Where that does not converge, 120 steps of Lanczos without restarts stand for it, and the errors say how good they
    are.

    Args:
        operator: the Jacobian.
        count: how many.
        seed: of the start vector.
        tolerance: relative accuracy asked of ARPACK, as far as the operator's own rounding allows.

    Returns:
        Singular values in decreasing order, each with its residual as error bound.

    Example:
        >>> from scipy.sparse.linalg import aslinearoperator
        >>> [round(s.value, 6) for s in top_singular(aslinearoperator(np.diag([3.0, 2.0, 1.0])), 2)]
        [3.0, 2.0]
    """
    small = min(operator.shape)
    count = min(count, small)
    if small <= _SMALL or count >= small:
        side = (
            np.stack([operator.rmatvec(row) for row in np.eye(operator.shape[0])])
            if (operator.shape[0] <= operator.shape[1])
            else np.stack([operator.matvec(column) for column in np.eye(operator.shape[1])], 1)
        )
        left, values, right = np.linalg.svd(side, full_matrices=False)
        left, values, right = left[:, :count], values[:count], right[:count]
    else:
        tolerance = max(tolerance, 100 * getattr(operator, "rounding", 0.0))
        start = np.random.default_rng(seed).normal(size=small)
        try:
            left, values, right = svds(operator, k=count, v0=start, tol=tolerance, maxiter=_RESTARTS)
        except ArpackError:
            # an operator that is zero, or values so close together that restarts lead nowhere: the errors will tell
            left, values, right = _bidiagonal(operator, count, start)
    result = []
    for u, value, w in sorted(zip(left.T, values, right, strict=True), key=lambda triple: -triple[1]):
        error = max(np.linalg.norm(operator.rmatvec(u) - value * w), np.linalg.norm(operator.matvec(w) - value * u))
        result.append(Singular(float(value), float(error)))
    return tuple(result)


def _bidiagonal(operator: LinearOperator, count: int, start: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Singular triples of the largest values from Lanczos on the smaller of ``J J^T`` and ``J^T J``."""
    rows, columns = operator.shape
    wide = rows <= columns
    basis = [start / np.linalg.norm(start)]
    images = []
    for _ in range(min(_STEPS, len(start))):
        images.append((operator.rmatvec if wide else operator.matvec)(basis[-1]))
        following = (operator.matvec if wide else operator.rmatvec)(images[-1])
        known = np.stack(basis, 1)
        for _ in range(2):
            following = following - known @ (known.T @ following)
        length = float(np.linalg.norm(following))
        if length <= 1e-12 * max(float(np.linalg.norm(images[-1])) ** 2, 1e-300):
            break
        basis.append(following / length)
    span = np.stack(basis[: len(images)], 1)
    left, values, right = np.linalg.svd(np.stack(images, 1), full_matrices=False)
    inner = (span @ right.T)[:, :count]
    outer, values = left[:, :count], values[:count]
    return (inner, values, outer.T) if wide else (outer, values, inner.T)


@dataclass(frozen=True, eq=False)
class Spectrum:
    """The distribution of the squared singular values of J, from stochastic Lanczos quadrature.

    Attributes:
        shape: of J.
        nodes: Ritz values of the smaller of ``J J^T`` and ``J^T J``, shape ``(probes, steps)``.
        weights: their weights, each row adding up to 1.
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
        """The largest singular value that Lanczos found; a lower bound that converges fast."""
        return math.sqrt(max(float(self.nodes.max()), 0.0))

    def density(self, grid: np.ndarray, width: float | None = None) -> np.ndarray:
        """Density of singular values on a grid, every node broadened to a normal curve.

        Args:
            grid: singular values.
            width: standard deviation of the curves; 3 % of the largest singular value by default.

        Returns:
            The density, like ``grid``.
        """
        width = 0.03 * self.largest if width is None else width
        sigma = np.sqrt(np.clip(self.nodes, 0, None)).reshape(-1)
        weight = self.weights.reshape(-1) / len(self.nodes)
        # reflected at zero, where singular values end
        curves = sum(np.exp(-((grid[:, None] - s * sigma) ** 2) / (2 * width**2)) for s in (1, -1))
        return np.asarray(curves @ weight) / (width * math.sqrt(2 * math.pi))


def spectrum(operator: LinearOperator, probes: int = 8, steps: int = 40, seed: int = 0) -> Spectrum:
    """Stochastic Lanczos quadrature: ``f`` averaged over eigenvalues is ``sum_k w_k f(theta_k)`` over probes.

    Each probe is a random direction; ``steps`` Lanczos steps with full reorthogonalisation give a tridiagonal
    matrix, whose eigenvalues are the nodes and whose first eigenvector components, squared, are the weights. Moments
    up to
    ``2 steps - 1`` are exact for the probe.

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
        Golub and Welsch (1969); Ubaru, Chen, Saad: Fast estimation of tr(f(A)) via stochastic Lanczos quadrature
        (2017).
    """
    if probes < 2 or steps < 1:
        raise InputError(f"spectrum found probes={probes} and steps={steps}, expected at least 2 and 1.")
    rows, columns = operator.shape
    if rows <= columns:
        size, apply = rows, lambda v: operator.matvec(operator.rmatvec(v))
    else:
        size, apply = columns, lambda v: operator.rmatvec(operator.matvec(v))
    steps = min(steps, size)
    random = np.random.default_rng(seed)
    nodes, weights = np.zeros((probes, steps)), np.zeros((probes, steps))
    for probe in range(probes):
        start = random.normal(size=size)
        alpha, beta = _lanczos(apply, start / np.linalg.norm(start), steps)
        values, vectors = eigh_tridiagonal(alpha, beta)
        nodes[probe, : len(values)], weights[probe, : len(values)] = values, vectors[0] ** 2
    return Spectrum((rows, columns), nodes, weights)


def _lanczos(apply: Callable[[np.ndarray], np.ndarray], start: np.ndarray, steps: int) -> tuple[np.ndarray, np.ndarray]:
    basis, alpha, beta = [start], [], []
    for _ in range(steps):
        image = apply(basis[-1])
        alpha.append(float(basis[-1] @ image))
        known = np.stack(basis, 1)
        for _ in range(2):
            image = image - known @ (known.T @ image)
        length = float(np.linalg.norm(image))
        if len(alpha) == steps or length <= 1e-12 * max(abs(alpha[0]), 1e-300):
            break
        beta.append(length)
        basis.append(image / length)
    return np.array(alpha), np.array(beta)
