"""Linear maps given by products ``J u`` and ``v J`` on a device, among them Jacobians.

The products are tensors, and numbers reach the host only by :func:`to_host`, so that an iteration
of many products does not wait for the device.
"""

from __future__ import annotations

import numpy as np
import torch
from scipy.sparse.linalg import LinearOperator
from torch import Tensor

from pathspace.errors import InputError, UnsupportedError


class Products(LinearOperator):  # type: ignore[misc]
    """A linear map of shape ``(M, N)`` given by products on a device; numpy arrays
    are copied to it and back.

    Each kind of map defines :meth:`push` and :meth:`pull`.

    Args:
        shape: ``(M, N)``.
        device: the device of the products.
        rounding: relative error of one product, the smallest useful tolerance.
    """

    def __init__(self, shape: tuple[int, int], device: torch.device, rounding: float) -> None:
        self.device, self.rounding = device, rounding
        super().__init__(np.dtype(np.float64), shape)

    # (not abstract: scipy's class makes its objects in a way of its own)

    def push(self, u: Tensor) -> Tensor:
        """``J u`` in float64, shape ``(M,)``, without a wait for the device."""
        raise NotImplementedError

    def pull(self, v: Tensor) -> Tensor:
        """``v J`` in float64, shape ``(N,)``, without a wait for the device."""
        raise NotImplementedError

    def _matvec(self, u: np.ndarray) -> np.ndarray:
        return to_host(self.push(self.put(u)))

    def _rmatvec(self, v: np.ndarray) -> np.ndarray:
        return to_host(self.pull(self.put(v)))

    def put(self, values: np.ndarray) -> Tensor:
        """A vector on the device."""
        return torch.from_numpy(np.ascontiguousarray(values, dtype=np.float64).reshape(-1)).to(
            self.device
        )

    def rows(self) -> Tensor:
        """The explicit matrix, for small shapes."""
        rows, columns = self.shape
        eye = torch.eye(min(rows, columns), dtype=torch.float64, device=self.device)
        if rows <= columns:
            return torch.stack([self.pull(row) for row in eye])
        return torch.stack([self.push(column) for column in eye], 1)

    def dense(self) -> np.ndarray:
        """The explicit matrix, for small shapes."""
        return to_host(self.rows())


class _Other(Products):
    """Any scipy operator."""

    def __init__(self, operator: LinearOperator) -> None:
        self._operator = operator
        super().__init__(operator.shape, torch.device("cpu"), 0.0)

    def push(self, u: Tensor) -> Tensor:
        return self.put(self._operator.matvec(u.numpy()))

    def pull(self, v: Tensor) -> Tensor:
        return self.put(self._operator.rmatvec(v.numpy()))


def as_products(operator: LinearOperator) -> Products:
    """Any scipy operator as products of tensors."""
    return operator if isinstance(operator, Products) else _Other(operator)


class Jacobian(Products):
    """The Jacobian ``dy/dz`` between two tensors of one autograd graph, as a scipy
    operator of shape ``(M, N)``.

    ``rmatvec(v)`` is the vector-Jacobian product ``v J``; ``matvec(u)`` is ``J u``, the derivative
    of ``v J`` by v. The Jacobian of a batch has those of its samples as diagonal blocks (except for
    batch norm in train mode).

    Args:
        target: y.
        source: z, of which y is a function.

    Raises:
        InputError: y does not depend on z.

    Example:
        >>> z = torch.tensor([1.0, 2.0]).double().requires_grad_()
        >>> jacobian = Jacobian(torch.stack([z[0] * z[1], z[0] ** 2, z[1]]), z)
        >>> (
        ...     jacobian.shape,
        ...     (jacobian @ np.array([1.0, 0.0])).tolist(),
        ...     jacobian.rmatvec(np.array([1.0, 0, 0])).tolist(),
        ... )
        ((3, 2), [2.0, 2.0, 0.0], [2.0, 1.0])
    """

    def __init__(self, target: Tensor, source: Tensor) -> None:
        self.target, self.source = target, source
        with torch.enable_grad():
            self._cotangent = torch.zeros_like(target, requires_grad=True)
            (pulled,) = torch.autograd.grad(
                target, source, self._cotangent, create_graph=True, allow_unused=True
            )
        if pulled is None:
            raise InputError("The target does not depend on the source; choose a source before it.")
        self._pulled = pulled
        shape = target.numel(), source.numel()
        super().__init__(shape, target.device, torch.finfo(target.dtype).eps)

    def pull(self, v: Tensor) -> Tensor:
        """``v J`` in float64, shape ``(N,)``."""
        cotangent = v.reshape(self.target.shape).to(self.target)
        (back,) = torch.autograd.grad(
            self.target, self.source, cotangent, retain_graph=True, materialize_grads=True
        )
        return back.detach().reshape(-1).double()

    def push(self, u: Tensor) -> Tensor:
        """``J u`` in float64, shape ``(M,)``.

        Raises:
            UnsupportedError: an operation has no second derivative.
        """
        if not self._pulled.requires_grad:
            return torch.zeros(self.target.numel(), dtype=torch.float64, device=self.device)
        tangent = u.reshape(self.source.shape).to(self.source)
        try:
            (pushed,) = torch.autograd.grad(
                self._pulled, self._cotangent, tangent, retain_graph=True, materialize_grads=True
            )
        except RuntimeError as error:
            raise UnsupportedError(
                "J u cannot be computed, because an operation has no second derivative:"
                f" {str(error).splitlines()[0]}"
            ) from error
        return pushed.detach().reshape(-1).double()


def to_host(value: Tensor) -> np.ndarray:
    """Copy numbers to the host; only here it waits for the device."""
    found = value.detach().cpu().numpy()
    if not np.isfinite(found).all():
        raise UnsupportedError(
            "A product with the Jacobian is not finite, so it has no spectrum; check for an"
            " overflow, or for a square root, norm or logarithm of zero in the model."
        )
    return found
