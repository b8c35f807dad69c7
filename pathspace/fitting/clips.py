"""ReLU6 and Hardtanh with one bound for each unit, which the gauge rescales."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from ..capture.capture import capture
from ..capture.captured import Captured
from ..errors import InputError, PathspaceError, UnsupportedError, expect_arguments, first_line
from ..inference.interpreter import interpret
from ..inference.scales import Scales
from ..inference.union_find import lookup
from ..inference.values import NEUTRAL, compress, distinct
from ..models.copies import safe_deepcopy
from ..models.isolation import torch_kept
from ..models.running import distance, outputs
from ..models.values import names_without_values
from ..models.walk import has_hooks

# image sizes that are tried where no example inputs are given
SIZES = (224, 32, 28, 64, 96, 128, 299)
# largest change of outputs, relative to the largest, that counts as rounding; or so many roundings
CLOSE, ROUNDINGS = 1e-3, 16
WRITING = "a clip writes into what other code reads; give it inplace=False"
CLIPS: tuple[Callable[..., Any], ...] = (nn.Hardtanh.forward, nn.ReLU6.forward)
Shape = tuple[int, ...]


class LiftedClip(nn.Module):
    """``min(max(x, low), high)`` with a bound for every unit, a pair for each place of a call."""

    def __init__(self, bounds: tuple[float, float], shapes: Sequence[Shape], like: Tensor) -> None:
        super().__init__()

        def filled(value: float) -> nn.ParameterList:
            wanted = shapes if value != 0 and math.isfinite(value) else ()
            own = (like.detach().new_full(shape, value) for shape in wanted)
            return nn.ParameterList(nn.Parameter(each, requires_grad=False) for each in own)

        self.bounds, self.places, self.calls = bounds, len(shapes), 0
        self.low, self.high = map(filled, bounds)

    def forward(self, x: Tensor) -> Tensor:
        """Clip at the bounds of this place."""
        place = self.calls
        if self.places > 1:
            if place >= self.places:
                raise InputError(
                    f"A lifted clip was called {place + 1} times in one forward pass of its module,"
                    f" expected at most {self.places} as with the example inputs; lift the clips of"
                    " the original model again, with typical inputs."
                )
            self.calls += 1
        if self.bounds[0] == 0:
            x = torch.relu(x)
        elif len(self.low):
            x = torch.maximum(x, self.low[place].to(x.dtype))
        if self.bounds[1] == 0:
            return -torch.relu(-x)
        return torch.minimum(x, self.high[place].to(x.dtype)) if len(self.high) else x


def _start(model: nn.Module, _args: Any) -> None:
    """Reset the counters of all clips when a forward pass of the whole model starts."""
    for module in model.modules():
        if isinstance(module, LiftedClip):
            module.calls = 0


class _Marks(Scales):
    """Scales that remember what came to each ReLU, which stands in place of a clip."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.met = defaultdict[str, list[Tensor]](list)

    def apply(self, rule: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """What a rule makes of an operation."""
        result = super().apply(rule, args, kwargs)
        if self.place.op == "aten.relu":
            self.met[self.place.module].append(result)
        return result


def lift_clips(model: nn.Module, *args: Any, kwargs: Mapping[str, Any] | None = None) -> nn.Module:
    """The same function with clips whose bounds are rescaled with the gauge.

    ``clip(s x, s low, s high) = s clip(x, low, high)``: a constant bound fixes the scale of
    everything that is clipped; as a parameter, one for each unit, it is an edge from the root like
    a bias. All ``nn.ReLU6`` and ``nn.Hardtanh`` modules are replaced, on a copy; the bounds are
    parameters without gradient, ``NAME.low.0`` and ``NAME.high.0`` in the state dict (load
    checkpoints of the model before). Calls of functions (``F.relu6``, ``torch.clamp``) are not
    replaced, and are still listed in ``graph.pinned``.

    Args:
        model: any module; it does not change.
        *args: example inputs; without them, images or vectors for the first layer are tried.
        kwargs: example inputs by keyword.

    Returns:
        The copy.

    Raises:
        InputError: there is nothing to lift, or example inputs are needed.
        UnsupportedError: the outputs would change: a clip writes into what other code reads.
        CaptureError: the model fails on these inputs or cannot be captured.

    Example:
        >>> import torch, pathspace as ps
        >>> from torch.nn import Linear, ReLU6, Sequential
        >>> model, x = Sequential(Linear(3, 4), ReLU6(), Linear(4, 2)), torch.randn(5, 3)
        >>> lifted = ps.lift_clips(model)
        >>> [ps.trace(each, x).num_units for each in (model, lifted)]
        [0, 4]
        >>> torch.equal(model(x), lifted(x))
        True
    """
    expect_arguments("lift_clips", model=model)
    twin, result = safe_deepcopy(model, share_tensors=True), safe_deepcopy(model)
    names = _names(twin)
    if not names or names == [""]:
        raise InputError(
            "lift_clips found no nn.ReLU6 or nn.Hardtanh within the model, expected one at least;"
            " write calls of F.relu6, F.hardtanh or torch.clamp as such modules."
        )
    for name in names:
        twin.set_submodule(name, nn.ReLU())
    captured, inputs, by_name = capture_examples("lift_clips", twin, args, kwargs)
    marks, _ = interpret(captured, _Marks)
    classes = torch.from_numpy(marks.equations.resolve().classes)
    like = next((p for p in model.parameters() if p.is_floating_point()), torch.empty(0))
    for name in names:
        clip: Any = result.get_submodule(name)
        shapes = [_shape(ids, classes) for ids in marks.met[name]]
        bounds = float(clip.min_val), float(clip.max_val)
        result.set_submodule(name, LiftedClip(bounds, shapes or [()], like))
    if any(isinstance(module, LiftedClip) and module.places > 1 for module in result.modules()):
        result.register_forward_pre_hook(_start)
    expect_same("lift_clips", model, result, inputs, by_name, WRITING)
    return result


def _names(model: nn.Module) -> list[str]:
    # (each place once, though a module that holds it may have several names)
    found: dict[tuple[int, str], str] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if type(module).forward in CLIPS and not has_hooks(module):
            owner, _, last = name.rpartition(".")
            found.setdefault((id(model.get_submodule(owner)), last), name)
    return list(found.values())


def expect_same(
    owner: str,
    model: nn.Module,
    result: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    reason: str,
) -> None:
    """Compare the outputs of a model and its copy twice, from copies: it may write into buffers."""
    if names_without_values((*model.named_parameters(), *model.named_buffers())):
        return
    pair = safe_deepcopy(model), safe_deepcopy(result)
    for _ in range(2):
        try:
            wanted, found = (outputs(net, args, kwargs, seed=0) for net in pair)
        except Exception as error:
            wrong = f"made a {type(result).__name__} that does not run ({first_line(error)})"
        else:
            eps = [torch.finfo(o.dtype).eps for o in wanted if o.is_floating_point()]
            far = distance(found, wanted)
            if far <= max(CLOSE, ROUNDINGS * max(eps, default=0)):
                continue
            wrong = f"changed the outputs by {far:.1e} of the largest"
        raise UnsupportedError(f"{owner} {wrong}, expected the same function: {reason}.")


def _shape(ids: Tensor, classes: Tensor) -> Shape:
    """Shape of bounds: the sizes of dimensions along which scales differ, 1 elsewhere."""
    few = distinct(ids)
    solved = torch.where(few == NEUTRAL, NEUTRAL, lookup(classes, few))
    shape = tuple(distinct(compress(solved)).shape)
    while shape and shape[0] == 1:
        shape = shape[1:]
    return shape


def capture_examples(
    owner: str, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None
) -> tuple[Captured, tuple[Any, ...], Mapping[str, Any]]:
    """Capture a model on example inputs, or on the first made-up ones that it takes."""
    if args or kwargs:
        return capture(model, args, kwargs), args, kwargs or {}
    for x in _example_inputs(model):
        with torch_kept(0):
            some = (torch.randn_like(x) if x.is_floating_point() else x,)
        with suppress(PathspaceError):
            return capture(model, some), some, {}
    raise InputError(
        f"{owner} cannot make inputs for this model; pass examples: ps.{owner}(model, *inputs)."
    )


def _example_inputs(model: nn.Module) -> list[Tensor]:
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d) and isinstance(weight, Tensor):
            rank = weight.dim() - 2
            return [weight.new_zeros(2, module.in_channels, *[size] * rank) for size in SIZES]
        if isinstance(module, nn.Linear):
            return [module.weight.new_zeros(2, module.in_features)]
        if isinstance(module, nn.Embedding):
            return [module.weight.new_zeros(2, 16, dtype=torch.long)]
    return []
