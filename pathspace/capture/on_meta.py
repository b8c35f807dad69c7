"""Shapes of results on the meta device, for a model's code that asks where its tensors are.

Kernels on the meta device compute shapes only, much faster than fake tensors do. Tensors there say
that they lie on the model's device; what would tell them from others is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode

from .result_shapes import result_shape

META = torch.device("meta")
# operations of a tensor of floating point numbers, of whatever shape, and of numbers
_CURVES = (
    "relu leaky_relu silu gelu elu selu celu mish hardtanh hardswish hardsigmoid sigmoid tanh relu6"
    " softplus exp"
)
_ELEMENTWISE = frozenset(_CURVES.split())
# what code asks a tensor about its place, and the answer
_PLACES: dict[Any, Callable[[torch.device], Any]] = {
    Tensor.device.__get__: lambda device: device,
    Tensor.is_cpu.__get__: lambda device: device.type == "cpu",  # type: ignore[attr-defined]
    Tensor.is_cuda.__get__: lambda device: device.type == "cuda",  # type: ignore[attr-defined]
    Tensor.is_meta.__get__: lambda _: False,  # type: ignore[attr-defined]
}
_MEMORY = (
    *(
        Tensor.data_ptr,
        Tensor.get_device,
        Tensor.untyped_storage,
        Tensor.storage,
        Tensor.is_set_to,
        Tensor.is_pinned,
    ),
    *(Tensor.is_mps.__get__, Tensor.is_xpu.__get__, Tensor._version.__get__),  # type: ignore[attr-defined]
)
_TELLING = frozenset(_MEMORY)
# what code may ask about derivatives, of which results have none here
_DERIVED = frozenset([Tensor.grad_fn.__get__, Tensor.is_leaf.__get__])  # type: ignore[attr-defined, union-attr]
_READS_DATA = frozenset([Tensor.data.__get__])  # type: ignore[attr-defined]
_SETS_MEMORY = frozenset([Tensor.data.__set__])  # type: ignore[attr-defined]


class Unsure(Exception):
    """The recording may be incomplete."""


class Elsewhere(Unsure):
    """Something that only a recording on fake tensors may know."""


class Unshown(Unsure):
    """Something that an export does not see, either."""


class Asked(TorchFunctionMode):
    """Tensors on the meta device say that they lie on another one; what else tells
    them from others is refused.
    """

    def __init__(self, device: torch.device | None) -> None:
        super().__init__()
        self.device = device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _READS_DATA:
            return args[0].detach()
        if func in _SETS_MEMORY:
            raise Unshown("memory that is set")
        if func in _DERIVED and args[0].requires_grad and type(args[0]) is not nn.Parameter:
            raise Unsure("a question about derivatives")
        if self.device is not None:
            if func in _PLACES and args[0].is_meta:
                return _PLACES[func](self.device)
            if func in _TELLING or (func is Tensor.type and len(args) == 1 and not kwargs):
                raise Elsewhere("a question about memory")
            places = (
                args[1:2]
                if func is Tensor.to
                else (kwargs["device"],)
                if kwargs and "device" in kwargs
                else ()
            )
            if any(
                type(place) in (str, torch.device) and torch.device(place) == META
                for place in places
            ):
                raise Elsewhere("the meta device")
        return func(*args, **(kwargs or {}))


class Shapes:
    """What operations return on the meta device; where blocks repeat, shapes are computed once.

    Args:
        device: where the tensors on the meta device say that they are.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        # id of a tensor -> its shape; the tensors are kept alive, so that no id is used twice
        self._shapes: dict[int, Tensor] = {}
        self._originals: list[Tensor] = []
        # an operation and the likeness of its operands -> its result
        self._known: dict[Any, Any] = {}

    def shown(self, value: Any) -> Any:
        """An operand on the meta device."""
        if isinstance(value, Tensor):
            if value.is_meta:
                return value
            if id(value) not in self._shapes:
                self._originals.append(value)
                self._shapes[id(value)] = on_meta(value)
            return self._shapes[id(value)]
        if isinstance(value, torch.device):
            if value != META and value.type != self.device.type:
                raise Elsewhere("several devices")
            return META
        return type(value)(map(self.shown, value)) if type(value) in (list, tuple) else value

    def result(self, func: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """What an operation returns for operands on the meta device."""
        first: Any = args[0] if args else None
        name, _, overload = func.__name__.partition(".")
        if (
            name.removesuffix("_") in _ELEMENTWISE
            and overload == "default"
            and first.is_floating_point()
        ):
            if not name.endswith("_"):
                return _another(first)
            if 0 not in first.stride():
                return first
        shape = None if named else result_shape(func, args)
        if shape is not None:
            return torch.empty(
                shape, dtype=(first[0] if isinstance(first, list) else first).dtype, device=META
            )
        if _shares_memory(func):
            return func(*args, **named)
        key = (
            func,
            torch.get_default_dtype(),
            _likeness(args),
            *((name, _likeness(each)) for name, each in named.items()),
        )
        known = self._known.get(key)
        if known is None:
            result = func(*args, **named)
            if returns_operand(func, result, args):
                return result
            if _is_shape(result) or (type(result) in (list, tuple) and all(map(_is_shape, result))):
                # (torch wraps a new tensor once more where somebody holds it)
                self._known[key] = type(result), _likeness(result)
            return result
        kind, likeness = known
        return _like(*likeness) if kind is Tensor else kind(_like(*each) for each in likeness)


@cache
def _shares_memory(func: Any) -> bool:
    """Whether an operation writes into an operand, or returns a view of it."""
    return any(operand.alias_info is not None for operand in func._schema.arguments)


def _likeness(value: Any) -> Any:
    """All of an operand that decides the shape of a result."""
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype
    return tuple(map(_likeness, value)) if type(value) in (list, tuple) else (type(value), value)


def _another(x: Tensor) -> Tensor:
    """``torch.empty_like(x)``, which is written in Python for the meta device."""
    dense = x.is_contiguous() or (
        x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last)
    )
    return _like(x.shape, x.stride(), x.dtype) if dense else torch.empty_like(x)


def _is_shape(value: Any) -> bool:
    return type(value) is Tensor and value.is_meta


def _like(shape: torch.Size, stride: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A new tensor on the meta device."""
    return torch.empty_strided(shape, stride, dtype=dtype, device=META)


def returns_operand(func: Any, result: Any, args: tuple[Any, ...]) -> bool:
    """Whether an operation that makes new tensors, such as dropout, returned its operand itself."""
    return not func._schema.returns[0].alias_info and any(result is operand for operand in args)


def on_meta(value: Tensor) -> Tensor:
    """A tensor on the meta device in place of another one.

    Raises:
        Unsure: it is of a class of its own.
    """
    plain = type(value) in (Tensor, nn.Parameter, FakeTensor) and value.layout == torch.strided
    if not plain or value.is_quantized or value.is_conj() or value.is_neg() or value.is_inference():
        raise Elsewhere("a tensor of a class of its own")
    shape = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    if isinstance(value, nn.Parameter):
        return nn.Parameter(shape, value.requires_grad)
    shape.requires_grad = value.requires_grad
    return shape
