"""Sizes of weights, gradients and steps for each tensor and each unit."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from pathspace.reduction import ReductionGraph

from ..parameters.conservation import squared_weights, unit_sums

# E log|w| of a normal w is smaller than the logarithm of its standard deviation by this number
_LOG_NORMAL = 0.635
_SAMPLED = 100_000


@dataclass
class TensorFacts:
    """One trainable parameter tensor.

    Attributes:
        name: its name.
        matrix: whether it multiplies activations: it has two or more dimensions and
            is not an embedding table.
        norm: Euclidean norm.
        gradient: norm of its gradient; ``None`` without one.
        excess: ``log10`` of its typical absolute value over ``1 / sqrt(3 fan_in)``, the initial
            size in torch's layers; ``None`` for tensors that are not matrices or are zero.
        copies: whether all its units have exactly the same weights and do the same: they read
            the same inputs, or get the same gradient.
        moved: norm of the last step over that of the weights (or over their initial
            size in torch, if larger).
        trained: whether an optimizer has it.
        still: of a tensor in 16 bits, the share of the weights with a gradient that the
            last step did not change.
    """

    name: str
    matrix: bool
    norm: float
    gradient: float | None
    excess: float | None
    copies: bool = False
    moved: float | None = None
    trained: bool = True
    still: float | None = None


@dataclass
class GroupFacts:
    """The units between two layers: their incoming and outgoing weights, relative
    to torch's initialisation.

    Attributes:
        name: the tensor that enters the units.
        after: a tensor that leaves them.
        ratio: median of ``log10`` of the size of incoming over outgoing weights.
        product: median of ``log10`` of their product, which is invariant under rescaling.
        spread: 90 % range of the ratio over the units.
    """

    name: str
    after: str
    ratio: float
    product: float
    spread: float


def fan_in(model: nn.Module) -> dict[str, int]:
    """The number of inputs of a unit, for every weight tensor that multiplies activations."""
    found: dict[str, int] = {}
    for prefix, module in model.named_modules():
        for name, value in module.named_parameters(prefix, recurse=False):
            if value.ndim < 2 or isinstance(module, nn.Embedding | nn.EmbeddingBag):
                continue
            # (one number for each channel, as in a scale of shape (C, 1, 1), is no matrix)
            layer = isinstance(module, nn.Linear | nn.modules.conv._ConvNd)
            if not layer and sum(size > 1 for size in value.shape) < 2:
                continue
            # in transposed convolutions and the Conv1D of transformers the first
            # dimension is that of the inputs
            first = type(module).__name__ == "Conv1D" or getattr(module, "transposed", False)
            found[name] = value.shape[0] if first else value[0].numel()
    return found


@torch.no_grad()
def tensor_facts(
    model: nn.Module, fans: Mapping[str, int], slopes: Mapping[str, Tensor] | None = None
) -> list[TensorFacts]:
    """Current sizes of all trainable tensors and their gradients.

    Args:
        model: any module.
        fans: from :func:`fan_in`.
        slopes: gradients by name; those in ``.grad`` by default.
    """
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad and p.numel()]
    norms = _norms([p for _, p in named])
    slopes = {name: p.grad for name, p in named if p.grad is not None} if slopes is None else slopes
    gradients = dict(zip(slopes, _norms(list(slopes.values())), strict=True))
    found, layers = [], layer_weights(model)
    for (name, p), norm in zip(named, norms, strict=True):
        excess, copies = None, False
        if name in fans:
            excess = _excess(p, fans[name])
            if norm > 0 and _alike(p):
                copies = name in layers or (bool(gradients.get(name)) and _alike(slopes[name]))
        found.append(TensorFacts(name, name in fans, norm, gradients.get(name), excess, copies))
    return found


def layer_weights(model: nn.Module) -> set[str]:
    """Weights of layers all of whose units read the same inputs."""
    return {
        f"{name}.weight".removeprefix(".")
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | nn.modules.conv._ConvNd)
        and getattr(module, "groups", 1) == 1
    }


def _alike(rows: Tensor) -> bool:
    """Whether all rows are equal; the first two decide it for most tensors."""
    return len(rows) > 1 and bool((rows[1] == rows[0]).all()) and bool((rows == rows[:1]).all())


def _norms(tensors: Sequence[Tensor], power: int = 2) -> list[float]:
    dense = [t.to_dense() if t.is_sparse else t for t in tensors]
    return (
        torch.stack([n.float().cpu() for n in torch._foreach_norm(dense, power)]).tolist()
        if dense
        else []
    )


def _excess(weight: Tensor, fan: int) -> float | None:
    flat = weight.detach().reshape(-1)
    flat = flat[:: -(-flat.numel() // _SAMPLED)].abs().float()
    flat = flat[flat > 0]
    if not len(flat):
        return None
    return (float(flat.log().mean()) + _LOG_NORMAL) / math.log(10) + 0.5 * math.log10(3 * fan)


@torch.no_grad()
def moves(
    before: Mapping[str, Tensor],
    model: nn.Module,
    facts: Sequence[TensorFacts],
    fans: Mapping[str, int],
) -> None:
    """Set the relative step of every tensor since a copy of it was made.

    Args:
        before: copies by name.
        model: the model now.
        facts: their ``moved`` and ``still`` are set.
        fans: from :func:`fan_in`.
    """
    now = {name: p for name, p in model.named_parameters() if name in before}
    steps = dict(
        zip(now, _norms([p.detach() - before[name] for name, p in now.items()]), strict=True)
    )
    for each in facts:
        if each.name in steps:
            usual = (
                math.sqrt(now[each.name].numel() / (3 * fans[each.name]))
                if each.name in fans
                else 0.0
            )
            size = max(each.norm, usual)
            each.moved = steps[each.name] / size if size > 0 else None
            slope = now[each.name].grad
            if (
                slope is not None
                and now[each.name].element_size() == 2
                and bool((slope != 0).any())
            ):
                each.still = float((now[each.name] == before[each.name])[slope != 0].float().mean())


def eps_share(optimizer: torch.optim.Optimizer) -> float | None:
    """The eps of an optimizer like Adam over the largest root mean square that it
    divides a tensor's step by.

    Args:
        optimizer: any; ``None`` comes back for those that keep no mean of squares.
    """
    found = []
    for group in optimizer.param_groups:
        states = [
            state
            for state in map(optimizer.state.get, group["params"])
            if state and state.get("step")
        ]
        squares = [
            (s["exp_avg_sq"], float(s["step"]))
            for s in states
            if isinstance(s.get("exp_avg_sq"), Tensor)
        ]
        if not squares or not group.get("betas") or not isinstance(group.get("eps"), float):
            continue
        rate = group["betas"][1]
        sums = zip(_norms([kept for kept, _ in squares], 1), squares, strict=True)
        usual = max(total / max(kept.numel(), 1) / (1 - rate**step) for total, (kept, step) in sums)
        found.append(group["eps"] / math.sqrt(usual) if usual > 0 else 0.0)
    return min(found, default=None)


def usual_squares(model: nn.Module, fans: Mapping[str, int]) -> dict[str, float]:
    """Mean squares of initial weights: ``1 / (3 fan_in)`` for matrices, 1 for norms;
    biases are not included.

    Args:
        model: any module.
        fans: from :func:`fan_in`.
    """
    start = {name: 1 / (3 * fan) for name, fan in fans.items()}
    for name, module in model.named_modules():
        if "Norm" in type(module).__name__ and isinstance(getattr(module, "weight", None), Tensor):
            start[f"{name}.weight" if name else "weight"] = 1.0
    return start


class Units:
    """Compares sums of squares at units with those of torch's initialisation.

    They are those of :func:`usual_squares`.

    Args:
        model: the model.
        graph: its reduction graph.
        fans: from :func:`fan_in`.
    """

    def __init__(self, model: nn.Module, graph: ReductionGraph, fans: Mapping[str, int]) -> None:
        self.graph = graph
        start = usual_squares(model, fans)
        usual = {b.name: torch.full(b.shape, start.get(b.name, 0.0)) for b in graph.blocks}
        self.usual = [value.numpy() for value in unit_sums(graph, usual)]
        self.counted = {b.name for b in graph.blocks if b.name in start}
        self.groups: list[tuple[str, str, np.ndarray]] = []
        sides = {
            side: {b.name: self._units(getattr(b, side)) for b in graph.blocks}
            for side in ("head", "tail")
        }
        for name, units in sides["head"].items():
            after = next(
                (
                    n
                    for n, u in sides["tail"].items()
                    if n in fans and np.intersect1d(units, u).size
                ),
                None,
            )
            if name in start and after is not None:
                self.groups.append((name, after, units))

    def _units(self, ids: Tensor) -> np.ndarray:
        found = np.unique(ids.abs().numpy())
        return found[(found > 0) & (found <= self.graph.num_units)] - 1

    def sums(self, before: Mapping[str, Tensor] | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Sums of squares of the weights that enter and leave every unit, without biases.

        Args:
            before: weights by name; by default those that the model has now.
        """
        values = {
            name: v if name in self.counted else torch.zeros(v.shape)
            for name, v in squared_weights(self.graph, before).items()
        }
        incoming, outgoing = unit_sums(self.graph, values)
        return incoming.numpy(), outgoing.numpy()

    def entering(self, before: Mapping[str, Tensor]) -> np.ndarray:
        """Sums of squares of the changes since tensors were copied, over the
        weights that enter every unit.

        Args:
            before: the copies by name.
        """
        graph, changed = self.graph, {}
        for block in graph.blocks:
            old = before.get(block.name) if block.name in self.counted else None
            now = graph.parameters[block.name].detach()
            changed[block.name] = (
                torch.zeros(block.shape) if old is None else (now - old).double().square()
            )
        return unit_sums(graph, changed)[0].numpy()

    def facts(self, incoming: np.ndarray, outgoing: np.ndarray) -> list[GroupFacts]:
        """One entry per group of units between two matrices."""
        found = []
        for name, after, units in self.groups:
            pairs = zip((incoming, outgoing), self.usual, strict=True)
            sizes = [(value[units], usual[units]) for value, usual in pairs]
            kept = np.all([(value > 0) & (usual > 0) for value, usual in sizes], axis=0)
            if not kept.any():
                continue
            entering, leaving = (
                0.5 * np.log10(value[kept] / usual[kept]) for value, usual in sizes
            )
            ratio = entering - leaving
            spread = float(np.subtract(*np.quantile(ratio, (0.95, 0.05))))
            found.append(
                GroupFacts(
                    name,
                    after,
                    float(np.median(ratio)),
                    float(np.median(entering + leaving)),
                    spread,
                )
            )
        return found
