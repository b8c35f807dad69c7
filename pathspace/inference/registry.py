"""The table of operations: the rule of each operation, and its properties.

A rule is a small function ``rule(semantics, *args, **kwargs)`` with the arguments of the operation:
tensors are replaced by their ids and parameters by :class:`~pathspace.inference.values.Weight`;
numbers are unchanged. It returns ids (a tuple, for operations with several results). The properties
that hold for all arguments of an operation are stated once, with its rule.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, TypeVar

import torch

from ..errors import InputTypeError

Rule = Callable[..., Any]
AnyRule = TypeVar("AnyRule", bound=Rule)


@dataclass(frozen=True)
class Facts:
    """Properties of an operation that hold for all operands and arguments, unless it
    converts operands to integers.

    Attributes:
        kind: the kind of operation, one of :data:`KINDS`.
        degree: degree of positive homogeneity in each activation alone, ``f(c x) = c^d f(x)``; a
            single number for all activations together if it is homogeneous only in all of them.
        linear: ``"jointly"`` in all activations together (a sum), ``"each"`` in each
            alone (a product), or ``""``.
        coefficients: those of the linear map: ``"one"`` if all are 0 or 1,
            ``"positive"``, or ``"real"``.
        elementwise: every element of the result is a function of the elements at the same position.
        separable: the linear map is a product of one map for each image dimension.
        bias: position of the argument that is a bias of the channels.
        slope: largest absolute slope of a function of one operand, if it is finite and
            the same for all arguments.
        rotations: whether rotations of its features keep its result, or rotate it: it is a length,
            or divides by one, and subtracts no mean.
    """

    kind: str = ""
    degree: tuple[float, ...] = ()
    linear: str = ""
    coefficients: str = "real"
    elementwise: bool = False
    separable: bool = False
    bias: int | None = None
    slope: float | None = None
    rotations: bool = False

    @property
    def moves(self) -> bool:
        """Whether the elements of the result are elements of the operands, or sums of them."""
        return self.linear == "jointly" and self.coefficients == "one"


# kind -> what operations of this kind do
KINDS: dict[str, str] = {
    "": "nothing is stated",
    "copy": "the same elements, perhaps as another type",
    "movement": "the same elements in another order or shape",
    "repetition": "elements many times",
    "part": "some of the elements, at fixed places",
    "split": "the elements in several tensors",
    "concatenation": "several tensors in one",
    "padding": "elements with a margin",
    "choice": "elements of one operand or the other",
    "pick": "elements at positions that are operands",
    "bag": "sums, means or maxima of rows at positions that are operands",
    "write": "elements put in, or added to, places of another tensor",
    "sum": "``x + y`` and ``x - y``",
    "combination": "other sums of operands with coefficients",
    "product": "``x y`` elementwise",
    "quotient": "``x / y`` elementwise",
    "power": "``x^n`` elementwise",
    "magnitude": "``|x|``",
    "clip": "``min(max(x, a), b)``",
    "maximum": "the larger or smaller of two elements",
    "activation": "an activation function",
    "gate": "one half times a function of the other",
    "function": "another elementwise function",
    "dropout": "elements left out at random",
    "rounding": "whole numbers",
    "comparison": "order or sign only",
    "contraction": "sums of products of elements of two operands",
    "convolution": "the same over windows",
    "transposed convolution": "its transpose",
    "total": "a sum over dimensions",
    "mean": "a mean over dimensions",
    "order": "maximum, minimum, order statistics along a dimension",
    "norm": "lengths, distances and deviations",
    "normalisation": "the scale is taken away",
    "softmax": "normalised exponentials",
    "transform": "another linear map along a dimension",
    "maximum pooling": "the maximum of every window",
    "average pooling": "the mean of every window",
    "norm pooling": "the norm of every window",
    "upsampling": "an image at a higher resolution",
    "resampling": "an image read at other places",
    "recurrence": "a recurrent layer with ReLU",
    "gated recurrence": "a recurrent layer with gates or tanh",
    "attention": "``softmax(q k^T) v``",
    "complex": "complex numbers made or taken apart",
    "creation": "a tensor that is made, not computed",
    "random": "random numbers",
    "size": "sizes, and checks of them",
}

RULES: dict[str, Rule] = {}
FACTS: dict[str, Facts] = {}


def rule(*operations: str, **stated: Any) -> Callable[[AnyRule], AnyRule]:
    """Register a rule for operations, named like ``"aten.relu"`` or ``"aten::relu"`` (namespace
    and name, without overload).

    Args:
        *operations: names; existing rules of these operations are replaced.
        **stated: properties of the operations, attributes of :class:`Facts`.

    Returns:
        A decorator that registers ``rule(semantics, *args, **kwargs)`` and returns it. A rule
        raises a ``ValueError`` for a form that it does not cover, and its message becomes
        part of the pin's reason. It warns if torch has no operation of a name.

    Raises:
        InputTypeError: a property has an unknown name, or an operation is not a name.
        ValueError: the kind is unknown.

    Example:
        >>> from pathspace.inference.registry import RULES, rule
        >>> library = torch.library.Library("mylib", "DEF")
        >>> library.define("scaled_relu(Tensor x, float scale) -> Tensor")
        'scaled_relu'
        >>> @rule("mylib.scaled_relu", kind="activation", degree=(1,), elementwise=True)
        ... def scaled_relu(semantics, x, scale):
        ...     return semantics.activation(x)  # positively homogeneous: the scale passes through
        >>> RULES.pop("mylib.scaled_relu") is scaled_relu
        True
    """
    names = state(*operations, **stated)

    def register(function: AnyRule) -> AnyRule:
        for name in names:
            space, _, own = name.partition(".")
            if not is_own(function) and not hasattr(getattr(torch.ops, space), own):
                warnings.warn(
                    f"ps.rule names {name!r}, which is not an operation of torch so far; the"
                    " rule has no effect until an operation of this name is registered.",
                    stacklevel=2,
                )
            RULES[name] = function
        return function

    return register


def state(*operations: str, **stated: Any) -> list[str]:
    """State properties of operations, which may have no rule; their names in the table."""
    known = [field.name for field in fields(Facts)]
    if wrong := sorted(stated.keys() - set(known)):
        raise InputTypeError(
            f"ps.rule states {wrong[0]}={stated[wrong[0]]!r}, expected one of {', '.join(known)}."
        )
    for name in operations:
        if not isinstance(name, str):
            raise InputTypeError(
                f"ps.rule found a {type(name).__name__}, expected names of operations such as"
                " 'mylib::leaky'."
            )
    facts = Facts(**stated)
    if facts.kind not in KINDS:
        raise ValueError(
            f"A rule states kind={facts.kind!r}, expected one of {', '.join(map(repr, KINDS))}."
        )
    names = [name.replace("::", ".") for name in operations]
    FACTS.update(dict.fromkeys(names, facts))
    return names


def is_own(function: Rule) -> bool:
    """Whether a rule belongs to this library (names of older versions of torch are not missed)."""
    home = getattr(function, "__module__", None) or ""
    return home.partition(".")[0] == __package__.partition(".")[0]


def operation_name(target: Any) -> str:
    """The name of a node's target without its overload: ``"aten.relu"``, ``"getitem"``."""
    packet = getattr(target, "overloadpacket", None)
    return str(packet) if packet is not None else getattr(target, "__name__", str(target))


def facts_of(operation: Any) -> Facts:
    """The properties of an operation, by its name, its target or a node; defaults if unknown."""
    if isinstance(operation, torch.fx.Node):
        operation = operation.target if operation.op == "call_function" else ""
    name = operation if isinstance(operation, str) else operation_name(operation)
    full = name if "." in name else f"aten.{name}"
    return FACTS.get(full) or FACTS.get(full.rstrip("_")) or FACTS[""]


FACTS[""] = Facts()
