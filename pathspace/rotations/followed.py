"""Which operations treat all features of a space alike, by the properties in the registry."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, fx

from ..capture.captured import named_arguments
from ..inference.registry import Facts
from ..inference.semantics import Place
from ..inference.sides import varying
from ..inference.values import Value, Weight, value_of


class Features(Protocol):
    """What is asked of the reading."""

    place: Place

    def has_space(self, value: Any) -> bool:
        """Whether an activation has features."""

    def carries(self, value: Any) -> bool:
        """Whether a value is a weight, or has features."""

    def is_product(self, ids: Tensor) -> bool:
        """Whether some elements are products of two features."""

    def scaled(self, value: Tensor, by: Tensor) -> Tensor:
        """Features times constants."""


# kind of operations -> the linearity that they must have to be followed
FOLLOWED: Mapping[str, str] = {
    "copy": "", "movement": "jointly", "repetition": "jointly", "part": "", "split": "jointly",
    "concatenation": "jointly", "write": "jointly", "padding": "jointly", "pick": "jointly",
    "choice": "jointly", "sum": "jointly", "combination": "jointly", "total": "jointly",
    "mean": "jointly", "product": "each", "contraction": "each", "convolution": "each",
    "quotient": "", "power": "", "norm": "", "normalisation": "", "softmax": "", "attention": "",
    "dropout": "",
}  # fmt: skip
# of these an operand may be a product of two features
OF_PRODUCTS = ("total", "mean", "copy", "movement")
# these take some positions along a dimension, or leave some out
TAKING = frozenset(["part", "split", "pick", "padding", "write"])


def follows(
    reading: Features, facts: Facts, args: Any, kwargs: Any, leaves: Sequence[Value]
) -> bool:
    """Whether the rule of an operation says, in the primitives, how features are mixed."""
    kind = facts.kind
    if kind not in FOLLOWED or FOLLOWED[kind] not in ("", facts.linear):
        return False
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    if any(map(reading.is_product, tensors)) and kind not in OF_PRODUCTS:
        return False
    target = getattr(reading.place.node, "target", None)
    named = named_arguments(target, args, kwargs)
    if kind in ("product", "quotient", "choice"):
        # a weight times numbers is another weight
        others = [leaf for leaf in tensors if leaf.numel() > 1 and not reading.has_space(leaf)]
        if len(tensors) < len(leaves) and others:
            return False
    checks: dict[str, Callable[[], bool]] = {
        "quotient": lambda: not reading.carries(args[1]),
        "power": lambda: named.get("exponent", *facts.degree[:1]) == 2,
        "norm": lambda: _is_length(named) and len(leaves) == 1,
        "write": lambda: "dim" in named and "index" not in named,
        "part": lambda: "dim" in named,
        # (a number that is too small for scales still moves features)
        "sum": lambda: not (tensors and _is_number(named.get("other"))),
        "combination": lambda: not (tensors and _is_number(named.get("other"))),
        "contraction": lambda: _without_diagonals(named.get("equation", "")),
        "dropout": lambda: named.get("train") is False or named.get("p") == 0,
        "choice": lambda: _chosen(reading, args, named),
        "pick": lambda: ("dim" in named or "indices" in named) and _at_one_dimension(leaves),
    }
    return kind not in checks or checks[kind]()


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and value != 0


def _without_diagonals(equation: str) -> bool:
    terms = equation.partition("->")[0].replace(" ", "").replace("...", "").split(",")
    return all(len(set(term)) == len(term) for term in terms)


def _is_length(named: Mapping[str, Any]) -> bool:
    return named.get("ord", named.get("p", 2)) in (2, None)


def _chosen(reading: Features, args: Any, named: Mapping[str, Any]) -> bool:
    """A choice multiplies each operand by a mask, if the other one is zero or features, too."""
    mask = named.get("condition", named.get("mask"))
    if not isinstance(mask, Tensor) or reading.carries(mask):
        return False
    for value in args:
        if value is mask:
            continue
        if isinstance(value, Tensor) and reading.has_space(value):
            reading.scaled(value, mask)
        elif isinstance(value, Weight) or not _is_zero(value):
            return False
    return True


def _is_zero(value: Any) -> bool:
    known = value_of(value) if isinstance(value, Tensor) else value
    return known is not None and not bool(torch.as_tensor(known).any())


def _at_one_dimension(leaves: Sequence[Value]) -> bool:
    """Whether whole slices are taken: by one index of one dimension, or from a weight."""
    source, *indices = leaves
    if not isinstance(source, Tensor) or not varying(source):
        return True
    return len(indices) == 1 and len(indices[0].shape) < 2


def taken_along(
    node: fx.Node | None, facts: Facts, leaves: Sequence[Value]
) -> Iterator[tuple[Tensor, int]]:
    """Activations of which an operation takes, or shifts, positions along a dimension: where
    copies of features stand beside others, it can pair the copies again.
    """
    windows = {} if node is None else named_arguments(node.target, node.args, node.kwargs)
    if facts.kind not in TAKING and "dimension" not in windows:
        return
    for source in leaves:
        if isinstance(source, Tensor) and source.dim():
            own = windows.get("dim", windows.get("dimension"))
            dims = varying(source) if own is None else {own % source.dim()}
            yield from ((source, dim) for dim in dims)
