"""Any optimizer of torch on path values: rescaled copies of a network take the same steps."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import LBFGS, SGD, Muon, Optimizer, SparseAdam

from pathspace.errors import InputError, UnsupportedError, expect_arguments, expect_numbers
from pathspace.models.values import require_values, sharded
from pathspace.paths.skeleton import Skeleton, warn_of_dead

from .coordinates import PathCoordinates
from .matching import match, named
from .multipliers import warn_of_multipliers, warn_of_zeros
from .settings import Manner, check_group, expect_manner, expect_order, memoryless
from .shell import Closure, Shell
from .tensors import Guest, PathTensor, find_spread, fusible, local
from .trees import choice, digest, edges_of, kept_of, skeleton_of

# what a step of torch's that is not one of every number for itself would need
UNFIT: dict[type[Optimizer], str] = {
    LBFGS: "asks for the loss several times in a step",
    SparseAdam: "takes sparse gradients only",
    Muon: "takes matrices only, and chains have path values, too",
}


class PathSpace(Shell):
    r"""Any optimizer of torch, on the values of basis paths in place of the weights.

    Before a step, weights and gradients become path values ``v_e = pre_tail w_e s_head`` and their
    gradients, with ``pre`` and ``s`` the products of weights along the two trees of a skeleton; one
    more parameter has the values ``p_k`` of the tree paths. Then the optimizer takes its step, and
    the weights are computed from the path values again. So its moments are those of path values,
    which no rescaling changes: rescaled copies of a network train alike. Between steps the model
    has its own weights and gradients, and weights that other code has written are those of the next
    step.

    Args:
        optimizer: an optimizer of ``torch.optim`` over ``model.named_parameters()``, named
            parameter groups, or parameters of the traced model itself; or a list of several.
        skeleton: the skeleton of the traced model, ``ps.trace(model, ...).skeleton()``; from masks
            of a file, ``ps.load_masks(path).skeleton(ps.trace(model, ...))``.
        min_ratio: smallest absolute ratio of a path value to its value at the start. A path value
            that would come closer to 0 is set to this limit with its sign, because the weights
            could not be recovered from 0. Changes of sign are performed exactly. Both are counted
            in :attr:`clip_counts`.
        max_multiplier: upper bound of the multiplier of the learning rate in the balanced gauge at
            the start, with its root at each end of an edge. The multiplier is ``1 / (pre_u s_v)^2``
            of an edge and ``1 / p_k^2`` of a chain for optimizers of the class
            ``torch.optim.SGD``, whose steps are linear in gradients; for all others its root.
            These are invariant under rescaling, and so is the bounded step.
        relative: take steps on logarithms of path values, ``v <- v (1 + u)`` with the step ``u``
            for ``v dL/dv``, without multipliers. A path value of 0 does not change. A step then
            needs memory for a copy of the weights.

    Raises:
        InputError: a parameter of the skeleton is missing, given twice, of another shape or
            without values; a setting is out of range.
        InputTypeError: a setting is not a number.
        UnsupportedError: parameters are complex or split by FullyShardedDataParallel or ZeRO, a
            skeleton weight is 0, path values are too small to divide by, or the optimizer needs
            more than one gradient for every number.

    Parameters outside path space (pinned or unused ones) are left to the optimizer as they are. A
    parameter of path space without ``requires_grad`` keeps its value, and path values that would
    change it are constant.

    Example:
        >>> import copy, torch, pathspace as ps
        >>> from pathspace.training import PathSpace
        >>> _ = torch.manual_seed(0)
        >>> model = torch.nn.Sequential(
        ...     torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1)
        ... ).double()
        >>> x, y = torch.randn(64, 4).double(), torch.randn(64, 1).double()
        >>> skeleton = ps.trace(model, x).skeleton()
        >>> twin = ps.rescale_(copy.deepcopy(model), skeleton.graph, torch.randn(8).double())
        >>> losses = []
        >>> for one in (model, twin):
        ...     inner = torch.optim.RMSprop(one.named_parameters(), lr=1e-4)
        ...     optimizer = PathSpace(inner, skeleton)
        ...     for _ in range(50):
        ...         optimizer.zero_grad()
        ...         loss = torch.nn.functional.mse_loss(one(x), y)
        ...         loss.backward()
        ...         _ = optimizer.step()
        ...     losses.append(loss.item())
        >>> abs(losses[0] / losses[1] - 1) < 1e-9
        True
    """

    _own: ClassVar[str] = "path_space"
    min_ratio = property(attrgetter("manner.min_ratio"), doc="See the argument.")
    max_multiplier = property(attrgetter("manner.cap"), doc="See the argument.")
    relative = property(attrgetter("manner.relative"), doc="See the argument.")

    def __init__(
        self,
        optimizer: Optimizer | Sequence[Optimizer],
        skeleton: Skeleton,
        *,
        min_ratio: float = 1e-12,
        max_multiplier: float | None = None,
        relative: bool = False,
    ) -> None:
        owner = self._owner
        expect_arguments(owner, skeleton=skeleton)
        expect_manner(owner, min_ratio, max_multiplier, relative)
        super().__init__(optimizer)
        for one in self.optimizers:
            unfit = next((why for kind, why in UNFIT.items() if isinstance(one, kind)), None)
            if unfit or isinstance(one, Shell):
                raise UnsupportedError(
                    f"{owner} found {type(one).__name__}, which"
                    f" {unfit or 'works in coordinates of its own'}, expected an optimizer of"
                    " torch.optim with one step for every number; use another, such as AdamW."
                )
        warn_of_dead(owner, skeleton)
        linear = all(isinstance(one, SGD) for one in self.optimizers)
        self.manner = Manner(2 if linear else 1, max_multiplier, bool(relative), min_ratio)
        # weights at dead units are constant
        self.skeleton = skeleton.live
        # what the state has besides the moments of tensors, from the first step on
        self._kept: dict[str, Any] = {}
        given = named(self.param_groups)
        blocks, self._absent = match(owner, given, self.skeleton.graph)
        found = zip(blocks, given, strict=True)
        held = {
            name or ("a parameter" if block is None else self.skeleton.graph.blocks[block].name): p
            for block, (name, p) in found
        }
        require_values(owner, [(name, p) for name, p in held.items() if not sharded(p)])
        self._connect(blocks).expect_range()
        self._wrap()
        if not any(map(sharded, self.weights.values())):
            # (no process has all weights of a sharded model)
            if relative:
                warn_of_zeros(owner, self.weights)
            else:
                warn_of_multipliers(owner, skeleton, self.weights, self.manner)

    # --- what it works on

    @property
    def weights(self) -> dict[str, Tensor]:
        """Name in the reduction graph -> parameter in path space."""
        blocks = self.skeleton.graph.blocks
        return {
            blocks[entry.block].name: entry.parameter
            for entry in self.space.entries
            if entry.block is not None
        }

    @property
    def clip_counts(self) -> Tensor:
        """Number of sign changes of path values, and number of path values stopped
        before 0 (two integers).
        """
        found = self._kept
        return found["counts"].sum(1) if found else torch.zeros(2, dtype=torch.int64)

    def _connect(self, blocks: Sequence[int | None]) -> PathCoordinates:
        """Create the coordinates for the current memory of the weights."""
        owner, graph = self._owner, self.skeleton.graph
        groups = [g for g, group in enumerate(self.param_groups) for _ in group["params"]]
        entries = [
            PathTensor(name, parameter, group, block)
            for (name, parameter), group, block in zip(
                named(self.param_groups), groups, blocks, strict=True
            )
        ]
        entries += [
            PathTensor(graph.blocks[block].name, p, -1, block, given=False)
            for block, p in self._absent.items()
        ]
        spread = find_spread(owner, [(entry.name, entry.parameter) for entry in entries])
        count = len(self.param_groups)
        self.space = PathCoordinates(owner, self.skeleton, entries, spread, count, self.manner)
        self._memory = [entry.seen[:2] for entry in entries]
        # what a step need not look for again
        self._seen: list[tuple[object, ...]] = []
        return self.space

    def _blocks(self) -> list[int | None]:
        """The block of every parameter."""
        return [entry.block for entry in self.space.entries if entry.given]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters: outside path space, or weights of the traced model that the
        optimizer has kept constant so far.

        Raises:
            InputError: there are several inner optimizers, or a setting is out of range.
        """
        if "_made" not in self.__dict__:
            return
        if len(self.optimizers) > 1:
            super().add_param_group(param_group)
        owner, absent, inner = self._owner, self._absent, self.optimizers[0]
        inner.add_param_group(param_group)
        try:
            check_group(owner, inner.param_groups[-1])
            blocks, self._absent = match(owner, named(self.param_groups), self.skeleton.graph)
            self._connect(blocks)
        except Exception:
            inner.param_groups.pop()
            self._absent = absent
            raise

    # --- steps

    def _ready(self) -> bool:
        """Whether there are gradients; if so, follow the weights to where they are now."""
        entries = self.space.entries
        seen = [entry.seen for entry in entries]
        if seen == self._seen:
            return True
        found = [grad for entry in entries if (grad := entry.grad) is not None]
        if any(grad.is_sparse or grad.is_complex() for grad in found):
            raise UnsupportedError(
                f"{self._owner} found a sparse or complex gradient, expected a dense real"
                " one; use dense embeddings."
            )
        if not found:
            if any(p.grad is not None for group in self.param_groups for p in group["params"]):
                raise UnsupportedError(
                    f"{self._owner} found other parameters in its groups than it was made"
                    " with, as the ZeRO optimizers of DeepSpeed put there, expected those; shard"
                    " the model by torch.distributed.fsdp.fully_shard instead."
                )
            return False
        if [kind[:2] for kind in seen] != self._memory:
            self._connect(self._blocks())
            self._follow()
        self.space.look_for_frozen()
        for group in self.param_groups:
            if any(map(sharded, group["params"])):
                # (torch's kernels for many tensors take no mixture with whole ones)
                group.update({key: False for key in ("fused", "foreach") if key in group})
            elif group.get("fused") and not all(map(fusible, group["params"])):
                group["fused"] = False
        self._seen = seen
        return True

    def _follow(self) -> None:
        """Move the states to the type and device of the weights, which a model may change."""
        for one in self.optimizers:
            one.load_state_dict(one.state_dict())
        fused = any(group.get("fused") for group in self.param_groups)
        for entry in self._kept, *self._kept.get("chains", {}).values():
            for key, value in entry.items():
                # (fused kernels read the number of steps on their device)
                if isinstance(value, Tensor) and (value.ndim or fused):
                    entry[key] = value.to(self.space.device)

    def _take(self, closure: Closure | None) -> Any:
        self._refuse_unwrapped()
        loss = self._loss(closure)
        if not self._ready():
            return loss
        kept = self._kept = self._kept or self._started()
        space = self.space
        inside = space.enter(kept, exact=self._rests(), straight=memoryless(self.optimizers))
        try:
            self._attach(kept)
            self._inner_steps()
        finally:
            self._detach(kept)
            space.leave(inside, kept)
        return loss

    def _started(self) -> dict[str, Any]:
        """The entry of a state at the first step."""
        counts = torch.zeros(2, self.space.count, dtype=torch.int32, device=self.space.device)
        return {**self.space.start(), "counts": counts, "chains": {}}

    def _attach(self, kept: dict[str, Any]) -> None:
        """Give the inner optimizers the path values of chains as parameters, with their state."""
        self._guests: list[Guest] = []
        groups = ((one, group) for one in self.optimizers for group in one.param_groups)
        for number, (one, group) in enumerate(groups):
            value, waits = self.space.values[number], self.space.waits[number]
            if not value.numel() or value.grad is None:
                continue
            state = kept["chains"].pop(str(number), {})
            if state:
                one.state[value] = state
            group["params"].append(value)
            rests = (
                {}
                if waits is None
                else {
                    key: buffer.clone()
                    for key, buffer in state.items()
                    if getattr(buffer, "shape", None) == value.shape
                }
            )
            self._guests.append(Guest(one, group, value, number, rests))

    def _detach(self, kept: dict[str, Any]) -> None:
        """Take the path values of chains and their state away again."""
        for guest in self._guests:
            guest.group["params"].pop()
            found = guest.optimizer.state.pop(guest.value, {})
            # (moments of constant path values are constant)
            for key, old in guest.rests.items():
                waits = self.space.waits[guest.number]
                found[key] = torch.where(waits, old, found[key])  # type: ignore[arg-type]
            if found:
                kept["chains"][str(guest.number)] = dict(found)
            guest.value.grad = None
        self._guests = []

    @torch.no_grad()
    def clip_path_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale all gradients so that the norm of ``dL/dv`` over basis path values
        is at most ``max_norm``.

        Call it instead of ``torch.nn.utils.clip_grad_norm_``. The norm of ``dL/dw`` depends on the
        scales of the weights; this norm does not. With ``max_multiplier`` the scales are bounded as
        in the step; for relative steps it is the norm of ``v dL/dv``. Parameters outside path space
        count with their own gradients.

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
        kept = self._kept or self._started()
        # (exactly, so that the weights come back as they are)
        inside = self.space.enter(kept, exact=True)
        norm = self.space.gradient_norm()
        self.space.leave(inside, {**kept, "counts": torch.zeros_like(kept["counts"])})
        scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for entry in self.space.entries:
            if entry.grad is not None:
                local(entry.grad).mul_(scale.to(entry.grad.dtype))
        return norm

    # --- states, copies and pickles

    def fingerprint(self) -> str:
        """A hash of the two trees, by which a state of another skeleton is refused."""
        return hashlib.sha256(edges_of(self.skeleton).numpy().tobytes()).hexdigest()

    def _mark(self) -> Tensor:
        """A hash of the trees and of the classes of the optimizers."""
        kinds = ", ".join(type(one).__name__ for one in self.optimizers)
        return digest(f"{self._owner} {kinds} {self.fingerprint()}")

    def _published(self) -> dict[str, Any]:
        own = self.skeleton
        trees = {"fingerprint": self._mark(), "choice": choice(own), "trees": edges_of(own)}
        trees = {name: tensor.to(self.space.device) for name, tensor in trees.items()}
        return {**trees, **self._kept}

    def _load(self, state_dict: Mapping[str, Any]) -> None:
        owner, (state, found) = self._owner, self._without_own(state_dict)
        expect_order(owner, state, self.param_groups)
        before = self.skeleton, self.space, self._memory
        other = skeleton_of(self.skeleton, found) if isinstance(found, Mapping) else None
        try:
            if other is not None:
                blocks, self.skeleton = self._blocks(), other
                self._connect(blocks)
            kept = self._checked(found)
        except Exception:
            self.skeleton, self.space, self._memory = before
            raise
        super()._load(state)
        self._kept, self._seen = kept, []

    def _checked(self, found: Any) -> dict[str, Any]:
        """A copy of the shell's entry of a state, on the device of the weights.

        Raises:
            InputError: the state belongs to another optimizer or another skeleton, or is damaged.
        """
        owner, space = self._owner, self.space
        mark = found.get("fingerprint") if isinstance(found, Mapping) else None
        if not isinstance(mark, Tensor) or not torch.equal(self._mark(), mark.cpu()):
            raise InputError(
                f"{owner} found a state dict of another optimizer or skeleton, expected one saved"
                " with these two trees; rebuild the skeleton with the rule and seed it was trained"
                " with."
            )
        if "least" not in found:
            return {}
        wanted: dict[str, tuple[int, ...]] = {"least": (space.count,), "counts": (2, space.count)}
        if self.manner.cap is not None:
            wanted["balanced"] = (len(self.skeleton.chain),)
        sizes = {str(number): len(value) for number, value in enumerate(space.values)}
        return kept_of(owner, found, wanted, sizes, space.device)

    def __getstate__(self) -> dict[str, Any]:
        """State for copies and pickles, without the traced model."""
        graph = dataclasses.replace(self.skeleton.graph, captured=None, parameters={})  # type: ignore[arg-type]
        kept = {
            key: value
            for key, value in super().__getstate__().items()
            if key not in ("space", "_memory", "_seen", "_guests")
        }
        skeleton = dataclasses.replace(self.skeleton, graph=graph)
        return {**kept, "skeleton": skeleton, "_given": self._blocks()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a copy or a pickle."""
        super().__setstate__(state)
        self._connect(self.__dict__.pop("_given"))
