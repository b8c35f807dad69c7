"""One recorded run of a model on tensors without values.

The tensors lie on the meta device, where shapes are computed fast, and report the device of the
model. If a model uses several devices or asks about memory, fake tensors are used instead.
``torch.export`` finds the same graph and checks more, at several times the cost. In every case in
which the recording may be incomplete, it raises :class:`Unsure`, and the model is exported.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree

from ..models.inputs import in_capture_order
from ..models.isolation import replaced
from ..models.values import has_values
from ..models.walk import REGISTERED, SIMPLE, every_module, every_path, is_simple
from .on_meta import META, Asked, Elsewhere, Unsure, on_meta
from .recording import Recording

_BY_PLACE = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_HOLDERS = (Tensor, list, tuple, dict)


def _unsure(*_: Any, **__: Any) -> Any:
    raise Unsure("derivatives inside forward")


@contextmanager
def _as_exported(recording: Recording) -> Iterator[None]:
    """Let the model's code find the same flags as during an export, and
    record the calls of modules.
    """
    call: Callable[..., Any] = nn.Module._call_impl
    enter: Callable[..., Any] = torch.autocast.__enter__

    def called(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with recording.within(module):
            return call(module, *args, **kwargs)

    def entered(autocast: Any) -> Any:
        if autocast._enabled != torch.is_autocast_enabled(autocast.device):
            raise Unsure("autocast in a part of the model")
        return enter(autocast)

    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with replaced(
            # (with another __call__, Python would look at every class of modules)
            (nn.Module, "_call_impl", called),
            (torch.autocast, "__enter__", entered),
            (torch.autograd.graph, "_engine_run_backward", _unsure),
            (torch.autograd, "_engine_run_backward", _unsure),
            (torch.compiler, "_is_compiling_flag", True),
            (torch.compiler, "_is_exporting_flag", True),
        ):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


def _left(held: Iterable[Any], lists: Collection[int]) -> set[int]:
    """Ids of the tensors without values in attributes of modules, except those in the
    given lists and dictionaries.
    """
    values = (value for value in held if isinstance(value, _HOLDERS) and id(value) not in lists)
    leaves = pytree.tree_leaves(
        [v for v in values if not (type(v) in (list, tuple) and is_simple(v))]
    )
    return {id(leaf) for leaf in leaves if isinstance(leaf, Tensor) and not has_values(leaf)}


def _held(model: nn.Module) -> list[Any]:
    """Attributes of modules that are not registered, and may hold something."""
    return [
        value
        for module in every_module(model)
        for key, value in vars(module).items()
        if (kind := type(value)) not in SIMPLE
        and (kind is not OrderedDict or value)
        and key not in REGISTERED
    ]


def _registered(model: nn.Module) -> list[tuple[str, str, dict[str, Any], str]]:
    """Kind, name and place of all parameters, then of all buffers; those of
    several names are met again.
    """
    modules = every_path(model)
    return [
        (kind, f"{path}.{key}" if path else key, held, key)
        for kind, attribute in (("parameter", "_parameters"), ("buffer", "_buffers"))
        for path, module in modules
        for held in (vars(module)[attribute],)
        for key, value in held.items()
        if value is not None
    ]


def _names(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[str]:
    """Names of the inputs, from the signature of ``forward``."""
    known = [
        p.name for p in inspect.signature(model.forward).parameters.values() if p.kind in _BY_PLACE
    ]
    paths, _ = pytree.tree_flatten_with_path(((*args,), dict(kwargs)))
    names = []
    for (_, first, *rest), _ in paths:
        start, *keys = [
            str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", ""))))
            for key in (first, *rest)
        ]
        if isinstance(first, pytree.SequenceKey):
            start = known[first.idx] if first.idx < len(known) else f"args_{start}"
        names.append("_".join([start, *keys]))
    return names


def _fake(value: Tensor, mode: FakeTensorMode) -> Tensor:
    """A fake tensor with the shape, type and device of a tensor.

    Raises:
        Unsure: the tensor is of a subclass that has no fake form.
    """
    plain = type(value) in (Tensor, nn.Parameter) and value.layout == torch.strided
    if (
        not plain
        or value.is_quantized
        or value.is_conj()
        or value.is_neg()
        or not has_values(value)
    ):
        fake: Tensor = mode.from_tensor(value)
        if type(fake) is not FakeTensor:
            raise Elsewhere("a tensor of a class of its own")
        return fake
    # (mode.from_tensor takes longer than the run itself)
    fake = FakeTensor(
        mode,
        torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta"),
        value.device,
    )
    fake.requires_grad = value.requires_grad
    if isinstance(value, nn.Parameter):
        fake._is_param = True
    return fake


def one_device(model: nn.Module, given: Any) -> torch.device | None:
    """The device of all tensors of a model and its inputs, if there is one."""
    places = [
        place for module in every_module(model) for place in (module._parameters, module._buffers)
    ]
    tensors = [
        *(tensor for place in places for tensor in place.values()),
        *pytree.tree_leaves(given),
    ]
    devices = {tensor.device for tensor in tensors if isinstance(tensor, Tensor)} or {
        torch.device("cpu")
    }
    return devices.pop() if len(devices) == 1 else None


def record_graph(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], mode: FakeTensorMode | None
) -> Recording:
    """Run a model once and write down what it does.

    Args:
        model: a private copy of the model that returns a tuple of tensors.
        args: positional inputs.
        kwargs: inputs by keyword.
        mode: makes tensors without numbers; without one, they lie on the meta device.

    Returns:
        The recording with a complete graph.

    Raises:
        Unsure: the graph may be incomplete.
        Exception: whatever the model's code raises on tensors without values.
    """
    with torch._C.DisableTorchFunction():
        device = one_device(model, (args, dict(kwargs))) if mode is None else None
    if mode is None and (device is None or device == META):
        raise Elsewhere("several devices")
    recording = Recording(model, device)
    shown: dict[int, Tensor] = {}

    def fake(value: Tensor) -> Tensor:
        if id(value) not in shown:
            made = on_meta(value) if mode is None else _fake(value, mode)
            # (a module of several names is met again)
            shown[id(value)] = shown[id(made)] = made
        return shown[id(value)]

    before = _registered(model)
    # (what watches the model's code does not watch this)
    with torch._C.DisableTorchFunction() if mode is None else nullcontext():
        for kind, name, owner, key in before:
            value = owner[key]
            owner[key] = fake(value)
            recording.given(kind, name, owner[key], value)
    for name, value in zip(
        _names(model, args, kwargs), in_capture_order(args, kwargs), strict=True
    ):
        if isinstance(value, Tensor) and id(value) in shown:
            raise Unsure("an input that is given twice")
        recording.given("input", name, fake(value) if isinstance(value, Tensor) else value)
    given, by_name = pytree.tree_map_only(Tensor, fake, (args, dict(kwargs)))
    own, held = [owner[key] for *_, owner, key in before], _held(model)
    # code may fill lists and dictionaries, and torch lets it
    lists = {id(value) for value in held if type(value) in (list, dict)}
    left = _left(held, lists)
    with (
        mode or nullcontext(),
        Asked(device),
        _as_exported(recording),
        recording,
        enable_python_dispatcher(),
    ):
        found = model(*given, **by_name)
    after = _registered(model)
    if [entry[1] for entry in before] != [entry[1] for entry in after] or any(
        tensor is not owner[key] for tensor, (*_, owner, key) in zip(own, after, strict=True)
    ):
        raise Unsure("a parameter or buffer that is set")
    if _left(_held(model), lists) - left - set(map(id, own)):
        raise Unsure("tensors that are kept from one call to the next")
    if not all(isinstance(tensor, Tensor) for tensor in found):
        raise Unsure("numbers among the outputs")
    recording.graph.output(tuple(map(recording.node_of, found)))
    return recording
