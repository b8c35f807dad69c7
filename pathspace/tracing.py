"""Tracing: capture a model, interpret the captured graph, solve for its units, and
build the reduction graph.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from torch import Tensor, nn

from .capture.aliasing import storage_of
from .capture.capture import ONE_AT_A_TIME, capture
from .capture.captured import Captured
from .capture.sizes import GROWTHS, recapture, sentence, thin
from .errors import InputError
from .graph.parts import Pin, owner
from .graph.structure import Structure
from .inference.build import build_graph, ends_of, unused_in_part
from .inference.interpreter import interpret
from .inference.relations import Relations
from .inference.units import Scales
from .models.inputs import arranged, describe_inputs
from .models.values import on_cpu
from .models.walk import every_path, unregistered_modules
from .reduction import ReductionGraph


def trace(
    model: nn.Module,
    *args: Any,
    kwargs: Mapping[str, Any] | None = None,
    norm_eps: str = "ignore",
    strict: bool = False,
    sizes: str = "any",
    affine: bool = True,
) -> ReductionGraph:
    """Build the reduction graph of a model, without changing it.

    Edges and dimension are those of the model at the sizes of the example inputs. The scales are
    free at all sizes at which the model runs the same operations with the same constants. Where the
    example does not decide this (parts of parameters are not used, or a sequence has length 1), the
    model is captured once more at larger sizes, if it runs there, and only scales that are free at
    both are kept. :attr:`ReductionGraph.range` says what was captured.

    Args:
        model: any module; it is analysed in its current mode (train or eval). Its tensors, and the
            inputs, need no values (meta device, fake mode, :func:`pathspace.without_weights`):
            weights then count as not 0.
        *args: example inputs, positional.
        kwargs: example inputs by keyword.
        norm_eps: ``"ignore"`` treats normalisation layers as exactly scale-free,
            ``"respect"`` pins their inputs.
        strict: raise an error for an operation without a rule that fixes a scale, instead of
            listing it in ``graph.pinned``.
        sizes: ``"any"``, or ``"given"`` for the scales of the model on
            inputs of exactly these sizes.
        affine: let ``w + c`` have a free scale if a model adds a constant ``c`` to a whole
            parameter, as norms that multiply by ``1 + weight`` do; ``False`` pins such parameters
            (optimizers on path values need this).

    Returns:
        The reduction graph.

    Raises:
        CaptureError: the model fails on these inputs or cannot be captured.
        InputError: unknown ``norm_eps`` or ``sizes``.
        UnsupportedError: ``strict`` and an operation has no rule.

    Example:
        >>> import torch, pathspace as ps
        >>> from torch.nn import AdaptiveAvgPool2d, Conv2d, Flatten, Linear, ReLU, Sequential
        >>> model = Sequential(
        ...     Conv2d(3, 8, 3), ReLU(), AdaptiveAvgPool2d(1), Flatten(), Linear(8, 2)
        ... )
        >>> ps.trace(model, torch.randn(1, 3, 9, 9)).num_units  # channels are units
        8
    """
    if norm_eps not in ("ignore", "respect"):
        raise InputError(f"trace found norm_eps={norm_eps!r}, expected 'ignore' or 'respect'.")
    if sizes not in ("any", "given"):
        raise InputError(f"trace found sizes={sizes!r}, expected 'any' or 'given'.")
    with ONE_AT_A_TIME:
        return _traced(model, args, kwargs, norm_eps, strict, sizes, affine)


def _traced(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None,
    norm_eps: str,
    strict: bool,
    sizes: str,
    affine: bool,
) -> ReductionGraph:
    """See :func:`trace`."""
    captured = capture(model, args, kwargs)
    _warn_of_unregistered(model, captured.constants.values())
    inputs = arranged(model, args, kwargs)
    with on_cpu():
        scales, _ = interpret(captured, Scales, strict, norm_eps, affine)
        if sizes == "given":
            stated = f"inputs ({describe_inputs(*inputs)}) only"
            return _graph(model, build_graph(captured, scales, norm_eps), stated)
        before, raw = _Interpretation.of(scales), ends_of(scales)
        unused = unused_in_part(captured, scales, raw)
        undecided = unused or thin(captured, inputs)
    for growth in GROWTHS if undecided else ():
        again = recapture(model, inputs, not unused, growth)
        if again is None:
            break
        try:
            with on_cpu():
                uses = before.again(scales, again[0], norm_eps)
                found = build_graph(captured, scales, norm_eps, uses)
        except IndexError:
            # a table has no rows for such long inputs
            with on_cpu():
                scales, _ = interpret(captured, Scales, strict, norm_eps, affine)
                before, raw = _Interpretation.of(scales), ends_of(scales)
            continue
        return _graph(model, found, sentence(inputs, again[1], undecided))
    with on_cpu():
        found = build_graph(captured, scales, norm_eps, raw=raw)
    return _graph(model, found, sentence(inputs, None, undecided))


@dataclass(frozen=True)
class _Interpretation:
    """The state of an interpretation that :func:`pathspace.inference.build.build_graph` changes.

    Attributes:
        equations: equations between scales.
        approximate: scales that are free only at ``eps = 0``.
        pins: operations that fix scales.
    """

    equations: Relations
    approximate: tuple[Tensor, ...]
    pins: tuple[Pin, ...]

    @classmethod
    def of(cls, scales: Scales) -> _Interpretation:
        """The state of an interpretation after its run."""
        return cls(scales.equations.copy(), tuple(scales.approximate), tuple(scales.pins))

    def again(self, scales: Scales, captured: Captured, norm_eps: str) -> int:
        """Restore an interpretation, and continue it with another capture of the model.

        Args:
            scales: the interpretation of this snapshot.
            captured: the same model, captured at other sizes.
            norm_eps: as in the first run.

        Returns:
            Number of uses of weights in the first run.

        Raises:
            IndexError: known positions are beyond the end of a table.
        """
        # (an end that was looked at may have changed the equations)
        scales.equations, scales.approximate = self.equations, list(self.approximate)
        scales.pins, uses = list(self.pins), len(scales.flows.uses)
        scales.enlarged = True
        interpret(captured, lambda *_: scales, norm_eps=norm_eps, affine=scales.affine)
        known = {(pin.op, pin.module, pin.source, pin.reason) for pin in self.pins}
        new = [
            p
            for p in scales.pins[len(self.pins) :]
            if (p.op, p.module, p.source, p.reason) not in known
        ]
        scales.pins = [*self.pins, *new]
        return uses


def _warn_of_unregistered(model: nn.Module, constants: Iterable[Tensor]) -> None:
    """Warn where the graph reads parameters that ``model.parameters()`` leaves out."""
    read = {memory for each in constants if (memory := storage_of(each))}
    modules = unregistered_modules(model) if read else {}
    places = [
        place
        for place, module in modules.items()
        if any(storage_of(p) in read for p in module._parameters.values() if p is not None)
    ]
    if places:
        warnings.warn(
            f"{type(model).__name__} holds modules where torch does not register them:"
            f" {', '.join(places[:3])}{' and others' * (len(places) > 3)}; their parameters"
            " count as constants, and no optimizer trains them: put them into nn.ModuleList or"
            " nn.ModuleDict.",
            stacklevel=4,
        )


def _graph(model: nn.Module, found: Structure, stated: str) -> ReductionGraph:
    """The structure as a public reduction graph, with its input sizes in words."""
    held = {field.name: getattr(found, field.name) for field in fields(found)}
    every = dict(every_path(model))
    statistics = [name for entry in found.statistics for name in entry.names]
    held_by = map(owner, [*found.captured.parameters, *statistics])
    modules = {path: every[path] for path in held_by if path in every}
    return ReductionGraph(**{**held, "range": stated, "modules": modules})
