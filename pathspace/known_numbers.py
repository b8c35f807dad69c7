"""Numbers that follow from a model's buffers and constants alone, while its code runs on tensors
without values.

Code that computes how much to pad or to repeat from whole numbers in buffers, as audio codecs do,
reads them as it would read attributes. Where the same call also writes the buffer, the number
differs from call to call, and nobody may rely on it.
"""

from __future__ import annotations

import dis
import sys
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch._dispatch.python import no_python_dispatcher
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakTensorKeyDictionary

from pathspace.on_meta import Unsure
from pathspace.without_values import has_values

# elements of a tensor whose values are followed
FEW = 16
# code between the model's and this
_OWN = ("/torch/", "/pathspace/", "/contextlib.py")
# steps of code that decide nothing (they differ between versions of Python)
_NOTHING = ("TO_BOOL", "NOT_TAKEN", "CACHE", "EXTENDED_ARG")
_READS = frozenset(["aten::item", "aten::_local_scalar_dense", "aten::is_nonzero"])


class KnownNumbers:
    """The values of small tensors that depend on buffers and constants only.

    Attributes:
        asserted: whether an assertion of the code was taken for true.
    """

    def __init__(self) -> None:
        self.asserted = False
        # id of a tensor -> itself, so that no id is used twice, its value, and its buffers
        self._known: dict[int, tuple[Tensor, Tensor, frozenset[int]]] = {}
        # new tensors, of which torch would make a second Python object if they were held
        self._new = WeakTensorKeyDictionary()
        self._read: set[int] = set()
        self._written: set[int] = set()

    def given(self, shown: Tensor, value: Tensor) -> None:
        """Note the value of a buffer, which the code finds as ``shown``."""
        if value.numel() <= FEW and type(value) is Tensor and has_values(value):
            self._known[id(shown)] = shown, value.detach(), frozenset([id(shown)])

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
        self._read |= found[1]
        self._check()
        number = found[0].item()
        return bool(number) if func.name() == "aten::is_nonzero" else number

    def follow(self, func: Any, operands: Any, result: Any) -> None:
        """Note the result of an operation whose operands are all known.

        Raises:
            Unsure: it writes a buffer of which a number was read.
        """
        if func._schema.is_mutable:
            self._write([*_tensors(operands)])
            return
        parts = result if isinstance(result, list | tuple) else [result]
        if not all(isinstance(part, Tensor) and part.numel() <= FEW for part in parts):
            return
        values: dict[int, Tensor] = {}
        roots: frozenset[int] = frozenset()
        for tensor in _tensors(operands):
            found = self._of(tensor)
            if found is None:
                return
            values[id(tensor)], roots = found[0], roots | found[1]
        if torch.Tag.nondeterministic_seeded in func.tags or "empty" in func.name():
            return
        args, named = pytree.tree_map_only(Tensor, lambda tensor: values[id(tensor)], operands)
        with torch.no_grad(), no_python_dispatcher():
            found = func(*args, **named)
        for part, value in zip(parts, found if parts is result else [found], strict=True):
            if values:
                self._known[id(part)] = part, value, roots
            else:
                self._new[part] = value

    def _of(self, tensor: Tensor) -> tuple[Tensor, frozenset[int]] | None:
        """The value of a tensor and its buffers; a constant has none."""
        if id(tensor) in self._known:
            return self._known[id(tensor)][1:]
        if tensor in self._new:
            return self._new[tensor], frozenset()
        if type(tensor) is Tensor and not tensor.is_meta and tensor.numel() <= FEW:
            return tensor, frozenset()
        return None

    def _write(self, tensors: Sequence[Tensor]) -> None:
        self._written |= {id(tensor) for tensor in tensors}
        self._check()
        for tensor in tensors:
            self._known.pop(id(tensor), None)
            self._new.pop(tensor, None)

    def _check(self) -> None:
        if self._read & self._written:
            raise Unsure("a buffer that decides, and is written")


def _asserted() -> bool | None:
    """The truth value that the model's code asserts at this place: it has it wherever the model
    runs. ``None`` where nothing is asserted.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and any(part in frame.f_code.co_filename for part in _OWN):
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


def _tensors(value: Any) -> Iterator[Tensor]:
    """The tensors in nested tuples, lists and dictionaries."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list | dict):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _tensors(each)


__all__ = ["KnownNumbers"]
