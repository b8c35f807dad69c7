"""Channels of a model: slices that can be removed, permuted and matched together."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..capture.capture import capture
from ..errors import (
    SEED,
    InputError,
    InputTypeError,
    UnsupportedError,
    expect_arguments,
    expect_numbers,
)
from ..models.copies import safe_deepcopy
from ..models.finite import check_finite
from ..models.inputs import arranged
from ..models.refusals import check_runs
from ..models.running import distance
from ..models.walk import tensors_of
from ..shown import Shown, text_table
from .declared_sizes import check_no_masks, declare_norms, follow_config
from .exchangeable import channel_groups, unused
from .groups import ChannelGroup, Cut, Slices
from .importance import importance
from .kept_channels import kept_numbers, share_of, what_stays, whole_order
from .matching import (
    Matching,
    by_activations,
    by_weights,
    expect_alike,
    permuted,
    reorder,
    weight_distance,
)
from .removal import TOLERANCE, CutTester, mask_channels, remove_channels

if TYPE_CHECKING:
    from rich.table import Table

Keep = float | Mapping[str, Any]


@dataclass(frozen=True, eq=False)
class ChannelGroups(Shown):
    """All channels of a model, made by :func:`channels`.

    Attributes:
        model: the model.
        groups: its groups of channels, in the order of the model's tensors.
    """

    model: nn.Module
    groups: tuple[ChannelGroup, ...]
    _inputs: tuple[tuple[Any, ...], Mapping[str, Any]] = field(repr=False)
    _mixed: dict[str, str] = field(default_factory=dict, repr=False)
    _unused: Sequence[str] = field(default=(), repr=False)

    def __len__(self) -> int:
        return len(self.groups)

    def __iter__(self) -> Iterator[ChannelGroup]:
        return iter(self.groups)

    def __getitem__(self, key: int | str) -> ChannelGroup:
        if isinstance(key, int) and -len(self.groups) <= key < len(self.groups):
            return self.groups[key]
        for group in self:
            if group.name == key:
                return group
        names = ", ".join(group.name for group in self.groups[:8])
        raise InputError(f"There is no channel group {key!r}; the first groups are {names}.")

    def __rich__(self) -> Table:
        columns = ("written by", "channels", "tensors", "why channels cannot be removed")
        rows = (
            (each.name, str(len(each)), str(len({name for name, _ in each.slices})), each.reason)
            for each in self.groups
        )
        return text_table("Groups of channels", columns, rows, right=(1, 2))

    @cached_property
    def refused(self) -> dict[str, str]:
        """Group -> why its channels cannot be left out: what mixes them, or what in the
        model's code stands against it; and tensors whose channels make no group.

        Found by trying: half of the channels of every group are left out of a copy with random
        numbers, and its outputs are compared with those of the masked copy.
        """
        cuts = [
            Cut(group, torch.arange(0, len(group), 2))
            for group in self.groups
            if group.name not in self._mixed
        ]
        return self._mixed | self._tester.refusals(cuts)

    @cached_property
    def _tester(self) -> CutTester:
        return CutTester(self.model, self._inputs)

    @property
    def removable(self) -> tuple[ChannelGroup, ...]:
        """Groups whose channels can be left out."""
        return tuple(group for group in self.groups if group.name not in self.refused)

    def importance(self, by: str = "weights") -> dict[str, Tensor]:
        """Importance of each channel.

        Args:
            by: ``"weights"`` (length of the vector of all its weights), ``"paths"`` (the
                same after balancing, with scales fixed that a normalisation hides: equal for
                all rescaled models), or ``"gradients"`` (first-order change of the loss
                without it, from ``.grad``).

        Returns:
            Group -> numbers, shape ``(channels,)``.

        Raises:
            InputError: unknown ``by``, or gradients are missing.
        """
        check_finite(self.model, ())
        return importance(self.model, self._inputs, by, self.groups)

    def remove(
        self, remove: float | None = None, *, keep: Keep | None = None, by: str = "weights"
    ) -> nn.Module:
        """A smaller model that computes the same as :meth:`masked`.

        Copies of both are run with random biases and gains, in float64, and compared: rectifiers
        that are off on the example inputs would hide differences.

        Args:
            remove: the share of channels to remove in every group where that is possible, rounded
                down to whole channels. Without ``remove`` and ``keep`` a half goes.
            keep: what stays instead: a share of the channels, or, by group, a share, a boolean
                mask, or the indices of the channels to keep.
            by: what to keep where a share is given, see :meth:`importance`.

        Returns:
            A new model; this one does not change.

        Raises:
            InputError: unknown groups or channels, or nothing would be left.
            InputTypeError: both ``remove`` and ``keep`` are given.
            UnsupportedError: channels of this group, or all channels, cannot be
                removed, with the reason.

        Example:
            >>> import torch, pathspace as ps
            >>> model = torch.nn.Sequential(
            ...     torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.Linear(8, 2)
            ... )
            >>> ps.channels(model, torch.randn(1, 4)).remove(keep=0.25)
            Sequential(
              (0): Linear(in_features=4, out_features=2, bias=True)
              (1): GELU(approximate='none')
              (2): Linear(in_features=2, out_features=2, bias=True)
            )
        """
        check_no_masks(self.model)
        keep = what_stays("remove", keep, remove)
        numbers = self._numbers(keep, by)
        cuts = self._cuts(numbers, keep, self._mixed)
        # (groups are tested one by one only if all together do not pass)
        if reason := self._tester.failure(cuts):
            cuts = self._cuts(numbers, keep, self.refused)
            reason = self._tester.failure(cuts)
        if not cuts and not isinstance(keep, Mapping) and keep < 1 and not self.removable:
            reasons = "; ".join(dict.fromkeys(self.refused.values()))
            raise UnsupportedError(
                f"No channel of {type(self.model).__name__} can be removed"
                f" ({reasons or 'nothing in it is a channel'}); use the model unchanged."
            )
        if reason:
            raise UnsupportedError(
                f"These channels of {type(self.model).__name__} cannot be removed together"
                f" ({reason}); give all groups of one layer the same share, or leave out the groups"
                " that are new in this call."
            )
        # (what is cut is not copied before)
        lose = {name for cut in cuts for name, _ in cut.group.slices}
        whole = {id(t): t for name, t in tensors_of(self.model).items() if name in lose}
        found = safe_deepcopy(self.model, replaced=whole)
        remove_channels(found, cuts, self._tester.adjustments)
        if cuts and self._unused:
            names = ", ".join(self._unused[:8]) + ", ..." * (len(self._unused) > 8)
            warnings.warn(
                f"{type(self.model).__name__} does not use {names} in this mode with these inputs,"
                " so they keep their sizes; find the channels in the mode, and with the inputs, in"
                " which it uses them.",
                stacklevel=2,
            )
        follow_config(found, cuts)
        declare_norms(found, *self._inputs)
        return found

    def masked(
        self, remove: float | None = None, *, keep: Keep | None = None, by: str = "weights"
    ) -> nn.Module:
        """The model at its full size, with zeros in the weights that read the removed channels.

        Args:
            remove: see :meth:`remove`.
            keep: see :meth:`remove`.
            by: see :meth:`remove`.

        Returns:
            A new model.
        """
        kept = self.kept(what_stays("masked", keep, remove), by)
        found = safe_deepcopy(self.model)
        mask_channels(found, [Cut(self[name], numbers) for name, numbers in kept.items()])
        return found

    def kept(self, keep: Keep = 0.5, by: str = "weights") -> dict[str, Tensor]:
        """Numbers of the channels that :meth:`remove` keeps, by group.

        Args:
            keep: see :meth:`remove`.
            by: see :meth:`remove`.

        Returns:
            Group -> ascending numbers of channels, for every group of which some are left out.
        """
        keep = what_stays("kept", keep, None)
        cuts = self._cuts(self._numbers(keep, by), keep, self.refused)
        return {cut.group.name: cut.kept for cut in cuts}

    def _numbers(self, keep: Keep, by: str) -> dict[str, Tensor]:
        """Group -> channels to keep, where they are not all."""
        named = keep if isinstance(keep, Mapping) else dict.fromkeys((g.name for g in self), keep)
        chosen = {self[name].name: value for name, value in named.items()}
        by_share = any(share_of(value) is not None for value in chosen.values())
        scores = self.importance(by) if by_share else {}
        found = {
            name: kept_numbers(name, len(self[name]), value, scores.get(name))
            for name, value in chosen.items()
        }
        return {name: numbers for name, numbers in found.items() if len(numbers) < len(self[name])}

    def _cuts(
        self, numbers: Mapping[str, Tensor], keep: Keep, refused: Mapping[str, str]
    ) -> list[Cut]:
        """Cuts of all groups but those that are refused, which must not be asked for by name."""
        for name in numbers:
            if name in refused and isinstance(keep, Mapping):
                raise UnsupportedError(
                    f"Channels of {name!r} cannot be removed: {refused[name]}; keep all of them."
                )
        return [Cut(self[name], kept) for name, kept in numbers.items() if name not in refused]

    def permute(self, orders: Mapping[str, Any]) -> nn.Module:
        """The same function with channels in another order; copies are run and compared.

        Args:
            orders: group -> number of the channel that comes first, second, ...

        Returns:
            A new model.

        Raises:
            InputError: unknown groups, or no order of all channels.
            InputTypeError: ``orders`` is not a mapping, or an order has no numbers.
            UnsupportedError: these channels cannot be permuted.

        Example:
            >>> import torch, pathspace as ps
            >>> model = torch.nn.Sequential(
            ...     torch.nn.Linear(1, 2), torch.nn.GELU(), torch.nn.Linear(2, 1)
            ... )
            >>> other = ps.channels(model, torch.randn(1, 1)).permute({"0.weight": [1, 0]})
            >>> bool((other[0].weight == model[0].weight.flip(0)).all())
            True
        """
        if not isinstance(orders, Mapping):
            raise InputTypeError(
                f"permute found a {type(orders).__name__}, expected a dict from groups to numbers"
                " of channels."
            )
        chosen = {
            self[name].name: whole_order(name, len(self[name]), order)
            for name, order in orders.items()
        }
        return self._permuted(self.model, chosen)

    def _permuted(self, model: nn.Module, orders: Mapping[str, Tensor]) -> nn.Module:
        tester = CutTester(model, self._inputs)
        wanted = tester.reference()
        far = distance(tester.run(lambda copy: reorder(copy, self._slices, orders)), wanted)
        if far > 10 * TOLERANCE:
            raise UnsupportedError(
                f"The model with other channels differs from what it should be by {far:.1e} of the"
                f" largest output, expected at most {TOLERANCE:.0e}; leave out the groups that are"
                " new in this call."
            )
        return permuted(model, self._slices, orders)

    @property
    def _slices(self) -> Slices:
        return {group.name: group.slices for group in self}

    def match(
        self, other: nn.Module, by: str = "weights", inputs: Any = None, seed: int = 0
    ) -> Matching:
        """Permute the channels of another model of the same architecture into
        the order of this model.

        Args:
            other: the other model; it does not change.
            by: ``"weights"`` (largest ``sum a b`` over all parameters) or ``"activations"``
                (largest correlation of what weights read, on ``inputs``).
            inputs: a tensor, a tuple of positional inputs, or a mapping from names of inputs; the
                example inputs by default.
            seed: draws the order in which groups are visited.

        Returns:
            The other model in the new order, with distances before and after.

        Raises:
            CaptureError: a model fails on ``inputs``.
            InputError: unknown ``by``, or a model of another architecture.
            InputTypeError: ``other`` is not a model.
            UnsupportedError: channels cannot be permuted.

        Example:
            >>> import torch, pathspace as ps
            >>> model = torch.nn.Sequential(
            ...     torch.nn.Linear(3, 5), torch.nn.GELU(), torch.nn.Linear(5, 2)
            ... )
            >>> groups = ps.channels(model, torch.randn(1, 3))
            >>> shuffled = groups.permute({"0.weight": [3, 1, 4, 0, 2]})
            >>> groups.match(shuffled).after
            0.0
        """
        expect_arguments("match", model=other)
        expect_numbers("match", SEED, seed=seed)
        expect_alike("match", self.model, other)
        for model in (self.model, other):
            check_finite(model, ())
        if by == "weights":
            orders = by_weights(self.model, other, self._slices, seed)
        elif by == "activations":
            some = tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,)
            given = self._inputs if inputs is None else arranged(self.model, some)
            for model in (self.model, other):
                check_runs(model, *given)
            orders = by_activations(self.model, other, self.groups, given)
        else:
            raise InputError(f"match found by={by!r}, expected 'weights' or 'activations'.")
        moved = self._permuted(other, orders)
        return Matching(
            moved, orders, weight_distance(self.model, other), weight_distance(self.model, moved)
        )

    def interpolate(self, other: nn.Module | Matching, t: float = 0.5) -> nn.Module:
        """A new model between this one (``t = 0``) and another (``t = 1``), tensor by tensor.

        Args:
            other: a model of the same architecture, or what :meth:`match` found.
            t: where between them; integers and masks are those of this model.

        Returns:
            A new model; statistics of its batch norms may have to be computed again.

        Raises:
            InputError: the models have other tensors, or ``t`` is not finite.
            InputTypeError: ``other`` is neither a model nor a matching, or ``t`` is not a number.
        """
        two = other.model if isinstance(other, Matching) else other
        expect_arguments("interpolate", model=two)
        expect_numbers("interpolate", "a number", t=t)
        expect_alike("interpolate", self.model, two)
        found, ends = safe_deepcopy(self.model), tensors_of(two)
        with torch.no_grad():
            for name, tensor in tensors_of(found).items():
                if tensor.is_floating_point() or tensor.is_complex():
                    tensor.lerp_(ends[name].to(tensor), t)
        return found

    def __repr__(self) -> str:
        count, name = sum(map(len, self)), type(self.model).__name__
        return f"ChannelGroups({name}, {count} channels in {len(self)} groups)"


def channels(
    model: nn.Module, *args: Any, kwargs: Mapping[str, Any] | None = None
) -> ChannelGroups:
    """Find the channels of a model: slices of its parameters and buffers that can be
    removed or permuted together.

    Elements that an elementwise operation combines belong to one channel, whatever the function:
    channels pass activation functions, normalisations, gates and residual connections. The features
    of an attention head make one channel, with its queries, keys and values; so do the channels of
    a group of a grouped convolution. Where an operation mixes channels among themselves (layer
    norm, softmax) they can be permuted, but none can be removed.

    Args:
        model: any module that :func:`pathspace.trace` can capture.
        *args: example inputs, positional.
        kwargs: example inputs by keyword.

    Returns:
        The groups of channels.

    Raises:
        CaptureError: the model fails on these inputs or cannot be captured.

    Example:
        >>> import torch, pathspace as ps
        >>> model = torch.nn.Sequential(
        ...     torch.nn.Conv2d(3, 8, 3),
        ...     torch.nn.BatchNorm2d(8),
        ...     torch.nn.ReLU(),
        ...     torch.nn.Conv2d(8, 2, 3),
        ... )
        >>> groups = ps.channels(model, torch.randn(1, 3, 9, 9))
        >>> groups[0]
        ChannelGroup('0.weight', 8 channels in 7 places)
    """
    captured = capture(model, args, kwargs)
    groups, lost = channel_groups(captured, model)
    mixed = {**lost, **{group.name: group.reason for group in groups if group.reason}}
    return ChannelGroups(model, groups, arranged(model, args, kwargs), mixed, unused(captured))
