r"""What optimizers on path values share: the exact passage between steps on path values and steps on weights.

Weights on ``T_out`` stay constant. A step changes the value of the chain ``p_k`` by the ratio ``R_k`` and the value of
``P(e)``, for an edge ``e`` in neither tree, from ``v_e`` to ``v_e'``. The weights then are::

    w_e <- v_e' / (pre_tail s_head) / R_tail                  edges in neither tree
    w_e <- w_e R_head / R_tail                                edges of T_in that are not in T_out
    pre_v <- pre_v R_v

and the derivative by the logarithm of ``p_k`` is, with ``lambda_e = w_e dL/dw_e``::

    c_k = sum over e in T_in \\ T_out entering k of lambda_e  -  sum over e not in T_out leaving k of lambda_e
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pathspace import InputError, Skeleton, UnsupportedError
from pathspace.skeleton import warn_of_dead
from pathspace.training.optim.kernels import group_size, leaving, rows_of_group
from pathspace.training.optim.layout import Layout, make_layout
from pathspace.training.optim.matching import match, named, refuse_complex
from pathspace.training.optim.products import Products
from pathspace.training.optim.settings import SMALLEST, check_group, number
from pathspace.training.optim.sharding import find_shards, local
from pathspace.training.optim.vectors import Parts, cut


class PathOptimizer(Products):
    """Base of the optimizers on path values: knows the trees, and passes from path values to weights.

    Args:
        params: ``model.named_parameters()``, named parameter groups, or parameters of the traced model itself.
        defaults: the settings of a group.
        skeleton: the skeleton of the traced model.
        min_ratio: how much smaller a path value may get than it was at the start.

    Raises:
        InputError: a parameter of the skeleton is missing, given twice or of another shape.
        UnsupportedError: complex parameters, shards other than those of ``fully_shard``, a skeleton weight of 0, or
            path values too small to be divided by.

    Reference:
        The two-tree basis and its closed form: ``docs/g-sgd.md``.
    """

    def __init__(self, params: Iterable[Any], defaults: dict[str, Any], skeleton: Skeleton, min_ratio: float) -> None:
        if not isinstance(skeleton, Skeleton):
            raise InputError(
                f"{type(self).__name__} found skeleton of type {type(skeleton).__name__}, expected the result of "
                "graph.skeleton()."
            )
        number(type(self).__name__, "min_ratio", min_ratio, low=SMALLEST, high=1.0)
        warn_of_dead(type(self).__name__, skeleton)
        # weights at dead units stay as they are
        self.skeleton = skeleton.live
        self.min_ratio = min_ratio
        super().__init__(params, defaults)
        self._blocks = match(type(self).__name__, named(self.param_groups), self.skeleton.graph)
        self._connect()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; its parameters must lie outside path space, since those inside are all there already."""
        super().add_param_group(param_group)
        group, blocks = self.param_groups[-1], getattr(self, "_blocks", None)
        try:
            check_group(type(self).__name__, group)
            if blocks is not None:
                refuse_complex(type(self).__name__, named([group]))
                self._blocks = [*blocks, *[None] * len(group["params"])]
                self._connect()
        except Exception:
            self.param_groups.pop()
            if blocks is not None:
                self._blocks = blocks
                self._connect()
            raise

    def _connect(self) -> None:
        """Lay out index vectors and recompute everything that follows from the weights."""
        self._owned = [(p, g) for g, group in enumerate(self.param_groups) for p in group["params"]]
        self._shards = find_shards(type(self).__name__, named(self.param_groups))
        # what this device holds of them
        self._parameters = weights = [local(p) for p, _ in self._owned]
        devices = {p.device for p, block in zip(weights, self._blocks, strict=True) if block is not None}
        if len(devices) > 1:
            raise UnsupportedError(
                f"{type(self).__name__} found path space spread over {', '.join(sorted(map(str, devices)))}, expected "
                "one device; give every device a model of its own."
            )
        self._layout: Layout = make_layout(self.skeleton, weights, self._blocks, self._shards.rows)
        layout = self._layout
        group_of = {block: g for (_, g), block in zip(self._owned, self._blocks, strict=True) if block is not None}
        # a chain has the settings of the group of its first unit's entering edge
        blocks = self.skeleton.tree_in.block
        self._chain_group = [group_of.get(int(blocks[u]), 0) if u < len(blocks) else 0 for u in layout.first.tolist()]
        self._group_index: Tensor | None = None
        if len(set(self._chain_group)) > 1:
            self._group_index = torch.tensor(self._chain_group, device=layout.first.device)
        # with one group for all of path space, its settings are numbers; otherwise vectors over chains
        self._one_group = self._chain_group[-1] if self._group_index is None else None
        if not hasattr(self, "_counts") or self._counts.shape[1] != layout.count:
            # how often path values changed their sign, and how often they were stopped before 0
            self._counts = torch.zeros(2, layout.count, dtype=torch.int32, device=layout.first.device)
        self._still: list[bool] = []
        self._held: Tensor | None = None
        self._stale = False
        self._allocate()
        self._look_for_frozen([None] * len(self._owned))
        self.resync()

    def _allocate(self) -> None:
        """Vectors that are kept from step to step, and parts of them for every tensor."""
        layout, device = self._layout, self._layout.first.device
        tails, trees = layout.tails, sum(layout.trees)

        def vector(size: int, dtype: torch.dtype = torch.float64) -> Tensor:
            return torch.ones(size, dtype=dtype, device=device)

        # by tail, 1 / pre to the power that a step takes
        self._factor, self._value, self._one = vector(tails), vector(layout.count), vector(1)
        # 0, and the ratio by which a path value comes as close to 0 as it may
        self._limits = torch.zeros(2, layout.count, dtype=torch.float64, device=device)
        # ratios and reciprocals; -1 for each tail, then the weights on the trees
        self._factors, self._coefficient = vector(2 * layout.count), vector(tails + trees).neg_()
        dtypes = {p.dtype for p, block in zip(self._parameters, self._blocks, strict=True) if block is not None}
        self._rounded = {dtype: vector(2 * tails + trees, dtype) for dtype in dtypes}
        size = group_size(sum(p.numel() for p in self._parameters), device)
        self._rows = [rows_of_group(part, size) for part in layout.parts]
        # so few numbers that what costs is to start an operation, not to carry it out
        self._few = sum(p.numel() for p in self._parameters) <= size
        self._kept = self._cut()
        self._weights = [part.shaped(p.detach()) for part, p in zip(layout.parts, self._parameters, strict=True)]
        self._scattered = [
            i
            for i, (w, p) in enumerate(zip(self._weights, self._parameters, strict=True))
            if w.data_ptr() != p.data_ptr() or not w.is_contiguous()
        ]
        self._written = [
            (w.view(-1), part.tree, values)
            for i, (part, w, values) in enumerate(zip(layout.parts, self._weights, self._kept.on_tree, strict=True))
            if values is not None and i not in self._scattered
        ]

    def _cut(self) -> Parts:
        return cut(
            self._layout,
            [p.dtype for p in self._parameters],
            self._factors,
            self._limits,
            self._coefficient,
            self._rounded,
        )

    @property
    def _vectors(self) -> Parts:
        """Parts of the vectors; a compiler wants to see where they come from, and cannot start from a view."""
        return self._cut() if torch.compiler.is_compiling() else self._kept

    # --- the step's vectors

    def _log_gradient(self, kept: Parts, weights: Sequence[Tensor], grads: Sequence[Tensor]) -> Tensor:
        """``c_k`` of all chains; whatever is added to the root's does no harm."""
        layout = self._layout
        chained, trees = [], []
        for part, weight, grad, span, count, rows in zip(
            layout.parts, weights, grads, layout.spans, layout.trees, self._groups(), strict=True
        ):
            if span is not None:
                chained.append(leaving(part, weight, grad, rows))
            if count:
                trees.append(grad.take(part.tree))
        total = kept.zero
        if chained or trees:
            everything = torch.cat([*chained, *trees]) * kept.coefficient
            if layout.signs is not None:
                everything.mul_(layout.signs)
            total = total.index_add(0, layout.target, everything)
        else:
            total = total.clone()
        total = self._shards.sum(total)
        if any(group["maximize"] for group in self.param_groups):
            up = self._setting("maximize")
            total = total * (1 - 2 * up)
        return total if self._held is None else total.masked_fill_(self._held, 0.0)

    def _groups(self) -> list[int]:
        """Rows of every tensor that are worked on at once (0: all)."""
        # a compiler finds groups of its own
        return [0] * len(self._rows) if torch.compiler.is_compiling() else self._rows

    def _pass(self, kept: Parts) -> None:
        """Carry out the ratios on everything that is kept by unit, and prepare what the tensors need."""
        ratio, tree, size = kept.ratio, kept.tree, torch.abs(kept.ratio, out=kept.inverse)
        # counted where they happen, and added up only when someone asks
        if self._held is not None:
            ratio.masked_fill_(self._held, 1.0)
            size.masked_fill_(self._held, 1.0)
        self._counts.add_(kept.both <= self._limits)
        torch.copysign(torch.maximum(size, kept.least, out=size), ratio, out=ratio)
        kept.least.div_(size)
        self._value.mul_(ratio)
        torch.reciprocal(ratio, out=kept.inverse)
        of_tails, of_heads, of_others = kept.sources
        both = self._factor.new_empty(2, self._factor.numel())
        step, keep = both
        torch.index_select(self._factors, 0, of_tails, out=keep)
        # 1 / (pre^n R): the step that comes together with the change of the tail; then 1 / (pre R)^n
        torch.mul(self._factor, keep, out=step)
        if self._linear:
            self._factor.copy_(step)
        else:
            torch.mul(step, keep, out=self._factor)
        self._bound_steps(step, keep)
        tree.mul_(self._factors.index_select(0, of_heads))
        if of_others.numel():
            tree.mul_(self._factors.index_select(0, of_others))
        for by_tail, on_trees in kept.rounded:
            by_tail.copy_(both.view(-1))
            on_trees.copy_(tree)

    def _bound_steps(self, step: Tensor, keep: Tensor) -> None:
        """A place for bounds on the multipliers.

        Args:
            step: by tail, what its edges' gradients will be multiplied by; bounded in place.
            keep: by tail, ``1 / R``.
        """

    def _write_trees(self, kept: Parts, weights: Sequence[Tensor]) -> None:
        """Put the tree weights, which are kept in float64, into the tensors; write back where there was no view."""
        compiling, on_tree = torch.compiler.is_compiling(), kept.on_tree
        for flat, place, values in () if compiling else self._written:
            flat.index_copy_(0, place, values)
        for i in range(len(weights)) if compiling else self._scattered:
            part, parameter, weight = self._layout.parts[i], self._parameters[i], weights[i]
            held = on_tree[i]
            if held is not None:
                weight.view(-1).index_copy_(0, part.tree, held)
            if i in self._scattered:
                order = part.order or tuple(range(parameter.ndim))
                parameter.permute(order).copy_(weight.view([parameter.shape[d] for d in order]))
        if not compiling:
            self._note_versions()

    def _setting(self, name: str, place: int | None = None) -> Any:
        """A setting of path space, or one of a pair: a number or one-element tensor, or a vector over chains."""
        if self._one_group is not None:
            value = self.param_groups[self._one_group][name]
            return value if place is None else value[place]
        assert self._group_index is not None
        found = [group[name] if place is None else group[name][place] for group in self.param_groups]
        values = [torch.as_tensor(value, dtype=torch.float64, device=self._value.device) for value in found]
        return torch.stack([v.reshape(()) for v in values])[self._group_index]

    def _gradients(self) -> list[Tensor] | None:
        """Gradients of all parameters (zeros where there are none), or ``None`` where there is none at all."""
        grads: list[Tensor] = []
        found = False
        for parameter, _ in self._owned:
            grad = parameter.grad
            if grad is None:
                grads.append(torch.zeros_like(local(parameter)))
                continue
            grad = local(grad)
            if grad.is_sparse or grad.is_complex():
                raise UnsupportedError(
                    f"{type(self).__name__} found a sparse or complex gradient, expected a dense real one; use dense "
                    "embeddings."
                )
            found = True
            grads.append(grad)
        return grads if found else None

    def _downhill(self, grads: list[Tensor]) -> list[Tensor]:
        """Gradients with the sign in which each tensor moves against them."""
        if not any(group["maximize"] for group in self.param_groups):
            return grads
        return [-g if self.param_groups[i]["maximize"] else g for g, (_, i) in zip(grads, self._owned, strict=True)]

    def _views(self, tensors: Iterable[Tensor]) -> list[Tensor]:
        return [
            tensor if part.order is None and tensor.shape == part.view else part.shaped(tensor)
            for part, tensor in zip(self._layout.parts, tensors, strict=True)
        ]

    def _current(self) -> list[Tensor]:
        """The weights in the shapes they are worked on."""
        if torch.compiler.is_compiling():
            # a compiler wants to see where these views come from
            views = self._views([parameter.detach() for parameter in self._parameters])
            return [view.contiguous() if i in self._scattered else view for i, view in enumerate(views)]
        for i in self._scattered:
            self._weights[i] = self._layout.parts[i].shaped(self._parameters[i].detach()).contiguous()
        return self._weights

    def _moments(self, number: int, key: str) -> Tensor:
        """A tensor of the state that belongs to a parameter, in the view in which the parameter is worked on.

        A state that was loaded, or a parameter that was moved since, may lie otherwise in memory or be of another type.
        """
        parameter, part = self._owned[number][0], self._layout.parts[number]
        held = local(self.state[parameter][key])
        shaped = part.shaped(held)
        if not torch.compiler.is_compiling() and (
            shaped.data_ptr() != held.data_ptr() or held.dtype != self._parameters[number].dtype
        ):
            self.state[parameter][key] = torch.empty_like(parameter).copy_(self.state[parameter][key])
            shaped = part.shaped(local(self.state[parameter][key]))
        return shaped

    def _closure(self, closure: Callable[[], Any] | None) -> Any:
        if closure is None:
            return None
        with torch.enable_grad():
            return closure()

    @property
    def dead(self) -> np.ndarray:
        """Ids of the units that only weights of 0 connect to the root; all weights at them keep their values."""
        return self.skeleton.dead

    @property
    def clip_counts(self) -> Tensor:
        """How many path values have changed sign, and how many were stopped before 0 (two integers)."""
        return self._counts.sum(1)

    def _divisors(self) -> Tensor:
        """By chain, what a step divides the derivative by the logarithm by: the square of the path value."""
        return self._value * self._value

    def _applied(self, number: int) -> list[Tensor]:
        """By head and by tail, what a step multiplies the gradient of a tensor by, broadcastable to its view."""
        part, span = self._layout.parts[number], self._layout.spans[number]
        tail = self._tail[number] if span is None else self._factor[slice(*span)].view(part.tail.shape)
        return [side for side in (self._head[number], part.spread(tail)) if side is not None]

    # --- clipping, in the only norm that rescaling leaves alone

    @torch.no_grad()
    def clip_path_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale all gradients so that the norm of ``dL/dv`` over basis path values is at most ``max_norm``.

        Call it where ``torch.nn.utils.clip_grad_norm_`` would be called. The norm of ``dL/dw`` depends on the scales of
        the weights, this one does not. Its square is the sum of ``M_e (dL/dw_e)^2`` with the multipliers ``M_e`` of the
        step; where these are bounded (``max_multiplier``), it is taken with the bounded ones. Parameters outside path
        space count with their own gradients.

        Args:
            max_norm: the bound.

        Returns:
            The norm before.
        """
        self._check_versions()
        grads = self._gradients()
        if grads is None:
            return torch.zeros(())
        views = self._current()
        directions = self._views(grads)
        chains = (self._log_gradient(self._vectors, views, directions).square() / self._divisors())[1:].sum()
        total = torch.zeros_like(chains)
        for i, (part, grad) in enumerate(zip(self._layout.parts, directions, strict=True)):
            square = grad.double().square()
            for side in self._applied(i):
                square = square * (side.double().square() if self._linear else side.double())
            square = square.reshape(-1).index_fill(0, part.tree, 0.0)
            total = total + square.sum().to(total)
        norm = (chains + self._shards.sum(total)).sqrt()
        scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for parameter, _ in self._owned:
            if parameter.grad is not None:
                grad = local(parameter.grad)
                grad.mul_(scale.to(grad))
        return norm
