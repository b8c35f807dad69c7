"""A model's operations, recorded while its code runs once on tensors without values.

The tensors lie on the meta device, where shapes are computed fast, and report the device of the
model. If a model uses several devices or asks about memory, fake tensors are used instead.
``torch.export`` finds the same graph and checks more, at several times the cost. In every case in
which the recording may be incomplete, it raises :class:`Unsure`, and the model is exported.
"""

from __future__ import annotations

import inspect
import operator
import re
import sys
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from types import FrameType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._dispatch.python import enable_python_dispatcher, no_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakTensorKeyDictionary

from pathspace.inputs import in_capture_order
from pathspace.known_numbers import KnownNumbers
from pathspace.module_walk import REGISTERED, SIMPLE, every_module, every_path, is_simple
from pathspace.on_meta import META, Asked, Elsewhere, Shapes, Unsure, on_meta, returns_operand
from pathspace.patched_attributes import replaced
from pathspace.without_values import has_values

# types of operands that a graph can hold as they are
_WRITTEN_OUT = (
    bool,
    int,
    float,
    complex,
    str,
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
)
DETACH = torch.ops.aten.detach_.default
_FUNCTIONS = ("/torch/nn/functional.py", "/torch/functional.py")
_BY_PLACE = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_HOLDERS = (Tensor, list, tuple, dict)


class Recording(ProxyTorchDispatchMode):
    """Records every operation before torch decomposes it, and computes the shapes of its results.

    Attributes:
        graph: the operations so far.
        sources: placeholder name -> (kind, name).
        constants: placeholder name -> a tensor that is neither parameter nor buffer.
        numbers: what is known of the numbers in tensors.
    """

    def __init__(self, model: nn.Module, device: torch.device | None) -> None:
        super().__init__(None, "real", pre_dispatch=True)  # type: ignore[arg-type]
        # results on the meta device, or nothing for fake tensors
        self._shapes = None if device is None else Shapes(device)
        self.graph = fx.Graph()
        self.sources: dict[str, tuple[str, str]] = {}
        self.constants: dict[str, Tensor] = {}
        # id of a tensor -> its node; all tensors are kept alive, so that no id is used twice
        self._nodes: dict[int, fx.Node] = {}
        self._held: list[Tensor] = []
        # new tensors, for which torch may create a second Python object
        self._new = WeakTensorKeyDictionary()
        self._first_input: fx.Node | None = None
        self._paths: dict[int, list[str]] = {}
        for path, module in every_path(model):
            self._paths.setdefault(id(module), []).append(path)
        self._stack: dict[str, tuple[str, str]] = {}
        self.numbers = KnownNumbers()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # (nothing is compiled here, and a guard around every operation takes time)
        return False

    def given(self, kind: str, name: str, value: Any, real: Tensor | None = None) -> None:
        """Add a placeholder.

        Args:
            kind: ``"parameter"``, ``"buffer"`` or ``"input"``.
            name: of the parameter, buffer or input.
            value: the tensor, or another input.
            real: the tensor that it replaces, which code may still refer to.
        """
        node = self.graph.placeholder(
            ("" if kind == "input" else f"{kind[0]}_") + _identifier(name).lower()
        )
        node.meta["val"] = value
        self.sources[node.name] = (kind, name if kind != "input" else node.name)
        if kind == "buffer" and real is not None:
            self.numbers.given(value, real)
        for tensor in (value, real):
            if isinstance(tensor, Tensor) and id(tensor) not in self._nodes:
                self._know(tensor, node)
        if kind == "input" and self._first_input is None:
            self._first_input = node

    def _know(self, value: Tensor, node: fx.Node) -> None:
        self._nodes[id(value)] = node
        self._held.append(value)

    def node_of(self, value: Tensor) -> fx.Node:
        """The node that computes a tensor.

        Raises:
            Unsure: no recorded operation has computed it.
        """
        if id(value) in self._nodes:
            return self._nodes[id(value)]
        return self._new[value] if value in self._new else self._constant(value)

    def _constant(self, value: Tensor) -> fx.Node:
        """Add a placeholder for a tensor that is neither parameter nor buffer."""
        plain = type(value) is Tensor and not value.requires_grad and value.layout == torch.strided
        if not plain or value.is_quantized or value.is_inference() or not has_values(value):
            raise Unsure("a constant of a special kind")
        if torch._C._functorch.is_functorch_wrapped_tensor(value):
            raise Unsure("a tensor inside a functorch transform")
        first = self._first_input or next(
            (n for n in self.graph.nodes if n.op != "placeholder"), None
        )
        with self.graph.inserting_before(first):
            node = self.graph.placeholder(f"c_lifted_tensor_{len(self.constants)}")
        self.sources[node.name] = ("constant", node.name.removeprefix("c_"))
        self.constants[node.name] = value
        node.meta["val"] = value
        self._know(value, node)
        return node

    def _operand(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self.node_of(value)
        if value is None or type(value) in _WRITTEN_OUT:
            return self._shapes.device if value == META and self._shapes else value
        if isinstance(value, list | tuple):
            return (
                type(value)(map(self._operand, value))
                if type(value) in (list, tuple)
                else tuple(value)
            )
        raise Unsure(f"an operand of type {type(value).__name__}")

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Record one operation, and compute its result without values and without gradients."""
        if not isinstance(func, torch._ops.OpOverload) or (
            torch.Tag.inplace_view in func.tags and func is not DETACH
        ):
            raise Unsure(str(func))
        if func is torch.ops.aten.lift_fresh.default:
            func = torch.ops.aten.lift_fresh_copy.default
        differentiates = torch.is_grad_enabled()
        # what watches the model's code does not watch what follows
        with torch._C.DisableTorchFunction():
            number = self.numbers.answer(func, args)
            if number is not None:
                return number
            named = dict(kwargs or {})
            result = self._step(func, args, named, differentiates)
            self.numbers.follow(func, (args, named), result)
            return result

    def _step(
        self, func: Any, args: tuple[Any, ...], named: dict[str, Any], differentiates: bool
    ) -> Any:
        operands = tuple(map(self._operand, args))
        by_name = {key: self._operand(value) for key, value in named.items()}
        if self._shapes:
            args, named = (
                self._shapes.shown(args),
                {key: self._shapes.shown(value) for key, value in named.items()},
            )
        with torch.no_grad(), no_python_dispatcher():
            result = (
                self._shapes.result(func, args, named) if self._shapes else func(*args, **named)
            )
        tensors = (
            [result]
            if isinstance(result, Tensor)
            else list(result)
            if isinstance(result, list | tuple)
            else []
        )
        if not any(isinstance(tensor, Tensor) for tensor in tensors):
            if func._schema.is_mutable or not func._schema.returns:
                raise Unsure(str(func))
            return result
        if returns_operand(func, result, args):
            return result
        if differentiates:
            _require_gradients(func, (*args, *named.values()), tensors)
        self._record(func, operands, by_name, result)
        return result

    def _record(
        self, func: Any, operands: tuple[Any, ...], by_name: dict[str, Any], result: Any
    ) -> None:
        meta = {"nn_module_stack": self._stack, **_where()}
        name = func.overloadpacket.__name__
        node = self.graph.create_node("call_function", func, operands, by_name, name)
        if isinstance(result, Tensor):
            if node.all_input_nodes and "_like" not in func.__name__:
                node.meta = {**meta, "val": result}
                self._know(result, node)
            else:
                node.meta = {**meta, "val": result.detach()}
                self._new[result] = node
            return
        node.meta = {**meta, "val": result}
        for number, tensor in enumerate(result):
            if isinstance(tensor, Tensor):
                part = self.graph.call_function(operator.getitem, (node, number))
                part.meta = {**meta, "val": tensor}
                self._know(tensor, part)
            elif tensor is not None:
                raise Unsure("an operation that returns tensors and numbers")

    @contextmanager
    def within(self, module: nn.Module) -> Iterator[None]:
        """Mark operations as part of a module's call; of several names, take the one
        below the calling module.
        """
        paths = self._paths.get(id(module))
        if not paths:
            yield
            return
        caller = next(reversed(self._stack.values()), ("", ""))[0]
        below = [path for path in paths if path.startswith(f"{caller}." if caller else "")]
        path, before = (below or paths)[0], self._stack
        kind = type(module)
        self._stack = {**before, path: (path, f"{kind.__module__}.{kind.__qualname__}")}
        try:
            yield
        finally:
            self._stack = before


def _identifier(name: str) -> str:
    """A name that code can have."""
    return re.sub(r"\W", "_", name)


def _require_gradients(func: Any, operands: Iterable[Any], tensors: list[Any]) -> None:
    """Set ``requires_grad`` of results as autograd would, because the model's code may read it."""
    if func in (torch.ops.aten.detach.default, DETACH) or not _requires_gradients(operands):
        return
    for tensor in tensors:
        if (
            isinstance(tensor, Tensor)
            and tensor.dtype.is_floating_point
            and not tensor.requires_grad
        ):
            tensor.requires_grad = True


def _requires_gradients(operands: Iterable[Any]) -> bool:
    return any(
        (
            value.requires_grad
            if isinstance(value, Tensor)
            else type(value) in (list, tuple) and _requires_gradients(value)
        )
        for value in operands
    )


def _where() -> dict[str, Any]:
    """The innermost line of a user's ``forward`` on the stack, and the
    function of torch that it calls.
    """
    frame: FrameType | None = sys._getframe(4)
    found: dict[str, Any] = {}
    while frame is not None:
        code = frame.f_code
        if code.co_name == "forward" and "/torch/" not in code.co_filename:
            found["stack_trace"] = f'File "{code.co_filename}", line {frame.f_lineno}, in forward'
            break
        if code.co_filename.endswith(_FUNCTIONS):
            found["torch_fn"] = (code.co_name, f"function.{code.co_name}")
        frame = frame.f_back
    return found


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
