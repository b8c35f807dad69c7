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

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from pathspace import InputError, Skeleton, UnsupportedError
from training.optim.frozen import held_chains
from training.optim.kernels import group_size, leaving, rows_of_group
from training.optim.layout import DYNAMIC, PLAIN, STATIC, Layout, make_layout
from training.optim.matching import match, named, refuse_complex
from training.optim.settings import SMALLEST, check_group, number
from training.optim.sharding import Whole, find_shards, local, version
from training.optim.state import Remembered
from training.optim.vectors import Parts, cut


def power(table: Tensor, ids: Tensor) -> Tensor:
    """``table[|id|] ** sign(id)``."""
    value = table[ids.abs()]
    return torch.where(ids < 0, value.reciprocal(), value)


class PathOptimizer(Remembered):
    """Base of the optimizers on path values: knows the trees, and passes from path values to weights.

    Args:
        params: ``model.named_parameters()``, named parameter groups, or parameters of the traced model itself.
        defaults: the settings of a group.
        skeleton: the skeleton of the traced model.
        min_ratio: smallest ``|R_k|``.

    Raises:
        InputError: a parameter of the skeleton is missing or has another shape.
        UnsupportedError: complex or scattered parameters, shards other than those of ``fully_shard``, or a skeleton
            weight of 0.

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
        self.skeleton = skeleton
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
        # what no path value may come closer to 0 than; 0, and this as a ratio
        self._floor, self._limits = vector(layout.count), vector(2 * layout.count).view(2, -1).zero_()
        # -1 for each tail, then the weight on the trees: with these, entries are multiplied where chains sum them
        self._factors, self._coefficient = vector(2 * layout.count), vector(tails + trees).neg_()
        dtypes = {p.dtype for p, block in zip(self._parameters, self._blocks, strict=True) if block is not None}
        self._whole = {dtype: vector(2 * tails + trees, dtype) for dtype in dtypes}
        size = group_size(sum(p.numel() for p in self._parameters), device)
        self._rows = [rows_of_group(part, size) for part in layout.parts]
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
        return cut(self._layout, [p.dtype for p in self._parameters], self._factors, self._coefficient, self._whole)

    @property
    def _vectors(self) -> Parts:
        """Parts of the vectors; a compiler wants to see where they come from, and cannot start from a view."""
        return self._cut() if torch.compiler.is_compiling() else self._kept

    @property
    def _tree(self) -> Tensor:
        """The weights on the trees, in float64."""
        return self._kept.tree

    # --- what follows from the weights

    def _tree_weights(self) -> Tensor:
        """Present weights of the edges on the trees, in the order of the layout, in float64."""
        some = [
            part.shaped(p.detach()).reshape(-1)[part.tree].double()
            for part, p, block in zip(self._layout.parts, self._parameters, self._blocks, strict=True)
            if block is not None
        ]
        return torch.cat(some) if some else torch.zeros(0, dtype=torch.float64)

    @torch.no_grad()
    def resync(self) -> None:
        """Recompute all products along the trees from the weights.

        Called by itself when weights were changed by in-place operations other than this optimizer's (loading a model's
        state, clipping weights); call it after changing ``parameter.data``, which leaves no trace.

        Raises:
            UnsupportedError: a skeleton weight is 0.
        """
        prefix, suffix = self._products()
        self._factor.copy_(self._factors_by_tail(prefix))
        self._value.copy_((prefix * suffix)[self._layout.first.cpu()])
        self._floor.copy_(self._value).abs_().mul_(self.min_ratio)
        # the root has no path value: dividing by infinity leaves its ratio at 1
        self._value[0], self._floor[0] = torch.inf, 0
        self._tree.copy_(self._tree_weights())
        self._constants(prefix, suffix)
        self._check_range()
        self._note_versions()

    def _products(self) -> tuple[Tensor, Tensor]:
        """Prefixes and suffixes of all units, from the weights."""
        skeleton, layout, tables = self.skeleton, self._layout, []
        place = {block: i for i, block in enumerate(self._blocks) if block is not None}
        for tree in (skeleton.tree_in, skeleton.tree_out):
            values = torch.zeros(len(tree.block), dtype=torch.float64)
            for block, units in tree.by_block():
                flat = self._parameters[place[block]].detach().reshape(-1)
                index = tree.index[units] - layout.parts[place[block]].offset
                held = (index >= 0) & (index < flat.numel())
                some = flat[torch.from_numpy(index[held]).to(flat.device)]
                values[torch.from_numpy(units[held])] = some.double().cpu()
            values = self._shards.sum(values.to(self._value.device)).cpu()
            values[0] = 1
            bad = (values == 0) | ~values.isfinite()
            if bool(bad.any()):
                unit = int(bad.nonzero()[0])
                name, found = skeleton.graph.blocks[tree.block[unit]].name, float(values[unit])
                raise UnsupportedError(
                    f"{type(self).__name__} found a skeleton weight of {found:g} in {name!r}, expected "
                    + (
                        "non-zero ones; use rule='magnitude', or init_skeleton(model, skeleton) first."
                        if found == 0
                        else "finite ones; load weights from before they diverged."
                    )
                )
            tables.append(values)
        return skeleton.prefixes(tables[0]), skeleton.suffixes(tables[1])

    def _factors_by_tail(self, prefix: Tensor) -> Tensor:
        """``1 / pre`` of all tails that move, to the power that a step takes."""
        tails = [part.tail.reshape(-1) for part in self._layout.parts if part.kind == DYNAMIC]
        ids = torch.cat(tails) if tails else torch.zeros(0, dtype=torch.int64)
        return self._power(power(prefix, ids).reciprocal()).to(self._factor)

    def _check_range(self) -> None:
        """Refuse path values so small that what a step divides by them is no number.

        Raises:
            UnsupportedError: naming the first tensor.
        """
        bad = [not self._capped and not bool(self._value.square().reciprocal().isfinite().all())]
        for i, parameter in enumerate(self._parameters):
            sizes = [float(factor.abs().amax()) for factor in self._multipliers(i) if factor.numel()]
            # of moments, the squares are kept
            sizes = [math.prod(sizes * 2)] if self._linear else sizes
            bad.append(not all(size <= torch.finfo(parameter.dtype).max for size in sizes))
        everywhere = self._shards.sum(torch.tensor(bad, device=self._value.device).to(torch.int64)).tolist()
        if any(everywhere):
            names = [f" at {name!r}" if name else "" for name, _ in named(self.param_groups)]
            where = next((name for name, wrong in zip(names, everywhere[1:], strict=True) if wrong), "")
            raise UnsupportedError(
                f"{type(self).__name__} found path values p so small that 1/p^2 is beyond the range of numbers{where}, "
                f"expected ones to divide by; start with init_skeleton(model, skeleton){self._way_out}, or compute "
                "in float64."
            )

    def _multipliers(self, number: int) -> list[Tensor]:
        """By head and by tail, what a step multiplies the gradient of a tensor by."""
        span = self._layout.spans[number]
        tail = self._tail[number] if span is None else self._factor[slice(*span)]
        return [factor for factor in (self._head[number], tail) if factor is not None]

    def _constants(self, prefix: Tensor, suffix: Tensor) -> None:
        """Factors that a step never changes: ``1 / s_head``, and ``1 / pre_tail`` where no chain is involved."""
        self._head: list[Tensor | None] = []
        self._tail: list[Tensor | None] = []
        for part, (parameter, _) in zip(self._layout.parts, self._owned, strict=True):
            head = power(suffix, part.head).reciprocal()
            tail = power(prefix, part.tail).reciprocal()
            for values, kept, wanted in (
                (head, self._head, part.kind != PLAIN),
                (tail, self._tail, part.kind == STATIC),
            ):
                factor = self._power(values)
                # with a bound, the bounded product is rounded, not its factors
                exact = factor.to(parameter.device) if self._capped and kept is self._head else factor.to(parameter)
                kept.append(exact if wanted and not bool((factor == 1).all()) else None)

    _linear = False
    _capped = False
    _way_out = ""
    _shards: Whole
    _counts: Tensor

    def _power(self, scale: Tensor) -> Tensor:
        """The factor a step takes from ``1 / scale``: its square for gradient descent."""
        return scale if self._linear else scale.square()

    def _note_versions(self) -> None:
        self._seen = self._look()

    def _look(self) -> list[tuple[int, int, tuple[int, ...]]]:
        """Where the weights are, how often they were written to, and how they lie."""
        if type(self._shards) is not Whole:
            pairs = [(version(p), local(p)) for p, _ in self._owned]
            return [(held.data_ptr(), count, held.stride()) for count, held in pairs]
        return [(p.data_ptr(), p._version, p.stride()) for p in self._parameters]

    def _check_versions(self) -> None:
        """Look after weights that were changed by someone else, without asking the device for anything."""
        if torch.compiler.is_compiling():
            return
        now = self._look()
        if now != self._seen:
            if any(new[::2] != old[::2] for new, old in zip(now, self._seen, strict=True)):
                self._connect()
            else:
                # weights off the trees may change freely; with shards, all devices decide together
                changed = self._tree_weights() != self._as_written()
                if bool(self._shards.sum(changed.any().to(torch.int64))):
                    self.resync()
                elif any(count < 0 for _, count, _ in self._seen):
                    self._recall()
            self._note_versions()
        self._look_for_frozen([parameter.grad for parameter, _ in self._owned])

    def _recall(self) -> None:
        """Recompute what a state does not hold, from the weights that belong to it."""
        prefix, suffix = self._products()
        if self._stale:
            self._factor.copy_(self._factors_by_tail(prefix))
            self._stale = False
        self._constants(prefix, suffix)

    def _look_for_frozen(self, grads: Sequence[Tensor | None]) -> None:
        """Note which tensors of path space are not to move, and which path values stay with them.

        Those that ask for no gradient; all of them where no gradient has reached any (before the first step, where
        none is known, those that ask for one do).
        """
        inside = [block is not None for block in self._blocks]
        asked = [parameter.requires_grad for parameter, _ in self._owned]
        reached = any(i and a and g is not None for i, a, g in zip(inside, asked, grads, strict=True))
        unknown = all(grad is None for grad in grads)
        still = [i and not (a and (reached or unknown)) for i, a in zip(inside, asked, strict=True)]
        if still == self._still:
            return
        self._still, self._held = still, None
        frozen = [block for block, s in zip(self._blocks, still, strict=True) if s and block is not None]
        held = held_chains(self.skeleton, frozen, self._layout.count)
        if held.any():
            self._held = torch.from_numpy(held).to(self._value.device)

    def _as_written(self) -> Tensor:
        """The tree weights as the tensors hold them: rounded to their types."""
        some = [
            value.to(p.dtype).double()
            for value, p, block in zip(
                self._tree.split(list(self._layout.trees)), self._parameters, self._blocks, strict=True
            )
            if block is not None
        ]
        return torch.cat(some) if some else self._tree

    # --- the step's vectors

    def _log_gradient(self, weights: Sequence[Tensor], grads: Sequence[Tensor]) -> Tensor:
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
        total = self._vectors.inverse.zero_()
        if chained or trees:
            everything = torch.cat([*chained, *trees]) * self._coefficient
            if layout.signs is not None:
                everything.mul_(layout.signs)
            total.index_add_(0, layout.target, everything)
        total = self._shards.sum(total)
        if any(group["maximize"] for group in self.param_groups):
            up = self._setting("maximize")
            total = total * (1 - 2 * up)
        return total if self._held is None else total.masked_fill_(self._held, 0.0)

    def _groups(self) -> list[int]:
        """Rows of every tensor that are worked on at once (0: all)."""
        # a compiler finds groups of its own
        return [0] * len(self._rows) if torch.compiler.is_compiling() else self._rows

    def _pass(self) -> None:
        """Carry out the ratios on everything that is kept by unit, and prepare what the tensors need."""
        kept = self._vectors
        ratio, tree, size = kept.ratio, kept.tree, torch.abs(kept.ratio, out=kept.inverse)
        # counted where they happen, and added up only when someone asks
        if self._held is not None:
            ratio.masked_fill_(self._held, 1.0)
            size.masked_fill_(self._held, 1.0)
        torch.div(self._floor, self._value, out=self._limits[1]).abs_()
        self._counts.add_(kept.both <= self._limits)
        torch.copysign(torch.maximum(size, self._limits[1], out=size), ratio, out=ratio)
        self._value.mul_(ratio)
        torch.reciprocal(ratio, out=kept.inverse)
        tails, trees = self._factor.numel(), tree.numel()
        taken = self._factors.index_select(0, self._layout.source)
        keep, at_head, at_other = torch.split_with_sizes(taken, [tails, trees, taken.numel() - tails - trees])
        # 1 / (pre^n R): the step that comes together with the change of the tail; then 1 / (pre R)^n
        step = self._factor * keep
        if self._linear:
            self._factor.copy_(step)
        else:
            torch.mul(step, keep, out=self._factor)
        self._bound_steps(step, keep)
        tree.mul_(at_head)
        if at_other.numel():
            tree.mul_(at_other)
        for rounded in kept.rounded.values():
            for exact, view in zip((step, keep, tree), rounded, strict=True):
                view.copy_(exact)

    def _bound_steps(self, step: Tensor, keep: Tensor) -> None:
        """A place for bounds on the multipliers.

        Args:
            step: by tail, what its edges' gradients will be multiplied by; bounded in place.
            keep: by tail, ``1 / R``.
        """

    def _write_trees(self, weights: Sequence[Tensor]) -> None:
        """Put the tree weights, which are kept in float64, into the tensors; write back where there was no view."""
        compiling, on_tree = torch.compiler.is_compiling(), self._vectors.on_tree
        for flat, place, kept in () if compiling else self._written:
            flat.index_copy_(0, place, kept)
        for i in range(len(weights)) if compiling else self._scattered:
            part, parameter, weight = self._layout.parts[i], self._parameters[i], weights[i]
            values = on_tree[i]
            if values is not None:
                weight.view(-1).index_copy_(0, part.tree, values)
            if i in self._scattered:
                order = part.order or tuple(range(parameter.ndim))
                parameter.permute(order).copy_(weight.view([parameter.shape[d] for d in order]))
        if not compiling:
            self._note_versions()

    def _setting(self, name: str, place: int | None = None) -> Any:
        """A setting of path space, or one of a pair: a number or one-element tensor, or a vector over chains."""
        found = [group[name] if place is None else group[name][place] for group in self.param_groups]
        if self._one_group is not None:
            return found[self._one_group]
        assert self._group_index is not None
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
    def guards(self) -> Tensor:
        """How many path values have changed sign, and how many were stopped before 0 (two integers)."""
        return self._counts.sum(1)

    # --- clipping, in the only norm that rescaling leaves alone

    @torch.no_grad()
    def clip_path_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale all gradients so that the norm of ``dL/dv`` over basis path values is at most ``max_norm``.

        Call it where ``torch.nn.utils.clip_grad_norm_`` would be called. The norm of ``dL/dw`` depends on the scales of
        the weights, this one does not. Parameters outside path space count with their own gradients.

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
        chains = (self._log_gradient(views, directions) / self._value)[1:].square().sum()
        total = torch.zeros_like(chains)
        for i, (part, grad) in enumerate(zip(self._layout.parts, directions, strict=True)):
            span = self._layout.spans[i]
            square = grad.double().square()
            head, tail = self._head[i], part.spread(self._tail[i])
            if head is not None:
                square = square * (head.double() if not self._linear else head.double().square())
            if span is not None:
                factor = part.spread(self._factor[span[0] : span[1]].view(part.tail.shape))
                square = square * (factor.square() if self._linear else factor)
            elif tail is not None:
                square = square * (tail.double() if not self._linear else tail.double().square())
            square = square.reshape(-1).index_fill(0, part.tree, 0.0)
            total = total + square.sum().to(total)
        norm = (chains + self._shards.sum(total)).sqrt()
        scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for parameter, _ in self._owned:
            if parameter.grad is not None:
                grad = local(parameter.grad)
                grad.mul_(scale.to(grad))
        return norm
