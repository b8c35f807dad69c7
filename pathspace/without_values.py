"""Tensors that have shapes and no numbers, on the meta device, of a fake mode or cut: a structure needs no more.

Weights without values are taken to be numbers other than 0, buffers of floating point numbers to be no masks. Whole
numbers in buffers (positions, tables) decide which weights are read, so these are computed where the model knows how,
and missed in a sentence where it does not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors
from torch.utils._python_dispatch import _disable_current_modes

from pathspace.errors import InputError
from pathspace.unsharded import is_cut

# larger buffers are neither computed again nor looked into
LARGEST_BUFFER = 1 << 24


def has_values(tensor: Tensor) -> bool:
    """Whether a tensor has numbers, and not a shape alone; one that is cut over devices has none in one place.

    Example:
        >>> import torch
        >>> has_values(torch.ones(2)), has_values(torch.ones(2, device="meta"))
        (True, False)
    """
    return not (tensor.is_meta or isinstance(tensor, FakeTensor) or is_cut(tensor))


def lacking(tensors: Iterable[tuple[str, Tensor]]) -> list[str]:
    """Names of the tensors that have no numbers."""
    return [name for name, tensor in tensors if not has_values(tensor)]


def require_values(who: str, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Refuse tensors without numbers where numbers are needed.

    Args:
        who: what needs them.
        tensors: names and tensors.

    Raises:
        InputError: a tensor has a shape only.
    """
    named = dict(tensors)
    missing = lacking(named.items())
    others = " and others" * (len(missing) > 1)
    if missing and is_cut(named[missing[0]]):
        raise InputError(
            f"{who} found {missing[0]!r}{others} sharded over devices, expected whole tensors; do this before the "
            f"model is sharded: names and units are the same."
        )
    if missing:
        raise InputError(
            f"{who} found {missing[0]!r}{others} without values (on the meta device or of "
            "a fake mode), expected numbers; load or initialise the weights first."
        )


@contextmanager
def with_numbers() -> Iterator[None]:
    """New tensors have numbers in here, whatever fake mode or default device is set outside."""
    default = torch.device("cpu") if torch.get_default_device().type == "meta" else None
    with _disable_current_modes():
        if default is None:
            yield
        else:
            with default:
                yield


@contextmanager
def on_cpu() -> Iterator[None]:
    """What an analysis makes for itself has numbers and lies on the CPU, whatever is the default outside."""
    # (a default device that is set costs time at every call of torch)
    device = nullcontext() if torch.get_default_device().type == "cpu" else torch.device("cpu")
    with with_numbers(), device, torch.inference_mode(False):
        yield


def fake_mode() -> FakeTensorMode:
    """A mode of its own for the stand-ins of tensors without values."""
    try:
        shapes = ShapeEnv(tracked_fakes=[], trace_asserts=True)
    except TypeError:
        # old builds of torch have no such argument: a comparison of sizes in an assertion is a guard like any other
        shapes = ShapeEnv(tracked_fakes=[])
    return FakeTensorMode(shape_env=shapes, allow_non_fake_inputs=True)


def give_shapes(twin: nn.Module, mode: FakeTensorMode) -> bool:
    """Put stand-ins on the CPU in the place of a model's tensors without values, in place.

    Buffers that the model's own initialisation computes (``reset_parameters``, ``_init_weights``) get their numbers.

    Args:
        twin: a copy of one's own.
        mode: the mode of the stand-ins.

    Returns:
        Whether there were any.
    """
    held = [(module.__dict__, key, value) for module in twin.modules() for key, value in module.__dict__.items()]
    held += [(m._parameters, key, value) for m in twin.modules() for key, value in m._parameters.items()]
    plain = [(place, key, value) for place, key, value in held if _is_shape(value)]
    waiting: dict[int, Tensor] = {}
    made: dict[int, Tensor] = {}
    for place, key, value in plain:
        place[key] = made.setdefault(id(value), _stand_in(value, mode))
    every = [(module, *item) for module in twin.modules() for item in module._buffers.items()]
    buffers = [(module, key, value) for module, key, value in every if value is not None and _is_shape(value)]
    for module, key, value in buffers:
        small = value.numel() <= LARGEST_BUFFER
        module._buffers[key] = waiting.setdefault(
            id(value), torch.empty(value.shape, dtype=value.dtype) if small else _stand_in(value, mode)
        )
    if buffers:
        _initialise(twin, {id(module) for module, _, _ in buffers})
    for module, key, value in buffers:
        now = module._buffers[key]
        if now is waiting[id(value)] and not now._version:
            module._buffers[key] = made.setdefault(id(value), _stand_in(value, mode))
    return bool(plain or buffers)


def _is_shape(value: Any) -> bool:
    return isinstance(value, Tensor) and not isinstance(value, nn.UninitializedParameter) and not has_values(value)


def _stand_in(value: Tensor, mode: FakeTensorMode) -> Tensor:
    with mode:
        fake = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cpu")
        return nn.Parameter(fake, value.requires_grad) if isinstance(value, nn.Parameter) else fake


def _initialise(twin: nn.Module, wanted: set[int]) -> None:
    """Ask modules to compute their buffers; what fails leaves them without values."""
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        for owner in twin.modules():
            own: Any = getattr(owner, "_init_weights", None)
            for module in owner.modules() if callable(own) else ():
                if id(module) in wanted:
                    with suppress(Exception):
                        own(module)
                    wanted.discard(id(module))
        for module in twin.modules():
            if id(module) in wanted and callable(getattr(module, "reset_parameters", None)):
                with suppress(Exception):
                    module.reset_parameters()  # type: ignore[operator]


class _SmallTensors(TorchFunctionMode):
    """What is made large is made on the meta device."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = dict(kwargs or {})
        factory = func in _device_constructors() and func is not torch.tensor and named.get("device") is None
        if factory:
            with suppress(TypeError, RuntimeError):
                shape = func(*args, **{**named, "device": "meta"})
                if isinstance(shape, Tensor) and shape.numel() > LARGEST_BUFFER:
                    return shape
        return func(*args, **named)


@contextmanager
def without_weights() -> Iterator[None]:
    """Build models without the numbers of their parameters; buffers (positions, masks) keep theirs.

    Parameters come to lie on the meta device as soon as a module has them, so that a model of any size costs next to no
    memory. :func:`pathspace.trace`, skeletons, proofs and :func:`pathspace.verify` take it.

    Example:
        >>> import torch, pathspace as ps
        >>> with ps.without_weights():
        ...     layer = torch.nn.Linear(1_000_000, 1_000_000)
        >>> layer.weight.numel(), layer.weight.device
        (1000000000000, device(type='meta'))
    """
    register: Callable[..., None] = nn.Module.register_parameter

    def registered(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        register(self, name, param)
        if type(param) is nn.Parameter and has_values(param):
            shape = nn.Parameter(param.detach().to("meta"), param.requires_grad)
            shape.__dict__.update(param.__dict__)
            self._parameters[name] = shape

    with mock.patch.object(nn.Module, "register_parameter", registered), _SmallTensors():
        yield


__all__ = [
    "LARGEST_BUFFER",
    "fake_mode",
    "give_shapes",
    "has_values",
    "lacking",
    "on_cpu",
    "require_values",
    "with_numbers",
    "without_weights",
]
