r"""The path norm of a model as a function of squared weights, and its curvatures.

``gamma^2 = sum over paths of the product of squared weights`` is the sum of the outputs of the
network with squared weights on inputs of ones (all activations are then at least 0, so every ReLU
passes them). With ``theta = w^2``::

    kappa = 1/2 d^2 gamma^2 / dw^2 = d gamma^2 / d theta + 2 theta d^2 gamma^2 / d theta^2

The first term needs one forward and one backward pass of the squared network: for a feedforward
network it is ``gamma_in(tail) gamma_out(head)``, and the second is 0. If paths pass a weight
several times (recurrence), the second is not 0, and for weights near the identity it dominates on
the diagonal of the recurrent matrix.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.func import grad, jvp, vmap
from torch.utils import _pytree as pytree

from pathspace.errors import (
    InputError,
    InputTypeError,
    UnsupportedError,
    expect_arguments,
    first_line,
)
from pathspace.inference.registry import facts_of, operation_name
from pathspace.models.modes import precision
from pathspace.models.running import cast, evaluate
from pathspace.models.values import require_values
from pathspace.reduction import trace as trace_graph

CHUNK = 256
# random networks that are compared with kappa, and a factor that shows powers of weights
DRAWS = 4
LARGER = 1024.0
# operations that are no sums over paths: choices, sizes, and gates
CROOKED = frozenset(
    [
        "maximum pooling",
        "norm pooling",
        "maximum",
        "order",
        "norm",
        "normalisation",
        "gated recurrence",
        "attention",
    ]
)


def ones_like_inputs(example: Any) -> Any:
    """Nested example inputs in which every floating-point tensor is one sample of ones."""
    return pytree.tree_map(
        lambda x: torch.ones_like(x) if isinstance(x, Tensor) and x.is_floating_point() else x,
        example,
    )


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """A context with the model in evaluation mode, because dropout would remove paths at random."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        yield
    finally:
        for module, training in modes:
            module.training = training


def _checked(model: nn.Module, args: object, reused: object) -> tuple[Any, ...]:
    """The example as a tuple, if all arguments are as they have to be."""
    if not isinstance(args, Tensor | tuple | list):
        raise InputTypeError(
            f"PathSGD found a {type(args).__name__} as its example, expected a tensor or a tuple of"
            " inputs; pass one sample of them."
        )
    if isinstance(reused, str) or not isinstance(reused, Iterable | None):
        raise InputTypeError(
            f"PathSGD found reused={reused!r}, expected a list of names of parameters, or None to"
            " find them."
        )
    args = (args,) if isinstance(args, Tensor) else tuple(args)
    inputs = [leaf for leaf in pytree.tree_leaves(args) if isinstance(leaf, Tensor)]
    require_values("PathSGD", [*model.named_parameters(), *model.named_buffers()])
    require_values("PathSGD", (("an input", leaf) for leaf in inputs))
    return args


def refuse_sparse(name: str, gradient: Tensor) -> None:
    """Refuse a sparse gradient.

    Raises:
        UnsupportedError: it is one.
    """
    if gradient.layout != torch.strided:
        raise UnsupportedError(
            f"PathSGD found a sparse gradient of {name!r}, expected a dense one; use dense"
            " embeddings."
        )


class PathNorm:
    """``gamma^2`` of a model as a function of squared weights, and its curvatures.

    Args:
        model: a network of linear and convolutional layers, ReLU-like
            activations, sums and averages.
        args: example inputs; ``gamma^2`` is that of one sample, whatever their number.
        reused: names of parameters that paths pass several times; ``None`` finds them: ``gamma^2``
            grows faster than they do.

    Raises:
        InputTypeError: an argument is of another type.
        InputError: a tensor has no values, or there is no parameter with a name.
        UnsupportedError: the model has layers whose outputs are not sums over paths.
    """

    def __init__(
        self, model: nn.Module, args: tuple[Any, ...], reused: Iterable[str] | None = None
    ) -> None:
        expect_arguments("PathSGD", model=model)
        args = _checked(model, args, reused)
        with evaluating(model):
            graph = trace_graph(model, *args, affine=False)
        expected = (
            "expected weighted sums, averages and ReLU-like activations from the inputs to the"
            " outputs"
        )
        driven: set[fx.Node] = set()
        for node in graph.captured.graph.graph.nodes:
            facts = facts_of(node)
            kind = graph.captured.sources.get(node.name, ("", ""))[0]
            leaves = pytree.tree_leaves((node.args, node.kwargs))
            operands = [each for each in leaves if isinstance(each, fx.Node) and each in driven]
            if operands or (node.op == "placeholder" and kind == "input"):
                driven.add(node)
            bias = (
                node.args[facts.bias]
                if facts.bias is not None and len(node.args) > facts.bias
                else None
            )
            factors = [each for each in operands if each is not bias]
            multiplies = facts.linear == "each" or facts.kind == "quotient"
            if (multiplies and len(factors) > 1) or (facts.kind == "power" and factors):
                name = operation_name(node.target)
                raise UnsupportedError(
                    f"PathSGD found {name} of values that depend on the inputs, {expected}."
                )
            if facts.kind in CROOKED:
                name = operation_name(node.target)
                raise UnsupportedError(
                    f"PathSGD found {name} in the model, {expected}; leave it out, or pool by"
                    " averages."
                )
        if graph.has_cuts:
            raise UnsupportedError(
                f"PathSGD found a normalisation or a comparison in the model, {expected}; remove"
                " it, or multiply by a mask in place of torch.where."
            )
        if graph.pinned:
            pin = graph.pinned[0]
            where = " at ".join(part for part in (pin.op, pin.source) if part)
            raise UnsupportedError(
                f"PathSGD found {where} ({pin.reason}), {expected}; leave it out of the model."
            )
        self.model, self.args = model, ones_like_inputs(args)
        # (gamma^2 is that of one sample)
        self.rows = self._number_of_samples()
        names = {name for name, _ in model.named_parameters()}
        self.reused = tuple(self._passed_again() if reused is None else reused)
        unknown = [name for name in self.reused if name not in names]
        if unknown:
            raise InputError(
                f"PathSGD found reused={unknown[0]!r}, expected names of parameters of the model."
            )
        self._check([block.name for block in graph.blocks])

    def _check(self, names: Iterable[str]) -> None:
        """Refuse a network that is not a sum over paths, for which ``kappa`` is
        positive at positive weights.

        Raises:
            UnsupportedError: ``kappa`` of a parameter is negative, sparse, or 0 for all of its
                scalars.
        """
        even = self._even()
        with evaluating(self.model):
            kappa = self._slopes(even)
            lost = self._lost(even, kappa)
        for name, value in kappa.items():
            refuse_sparse(name, value)
        for name in names:
            bad = (
                "negative"
                if bool((kappa[name] < 0).any())
                else "0"
                if not kappa[name].any() or name in lost
                else ""
            )
            if bad:
                raise UnsupportedError(
                    f"PathSGD found kappa {bad} for {name!r}, expected a positive one: its paths"
                    " are subtracted, negated or cut off by an activation somewhere; exclude the"
                    " parameter, or write the model as sums."
                )

    def _even(self) -> dict[str, Tensor]:
        """Positive weights, scaled so that sums do not grow with the width."""
        return {
            name: torch.full_like(p, len(p) / p.numel() if p.ndim else 1.0)
            for name, p in self._squares()
        }

    def _lost(self, even: Mapping[str, Tensor], kappa: Mapping[str, Tensor]) -> set[str]:
        """Parameters with scalars on which the output depends, and ``kappa`` does not: with
        positive weights an activation cuts off all paths of theirs.
        """
        random = torch.Generator().manual_seed(0)
        lost = set()
        for _ in range(DRAWS):
            signed = {
                name: value.sqrt() * torch.randn(value.shape, generator=random).to(value).sign()
                for name, value in even.items()
            }
            for name, slope in self._slopes(signed).items():
                if slope.layout == torch.strided and bool((slope[kappa[name] == 0] != 0).any()):
                    lost.add(name)
        return lost

    def _passed_again(self) -> list[str]:
        """Parameters that paths pass several times: ``gamma^2`` grows faster than they do."""
        # (a model may ask for gradients in its forward pass)
        even = {name: theta.requires_grad_() for name, theta in self._even().items()}
        with evaluating(self.model), torch.enable_grad():
            once = self.value(even).detach()
            ends = {
                name: [
                    self.value({**even, name: times * theta}).detach() for times in (0.0, LARGER)
                ]
                for name, theta in even.items()
            }
        # (a sum that overflows or is no number counts as well: this costs time, not truth)
        return [
            name
            for name, (none, many) in ends.items()
            if not many <= 2 * (none + LARGER * (once - none).abs())
        ]

    def value(self, theta: Mapping[str, Tensor]) -> Tensor:
        """``gamma^2`` at squared weights ``theta``."""
        out = evaluate(self.model, theta, cast(self.args, precision(self.model)))
        sums = [leaf.sum() for leaf in pytree.tree_leaves(out) if isinstance(leaf, Tensor)]
        if not sums or any(one.is_complex() for one in sums):
            raise UnsupportedError(
                f"PathSGD found {'complex outputs' if sums else 'no tensor in the outputs'} of"
                f" {type(self.model).__name__}, expected real ones: gamma^2 is their sum at squared"
                " weights."
            )
        return torch.stack(sums).sum() / self.rows

    def _number_of_samples(self) -> int:
        """The number of samples in the example, which may stand along the first dimension or, for
        sequences, along the second: ``gamma^2`` of all is then as many times that of one.
        """
        leaves = [leaf for leaf in pytree.tree_leaves(self.args) if isinstance(leaf, Tensor)]
        every, self.rows = self.args, 1
        # (a model may ask for gradients in its forward pass)
        even = {name: theta.requires_grad_() for name, theta in self._even().items()}
        with evaluating(self.model), torch.enable_grad():
            whole = self.value(even).detach()
            for dim in range(min([2, *(leaf.ndim for leaf in leaves)])):
                size = leaves[0].shape[dim]
                if size < 2 or any(leaf.shape[dim] != size for leaf in leaves):
                    return 1
                self.args = pytree.tree_map(
                    lambda x, dim=dim: x.narrow(dim, 0, 1) if isinstance(x, Tensor) else x, every
                )
                try:
                    one = self.value(even).detach()
                except (RuntimeError, TypeError, ValueError, IndexError):
                    # the first dimension is not one of samples
                    continue
                finally:
                    self.args = every
                if torch.allclose(whole, size * one, rtol=1e-3):
                    return size
        return 1

    def _slopes(self, theta: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Derivatives of :meth:`value` by all weights."""
        with torch.enable_grad():
            leaves = {name: value.detach().requires_grad_() for name, value in theta.items()}
            value = self.value(leaves)
            if not value.requires_grad:
                return {name: torch.zeros_like(leaf) for name, leaf in leaves.items()}
            found = torch.autograd.grad(value, list(leaves.values()), allow_unused=True)
        return {
            name: torch.zeros_like(leaf) if slope is None else slope
            for (name, leaf), slope in zip(leaves.items(), found, strict=True)
        }

    def _squares(self) -> list[tuple[str, Tensor]]:
        return [(name, p.detach().square()) for name, p in self.model.named_parameters()]

    def kappa(self, second: bool = True) -> dict[str, Tensor]:
        """``kappa`` of every weight.

        Args:
            second: whether the term of weights that paths pass several times is included.
        """
        theta = dict(self._squares())
        with evaluating(self.model):
            result = self._slopes(theta)
            for name in self.reused if second else ():
                result[name] = result[name] + 2 * theta[name] * self._second(theta, name)
        return {name: value.detach() for name, value in result.items()}

    def _second(self, theta: dict[str, Tensor], name: str) -> Tensor:
        """Diagonal of ``d^2 gamma^2 / d theta^2`` for one parameter, some columns at a time."""
        base = theta[name]

        def slope(flat: Tensor) -> Tensor:
            result: Tensor = grad(lambda t: self.value({**theta, name: t.view(base.shape)}))(flat)
            return result

        def entry(i: Tensor) -> Tensor:
            direction = torch.zeros_like(base).reshape(-1).index_fill(0, i, 1.0)
            result: Tensor = jvp(slope, (base.reshape(-1),), (direction,))[1].index_select(0, i)[0]
            return result

        numbers = torch.arange(base.numel(), device=base.device)
        try:
            found = vmap(lambda i: entry(i.reshape(1)), chunk_size=CHUNK)(numbers)
        except (RuntimeError, NotImplementedError) as error:
            raise UnsupportedError(
                f"PathSGD cannot take second derivatives of {type(self.model).__name__} by"
                f" {name!r}, which paths pass several times ({first_line(error)}); leave them out"
                " with second=False, or give functions of torch.autograd a setup_context."
            ) from error
        return found.view(base.shape)
