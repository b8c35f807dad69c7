"""A captured graph, where its placeholders and operations come from, and what shares memory."""

from __future__ import annotations

import inspect
import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn, strided
from torch.utils import _pytree as pytree

from ..errors import InputError
from ..models.values import has_values
from ..models.walk import every_tensor


@dataclass(frozen=True)
class Captured:
    """A model as a graph.

    Attributes:
        graph: the captured ``torch.fx`` graph module.
        sources: placeholder name -> (kind, name), kind one of ``"parameter"``, ``"buffer"``,
            ``"constant"``, ``"input"``.
        parameters: canonical name -> parameter; a parameter held under several names appears
            once, under its first name.
        canonical: every parameter name -> canonical name.
        constants: placeholder name -> tensor, for tensors the graph holds itself.
        buffers: name -> buffer, the model's own, or computed again where that has no numbers.
        updates: how many of the graph's outputs, the first ones, are new values of buffers.
        written: number of an output -> parameter whose new value it is.
        whole: placeholder name -> example input, for whole numbers and truth values.
        numbers: memory (first byte, byte after the last) of tensors of which the model's code read
            numbers.
        overwritten: names of the buffers to which one call gives other values for the next.
    """

    graph: fx.GraphModule
    sources: Mapping[str, tuple[str, str]]
    parameters: Mapping[str, nn.Parameter]
    canonical: Mapping[str, str]
    constants: Mapping[str, torch.Tensor]
    buffers: Mapping[str, torch.Tensor]
    updates: int = 0
    written: Mapping[int, str] = field(default_factory=dict)
    whole: Mapping[str, torch.Tensor] = field(default_factory=dict)
    numbers: frozenset[tuple[int, int]] = frozenset()
    overwritten: frozenset[str] = frozenset()

    def without_updates(self, outputs: Sequence[Any]) -> list[Any]:
        """The model's own outputs among those of the graph."""
        return [
            value for i, value in enumerate(outputs) if i >= self.updates and i not in self.written
        ]

    def examples(self) -> dict[str, Any]:
        """The inputs on which the model was captured, without values, by name."""
        values = {node.name: node.meta.get("val") for node in self.graph.graph.nodes}
        return {
            name: values[place] for place, (kind, name) in self.sources.items() if kind == "input"
        }

    def read_parameters(self) -> dict[str, list[fx.Node]]:
        """The parameters that operations read, and these operations."""
        places = [node for node in self.graph.graph.nodes if node.op == "placeholder"]
        return {
            self.sources[node.name][1]: list(node.users)
            for node in places
            if node.users and self.sources.get(node.name, ("",))[0] == "parameter"
        }

    def outputs(self) -> list[fx.Node]:
        """The nodes that compute the model's own outputs."""
        node = next(node for node in self.graph.graph.nodes if node.op == "output")
        flat = self.without_updates(pytree.tree_leaves(node.args[0]))
        return [leaf for leaf in flat if isinstance(leaf, fx.Node)]


def canonical_names(model: nn.Module) -> tuple[dict[str, nn.Parameter], dict[str, str]]:
    """Every parameter by the first of its names, and every name's first one."""
    named: dict[str, Any] = every_tensor(model, "_parameters")
    first: dict[int, str] = {}
    canonical = {name: first.setdefault(id(parameter), name) for name, parameter in named.items()}
    return {name: named[name] for name in first.values()}, canonical


# where torch and this room are installed: lines of their code tell users nothing of their models
TORCH = f"{PurePath(inspect.getfile(torch)).parent}{os.sep}"
OWN = f"{PurePath(__file__).parent}{os.sep}"


def source_line() -> str:
    """The line of the model's code that is running, in the form of a stack trace."""
    frame = inspect.currentframe()
    while frame is not None and inspect.getfile(frame).startswith((TORCH, OWN)):
        frame = frame.f_back
    return "" if frame is None else f'File "{inspect.getfile(frame)}", line {frame.f_lineno}'


@cache
def _parameters(target: Any) -> tuple[list[str], dict[str, Any]]:
    """Names of an operation's parameters, and defaults (torch reads a schema slowly)."""
    schema = getattr(target, "_schema", None)
    own = [] if schema is None else schema.arguments
    defaults = {each.name: each.default_value for each in own if each.has_default_value()}
    return [each.name for each in own], defaults


def named_arguments(target: Any, args: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of an operation by name, with defaults; keywords alone without a schema."""
    names, defaults = _parameters(target)
    return defaults | dict(zip(names, args, strict=False)) | kwargs


def place(node: fx.Node) -> tuple[str, str]:
    """Module path and source line of a node, for reports."""
    stack = node.meta.get("nn_module_stack") or {}
    module = next((entry[0] for entry in reversed(list(stack.values())) if entry[0]), "")
    source = ""
    for line in (node.meta.get("stack_trace") or "").splitlines():
        parts = line.strip().split('"')
        if parts[0] == "File " and not parts[1].startswith(TORCH):
            source = f"{parts[1]}:{parts[2].split('line ')[-1].split(',')[0]}"
    return module, source


# -- tensors that lie in the same memory, under other names


def memory_of(tensor: Tensor) -> tuple[int, int, bool]:
    """The first byte of a tensor's elements, the byte after the last, and whether the tensor fills
    all memory between them; nothing (``0, 0, True``) for tensors without such memory.
    """
    if not storage_of(tensor) or not tensor.numel():
        return 0, 0, True
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.data_ptr()
    return start, start + (last + 1) * tensor.element_size(), last + 1 == tensor.numel()


def storage_of(tensor: Tensor) -> int:
    """Where the memory of a tensor and of its views begins; 0 for tensors without such memory."""
    plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout == strided
    return tensor.untyped_storage().data_ptr() if plain and has_values(tensor) else 0


def check_memory(model: nn.Module) -> None:
    """Refuse different parameters that share memory, because rescaling one changes the other."""
    held, named = [], every_tensor(model, "_parameters", repeated=False)
    for parameter, name in {id(p): (p, name) for name, p in reversed(named.items())}.values():
        start, end, filled = memory_of(parameter)
        if start:
            # first and last byte are enough if the parameter fills all memory between them
            held.append((start, end if filled else start, name))
    held.sort()
    for (_, end, name), (start, _, other) in itertools.pairwise(held):
        if start < end:
            raise InputError(
                f"{type(model).__name__} has parameters {name!r} and {other!r} in the same memory;"
                " make them one parameter, by assigning the parameter itself instead of its data."
            )


def read_elsewhere(captured: Captured) -> frozenset[str]:
    """Names of parameters and buffers whose numbers a model reads in another way, too: as a
    constant or buffer in the same memory, or as a number that its code asks for.

    Tensors count as sharing memory where one begins before the other ends.
    """
    named = [*captured.parameters.items(), *captured.buffers.items()]
    starts, ends = np.array([memory_of(tensor)[:2] for _, tensor in named]).reshape(-1, 2).T

    def meeting(start: int, end: int) -> list[tuple[str, Tensor]]:
        return [named[number] for number in np.flatnonzero((starts < end) & (start < ends))]

    found: set[str] = set()
    for own in {id(tensor): tensor for tensor in _read(captured)}.values():
        met = meeting(*memory_of(own)[:2])
        if any(tensor is not own for _, tensor in met):
            found.update(name for name, _ in met)
    for memory in captured.numbers:
        found.update(name for name, _ in meeting(*memory))
    return frozenset(found)


def _read(captured: Captured) -> Iterator[Tensor]:
    """Constants and buffers that the graph reads."""
    for node in captured.graph.graph.nodes:
        if node.op == "placeholder" and node.users:
            kind, name = captured.sources.get(node.name, ("", ""))
            if kind == "buffer" and name in captured.buffers:
                yield captured.buffers[name]
            elif node.name in captured.constants:
                yield captured.constants[node.name]
