"""Tensors of a model as coordinates of feature spaces, and what fixes them: the base of the fourth
reading of the rules.

What has no rule here fixes all coordinates it meets, which is sound.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from ..inference.registry import facts_of
from ..inference.semantics import Place
from ..inference.sides import Side, Sided, varying
from ..inference.values import (
    NEUTRAL,
    ROOT,
    Value,
    Weight,
    broadcast_shape,
    compress,
    constant,
    distinct,
    has_zeros,
    shape_of,
)
from .coordinates import PAIRS, Demands
from .followed import follows, taken_along
from .layouts import mixes_copies, narrowed, numbered
from .turns import pieces_of, turned


class Reading(Sided):
    """An interpretation whose ids are coordinates of feature spaces: tensors, and what is fixed.

    Attributes:
        demands: what operations demand of the coordinates.
        shifts: parameter used as a gain -> the number added to it.
    """

    def __init__(
        self,
        offsets: dict[str, int],
        shapes: dict[str, tuple[int, ...]],
        buffers: Mapping[str, Tensor] | None = None,
    ) -> None:
        super().__init__(offsets, shapes)
        self.demands = Demands()
        self.shifts: dict[str, float] = {}
        self.reads: set[Side] = set()
        self._buffers = buffers or {}
        self.used: list[np.ndarray] = []
        # node -> its ids in the last run of its graph
        self._seen: dict[fx.Node, Any] = {}

    # -- tensors of the model

    def fresh(self, count: int) -> Tensor:
        """New coordinates of one space."""
        return self.demands.fresh((count,))

    def attach(self, weight: Weight) -> Tensor:
        """A parameter as an activation: its last dimension holds features, others do not."""
        for name in self.parameters_of(weight):
            for dim in self.long(name)[:-1]:
                self.hold(self.side(name, dim), "its rows are told apart")
        if weight.shift:
            self.fix_weights([weight], "a constant is added to a parameter")
            return constant(weight.shape)
        ids = compress(self.laid_out(weight, self._table))
        self.used.append(self.demands.members(ids))
        return ids

    def _table(self, name: str) -> Tensor:
        long = self.long(name)
        return self.laid(name, long[-1]) if long else constant(self.shapes[name])

    def given(self, kind: str, name: str, shape: Sequence[int]) -> Tensor:
        """Inputs and buffers do not change; the values of buffers are known."""
        ids = constant(shape)
        if kind == "buffer" and name in self._buffers:
            ids = ids.expand(ids.shape)
            ids.known = self._buffers[name].detach().cpu()  # type: ignore[attr-defined]
        return ids

    def fix_unused(self) -> None:
        """Fix what no operation read or wrote, and gains that have other uses."""
        every = np.concatenate([ids.numpy() for ids in self.sides.values()] or [np.zeros(0, int)])
        used = np.concatenate(self.used or [np.zeros(0, int)])
        self.place = Place()
        self.hold(torch.from_numpy(np.setdiff1d(every, used)), "no operation uses it")
        for (name, _), ids in self.sides.items():
            if name in self.shifts:
                self.hold(ids, "it is a gain elsewhere")

    # -- fixing

    def hold(self, ids: Tensor, why: str) -> None:
        """Let coordinates never change, for a reason."""
        place = self.place
        self.demands.fix(ids, (place.op, place.module, place.source, why))

    def fix(self, value: Tensor) -> None:
        """Let coordinates never change."""
        self.hold(value, "it acts on each feature alone")

    def fix_weights(self, weights: Iterable[Weight], why: str) -> None:
        """Let all coordinates of parameters never change."""
        for weight in weights:
            for name in self.parameters_of(weight):
                for dim in self.long(name):
                    self.hold(self.side(name, dim), why)

    def pin(self, values: Iterable[Value], reason: str) -> None:
        """Fix the coordinates of the operands of an operation that is not followed."""
        for value in values:
            if isinstance(value, Weight):
                self.fix_weights([value], reason)
            else:
                self.hold(value, reason)

    def opaque(self, values: Sequence[Value], reason: str, dims: Sequence[int] = ()) -> Tensor:
        """Functions that are not linear."""
        self.pin(values, reason or "it acts on each feature alone")
        return constant(broadcast_shape(*(value.shape for value in values)))

    def observe(self, value: Tensor) -> Tensor:
        """A sign or a comparison of single features."""
        self.hold(value, "it acts on each feature alone")
        return constant(value.shape)

    def root(self, value: Tensor, degree: int) -> Tensor:
        """A root of single features."""
        return self.observe(value)

    def gathered(self, weight: Weight, rows: Sequence[int], node: object) -> Weight | None:
        """Matrices that data selects are not distinguished: they have the same features."""
        if len(weight.shape) < 3 or weight.name is None:
            return None
        for _, view in self.places(weight):
            if 0 in varying(view):
                self.hold(view, "data tells its matrices apart")
        return weight.moved(lambda t: t[:1].expand(prod(rows), *t.shape[1:]), self.offsets).moved(
            lambda t: t.unflatten(0, tuple(rows)), self.offsets
        )

    # -- each operation

    def apply(self, rule: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Follow an operation that treats all features of a space alike; fix them for others."""
        result = self._applied(rule, args, kwargs)
        if self.place.node is not None:
            self._seen[self.place.node] = result
        return result

    def _applied(self, rule: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        facts = facts_of(self.place.op)
        leaves = [
            leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor | Weight)
        ]
        free = [leaf for leaf in leaves if self.carries(leaf)]
        if facts.kind in ("creation", "size"):
            return rule(self, *args, **kwargs)
        if not free and not any(isinstance(leaf, Tensor) and has_zeros(leaf) for leaf in leaves):
            return _constants(self.place.result)
        if free and not follows(self, facts, args, kwargs, leaves):
            self.pin(free, "it acts on each feature alone")
            return _constants(self.place.result)
        for source, dim in taken_along(self.place.node, facts, leaves):
            if mixes_copies(source, dim):
                self.demands.mark(source, numbered(source.shape, [dim]))
        result = rule(self, *args, **kwargs)
        if facts.kind in ("concatenation", "write") and isinstance(result, Tensor):
            return self._assembled(result)
        return result

    def _assembled(self, result: Tensor) -> Tensor:
        """Pieces of one tensor in another order are a turn; other pieces remain told apart."""
        node = self.place.node
        if node is None or not self.has_space(result):
            self.hold(result, "it is put together from pieces")
            return result
        if (found := turned(node, result, self._seen)) is not None:
            source, rows = found
            if rows is not None:
                self.demands.mark(source)
                self.demands.turns.append(rows)
            return source
        self.demands.mark(result, narrowed(pieces_of(node), varying(result)))
        return result

    def has_space(self, value: Any) -> bool:
        """Whether an activation has features."""
        if not isinstance(value, Tensor):
            return False
        ids = distinct(value)
        return bool(((ids != ROOT) & (ids != NEUTRAL)).any())

    def carries(self, value: Any) -> bool:
        """Whether a value is a weight, or has features."""
        return isinstance(value, Weight) or self.has_space(value)

    def is_product(self, ids: Tensor) -> bool:
        """Whether some elements are products of two features."""
        small = distinct(ids)
        return bool(((small >= PAIRS) & (small != NEUTRAL)).any())


def _constants(shown: Any) -> Any:
    return pytree.tree_map(
        lambda leaf: constant(shape_of(leaf)) if isinstance(leaf, Tensor) else leaf, shown
    )
