"""The primitives in which all rules are written.

Every rule is written once in these primitives. Three interpretations define them:
:class:`~pathspace.inference.scales.Scales` (which elements share a scale: the reduction graph),
:class:`~pathspace.inference.unrolled.Unrolled` (the network unrolled over time and depth, for path
enumeration) and :class:`~pathspace.inference.channels.Channels` (which elements form one channel).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import prod
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from ..graph.parts import Pin
from .registry import facts_of
from .values import (
    NEUTRAL,
    ROOT,
    Value,
    Weight,
    broadcast_shape,
    constant,
    distinct,
    move,
    shape_of,
)

# the most steps of a recurrent operation whose states may all have scales of their own
FEW_STEPS = 8


@dataclass
class Place:
    """The operation that the interpreter is processing, and its result as a fake tensor.

    ``run`` is the number of the current run of a graph; a node has one value in each run.
    """

    op: str = ""
    module: str = ""
    source: str = ""
    result: Any = None
    node: fx.Node | None = None
    run: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the result."""
        return shape_of(self.result)


class Semantics(ABC):
    """An interpretation of the primitives; ``offsets`` number all scalars of the parameters."""

    # whether elements at the border of a padded tensor are treated like those inside
    uniform = True

    def __init__(self, offsets: dict[str, int], shapes: dict[str, tuple[int, ...]]) -> None:
        self.offsets = offsets
        self.shapes = shapes
        self.pins: list[Pin] = []
        self.pinned_parameters: dict[str, Pin] = {}
        self.place = Place()
        # number of graphs and regions run so far
        self.runs = 0
        # whether the inputs are larger than the examples, so that tables may end before them
        self.enlarged = False
        self.exact_norms = False
        # placeholder -> (kind, name)
        self.sources: Mapping[str, tuple[str, str]] = {}
        # names of nodes to which the eps of a normalisation written out by hand is added
        self.negligible: list[str] = []
        # the same as source lines and constants
        self.folded_eps: list[tuple[str, float]] = []
        self.approximate: list[Tensor] = []
        # name of a virtual weight -> the parameter that data picks its rows from
        self.virtual: dict[str, str] = {}
        # the captured graph without its regions; whether the sum of a parameter and a
        # constant can have a free scale
        self.graph: fx.Graph | None = None
        self.affine = True

    # -- defined by each interpretation

    @abstractmethod
    def join(self, *values: Value) -> Tensor:
        """A positively homogeneous combination (sum, maximum, choice) of elements
        that must share one scale.
        """

    def merged(self, ids: Tensor, dims: Sequence[int]) -> Tensor:
        """What a reduction over dimensions, which are not empty, leaves at their first places."""
        raise NotImplementedError

    def reduce(self, value: Value, dims: Iterable[int], keepdim: bool = False) -> Tensor:
        """A positively homogeneous reduction (sum, mean, maximum) over dimensions."""
        ids = self.activation(value)
        # (torch reduces a single number along its dimension 0)
        wanted = sorted({dim % ids.dim() for dim in dims if ids.dim()})
        shape = [1 if dim in wanted else size for dim, size in enumerate(ids.shape)]
        # (a sum of nothing is zero)
        some = all(ids.shape[dim] for dim in wanted)
        ids = self.merged(ids, wanted).expand(shape) if some else constant(shape, NEUTRAL)
        return ids if keepdim else self.dropped(ids, wanted)

    def dropped(self, ids: Tensor, dims: Collection[int]) -> Tensor:
        """The first entries along dimensions (numbers from 0), which the result does not have."""
        return ids[tuple(0 if dim in dims else slice(None) for dim in range(ids.dim()))]

    @abstractmethod
    def contract(self, weight: Weight, value: Value, dims: Sequence[int]) -> Tensor:
        """``sum over dims of weight * value``, both broadcast against each other: each
        scalar weight is an edge.
        """

    @abstractmethod
    def attach(self, weight: Weight) -> Tensor:
        """A parameter used as an activation: each scalar is an edge from the root."""

    @abstractmethod
    def fix(self, value: Tensor) -> None:
        """Fix the scale of every element."""

    @abstractmethod
    def product(self, *factors: tuple[Any, Tensor]) -> Tensor:
        """A product of powers of activations, elementwise: log-scales add up."""

    def root(self, value: Tensor, degree: int) -> Tensor:
        """A root of an activation, elementwise: its log-scale is divided."""
        return self.product((Fraction(1, degree), value))

    @abstractmethod
    def cut(self, value: Value, dims: Sequence[int], exact: bool = False) -> Tensor:
        """Normalise over ``dims``: elements there share one scale, which the result does not have;
        whether ``exact``, that is, with the ``eps`` of the normalisation, too.
        """

    @abstractmethod
    def observe(self, value: Tensor) -> Tensor:
        """A function of elements that does not depend on their positive scale: a sign, a
        comparison, a direction.
        """

    def opaque(self, values: Sequence[Value], reason: str, dims: Sequence[int] = ()) -> Tensor:
        """A function that is not homogeneous: elementwise, except along ``dims`` of the result,
        where it mixes elements. Its ``reason`` is listed among the pins, if it gives one.
        """
        if reason:
            self.pin(values, reason)
        else:
            for value in values:
                self.fix(self.activation(value))
        return constant(broadcast_shape(*(value.shape for value in values)))

    def apply(self, rule: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """What a rule makes of an operation."""
        return rule(self, *args, **kwargs)

    def scaled(self, value: Tensor, by: Tensor) -> Tensor:
        """The ids of a value times constants, elementwise."""
        return value

    def regrouped(self, value: Value, runs: Sequence[range]) -> None:  # noqa: B027
        """One dimension was split into several (``runs`` of dimensions of ``value``);
        only channels depend on it.
        """

    def given(self, kind: str, name: str, shape: Sequence[int]) -> Tensor:
        """The ids of an ``"input"`` or a ``"buffer"``."""
        return constant(shape)

    def known_ids(self, values: Iterable[Value]) -> Callable[[Tensor], bool]:
        """A test, for use after a rule, of whether ids are its operands' or made by it."""
        return lambda ids: ids.dtype == torch.int64

    def steps(self, sequence: Tensor, dim: int) -> tuple[list[Tensor], bool]:
        """What a recurrent operation reads in each step, and whether the last one stands for more.

        All steps are interpreted if they are few. Else three, which contain every use of every
        parameter, with the initial, the first and a later state; the last one reads what all
        further ones read, and is repeated until no more exact zeros of the state change.
        """
        if sequence.shape[dim] <= FEW_STEPS:
            return list(sequence.unbind(dim)), False
        rest = sequence.narrow(dim, 2, sequence.shape[dim] - 2)
        return [*(sequence.select(dim, i) for i in (0, 1)), self.reduce(rest, [dim])], True

    def laid_out(self, weight: Weight, table: Callable[[str], Tensor]) -> Tensor:
        """The ids of a view, from tables of the ids of whole parameters; exact zeros in a computed
        weight have a fixed scale.
        """
        if weight.name is not None:
            return weight.of_table(table(weight.name))
        ids = torch.full(weight.index.shape, ROOT)
        for name, inside, local in self.parts(weight):
            ids[inside] = table(name).reshape(-1)[local]
        return ids

    def statistics_of(self, mean: str, var: str, channels: Tensor, eps: float) -> None:  # noqa: B027
        """Running statistics (names of buffers) of channels (dimension 0), rescaled
        with them; only for scales.
        """

    def read(self, buffer: str) -> None:  # noqa: B027
        """A buffer is used as data, so that it must not be rescaled; only for scales."""

    @abstractmethod
    def gathered(self, weight: Weight, rows: Sequence[int], node: object) -> Weight | None:
        """A weight of the rows of a table (dimension 0 of ``weight``) that data selects, of shape
        ``rows + weight.shape[1:]``, or ``None`` if all rows must be treated as one.

        One index, the result of ``node``, selects the same rows of two tables.
        """

    # -- shared by all interpretations

    def activation(self, value: Any) -> Tensor:
        """Any value as an activation: parameters are attached, numbers have a fixed
        scale (zero has any scale).
        """
        if isinstance(value, Weight):
            ids = self.attach(value.unmasked())
            return ids if value.kept is None else torch.where(value.kept, ids, NEUTRAL)
        if isinstance(value, Tensor):
            return value
        neutral = type(value) in (int, float) and value in (0, float("inf"), -float("inf"))
        return constant((), NEUTRAL if neutral else ROOT)

    def moved(self, function: Callable[[Tensor], Tensor], value: Value) -> Value:
        """Apply a movement of data to the ids."""
        return (
            value.moved(function, self.offsets)
            if isinstance(value, Weight)
            else move(function, value)
        )

    def pin(self, values: Iterable[Value], reason: str) -> None:
        """Fix the scale of every operand; record the operation as a pin if a scale was
        free or a parameter is used.
        """
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
        """Names of the parameters in a view."""
        if weight.name is not None:
            return [weight.name]
        names = [name for name in self.offsets if torch.Size(self.shapes[name]).numel()]
        names.sort(key=self.offsets.__getitem__)
        index = distinct(weight.index).reshape(-1)
        starts = torch.tensor([self.offsets[name] for name in names])
        # exact zeros in a computed weight have a position outside of all parameters
        last = self.offsets[names[-1]] + torch.Size(self.shapes[names[-1]]).numel()
        inside = index[(index >= starts[0]) & (index < last)]
        which = torch.bucketize(inside, starts, right=True) - 1
        return [names[number] for number in which.unique().tolist()]

    def parts(self, weight: Weight) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Parameters in a view, masks of their scalars in it, and the places of these in them."""
        positions = weight.positions(self.offsets)
        for name in self.parameters_of(weight):
            local = positions - self.offsets[name]
            inside = (local >= 0) & (local < prod(self.shapes[name]))
            yield name, inside, local[inside]


# kinds of operations whose results can be integers although they convert no operand
# (nothing is known of others)
UNCONVERTED = frozenset(["", "comparison", "creation", "movement", "random", "rounding", "size"])

# operations that read only the shape of an operand
SHAPES = frozenset(["aten.expand_as", "aten.reshape_as", "aten.view_as"])


def as_stored(semantics: Semantics, args: Any, kwargs: Any) -> Any:
    """The operands in the type of the result, if that is of integers, booleans or 8 bits: small
    types fix scales, booleans need none.
    """
    shown, op = semantics.place.result, semantics.place.op
    if not isinstance(shown, Tensor) or op in SHAPES or facts_of(op).kind in UNCONVERTED:
        return args, kwargs
    dtype = shown.dtype
    if dtype.is_complex or (dtype.is_floating_point and dtype.itemsize > 1):
        # (rounding is small beside the numbers)
        return args, kwargs

    def one(value: Any) -> Any:
        if not (isinstance(value, Weight) or is_free(value)):
            return value
        ids, why = semantics.activation(value), "to 8 bits " * dtype.is_floating_point
        if dtype == torch.bool:
            return semantics.observe(ids)
        return semantics.opaque([ids], f"rounding {why}is not homogeneous")

    return pytree.tree_map(one, (args, kwargs))


def is_free(value: Any) -> bool:
    """Whether an activation has a free scale."""
    if not isinstance(value, Tensor):
        return False
    ids = distinct(value)
    return bool(((ids != ROOT) & (ids != NEUTRAL)).any())
