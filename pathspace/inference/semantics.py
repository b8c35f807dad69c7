"""The few things an operation can do to scales and paths.

Every rule is written in these primitives, once. Two interpretations give them meaning:
:class:`~pathspace.inference.units.Scales` (who shares a
scale with whom: the reduction graph) and :class:`~pathspace.inference.unrolled.Unrolled` (the network unrolled over
    time and depth, for path enumeration).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from pathspace.inference.values import NEUTRAL, ROOT, Value, Weight, constant, distinct, move
from pathspace.structure import Pin


@dataclass
class Place:
    """Where the interpreter stands.

    Attributes:
        op: the operation.
        module: path of its module.
        source: file and line.
        result: its real result (a fake tensor: shape and dtype).
        node: its node in the graph.
        run: which run of which graph this is: a node has one value in each.
    """

    op: str = ""
    module: str = ""
    source: str = ""
    result: Any = None
    node: fx.Node | None = None
    run: int = 0


class Semantics(ABC):
    """One meaning of the primitives.

    Args:
        offsets: parameter name -> position of its first scalar in the numbering of all scalars.
        shapes: parameter name -> shape.
    """

    # whether elements at the border of a padded tensor may be treated like those inside
    uniform = True

    def __init__(self, offsets: dict[str, int], shapes: dict[str, tuple[int, ...]]) -> None:
        self.offsets = offsets
        self.shapes = shapes
        self.pins: list[Pin] = []
        self.pinned_parameters: dict[str, Pin] = {}
        self.place = Place()
        # how many graphs and regions have been run
        self.runs = 0
        self.exact_norms = False
        # placeholder -> (kind, name)
        self.sources: Mapping[str, tuple[str, str]] = {}
        # nodes whose small constant was taken for the eps of a normalisation written out by hand; what it is added to
        self.negligible: list[str] = []
        # the same as source lines and constants
        self.folded_eps: list[tuple[str, float]] = []
        self.approximate: list[Tensor] = []
        # name of a virtual weight -> the parameter that data picks its rows from
        self.virtual: dict[str, str] = {}
        # the captured graph itself, without the regions in it; whether constants added to parameters are followed
        self.graph: fx.Graph | None = None
        self.affine = True

    # -- what the two interpretations define -------------------------------------------------------------------

    @abstractmethod
    def join(self, *values: Value) -> Tensor:
        """A positively homogeneous combination (sum, maximum, choice) of elements that must share one scale."""

    @abstractmethod
    def reduce(self, value: Value, dims: Iterable[int], keepdim: bool = False) -> Tensor:
        """A positively homogeneous reduction (sum, mean, maximum) over dimensions."""

    @abstractmethod
    def contract(self, weight: Weight, value: Value, dims: Sequence[int]) -> Tensor:
        """``sum over dims of weight * value``, both broadcast against each other: each scalar weight is an edge."""

    @abstractmethod
    def attach(self, weight: Weight) -> Tensor:
        """A parameter used as an activation: each scalar is an edge from the root."""

    @abstractmethod
    def fix(self, value: Tensor) -> None:
        """Fix the scale of every element."""

    @abstractmethod
    def product(self, *factors: tuple[int, Tensor]) -> Tensor:
        """A product of powers of activations, elementwise: log-scales add up."""

    @abstractmethod
    def root(self, value: Tensor, degree: int) -> Tensor:
        """A root of an activation, elementwise: its log-scale is divided."""

    @abstractmethod
    def cut(self, value: Value, dims: Sequence[int], exact: bool = False) -> Tensor:
        """Normalise over ``dims``: elements there share one scale, which does not pass through.

        Args:
            value: what is normalised.
            dims: over which dimensions.
            exact: whether that is so with the ``eps`` of the normalisation, too.
        """

    @abstractmethod
    def observe(self, value: Tensor) -> Tensor:
        """Elements are looked at by something that feels no positive scale: a sign, a comparison, a direction."""

    def opaque(self, values: Sequence[Value], reason: str, dims: Sequence[int] = ()) -> Tensor:
        """A function that is not homogeneous: elementwise, but for ``dims``, along which it mixes elements.

        Args:
            values: its operands, broadcast against each other.
            reason: why it is not, for the record; ``""`` keeps it off the record.
            dims: dimensions of the result.
        """
        if reason:
            self.pin(values, reason)
        else:
            for value in values:
                self.fix(self.activation(value))
        return constant(torch.broadcast_shapes(*(value.shape for value in values)))

    def regrouped(self, value: Value, runs: Sequence[range]) -> None:  # noqa: B027
        """One dimension became several (``runs`` of dimensions of ``value``); only channels care."""

    def given(self, kind: str, name: str, shape: Sequence[int]) -> Tensor:
        """A tensor that comes from outside: an ``"input"``, or a ``"buffer"``."""
        return constant(shape)

    def deferred(self, value: Tensor, exponent: int) -> Tensor | None:
        """A power, as the result of the operation itself, whose scale may wait until it is used; ``None`` if not."""
        return None

    def compact(self, value: Tensor) -> Tensor:
        """The same ids with as few different ones as is known by now."""
        return value

    @abstractmethod
    def steps(self, length: int) -> int:
        """How many steps of a recurrent operation over ``length`` steps have to be looked at."""

    def statistics_of(self, mean: str, var: str, channels: Tensor, eps: float, frozen: bool) -> None:  # noqa: B027
        """Running statistics (names of buffers) of channels (dimension 0), rescaled with them; only scales care."""

    def read(self, buffer: str) -> None:  # noqa: B027
        """A buffer is used as data, so that nothing may rescale it; only scales care."""

    @abstractmethod
    def loop(self, weight: Weight, value: Tensor) -> Tensor:
        """``value + weight * value``: an edge from every element to itself, whatever its scale."""

    @abstractmethod
    def gathered(self, weight: Weight, rows: Sequence[int], node: object) -> Weight | None:
        """Rows of a table (dimension 0 of ``weight``) at positions that data decides.

        Args:
            weight: the table.
            rows: shape of the index.
            node: what made the index: two tables read with one index are read in the same rows.

        Returns:
            A weight of shape ``rows + weight.shape[1:]``, or ``None`` where all rows are to be taken as one.
        """

    # -- shared by both ----------------------------------------------------------------------------------------

    def activation(self, value: Any) -> Tensor:
        """Anything as an activation: parameters are attached, numbers are fixed scales (zero has any scale)."""
        if isinstance(value, Weight):
            ids = self.attach(value.unmasked())
            return ids if value.kept is None else torch.where(value.kept, ids, NEUTRAL)
        if isinstance(value, Tensor):
            return value
        neutral = (
            isinstance(value, int | float) and not isinstance(value, bool) and value in (0, float("inf"), -float("inf"))
        )
        return constant((), NEUTRAL if neutral else ROOT)

    def moved(self, function: Callable[[Tensor], Tensor], value: Value) -> Value:
        """A movement of data, run on the ids."""
        return value.moved(function, self.offsets) if isinstance(value, Weight) else move(function, value)

    def pin(self, values: Iterable[Value], reason: str) -> None:
        """Fix the scale of every operand and put the operation on record if that costs anything."""
        elements, parameters = 0, []
        for value in values:
            if isinstance(value, Weight):
                parameters += [self.virtual.get(name, name) for name in self.parameters_of(value)]
            else:
                free = distinct(value)
                elements += int(((free != ROOT) & (free != NEUTRAL)).sum())
                self.fix(value)
        if elements or parameters:
            names = tuple(dict.fromkeys(parameters))
            pin = Pin(self.place.op, self.place.module, self.place.source, reason, elements, names)
            self.pins.append(pin)
            for name in names:
                self.pinned_parameters.setdefault(name, pin)

    def parameters_of(self, weight: Weight) -> list[str]:
        """Names of the parameters a view draws from."""
        if weight.name is not None:
            return [weight.name]
        names = [name for name in self.offsets if torch.Size(self.shapes[name]).numel()]
        names.sort(key=self.offsets.__getitem__)
        index = distinct(weight.index).reshape(-1)
        starts = torch.tensor([self.offsets[name] for name in names])
        # exact zeros in a computed weight have no place, which is below all others
        last = self.offsets[names[-1]] + torch.Size(self.shapes[names[-1]]).numel()
        which = torch.bucketize(index[(index >= starts[0]) & (index < last)], starts, right=True) - 1
        met = torch.bincount(which, minlength=len(names))
        return [name for name, count in zip(names, met.tolist(), strict=True) if count]
