"""Selection of layers by name and type, and recording of their calls by
hooks that are always removed.
"""

from __future__ import annotations

import fnmatch
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from pathspace.capture import check_capturable, describe_inputs, first_line
from pathspace.checkpointing import never_recomputed
from pathspace.diagnostics.recomputation import never_reentrant
from pathspace.errors import (
    CaptureError,
    InputError,
    InputTypeError,
    PathspaceError,
    UnsupportedError,
)
from pathspace.forward_run import LARGE
from pathspace.inference.registry import facts_of
from pathspace.inputs import arranged, check_inputs
from pathspace.module_walk import every_module
from pathspace.nested import leaves
from pathspace.refusals import failed_run, no_derivative
from pathspace.restored_globals import untouched, values_kept
from pathspace.stand_in import generator_states, restore_attributes, save_attributes
from pathspace.without_values import has_values, require_values

Names = str | Sequence[str] | None
Types = str | type | Sequence[str | type] | None


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


def matching(names: Names) -> Callable[[str], bool]:
    """A function that tells whether a name matches one of some patterns.

    Args:
        names: one or several, or ``None`` for all.

    Raises:
        InputTypeError: they are something else.

    Example:
        >>> chosen = matching("blocks.*")
        >>> chosen("blocks.0"), chosen("stem"), matching(None)("stem")
        (True, False, True)
    """
    patterns = "*" if names is None else names
    found = (
        list(patterns)
        if isinstance(patterns, Iterable) and not isinstance(patterns, str)
        else [patterns]
    )
    if not all(isinstance(name, str) for name in found):
        raise InputTypeError(
            f"Found names={names!r}, expected a pattern of names, such as 'blocks.*', or several."
        )
    return lambda name: any(fnmatch.fnmatchcase(name, pattern) for pattern in found)


def select(model: nn.Module, names: Names = None, types: Types = None) -> dict[str, nn.Module]:
    """Select layers by name and by type.

    Args:
        model: any module.
        names: one or several patterns with ``*`` and ``?``; a layer is chosen if one of
            them matches its full name.
        types: one or several classes, or names of classes.

    Returns:
        Name -> module, in the model's order. Without a filter: every module without children, and
        torch's own layers with children (attention). With a filter: every module that passes it,
        and the model itself only if it is named or if no other module passes.

    Raises:
        InputError: nothing passes the filters.
        InputTypeError: ``model`` is not a module, or a filter is of another kind.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
        >>> (
        ...     list(select(model)),
        ...     list(select(model, types=nn.Linear)),
        ...     list(select(model, names="[12]")),
        ... )
        (['0', '1', '2'], ['0', '2'], ['1', '2'])
    """
    if not isinstance(model, nn.Module):
        raise InputTypeError(
            f"Expected a torch.nn.Module to diagnose, found {type(model).__name__}; pass the model"
            " itself."
        )
    chosen: dict[str, nn.Module] = {}
    if names is None and types is None:
        inside: set[str] = set()
        for name, module in model.named_modules():
            parent = name.rpartition(".")[0]
            if parent in inside and name:
                inside.add(name)
                continue
            # torch's attention has a linear layer that it never calls, so it counts as one layer
            own = any(True for _ in module.parameters(recurse=False)) and type(
                module
            ).__module__.startswith("torch.nn")
            childless = not any(True for _ in module.children())
            if childless or own:
                chosen[name] = module
                inside.add(name)
        return chosen
    named = matching(names)
    kinds = [types] if isinstance(types, str | type) else types
    if not (
        kinds is None
        or (isinstance(kinds, Iterable) and all(isinstance(kind, str | type) for kind in kinds))
    ):
        raise InputTypeError(
            f"Found types={types!r}, expected a class of layers, its name, or several."
        )
    for name, module in model.named_modules():
        by_type = kinds is None or any(
            type(module).__name__ == kind if isinstance(kind, str) else isinstance(module, kind)
            for kind in kinds
        )
        if named(name) and by_type:
            chosen[name] = module
    if names is None and len(chosen) > 1:
        # the model itself only if no module inside has the type
        chosen.pop("", None)
    if not chosen:
        found = sorted({type(module).__name__ for module in model.modules()})
        raise InputError(
            f"No layer of {type(model).__name__} matches names={names!r} and types={types!r}; its"
            f" types are {', '.join(found)}, and names are those of named_modules()."
        )
    return chosen


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
        self.axis = -1

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
        kind = type(module).__name__
        if kind.startswith("Conv") and kind != "Conv1D":
            self.axis = 1
        elif kind.startswith(("Linear", "LayerNorm", "RMSNorm", "Conv1D", "Embedding")):
            self.axis = -1
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
                call = Call(name, own, number, source, value, sink, self.axis, given)
                self.run.calls.append(call)
                seen = True
            # a copy, because later code may overwrite it
            return sink.clone() if self.differentiable and self.copies else sink

        return tree_map(replace, output)


def is_real(value: Any) -> TypeGuard[Tensor]:
    """Whether a value is a floating-point tensor."""
    return isinstance(value, Tensor) and value.is_floating_point()


def first_real(value: Any) -> Tensor | None:
    """The first floating-point tensor in inputs or outputs."""
    return next(filter(is_real, tree_leaves(value)), None)


def in_float64(value: Any) -> Any:
    """A floating-point tensor in float64 and without a gradient; other values as they are."""
    return value.detach().double() if is_real(value) else value


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
        never_recomputed(as_in_training=True),
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


def main_output(model: nn.Module, result: Any) -> Tensor:
    """The first floating-point tensor of a model's output.

    Raises:
        CaptureError: there is none, or it has no gradient.
    """
    values = result.values() if isinstance(result, Mapping) else [result]
    for value in leaves(list(values)):
        if is_real(value):
            if not value.requires_grad:
                raise CaptureError(
                    f"The output of {type(model).__name__} does not depend differentiably on its"
                    " inputs or parameters; remove no_grad() or detach() from its forward."
                )
            return value
    raise CaptureError(
        f"{type(model).__name__} returned no floating-point tensor; diagnostics need one."
    )


def call(model: nn.Module, inputs: Any) -> Any:
    """``model(inputs)``, ``model(*inputs)`` for a tuple or list,
    ``model(**inputs)`` for a mapping.

    Raises:
        CaptureError: the model raises an error on these inputs.
    """
    args, kwargs = arguments(model, inputs)
    check_inputs(model, args, kwargs)
    return called(model, args, kwargs)


def arguments(model: nn.Module, inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The positional and the keyword inputs in a batch of :func:`call`."""
    if isinstance(inputs, tuple | list):
        return arranged(model, inputs)
    return ((), dict(inputs)) if hasattr(inputs, "keys") else ((inputs,), {})


def called(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """``model(*args, **kwargs)``.

    Raises:
        CaptureError: the model raises an error on these inputs.
    """
    try:
        return model(*args, **kwargs)
    except PathspaceError:
        raise
    except Exception as error:
        raise failed_run(model, args, kwargs, error) from error


def lost(loss: Callable[[Any, Any], Any], outputs: Any, targets: Any) -> Tensor:
    """``loss(outputs, targets)``.

    Raises:
        InputError: the loss raises an error, or returns no tensor.
    """
    try:
        value = loss(outputs, targets)
    except PathspaceError:
        raise
    except Exception as error:
        raise InputError(
            f"The loss raised {type(error).__name__} on outputs and targets"
            f" ({describe_inputs((outputs, targets), {})}): {first_line(error)}; check that it"
            " takes what the model returns, and that the targets fit."
        ) from error
    if not isinstance(value, Tensor):
        raise InputError(
            f"The loss returned a {type(value).__name__}, expected a tensor with a gradient; let it"
            " return the number as a tensor."
        )
    return value


@contextmanager
def differentiating(model: nn.Module) -> Iterator[None]:
    """Replace errors of the backward pass by one sentence."""
    try:
        yield
    except PathspaceError:
        raise
    except Exception as error:
        kept = "second time" in str(error)
        advice = "a model that keeps results between runs must drop them, and must be built again"
        raise UnsupportedError(
            f"{type(model).__name__} cannot be differentiated: {no_derivative(error)}"
            f"{f'; {advice}' if kept else '; call its backward pass by itself to see why'}."
        ) from error


@contextmanager
def float64_errors_explained(model: nn.Module) -> Iterator[None]:
    """Replace errors of a model in float64, which some of torch's kernels do not
    support, by one sentence.
    """
    try:
        yield
    except PathspaceError:
        raise
    except Exception as error:
        raise CaptureError(
            f"{type(model).__name__} raised {type(error).__name__} in float64, which this"
            f" diagnostic needs: {first_line(error)}; use an implementation of that operation with"
            " float64."
        ) from error


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Restore all that running a model changes: buffers, attributes of its modules, random states,
    and weights that its code writes into (of models with up to 30 million).

    Inside, reentrant checkpointing is the other one, which has all gradients.
    """
    buffers = [
        (module._buffers, dict(module._buffers))
        for module in every_module(model)
        if isinstance(module._buffers, dict)
    ]
    values = [buffer for buffer in model.buffers() if not is_lazy(buffer) and has_values(buffer)]
    weights = [
        weight
        for weight in model.parameters()
        if not is_lazy(weight) and has_values(weight) and weight.layout == torch.strided
    ]
    if sum(weight.numel() for weight in weights) <= LARGE:
        # (some models write into their weights, as those with a constraint of their norm)
        values += weights
    before, generators = save_attributes(model), generator_states(model)
    with untouched(model), values_kept(values), never_reentrant(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*torch.jit.*deprecated.*")
        try:
            yield
        finally:
            restore_attributes(before)
            for held, own in buffers:
                held.clear()
                held.update(own)
            for generator, state in generators:
                generator.set_state(state)


def rademacher(like: Tensor, generator: torch.Generator) -> Tensor:
    """Independent random signs of the shape of a tensor."""
    signs = torch.randint(0, 2, like.shape, generator=generator, dtype=torch.int8)
    return signs.to(like).mul_(2).sub_(1)
