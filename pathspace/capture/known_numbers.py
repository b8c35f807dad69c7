"""Numbers that follow from a model's buffers and constants alone, while its code runs on tensors
without values.

Code that computes how much to pad or to repeat from whole numbers in buffers, as audio codecs do,
reads them as it would read attributes. Where the same call also writes the buffer, the number
differs from call to call, and nobody may rely on it.
"""

from __future__ import annotations

import dis
import sys
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch._dispatch.python import no_python_dispatcher
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.weak import WeakTensorKeyDictionary

from ..models.values import has_values
from .aliasing import memory_of, storage_of
from .call_stack import LIBRARIES, within
from .on_meta import Unsure

# elements of a tensor whose values are followed
FEW = 16
# elements of a mask whose values are followed
LARGEST_MASK = 1 << 20
# steps of code that decide nothing (they differ between versions of Python)
_NOTHING = ("TO_BOOL", "NOT_TAKEN", "CACHE", "EXTENDED_ARG")
# a storage, and the first byte and the byte after the last in it
Span = tuple[int, int, int]
# the value of a tensor, and the memory of the buffers and constants from which it follows
Known = tuple[Tensor, frozenset[Span]]
_READS = frozenset(["aten::item", "aten::_local_scalar_dense", "aten::is_nonzero"])


class KnownNumbers:
    """The values of small tensors and of masks that depend on buffers and constants only.

    Attributes:
        asserted: whether an assertion of the code was taken for true.
        read: memory of which a number was read.
    """

    def __init__(self) -> None:
        self.asserted = False
        # id of a tensor -> itself, so that no id is used twice, and what is known of it
        self._known: dict[int, tuple[Tensor, Known]] = {}
        # new tensors, of which torch would make a second Python object if they were held
        self._new = WeakTensorKeyDictionary()
        self.read: set[Span] = set()
        self._written: set[int] = set()

    def given(self, shown: Tensor, value: Tensor) -> None:
        """Note the value of a buffer, which the code finds as ``shown``."""
        if _is_followed(value) and type(value) is Tensor and has_values(value):
            self._known[id(shown)] = shown, (value.detach(), frozenset([_span(value)]))

    def answer(self, func: Any, args: tuple[Any, ...]) -> bool | int | float | complex | None:
        """The number that an operation reads out of a tensor, ``None`` if it is not known.

        Raises:
            Unsure: the model's code writes a buffer from which the number follows.
        """
        if func.name() not in _READS:
            return None
        if (found := self._of(args[0])) is None:
            said = _asserted() if func.name() == "aten::is_nonzero" else None
            self.asserted = self.asserted or said is not None
            return said
        self.read |= found[1]
        self._check()
        number = found[0].item()
        return bool(number) if func.name() == "aten::is_nonzero" else number

    def positions(self, mask: Tensor) -> tuple[Tensor, ...] | None:
        """Where a mask is true, along each of its dimensions; ``None`` if it is not known.

        Raises:
            Unsure: the model's code writes the buffer that is the mask.
        """
        if mask.dtype != torch.bool or (found := self._of(mask)) is None:
            return None
        self.read |= found[1]
        self._check()
        with torch.no_grad(), no_python_dispatcher(), _disable_current_modes():
            return found[0].cpu().nonzero(as_tuple=True)

    def follow(self, func: Any, operands: Any, result: Any) -> None:
        """Note the result of an operation whose operands are all known.

        Raises:
            Unsure: it writes a buffer of which a number was read.
        """
        if torch.Tag.inplace_view in func.tags:
            # (it writes no number)
            return
        leaves = (leaf for leaf in pytree.tree_iter(operands) if isinstance(leaf, Tensor))
        if func._schema.is_mutable:
            self._written |= {storage_of(found[0]) for leaf in leaves if (found := self._of(leaf))}
            self._check()
            return
        parts = result if isinstance(result, list | tuple) else [result]
        if not all(isinstance(part, Tensor) and _is_followed(part) for part in parts):
            return
        values: dict[int, Tensor] = {}
        roots: frozenset[Span] = frozenset()
        for leaf in leaves:
            if (known := self._of(leaf)) is None:
                return
            values[id(leaf)], roots = known[0], roots | known[1]
        if torch.Tag.nondeterministic_seeded in func.tags or "empty" in func.name():
            return
        args, named = pytree.tree_map_only(Tensor, lambda leaf: values[id(leaf)], operands)
        with torch.no_grad(), no_python_dispatcher():
            computed = func(*args, **named)
        for part, value in zip(parts, computed if parts is result else [computed], strict=True):
            if values:
                self._known[id(part)] = part, (value, roots)
            else:
                self._new[part] = value, roots

    def _of(self, tensor: Tensor) -> Known | None:
        """What is known of a tensor; nothing once its memory is written, under whatever name."""
        found: Known | None = None
        if id(tensor) in self._known:
            found = self._known[id(tensor)][1]
        elif tensor in self._new:
            found = self._new[tensor]
        elif type(tensor) is Tensor and not tensor.is_meta and _is_followed(tensor):
            found = tensor, frozenset([_span(tensor)])
        return None if found is None or storage_of(found[0]) in self._written else found

    def _check(self) -> None:
        if self._written & {storage for storage, _, _ in self.read}:
            raise Unsure("a buffer that decides, and is written")


def _is_followed(value: Tensor) -> bool:
    """Whether the values of a tensor are followed: those of small ones, and of masks."""
    return value.numel() <= (LARGEST_MASK if value.dtype == torch.bool else FEW)


def _span(value: Tensor) -> Span:
    return storage_of(value), *memory_of(value)[:2]


def _asserted() -> bool | None:
    """The truth value that the model's code asserts at this place: it has it wherever the model
    runs. ``None`` where nothing is asserted.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and within(frame, LIBRARIES):
        frame = frame.f_back
    if frame is None:
        return None
    steps = [step for step in dis.get_instructions(frame.f_code) if step.opname not in _NOTHING]
    at = next((i for i, step in enumerate(steps) if step.offset >= frame.f_lasti), len(steps))
    if at + 1 >= len(steps) or "JUMP" not in (jump := steps[at]).opname:
        return None
    jumps = next((v for v in (True, False) if f"IF_{v}".upper() in jump.opname), None)
    if jumps is None:
        return None
    target = next((step for step in steps if step.offset >= jump.argval), None)
    if _raises(steps[at + 1]):
        return jumps
    return not jumps if target is not None and _raises(target) else None


def _raises(step: dis.Instruction) -> bool:
    """Whether a step of code begins to raise an ``AssertionError``."""
    return step.opname == "LOAD_ASSERTION_ERROR" or step.argval is AssertionError
