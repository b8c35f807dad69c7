"""Compare two checkpoints up to rescaling and the order of channels."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from ..capture.captured import Captured
from ..errors import InputError, expect_arguments, expect_numbers
from ..gauge.balance import canonical_copy
from ..models.copies import safe_deepcopy
from ..models.finite import check_finite
from ..models.inputs import batch_inputs, made_up
from ..models.running import cast, outputs
from ..models.running import distance as largest_difference
from ..models.stand_in import switch_off_caches
from ..models.values import require_runnable
from ..models.walk import tensors_of
from ..reduction import ReductionGraph
from ..rotations.alignment import find_rotation
from ..rotations.space import FeatureSpaces
from ..shown import Shown
from .exchangeable import channel_groups, nested_groups
from .groups import Slices, real
from .matching import by_size, by_weights, permuted, weights_of
from .rotated_orders import orders_between_bases

SAME = 1e-5
# largest difference of outputs for one of weights, and the smallest of weights that rounding makes
AMPLIFIED, ROUNDING = 1e3, 1e-8


@dataclass(frozen=True, eq=False)
class Comparison(Shown):
    """The result of :func:`compare`.

    Attributes:
        same: ``True`` if the models are equal up to scales and an order of channels that was
            found: their tensors, and their outputs on random inputs. ``False`` if their outputs
            differ. ``None`` if outputs agree, or cannot be computed, but no such order was found.
        distance: ``|a - b| / |a|`` over all parameters, after scales and order are aligned.
        as_given: the same for the given models.
        rescaled: the same after only scales are aligned.
        differ: tensor -> its ``|a - b| / |a|`` after alignment, largest first, for the tensors that
            differ; for integers and masks, the share of entries that differ.
        orders: channel group -> order of the second model's channels; those of groups "inside"
            others come after them.
        outputs: the largest difference of outputs on random inputs, relative to the largest output;
            ``None`` if the models cannot be run on random inputs.
        elements: with ``spaces``, what takes the first model to the second in this order
            (:func:`pathspace.rotate_`).
        unsearched: tensors that differ, with the dimensions along which no order of single
            positions was searched, if ``same`` is ``None``.
    """

    same: bool | None
    distance: float
    as_given: float
    rescaled: float
    differ: Mapping[str, float]
    orders: Mapping[str, Tensor] = field(repr=False)
    outputs: float | None = None
    unsearched: tuple[str, ...] = ()
    elements: Mapping[str, Tensor] = field(default_factory=dict, repr=False)

    def __str__(self) -> str:
        agree = "Outputs agree" if self.outputs is not None else "The models cannot be run"
        verdict = {
            True: "The same up to rescaling and order.",
            False: "Different: their outputs differ.",
            None: f"{agree}, but no order of channels makes the weights equal.",
        }[self.same]
        lines = [
            verdict,
            f"Relative distance of the weights: {self.as_given:.3g} as given, {self.rescaled:.3g}"
            f" without scales, {self.distance:.3g} without scales and order.",
            *(f"{name}: {far:.3g}" for name, far in list(self.differ.items())[:10]),
            *(f"Not searched: orders in {place}." for place in self.unsearched[:10]),
        ]
        return "\n".join(lines)


@torch.no_grad()
def compare(
    a: nn.Module,
    b: nn.Module,
    graph: ReductionGraph,
    tolerance: float = SAME,
    spaces: FeatureSpaces | None = None,
) -> Comparison:
    """Compare two models of one architecture modulo rescaling and permutation.

    Both are brought to the canonical point of their orbits, the rescaled model of smallest ``sum
    w^2`` (tilted where there is none), which is unique; then the channels of the second are matched
    with the first's, and the order inside of channels (features of a head, outputs of a group of a
    convolution), if they do not suffice. Both are run on random inputs, in evaluation mode and
    float64, because numbers may stand in the code of a model (a slope, an ``eps``). Models whose
    weights differ may be equal for another reason, or in an order that was not searched. An order
    can be missed where channels are nearly equal.

    Args:
        a: the traced model, or a copy with other weights.
        b: another one.
        graph: the reduction graph of either.
        tolerance: largest distance that counts as the same, of weights and of outputs.
        spaces: from :func:`pathspace.spaces`: models are compared modulo the matrices of all
            spaces and the order of channels, in place of scales
            (:func:`pathspace.find_rotation` with the second model's channels in order).

    Returns:
        Distances, and where the models differ.

    Raises:
        InputError: the models have other tensors than the graph.

    Example:
        >>> import torch, pathspace as ps
        >>> model = torch.nn.Sequential(
        ...     torch.nn.Linear(2, 3), torch.nn.ReLU(), torch.nn.Linear(3, 1)
        ... )
        >>> x = torch.ones(1, 2)
        >>> graph = ps.trace(model, x)
        >>> other = ps.channels(model, x).permute({"0.weight": [2, 0, 1]})
        >>> found = ps.compare(
        ...     model, ps.rescale_(other, graph, torch.tensor([1.0, -1.0, 0.5])), graph
        ... )
        >>> found.same, found.as_given > 0.1
        (True, True)
    """
    expect_arguments("compare", model=a, graph=graph)
    expect_arguments("compare", model=b)
    expect_numbers("compare", "a number of at least 0", tolerance=tolerance)
    every = [tensors_of(model) for model in (a, b)]
    # (buffers of the second have the shapes of the first)
    shapes = {name: tensor.shape for name, tensor in every[0].items() if name in every[1]}
    shapes |= {name: parameter.shape for name, parameter in graph.parameters.items()}
    for model, own in zip((a, b), every, strict=True):
        if any(name not in own or own[name].shape != shape for name, shape in shapes.items()):
            raise InputError(
                f"compare found a {type(model).__name__} with other tensors than the graph; pass"
                " two models of the architecture that was traced."
            )
        require_runnable("compare", own.items())
        check_finite(model, ())
    groups, _ = channel_groups(graph.captured, a)
    slices: Slices = {group.name: group.slices for group in groups}
    if spaces is not None:
        return _between_bases(a, b, graph, tolerance, spaces, slices)
    one, two = (canonical_copy(model, graph) for model in (a, b))
    orders: Mapping[str, Tensor] = by_weights(one, two, slices)
    moved, far = permuted(two, slices, orders), None
    if _distance(one, moved) > tolerance:
        far = _apart((a, b), a, graph.captured)
        nested = nested_groups(graph.captured, a, groups) if far is None or far <= tolerance else ()
        inside = {f"inside {group.name}": group.slices for group in nested}
        if inside:
            other, found = _inside(one, two, slices, inside)
            if _distance(one, other) < _distance(one, moved):
                moved, orders = other, found
        slices = {**slices, **inside}
    distance, differ = _distance(one, moved), _differ(one, moved, tolerance)
    aligned = distance <= tolerance and not differ
    if aligned or far is None:
        far = _apart((one, moved) if aligned else (a, b), a, graph.captured)
    same = _verdict(aligned, distance, far, tolerance)
    unsearched = _unsearched(one, differ, slices) if same is None else ()
    before = _distance(a, b), _distance(one, two)
    return Comparison(same, distance, *before, differ, orders, far, unsearched)


def _verdict(aligned: bool, distance: float, far: float | None, tolerance: float) -> bool | None:
    """Whether models are the same, by whether their weights are equal and by their outputs."""
    limit = AMPLIFIED * max(distance, ROUNDING) if aligned else tolerance
    return (aligned or None) if far is None or far <= limit else False


def _between_bases(
    a: nn.Module,
    b: nn.Module,
    graph: ReductionGraph,
    tolerance: float,
    spaces: FeatureSpaces,
    slices: Slices,
) -> Comparison:
    """The comparison modulo the matrices of all spaces and the order of channels."""
    as_given, without = _distance(a, b), find_rotation(a, b, spaces)
    orders: Mapping[str, Tensor] = {}
    found, moved = without, b
    if not without.equal:
        orders = orders_between_bases(a, b, spaces, slices)
        moved = permuted(b, slices, orders)
        found = find_rotation(a, moved, spaces)
    far = _apart((a, moved), a, graph.captured)
    same = _verdict(found.equal, found.distance, far, tolerance)
    differ = {} if found.equal else {found.worst: found.distance}
    return Comparison(
        same, found.distance, as_given, without.distance, differ, orders, far, (), found.elements
    )


def _inside(
    one: nn.Module, two: nn.Module, slices: Slices, inside: Slices
) -> tuple[nn.Module, dict[str, Tensor]]:
    """The second model with channels and the channels inside of them in order.

    Channels with some inside come first, matched by size, which no order inside changes.
    """
    within = {side for sides in inside.values() for side in sides}
    whole = {name: sides for name, sides in slices.items() if within & sides.keys()}
    free = {**{name: sides for name, sides in slices.items() if name not in whole}, **inside}
    first = by_size(weights_of(one), weights_of(two), whole)
    start = permuted(two, whole, first)
    second = by_weights(one, start, free)
    return permuted(start, free, second), first | second


def _differ(one: nn.Module, two: nn.Module, tolerance: float) -> dict[str, float]:
    """Tensor -> its distance, or the share of entries that differ, largest first."""
    found, squares, every = {}, _squares(one, two), tensors_of(two)
    for name, tensor in tensors_of(one).items():
        if name in squares:
            gap, size = squares[name]
            far = (gap / max(size, 1e-60)) ** 0.5
            found[name] = far if far > tolerance else 0.0
        # (batch norms count the batches that they have seen)
        elif name in every and tensor.numel() and not name.endswith("num_batches_tracked"):
            found[name] = float((tensor != every[name].to(tensor.device)).double().mean())
    return {name: found[name] for name in sorted(found, key=lambda key: -found[key]) if found[name]}


def _unsearched(model: nn.Module, differ: Iterable[str], slices: Slices) -> tuple[str, ...]:
    shapes = {name: tensor.shape for name, tensor in tensors_of(model).items()}
    searched = {
        side for sides in slices.values() for side, where in sides.items() if where.shape[1] == 1
    }
    return tuple(
        f"{name}, dimension {dim}"
        for name in differ
        for dim, size in enumerate(shapes[name])
        if size > 1 and (name, dim) not in searched
    )


def _apart(pair: tuple[nn.Module, nn.Module], given: nn.Module, captured: Captured) -> float | None:
    """Largest relative difference of the outputs of two models on random inputs, in float64 or, for
    code that takes no float64, as they are; ``None`` if the given model takes none. Caches of keys
    and values are left out: they have the basis and the order of their model.
    """
    try:
        batch = batch_inputs(made_up(given, captured.examples())[0])
    except InputError:
        return None
    for wide in (True, False):
        args, kwargs = cast(batch, torch.float64) if wide else batch
        some = [safe_deepcopy(model) for model in pair]
        for model in some:
            switch_off_caches(model.double() if wide else model)
        try:
            runs = [outputs(model, args, kwargs, seed=0) for model in some]
        except Exception:  # (the model's code may raise anything)
            continue
        return largest_difference(*([real(part) for part in run] for run in runs))
    return None


def _squares(one: nn.Module, two: nn.Module) -> dict[str, tuple[float, float]]:
    """``|a - b|^2`` and ``|a|^2`` for all tensors but integers and masks."""
    found, other = {}, tensors_of(two)
    for name, tensor in tensors_of(one).items():
        if tensor.is_floating_point() or tensor.is_complex():
            a, b = real(tensor), real(other[name])
            found[name] = float((a - b).square().sum()), float(a.square().sum())
    return found


def _distance(one: nn.Module, two: nn.Module) -> float:
    squares = _squares(one, two).values()
    gap, size = (sum(pair[side] for pair in squares) for side in (0, 1))
    return float((gap / max(size, 1e-300)) ** 0.5)
