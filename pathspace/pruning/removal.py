"""Removal of slices from a model's tensors, and adjustment of the sizes stored in its modules."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..errors import UnsupportedError, first_line
from ..inference.channels import Side
from ..models.copies import safe_deepcopy
from ..models.running import cast, distance, outputs, replacements
from ..models.stand_in import switch_off_caches
from ..models.walk import holders, module_at, tensors_of
from .declared_sizes import declare
from .groups import Cut

# largest number of trials of each kind to adjust a module's numbers before its channels are refused
TRIALS = 64
TOLERANCE = 1e-5


class Choice(NamedTuple):
    """An integer attribute of modules of one type that depends on the size of a channel group.

    Attributes:
        module: the type.
        attribute: name of the attribute.
        each: its value per channel.
        whole: whether ``each`` is the number of all positions of a channel along a side.
    """

    module: type
    attribute: str
    each: int
    whole: bool


# kind of a group -> the attributes of modules that depend on it, and must be adjusted
Adjustments = dict[tuple[Any, ...], tuple[Choice, ...]]


@torch.no_grad()
def masked(model: nn.Module, cuts: Sequence[Cut], share: bool = False) -> nn.Module:
    """A copy with 0 in all weights that read the removed channels.

    Args:
        model: the model.
        cuts: what to remove.
        share: let the copy have the model's own tensors where they do not change.
    """
    copy = safe_deepcopy(model, share)
    tensors, new = tensors_of(copy), dict[int, Tensor]()
    for cut in cuts:
        for name, dim in cut.readers:
            old = tensors[name]
            left = new.get(id(old), old)
            gone = cut.removed((name, dim)).to(old.device)
            new[id(old)] = _of_kind(old, left.detach().index_fill(dim, gone, 0))
    for place, key, value in replacements(copy, new):
        place[key] = value
    return copy


def _of_kind(old: Tensor, new: Tensor) -> Tensor:
    return nn.Parameter(new, old.requires_grad) if isinstance(old, nn.Parameter) else new


@torch.no_grad()
def without(
    model: nn.Module, cuts: Sequence[Cut], adjustments: Adjustments, share: bool = False
) -> nn.Module:
    """A smaller copy: the channels are removed from every tensor, and the modules'
    attributes are adjusted.

    Args:
        model: the model.
        cuts: what to remove.
        adjustments: which attributes depend on the channels.
        share: let the copy have the model's own tensors where they do not change.
    """
    copy = safe_deepcopy(model, share)
    tensors, gone = tensors_of(copy), dict[Side, Tensor]()
    for cut in cuts:
        for side in cut.slices:
            held = gone.setdefault(
                side, torch.zeros(tensors[side[0]].shape[side[1]], dtype=torch.bool)
            )
            held[cut.removed(side)] = True
    new: dict[int, Tensor] = {}
    for (name, dim), lost in gone.items():
        old = tensors[name]
        kept = (~lost).nonzero().reshape(-1).to(old.device)
        new[id(old)] = _of_kind(old, new.get(id(old), old).index_select(dim, kept).contiguous())
    before = [(module, {**module._parameters, **module._buffers}) for _, module, _ in holders(copy)]
    for place, key, value in replacements(copy, new):
        place[key] = value
    for module, own in before:
        if any(id(tensor) in new for tensor in own.values()):
            declare(module, own)
    for cut in cuts:
        for choice in adjustments.get(code_key(model, cut), ()):
            for _, module in owners(copy, cut):
                if type(module) is choice.module:
                    _adjust(module, choice, cut)
    return copy


def owners(model: nn.Module, cut: Cut) -> Iterator[tuple[str, nn.Module]]:
    """The user's modules that contain a tensor of the group, at any depth, innermost first."""
    paths = {name.rpartition(".")[0] for name, _ in cut.slices}
    within = {
        path[:end]
        for path in paths
        for end in [i for i, c in enumerate(path) if c == "."] + [len(path)]
    } | {""}
    for path in sorted(within, key=lambda entry: -entry.count(".") - bool(entry)):
        module = module_at(model, path)
        if not type(module).__module__.startswith("torch."):
            yield path, module


def code_key(model: nn.Module, cut: Cut) -> tuple[Any, ...]:
    """A key that is equal for groups of the same code: types of modules,
    tensors and their parts.
    """
    sides = [
        (
            type(module_at(model, name.rpartition(".")[0])),
            name.rpartition(".")[2],
            dim,
            where.shape[1],
        )
        for (name, dim), where in cut.slices.items()
    ]
    direct = [
        type(module_at(model, name.rpartition(".")[0].rpartition(".")[0])) for name, _ in cut.slices
    ]
    return tuple(sorted(map(str, [*sides, *direct])))


def _counts(cut: Cut) -> dict[int, bool]:
    """Possible values of :attr:`Choice.each`, each with its :attr:`Choice.whole`.

    The value can also be a part of a channel's positions: for instance, the query
    heads that share a key head.
    """
    whole = {1, *(where.shape[1] for where in cut.slices.values())}
    parts = {part for size in whole for part in range(2, size) if size % part == 0}
    return dict.fromkeys(parts, False) | dict.fromkeys(sorted(whole), True)


def _adjust(module: nn.Module, choice: Choice, cut: Cut) -> None:
    old, new = cut.channels * choice.each, len(cut.kept) * choice.each
    value = getattr(module, choice.attribute)
    if isinstance(value, int):
        setattr(module, choice.attribute, new if value == old else value)
    else:
        setattr(
            module, choice.attribute, type(value)(new if entry == old else entry for entry in value)
        )


def choices(model: nn.Module, cut: Cut) -> list[Choice]:
    """Attributes of modules that may depend on the group, the likeliest first."""
    found: dict[Choice, None] = {}
    for _, module in owners(model, cut):
        for attribute, value in vars(module).items():
            entries = list(value) if isinstance(value, list | tuple) else [value]
            if attribute == "training" or not all(type(entry) is int for entry in entries):
                continue
            for each, whole in _counts(cut).items():
                if cut.channels * each in entries and cut.channels * each > 1:
                    found[Choice(type(module), attribute, each, whole)] = None
    return sorted(found, key=lambda choice: choice.each > 1 or "head" not in choice.attribute)


def sets_of(options: Sequence[Choice]) -> Iterator[tuple[Choice, ...]]:
    """Subsets to try: large ones first; before others, subsets without parts
    and without sizes of heads.
    """
    whole = [option for option in options if option.whole]
    likely = [option for option in whole if option.each > 1 or "dim" not in option.attribute]
    seen: set[tuple[Choice, ...]] = set()
    for pool in (likely, whole, options):
        sets = (
            some for size in range(len(pool), 0, -1) for some in itertools.combinations(pool, size)
        )
        once = (
            some
            for some in sets
            if len({(option.module, option.attribute) for option in some}) == len(some)
        )
        for some in itertools.islice((some for some in once if some not in seen), TRIALS):
            seen.add(some)
            yield some


@torch.no_grad()
def redrawn_copy(model: nn.Module, seed: int = 0) -> nn.Module:
    """A float64 copy with random values in vectors and in tensors of zeros, so that no
    zero hides a difference.
    """
    copy, generator = safe_deepcopy(model).double(), torch.Generator().manual_seed(seed)
    for name, tensor in tensors_of(copy).items():
        if not tensor.is_floating_point() or not tensor.numel():
            continue
        if isinstance(tensor, nn.Parameter) and tensor.numel() == max(tensor.shape, default=1):
            tensor.copy_(0.5 + torch.rand(tensor.shape, generator=generator, dtype=tensor.dtype))
        elif name.endswith("running_var"):
            drawn = torch.rand(tensor.shape, generator=generator, dtype=tensor.dtype)
            tensor.mul_(0.5 + drawn.to(tensor.device))
        elif isinstance(tensor, nn.Parameter) and not bool(tensor.any()):
            tensor.copy_(
                torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype)
                / tensor.shape[-1] ** 0.5
            )
    switch_off_caches(copy)
    return copy


@dataclass
class CutTester:
    """A model with redrawn weights, on which cuts are tested.

    Attributes:
        model: the redrawn copy.
        args: example inputs in its type.
        kwargs: example inputs by keyword.
        adjustments: the adjustments found so far.
    """

    model: nn.Module
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    adjustments: Adjustments

    @classmethod
    def of(
        cls, model: nn.Module, inputs: tuple[Sequence[Any], Mapping[str, Any]], known: Adjustments
    ) -> CutTester:
        """A tester in float64, or in the model's own type if its code fails in float64."""
        twin = redrawn_copy(model)
        wide = cast(inputs, torch.float64)
        try:
            outputs(twin, *wide)
        except Exception:
            types = {name: tensor.dtype for name, tensor in tensors_of(model).items()}
            for name, tensor in tensors_of(twin).items():
                tensor.data = tensor.data.to(types[name])
            wide = inputs
        return cls(twin, wide[0], wide[1], known)

    def failure(self, cuts: Sequence[Cut]) -> str:
        """Why the outputs of the smaller and of the masked model differ; ``""`` if they agree."""
        return self._differs(cuts, self._wanted(cuts))

    def _wanted(self, cuts: Sequence[Cut]) -> list[Tensor]:
        return outputs(masked(self.model, cuts, share=True), self.args, self.kwargs)

    def _differs(self, cuts: Sequence[Cut], wanted: Sequence[Tensor]) -> str:
        try:
            small = without(self.model, cuts, self.adjustments, share=True)
            found = outputs(small, self.args, self.kwargs)
        except Exception as error:
            return (
                f"the model's code contains a number that cannot be adjusted ({first_line(error)})"
            )
        far = distance(found, wanted)
        return "" if far <= TOLERANCE else f"the outputs of the smaller model differ by {far:.1e}"

    def adjust(self, cut: Cut) -> str:
        """Find the attributes that depend on one group; return why there are none, or ``""``."""
        wanted = self._wanted([cut])
        name = code_key(self.model, cut)
        self.adjustments.pop(name, None)
        reason = self._differs([cut], wanted)
        if not reason:
            return ""
        for some in sets_of(choices(self.model, cut)):
            self.adjustments[name] = some
            if not self._differs([cut], wanted):
                self._without_idle(cut, wanted)
                return ""
        self.adjustments.pop(name, None)
        return reason

    def _without_idle(self, cut: Cut, wanted: Sequence[Tensor]) -> None:
        """Leave out the adjustments of a group without which the outputs are the same: another
        number may have the same value by chance.
        """
        name = code_key(self.model, cut)
        for option in reversed(self.adjustments[name]):
            every = self.adjustments[name]
            self.adjustments[name] = tuple(one for one in every if one != option)
            if self._differs([cut], wanted):
                self.adjustments[name] = every

    def refusals(self, cuts: Mapping[str, Cut]) -> dict[str, str]:
        """Name of a group -> why its channels cannot be removed."""
        refused: dict[str, str] = {}
        if not cuts or not self.failure(list(cuts.values())):
            return refused
        tried: dict[tuple[Any, ...], str] = {}
        for name, cut in cuts.items():
            same = code_key(self.model, cut)
            if same not in tried:
                tried[same] = self.adjust(cut)
                reason = tried[same]
            else:
                # (layers of one kind in one module need not be used in the same way)
                reason = tried[same] and self.failure([cut])
            if reason:
                refused[name] = reason
        left = {name: cut for name, cut in cuts.items() if name not in refused}
        if left and self.failure(list(left.values())):
            refused |= self._one_by_one(left)
        return refused

    def _one_by_one(self, cuts: Mapping[str, Cut]) -> dict[str, str]:
        """Add group by group, and refuse each that fails together with those before."""
        good, refused = list[Cut](), dict[str, str]()
        pending = [list(cuts.items())]
        while pending:
            some = pending.pop()
            reason = self.failure([*good, *(cut for _, cut in some)])
            if not reason:
                good += [cut for _, cut in some]
            elif len(some) == 1:
                refused[some[0][0]] = reason
            else:
                pending += [some[len(some) // 2 :], some[: len(some) // 2]]
        return refused

    def check(self, changed: nn.Module, like: nn.Module) -> None:
        """Compare the outputs of the changed copy with those of another.

        Raises:
            UnsupportedError: they differ by more than rounding.
        """
        try:
            found = [outputs(model, self.args, self.kwargs) for model in (changed, like)]
        except Exception as error:
            raise UnsupportedError(
                f"The model with other channels does not run ({first_line(error)}); groups of one"
                " layer may have to shrink together: give all of them the same share, or leave out"
                " the groups that are new in this call."
            ) from error
        far = distance(*found)
        if far > 10 * TOLERANCE:
            raise UnsupportedError(
                f"The model with other channels differs from what it should be by {far:.1e} of the"
                f" largest output, expected at most {TOLERANCE:.0e}; leave out the groups that are"
                " new in this call."
            )
