"""Comparisons of tensor sizes in a model's code, and inputs at which their outcomes differ.

A capture takes one branch of ``if x.shape[0] > 4``, and its graph holds for that branch only.
Therefore sizes record each comparison that code makes with them, and the model is captured again at
sizes with other outcomes.
"""

from __future__ import annotations

import operator
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from types import FrameType
from typing import Any, Self

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..errors import PathspaceError
from ..models.inputs import ordinary
from .call_stack import INSTALLED, LIBRARIES, within
from .capture import capture
from .captured import Captured
from .sizes import Dims, Inputs, linked_dims, resized

READS = frozenset([Tensor.shape.__get__, Tensor.size, Tensor.numel, Tensor.nelement])  # type: ignore[attr-defined]
# functions that take one piece out of a tensor, and functions that take all pieces
PIECES = frozenset([Tensor.__getitem__, Tensor.select, torch.select])
WALKS = frozenset([Tensor.unbind, torch.unbind, Tensor.__iter__])
WATCHED = READS | PIECES | WALKS | {Tensor.__len__}
COMPARISONS = ("lt", "le", "gt", "ge", "eq", "ne")
ARITHMETIC = (
    *(
        "add",
        "radd",
        "sub",
        "rsub",
        "mul",
        "rmul",
        "floordiv",
        "rfloordiv",
        "mod",
        "rmod",
        "neg",
        "abs",
    ),
    *("truediv", "divmod", "pow", "and", "rand", "or", "ror", "xor", "rxor", "lshift", "rshift"),
)
# results of these may be compared with 0 where nobody sees it: as the width
# of a margin, for example
RESTS = frozenset(["mod", "rmod", "divmod", "and", "rand"])
# results of these may count the steps of a loop
COUNTING = frozenset(["sub", "rsub", "floordiv", "rfloordiv", "truediv", "divmod", "rshift"])
# largest number of captures for decisions, and their largest size
MOST, LONGEST = 6, 4096


@dataclass(frozen=True)
class Decision:
    """A comparison of sizes in a model's code.

    Attributes:
        place: file and line.
        number: number of earlier comparisons by that line.
        compare: the name of the operator.
        left: its first operand.
        right: its second operand.
        outcome: its result.
        both: whether the second operand is a size, too.
        installed: whether the code belongs to an installed package.
    """

    place: str
    number: int
    compare: str
    left: float
    right: float
    outcome: bool
    both: bool
    installed: bool

    @property
    def sizes(self) -> set[float]:
        """The operands that may depend on the sizes of the inputs."""
        return {self.left, self.right} if self.both else {self.left}

    @property
    def key(self) -> tuple[str, int, str]:
        """Identifies the comparison across runs."""
        return self.place, self.number, self.compare

    def falls(self, left: float, right: float) -> bool:
        """Its outcome for other operands."""
        return bool(getattr(operator, self.compare)(left, right))


class SizeRecorder(TorchFunctionMode):
    """A context in which the sizes that code reads from tensors record their comparisons.

    Decisions in the code of libraries are ignored; those in installed packages are reported, but
    not tried.

    Attributes:
        decisions: every comparison, in order.
        pieces: line of code -> number of pieces that it took out of tensors.
        lengths: places that call ``len(tensor)``, whose result records nothing.
        few: whether code computed a number below 2 from sizes, as for a loop of no step, or of one,
            at these sizes, or took a whole tensor as its first piece.

    Example:
        >>> with SizeRecorder() as watch:
        ...     small = torch.ones(3, 2).shape[0] < 4
        >>> [(each.left, each.compare, each.right, each.outcome) for each in watch.decisions]
        [(3, 'lt', 4, True)]
    """

    def __init__(self) -> None:
        super().__init__()
        self._forget()
        # (code may keep sizes, in a cache for example, and compare them later)
        self._active = False

    def _forget(self) -> None:
        self.decisions: list[Decision] = []
        self._times: Counter[tuple[str, str]] = Counter()
        self.pieces: Counter[tuple[str, int]] = Counter()
        self.lengths: list[str] = []
        # places that converted a size to something else that records nothing, with the size
        self._converted: dict[str, int] = {}
        # places of libraries that used a size as a key
        self._keys: set[str] = set()
        self.few = False

    def __enter__(self) -> Self:
        # each run starts with empty records
        self._forget()
        self._active = True
        return super().__enter__()  # type: ignore[no-any-return, no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        self._active = False
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def tell(
        self, frame: FrameType, compare: str, left: float, right: float, both: bool = False
    ) -> bool:
        """Record a comparison, except in a library's code."""
        outcome = bool(getattr(operator, compare)(left, right))
        # (torch checks the sizes of its captures in generated code)
        if self._active and not (
            within(frame, LIBRARIES)
            or (frame.f_code.co_filename, frame.f_code.co_name) == ("<string>", "_")
        ):
            place = _place(frame)
            if compare == "eq" and place in self._keys:
                # (how a dictionary compares its keys decides nothing)
                return outcome
            number = self._times[place, compare]
            self._times[place, compare] += 1
            made = Decision(
                place, number, compare, left, right, outcome, both, within(frame, INSTALLED)
            )
            self.decisions.append(made)
        return outcome

    def walks(self, inputs: Inputs) -> bool:
        """Whether there may be a loop over steps: a line took about as many pieces as an
        input has, or it has few.
        """
        sizes = {size for size, _ in linked_dims(inputs, thin_only=False) if size > 2}
        several = any(count in sizes or count + 1 in sizes for count in self.pieces.values())
        return self.few or several or bool(self._conversions(inputs))

    def count(self, frame: FrameType, number: Any) -> None:
        """Record a number below 2, if it may count the steps of a loop in the model's code."""
        if (
            self._active
            and isinstance(number, int | float)
            and abs(number) < 2
            and not within(frame, (*LIBRARIES, *INSTALLED))
        ):
            self.few = True

    def convert(self, frame: FrameType, size: int, key: bool) -> None:
        """Record that a size is used as something else: a key, a name, a
        number that records nothing.
        """
        if key and within(frame, INSTALLED):
            self._keys.add(_place(frame))
        if self._active and not within(frame, (*LIBRARIES, *INSTALLED)):
            self._converted[_place(frame)] = size

    def _conversions(self, inputs: Inputs) -> list[str]:
        """The places that converted the length of an input."""
        sizes = {size for size, _ in linked_dims(inputs, thin_only=False)}
        return [place for place, size in self._converted.items() if size in sizes]

    def unrecorded(self, inputs: Inputs) -> list[str]:
        """The places after which nothing is recorded of a size."""
        return [*self.lengths, *self._conversions(inputs)]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func not in WATCHED:
            return result
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and (
            frame.f_code.co_name == "__torch_function__"
            or frame.f_globals.get("__name__") in ("torch._tensor", "torch.overrides")
        ):
            # (skip other modes, and tensor methods that are written in Python)
            frame = frame.f_back
        if frame is None or within(frame, LIBRARIES):
            return result
        if func in READS:
            return (
                Size(result, self)
                if type(result) is int
                else torch.Size([Size(size, self) for size in result])
            )
        if func is Tensor.__len__:
            self.lengths.append(_place(frame))
        elif not within(frame, INSTALLED):
            here = frame.f_code.co_filename, frame.f_lineno
            self.pieces[here] += len(result) if isinstance(result, tuple) else 1
            self.few = self.few or (func is Tensor.__getitem__ and _is_whole(result, *args))
        return result


def _place(frame: FrameType) -> str:
    return f"{PurePath(frame.f_code.co_filename).name}:{frame.f_lineno}"


def _is_whole(piece: Tensor, tensor: Tensor, index: Any) -> bool:
    """Whether a piece with an end is everything, as the only piece in a loop is."""
    parts = index if isinstance(index, tuple) else (index,)
    ends = any(isinstance(part, slice) and part.stop is not None for part in parts)
    return ends and piece.shape == tensor.shape


class Size(int):
    """A size, or an integer computed from sizes, that records its comparisons."""

    watch: SizeRecorder

    def __new__(cls, value: int, watch: SizeRecorder) -> Size:
        """Make the integer, whose comparisons `watch` records."""
        made = super().__new__(cls, value)
        made.watch = watch
        return made

    def __bool__(self) -> bool:
        return self.watch.tell(sys._getframe(1), "ne", operator.index(self), 0)

    def __float__(self) -> float:
        # (a root of it may count steps)
        self.watch.count(sys._getframe(1), operator.index(self) / 2)
        return int.__float__(self)


def _compared(name: str) -> Callable[[Size, Any], Any]:
    def compared(self: Size, other: Any) -> Any:
        if not isinstance(other, int | float):
            return NotImplemented
        plain = operator.index(other) if isinstance(other, int) else other
        return self.watch.tell(
            sys._getframe(1), name, operator.index(self), plain, isinstance(other, Size)
        )

    return compared


def _computed(name: str) -> Callable[..., Any]:
    compute, broken = getattr(int, f"__{name}__"), getattr(float, f"__{name}__", None)

    def computed(self: Size, *others: Any) -> Any:
        plain, frame = operator.index(self), sys._getframe(1)
        result = compute(plain, *others)
        if result is NotImplemented and broken is not None:
            result = broken(float(plain), *others)
        results = result if isinstance(result, tuple) else (result,)
        # (a negative power is a factor)
        if name in COUNTING or (isinstance(result, float) and not (name == "pow" and result < 1)):
            self.watch.count(frame, results[0])
        if name in RESTS and isinstance(results[-1], int):
            self.watch.tell(frame, "ne", results[-1], 0)
        sizes = [Size(part, self.watch) if isinstance(part, int) else part for part in results]
        return tuple(sizes) if isinstance(result, tuple) else sizes[0]

    return computed


def _converted(name: str) -> Callable[..., Any]:
    convert = getattr(int, f"__{name}__")

    def converted(self: Size, *options: Any) -> Any:
        self.watch.convert(sys._getframe(1), operator.index(self), name == "hash")
        return convert(operator.index(self), *options)

    return converted


for _name in COMPARISONS:
    setattr(Size, f"__{_name}__", _compared(_name))
for _name in ARITHMETIC:
    setattr(Size, f"__{_name}__", _computed(_name))
for _name in ("int", "hash", "str", "format"):
    setattr(Size, f"__{_name}__", _converted(_name))


@dataclass
class Ways:
    """Captures of a model with other outcomes of its decisions.

    Attributes:
        captures: further captures, each with its inputs.
        unseen: places with a decision that depends on sizes of inputs and had only one outcome.
    """

    captures: list[tuple[Captured, Inputs]] = field(default_factory=list)
    unseen: list[str] = field(default_factory=list)


def other_ways(
    model: torch.nn.Module, inputs: Inputs, known: Sequence[tuple[Inputs, Sequence[Decision]]]
) -> Ways:
    """Capture a model at further sizes, so that each decision by sizes has both outcomes,
    if the model runs there.

    Args:
        model: any module.
        inputs: its example inputs.
        known: the inputs of earlier captures, and the decisions recorded there.

    Returns:
        The further captures, and the places where one outcome was not found.
    """
    found, inputs = Ways(), ordinary(inputs)
    runs = deque(known)
    operands: dict[Any, set[tuple[float, float]]] = {}
    outcomes: dict[Any, set[bool]] = {}
    # outcomes of runs that failed, which other sizes may reach without failing
    failing: dict[Any, set[bool]] = {}

    def note(decisions: Sequence[Decision]) -> bool:
        new = [d for d in decisions if d.outcome not in outcomes.get(d.key, ())]
        for d in decisions:
            operands.setdefault(d.key, set()).add((d.left, d.right))
            outcomes.setdefault(d.key, set()).add(d.outcome)
        return bool(new)

    for _, decisions in known:
        note(decisions)
    tried, fixed = 0, set()
    while runs:
        at, decisions = runs.popleft()
        own = [d for d in decisions if not d.installed and len(outcomes[d.key]) == 1]
        for trial, dims, aims in _trials(at, own):
            aims = [d for d in aims if len(outcomes[d.key]) == 1 and (d.key, dims) not in fixed]
            if not aims or tried == MOST:
                continue
            tried += 1
            watch = SizeRecorder()
            try:
                captured: Captured | None = capture(model, *trial, watch=watch)
            except PathspaceError:
                # the model does not run on these inputs, or only in part
                captured = None
            reached = {d.key: (d.left, d.right) for d in watch.decisions}
            # decisions with the same operands do not depend on these dimensions
            fixed |= {(d.key, dims) for d in own if reached.get(d.key) == (d.left, d.right)}
            if captured is None:
                for d in watch.decisions:
                    operands.setdefault(d.key, set()).add((d.left, d.right))
                    failing.setdefault(d.key, set()).add(d.outcome)
            elif note(watch.decisions):
                runs.append((trial, watch.decisions))
                found.captures.append((captured, trial))
    lengths = {size for size, _ in linked_dims(inputs, thin_only=False)}
    one_way = [
        d
        for _, decisions in known
        for d in decisions
        if len(outcomes[d.key] | failing.get(d.key, set())) == 1
    ]
    depends = [
        d.place for d in one_way if len(operands[d.key]) > 1 or (d.installed and d.sizes & lengths)
    ]
    found.unseen = list(dict.fromkeys(depends))
    return found


def _trials(
    inputs: Inputs, decisions: Sequence[Decision]
) -> Iterator[tuple[Inputs, Dims, Sequence[Decision]]]:
    """Inputs of other sizes, the changed dimensions, and the decisions to flip: first
    all together, then each.
    """
    groups = [(size, dims) for size, ways in linked_dims(inputs, thin_only=False) for dims in ways]
    every: dict[tuple[int, int], int] = {}
    for decision in decisions:
        for size, dims in groups:
            if size in decision.sizes and dims[0] not in every:
                every |= dict.fromkeys(dims, next(_lengths(decision, size), size))
    if len(set(every.values())) > 1:
        yield resized(inputs, every), tuple(every), decisions
    for decision in decisions:
        sizes = decision.sizes

        def unlikely(group: tuple[int, Dims], sizes: set[float] = sizes) -> tuple[bool, bool, int]:
            return (
                group[0] not in sizes,
                not any(size and group[0] % size == 0 for size in sizes),
                -group[0],
            )

        ranked = sorted(groups, key=unlikely)
        for lengths in zip(*(_lengths(decision, size) for size, _ in ranked), strict=False):
            for length, (_, dims) in zip(lengths, ranked, strict=True):
                yield resized(inputs, dict.fromkeys(dims, length)), dims, [decision]


def _lengths(decision: Decision, size: int) -> Iterator[int]:
    """Lengths in place of ``size`` at which a decision may have the other
    outcome, the likeliest first.
    """

    def follows(operand: float, new: int) -> float:
        # the operand is the input's size, or proportional to it
        return new if operand == size else operand * new / size

    def by_left(new: int) -> bool:
        return decision.falls(follows(decision.left, new), decision.right) != decision.outcome

    def by_right(new: int) -> bool:
        return decision.falls(decision.left, follows(decision.right, new)) != decision.outcome

    near = {size * one / other for one,
            other in ((decision.right, decision.left), (decision.left, decision.right))
            if other}  # fmt: skip
    wanted = {
        round(middle) + step
        for middle in (*near, decision.left, decision.right)
        for step in (-1, 0, 1)
    }
    usable = [
        new
        for new in wanted
        if 0 < new <= LONGEST and new != size and (by_left(new) or by_right(new))
    ]
    # (an operand that is not known to be a size seldom follows the inputs)
    nearest = sorted(
        usable, key=lambda new: (not decision.both and not by_left(new), abs(new - size), new)
    )[:2]
    yield from nearest
    yield from (
        new
        for new in (size + 1, size + 2, 2 * size)
        if size and new <= LONGEST and new not in nearest
    )
