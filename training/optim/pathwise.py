r"""The base of optimizers on path values: exact conversion of steps on path
values to steps on weights.

Weights on ``T_out`` are constant. A step changes the value of the chain ``p_k`` by the ratio
``R_k`` and the value of ``P(e)``, for an edge ``e`` in neither tree, from ``v_e`` to
``v_e'``. The weights then are::

    w_e <- v_e' / (pre_tail s_head) / R_tail                  edges in neither tree
    w_e <- w_e R_head / R_tail                                edges of T_in that are not in T_out
    pre_v <- pre_v R_v

and the derivative with respect to the logarithm of ``p_k`` is, with ``lambda_e = w_e dL/dw_e``::

    c_k = sum over e in T_in \\ T_out entering k of lambda_e
        - sum over e not in T_out leaving k of lambda_e
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from pathspace.errors import InputError, UnsupportedError, expect_arguments, expect_numbers
from pathspace.models.values import is_cut, require_values
from pathspace.paths.skeleton import Skeleton, warn_of_dead

from . import state
from .fused import Fused
from .kernels import taken, worth_compiling
from .matching import match, named
from .multipliers import warn_of_multipliers, warn_of_zeros
from .settings import SMALLEST, check_group, expect_parameters, expect_state, number, switch
from .sharding import local, local_gradient, sharded
from .slots import Groups
from .space import PathSpace
from .state_order import expect_order
from .tree_products import Manner
from .vectors import Parts


@dataclass
class Step:
    """The arguments of a rule in one step (not frozen, which would take a
    microsecond more to create).

    Attributes:
        space: the path space.
        groups: the parameter groups.
        state: the state of every parameter.
        kept: the rule's own vectors, by name.
        parts: the vectors of path space.
        weights: the weights in the shapes of their views.
        grads: their gradients (zeros if there are none).
        heads: factors by head.
    """

    space: PathSpace
    groups: Groups
    state: Mapping[Tensor, dict[str, Any]]
    kept: Mapping[str, Tensor]
    parts: Parts
    weights: Sequence[Tensor]
    grads: Sequence[Tensor]
    heads: Sequence[Tensor | None]

    def downhill(self) -> list[Tensor]:
        """Gradients of the loss to minimise: negated for groups with ``maximize``."""
        pairs = zip(self.grads, self.space.slots, strict=True)
        return [-grad if self.groups[slot.group]["maximize"] else grad for grad, slot in pairs]

    def setting(self, name: str, place: int | None = None) -> Any:
        """A setting of path space: a number or one-element tensor, or a vector over chains."""
        return self.space.setting(self.groups, name, place)


class StepRule(ABC):
    """How path values change in a step; each optimizer on path values has its own rule."""

    manner: Manner
    # names of the moments of chains, and of tensors
    chains: ClassVar[tuple[str, ...]]
    buffers: ClassVar[tuple[str, ...]]

    @abstractmethod
    def vectors(self, chains: Tensor, tensors: int) -> dict[str, Tensor]:
        """Initial values of the vectors that the rule keeps between steps.

        Args:
            chains: a vector with the shape, type and device of vectors over chains.
            tensors: number of tensors.
        """

    @abstractmethod
    def ratios(self, step: Step, gradient: Tensor) -> None:
        """Write ``R_k`` into ``step.parts.ratio``, given ``c_k``."""

    @abstractmethod
    def move(self, step: Step) -> None:
        """Update the weights in neither tree."""


class PathOptimizer(Optimizer):
    """Base class of the optimizers on path values: torch's interface for
    one rule in one path space.

    Args:
        params: ``model.named_parameters()``, named parameter groups, or parameters of
            the traced model itself.
        defaults: the settings of a group.
        skeleton: the skeleton of the traced model.
        min_ratio: smallest absolute ratio of a path value to its value at the start.
        rule: how path values change.

    Raises:
        InputError: a parameter of the skeleton is missing, given twice, of another shape or
            without values.
        UnsupportedError: parameters are complex or split by FullyShardedDataParallel or ZeRO, a
            skeleton weight is 0, or path values are too small to divide by.

    Reference:
        The two-tree basis and its closed form: ``docs/g-sgd.md``.
    """

    def __init__(
        self,
        params: Iterable[Any],
        defaults: dict[str, Any],
        skeleton: Skeleton,
        min_ratio: float,
        rule: StepRule,
    ) -> None:
        owner = type(self).__name__
        expect_arguments(owner, skeleton=skeleton)
        params = expect_parameters(owner, params)
        number(owner, "min_ratio", min_ratio, low=SMALLEST, high=1.0)
        switch(owner, "relative", rule.manner.relative)
        warn_of_dead(owner, skeleton)
        # weights at dead units are constant
        self.skeleton, self.min_ratio, self._rule = skeleton.live, min_ratio, rule
        self._space: PathSpace | None = None
        self._kept: dict[str, Tensor] = {}
        self._fused: Fused | None = None
        self._absent: dict[int, Tensor] = {}
        super().__init__(params, defaults)
        given = named(self.param_groups)
        blocks, self._absent = match(owner, given, self.skeleton.graph)
        found = zip(blocks, given, strict=True)
        held = {
            name or ("a parameter" if block is None else self.skeleton.graph.blocks[block].name): p
            for block, (name, p) in found
        }
        require_values(owner, [(name, p) for name, p in held.items() if not is_cut(p)])
        self._connect(blocks)
        if not any(map(sharded, self.weights.values())):
            # (no process has all weights of a sharded model)
            (warn_of_zeros if rule.manner.relative else warn_of_multipliers)(
                owner, skeleton, self.weights, rule.manner
            )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters: outside path space, or weights of the traced model that the
        optimizer has kept constant so far.
        """
        super().add_param_group(param_group)
        owner, absent = type(self).__name__, self._absent
        try:
            check_group(owner, self.param_groups[-1])
            if self._space is not None:
                given = named(self.param_groups)
                blocks, self._absent = match(owner, given, self.skeleton.graph)
                self._connect(blocks)
        except Exception:
            self.param_groups.pop()
            self._absent = absent
            raise

    @property
    def max_multiplier(self) -> float | None:
        """The bound of the multipliers."""
        return self._rule.manner.cap

    @property
    def relative(self) -> bool:
        """Whether steps are relative to path values."""
        return self._rule.manner.relative

    @property
    def weights(self) -> dict[str, Tensor]:
        """Name in the reduction graph -> parameter in path space."""
        blocks = self.skeleton.graph.blocks
        return {
            blocks[slot.block].name: slot.parameter
            for slot in self.space.slots
            if slot.block is not None
        }

    def _connect(self, blocks: Sequence[int | None]) -> None:
        """Create the path space for the current memory of the weights; the
        rule's vectors are kept.
        """
        owner, manner = type(self).__name__, self._rule.manner
        given = (
            owner,
            self.param_groups,
            blocks,
            self.skeleton,
            manner,
            self.min_ratio,
            self._absent,
        )
        space = PathSpace(*given, before=self._space)
        kept = self._rule.vectors(space.vectors.value, len(space.slots))
        vectors, parts = space.vectors, space.vectors.kept
        everything = {
            "factor": vectors.factor,
            "value": vectors.value,
            "least": parts.least,
            "tree": parts.tree,
            "counts": space.counts,
        }
        if self._space is not None:
            for name, vector in (*kept.items(), ("counts", space.counts)):
                old = self._kept[name]
                # new tensors have taken no step
                if name == "steps" or old.shape == vector.shape:
                    vector[: len(old)] = old.to(vector.device)[: len(vector)]
        if self.max_multiplier is not None:
            everything["balancing"] = space.balancing
        everything |= kept
        fused = any(group.get("fused") for group in self.param_groups)
        self._fused = (
            Fused(space, everything, self._rule.chains, self._rule.buffers) if fused else None
        )
        self._space, self._kept = space, everything
        self._compiles = worth_compiling(
            [slot.held for slot in space.slots], math.inf if space.few else 0
        )

    @property
    def space(self) -> PathSpace:
        """The path space of these parameters."""
        assert self._space is not None
        return self._space

    def _ready(self) -> bool:
        """Whether there are gradients; if so, update path space after changes
        of weights by other code.
        """
        found = [slot.grad for slot in self.space.slots if slot.grad is not None]
        if any(grad.is_sparse or grad.is_complex() for grad in found):
            raise UnsupportedError(
                f"{type(self).__name__} found a sparse or complex gradient, expected a dense real"
                " one; use dense embeddings."
            )
        if not found:
            if any(p.grad is not None for group in self.param_groups for p in group["params"]):
                raise UnsupportedError(
                    f"{type(self).__name__} found other parameters in its groups than it was made"
                    " with, as the ZeRO optimizers of DeepSpeed put there, expected those; shard"
                    " the model by torch.distributed.fsdp.fully_shard instead."
                )
            return False
        if not torch.compiler.is_compiling() and self.space.refresh():
            self._connect(self.space.given)
            self.space.refresh()
        return True

    def _working(self) -> Step:
        """The arguments of a step, with zeros for missing gradients."""
        space = self.space
        found = [local_gradient(slot.parameter) if slot.given else None for slot in space.slots]
        grads = [
            torch.zeros_like(s.held) if g is None else g
            for s, g in zip(space.slots, found, strict=True)
        ]
        tensors = space.weights(), space.views(grads), [slot.head for slot in space.slots]
        return Step(space, self.param_groups, self.state, self._kept, space.vectors.parts, *tensors)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step; with a closure, the loss it returns."""
        # (the decorator takes three microseconds more)
        with torch.no_grad():
            return taken(self._take, closure, self._compiles)

    def _take(self, closure: Callable[[], Any] | None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if not self._ready():
            return loss
        if self._fused is not None and not torch.compiler.is_compiling():
            self._fused.step(self.param_groups, self.state)
            return loss
        step = self._working()
        space = step.space
        self._rule.ratios(
            step, space.log_gradient(step.groups, step.parts, step.weights, step.grads)
        )
        space.carry(step.parts)
        self._rule.move(step)
        space.finish(step.parts, step.weights)
        return loss

    def resync(self) -> None:
        """Recompute all products along the trees from the weights.

        The optimizer calls it after other in-place operations on weights (loading a model's
        state, clipping weights). Call it after changes of ``parameter.data``, which the
        optimizer cannot detect.

        Raises:
            UnsupportedError: a skeleton weight is 0.
        """
        self.space.resync()

    @property
    def dead(self) -> np.ndarray:
        """Ids of the units with only weights of 0 between them and the root; all
        weights at them are constant.
        """
        return self.skeleton.dead

    @property
    def clip_counts(self) -> Tensor:
        """Number of sign changes of path values, and number of path values stopped
        before 0 (two integers).
        """
        return self.space.counts.sum(1)

    @torch.no_grad()
    def clip_path_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale all gradients so that the norm of ``dL/dv`` over basis path values
        is at most ``max_norm``.

        Call it instead of ``torch.nn.utils.clip_grad_norm_``. The norm of ``dL/dw`` depends on the
        scales of the weights; this norm does not. Its square is the sum of ``M_e (dL/dw_e)^2`` with
        the multipliers ``M_e`` of the step, bounded with ``max_multiplier``; for relative steps it
        is the norm of ``v dL/dv``. Parameters outside path space count with their own gradients.

        Args:
            max_norm: the bound; infinity measures the norm alone.

        Returns:
            The norm before.

        Raises:
            InputError: the bound is not a number of at least 0.
        """
        expect_numbers("clip_path_grad_norm_", "a number from 0 to inf", max_norm=max_norm)
        if not self._ready():
            return torch.zeros(())
        step = self._working()
        space = step.space
        gradient = space.log_gradient(step.groups, step.parts, step.weights, step.grads)
        chains = (gradient.square() / space.divisors())[1:].sum()
        total = torch.zeros_like(chains)
        by_square = space.manner.linear or space.manner.relative
        for i, (slot, grad) in enumerate(zip(space.slots, step.grads, strict=True)):
            if not space.spread.counted[i]:
                continue
            square = grad.double().square()
            for side in space.applied(i):
                square = square * (side.double().square() if by_square else side.double())
            square = square.reshape(-1).index_fill(0, slot.part.tree.long(), 0.0)
            total = total + square.sum().to(total) * space.share(i) ** (
                2 if space.manner.linear else 1
            )
        norm = (chains + space.spread.sum(total)).sqrt()
        scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for slot in space.slots:
            if slot.grad is not None:
                grad = local(slot.grad)
                grad.mul_(scale.to(grad))
        return norm

    # --- state dicts, copies and pickles

    def fingerprint(self) -> str:
        """A hash of the two trees, stored in the state, so that a state of
        another skeleton is refused.
        """
        return state.fingerprint(self.skeleton)

    def state_dict(self) -> dict[str, Any]:
        """State of the optimizer, with copies of the vectors of path space and
        the skeleton's fingerprint.
        """
        fresh = not self.state
        state.publish(type(self).__name__, self.space, self._kept, self.state)
        try:
            return super().state_dict()
        finally:
            if fresh:
                # before the first step there are no moments, so the state must be empty
                self.state.clear()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of the same rule and seed; weights may be loaded before or after.

        The trees are those of the state: a rule may choose others for other weights.

        Raises:
            InputError: the state belongs to another optimizer or another skeleton.
        """
        owner, found = type(self).__name__, []

        def check(_: Optimizer, loaded: dict[str, Any]) -> None:
            before = self.skeleton, self._space, self._kept, self._fused, self._compiles
            expect_state(owner, loaded)
            expect_order(owner, loaded, self.param_groups)
            if (skeleton := state.trees(loaded, self.skeleton)) is not None:
                blocks, self.skeleton, self._space = self.space.given, skeleton, None
                self._connect(blocks)
            try:
                found.append(state.checked(owner, loaded, self.space, self._kept))
            except Exception:
                self.skeleton, self._space, self._kept, self._fused, self._compiles = before
                raise

        if not isinstance(state_dict, dict):
            raise InputError(
                f"{owner} found a state of type {type(state_dict).__name__}, expected the dict of "
                "optimizer.state_dict()."
            )
        # (registered last, because other hooks may change the state)
        handle = self.register_load_state_dict_pre_hook(check)
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()
        state.restore(found[0], self.space, self._kept)
        state.publish(owner, self.space, self._kept, self.state)

    def __getstate__(self) -> dict[str, Any]:
        """State for copies and pickles, without the traced model."""
        return {
            **super().__getstate__(),
            "skeleton": state.without_model(self.skeleton),
            "min_ratio": self.min_ratio,
            "_rule": self._rule,
            "_blocks": self.space.given,
            "_absent": self._absent,
            "_kept": self._kept,
        }

    def __setstate__(self, found: dict[str, Any]) -> None:
        """Restore a copy or a pickle."""
        blocks, kept = found.pop("_blocks", None), found.pop("_kept", None)
        super().__setstate__(found)
        if blocks is None:
            return
        self._patch_step_function()
        self._space = None
        self._connect(blocks)
        for name, value in kept.items():
            self._kept[name].copy_(value)
        # what depends on the vectors is computed again, as for a loaded state
        self.space.loaded = True


__all__ = ["PathOptimizer", "Step", "StepRule"]
