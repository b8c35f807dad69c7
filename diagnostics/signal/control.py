"""Residual control: the distance between a stack of residual blocks and the
identity, and its causes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pathspace.errors import InputError, PathspaceError

from ..shared.layers import Call, record_layers
from ..shared.linear_maps import Jacobian, Products
from ..shared.selection import Names, Types, select
from ..shared.tables import Table
from .spectra import top_singular
from .theory import ELEMENTWISE, MATRICES


@dataclass(frozen=True)
class BlockControl:
    """One residual block ``z' = z + r(z)``.

    Attributes:
        block: its name.
        step: ``||dz'/dz||``, spectral norm.
        branch: ``||dr/dz||``.
        weights: product of the spectral norms of linear and convolutional layers inside.
        norms: product of those of the normalisation layers.
        activations: product of those of the activations.
        others: product of those of the other layers called (pooling, dropout, scales).
        product: product of the four; an upper bound of ``branch`` if the branch is
            one chain of these layers.
        slack: ``log(product / branch)``: how loose the bound is.
    """

    block: str
    step: float
    branch: float
    weights: float
    norms: float
    activations: float
    others: float
    product: float
    slack: float | None


@dataclass(frozen=True)
class ResidualControl:
    """A stack of m residual blocks, from its first input to its last output.

    Attributes:
        blocks: block by block.
        span: ``||dz_{l+m}/dz_l||``.
        bound: product of the blocks' ``||dz'/dz||``, an upper bound of ``span``, loose by about
            ``log 2`` per random layer.
        first_order: ``||sum_l dr_l/dz||``.
        remainder: ``||dz_{l+m}/dz_l - I - sum_l dr_l/dz||``.
        remainder_bound: ``prod (1 + e_l) - 1 - sum e_l``, ``e_l = ||dr_l/dz||``.
        total: ``sum e_l``; the first-order expansion is accurate only if it is small.
        verdict: the result in a sentence.
    """

    blocks: Table[BlockControl]
    span: float
    bound: float
    first_order: float
    remainder: float
    remainder_bound: float
    total: float
    verdict: str


class _Sum(Products):
    """A linear combination of operators of one shape and of the identity."""

    def __init__(self, parts: Sequence[tuple[float, Products]], identity: float) -> None:
        self.parts, self.identity = parts, identity
        first = parts[0][1]
        super().__init__(first.shape, first.device, max(part.rounding for _, part in parts))

    def push(self, u: Tensor) -> Tensor:
        return self.identity * u + sum(factor * part.push(u) for factor, part in self.parts)

    def pull(self, v: Tensor) -> Tensor:
        return self.identity * v + sum(factor * part.pull(v) for factor, part in self.parts)


def spectral_norm(operator: Products) -> float:
    """Spectral norm of an operator."""
    return top_singular(operator, 1, tolerance=1e-6)[0].value


def residual_control(
    model: nn.Module,
    *inputs: Any,
    kwargs: Mapping[str, Any] | None = None,
    names: Names = None,
    types: Types = None,
    inside: bool = True,
) -> ResidualControl:
    """Measure ``||dz_{l+m}/dz_l||`` over residual blocks, the remainder of its first-order
    expansion, and its causes.

    ``dz_{l+m}/dz_l = I + sum dr_l/dz + remainder``, and ``||remainder|| <= prod(1 + e_l) - 1 - sum
    e_l``: for equal e the condition is ``m e << 1``, not ``e << 1``. All norms are spectral norms,
    computed from products with Jacobians.

    Args:
        model: any module, in its current mode.
        *inputs: one batch; the norm of a batch is the largest norm of its samples.
        kwargs: keyword inputs.
        names: patterns of the names of the blocks.
        types: classes, or names of classes, of the blocks.
        inside: also measure the layers inside each block.

    Returns:
        The stack and its blocks.

    Raises:
        InputError: no filter given, a block changes the shape of its input, or the blocks
            do not follow each other.

    Example:
        >>> _ = __import__("torch").manual_seed(0)
        >>> import torch
        >>> class Block(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.inner = nn.Linear(4, 4)
        ...
        ...     def forward(self, z):
        ...         return z + 0.01 * self.inner(z)
        >>> found = residual_control(
        ...     nn.Sequential(Block(), Block()), torch.randn(1, 4), types=Block
        ... )
        >>> found.remainder <= found.remainder_bound < 1e-3
        True

    Reference:
        Evolution of neural network, sections 3.6 and 3.7. The printed derivative of a normalised
        branch lacks the factor ``(I - 11'/n - zz'/n) / std``; the norms here include it.
    """
    if names is None and types is None:
        raise InputError(
            "residual_control found no choice of blocks; pass names='blocks.*' or types='Block'."
        )
    blocks = select(model, names, types)
    parts = {
        f"{name}.{inner}": module
        for name, block in blocks.items()
        for inner, module in block.named_modules()
        if inside and inner and not any(True for _ in module.children())
    }
    run = record_layers(model, inputs, kwargs, {**blocks, **parts})
    calls = [call for call in run.calls if call.name in blocks]
    if not calls:
        raise InputError(
            "residual_control: the model called none of the chosen blocks on these inputs."
        )
    for call in calls:
        if call.source is None or call.source.shape != call.output.shape:
            found = (
                "integers"
                if call.source is None
                else f"{tuple(call.source.shape)} -> {tuple(call.output.shape)}"
            )
            raise InputError(
                f"residual_control found {found} at block {call.name!r}, expected equal shapes;"
                " leave it out by names=."
            )
    if len({call.output.shape for call in calls}) > 1:
        raise InputError(
            "residual_control found blocks of different shapes, expected one stack; choose one by"
            " names=."
        )
    sources = [call.source for call in calls if call.source is not None]
    for one, two, source in zip(calls, calls[1:], sources[1:], strict=False):
        if not torch.equal(one.output, source):
            raise InputError(
                f"residual_control: block {two.label!r} does not read what block {one.label!r}"
                " returns; name blocks that follow each other by names=."
            )
    rows, jacobians = [], []
    for call, source in zip(calls, sources, strict=True):
        step = Jacobian(call.output, source)
        jacobians.append(step)
        branch = spectral_norm(_Sum([(1.0, step)], -1.0))
        factors = _factors(
            one
            for one in run.calls
            if one.name.startswith(f"{call.name}.") and one.number == call.number
        )
        product = math.prod(factors.values())
        slack = math.log(product / branch) if inside and branch > 0 and product > 0 else None
        rows.append(
            BlockControl(
                call.label, spectral_norm(step), branch, **factors, product=product, slack=slack
            )
        )
    try:
        span_map = Jacobian(calls[-1].output, sources[0])
    except PathspaceError as error:
        raise InputError(
            f"residual_control: the last block does not depend on the first: {error}"
        ) from error
    errors = [row.branch for row in rows]
    count = len(rows)
    linear: list[tuple[float, Products]] = [(1.0, jacobian) for jacobian in jacobians]
    span = spectral_norm(span_map)
    first = spectral_norm(_Sum(linear, -float(count)))
    # J - I - sum (J_l - I) = J - sum J_l + (m - 1) I
    remainder = spectral_norm(
        _Sum([(1.0, span_map), *((-1.0, j) for j in jacobians)], float(count - 1))
    )
    total = math.fsum(errors)
    bound = math.prod(1 + e for e in errors) - 1 - total
    small = "holds" if total < 0.5 else "does not hold"
    verdict = (
        f"||dz_(l+{count})/dz_l|| = {span:.3g}; the branches add up to {total:.3g}, so the"
        f" first-order picture {small}: its remainder is {remainder:.2g} (at most {bound:.2g})."
    )
    notes = () if inside else ("Layers inside the blocks were not measured.",)
    return ResidualControl(
        Table("residual blocks", tuple(rows), notes),
        span,
        math.prod(row.step for row in rows),
        first,
        remainder,
        bound,
        total,
        verdict,
    )


def _factors(calls: Iterable[Call]) -> dict[str, float]:
    """Product of the spectral norms of layers of each kind."""
    factors = dict.fromkeys(("weights", "norms", "activations", "others"), 1.0)
    for call in calls:
        if call.source is None or not call.output.requires_grad:
            continue
        try:
            size = spectral_norm(Jacobian(call.output, call.source))
        except PathspaceError:
            continue
        kind = "others"
        if isinstance(call.module, MATRICES):
            kind = "weights"
        elif "Norm" in type(call.module).__name__:
            kind = "norms"
        elif isinstance(call.module, ELEMENTWISE):
            kind = "activations"
        factors[kind] *= size
    return factors
