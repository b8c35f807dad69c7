"""A model as ``torch.export`` captures it: the only module that uses it.

The graph is the *training IR* (no decomposition): recurrent layers stay one operation. Only where
code writes into memory of several names are operations decomposed that hide it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import fx, nn
from torch._guards import TracingContext, tracing
from torch.export.graph_signature import InputKind, OutputKind

from ..errors import InputError
from ..models.values import fake_mode, has_values
from ..models.walk import every_tensor
from .aliasing import untold, writes_are_seen
from .captured import Captured, canonical_names, whole_inputs
from .refusals import LOST
from .traceable import stand_in_and_inputs, traceable

# a line of code that torch generated, and the name that it assigns
GENERATED = re.compile(r'File "<eval_with_key>[^\n]*\n\s*(\w+) =')


def exported(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    watch: AbstractContextManager[Any],
) -> Captured:
    """The model as torch exports it.

    Args:
        model: the model.
        args: positional inputs.
        kwargs: inputs by keyword.
        watch: a context in which the model's code runs.

    Raises:
        InputError: the model computes with a tensor without values.
        Exception: whatever stops the export.
    """
    program, made, given = _export(model, args, kwargs, watch)
    program.graph_module.graph.eliminate_dead_code()
    parameters, canonical = canonical_names(model)
    sources: dict[str, tuple[str, str]] = {}
    constants: dict[str, torch.Tensor] = {}
    kinds = {
        InputKind.PARAMETER: "parameter",
        InputKind.BUFFER: "buffer",
        InputKind.CONSTANT_TENSOR: "constant",
    }
    for spec in program.graph_signature.input_specs:
        kind = kinds.get(spec.kind, "input")
        target = str(spec.target) if spec.target is not None else spec.arg.name
        if kind == "parameter":
            target = canonical.get(target, target)
        if kind == "constant" and spec.target in program.constants:
            value = program.constants[spec.target]
            if isinstance(value, torch.Tensor):
                constants[spec.arg.name] = value
        sources[spec.arg.name] = (kind, target)
    buffers = every_tensor(model, "_buffers") | made
    written = {
        number: canonical[str(spec.target)]
        for number, spec in enumerate(program.graph_signature.output_specs)
        if spec.kind == OutputKind.PARAMETER_MUTATION
    }
    overwritten = {
        str(spec.target)
        for spec in program.graph_signature.output_specs
        if spec.kind == OutputKind.BUFFER_MUTATION
    }
    whole = whole_inputs(program.graph_module.graph, sources, given)
    return Captured(
        program.graph_module,
        sources,
        parameters,
        canonical,
        constants,
        buffers,
        len(overwritten),
        written,
        whole,
        overwritten=frozenset(overwritten),
    )


def _export(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    watch: AbstractContextManager[Any],
) -> tuple[torch.export.ExportedProgram, dict[str, torch.Tensor], Any]:
    """Let torch trace a stand-in of the model.

    Returns:
        The program, the stand-in's buffers where tensors of the model have no numbers, and
        the inputs that it took.
    """
    mode = fake_mode()
    twin, made, given = stand_in_and_inputs(model, args, kwargs, mode)
    shapes = made is not None
    own = {name for name, _ in twin.named_parameters()}
    with traceable(twin), tracing(TracingContext(mode)) if shapes else nullcontext(), watch:
        program = torch.export.export(twin, *given, strict=False)
        if writes_are_seen(program.graph_module) or _maps(program.graph_module):
            parts = _parts(program.graph_module)
            for part in parts:
                _tell_views(part.graph)
            views = {node.target for part in parts for node in part.graph.nodes if untold(node)}
            known = torch.export.default_decompositions() if views else {}
            traces = _traces(program.graph_module)
            program = program.run_decompositions(
                {view: known[view] for view in views if view in known}
            )
            _restore_traces(program.graph_module.graph, traces)
    for name, value in program.constants.items():
        if isinstance(value, torch.Tensor) and name not in (made or {}) and not _has_numbers(value):
            if not shapes:
                raise RuntimeError(LOST)
            raise InputError(
                f"{type(model).__name__} computes with {name!r}, a tensor without values that is"
                " neither parameter nor buffer, expected numbers; register it as a buffer, or"
                " build the model within ps.without_weights()."
            )
    if any(name not in own for name, _ in twin.named_parameters()):
        raise RuntimeError("makes parameters while it runs")
    return program, made or {}, given


def _parts(module: fx.GraphModule) -> list[fx.GraphModule]:
    """A graph and its regions."""
    return [part for part in module.modules() if isinstance(part, fx.GraphModule)]


def _traces(module: fx.GraphModule) -> dict[str, str]:
    """Names of operations -> the lines of the model's code that they come from."""
    nodes = [
        node for part in _parts(module) for node in part.graph.nodes if node.meta.get("stack_trace")
    ]
    return {node.name: node.meta["stack_trace"] for node in nodes}


def _restore_traces(graph: fx.Graph, traces: Mapping[str, str]) -> None:
    """Let operations of dissolved regions name the model's code again: torch names the code that it
    generates for a region, which no reader can open.
    """
    for node in graph.nodes:
        made = GENERATED.search(node.meta.get("stack_trace") or "")
        if made is not None:
            node.meta["stack_trace"] = traces.get(made[1], "")


def _tell_views(graph: fx.Graph) -> None:
    """Replace operations that return memory of their operands as if it were
    new by those that say so.
    """
    aten = torch.ops.aten
    told = {
        aten.unsafe_chunk.default: aten.chunk.default,
        aten.unsafe_split.Tensor: aten.split.Tensor,
        aten.unsafe_split_with_sizes.default: aten.split_with_sizes.default,
    }
    for node in graph.nodes:
        node.target = told.get(node.target, node.target)
        if node.target is aten.dropout.default and not (node.args[1] and node.args[2]):
            node.replace_all_uses_with(node.args[0])


def _maps(module: fx.GraphModule) -> bool:
    """Whether a graph has operations of ``torch.vmap``, within which every
    tensor hides a dimension.
    """
    names = ("_vmap_increment_nesting", "_add_batch_dim")
    return any(getattr(node.target, "__name__", "") in names for node in module.graph.nodes)


def _has_numbers(value: torch.Tensor) -> bool:
    """Whether the numbers in a constant can be read."""
    try:
        found = value.detach().to_dense().reshape(-1)[:1].tolist()
    except Exception:
        return False
    return has_values(value) and all(isinstance(number, int | float | complex) for number in found)
