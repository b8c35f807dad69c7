r"""G-SGD: gradient descent on the values of basis paths, as an exact closed-form step on the weights.

Weights on ``T_out`` stay constant. With ``lambda_e = w_e dL/dw_e``, ``D_e = pre_tail s_head``, and chains ``k`` of
units that share a basis path ``p_k``::

    c_k = sum over e in T_in \\ T_out entering k of lambda_e  -  sum over e not in T_out leaving k of lambda_e
    R_k = 1 - lr c_k / (pre s)_k^2                            the ratio new / old of the value of p_k
    w_e <- (w_e - lr g_e / D_e^2) / R_tail                    edges in neither tree
    w_e <- w_e R_head / R_tail                                edges of T_in that are not in T_out

One masked reduction and one update per tensor, vectors of one entry per unit, no sweep over depth and no host
synchronisation. The
step equals gradient descent on path values to rounding, and therefore commutes with every rescaling of the network.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from pathspace import InputError, Skeleton, UnsupportedError


@dataclass(frozen=True, eq=False)
class BlockPlan:
    """What one parameter tensor needs in a step, on its device.

    Attributes:
        tail: unit ids of the edges' tails, broadcastable to the parameter (signed for opposite scales).
        head: unit ids of the edges' heads.
        reduced: dimensions along which ``tail`` is constant.
        inner: flat positions of edges in ``T_in`` but not ``T_out``.
        outer: flat positions of edges in ``T_out``.
        inner_tail, inner_head, outer_tail: signed unit ids at those positions.
        leaves_root: every edge leaves the root, so nothing is reduced.
        rooted: every edge joins the root to the root: plain gradient descent.
    """

    tail: Tensor
    head: Tensor
    reduced: tuple[int, ...]
    inner: Tensor
    outer: Tensor
    inner_tail: Tensor
    inner_head: Tensor
    outer_tail: Tensor
    leaves_root: bool
    rooted: bool


def plan(skeleton: Skeleton, block: int, device: torch.device) -> BlockPlan:
    """Index vectors of one block; nothing here has the size of the weights."""
    entry = skeleton.graph.blocks[block]
    tree_in, tree_out = skeleton.tree_in, skeleton.tree_out
    outer = np.unique(tree_out.index[tree_out.block == block])
    inner = np.setdiff1d(tree_in.index[tree_in.block == block], outer)

    def at(ids: Tensor, flat: np.ndarray) -> Tensor:
        if len(flat) == 0:
            return torch.zeros(0, dtype=torch.int64, device=device)
        index = np.unravel_index(flat, entry.shape) if entry.shape else ()
        chosen = tuple(
            torch.from_numpy(np.asarray(i if n > 1 else i * 0)) for i, n in zip(index, ids.shape, strict=True)
        )
        return (ids[chosen] if chosen else ids.reshape(1)).to(device)

    return BlockPlan(
        tail=entry.tail.to(device),
        head=entry.head.to(device),
        reduced=tuple(d for d in range(len(entry.shape)) if entry.tail.shape[d] == 1 and entry.shape[d] > 1),
        inner=torch.from_numpy(inner).to(device),
        outer=torch.from_numpy(outer).to(device),
        inner_tail=at(entry.tail, inner),
        inner_head=at(entry.head, inner),
        outer_tail=at(entry.tail, outer),
        leaves_root=not bool((entry.tail != 0).any()),
        rooted=not bool((entry.tail != 0).any()) and not bool((entry.head != 0).any()),
    )


def scale(table: Tensor, ids: Tensor) -> Tensor:
    """``table[|id|] ** sign(id)``, without asking the device whether a sign is negative."""
    value = table[ids.abs()]
    return torch.where(ids < 0, value.reciprocal(), value)


def path_gradient(
    plans: Sequence[BlockPlan],
    weights: Sequence[Tensor],
    grads: Sequence[Tensor],
    chain: Tensor,
    sign: Tensor,
    count: int,
) -> Tensor:
    """``c_k``: the derivative of the loss by the logarithm of ``p_k``, for every chain (0 for the root's).

    Args:
        plans: one per tensor.
        weights: the weights.
        grads: their gradients.
        chain: chain of every unit, ``(H + 1,)``.
        sign: sign with which a unit's ``p`` equals its chain's, ``(H + 1,)``.
        count: number of chains, the root's included.

    Returns:
        Shape ``(count,)``, of the type of ``sign``.
    """
    total = torch.zeros_like(sign)
    for entry, weight, grad in zip(plans, weights, grads, strict=True):
        if not entry.leaves_root:
            product = weight * grad
            leaving = product.sum(entry.reduced) if entry.reduced else product
            ids = entry.tail.reshape(-1)
            total.index_add_(0, ids.abs(), -leaving.reshape(-1).to(total) * ids.sign())
            outer = product.reshape(-1)[entry.outer].to(total)
            total.index_add_(0, entry.outer_tail.abs(), outer * entry.outer_tail.sign())
            inner = product.reshape(-1)[entry.inner].to(total)
        else:
            inner = (weight.reshape(-1)[entry.inner] * grad.reshape(-1)[entry.inner]).to(total)
        total.index_add_(0, entry.inner_head.abs(), inner * entry.inner_head.sign())
    result = sign.new_zeros(count).index_add_(0, chain, total * sign)
    result[0] = 0
    return result


def update(
    entry: BlockPlan,
    weight: Tensor,
    grad: Tensor,
    lr: Tensor | float,
    steps: tuple[Tensor, Tensor],
    ratio: Tensor,
) -> None:
    """Move one tensor in place.

    Args:
        entry: the tensor's plan.
        weight: the weights.
        grad: their gradient.
        lr: learning rate.
        steps: ``1 / pre^2`` and ``1 / s^2`` of every unit.
        ratio: ``R`` of every unit.
    """
    if entry.rooted:
        weight.sub_(grad * lr)
        return
    flat = weight.view(-1) if weight.is_contiguous() else None
    values = weight.reshape(-1) if flat is None else flat
    outer = values[entry.outer]
    away = scale(ratio, entry.tail).reciprocal()
    inner = values[entry.inner] * (scale(ratio, entry.inner_head) / scale(ratio, entry.inner_tail)).to(weight)
    by_tail = (scale(steps[0], entry.tail) * lr).to(weight)
    moved = grad * by_tail
    moved.mul_(scale(steps[1], entry.head).to(weight))
    weight.sub_(moved).mul_(away.to(weight))
    if flat is None:
        values = weight.reshape(-1)
    values[entry.outer] = outer
    values[entry.inner] = inner
    if flat is None:
        weight.copy_(values.view(weight.shape))


class GSGD(Optimizer):
    r"""Gradient descent on basis path values (G-SGD), with the conventions of ``torch.optim.SGD``.

    Args:
        params: ``model.named_parameters()``, named parameter groups, or parameters of the traced model itself.
        lr: learning rate on path values (a number or a tensor).
        skeleton: the skeleton of the traced model: ``ps.trace(model, ...).skeleton()``.
        momentum: momentum factor; the buffer holds gradients by weights, which a rescaling transports unchanged in
            form.
        dampening: dampening of the momentum.
        nesterov: Nesterov's momentum.
        weight_decay: refused unless 0: decay of weights is not a function of path values.
        maximize: ascend instead.
        min_ratio: smallest ``|R_k|``; a path value that would jump to (almost) zero is stopped there with its sign,
            because the weights behind it could not be recovered.
            Ratios below 0 (a path value that changes sign) are carried out exactly. Both are counted in :attr:`guards`.
        max_multiplier: upper bound of the multiplier ``1 / (pre s)^2`` of a free edge and of a chain. The multiplier
            is invariant under rescaling, so the bounded step is, too.

    Raises:
        InputError: a parameter of the skeleton is missing, or a setting is out of range.
        UnsupportedError: weight decay, or a skeleton weight that is 0.

    Parameters outside path space (pinned or unused ones) move by plain gradient descent in the same step. A frozen
    parameter keeps its share of the path values, but is
    rescaled along with its units.

    Example:
        >>> import torch, pathspace as ps
        >>> from training import GSGD, init_skeleton
        >>> _ = torch.manual_seed(0)
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
        >>> x, y = torch.randn(64, 4), torch.randn(64, 1)
        >>> skeleton = ps.trace(model, x).skeleton()
        >>> init_skeleton(model, skeleton)
        >>> optimizer = GSGD(model.named_parameters(), lr=0.05, skeleton=skeleton)
        >>> losses = []
        >>> for _ in range(50):
        ...     optimizer.zero_grad()
        ...     loss = torch.nn.functional.mse_loss(model(x), y)
        ...     loss.backward()
        ...     _ = optimizer.step()
        ...     losses.append(loss.item())
        >>> losses[-1] < losses[0]
        True

    Reference:
        Path space for recurrent neural networks with ReLU activations, section 4 and Algorithm 2, in the corrected
        general form of the documentation.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        *,
        skeleton: Skeleton,
        momentum: float = 0.0,
        dampening: float = 0.0,
        nesterov: bool = False,
        weight_decay: float = 0.0,
        maximize: bool = False,
        min_ratio: float = 1e-12,
        max_multiplier: float | None = None,
    ) -> None:
        if not isinstance(skeleton, Skeleton):
            raise InputError(
                f"GSGD found skeleton of type {type(skeleton).__name__}, expected the result of graph.skeleton()."
            )
        for name, value in (("lr", lr), ("momentum", momentum)):
            if not isinstance(value, Tensor) and not value >= 0:
                raise InputError(f"GSGD found {name}={value}, expected a number of at least 0.")
        if nesterov and (momentum <= 0 or dampening != 0):
            raise InputError("GSGD found nesterov=True, which needs momentum above 0 and dampening 0.")
        if weight_decay != 0:
            raise UnsupportedError(
                f"GSGD found weight_decay={weight_decay}, expected 0: decay of weights depends on the scale of "
                "the weights, which path "
                "values do not have; regularise the loss by a function of path values instead."
            )
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening,
            "nesterov": nesterov,
            "maximize": maximize,
        }
        self.skeleton = skeleton
        self.min_ratio, self.max_multiplier = min_ratio, max_multiplier
        super().__init__(params, defaults)
        self._connect()

    def _connect(self) -> None:
        """Match the optimizer's parameters with the blocks of the graph, and prepare the index vectors."""
        graph = self.skeleton.graph
        by_identity = {
            id(parameter): i for i, block in enumerate(graph.blocks) for parameter in [graph.parameters[block.name]]
        }
        found: dict[int, tuple[Tensor, int]] = {}
        self._outside: list[tuple[Tensor, int]] = []
        for g, group in enumerate(self.param_groups):
            names = group.get("param_names") or [None] * len(group["params"])
            for name, parameter in zip(names, group["params"], strict=True):
                block = graph.index.get(name) if name is not None else by_identity.get(id(parameter))
                if block is None:
                    self._outside.append((parameter, g))
                    continue
                if tuple(parameter.shape) != graph.blocks[block].shape:
                    raise InputError(
                        f"GSGD found parameter {name!r} of shape {tuple(parameter.shape)}, expected "
                        f"{graph.blocks[block].shape} as traced; "
                        "trace the model that is being trained."
                    )
                found[block] = (parameter, g)
        missing = [block.name for i, block in enumerate(graph.blocks) if i not in found]
        if missing:
            raise InputError(
                f"GSGD found no parameter for {len(missing)} blocks of the skeleton (first: {missing[0]!r}); pass "
                "model.named_parameters() "
                "of the traced model or of a copy with the same names."
            )
        self._blocks = [found[i] for i in range(len(graph.blocks))]
        device = self._blocks[0][0].device if self._blocks else torch.device("cpu")
        self._plans = [plan(self.skeleton, i, parameter.device) for i, (parameter, _) in enumerate(self._blocks)]
        self._chain = torch.from_numpy(self.skeleton.chain).to(device)
        self._sign = torch.from_numpy(self.skeleton.chain_sign).double().to(device)
        # the learning rate of a chain is that of the group of its first unit's entering edge
        first = np.unique(self.skeleton.chain, return_index=True)[1]
        self._first = torch.from_numpy(first).to(device)
        self._chain_group = [self._blocks[b][1] if b >= 0 else 0 for b in self.skeleton.tree_in.block[first].tolist()]
        self.guards = torch.zeros(2, dtype=torch.int64, device=device)
        self.resync()

    @torch.no_grad()
    def resync(self) -> None:
        """Recompute the prefixes and suffixes from the weights; call it after changing weights by other means.

        Raises:
            UnsupportedError: a skeleton weight is 0.
        """
        tables = []
        for tree in (self.skeleton.tree_in, self.skeleton.tree_out):
            values = torch.ones(len(tree.block), dtype=torch.float64)
            for block, units in tree.by_block():
                flat = self._blocks[block][0].detach().reshape(-1)
                values[torch.from_numpy(units)] = (
                    flat[torch.from_numpy(tree.index[units]).to(flat.device)].double().cpu()
                )
            if bool((values == 0).any()):
                unit = int((values == 0).nonzero()[0])
                name = self.skeleton.graph.blocks[tree.block[unit]].name
                raise UnsupportedError(
                    f"GSGD found a skeleton weight of 0 in {name!r}, expected non-zero ones; use "
                    "rule='magnitude', or init_skeleton(model, "
                    "skeleton) first."
                )
            tables.append(values)
        device = self._chain.device
        self._prefix = self.skeleton.prefixes(tables[0]).to(device)
        self._suffix = self.skeleton.suffixes(tables[1]).to(device)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """One step; with a closure, the loss it returns."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        weights = [parameter for parameter, _ in self._blocks]
        if all(parameter.grad is None for parameter in weights):
            self._plain()
            return loss
        grads = [self._direction(parameter, group) for parameter, group in self._blocks]
        gradient = path_gradient(self._plans, weights, grads, self._chain, self._sign, len(self._first))
        through = (self._prefix * self._suffix)[self._first]
        multiplier = through.pow(-2)
        if self.max_multiplier is not None:
            multiplier = multiplier.clamp(max=self.max_multiplier)
        ratio = 1 - self._chain_rates(multiplier) * gradient * multiplier
        crossing = ratio <= 0
        small = ratio.abs() < self.min_ratio
        ratio = torch.where(small, torch.where(crossing, -self.min_ratio, self.min_ratio), ratio)
        ratio[0] = 1
        self.guards += torch.stack((crossing.sum(), small.sum()))
        per_unit = ratio[self._chain].pow(self._sign)
        steps = (self._prefix.pow(-2), self._suffix.pow(-2))
        for entry, weight, grad, (_, group) in zip(self._plans, weights, grads, self._blocks, strict=True):
            lr = self.param_groups[group]["lr"]
            if self.max_multiplier is None:
                update(entry, weight, grad, lr, steps, per_unit)
            else:
                product = scale(steps[0], entry.tail) * scale(steps[1], entry.head)
                bound = (product.clamp(max=self.max_multiplier) / product).to(weight)
                update(entry, weight, grad * bound, lr, steps, per_unit)
        self._prefix *= per_unit
        self._plain()
        return loss

    def _chain_rates(self, like: Tensor) -> Tensor | float:
        rates = [group["lr"] for group in self.param_groups]
        if len(rates) == 1:
            return rates[0]
        table = torch.stack([torch.as_tensor(rate, dtype=like.dtype, device=like.device) for rate in rates])
        return table[torch.tensor(self._chain_group, device=like.device)]

    def _direction(self, parameter: Tensor, group_index: int) -> Tensor:
        """The gradient, or its moving average, of one parameter."""
        group = self.param_groups[group_index]
        grad = parameter.grad
        if grad is None:
            return torch.zeros_like(parameter)
        if grad.is_sparse or grad.is_complex():
            raise UnsupportedError(
                "GSGD found a sparse or complex gradient, expected a dense real one; use dense embeddings."
            )
        if group["maximize"]:
            grad = -grad
        if group["momentum"] == 0:
            return grad
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = grad.clone()
        else:
            state["momentum_buffer"].mul_(group["momentum"]).add_(grad, alpha=1 - group["dampening"])
        buffer: Tensor = state["momentum_buffer"]
        return grad.add(buffer, alpha=group["momentum"]) if group["nesterov"] else buffer

    def _plain(self) -> None:
        for parameter, group in self._outside:
            if parameter.grad is not None:
                parameter.sub_(self._direction(parameter, group) * self.param_groups[group]["lr"])

    def fingerprint(self) -> str:
        """A hash of the two trees, kept with the state so that a state of another skeleton is refused."""
        digest = hashlib.sha256()
        for tree in (self.skeleton.tree_in, self.skeleton.tree_out):
            for array in (tree.block, tree.index, tree.forward, tree.parent):
                digest.update(np.ascontiguousarray(array).tobytes())
        return digest.hexdigest()

    def state_dict(self) -> dict[str, Any]:
        """State of the optimizer, with the prefixes, suffixes, guard counts and the skeleton's fingerprint."""
        state = super().state_dict()
        state["path_space"] = {
            "prefix": self._prefix.clone(),
            "suffix": self._suffix.clone(),
            "guards": self.guards.clone(),
            "fingerprint": self.fingerprint(),
        }
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state made with the same skeleton.

        Raises:
            InputError: the state belongs to another optimizer or another skeleton.
        """
        extra = state_dict.get("path_space")
        if extra is None or extra["fingerprint"] != self.fingerprint():
            raise InputError(
                "GSGD found a state dict of another optimizer or skeleton, expected one saved with these two "
                "trees; rebuild the skeleton "
                "with the rule and seed it was trained with."
            )
        super().load_state_dict({key: value for key, value in state_dict.items() if key != "path_space"})
        device = self._chain.device
        self._prefix, self._suffix = (extra[key].to(device).clone() for key in ("prefix", "suffix"))
        self.guards = extra["guards"].to(device).clone()
