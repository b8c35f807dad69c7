"""From an eager model to a captured graph.

Where one run shows everything, that run is recorded, which takes a fraction of the time; other
models are exported. Either graph is the *training IR* (no decomposition): recurrent layers stay one
operation, every parameter name is one placeholder, and every node remembers the module and the
source line it came from. The user's model is left as it was.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import fx, nn
from torch._functorch import config as functorch_config
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx._lazy_graph_module import _make_graph_module, _use_lazy_graph_module

from ..errors import InputError, InputTypeError, PathspaceError
from ..models.inputs import arranged, check_inputs, of_equal_lengths, ordinary
from ..models.isolation import quiet
from ..models.restored_globals import untouched
from ..models.stand_in import repeatable, stand_in
from ..models.values import fake_mode, give_shapes, with_numbers
from ..models.walk import every_tensor
from .aliasing import writes_are_seen, written_placeholders
from .captured import Captured, canonical_names, whole_inputs
from .exporting import exported
from .on_meta import Elsewhere, Unshown, Unsure
from .recorded_run import record_graph
from .refusals import (
    WITHOUT_GRADIENTS,
    check_capturable,
    check_memory,
    decides_by_values,
    failed_capture,
    failed_run,
    sets_memory,
)
from .traceable import stand_in_and_inputs, traceable

# tracing replaces functions of torch for a while
_ONE_AT_A_TIME = threading.RLock()


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
                try:
                    captured = exported(model, args, kwargs, watch)
                except PathspaceError:
                    raise
                except (Exception, SystemExit) as error:
                    check_runs(model, args, kwargs)
                    raise failed_capture(model, error) from error
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
        twin, made, given = stand_in_and_inputs(model, args, kwargs, mode)
        try:
            with traceable(twin), watch:
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
    parameters, canonical = canonical_names(model)
    sources = {
        key: (kind, canonical[name] if kind == "parameter" else name)
        for key, (kind, name) in found.sources.items()
    }
    buffers = every_tensor(model, "_buffers") | (made or {})
    whole = whole_inputs(module.graph, sources, given)
    written = [sources.get(node.name, ("", "")) for node in written_placeholders(module.graph)]
    return Captured(
        module,
        sources,
        parameters,
        canonical,
        found.constants,
        buffers,
        whole=whole,
        numbers=frozenset(span[1:] for span in found.numbers.read),
        overwritten=frozenset(name for kind, name in written if kind == "buffer"),
    )


def _without_code(graph: fx.Graph) -> fx.GraphModule:
    """A graph as a module, for which code is written where it is run."""
    with _use_lazy_graph_module(True):
        return _make_graph_module(nn.Module(), graph)


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
