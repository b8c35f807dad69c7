"""Compare two checkpoints up to rescaling and the order of channels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from ..capture.captured import Captured
from ..errors import InputError, expect_arguments, expect_numbers
from ..fitting.calibration import batch_inputs, made_up
from ..gauge.balance import canonical_copy
from ..graph.structure import Structure
from ..models.finite import check_finite
from ..models.running import cast, outputs
from ..models.running import distance as largest_difference
from ..models.walk import tensors_of
from .channels import channel_groups
from .matching import by_weights, permuted, real

SAME = 1e-5
# largest difference of outputs for one of weights, and the smallest of weights that rounding makes
AMPLIFIED, ROUNDING = 1e3, 1e-8


@dataclass(frozen=True, eq=False)
class Comparison:
    """The result of :func:`compare`.

    Attributes:
        same: whether the models are equal up to scales and the order of channels: their tensors,
            and their outputs on random inputs.
        distance: ``|a - b| / |a|`` over all parameters, after scales and order are aligned.
        as_given: the same for the given models.
        rescaled: the same after only scales are aligned.
        differ: tensor -> its ``|a - b| / |a|`` after alignment, largest first, for the tensors that
            differ; for integers and masks, the share of entries that differ.
        orders: channel group -> order of the second model's channels.
        outputs: the largest difference of outputs on random inputs after alignment, relative to the
            largest output; ``None`` if tensors differ, or the models cannot be run on random inputs
            in float64.
    """

    same: bool
    distance: float
    as_given: float
    rescaled: float
    differ: Mapping[str, float]
    orders: Mapping[str, Tensor] = field(repr=False)
    outputs: float | None = None


@torch.no_grad()
def compare(a: nn.Module, b: nn.Module, graph: Structure, tolerance: float = SAME) -> Comparison:
    """Compare two models of one architecture modulo rescaling and permutation.

    Both are brought to the canonical point of their orbits, the rescaled model of smallest ``sum
    w^2`` (tilted where there is none), which is unique; then the channels of the second are matched
    with the first's. ``same`` says that the functions are equal (to ``tolerance`` in the weights).
    Since numbers may stand in the code of a model (a slope, an ``eps``), both are also run on
    random inputs, in evaluation mode and float64, where tensors agree. If it is false, they may be
    equal for another reason, or the matching may have missed the order, which can happen for
    channels that are nearly equal.

    Args:
        a: the traced model, or a copy with other weights.
        b: another one.
        graph: the reduction graph of either.
        tolerance: largest distance that counts as the same.

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
        ...     model, ps.rescale(other, graph, torch.tensor([1.0, -1.0, 0.5])), graph
        ... )
        >>> found.same, found.as_given > 0.1
        (True, True)
    """
    expect_arguments("compare", model=a, graph=graph)
    expect_arguments("compare", model=b)
    expect_numbers("compare", "a number of at least 0", tolerance=tolerance)
    shapes = {name: tuple(parameter.shape) for name, parameter in graph.parameters.items()}
    for model in (a, b):
        own = {name: tuple(tensor.shape) for name, tensor in tensors_of(model).items()}
        if any(own.get(name) != shape for name, shape in shapes.items()):
            raise InputError(
                f"compare found a {type(model).__name__} with other tensors than the graph; pass"
                " two models of the architecture that was traced."
            )
        check_finite(model, ())
    one, two = (canonical_copy(model, graph) for model in (a, b))
    slices = {group.name: group.slices for group in channel_groups(graph.captured, a)}
    orders = by_weights(one, two, slices)
    moved = permuted(two, slices, orders)
    parts = _parts(one, moved)
    held = tensors_of(one)
    differ = {
        name: far
        for name, far in sorted(parts.items(), key=lambda entry: -entry[1])
        if far > (tolerance if _is_real(held[name]) else 0)
    }
    distance, rescaled = _distance(one, moved), _distance(one, two)
    same, far = distance <= tolerance and not differ, None
    if same:
        far = _apart((one, moved), a, graph.captured)
        same = far is None or far <= AMPLIFIED * max(distance, ROUNDING)
    return Comparison(same, distance, _distance(a, b), rescaled, differ, orders, far)


def _apart(pair: tuple[nn.Module, nn.Module], given: nn.Module, captured: Captured) -> float | None:
    """Largest relative difference of the outputs of two models in float64 on random inputs;
    ``None`` if the given model takes none.
    """
    try:
        batch = made_up(given, captured, finite=False)[0]
    except InputError:
        return None
    args, kwargs = cast(batch_inputs(batch), torch.float64)
    try:
        runs = [outputs(model, args, kwargs, seed=0) for model in pair]
    except Exception:
        # (code that takes no float64)
        return None
    return largest_difference(*([part for out in run for part in _finite(out)] for run in runs))


def _finite(out: Tensor) -> tuple[Tensor, Tensor]:
    """An output as finite real numbers, and where and how it is infinite."""
    numbers = (torch.view_as_real(out) if out.is_complex() else out).double()
    infinite = numbers.isinf()
    return torch.where(infinite, 0.0, numbers), torch.where(infinite, numbers.sign(), 0.0)


def _is_real(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    return {name: real(tensor) for name, tensor in tensors_of(model).items() if _is_real(tensor)}


def _parts(one: nn.Module, two: nn.Module) -> dict[str, float]:
    pairs, own = _tensors(two), _tensors(one)
    parts = {
        name: float((own[name] - pairs[name]).norm() / own[name].norm().clamp(min=1e-30))
        for name in own
    }
    every = tensors_of(two)
    for name, tensor in tensors_of(one).items():
        # integers and masks are the same or not; (batch norms count the
        # batches that they have seen)
        if (
            name not in own
            and name in every
            and not name.endswith("num_batches_tracked")
            and tensor.numel()
        ):
            parts[name] = float((tensor != every[name].to(tensor.device)).double().mean())
    return parts


def _distance(one: nn.Module, two: nn.Module) -> float:
    pairs, own = _tensors(two), _tensors(one)
    total = sum(float((own[name] - pairs[name]).square().sum()) for name in own)
    result: float = (
        total / max(sum(float(tensor.square().sum()) for tensor in own.values()), 1e-300)
    ) ** 0.5
    return result
