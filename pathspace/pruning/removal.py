"""Removal of channels from a model's tensors, and from the numbers that its modules store."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..errors import first_line
from ..inference.sides import Side
from ..models.copies import safe_deepcopy
from ..models.nested import mapped, real_leaves
from ..models.running import cast, distance, outputs, replacements
from ..models.stand_in import switch_off_caches
from ..models.walk import holders, tensors_of
from .declared_sizes import declare
from .groups import Cut, halved

TOLERANCE = 1e-5
# on so many pixels in each direction do models of images run first where they are compared
PIXELS = 64


class Multiple(NamedTuple):
    """An attribute of modules of one type that counts channels of a group: its value for each."""

    module: type
    attribute: str
    each: int


# group -> the attributes of modules that have to shrink with it
Adjustments = Mapping[str, Sequence[Multiple]]


@contextmanager
def restored(model: nn.Module) -> Iterator[None]:
    """A context at whose end all modules hold the tensors and attributes that they held before."""
    before = [
        (part, dict(part))
        for _, module, _ in holders(model)
        for part in (vars(module), module._parameters, module._buffers)
    ]
    try:
        yield
    finally:
        for part, values in before:
            part.clear()
            part.update(values)


def replace_tensors(model: nn.Module, new: Mapping[int, Tensor]) -> None:
    """Replace tensors of a model, by their ids; parameters by parameters."""
    old = {id(tensor): tensor for tensor in tensors_of(model).values()}
    of_kind = {
        key: nn.Parameter(tensor, old[key].requires_grad)
        if isinstance(old[key], nn.Parameter)
        else tensor
        for key, tensor in new.items()
    }
    for place, key, value in replacements(model, of_kind):
        place[key] = value


@torch.no_grad()
def mask_channels(model: nn.Module, cuts: Sequence[Cut]) -> None:
    """Write 0 into all weights that read the removed channels."""
    tensors, new = tensors_of(model), dict[int, Tensor]()
    for cut in cuts:
        for name, dim in cut.group.readers:
            old = tensors[name]
            gone = cut.removed((name, dim)).to(old.device)
            new[id(old)] = new.get(id(old), old.detach()).index_fill(dim, gone, 0)
    replace_tensors(model, new)


@torch.no_grad()
def remove_channels(model: nn.Module, cuts: Sequence[Cut], adjustments: Adjustments) -> None:
    """Remove the channels from every tensor, and from the numbers that modules store."""
    tensors, gone = tensors_of(model), dict[Side, Tensor]()
    for cut in cuts:
        for side in cut.group.slices:
            size = tensors[side[0]].shape[side[1]]
            gone.setdefault(side, torch.zeros(size, dtype=torch.bool))[cut.removed(side)] = True
    new: dict[int, Tensor] = {}
    for (name, dim), lost in gone.items():
        old = tensors[name]
        kept = (~lost).nonzero().reshape(-1).to(old.device)
        new[id(old)] = new.get(id(old), old.detach()).index_select(dim, kept).contiguous()
    before = [
        (module, {**module._parameters, **module._buffers}) for _, module, _ in holders(model)
    ]
    replace_tensors(model, new)
    for module, own in before:
        if any(id(tensor) in new for tensor in own.values()):
            declare(module, own)
    for cut in cuts:
        for kind, attribute, each in adjustments.get(cut.group.name, ()):
            for module in owners(model, cut):
                if type(module) is kind and getattr(module, attribute) == len(cut.group) * each:
                    setattr(module, attribute, len(cut.kept) * each)


def owners(model: nn.Module, cut: Cut) -> list[nn.Module]:
    """The user's modules that contain a tensor of the group, at any depth, innermost first."""
    found: dict[str, nn.Module] = {}
    for name, _ in cut.group.slices:
        path = name
        while path:
            path = path.rpartition(".")[0]
            found[path] = model.get_submodule(path)
    inner = sorted(found, key=lambda path: -path.count(".") - bool(path))
    return [found[path] for path in inner if not type(found[path]).__module__.startswith("torch.")]


def multiples_of(model: nn.Module, cut: Cut) -> list[Multiple]:
    """Attributes that may have to shrink, the likeliest first.

    A multiple may by chance be a number that does not change, and comes last: the size of one
    channel, where its name says so (``head_dim``), or a size of its own parameters that stays.
    """
    tensors, sizes = tensors_of(model), cut.positions
    sides = {(id(tensors[name]), dim) for name, dim in cut.group.slices}
    found: dict[Multiple, tuple[bool, bool]] = {}
    for module in owners(model, cut):
        own = module.parameters(recurse=False)
        staying = {
            size for p in own for dim, size in enumerate(p.shape) if (id(p), dim) not in sides
        }
        for attribute, value in vars(module).items():
            each = cut.per_channel(value)
            if each and value > 1:
                inside = each not in sizes - {1} and ("dim" in attribute or "size" in attribute)
                last = inside or value in staying
                found[Multiple(type(module), attribute, each)] = last, each not in sizes
    return sorted(found, key=found.__getitem__)


@torch.no_grad()
def redrawn_copy(model: nn.Module) -> nn.Module:
    """A float64 copy with random values in vectors and in tensors of zeros, and matrices that keep
    the size of what they read, so that no small number hides a difference (attention with small
    weights is uniform).
    """
    generator, drawn = torch.Generator().manual_seed(0), dict[int, Tensor]()
    for name, own in tensors_of(model).items():
        if not own.is_floating_point():
            continue
        learned, tensor = isinstance(own, nn.Parameter), own.detach().to(torch.float64, copy=True)
        if learned and tensor.numel() == max(tensor.shape, default=1):
            tensor.copy_(0.5 + torch.rand(tensor.shape, generator=generator, dtype=tensor.dtype))
        elif name.endswith("running_var"):
            factor = torch.rand(tensor.shape, generator=generator, dtype=tensor.dtype)
            tensor.mul_(0.5 + factor.to(tensor.device))
        elif learned and tensor.numel():
            if not (size := tensor.norm()):
                tensor.copy_(torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype))
                size = tensor.norm()
            tensor.mul_(tensor.shape[0] ** 0.5 / size)
        drawn[id(own)] = nn.Parameter(tensor, own.requires_grad) if learned else tensor
    copy = safe_deepcopy(model, replaced=drawn)
    switch_off_caches(copy)
    return copy


def corner(value: Any) -> Any:
    """A corner of an image or volume; other values as they are."""
    image = isinstance(value, Tensor) and value.dim() > 3 and value.is_floating_point()
    return value[:, :, *(slice(PIXELS) for _ in value.shape[2:])] if image else value


class CutTester:
    """A copy of a model with redrawn weights, which is as before after each test of cuts."""

    def __init__(self, model: nn.Module, inputs: tuple[Sequence[Any], Mapping[str, Any]]) -> None:
        self.model = redrawn_copy(model)
        self.types = {name: tensor.dtype for name, tensor in tensors_of(model).items()}
        # the smallest first; those on which the copy does not run are left out. The last are the
        # given ones, for code that fails in float64
        wide = cast(inputs, torch.float64)
        # (where all tensors have equally many rows, these are the samples of a batch)
        rows = {leaf.shape[0] if leaf.dim() else 0 for leaf in real_leaves(wide)}
        sample = mapped(lambda leaf: leaf[:1], wide) if len(rows) == 1 else wide
        self.inputs = [mapped(corner, sample), sample, wide, inputs]
        # those that were found for the groups so far
        self.adjustments: dict[str, Sequence[Multiple]] = {}

    def run(self, change: Callable[[nn.Module], None]) -> list[Tensor]:
        """The outputs of the changed copy."""
        with restored(self.model):
            change(self.model)
            return outputs(self.model, *self.inputs[0])

    def reference(self, change: Callable[[nn.Module], None] = lambda _: None) -> list[Tensor]:
        """The outputs of the copy at its full size, on the smallest inputs on which it runs."""
        while len(self.inputs) > 1:
            try:
                return self.run(change)
            except Exception:  # (the model's code may raise anything)
                del self.inputs[0]
            if len(self.inputs) == 1:
                for name, tensor in tensors_of(self.model).items():
                    tensor.data = tensor.data.to(self.types[name])
        return self.run(change)

    def failure(self, cuts: Sequence[Cut], wanted: Sequence[Tensor] | None = None) -> str:
        """Why the outputs of the smaller and of the masked model differ; ``""`` if they agree."""
        wanted = self.masked(cuts) if wanted is None else wanted
        try:
            found = self.run(lambda model: remove_channels(model, cuts, self.adjustments))
        except Exception as error:
            return (
                f"the model's code contains a number that cannot be adjusted ({first_line(error)})"
            )
        far = distance(found, wanted)
        return "" if far <= TOLERANCE else f"the outputs of the smaller model differ by {far:.1e}"

    def masked(self, cuts: Sequence[Cut]) -> list[Tensor]:
        """The outputs of the copy at its full size, without the channels."""
        return self.reference(lambda model: mask_channels(model, cuts))

    def adjust(self, cut: Cut) -> str:
        """Find the attributes that have to shrink with one group; why there are none, or ``""``.

        None are tried first, then those of earlier groups, more and more of the likeliest, and all
        but one, until the outputs agree. Those without which they agree as well keep their values.
        """
        wanted, name, reasons = self.masked([cut]), cut.group.name, list[str]()

        def differs(some: Sequence[Multiple]) -> str:
            self.adjustments[name] = some
            return self.failure([cut], wanted)

        known = dict.fromkeys(map(tuple, self.adjustments.values()))
        every = multiples_of(self.model, cut)
        prefixes = [every[:end] for end in range(1, len(every) + 1)]
        others = [every[:one] + every[one + 1 :] for one in range(len(every) - 1)]
        for found in ((), *known, *prefixes, *others):
            if reason := differs(found):
                reasons.append(reason)
                continue
            for multiple in reversed(found):
                fewer = [other for other in found if other != multiple]
                found = found if differs(fewer) else fewer
            self.adjustments[name] = found
            return ""
        del self.adjustments[name]
        return reasons[0]

    def refusals(self, cuts: Sequence[Cut]) -> dict[str, str]:
        """Name of a group -> why its channels cannot be removed."""
        if not cuts or not self.failure(cuts):
            return {}
        refused = {cut.group.name: reason for cut in cuts if (reason := self.adjust(cut))}
        good = list[Cut]()

        def failure(some: Sequence[Cut]) -> str:
            return self.failure([*good, *some])

        # (groups that fail together with those before them)
        for some, reason in halved([c for c in cuts if c.group.name not in refused], failure):
            if reason:
                refused[some[0].group.name] = reason
            else:
                good += some
        return refused
