"""A model's operations, recorded one by one while its code runs on tensors without values."""

from __future__ import annotations

import operator
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._dispatch.python import no_python_dispatcher
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

from ..models.values import has_values
from ..models.walk import every_path
from .known_numbers import KnownNumbers
from .on_meta import META, Shapes, Unsure, returns_operand

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
INDEX = torch.ops.aten.index.Tensor
DETACH = torch.ops.aten.detach_.default
_FUNCTIONS = ("/torch/nn/functional.py", "/torch/functional.py")


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
            if func is INDEX:
                args = args[0], self._by_positions(args[1])
            named = dict(kwargs or {})
            result = self._step(func, args, named, differentiates)
            self.numbers.follow(func, (args, named), result)
            return result

    def _by_positions(self, indices: Sequence[Any]) -> list[Any]:
        """Indices in which each known mask is replaced by the positions where it is true, as torch
        does: how many these are decides the shape of the result.
        """
        found: list[Any] = []
        for index in indices:
            known = self.numbers.positions(index) if isinstance(index, Tensor) else None
            found += [index] if known is None else known
        return found

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
