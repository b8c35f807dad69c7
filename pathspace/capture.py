"""From an eager model to a captured graph: the only module that knows the ways of ``torch.export``.

The analysis reads the *training IR* (no decomposition): recurrent layers stay one operation, every parameter name is
one placeholder, and every node remembers the module and the source line it came from. The user's model is left as it
was.
"""

from __future__ import annotations

import io
import itertools
import logging
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass, is_dataclass
from typing import Any
from unittest import mock

import torch
from torch import fx, nn
from torch.export.graph_signature import InputKind, OutputKind
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.nn.modules import transformer
from torch.utils._pytree import tree_leaves

from pathspace.copies import duplicate
from pathspace.errors import CaptureError, InputError, InputTypeError
from pathspace.in_place import writes_are_seen


@dataclass(frozen=True)
class Captured:
    """A model as a graph.

    Attributes:
        graph: the captured ``torch.fx`` graph module.
        sources: placeholder name -> (kind, name), kind one of ``"parameter"``, ``"buffer"``, ``"constant"``,
            ``"input"``.
        parameters: canonical name -> parameter; a parameter held under several names appears once, under its first
            name.
        canonical: every parameter name -> canonical name.
        constants: placeholder name -> tensor, for tensors the graph holds itself.
        buffers: name -> buffer, the model's own.
        updates: how many of the graph's outputs, the first ones, are new values of buffers.
    """

    graph: fx.GraphModule
    sources: Mapping[str, tuple[str, str]]
    parameters: Mapping[str, nn.Parameter]
    canonical: Mapping[str, str]
    constants: Mapping[str, torch.Tensor]
    buffers: Mapping[str, torch.Tensor]
    updates: int = 0


@contextmanager
def quiet() -> Iterator[None]:
    """Silence torch's own tracing (warnings, logs, graphs printed on errors), and keep the global random state."""
    level = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), torch.random.fork_rng(devices=[]), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)


def first_line(error: BaseException) -> str:
    """The first line of an error's message, without a trailing full stop."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__).rstrip(".")


def user_frame(error: BaseException) -> str:
    """``at file:line`` of the innermost frame outside torch, or ``in torch``."""
    place = "in torch"
    for frame in traceback.extract_tb(error.__traceback__):
        if "/torch/" not in frame.filename and "/pathspace/" not in frame.filename and "<" not in frame.filename:
            place = f"at {frame.filename}:{frame.lineno}"
    return place


def describe(values: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """A short account of example inputs: shapes and dtypes."""

    def one(value: Any) -> str:
        if isinstance(value, torch.Tensor):
            return f"{'x'.join(map(str, value.shape)) or 'scalar'}:{str(value.dtype).removeprefix('torch.')}"
        return type(value).__name__

    parts = [one(value) for value in values] + [f"{key}={one(value)}" for key, value in kwargs.items()]
    return ", ".join(parts) or "no inputs"


def check_runs(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Run a copy of the model once, and turn whatever it raises into one sentence.

    Returns:
        What the model returns.

    Raises:
        CaptureError: the model itself fails on these inputs.
    """
    try:
        with quiet(), torch.no_grad():
            return duplicate(model)(*args, **kwargs)
    except Exception as error:
        raise CaptureError(
            f"{type(model).__name__}.forward raised {type(error).__name__} {user_frame(error)} on inputs "
            f"({describe(args, kwargs)}): {first_line(error)}; check the shapes and dtypes of the example inputs."
        ) from error


def check_capturable(model: nn.Module) -> None:
    """Refuse modules that hold no ordinary parameters or no Python forward to trace.

    Raises:
        InputError: lazily shaped or meta parameters, a data-parallel wrapper, or a scripted module.
    """
    name = type(model).__name__
    if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
        raise InputError(f"{name} wraps a model for several devices; pass the model inside, model.module.")
    if isinstance(model, torch.jit.ScriptModule):
        raise InputError(
            f"{name} is a scripted module, whose Python code is gone; pass the module it was scripted from."
        )
    for key, parameter in model.named_parameters():
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise InputError(
                f"{name} has a parameter {key!r} without a shape yet; run the model once on a batch, then trace it."
            )
        if parameter.is_meta:
            raise InputError(
                f"{name} has a parameter {key!r} without values (meta device); load or initialise the weights first."
            )


def check_memory(model: nn.Module) -> None:
    """Refuse parameters that share memory without being one parameter: a scale of one would change the other.

    Raises:
        InputError: two parameters share memory.
    """
    held = []
    for name, parameter in model.named_parameters():
        if type(parameter) is nn.Parameter and parameter.layout == torch.strided and parameter.numel():
            last = sum((n - 1) * step for n, step in zip(parameter.shape, parameter.stride(), strict=True))
            start, size = parameter.data_ptr(), parameter.element_size()
            # the first and the last byte say enough where all between them is the parameter's own
            dense = last + 1 == parameter.numel()
            held.append((start, start + (last + 1) * size if dense else start, name))
    held.sort()
    for (_, end, name), (start, _, other) in itertools.pairwise(held):
        if start < end:
            raise InputError(
                f"{type(model).__name__} has parameters {name!r} and {other!r} in the same memory; make them one "
                "parameter, by assigning the parameter itself instead of its data."
            )


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error and those that it was raised from."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def capture(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None) -> Captured:
    """Capture ``model`` on example inputs, in the mode it is in, leaving it untouched.

    Args:
        model: any module that ``torch.export`` can trace.
        args: positional example inputs.
        kwargs: keyword example inputs.

    Returns:
        The captured graph with the provenance of its placeholders.

    Raises:
        InputTypeError: ``model`` is not a module.
        InputError: two parameters share memory.
        CaptureError: the model raises on these inputs, or has control flow that depends on data.
    """
    if not isinstance(model, nn.Module):
        raise InputTypeError(
            f"Expected a torch.nn.Module to trace, found {type(model).__name__}; pass the model itself."
        )
    check_capturable(model)
    check_memory(model)
    kwargs = dict(kwargs or {})
    try:
        with quiet(), mock.patch.object(transformer, "_detect_is_causal_mask", _told_to_be_causal):
            program = torch.export.export(model, args, kwargs, strict=False)
            if writes_are_seen(program.graph_module):
                program = program.run_decompositions({})
    except Exception as error:
        if _register_dataclasses(check_runs(model, args, kwargs)):
            return capture(model, args, kwargs)
        # export's own errors come in many types; this word is in those about control flow
        data = any(isinstance(e, GuardOnDataDependentSymNode) or "data-dependent" in str(e) for e in _chain(error))
        advice = (
            "control flow that depends on the values of tensors has to be rewritten, for instance with torch.where"
            if data
            else "write this step so that torch.export can follow it, or pass the part of the model around it"
        )
        raise CaptureError(
            f"{type(model).__name__} runs but cannot be captured as a graph: {first_line(error)} "
            f"({user_frame(error)}); {advice}."
        ) from error

    program.graph_module.graph.eliminate_dead_code()
    if _mixes_types(program.graph_module):
        # tracing does not check this, running does
        check_runs(model, args, kwargs)
    named = dict(model.named_parameters(remove_duplicate=False))
    first: dict[int, str] = {}
    canonical = {name: first.setdefault(id(parameter), name) for name, parameter in named.items()}
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
    parameters = {name: named[name] for name in dict.fromkeys(canonical.values())}
    buffers = dict(model.named_buffers(remove_duplicate=False))
    updates = sum(spec.kind == OutputKind.BUFFER_MUTATION for spec in program.graph_signature.output_specs)
    return Captured(program.graph_module, sources, parameters, canonical, constants, buffers, updates)


def _told_to_be_causal(mask: Any, is_causal: bool | None = None, size: int | None = None) -> bool:
    """Whether a mask was said to be causal; torch would compare its values, and uses the mask itself otherwise."""
    return bool(is_causal)


def _register_dataclasses(output: Any) -> bool:
    """Let export see into the dataclasses of an output; whether there were any that it did not know."""
    found = {type(leaf) for leaf in tree_leaves(output) if is_dataclass(leaf)}
    for kind in found:
        torch.export.register_dataclass(kind)
    return bool(found)


def _mixes_types(module: fx.GraphModule) -> bool:
    """Whether a linear map meets operands of different types."""
    names = {"linear", "addmm", "mm", "bmm", "matmul", "conv1d", "conv2d", "conv3d"}
    for node in module.graph.nodes:
        if (
            node.op == "call_function"
            and getattr(getattr(node.target, "overloadpacket", None), "__name__", "") in names
        ):
            values = [operand.meta.get("val") for operand in node.all_input_nodes]
            if len({value.dtype for value in values if isinstance(value, torch.Tensor)}) > 1:
                return True
    return False


def place(node: fx.Node) -> tuple[str, str]:
    """Module path and source line of a node, for reports."""
    stack = node.meta.get("nn_module_stack") or {}
    module = next((entry[0] for entry in reversed(list(stack.values())) if entry[0]), "")
    source = ""
    for line in (node.meta.get("stack_trace") or "").splitlines():
        line = line.strip()
        if line.startswith("File ") and "/torch/" not in line:
            parts = line.split('"')
            number = line.split("line ")[-1].split(",")[0]
            source = f"{parts[1]}:{number}" if len(parts) > 1 else line
    return module, source


__all__ = ["Captured", "capture", "check_runs", "describe", "first_line", "place", "quiet", "user_frame"]
