"""From an eager model to a captured graph: the only module that uses ``torch.export``.

Where one run shows everything, that run is recorded, which takes a fraction of the time; other
models are exported. Either graph is the *training IR* (no decomposition): recurrent layers stay one
operation, every parameter name is one placeholder, and every node remembers the module and the
source line it came from. The user's model is left as it was.
"""

from __future__ import annotations

import io
import logging
import re
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stderr
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn
from torch._functorch import config as functorch_config
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributions import Distribution
from torch.export.graph_signature import InputKind, OutputKind
from torch.fx._lazy_graph_module import _make_graph_module, _use_lazy_graph_module
from torch.nn.modules import transformer
from torch.utils import _pytree as pytree

from pathspace.errors import InputError, InputTypeError, PathspaceError
from pathspace.in_place import untold, writes_are_seen
from pathspace.inputs import arranged, check_inputs, describe_inputs, opened, ordinary
from pathspace.module_walk import every_module, every_tensor
from pathspace.on_meta import Elsewhere, Unshown, Unsure
from pathspace.packing import equal_lengths, of_equal_lengths
from pathspace.patched_attributes import replaced
from pathspace.random_state import random_kept
from pathspace.recording import record_graph
from pathspace.refusals import (
    LOST,
    WITHOUT_GRADIENTS,
    check_capturable,
    check_memory,
    decides_by_values,
    failed_capture,
    failed_run,
    first_line,
    sets_memory,
    user_frame,
)
from pathspace.restored_globals import untouched
from pathspace.stand_in import repeatable, stand_in
from pathspace.without_values import fake_mode, give_shapes, has_values, with_numbers

# tracing replaces functions of torch for a while
_ONE_AT_A_TIME = threading.RLock()
# a line of code that torch generated, and the name that it assigns
GENERATED = re.compile(r'File "<eval_with_key>[^\n]*\n\s*(\w+) =')


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

    def without_updates(self, outputs: Sequence[Any]) -> list[Any]:
        """The model's own outputs among those of the graph."""
        return [
            value for i, value in enumerate(outputs) if i >= self.updates and i not in self.written
        ]

    def outputs(self) -> list[fx.Node]:
        """The nodes that compute the model's own outputs."""
        node = next(node for node in self.graph.graph.nodes if node.op == "output")
        flat = self.without_updates(pytree.tree_leaves(node.args[0]))
        return [leaf for leaf in flat if isinstance(leaf, fx.Node)]


@contextmanager
def quiet() -> Iterator[None]:
    """Silence torch's own tracing (warnings, logs, graphs printed on errors), and keep
    the global random states of torch, Python and numpy.
    """
    level = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with (
            warnings.catch_warnings(),
            random_kept(),
            redirect_stderr(io.StringIO()),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)


def check_runs(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Run a copy of the model once, and turn whatever it raises into one sentence.

    Raises:
        CaptureError: the model itself fails on these inputs.
    """
    twin, mode = stand_in(model, share_tensors=False), fake_mode()
    shapes = give_shapes(twin, mode)
    twin = repeatable(twin)
    known = {name for name, _ in twin.named_parameters()}
    try:
        with quiet(), torch.no_grad(), mode if shapes else nullcontext():
            twin(*args, **kwargs)
    except (Exception, SystemExit) as error:
        if any(words in str(error) for words in WITHOUT_GRADIENTS):
            return  # it would run where gradients are taken
        if shapes and decides_by_values(error):
            return  # it would run with values
        raise failed_run(model, args, kwargs, error) from error
    made = next((name for name, _ in twin.named_parameters() if name not in known), None)
    if made is not None:
        raise InputError(
            f"{type(model).__name__} creates parameters when it runs, such as {made!r}; run the"
            " model once on a batch, then trace it."
        )


def capture(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    watch: AbstractContextManager[Any] | None = None,
) -> Captured:
    """Capture ``model`` on example inputs, in its current mode, without changing it.

    Args:
        model: any module that ``torch.export`` can trace.
        args: positional example inputs.
        kwargs: keyword example inputs.
        watch: a context in which the model's code runs, entered for every attempt.

    Returns:
        The captured graph with the provenance of its placeholders.

    Raises:
        InputTypeError: ``model`` is not a module.
        InputError: two parameters share memory.
        CaptureError: the model raises on these inputs, or has control flow that depends on data.
    """
    if not isinstance(model, nn.Module):
        raise InputTypeError(
            f"Expected a torch.nn.Module to trace, found {type(model).__name__}; pass the model"
            " itself."
        )
    args, kwargs = arranged(model, args, kwargs)
    check_capturable(model)
    check_memory(model)
    check_inputs(model, args, kwargs)
    with _ONE_AT_A_TIME, torch.inference_mode(False), with_numbers():
        args, kwargs = of_equal_lengths(ordinary((args, kwargs)))
        watch = watch or nullcontext()
        with untouched(model):
            captured = recorded(model, args, kwargs, watch)
        if captured is None:
            with untouched(model):
                captured = _exported(model, args, kwargs, watch)
        if _mixes_types(captured.graph):
            # tracing does not check this, running does
            with untouched(model):
                check_runs(model, args, kwargs)
    return captured


def recorded(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    watch: AbstractContextManager[Any],
) -> Captured | None:
    """The model as one run shows it; nothing where only an export can tell."""
    with functorch_config.patch(fake_tensor_allow_unsafe_data_ptr_access=False):
        mode = FakeTensorMode(allow_non_fake_inputs=True)
    # on the meta device first, which takes least
    for place in (None, mode):
        twin, made, given = _prepared(model, args, kwargs, mode)
        try:
            with _traceable(twin), watch:
                found = record_graph(twin, *given, place)
                module = _without_code(found.graph)
                if not writes_are_seen(module):
                    break
                return None
        except Elsewhere:
            continue
        except Unshown as error:
            raise sets_memory(model, error) from None
        except Unsure:
            return None
        except (Exception, SystemExit):
            # whatever it is, the export says what is wrong, if anything is
            continue
    else:
        return None
    if found.numbers.asserted:
        # only a run with numbers shows whether it is true
        check_runs(model, args, kwargs)
    if not all(node.users for node in module.graph.nodes if node.op == "call_function"):
        module.graph.eliminate_dead_code()
    named, canonical = _canonical(model)
    sources = {
        key: (kind, canonical[name] if kind == "parameter" else name)
        for key, (kind, name) in found.sources.items()
    }
    parameters = {name: named[name] for name in dict.fromkeys(canonical.values())}
    buffers = every_tensor(model, "_buffers") | (made or {})
    whole = _whole(module.graph, sources, given)
    return Captured(module, sources, parameters, canonical, found.constants, buffers, whole=whole)


def _prepared(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], mode: FakeTensorMode
) -> tuple[nn.Module, dict[str, torch.Tensor] | None, tuple[tuple[Any, ...], dict[str, Any]]]:
    """A stand-in, its buffers where tensors of the model have no numbers, and
    the inputs that it takes.
    """
    twin = stand_in(model)
    made = every_tensor(twin, "_buffers") if give_shapes(twin, mode) else None
    tensors = opened(twin, args, kwargs)
    return twin, made, (args, dict(kwargs)) if tensors is None else (tensors, {})


def _without_code(graph: fx.Graph) -> fx.GraphModule:
    """A graph as a module, for which code is written where it is run."""
    with _use_lazy_graph_module(True):
        return _make_graph_module(nn.Module(), graph)


def _canonical(model: nn.Module) -> tuple[dict[str, nn.Parameter], dict[str, str]]:
    """Every parameter by all of its names, and every name's first one."""
    named: dict[str, Any] = every_tensor(model, "_parameters")
    first: dict[int, str] = {}
    return named, {name: first.setdefault(id(parameter), name) for name, parameter in named.items()}


def _exported(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    watch: AbstractContextManager[Any],
) -> Captured:
    """The model as torch exports it."""
    try:
        program, made, given = _export(model, args, kwargs, watch)
    except PathspaceError:
        raise
    except (Exception, SystemExit) as error:
        check_runs(model, args, kwargs)
        raise failed_capture(model, error) from error
    program.graph_module.graph.eliminate_dead_code()
    named, canonical = _canonical(model)
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
    buffers = every_tensor(model, "_buffers") | made
    updates = sum(
        spec.kind == OutputKind.BUFFER_MUTATION for spec in program.graph_signature.output_specs
    )
    written = {
        number: canonical[str(spec.target)]
        for number, spec in enumerate(program.graph_signature.output_specs)
        if spec.kind == OutputKind.PARAMETER_MUTATION
    }
    whole = _whole(program.graph_module.graph, sources, given)
    return Captured(
        program.graph_module,
        sources,
        parameters,
        canonical,
        constants,
        buffers,
        updates,
        written,
        whole,
    )


def _whole(
    graph: fx.Graph, sources: Mapping[str, tuple[str, str]], given: Any
) -> dict[str, torch.Tensor]:
    """Example inputs that are whole numbers or truth values, by placeholder, where
    their numbers can be read.
    """
    places = [
        node
        for node in graph.nodes
        if node.op == "placeholder" and sources.get(node.name, ("",))[0] == "input"
    ]
    leaves = pytree.tree_leaves(given)
    if len(places) != len(leaves):
        return {}
    return {
        node.name: value.detach().cpu().clone()
        for node, value in zip(places, leaves, strict=True)
        if isinstance(value, torch.Tensor)
        and not (value.is_floating_point() or value.is_complex())
        and value.layout == torch.strided
        and has_values(value)
        and _is_shown(node.meta.get("val"), value)
    }


def _is_shown(shown: Any, value: torch.Tensor) -> bool:
    return (
        isinstance(shown, torch.Tensor)
        and shown.dtype == value.dtype
        and tuple(shown.shape) == tuple(value.shape)
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
    twin, made, given = _prepared(model, args, kwargs, mode)
    shapes = made is not None
    own = {name for name, _ in twin.named_parameters()}
    with _traceable(twin), tracing(TracingContext(mode)) if shapes else nullcontext(), watch:
        program = torch.export.export(twin, *given, strict=False)
        if writes_are_seen(program.graph_module) or _maps(program.graph_module):
            _tell_views(program.graph_module.graph)
            views = {node.target for node in program.graph_module.graph.nodes if untold(node)}
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


def _traces(module: fx.GraphModule) -> dict[str, str]:
    """Names of operations -> the lines of the model's code that they come from."""
    parts = [part for part in module.modules() if isinstance(part, fx.GraphModule)]
    nodes = [node for part in parts for node in part.graph.nodes if node.meta.get("stack_trace")]
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


@contextmanager
def _traceable(twin: nn.Module) -> Iterator[None]:
    """Torch's own tracing is silent, and code that would look at data does without."""
    without_looks = replaced(
        (transformer, "_detect_is_causal_mask", _told_to_be_causal),
        # (distributions check the values of their parameters)
        (Distribution, "_validate_args", False),
    )
    with quiet(), experts_at_once(twin), without_looks, equal_lengths():
        yield


@contextmanager
def experts_at_once(model: nn.Module) -> Iterator[None]:
    """Let mixtures of experts of transformers compute all experts at once: the same function
    without a loop over data.

    Args:
        model: a model whose configurations say how experts are computed; they
            say so again afterwards.
    """
    configs = {
        id(c): c
        for module in every_module(model)
        if (c := getattr(module, "config", None)) is not None
    }
    before = {
        key: own
        for key, c in configs.items()
        if (own := getattr(c, "_experts_implementation", None)) is not None
    }
    for key in before:
        configs[key]._experts_implementation = "batched_mm"
    try:
        yield
    finally:
        for key, own in before.items():
            configs[key]._experts_implementation = own


def _has_numbers(value: torch.Tensor) -> bool:
    """Whether the numbers in a constant can be read."""
    try:
        found = value.detach().to_dense().reshape(-1)[:1].tolist()
    except Exception:
        return False
    return has_values(value) and all(isinstance(number, int | float | complex) for number in found)


def _told_to_be_causal(mask: Any, is_causal: bool | None = None, size: int | None = None) -> bool:  # noqa: ARG001
    """Whether a mask was said to be causal; torch would compare its values, and uses
    the mask itself otherwise.
    """
    return bool(is_causal)


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


__all__ = [
    "Captured",
    "capture",
    "check_capturable",
    "check_runs",
    "describe_inputs",
    "first_line",
    "place",
    "quiet",
    "user_frame",
]
