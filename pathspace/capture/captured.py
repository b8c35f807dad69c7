"""A captured graph, and where its placeholders and operations come from."""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import PurePath
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

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
