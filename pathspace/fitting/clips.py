"""Clips whose bounds are rescaled with the gauge: ReLU6 and Hardtanh with one bound per
unit in place of a constant.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from ..errors import InputError, UnsupportedError, expect_arguments, first_line
from ..models.copies import safe_deepcopy
from ..models.refusals import check_runs
from ..models.running import distance, outputs
from ..models.values import names_without_values, require_runnable
from ..models.walk import every_module, has_hooks

# largest change of outputs, relative to the largest, that counts as rounding; or so many roundings
CLOSE, ROUNDINGS = 1e-3, 16
WRITING = "a clip writes into what other code reads; give it inplace=False"
CLIPS: tuple[Callable[..., Any], ...] = (nn.Hardtanh.forward, nn.ReLU6.forward)


class LiftedClip(nn.Module):
    """``min(max(x, low), high)`` with a bound for every unit, a pair for each place of a call."""

    def __init__(
        self, low: float, high: float, shapes: list[tuple[int, ...]], like: Tensor
    ) -> None:
        super().__init__()

        def filled(value: float) -> nn.ParameterList:
            wanted = shapes if value != 0 and abs(value) != float("inf") else []
            return nn.ParameterList(
                nn.Parameter(
                    torch.full(shape, value, dtype=like.dtype, device=like.device),
                    requires_grad=False,
                )
                for shape in wanted
            )

        self.bounds = (float(low), float(high))
        self.low, self.high, self.places, self.calls = filled(low), filled(high), len(shapes), 0

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


class _Places(nn.Module):
    """Stands in place of a clip, and remembers the shapes that bounds have along its features."""

    def __init__(self, clip: nn.Module, layers: list[nn.Linear | _ConvNd]) -> None:
        super().__init__()
        self.clip, self.shapes = clip, list[tuple[int, ...]]()
        self._layers = layers

    def forward(self, x: Tensor) -> Tensor:
        along = 1 - self._layers[-1].weight.dim() if self._layers else -1
        along = along if x.dim() + along >= 0 else -1
        self.shapes.append((*x.shape[along:][:1], *[1] * (-1 - along)))
        result: Tensor = self.clip(x)
        return result


def lift_clips(model: nn.Module, *args: Any, kwargs: Mapping[str, Any] | None = None) -> nn.Module:
    """The same function with clips whose bounds are rescaled with the gauge.

    ``clip(s x, s low, s high) = s clip(x, low, high)``: a constant bound fixes the scale of
    everything that is clipped; as a parameter, one for each unit, it is an edge from the root like
    a bias. Units lie along the features of the linear layer or convolution that ran before the
    clip. All ``nn.ReLU6`` and ``nn.Hardtanh`` modules are replaced, on a copy; the bounds are
    parameters without gradient, ``NAME.low.0`` and ``NAME.high.0`` in the state dict (load
    checkpoints of the model before). Calls of functions (``F.relu6``, ``torch.clamp``) are not
    replaced, and are still listed in ``graph.pinned``.

    Args:
        model: any module; it does not change.
        *args: example inputs.
        kwargs: example inputs by keyword.

    Raises:
        InputError: there is nothing to lift, or weights have no values.
        UnsupportedError: the outputs would change: a clip writes into what other code reads.
        CaptureError: the model fails on these inputs.

    Example:
        >>> import torch, pathspace as ps
        >>> model = torch.nn.Sequential(
        ...     torch.nn.Linear(3, 4), torch.nn.ReLU6(), torch.nn.Linear(4, 2)
        ... )
        >>> x = torch.randn(5, 3)
        >>> lifted = ps.lift_clips(model, x)
        >>> (
        ...     ps.trace(model, x).num_units,
        ...     ps.trace(lifted, x).num_units,
        ...     torch.equal(model(x), lifted(x)),
        ... )
        (0, 4, True)
    """
    expect_arguments("lift_clips", model=model)
    twin, result = safe_deepcopy(model), safe_deepcopy(model)
    names = _names(twin)
    if not names or names == [""]:
        raise InputError(
            "lift_clips found no nn.ReLU6 or nn.Hardtanh within the model, expected one at least;"
            " write calls of F.relu6, F.hardtanh or torch.clamp as such modules."
        )
    require_runnable("lift_clips", (*model.named_parameters(), *model.named_buffers()))
    layers: list[nn.Linear | _ConvNd] = []
    for layer in every_module(twin):
        if isinstance(layer, nn.Linear | _ConvNd):
            layer.register_forward_hook(lambda module, *_: layers.append(module))
    clips: dict[str, Any] = {name: twin.get_submodule(name) for name in names}
    places = {name: _Places(clip, layers) for name, clip in clips.items()}
    for name, place in places.items():
        twin.set_submodule(name, place)
    check_runs(model, args, kwargs or {}, twin)
    like = next((p for p in model.parameters() if p.is_floating_point()), torch.empty(0))
    for name, clip in clips.items():
        shapes = places[name].shapes or [()]
        result.set_submodule(name, LiftedClip(clip.min_val, clip.max_val, shapes, like))
    if any(isinstance(module, LiftedClip) and module.places > 1 for module in result.modules()):
        result.register_forward_pre_hook(_start)
    expect_same("lift_clips", model, result, args, kwargs or {}, WRITING)
    return result


def _names(model: nn.Module) -> list[str]:
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
            raise UnsupportedError(
                f"{owner} made a {type(result).__name__} that does not run ({first_line(error)}),"
                f" expected the same function: {reason}."
            ) from error
        rounding = max(
            (torch.finfo(o.dtype).eps for o in wanted if o.is_floating_point()), default=0
        )
        if (far := distance(found, wanted)) > max(CLOSE, ROUNDINGS * rounding):
            raise UnsupportedError(
                f"{owner} changed the outputs by {far:.1e} of the largest, expected the same"
                f" function: {reason}."
            )
