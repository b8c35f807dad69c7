"""The order of one model's channels that matches another model best."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn

from ..errors import InputError, UnsupportedError
from ..inference.sides import Side
from ..models.copies import safe_deepcopy
from ..models.running import outputs
from ..models.walk import tensors_of
from ..shown import Shown
from .declared_sizes import CONV, TRANSPOSED
from .groups import ChannelGroup, Slices, channel_sums, real
from .removal import replace_tensors

# group, or its number -> numbers of the channels in the new order
Orders = Mapping[Any, Tensor]

SWEEPS = 50
# the agreement of copies of one network, relative to its largest possible value, is at least this
COPIES = 0.99


@dataclass(frozen=True, eq=False)
class Matching(Shown):
    """A model with its channels in the order of another model's, from ``groups.match``.

    Attributes:
        model: the model with its channels in that order; its function is unchanged.
        orders: group -> numbers of the channels in the new order.
        before: distance ``(sum (a - b)^2)^(1/2)`` of the weights of both models as given.
        after: the same distance with the channels in the new order.
    """

    model: nn.Module
    orders: Orders
    before: float
    after: float


def expect_alike(owner: str, one: nn.Module, two: nn.Module) -> None:
    """Refuse a second model with other tensors than the first."""
    own, others = (tensors_of(model).items() for model in (one, two))
    if {name: p.shape for name, p in own} != {name: p.shape for name, p in others}:
        raise InputError(
            f"{owner} found a {type(two).__name__} with other tensors, expected the same"
            " architecture."
        )


@torch.no_grad()
def permuted(model: nn.Module, slices: Slices, orders: Orders) -> nn.Module:
    """A copy of a model with its channels in another order."""
    copy = safe_deepcopy(model)
    reorder(copy, slices, orders)
    return copy


@torch.no_grad()
def reorder(model: nn.Module, slices: Slices, orders: Orders) -> None:
    """Bring the channels of a model into another order."""
    tensors = tensors_of(model)
    moved = ordered(tensors, slices, orders)
    replace_tensors(
        model, {id(old): moved[name] for name, old in tensors.items() if moved[name] is not old}
    )


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """All parameters in float64, by name."""
    return {name: real(parameter) for name, parameter in model.named_parameters()}


def weight_distance(one: nn.Module, two: nn.Module) -> float:
    """``(sum (a - b)^2)^(1/2)`` over all parameters."""
    pairs = zip(one.parameters(), two.parameters(), strict=True)
    return float(sum(float((real(a) - real(b)).square().sum()) for a, b in pairs) ** 0.5)


@torch.no_grad()
def by_weights(
    one: nn.Module, two: nn.Module, slices: Slices, seed: int = 0, starts: int = 3
) -> dict[str, Tensor]:
    """Orders of the second model's channels that maximise ``sum a b``, group by group.

    Coordinate ascent with a linear assignment in each step (weight matching, Ainsworth et al.
    2023, Algorithm 1), repeated with several random orders of groups; the best result is kept.
    If sorting channels by size already shows that the models are copies of one network, the
    ascent starts from that order.
    """
    a, given = weights_of(one), weights_of(two)
    bound = (_agreement(a, a) * _agreement(given, given)) ** 0.5
    start = {name: torch.arange(len(next(iter(sides.values())))) for name, sides in slices.items()}
    sizes = by_size(a, given, slices)
    if _agreement(a, sorted_ := ordered(given, slices, sizes)) >= COPIES * bound:
        given, start = sorted_, sizes
    generator, names = torch.Generator().manual_seed(seed), list(slices)
    best, found = -math.inf, start
    for _ in range(starts):
        b, orders = dict(given), dict(start)
        for _ in range(SWEEPS):
            visits = [names[at] for at in torch.randperm(len(names), generator=generator).tolist()]
            if sum(_improve(a, b, slices[name], orders, name) for name in visits) <= 1e-9:
                break
        if (total := _agreement(a, b)) > best:
            best, found = total, orders
        # |a| |b| is an upper bound for every order
        if total >= (1 - 1e-12) * bound:
            break
    return found


def _agreement(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> float:
    return sum(float((a[name] * b[name]).sum()) for name in a)


def ordered(tensors: Mapping[str, Tensor], slices: Slices, orders: Orders) -> dict[str, Tensor]:
    """Tensors by name with channels in another order."""
    result = dict(tensors)
    for name, order in orders.items():
        for (key, dim), where in slices[name].items():
            if key in result:
                index = torch.arange(result[key].shape[dim])
                index[where.reshape(-1)] = where[order].reshape(-1)
                result[key] = result[key].index_select(dim, index.to(result[key].device))
    return result


def by_size(a: Mapping[str, Tensor], b: Mapping[str, Tensor], slices: Slices) -> dict[str, Tensor]:
    """Match channels by the ranks of their sizes, which the order of other groups does not change.

    Sums of cubes: a balanced gauge makes sums of squares equal for all units that nothing enters.
    """
    own = {
        name: {side: where for side, where in sides.items() if side[0] in a}
        for name, sides in slices.items()
    }
    cubes = ({name: held[name].abs().pow(3) for name in held} for held in (a, b))
    first, second = (channel_sums(own, held.__getitem__) for held in cubes)
    return {name: second[name].argsort()[first[name].argsort().argsort()] for name in own}


def _improve(
    a: Mapping[str, Tensor],
    b: dict[str, Tensor],
    sides: Mapping[Side, Tensor],
    orders: dict[str, Tensor],
    name: str,
) -> float:
    """Apply the best order of one group, with all others fixed; return the gain in agreement."""
    like = torch.zeros(len(orders[name]), len(orders[name]), dtype=torch.float64)
    own = {side: where for side, where in sides.items() if side[0] in a}
    for (tensor, dim), where in own.items():
        rows = [held[tensor].movedim(dim, 0)[where].flatten(1) for held in (a, b)]
        like += rows[0] @ rows[1].T
    best = torch.from_numpy(linear_sum_assignment(like, maximize=True)[1])
    moved = ordered(b, {name: own}, {name: best})
    # (if a tensor has the group along two dimensions, the assignment may not be an improvement)
    gain = sum(float((a[key] * (moved[key] - b[key])).sum()) for key in {key for key, _ in own})
    if gain <= 1e-12 * float(like.abs().sum()):
        return 0.0
    b.update(moved)
    orders[name] = orders[name][best]
    return gain


def by_activations(
    one: nn.Module, two: nn.Module, groups: Sequence[ChannelGroup], inputs: Any
) -> dict[str, Tensor]:
    """Orders of the second model's channels that maximise the correlation of the layers' inputs."""
    read = {side for group in groups for side in group.readers}
    features = [_read(model, read, inputs) for model in (one, two)]
    orders = {}
    for group in groups:
        readers = sorted(group.readers)
        seen = [side for side in readers if all(side[0] in held for held in features)]
        if not seen:
            weights = ", ".join(repr(weight) for weight, _ in readers) or "no weight"
            raise UnsupportedError(
                f"match found the channels of {group.name!r} read by {weights}, expected a linear"
                " or convolutional layer, whose inputs can be observed; use by='weights'."
            )
        like = torch.zeros(len(group), len(group), dtype=torch.float64)
        for side in seen:
            if len(features[0][side[0]]) < 2:
                raise InputError(
                    f"match found one sample of what {side[0]!r} reads, expected several to"
                    " correlate; pass more inputs, or use by='weights'."
                )
            rows = [_standard(held[side[0]][:, group.slices[side]]) for held in features]
            like += torch.einsum("nap,nbp->ab", *rows)
        orders[group.name] = torch.from_numpy(linear_sum_assignment(like, maximize=True)[1])
    return orders


def _standard(values: Tensor) -> Tensor:
    centred = values - values.mean(0, keepdim=True)
    return centred / centred.square().sum((0, 2), keepdim=True).sqrt().clamp(min=1e-12)


def _read(
    model: nn.Module, sides: set[Side], inputs: tuple[Sequence[Any], Mapping[str, Any]]
) -> dict[str, Tensor]:
    """Inputs of linear and convolutional layers: weight -> ``(samples, features)``."""
    found: dict[str, list[Tensor]] = {}

    def record(
        name: str, channels: int, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        given = (args[0] if args else kwargs["input"]).detach()
        # (a copy, because the model may overwrite it)
        x = given.to("cpu", torch.float64, copy=True).movedim(channels, -1)
        found.setdefault(name, []).append(x.reshape(-1, x.shape[-1]))

    # (a copy, because the model may write into its buffers)
    model = safe_deepcopy(model)
    for name, dim in sides:
        place, _, own = name.rpartition(".")
        layer = model.get_submodule(place)
        # (a weight that is used transposed elsewhere reads other channels there)
        reads = own == "weight" and dim == 1 - isinstance(layer, TRANSPOSED)
        if reads and isinstance(layer, nn.Linear | CONV):
            # (counted from the end: a single sample needs no batch dimension)
            channels = -1 if isinstance(layer, nn.Linear) else 1 - layer.weight.dim()
            layer.register_forward_pre_hook(partial(record, name, channels), with_kwargs=True)
    outputs(model, *inputs)
    # (a layer may be called several times)
    return {name: torch.cat(rows) for name, rows in found.items()}
