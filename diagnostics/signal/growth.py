"""Growth of a trained model: predicted and measured decrease of the loss by new parameters."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy.optimize import least_squares
from torch import Tensor, nn
from torch.autograd import functional
from torch.utils._pytree import tree_map

from pathspace.errors import (
    COUNT,
    SEED,
    InputError,
    InputTypeError,
    UnsupportedError,
    expect_arguments,
    expect_numbers,
    first_line,
)
from pathspace.models.copies import safe_deepcopy
from pathspace.models.inputs import check_inputs
from pathspace.models.isolation import quiet, torch_kept
from pathspace.models.modes import never_recomputed
from pathspace.models.refusals import check_capturable
from pathspace.models.running import evaluate

from ..shared.model_calls import arguments, float64_errors_explained, main_output
from ..shared.real_tensors import in_float64
from ..shared.selection import Names, matching
from ..shared.tables import Table
from ..shared.unchanged import unchanged
from .theory import ELEMENTWISE

Vector = Callable[[np.ndarray], np.ndarray]

_CURVATURE_LIMIT = 400
# evaluations of a fit, which on some data goes on without end
_FIT_STEPS = 200


@dataclass(frozen=True)
class Growth:
    """The predicted decrease of the loss ``E|f - y|^2 / 2`` by a candidate growth, with
    the old parameters frozen.

    Attributes:
        candidate: its name.
        parameters: number of new scalars.
        loss: the loss before.
        predicted: decrease at the optimum of the linearised model, ``b^T A^+ b / 2``.
        linear_step: measured decrease after exactly this step; differs from ``predicted`` if the
            outputs are not linear in the new parameters.
        measured: decrease after fitting the new parameters; ``None`` if not requested.
        rank: rank of ``A``, the number of new parameters with a first-order effect.
        curvature: smallest eigenvalue of the Hessian with respect to the new parameters, at
            saddles with up to 400 of them.
        saddle: whether the new parameters start at a stationary point that is not a minimum.
        remark: restrictions in a sentence.
    """

    candidate: str
    parameters: int
    loss: float
    predicted: float
    linear_step: float
    measured: float | None
    rank: int
    curvature: float | None
    saddle: bool
    remark: str


def predict_growth(
    model: nn.Module,
    names: Names,
    inputs: Any,
    targets: Tensor,
    fit: bool = True,
    candidate: str = "growth",
    tolerance: float = 1e-12,
) -> Growth:
    """Predict and measure how much new parameters can lower the squared loss of a trained model.

    With ``dy = y - f`` and ``J = df/dphi`` over all data and outputs: ``A = E[J^T J]`` (the
    second moment, not the covariance), ``b = E[J^T dy]``, ``phi* = A^+ b``, decrease ``b^T A^+
    b / 2``. It is solved as a least-squares problem with J, whose condition number is the
    square root of that of A.

    Args:
        model: the grown model; its new parameters have their start values, at which it computes the
            outputs of the old model.
        names: patterns of the new parameters' names.
        inputs: a tensor, a tuple of positional or a mapping of keyword inputs: all the data.
        targets: targets of the shape of the outputs; E is the mean over the first axis
            and the sum over outputs.
        fit: fit the new parameters by nonlinear least squares from the start values, in at most
            200 evaluations, and measure the decrease.
        candidate: name in the result.
        tolerance: relative limit for the rank of J and for a gradient that counts as zero.

    Returns:
        Prediction and measurement.

    Raises:
        InputError: no parameter matches, or targets have another shape.
        UnsupportedError: outputs or derivatives are not finite.
        CaptureError: the model does not run in float64.

    Example:
        >>> x = torch.linspace(-1, 1, 50).double()[:, None]
        >>> line = nn.Linear(1, 1).double()
        >>> _ = nn.init.zeros_(line.weight), nn.init.zeros_(line.bias)
        >>> found = predict_growth(line, "weight", x, 2 * x)
        >>> abs(found.predicted - found.measured) < 1e-12, found.saddle
        (True, False)

    Reference:
        Evolution of neural network, section 3.1.
    """
    expect_arguments("predict_growth", model=model)
    expect_numbers("predict_growth", "a number of at least 0", tolerance=tolerance)
    check_capturable(model)
    twin = safe_deepcopy(model).double().requires_grad_(True)
    wanted = matching(names or None)
    chosen = {name: parameter for name, parameter in twin.named_parameters() if wanted(name)}
    if not chosen:
        raise InputError(
            f"predict_growth found no parameter of {type(model).__name__} that matches {names!r}."
        )
    args, kwargs = tree_map(in_float64, arguments(model, inputs))
    check_inputs(model, args, kwargs)
    targets = targets.detach().double()
    sizes = [parameter.numel() for parameter in chosen.values()]
    start = torch.cat([parameter.detach().reshape(-1) for parameter in chosen.values()])

    def outputs(flat: Tensor) -> Tensor:
        values = {
            n: part.view_as(chosen[n]) for n, part in zip(chosen, flat.split(sizes), strict=True)
        }
        with unchanged(twin), never_recomputed(), float64_errors_explained(model):
            result = evaluate(twin, values, args, kwargs)
        return main_output(twin, result)

    def point(flat: np.ndarray) -> Tensor:
        return torch.from_numpy(np.array(flat)).to(start.device)

    def residual(flat: np.ndarray) -> np.ndarray:
        found = outputs(point(flat).requires_grad_()) - targets
        return found.detach().reshape(-1).cpu().numpy()

    def derivative(flat: np.ndarray) -> np.ndarray:
        found = functional.jacobian(outputs, point(flat))
        return np.asarray(found.reshape(-1, len(flat)).cpu().numpy())

    first = outputs(start.clone().requires_grad_())
    if first.shape != targets.shape:
        raise InputError(
            f"predict_growth found targets of shape {tuple(targets.shape)}, expected"
            f" {tuple(first.shape)}, that of the outputs."
        )
    count = len(targets)
    origin = start.cpu().numpy()
    error = residual(origin)
    slope = derivative(origin)
    if not (np.isfinite(slope).all() and np.isfinite(error).all()):
        raise UnsupportedError(
            f"predict_growth: outputs or derivatives of {type(model).__name__} are not finite on"
            " these data; check for an overflow, or for a square root, norm or logarithm of zero."
        )
    loss = float(error @ error) / 2 / count
    left, singular, right = np.linalg.svd(slope, full_matrices=False)
    rank = int((singular > tolerance * max(singular.max(initial=0.0), 1e-300)).sum())
    # derivatives below rounding errors count as zero
    if singular.max(initial=0.0) <= 1e-14:
        rank = 0
    image = left[:, :rank].T @ -error
    step = right[:rank].T @ (image / singular[:rank])
    predicted = float(image @ image) / 2 / count
    after = residual(origin + step)
    stationary = bool(predicted <= tolerance * max(loss, 1e-300))
    remarks, curvature, saddle = [], None, False
    if stationary and loss > 0:
        curvature = _curvature(outputs, start, targets) if len(start) <= _CURVATURE_LIMIT else None
        saddle = curvature is not None and curvature < -1e-12
        remarks.append(
            "saddle: the gradient by the new parameters is zero but the loss curves down; start"
            " them elsewhere, such as random weights into a new unit and zero weights out of it"
            if saddle
            else "stationary: the new parameters do not lower the loss to first order"
        )
    linear_step = loss - float(after @ after) / 2 / count
    if not stationary and linear_step < 0.5 * predicted:
        remarks.append("the outputs are far from linear over the predicted step: take smaller ones")
    measured = None
    if fit:
        best, unfinished = _fit(residual, origin, derivative)
        remarks += unfinished
        # if the outputs are linear in the new parameters, the step is already the optimum
        measured = loss - min(best, float(after @ after)) / 2 / count
    return Growth(
        candidate,
        len(start),
        loss,
        predicted,
        linear_step,
        measured,
        rank,
        curvature,
        saddle,
        "; ".join(remarks),
    )


def _fit(residual: Vector, origin: np.ndarray, derivative: Vector) -> tuple[float, list[str]]:
    """The smallest sum of squares that is found from a start, and a remark if the search was
    cut off.
    """
    solved = least_squares(
        residual,
        origin,
        derivative,
        method="trf",
        x_scale="jac",
        xtol=1e-15,
        ftol=1e-15,
        gtol=1e-15,
        max_nfev=_FIT_STEPS,
    )
    unfinished = f"the fit stopped after {_FIT_STEPS} steps; it may lower the loss more"
    return float(solved.fun @ solved.fun), [] if solved.status else [unfinished]


def _curvature(outputs: Any, start: Tensor, targets: Tensor) -> float:
    """The smallest eigenvalue of the Hessian of the loss."""
    hessian = functional.hessian(
        lambda point: (outputs(point) - targets).square().sum() / 2 / len(targets), start
    )
    return float(torch.linalg.eigvalsh((hessian + hessian.T) / 2)[0])


def rank_growths(
    candidates: Mapping[str, tuple[nn.Module, Names]],
    inputs: Any,
    targets: Tensor,
    fit: bool = True,
) -> Table[Growth]:
    """Rank candidate growths by predicted decrease.

    Args:
        candidates: name -> (grown model, patterns of its new parameters).
        inputs: all the data.
        targets: targets of the shape of the outputs.
        fit: also measure each decrease.

    Returns:
        The candidates, best first; saddles and stationary starts come last.
    """
    expect_arguments("rank_growths", models=candidates)
    rows = [
        predict_growth(model, names, inputs, targets, fit, candidate)
        for candidate, (model, names) in candidates.items()
    ]
    rows.sort(key=lambda row: -row.predicted)
    notes = [f"{row.candidate}: {row.remark}." for row in rows if row.remark]
    return Table("growths by predicted decrease", tuple(rows), tuple(notes))


class Widened(nn.Module):
    """A hidden layer with new units as separate parameters: ``old(x) + out(act(into(x)))``.

    Args:
        into: linear layer before the activation.
        activation: activation of the hidden layer.
        out: linear layer after it.
        units: number of new units.
        start: ``"outgoing"`` (random incoming and zero outgoing weights: the outputs do not change,
            and the gradient is not zero) or ``"zero"`` (a saddle).
        seed: seed of the random weights.

    Raises:
        InputError: unknown ``start``.

    Example:
        >>> layer = Widened(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1), units=5)
        >>> sorted(name for name, _ in layer.named_parameters() if name.startswith("new"))
        ['new_into.bias', 'new_into.weight', 'new_out.weight']
    """

    def __init__(
        self,
        into: nn.Linear,
        activation: nn.Module,
        out: nn.Linear,
        units: int,
        start: str = "outgoing",
        seed: int = 0,
    ) -> None:
        super().__init__()
        if start not in ("outgoing", "zero"):
            raise InputError(f"Widened found start={start!r}, expected 'outgoing' or 'zero'.")
        _expect_elementwise("Widened", activation, units, into.weight)
        self.into, self.activation, self.out = map(safe_deepcopy, (into, activation, out))
        like = into.weight
        # (on the processor, so that a seed gives the same numbers on every device)
        with torch_kept(seed), torch.device("cpu"):
            into_new = nn.Linear(into.in_features, units, dtype=like.dtype)
            out_new = nn.Linear(units, out.out_features, bias=False, dtype=like.dtype)
        self.new_into, self.new_out = into_new.to(like.device), out_new.to(like.device)
        nn.init.zeros_(self.new_out.weight)
        if start == "zero":
            nn.init.zeros_(self.new_into.weight)
            nn.init.zeros_(self.new_into.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Old units and new ones."""
        result: Tensor = self.out(self.activation(self.into(x))) + self.new_out(
            self.activation(self.new_into(x))
        )
        return result


def widen(
    model: nn.Sequential, first: int, units: int, start: str = "outgoing", seed: int = 0
) -> tuple[nn.Sequential, list[str]]:
    """A copy of a ``Sequential`` with new units in one hidden layer, and the
    names of their parameters.

    Args:
        model: a ``Sequential`` with a linear layer, an activation and a linear layer
            from position ``first``.
        first: position of the first of the three.
        units: number of new units.
        start: see :class:`Widened`.
        seed: seed of random weights.

    Returns:
        The wider model, and the names of its new parameters (for ``start="outgoing"`` only the
        outgoing ones, in which the outputs are linear).

    Raises:
        InputError: there are other layers at this position.
    """
    expect_arguments("widen", chain=model)
    expect_numbers("widen", COUNT, units=units)
    expect_numbers("widen", SEED, first=first, seed=seed)
    layers = list(safe_deepcopy(model))
    trio: Sequence[nn.Module] = layers[first : first + 3]
    if len(trio) < 3 or not (isinstance(trio[0], nn.Linear) and isinstance(trio[2], nn.Linear)):
        raise InputError(
            f"widen found {[type(layer).__name__ for layer in trio]} at position {first}, expected"
            " Linear, an activation, Linear."
        )
    wide = Widened(trio[0], trio[1], trio[2], units, start, seed)
    grown = nn.Sequential(*layers[:first], wide, *layers[first + 3 :])
    return grown, [f"{first}.new_*" if start == "zero" else f"{first}.new_out.*"]


def deepen(
    model: nn.Sequential,
    after: int,
    width: int,
    activation: nn.Module,
    residual: bool = False,
    seed: int = 0,
) -> nn.Sequential:
    """A copy of a ``Sequential`` with one more hidden layer after position ``after``.

    Args:
        model: a ``Sequential``.
        after: the new layers come after this one.
        width: number of features at that position.
        activation: activation after the new linear layer.
        residual: add the new layer to its input, with zero outgoing weights, so that
            the outputs do not change.
        seed: seed of the random weights; the global random state is not changed.

    Returns:
        The deeper model.
    """
    expect_arguments("deepen", chain=model)
    expect_numbers("deepen", COUNT, width=width)
    expect_numbers("deepen", SEED, after=after, seed=seed)
    if after >= len(model):
        raise InputError(
            f"deepen found after={after}, expected the position of one of the {len(model)} layers."
        )
    layers, like = list(safe_deepcopy(model)), next(model.parameters(), torch.zeros(1))
    # (other layers may change the number of features)
    kept = (nn.Linear, nn.Dropout, nn.LayerNorm, nn.RMSNorm, nn.BatchNorm1d, *ELEMENTWISE)
    before = list(itertools.takewhile(lambda layer: isinstance(layer, kept), layers[after::-1]))
    features = next((one.out_features for one in before if isinstance(one, nn.Linear)), width)
    if features != width:
        raise InputError(
            f"deepen found width={width}, expected {features}, the number of features after layer"
            f" {after}."
        )
    _expect_elementwise("deepen", activation, width, like)
    with torch_kept(seed), torch.device("cpu"):
        linear = nn.Linear(
            width, width, bias=any("bias" in name for name, _ in model.named_parameters())
        )
    linear = linear.to(dtype=like.dtype, device=like.device)
    new: list[nn.Module] = [linear, safe_deepcopy(activation)]
    if residual:
        new = [_Added(linear, safe_deepcopy(activation), safe_deepcopy(linear))]
    return nn.Sequential(*layers[: after + 1], *new, *layers[after + 1 :])


def _expect_elementwise(owner: str, activation: nn.Module, units: int, like: Tensor) -> None:
    """Refuse an activation that does not take this number of units.

    Raises:
        InputTypeError: it is not a module.
        InputError: it raises an error, or returns another shape.
    """
    if not isinstance(activation, nn.Module):
        raise InputTypeError(
            f"{owner} found an activation of type {type(activation).__name__}, expected a module"
            " such as torch.nn.ReLU()."
        )
    x = torch.zeros(2, units, dtype=like.dtype, device=like.device)
    try:
        with torch.no_grad(), quiet():
            shape = tuple(safe_deepcopy(activation).eval()(x).shape)
    except Exception as error:
        raise InputError(
            f"{owner} found {type(activation).__name__}, which does not take {units} units"
            f" ({first_line(error)}), expected an elementwise activation."
        ) from error
    if shape != (2, units):
        raise InputError(
            f"{owner} found {type(activation).__name__}, which makes {units} units"
            f" {'x'.join(map(str, shape[1:])) or 'a number'}, expected an elementwise activation."
        )


class _Added(nn.Module):
    def __init__(self, into: nn.Linear, activation: nn.Module, out: nn.Linear) -> None:
        super().__init__()
        self.into, self.activation, self.out = into, activation, out
        for parameter in out.parameters():
            nn.init.zeros_(parameter)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.out(self.activation(self.into(x)))
        return result
