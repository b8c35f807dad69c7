"""The front door: from a model to its reduction graph, and what a graph can be asked for."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from .capture.aliasing import storage_of
from .capture.capture import ONE_AT_A_TIME, capture
from .capture.captured import Captured
from .capture.sizes import GROWTHS, recapture, sentence, thin
from .errors import InputError
from .graph.parts import owner
from .graph.structure import LOG_2, Structure
from .inference.assemble import Ends
from .inference.interpreter import interpret
from .inference.reasons import Reason, reasons
from .inference.scales import Scales
from .inference.units import build_graph, ends_of, tells_positions_apart, unused_in_part
from .inference.unrolled import unroll
from .models.inputs import arranged, describe_inputs
from .models.values import on_cpu
from .models.walk import every_path, unregistered_modules
from .paths.basis import Path
from .paths.norms import path_norm
from .paths.skeleton import Skeleton, choose
from .shown import Shown, text_table

if TYPE_CHECKING:
    from rich.table import Table


# powers of random scales stay within 2^-64 and 2^64
MOST_POWER = 64


class ReductionGraph(Shown, Structure):
    """The reduction graph with its public methods."""

    __doc__ = Structure.__doc__

    def skeleton(self, rule: str = "modulo", seed: int = 0) -> Skeleton:
        """Choose two spanning trees; see :func:`pathspace.paths.skeleton.choose`."""
        return choose(self, rule=rule, seed=seed)

    def paths(self, max_steps: int | None = None) -> Iterator[Path]:
        """Iterate over the network's paths (Definition 1), with recurrent layers unrolled.

        Args:
            max_steps: largest number of recurrent steps to unroll; by default the
                length of the example input.

        Yields:
            Paths with their counting vectors; each sequence of weights once.

        Raises:
            UnsupportedError: the unrolled network is too large to enumerate.

        Example:
            >>> import torch, pathspace as ps
            >>> rnn = torch.nn.RNN(1, 1, nonlinearity="relu", bias=False)
            >>> graph = ps.trace(rnn, torch.randn(3, 1, 1))
            >>> [str(path) for path in graph.paths()]
            ['weight_ih_l0[0,0]', 'weight_ih_l0[0,0] weight_hh_l0[0,0]', 'weight_ih_l0[0,0] weight_hh_l0[0,0]^2']
        """  # noqa: E501
        unrolled = unroll(self, max_steps)
        for walk in unrolled.walks():
            yield Path.from_edges(self, unrolled.edges(walk))

    def reasons(self) -> tuple[Reason, ...]:
        """For every fixed scale, the shortest chain of operations to the root."""
        return reasons(self)

    def path_norm(
        self,
        p: float = 1,
        log: bool = False,
        batch_dim: int | None = 0,
        until: str | None = None,
        bound: bool = False,
    ) -> float:
        """``(sum over paths |v|^p)^(1/p)``, or its logarithm; see :func:`pathspace.path_norm`."""
        return path_norm(self, p, log, batch_dim, until=until, bound=bound)

    def random_powers(self, seed: int, largest: int = 12) -> Tensor:
        """Log-scales of random powers of two between ``2^-largest`` and ``2^largest``, which no
        type has to round.

        Scales of which weights meet high powers are drawn so much closer to 1 that these powers
        stay below ``2^64``: by fractional powers of two, where nothing else is left.

        Args:
            seed: seed of the draws.
            largest: the largest exponent of two.

        Returns:
            The log-scales, shape ``(num_units,)``.

        Example:
            >>> import torch, pathspace as ps
            >>> model = torch.nn.Sequential(
            ...     torch.nn.Linear(2, 3), torch.nn.ReLU(), torch.nn.Linear(3, 1)
            ... )
            >>> phi = ps.trace(model, torch.randn(1, 2)).random_powers(seed=0, largest=2)
            >>> len(phi), bool(phi.exp().log2().abs().max() <= 2)
            (3, True)
        """
        generator = torch.Generator().manual_seed(seed)
        units = (self.num_units,)
        exponents = torch.randint(-largest, largest + 1, units, generator=generator).double()
        if self.forms.shape[0]:
            sizes = abs(self.forms.astype(np.float64))
            # what the most demanding of the products that a unit takes part in allows it
            most = np.ones(self.num_units)
            np.maximum.at(most, sizes.indices, np.repeat(sizes.sum(1), np.diff(sizes.indptr)))
            room = torch.from_numpy(MOST_POWER / most)
            fraction = 2 * torch.rand(units, generator=generator, dtype=torch.float64) - 1
            closer = (fraction * (room.floor() + 0.5)).round()
            closer = torch.where(room < 1, fraction * room, closer)
            exponents = torch.where(room < largest, closer, exponents)
        return exponents * LOG_2

    def __rich__(self) -> Table:
        pins = Counter(pin.op for pin in self.pinned)
        words = [f"{op} ({count})" if count > 1 else op for op, count in pins.most_common(4)]
        words += ["..."] * (len(pins) > 4)
        exact = f"free scales; {self.num_exact_units:,} exact, every eps included"
        rows = (
            ("weights", f"{self.num_weights:,}", f"in {len(self.blocks)} tensors"),
            ("units", f"{self.num_units:,}", exact),
            ("dimension", f"{self.dimension:,}", "independent path values: weights less units"),
            ("pins", f"{len(self.pinned):,}", ", ".join(words)),
            ("next", "", "graph.skeleton(), ps.verify(model, x), ps.explain(model, x)"),
        )
        return text_table("Reduction graph", ("", "", ""), rows, right=(1,))


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
        captured = capture(model, args, kwargs)
        _warn_of_unregistered(model, captured.constants.values())
        inputs = arranged(model, args, kwargs)

        def interpreted() -> Scales:
            return interpret(captured, Scales, strict, norm_eps, affine)[0]

        with on_cpu():
            scales = interpreted()
            if sizes == "given":
                stated = f"inputs ({describe_inputs(*inputs)}) only"
                return _graph(model, build_graph(captured, scales, norm_eps), stated)
            # (a look at the ends adds equations)
            looked = scales.copy()
            raw: dict[str, Ends] | None = ends_of(looked)
            unused = unused_in_part(captured, looked, raw or {})
            undecided = unused or thin(captured, inputs)
            first = None if undecided else build_graph(captured, looked, norm_eps, raw=raw)
            apart = first is not None and tells_positions_apart(first)
        undecided = undecided or apart
        for growth in GROWTHS if undecided else ():
            again = recapture(model, inputs, not (unused or apart), growth)
            if again is None:
                break
            try:
                with on_cpu():
                    uses = _continued(scales, again[0], norm_eps)
                    found = build_graph(captured, scales, norm_eps, uses)
            except IndexError:
                # a table has no rows for such long inputs
                with on_cpu():
                    looked, raw = interpreted(), None
                scales = looked
                continue
            return _graph(model, found, sentence(inputs, again[1], undecided))
        if first is None:
            with on_cpu():
                first = build_graph(captured, looked, norm_eps, raw=raw)
        return _graph(model, first, sentence(inputs, None, undecided))


def _continued(scales: Scales, captured: Captured, norm_eps: str) -> int:
    """Continue an interpretation with another capture of the model, at other sizes, whose known
    positions may be beyond the end of a table (IndexError); the number of uses of weights before.
    """
    before, uses = scales.pins, len(scales.flows.uses)
    scales.pins, scales.enlarged = list(before), True
    interpret(captured, lambda *_: scales, norm_eps=norm_eps, affine=scales.affine)
    known = {(pin.op, pin.module, pin.source, pin.reason) for pin in before}
    new = [
        pin
        for pin in scales.pins[len(before) :]
        if (pin.op, pin.module, pin.source, pin.reason) not in known
    ]
    scales.pins = [*before, *new]
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
            stacklevel=3,
        )


def _graph(model: nn.Module, found: Structure, stated: str) -> ReductionGraph:
    """The structure as a public reduction graph, with its input sizes in words."""
    held = {field.name: getattr(found, field.name) for field in fields(found)}
    every = dict(every_path(model))
    statistics = [name for entry in found.statistics for name in entry.names]
    held_by = map(owner, [*found.captured.parameters, *statistics])
    modules = {path: every[path] for path in held_by if path in every}
    return ReductionGraph(**{**held, "range": stated, "modules": modules})
