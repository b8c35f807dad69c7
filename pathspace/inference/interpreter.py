"""Walk the captured graph, one operation at a time, on ids instead of numbers."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from pathspace.capture import Captured, first_line, place
from pathspace.errors import PathspaceError, UnsupportedError
from pathspace.inference import rules  # noqa: F401  (registers the rules)
from pathspace.inference.registry import RULES, operation_name
from pathspace.inference.semantics import Pin, Place, Semantics
from pathspace.inference.values import NEUTRAL, ROOT, Weight, compress, constant

S = TypeVar("S", bound=Semantics)


def flat_values(tree: Any) -> Iterator[Tensor | Weight]:
    """All activations and weights in nested arguments."""
    for leaf in pytree.tree_leaves(tree):
        if isinstance(leaf, Tensor | Weight):
            yield leaf


def positions(captured: Captured) -> tuple[dict[str, int], dict[str, tuple[int, ...]]]:
    """Where each parameter's scalars start in the numbering of all scalars, and the shapes."""
    offsets, shapes, total = {}, {}, 0
    for name, parameter in captured.parameters.items():
        offsets[name], shapes[name] = total, tuple(parameter.shape)
        total += parameter.numel()
    return offsets, shapes


def interpret(
    captured: Captured, make: Callable[..., S], strict: bool = False, norm_eps: str = "ignore"
) -> tuple[S, list[Tensor]]:
    """Run the graph under one interpretation.

    Args:
        captured: the captured model.
        make: the interpretation, called with offsets and shapes of the parameters.
        strict: raise where an operation without a rule would fix a scale.
        norm_eps: ``"ignore"`` or ``"respect"`` the ``eps`` of normalisation layers.

    Returns:
        The interpretation with everything it recorded, and the ids of the outputs (already fixed).

    Raises:
        UnsupportedError: ``strict`` and an operation without a rule met a free scale.
    """
    semantics = make(*positions(captured))
    semantics.exact_norms = norm_eps == "respect"
    values: dict[str, Any] = {}
    for node in captured.graph.graph.nodes:
        if node.op == "placeholder":
            values[node.name] = _placeholder(node, captured, semantics)
    outputs = _run(captured.graph, values, semantics, strict)
    semantics.place = Place("output")
    flat = [semantics.activation(value) for value in flat_values(outputs)]
    for ids in flat:
        semantics.fix(ids)
    return semantics, flat


def _placeholder(node: fx.Node, captured: Captured, semantics: Semantics) -> Any:
    kind, name = captured.sources.get(node.name, ("input", node.name))
    shown = node.meta.get("val")
    if kind == "parameter" and captured.parameters[name].is_complex():
        # complex weights have no signs to keep, and no positive scales alone
        semantics.pinned_parameters[name] = Pin(
            "complex parameter", "", "", "complex weights stay outside path space", 0, (name,)
        )
        semantics.pins.append(semantics.pinned_parameters[name])
        return constant(semantics.shapes[name])
    if kind == "parameter":
        return Weight.of(name, semantics.shapes[name])
    if node.name in captured.constants:
        return _scales_of_constant(captured.constants[node.name])
    if not isinstance(shown, Tensor):
        return shown
    ids = constant(shown.shape)
    if kind == "buffer":
        # running statistics are recognised by name when a normalisation meets them
        ids.buffer_name = name  # type: ignore[attr-defined]
    return ids


def _scales_of_constant(value: Tensor) -> Tensor:
    """A constant tensor has a fixed scale, except where it is zero or infinite."""
    if value.dtype == torch.bool or value.numel() == 0:
        ids = constant(value.shape)
        # a mask that is part of the model: choices by it are known
        ids.known = value.cpu()  # type: ignore[attr-defined]
        return ids
    free = (value == 0) | (
        torch.isinf(value) if value.is_floating_point() else torch.zeros_like(value, dtype=torch.bool)
    )
    return compress(torch.where(free.cpu(), NEUTRAL, ROOT))


def _run(module: fx.GraphModule, values: Mapping[str, Any], semantics: Semantics, strict: bool) -> Any:
    env = dict(values)
    dead: dict[fx.Node, list[fx.Node]] = {}
    for source in module.graph.nodes:
        users = list(source.users)
        if users and source.op != "placeholder":
            dead.setdefault(max(users), []).append(source)
    for node in module.graph.nodes:
        if node.op == "output":
            return fx.node.map_arg(node.args[0], lambda n: env[n.name])
        if node.op == "get_attr":
            env[node.name] = _attribute(module, str(node.target))
        elif node.op == "call_function":
            env[node.name] = _call(node, module, env, semantics, strict)
        for source in dead.get(node, ()):
            env.pop(source.name, None)
    return None


def _attribute(module: fx.GraphModule, target: str) -> Any:
    value: Any = module
    for part in target.split("."):
        value = getattr(value, part)
    return _scales_of_constant(value) if isinstance(value, Tensor) else value


def _call(node: fx.Node, module: fx.GraphModule, env: dict[str, Any], semantics: Semantics, strict: bool) -> Any:
    args: Any = fx.node.map_arg(node.args, lambda n: env[n.name])
    kwargs: Any = fx.node.map_arg(node.kwargs, lambda n: env[n.name])
    if node.target is operator.getitem:
        return args[0][args[1]]
    name = operation_name(node.target)
    shown = node.meta.get("val")
    semantics.place = Place(name, *place(node), result=shown)
    nested = next((arg for arg in args if isinstance(arg, fx.GraphModule)), None)
    if nested is not None:
        # a region under no_grad, autocast and the like: the same operations in a graph of their own
        operands = list(args[list(args).index(nested) + 1 :])
        names = [n.name for n in nested.graph.nodes if n.op == "placeholder"]
        return _run(nested, dict(zip(names, operands, strict=False)), semantics, strict)
    if name not in RULES:
        return _without_rule(args, kwargs, shown, semantics, strict, "no rule says how this operation treats scales")
    try:
        result = RULES[name](semantics, *args, **kwargs)
    except (RuntimeError, TypeError, ValueError, IndexError, AttributeError) as error:
        if isinstance(error, PathspaceError):
            raise
        # a form of the operation that its rule does not know: sound, and on record
        reason = f"its rule does not cover this form ({first_line(error)})"
        return _without_rule(args, kwargs, shown, semantics, strict, reason)
    return _shaped(result, shown, semantics)


def _shaped(result: Any, shown: Any, semantics: Semantics) -> Any:
    """Check the shape a rule returned against the real one, so that a wrong rule cannot go unnoticed."""
    if isinstance(result, Tensor) and isinstance(shown, Tensor) and result.shape != shown.shape:
        raise UnsupportedError(
            f"The rule for {semantics.place.op} returned ids of shape {tuple(result.shape)} where the operation "
            "returns "
            f"{tuple(shown.shape)} (in module {semantics.place.module!r}); correct the rule."
        )
    return result


def _without_rule(args: Any, kwargs: Any, shown: Any, semantics: Semantics, strict: bool, reason: str) -> Any:
    """Sound for anything: every operand's scale is fixed, and so is every result's."""
    before = len(semantics.pins)
    semantics.pin(flat_values((args, kwargs)), reason)
    if strict and len(semantics.pins) > before:
        pin = semantics.pins[-1]
        raise UnsupportedError(
            f"{pin.op} at {pin.source or 'an unknown line'} (module {pin.module!r}) has no rule; "
            "register one with pathspace.rule, or trace with strict=False to pin its operands."
        )
    return pytree.tree_map(lambda value: constant(value.shape) if isinstance(value, Tensor) else value, shown)
