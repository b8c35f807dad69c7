"""Calls of layers, recorded by hooks that are always removed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from pathspace.errors import CaptureError, first_line
from pathspace.inference.registry import facts_of
from pathspace.models.inputs import arranged, check_inputs, describe_inputs
from pathspace.models.refusals import check_capturable
from pathspace.models.values import require_values

from .model_calls import main_output
from .real_tensors import is_real
from .recomputation import without_recomputation
from .unchanged import unchanged
from .unit_axes import CarriedAxis


@dataclass(eq=False)
class Call:
    """One call of one layer.

    Attributes:
        name: the module's name in the model.
        module: a shallow copy of the module, with the attributes that it had at its end (such as
            weights that a hook makes for each call).
        number: number of earlier calls of the module in this run.
        source: the first floating-point input of the layer, a separate node in autograd's graph.
        output: the first floating-point output, before other code can change it.
        sink: the output as the rest of the model reads it.
        unit_axis: the axis of the output along which units (channels or features) are counted.
        activation: name of the first activation function applied after the layer and before the
            next one, and its module or keyword settings.
        given: the positional and the keyword arguments of the call.
    """

    name: str
    module: nn.Module
    number: int
    source: Tensor | None
    output: Tensor
    sink: Tensor
    unit_axis: int
    given: tuple[Any, Any]
    activation: tuple[str, tuple[Any, ...], Mapping[str, Any]] | None = None
    version: int = field(init=False)

    def __post_init__(self) -> None:
        self.version = _version(self.output)

    @property
    def label(self) -> str:
        """The name, with the number of the call if it is not the first."""
        return self.name if self.number == 0 else f"{self.name} ({self.number + 1})"


@dataclass(eq=False)
class RecordedRun:
    """One run of a model.

    Attributes:
        calls: calls of the selected layers, in order.
        inputs: the floating-point inputs, as nodes of autograd's graph.
        output: the first floating-point tensor of the model's output.
    """

    calls: list[Call] = field(default_factory=list)
    inputs: list[Tensor] = field(default_factory=list)
    output: Tensor = field(default_factory=lambda: torch.zeros(0))


class _Activations(TorchFunctionMode):
    """Records which activation function follows each layer, called as a module or as a function."""

    def __init__(self, run: RecordedRun) -> None:
        super().__init__()
        self.run = run

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        name = getattr(func, "__name__", "")
        if facts_of(name).kind == "activation":
            for call in reversed(self.run.calls):
                if any(True for _ in call.module.parameters(recurse=False)):
                    if call.activation is None:
                        call.activation = (name.rstrip("_"), args[1:], dict(kwargs or {}))
                    break
        return func(*args, **(kwargs or {}))


def _version(value: Tensor) -> int:
    """How often a tensor has been changed; tensors made in inference mode do not count that."""
    return 0 if value.is_inference() else value._version


def _as_it_is(module: nn.Module) -> nn.Module:
    """A shallow copy (``copy.copy`` refuses parametrised modules)."""
    twin: nn.Module = object.__new__(type(module))
    vars(twin).update(vars(module))
    return twin


def _view(value: Tensor) -> Tensor:
    return value.view_as(value)


@contextmanager
def hooked(
    layers: Mapping[str, nn.Module],
    run: RecordedRun,
    differentiable: bool = True,
    copies: bool = True,
) -> Iterator[None]:
    """Record every call of ``layers`` in ``run.calls``; the hooks are always removed at the end.

    Args:
        layers: name -> module.
        run: the run to which calls are added.
        differentiable: give every layer's input and output a separate node in autograd's graph.
        copies: make these nodes copies, which in-place operations cannot change, instead of views;
            without nodes, record copies of the outputs.
    """
    hooks = _Hooks(run, differentiable, copies)
    with ExitStack() as stack:
        for name, module in layers.items():
            for handle in (
                module.register_forward_pre_hook(hooks.before, with_kwargs=True),
                module.register_forward_hook(partial(hooks.after, name), with_kwargs=True),
            ):
                stack.callback(handle.remove)
        yield


class _Hooks:
    """The hooks of :func:`hooked` before and after each call of a layer."""

    def __init__(self, run: RecordedRun, differentiable: bool, copies: bool) -> None:
        self.run, self.differentiable, self.copies = run, differentiable, copies
        self.node = torch.clone if copies else _view
        self.pending: dict[int, list[tuple[Tensor | None, Any]]] = {}
        self.counts: dict[str, int] = {}
        self.axis = CarriedAxis()

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        made: dict[int, Tensor] = {}
        first: list[Tensor] = []
        # an in-place operation would overwrite the recorded tensor
        twice = getattr(module, "inplace", False) or any(True for _ in module.children())

        def replace(value: Any) -> Any:
            if not is_real(value):
                return value
            if not self.differentiable:
                first.append(value)
                return value
            if id(value) not in made:
                source = (
                    self.node(value)
                    if value.requires_grad
                    else value.detach().clone().requires_grad_()
                )
                first.append(source)
                # a copy for a leaf, too, because autograd does not allow in-place changes of leaves
                made[id(value)] = source.clone() if twice or source.is_leaf else source
            return made[id(value)]

        replaced = tree_map(replace, (args, kwargs))
        self.pending.setdefault(id(module), []).append((first[0] if first else None, replaced))
        return replaced

    def after(self, name: str, module: nn.Module, _args: Any, _kwargs: Any, output: Any) -> Any:
        source, given = self.pending[id(module)].pop()
        seen = False

        def replace(value: Any) -> Any:
            nonlocal seen
            if not is_real(value):
                return value
            sink = self.node(value) if self.differentiable else value
            if self.copies and not self.differentiable:
                value = value.clone()
            if not seen:
                number = self.counts.get(name, 0)
                self.counts[name] = number + 1
                own = _as_it_is(module)
                axis = self.axis.of(module, value) if value.dim() else 0
                call = Call(name, own, number, source, value, sink, axis, given)
                self.run.calls.append(call)
                seen = True
            # a copy, because later code may overwrite it
            return sink.clone() if self.differentiable and self.copies else sink

        return tree_map(replace, output)


def record_layers(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
    layers: Mapping[str, nn.Module],
) -> RecordedRun:
    """Run ``model`` once with gradients, and record the calls of ``layers``.

    Buffers (running statistics) and the random state are restored; parameters get no gradients.

    Args:
        model: any module, in its current mode.
        args: its inputs.
        kwargs: its keyword inputs.
        layers: name -> module to record.

    Returns:
        The run, which keeps autograd's graph alive.

    Raises:
        CaptureError: the model raises an error on these inputs, or returns no floating-point
            tensor that depends on them.
    """
    check_capturable(model)
    require_values("observing a model", (*model.named_parameters(), *model.named_buffers()))
    args, kwargs = arranged(model, args, kwargs)
    check_inputs(model, args, kwargs)
    # views cost nothing; copies are needed only if an in-place operation has overwritten a view
    return _observe(model, args, kwargs, layers, False) or _observe(
        model, args, kwargs, layers, True
    )  # type: ignore[return-value]


def _observe(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
    layers: Mapping[str, nn.Module],
    copies: bool,
) -> RecordedRun | None:
    run = RecordedRun()

    def own(value: Any) -> Any:
        if is_real(value):
            run.inputs.append(value.detach().clone().requires_grad_())
            # a copy, because some models change inputs in place, which is not allowed
            # for leaves with gradients
            return run.inputs[-1].clone()
        return value

    args, kwargs = tree_map(own, (tuple(args), dict(kwargs or {})))
    with (
        unchanged(model),
        # the graph is kept and read later, without these hooks and with other buffers
        without_recomputation(as_in_training=True),
        torch.enable_grad(),
        hooked(layers, run, copies=copies),
        _Activations(run),
    ):
        # the fused attention kernels have no second derivatives, which
        # Jacobian-vector products need
        try:
            with sdpa_kernel(SDPBackend.MATH):
                result = model(*args, **kwargs)
        except Exception as error:
            if not copies:
                return None
            raise CaptureError(
                f"{type(model).__name__} raised {type(error).__name__} on inputs"
                f" ({describe_inputs(args, kwargs)}): {first_line(error)}; check the shapes and"
                " dtypes of the inputs."
            ) from error
    run.output = main_output(model, result)
    touched = any(call.version != _version(call.output) for call in run.calls)
    return None if touched and not copies else run
