"""Gradient balance: what enters a unit and what leaves it have the same sum
of weight times gradient.

Differentiating ``L(w) = L(gauge(phi) w)`` at ``phi = 0`` gives, for every unit, ``sum_in w g =
sum_out w g`` exactly; one backward pass in float64 tests the whole analysis.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from ..graph.structure import Structure
from ..models.isolation import quiet, seed_torch
from ..models.modes import never_recomputed, precision
from ..models.nested import real_leaves
from ..models.refusals import no_derivative
from ..models.restored_globals import values_kept
from ..models.running import ROUNDED, computing_in, evaluate
from ..models.walk import tensors_of
from .bench import Workbench


def _product(weight: Tensor, grad: Tensor) -> Tensor:
    """What scaling a weight does to a loss: ``w dL/dw``, of a complex one ``Re(conj(w) dL/dw)``."""
    return torch.real(weight.conj() * grad.to_dense()).double()


def sums(
    graph: Structure, weights: Mapping[str, Tensor], grads: Mapping[str, Tensor]
) -> tuple[Tensor, Tensor]:
    """``sum_in w g - sum_out w g`` and ``sum |w g|`` for the root and every unit."""
    net = torch.zeros(graph.expand.shape[0], dtype=torch.float64)
    size = torch.zeros_like(net)

    def add(name: str, ids: Tensor, times: int) -> None:
        if name in grads:
            value = weights[name].detach() + graph.shifts.get(name, 0.0)
            product, flat = times * _product(value, grads[name]), ids.reshape(-1)
            total, absolute = (
                each.sum_to_size(ids.shape).reshape(-1) for each in (product, product.abs())
            )
            net.index_add_(0, flat.abs(), total * flat.sign())
            size.index_add_(0, flat.abs(), absolute)

    for block in graph.blocks:
        add(block.name, block.head, 1)
        add(block.name, block.tail, -1)
    for statistic in graph.statistics:
        # running statistics are rescaled along: the mean with its channel, the
        # variance with its square
        for name, power in statistic.powers.items():
            add(name, statistic.units, power)
    return torch.from_numpy(graph.expand.T @ net.numpy()), torch.from_numpy(
        abs(graph.expand).T @ size.numpy()
    )


def imbalances(
    graph: Structure,
    weights: Mapping[str, Tensor],
    grads: Mapping[str, Tensor],
    others: Sequence[Mapping[str, Tensor]] = (),
) -> Tensor:
    """``|sum_in w g - sum_out w g|`` of every unit, relative to ``sum |w g|`` there.

    Args:
        graph: the reduction graph.
        weights: parameter name -> weights.
        grads: parameter name -> gradients.
        others: the same gradients with other rounding errors. A sum that is no larger than
            ``ROUNDED`` times what they differ by, or than the digits of the largest ``sum |w g|``,
            is 0 as far as can be told: a gradient that vanishes (two numbers that are normalised
            become 1 and -1, whatever they were) is rounding alone.

    Returns:
        The relative violations, shape ``(H,)``; 0 for units that no gradient reaches.
    """
    net, size = sums(graph, weights, grads)
    relative = torch.where(size > 0, net.abs() / size, net.abs())
    if others:
        digits = max((torch.finfo(grad.dtype).eps for grad in grads.values()), default=0.0)
        noise = torch.full_like(size, float(size.max()) * digits)
        for other in others:
            gap = {name: other[name] - grad for name, grad in grads.items() if name in other}
            noise = torch.maximum(noise, sums(graph, weights, gap)[1])
        relative = torch.where(net.abs() > ROUNDED * noise, relative, 0)
    return relative[1:]


def measure_balance(bench: Workbench, tolerance: float, rescales: bool) -> tuple[float | None, str]:
    """The largest imbalance, or ``None`` and why there is none: where a rescaling changes no output
    (``rescales``), an imbalance can be the fault of the gradients.
    """
    try:
        grads = random_loss_gradients(bench)
    except Exception as error:
        # a model that cannot be differentiated (it overwrites what its backward pass needs, or
        # that raises, whatever its author chose) can still be rescaled
        return None, no_derivative(error)
    weights = tensors_of(bench.model)
    found = imbalances(bench.graph, weights, grads)
    worst = float(found.max()) if len(found) else 0.0
    if math.isnan(worst):
        return None, "gradients are not finite"
    if worst > tolerance:
        found = imbalances(bench.graph, weights, grads, list(rounded_otherwise(bench)))
        worst = float(found.max())
    if worst > tolerance and rescales:
        wrong = misled(bench, grads, int(found.argmax()) + 1)
        if wrong:
            return None, f"detached or of its own: the gradient of {wrong} is not the function's"
    return worst, ""


def _leaves(bench: Workbench) -> dict[str, Tensor]:
    """Parameters and running statistics as leaves to differentiate by; frozen statistics are
    constants of the function, and scale like weights do.
    """
    graph, model = bench.graph, bench.model
    wanted = {*graph.parameters, *(name for s in graph.statistics for name in s.names)}
    held = (*model.named_parameters(), *model.named_buffers())
    leaves = {name: tensor.detach().clone() for name, tensor in held}
    for name, leaf in leaves.items():
        leaf.requires_grad_(name in wanted and (leaf.is_floating_point() or leaf.is_complex()))
    return leaves


def _loss(bench: Workbench, leaves: Mapping[str, Tensor]) -> Tensor:
    """A random linear function of all outputs."""
    seed_torch(bench.seed)
    outputs = evaluate(bench.model, leaves, *bench.inputs)
    generator = torch.Generator().manual_seed(bench.seed + 1)
    loss = torch.zeros((), dtype=torch.float64)
    for leaf in real_leaves(outputs):
        weight = torch.randn(leaf.shape, generator=generator, dtype=torch.float64)
        value = leaf.double().cpu()
        # what a mask made infinite does not depend on weights
        loss = loss + (torch.where(torch.isfinite(value), value, 0) * weight).sum()
    return loss


def random_loss_gradients(bench: Workbench) -> dict[str, Tensor]:
    """Gradients of a random linear function of all outputs by every parameter it depends on."""
    leaves = _leaves(bench)
    with quiet(), computing_in(precision(bench.model)), torch.enable_grad(), never_recomputed():
        loss = _loss(bench, leaves)
        if not loss.requires_grad:
            return {}
        wanted = [name for name in leaves if leaves[name].requires_grad]
        found = torch.autograd.grad(loss, [leaves[name] for name in wanted], allow_unused=True)
    return {name: grad for name, grad in zip(wanted, found, strict=True) if grad is not None}


def rounded_otherwise(bench: Workbench) -> Iterator[dict[str, Tensor]]:
    """The gradients again, three times, of weights that are other in their last digits."""
    generator = torch.Generator().manual_seed(bench.seed)
    real = [parameter for parameter in bench.model.parameters() if parameter.is_floating_point()]
    for _ in range(3):
        with values_kept(real):
            with torch.no_grad():
                for parameter in real:
                    noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                    parameter.mul_((1 + 4 * torch.finfo(parameter.dtype).eps * noise).to(parameter))
            yield random_loss_gradients(bench)


def misled(bench: Workbench, grads: Mapping[str, Tensor], unit: int) -> str:
    """A weight tensor at a unit whose gradient by autograd is not the function's, or ``""``.

    ``detach``, ``no_grad`` and backward passes of one's own make them differ. Each tensor is moved
    along a random direction ``v``, and ``(L(w + h v) - L(w - h v)) / 2h`` compared with ``g . v``.
    The step ``h`` and the tolerance follow from the digits of the model's type.
    """
    graph, kind = bench.graph, precision(bench.model)
    digits = torch.finfo(kind).eps
    step, share = digits**0.375, max(1e-3, 4 * digits**0.375)
    generator = torch.Generator().manual_seed(bench.seed)
    ends = torch.from_numpy(graph.expand[:, [unit]].nonzero()[0])
    leaves = _leaves(bench)
    with quiet(), computing_in(kind), torch.no_grad():
        for block in graph.blocks:
            if not any(bool(torch.isin(ids.abs(), ends).any()) for ids in (block.head, block.tail)):
                continue
            weight = leaves[block.name]
            direction = weight * torch.randn(
                weight.shape, generator=generator, dtype=torch.float64
            ).to(weight)
            up, down = (
                float(_loss(bench, leaves | {block.name: weight + h * direction}))
                for h in (step, -step)
            )
            moved = (up - down) / (2 * step)
            product = _product(direction, grads.get(block.name, torch.zeros_like(weight)))
            rounding = 16 * digits / step * max(abs(up), abs(down))
            size = max(abs(moved), float(product.abs().sum()))
            if abs(moved - float(product.sum())) > share * size + rounding:
                return block.name
    return ""
