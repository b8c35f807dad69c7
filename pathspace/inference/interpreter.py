"""Interpret the captured graph, one operation at a time, on ids instead of numbers."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Generic, TypeVar

from torch import Tensor, dtype, fx, strided
from torch.utils import _pytree as pytree

from ..capture.aliasing import read_elsewhere
from ..capture.captured import Captured, place
from ..errors import InputError, InputTypeError, PathspaceError, UnsupportedError, first_line
from ..graph.parts import Pin
from ..models.values import has_values
from .lowering import decomposed, fold_constant, held_by
from .registry import RULES, Rule, is_own, operation_name
from .rules.normalization import WITH_STATISTICS
from .semantics import Place, Semantics, as_stored, is_free
from .values import (
    NEUTRAL,
    Weight,
    constant,
    constants_like,
    flat_values,
    shape_of,
    unknown,
    value_of,
    with_value,
)

S = TypeVar("S", bound=Semantics)

LARGEST_TABLE = 1 << 24
WITHOUT_RULE = "no rule says how this operation treats scales"


def scalar_offsets(captured: Captured) -> tuple[dict[str, int], dict[str, tuple[int, ...]]]:
    """The number of each parameter's first scalar among all scalars, and the shapes."""
    shapes = {name: tuple(own.shape) for name, own in captured.parameters.items()}
    starts = accumulate((own.numel() for own in captured.parameters.values()), initial=0)
    return dict(zip(shapes, starts, strict=False)), shapes


def interpret(
    captured: Captured,
    make: Callable[..., S],
    strict: bool = False,
    norm_eps: str = "ignore",
    affine: bool = True,
) -> tuple[S, list[Tensor]]:
    """Run the graph under one interpretation; returns it with its records, and the fixed outputs.

    Raises:
        UnsupportedError: ``strict`` is true, and an operand of an operation without
            a rule has a free scale.
    """
    semantics = make(*scalar_offsets(captured))
    semantics.exact_norms, semantics.sources = norm_eps == "respect", captured.sources
    semantics.graph, semantics.affine = captured.graph.graph, affine
    values: dict[str, Any] = {}
    elsewhere = read_elsewhere(captured)
    for name in elsewhere & captured.buffers.keys():
        semantics.read(name)
    for node in captured.graph.graph.nodes:
        if node.op == "placeholder":
            values[node.name] = _placeholder(node, captured, semantics, elsewhere)
    outputs = GraphInterpreter(semantics, strict).run(captured.graph, values)
    semantics.place = Place("output")
    flat: list[Tensor] = []
    for number, value in enumerate(flat_values(outputs)):
        if number >= captured.updates:
            _note_read(semantics, value)
        if isinstance(value, Weight) and number in captured.written:
            view = (value.name, value.moves, value.kept, value.shift)
            if view == (captured.written[number], (), None, 0.0):
                # (a multiple of the parameter is rescaled with it)
                continue
        flat.append(semantics.activation(value))
    for ids in flat:
        semantics.place = Place("output", result=ids)
        semantics.fix(ids)
    return semantics, flat


def _placeholder(
    node: fx.Node, captured: Captured, semantics: Semantics, elsewhere: Collection[str]
) -> Any:
    kind, name = captured.sources.get(node.name, ("input", node.name))
    shown = node.meta.get("val")
    if kind == "parameter":
        word, reason = _outside(captured.parameters[name].dtype, name in elsewhere)
        if not word:
            return Weight.of(name, semantics.shapes[name])
        semantics.pinned_parameters[name] = Pin(f"{word} parameter", "", "", reason, 0, (name,))
        semantics.pins.append(semantics.pinned_parameters[name])
        return constant(semantics.shapes[name])
    if node.name in captured.constants:
        return with_value(captured.constants[node.name])
    if not isinstance(shown, Tensor):
        return shown
    own, changes = captured.buffers.get(name), name in captured.overwritten
    if kind == "buffer" and not changes and own is not None and _is_table(own):
        if has_values(own):
            return with_value(own)
        if node.users:
            raise InputError(
                f"The buffer {name!r} has no values (on the meta device or of a fake mode),"
                " expected numbers, because they decide which weights are used; fill it, or build"
                " the model within ps.without_weights()."
            )
        return constant(shape_of(shown))
    ids = semantics.given(kind, name, shape_of(shown))
    if kind == "buffer":
        # normalisations recognise running statistics by name (by the first name of a shared buffer)
        name = next((first for first, buffer in captured.buffers.items() if buffer is own), name)
        ids.buffer_name = name  # type: ignore[attr-defined]
    return ids


def _outside(kind: dtype, elsewhere: bool) -> tuple[str, str]:
    """What keeps a parameter outside of path space, in a word and in a sentence."""
    if kind.is_complex:
        # (they could be rescaled, but path values are real here)
        return "complex", (
            "complex weights stay outside path space; keep torch.view_as_real(weight) as the"
            " parameter, and make it complex in forward"
        )
    if not kind.is_floating_point or kind.itemsize == 1:
        # (two or three digits are too few for a factor)
        word = "8-bit" if kind.is_floating_point else "integer"
        return word, f"{word} weights stay outside path space"
    if elsewhere:
        return "shared", (
            "its numbers are also read as a constant or a buffer in the same memory; use the"
            " parameter itself there"
        )
    return "", ""


def _note_read(semantics: Semantics, value: Any) -> None:
    name = getattr(value, "buffer_name", None)
    if name is not None:
        semantics.read(name)


def _is_table(buffer: Tensor) -> bool:
    """Whether a buffer is a table of positions or a mask, which training does not change."""
    if not buffer.dim() or buffer.layout != strided or buffer.numel() > LARGEST_TABLE:
        return False
    if not buffer.is_floating_point():
        return not buffer.is_complex()
    if not has_values(buffer):
        return False
    zeros, ones = buffer == 0, buffer == 1
    # a buffer of zeros may be a memory or a mean that is filled later
    return (
        buffer.dim() > 1 and bool(zeros.any()) and bool(ones.any()) and bool((zeros | ones).all())
    )


@dataclass(frozen=True)
class GraphInterpreter(Generic[S]):
    """Interprets a graph; of smaller steps, ``outer`` is the place of their operation."""

    semantics: S
    strict: bool = False
    outer: tuple[str, str] = ("", "")

    def run(self, module: fx.GraphModule, values: Mapping[str, Any]) -> Any:
        """The outputs of a graph whose placeholders have the given values, by name."""
        env = dict(values)
        self.semantics.runs += 1
        number = self.semantics.runs
        dead: dict[fx.Node, list[fx.Node]] = {}
        for source in module.graph.nodes:
            users = list(source.users)
            if users and source.op != "placeholder":
                dead.setdefault(max(users), []).append(source)
        for node in module.graph.nodes:
            if node.op == "output":
                return fx.node.map_arg(node.args[0], lambda n: env[n.name])
            if node.op == "get_attr":
                env[node.name] = held_by(module, str(node.target))
            elif node.op == "call_function":
                env[node.name] = self.call(node, env, number)
            for source in dead.get(node, ()):
                env.pop(source.name, None)
        return None

    def call(self, node: fx.Node, env: Mapping[str, Any], run: int) -> Any:
        """Interpret one operation."""
        args: Any = fx.node.map_arg(node.args, lambda n: env[n.name])
        kwargs: Any = fx.node.map_arg(node.kwargs, lambda n: env[n.name])
        if node.target is operator.getitem:
            return args[0][args[1]]
        name, shown = operation_name(node.target), node.meta.get("val")
        here = place(node)
        module, line = here if any(here) else self.outer
        self.semantics.place = Place(name, module, line, shown, node, run)
        for operand in node.all_input_nodes:
            if name not in WITH_STATISTICS or operand not in node.args[3:5]:
                _note_read(self.semantics, env[operand.name])
        constant_result = fold_constant(node, args, kwargs)
        if constant_result is not None:
            return constant_result
        results = pytree.tree_leaves(shown)
        if results and all(isinstance(each, Tensor) and 0 in shape_of(each) for each in results):
            return constants_like(shown, NEUTRAL)
        reason = WITHOUT_RULE
        if name in RULES:
            args, kwargs = as_stored(self.semantics, args, kwargs)
            try:
                return self._by_rule(RULES[name], args, kwargs)
            except PathspaceError:
                raise
            except (ValueError, TypeError, IndexError, RuntimeError) as error:
                # the rule does not support these arguments: the operation is pinned,
                # which is sound and recorded
                reason = self._uncovered(error)
        if any(
            isinstance(value, Weight) or is_free(value) for value in flat_values((args, kwargs))
        ):
            smaller = decomposed(node)
            if smaller is not None:
                here = (self.semantics.place.module, self.semantics.place.source)
                names = {operand.name: env[operand.name] for operand in node.all_input_nodes}
                return GraphInterpreter(self.semantics, self.strict, here).run(smaller, names)
        return self.pinned(args, kwargs, shown, reason)

    def _by_rule(self, function: Rule, args: Any, kwargs: Any) -> Any:
        """What a rule makes of an operation; a rule of the user may have mistakes."""
        shown = self.semantics.place.result
        if is_own(function):
            return _checked(self.semantics.apply(function, args, kwargs), shown)
        named = getattr(function, "__name__", type(function).__name__)
        where = f"The rule of {self.semantics.place.op} ({named})"
        known = self.semantics.known_ids(flat_values((args, kwargs)))
        try:
            result = self.semantics.apply(function, args, kwargs)
        except ValueError as error:
            warnings.warn(
                f"{where} does not cover a form, so its operands are fixed: {error}", stacklevel=2
            )
            raise
        except Exception as error:
            raise InputTypeError(
                f"{where} fails with {type(error).__name__}: {error}; correct it, or raise"
                " a ValueError for a form that it does not cover."
            ) from error
        leaves = pytree.tree_leaves(result)
        wanted = sum(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(shown))
        if len(leaves) != wanted or not all(
            isinstance(leaf, Weight) or (isinstance(leaf, Tensor) and known(leaf))
            for leaf in leaves
        ):
            raise InputTypeError(
                f"{where} returns {', '.join(type(leaf).__name__ for leaf in leaves) or result},"
                f" expected ids of {wanted} result{'s' * (wanted != 1)}: operands, movements of"
                " them, or what methods of the rule's first argument return."
            )
        return _checked(result, shown)

    def _uncovered(self, error: Exception) -> str:
        if self.semantics.enlarged and isinstance(error, IndexError):
            raise error
        told = first_line(error)
        # (a ValueError is in the words of the rule; torch's own errors speak of ids)
        return "its rule does not cover this form" + (
            f" ({told})" if isinstance(error, ValueError) else ""
        )

    def pinned(self, args: Any, kwargs: Any, shown: Any, reason: str) -> Any:
        """Fix the scales of all operands and results, which is sound for any operation."""
        before = len(self.semantics.pins)
        self.semantics.pin(flat_values((args, kwargs)), reason)
        if self.strict and len(self.semantics.pins) > before:
            pin = self.semantics.pins[-1]
            found = "has no rule" if reason == WITHOUT_RULE else f"is pinned, because {reason}"
            raise UnsupportedError(
                f"{pin.op} at {pin.source or 'an unknown line'} (module {pin.module!r}) {found};"
                " register one with pathspace.rule, or trace with strict=False to pin its operands."
            )
        return constants_like(shown)


def _checked(result: Any, shown: Any) -> Any:
    both = isinstance(result, Tensor) and isinstance(shown, Tensor)
    if both and tuple(result.shape) != shape_of(shown):
        raise ValueError(
            f"the rule returned shape {tuple(result.shape)}, expected {shape_of(shown)}"
        )
    # (a rule may return its operand)
    parts = result if isinstance(result, list | tuple) else [result]
    if any(isinstance(part, Tensor) and value_of(part) is not None for part in parts):
        return pytree.tree_map_only(Tensor, unknown, result)
    return result
