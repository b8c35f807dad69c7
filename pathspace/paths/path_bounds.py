"""Largest slopes: which operations a bound by path norms may pass."""

from __future__ import annotations

from typing import Any

from torch import Tensor, fx

from ..inference.registry import facts_of, named_arguments
from .path_sums import Sum, sum_leaves


def without_bound(
    node: fx.Node, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], unknown: bool
) -> str:
    """Why the changes of an operation's results are not bounded by those of its operands, whatever
    they are; ``""`` if they are, or if its rule decides.

    Args:
        node: the operation.
        name: its name.
        args: its operands.
        kwargs: its keyword operands.
        unknown: whether it reads whole numbers or truth values that activations decide.
    """
    shown = node.meta.get("val")
    if isinstance(shown, Tensor) and not (shown.is_floating_point() or shown.is_complex()):
        return ""
    kind = facts_of(name).kind
    if unknown:
        return "where a comparison or a position changes, its results jump"
    if kind == "random" or (kind in ("dropout", "activation") and _draws(node, args, kwargs)):
        return "it draws random numbers; use model.eval()"
    entering = [leaf for leaf in sum_leaves((args, kwargs)) if isinstance(leaf, Sum)]
    if not entering:
        return ""
    if kind == "power" and _exponent(name, args, kwargs) != 1:
        return "a power has no largest slope"
    if kind == "norm" and _order(args, kwargs) < 1:
        return "a norm of an order below 1 has no largest slope"
    if "softplus" in name and _jumps(args, kwargs):
        return "it jumps at its threshold, which is below the default of 20"
    return ""


def largest_slope(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
    """The largest slope of an elementwise function that is homogeneous of degree 1: 1, or more for
    a rectifier with a steep negative side.
    """
    if "rrelu" in name:
        ends = [a for a in args[1:] if isinstance(a, float)] or [1 / 8, 1 / 3]
        slopes = [kwargs.get("lower", ends[0]), kwargs.get("upper", ends[-1])]
        return max(1.0, abs(float(sum(slopes))) / 2)
    if "leaky_relu" in name:
        slope = args[1] if len(args) > 1 else kwargs.get("negative_slope", 0.01)
        return max(1.0, abs(float(slope)))
    return 1.0


def _draws(node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether elements are left out, or slopes drawn, in training mode."""
    given = named_arguments(node.target, args, kwargs)
    training = given.get("train", given.get("training", False))
    return bool(training) and given.get("p", 1) != 0


def _exponent(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    degree = facts_of(name).degree
    return args[1] if len(args) > 1 else kwargs.get("exponent", degree[0] if degree else None)


def _jumps(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether softplus goes over to the identity where the two still differ."""
    threshold = args[2] if len(args) > 2 else kwargs.get("threshold", 20.0)
    return float(threshold) < 20


def _order(args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
    """The smallest number among the arguments that may be the order of a norm."""
    named = [kwargs[key] for key in ("p", "ord") if key in kwargs]
    numbers = [
        value for value in (*args, *named)
        if isinstance(value, int | float) and not isinstance(value, bool)
    ]  # fmt: skip
    return min((float(value) for value in numbers), default=2.0)
