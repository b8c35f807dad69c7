"""From an eager model to a captured graph, which holds no writes and says where operations are.

The model's code runs once on a private copy (:mod:`.tracer`), writes become new values
(:mod:`.writes`), and whatever stops the run becomes one sentence.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn

from ..errors import CaptureError, InputTypeError, PathspaceError, first_line
from ..models.inputs import arranged, check_inputs, ordinary
from ..models.isolation import untouched
from ..models.refusals import check_capturable, check_runs, failed_run, user_frame
from ..models.values import has_values, with_numbers
from ..models.walk import every_tensor
from .aliasing import check_memory, memory_of
from .captured import Captured, canonical_names
from .packed import of_equal_lengths
from .tracer import FakeModel, Recorder
from .writes import name_of, without_writes

# (by name: some are slow to import)
_BY_VALUES = (
    "DataDependentOutputException DynamicOutputShapeException GuardOnDataDependentSymNode".split()
)
# torch's tracer has one state for all threads
ONE_AT_A_TIME = threading.RLock()


def capture(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None
) -> Captured:
    """Capture ``model`` on example inputs, in its current mode, without changing it.

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
    with ONE_AT_A_TIME, torch.inference_mode(False), with_numbers(), untouched(model):
        args, kwargs = of_equal_lengths(ordinary((args, kwargs)))
        try:
            try:
                fake = FakeModel(model)
                found = _captured(model, fake, Recorder(fake, args, kwargs))
            except PathspaceError:
                raise
            except Exception:
                # loops of torch, and sizes that depend on data (this takes longer, and knows fewer
                # numbers)
                fake = FakeModel(model, sizes_of_data=True)
                found = _captured(model, fake, Recorder(fake, args, kwargs))
        except PathspaceError:
            raise
        except (Exception, SystemExit) as error:
            if _has_numbers(model):
                check_runs(model, args, kwargs)
            elif not decides_by_values(error):
                raise failed_run(model, args, kwargs, error) from error
            raise failed_capture(model, error) from error
        if _mixes_types(found.graph) and _has_numbers(model):
            # (without values, no operation checks the types of its operands)
            check_runs(model, args, kwargs)
    return found


def _has_numbers(model: nn.Module) -> bool:
    return all(map(has_values, (*model.parameters(), *model.buffers())))


def failed_capture(model: nn.Module, error: BaseException) -> CaptureError:
    """The error for a model that runs but cannot be captured, as the capture raised ``error``."""
    what, advice = first_line(error), "write this step with plain operations of torch"
    if decides_by_values(error):
        what = "a branch, a number or a size in its code depends on the values of tensors"
        advice = "write this step with torch.where or torch.cond"
    return CaptureError(
        f"{type(model).__name__} runs but cannot be captured as a graph: {what}"
        f" ({user_frame(error)}); {advice}, or pass the part of the model around it."
    )


def decides_by_values(error: BaseException | None) -> bool:
    """Whether an error without values, or its cause, is about code that depends on them."""
    while error is not None:
        if type(error).__name__ in _BY_VALUES:
            return True
        error = error.__cause__ or error.__context__
    return False


def _mixes_types(module: fx.GraphModule) -> bool:
    """Whether a linear map meets operands of different types."""
    names = "linear addmm mm bmm matmul conv1d conv2d conv3d".split()
    for node in module.graph.nodes:
        if name_of(node) in names:
            values = [operand.meta.get("val") for operand in node.all_input_nodes]
            if len({value.dtype for value in values if isinstance(value, Tensor)}) > 1:
                return True
    return False


def _captured(model: nn.Module, fake: FakeModel, found: Recorder) -> Captured:
    """The recorded graph without writes, and with what the model keeps as its first outputs."""
    graph, last = without_writes(found.module.graph)
    parameters, canonical = canonical_names(model)
    sources = {
        key: (kind, canonical[name] if kind == "parameter" else name)
        for key, (kind, name) in found.sources.items()
    }
    end = next(node for node in graph.nodes if node.op == "output")
    flat: list[Any] = list(end.args[0])
    outputs, kept = flat[: len(flat) - len(found.kept)], flat[len(flat) - len(found.kept) :]
    # what the model holds after the run, where it is another tensor than before
    # (a tensor that was there before has changed if it was written)
    changed: dict[Any, tuple[str, str]] = {}
    for number, place in found.places.items():
        if number in found.held and place.name in last:
            changed.setdefault(last[place.name], found.sources[place.name])
    read = set(map(id, found.constants.values()))
    for node, (kind, name, before) in zip(kept, found.kept, strict=True):
        if kind != "state" or id(before) in read:
            changed.setdefault(node, (kind, name))
    decide = set(map(id, found.read))
    if any(
        id(fake.values.get(name)) in decide for kind, name in changed.values() if kind == "buffer"
    ):
        raise RuntimeError("a data-dependent choice: a buffer is read as a number, and written")
    weights = [node for node, (kind, _) in changed.items() if kind == "parameter"]
    updates = [node for node in changed if node not in weights]
    end.args = ([*updates, *weights, *outputs],)
    graph.eliminate_dead_code()
    found.module.graph = graph
    buffers = every_tensor(model, "_buffers")
    return Captured(
        found.module,
        sources,
        parameters,
        canonical,
        found.constants,
        buffers,
        updates=len(updates),
        written={
            number: canonical[changed[node][1]] for number, node in enumerate(weights, len(updates))
        },
        whole=_whole(found),
        numbers=frozenset(memory_of(tensor)[:2] for tensor in found.read),
        overwritten=frozenset(changed[node][1] for node in updates if changed[node][0] == "buffer"),
    )


def _whole(found: Recorder) -> dict[str, Tensor]:
    """Example inputs that are whole numbers or truth values, by placeholder."""
    names = [name for name, (kind, _) in found.sources.items() if kind == "input"]
    return {
        name: value.detach().cpu().clone()
        for name, value in zip(names, found.inputs, strict=True)
        if isinstance(value, Tensor)
        and not (value.is_floating_point() or value.is_complex())
        and value.layout == torch.strided
        and has_values(value)
    }
