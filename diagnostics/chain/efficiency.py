"""The cosine between each node's direction and descent, per sample, measured
during the backward pass.

For node l and one sample, with ``g_l = dLoss/dx_l`` and ``v^ = v / ||v||``, the cosine is ``c_l =
<z^_l, -g^_l>`` and the efficiency of the chain is ``eps' = (1/L) sum_l c_l``. Both are the same
for a sum or mean loss, a scaled loss, and any split of the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from pathspace.errors import AT_LEAST_1, InputError, UnsupportedError, expect_numbers
from pathspace.shown import Shown

from ..shared.losses import reduction
from ..shared.model_calls import call, differentiating, lost
from ..shared.unchanged import unchanged
from .addition_hooks import Addition
from .nodes import Nodes
from .observer import MEASURES, NodeTensors, ObservedPass, Observer
from .penalty_disabled import penalty_disabled


@dataclass(frozen=True)
class ChainRecord(Shown):
    """A chain measured on B samples, node by node; every tensor is float64 on the CPU.

    Attributes:
        names: names of the L nodes.
        cosines: ``c_l``, shape (L, B); NaN where the direction or the gradient is
            zero, or no gradient arrived.
        direction_norms: ``||z_l||``, shape (L, B).
        stream_norms: ``||x_{l-1}||``, shape (L, B).
        gradient_norms: ``||g_l||`` of the loss itself, without scaling, shape (L, B).
        products: ``<z_l, g_l>``, shape (L, B).
        gauge: ``s_l = dLoss/dlog(scale of branch l)`` from parameter gradients only, shape (L,);
            NaN if the branch has no last layer of its own, or inside a training loop.
        reduction: whether the loss is a ``"mean"`` or a ``"sum"`` over samples.

    Example:
        >>> from torch import nn
        >>> from pathspace.diagnostics import MarkovChain
        >>> class Block(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.branch = nn.Linear(3, 3)
        ...
        ...     def forward(self, x):
        ...         return x + self.branch(x)
        >>> model, x = nn.Sequential(Block(), Block()), torch.randn(5, 3)
        >>> chain = MarkovChain.trace(model, x)
        >>> record = chain.observe(nn.functional.mse_loss, x, torch.zeros(5, 3))
        >>> record.cosines.shape, bool((record.cosines.abs() <= 1).all())
        (torch.Size([2, 5]), True)
    """

    names: tuple[str, ...]
    cosines: Tensor
    direction_norms: Tensor
    stream_norms: Tensor
    gradient_norms: Tensor
    products: Tensor
    gauge: Tensor
    reduction: str = "sum"

    @property
    def samples(self) -> int:
        """Number of samples B."""
        return int(self.cosines.shape[1])

    @property
    def efficiency(self) -> Tensor:
        """``eps'`` of every sample: the mean of its cosines over nodes, shape (B,)."""
        return self.cosines.nanmean(0)

    @property
    def mean_efficiency(self) -> float:
        """Mean of ``eps'`` over samples."""
        return float(self.efficiency.nanmean())

    @property
    def convex_share(self) -> float:
        """Share of samples with a positive cosine at every node, which is
        delta-convexity for large eta.
        """
        return float((self.cosines > 0).all(0).double().mean())

    @property
    def norms(self) -> Tensor:
        """``||z_l|| / ||x_{l-1}||``, shape (L, B)."""
        return self.direction_norms / self.stream_norms

    def quantiles(self, q: Sequence[float] = (0.05, 0.25, 0.5, 0.75, 0.95)) -> Tensor:
        """Quantiles of the cosines over samples, shape (len(q), L)."""
        return self.cosines.nanquantile(torch.tensor(tuple(q), dtype=torch.float64), dim=1)

    def efficiency_quantiles(self, q: Sequence[float] = (0.05, 0.25, 0.5, 0.75, 0.95)) -> Tensor:
        """Quantiles of ``eps'`` over samples, shape (len(q),)."""
        return self.efficiency.nanquantile(torch.tensor(tuple(q), dtype=torch.float64))

    def eps(self, eta: float) -> Tensor:
        """``eps(eta) = (1/L) sum_l cos(z_l, z_l - eta g^_l)`` per sample, shape (B,).

        It is ``1 - O(eta^2)`` for every chain, so it is informative only for large eta,
        where it tends to ``eps'``.
        """
        norm, cosine = self.direction_norms, self.cosines
        length = (norm**2 + 2 * eta * cosine * norm + eta**2).sqrt()
        return ((norm + eta * cosine) / length).nanmean(0)

    def delta(self, eta: float) -> Tensor:
        """``delta*``: the chain of a sample is delta-convex iff ``delta < delta*``; shape (B,).

        ``delta* = min_l (1 + rho c) / (1 + 2 rho c + rho^2)``, ``rho = eta / ||z_l||``. For
        eta below every ``||z_l||`` it is positive for every chain, so it is not informative;
        see :attr:`convex_share`.
        """
        rho, cosine = eta / self.direction_norms, self.cosines
        return (
            ((1 + rho * cosine) / (1 + 2 * rho * cosine + rho**2)).nan_to_num(nan=torch.inf).amin(0)
        )

    def penal_ratio(self, tau: float) -> Tensor:
        """``||tau Z_l|| / ||G_l||`` over the batch, shape (L,): relative
        strength of a penal connection.
        """
        result: Tensor = tau * self.direction_norms.norm(dim=1) / self.gradient_norms.norm(dim=1)
        return result

    @classmethod
    def merge(cls, records: Iterable[ChainRecord], reduction: str | None = None) -> ChainRecord:
        """Join the samples of several records, for instance of micro-batches, to
        the record of one batch.

        With a mean loss a batch of ``B_i`` of ``B`` samples has weight ``B_i / B``; with a sum
        each batch has weight 1.

        Args:
            records: records of one chain.
            reduction: ``"mean"`` or ``"sum"``; by default that of the records.

        Raises:
            InputError: there are no records, or they have different reductions and none is given.
        """
        parts = list(records)
        if not parts:
            raise InputError("There are no records to merge: observe at least one batch.")
        kinds = {part.reduction for part in parts} if reduction is None else {reduction}
        if len(kinds) > 1 or not kinds <= {"mean", "sum"}:
            raise InputError(
                f"The records have the reductions {sorted(kinds)}; pass reduction='mean' or"
                " reduction='sum'."
            )
        kind = kinds.pop()
        total = sum(part.samples for part in parts)
        shares = [part.samples / total if kind == "mean" else 1.0 for part in parts]

        joined: dict[str, Any] = {}
        for name in MEASURES:
            factors = shares if name in ("gradient_norms", "products") else [1.0] * len(parts)
            joined[name] = torch.cat(
                [getattr(p, name) * factor for p, factor in zip(parts, factors, strict=True)], 1
            )
        gauge = torch.stack(
            [part.gauge * share for part, share in zip(parts, shares, strict=True)]
        ).sum(0)
        return replace(parts[0], **joined, gauge=gauge, reduction=kind)

    def to_dict(self) -> dict[str, Any]:
        """Summary as plain values, as ``pathspace diagnose --json`` writes it."""
        low, middle, high = self.quantiles((0.05, 0.5, 0.95))
        columns = {
            "cosine_mean": self.cosines.nanmean(1),
            "cosine_q05": low,
            "cosine_median": middle,
            "cosine_q95": high,
            "direction_over_stream": self.norms.nanmean(1),
            "gauge": torch.where(self.gauge.isnan(), self.products.sum(1), self.gauge),
        }
        rows = zip(*(column.tolist() for column in columns.values()), strict=True)
        nodes = [
            {"name": name, **dict(zip(columns, row, strict=True))}
            for name, row in zip(self.names, rows, strict=True)
        ]
        return {
            "samples": self.samples,
            "efficiency": self.mean_efficiency,
            "efficiency_quantiles": self.efficiency_quantiles().tolist(),
            "share_all_cosines_positive": self.convex_share,
            "nodes": nodes,
        }


def as_record(
    observer: Observer, current: ObservedPass, gauge: Tensor | None = None, reduction: str = "sum"
) -> ChainRecord:
    """The numbers of one pass as a record.

    Args:
        observer: which measured them.
        current: the pass.
        gauge: ``s_l``, shape (L,); NaN by default.
        reduction: of the loss.
    """
    nodes = observer.chain.nodes
    absent = torch.full((len(nodes),), torch.nan, dtype=torch.float64)
    return ChainRecord(
        names=tuple(node.name for node in nodes),
        **observer.measured(current),
        gauge=absent if gauge is None else gauge,
        reduction=reduction,
    )


def gauge(chain: Nodes, gradients: dict[str, Tensor] | None = None) -> Tensor:
    """``s_l = sum_b <z_b, g_b> = <W, dW> + <b, db>`` of the branch's last layer:
    no activation is needed.

    ``s_l = dLoss/dlog(scale of branch l)``: negative where a larger branch would lower the loss;
    0 at a stationary point.

    Args:
        chain: the traced chain.
        gradients: gradients by parameter name; by default the ``.grad`` of the model's parameters.

    Returns:
        ``s_l``, shape (L,), float64; NaN for nodes without their own last
        layer, or without gradients.

    Example:
        >>> from torch import nn
        >>> from pathspace.diagnostics import MarkovChain
        >>> class Block(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.branch = nn.Linear(3, 3)
        ...
        ...     def forward(self, x):
        ...         return x + self.branch(x)
        >>> model, x = Block(), torch.randn(5, 3)
        >>> model(x).square().sum().backward()
        >>> gauge(MarkovChain.trace(model, x)).shape
        torch.Size([1])
    """
    parameters = dict(chain.model.named_parameters(remove_duplicate=False))
    if gradients is None:
        gradients = {name: p.grad for name, p in parameters.items() if p.grad is not None}
    values = torch.full((len(chain.nodes),), torch.nan, dtype=torch.float64)
    known = [
        node
        for node in chain.nodes
        if node.readout and all(name in gradients for name in node.readout)
    ]
    if not known:
        return values
    products = [
        torch.stack(
            [(parameters[n].detach().double() * gradients[n].double()).sum() for n in node.readout]
        ).sum()
        for node in known
    ]
    device = gradients[known[0].readout[0]].device
    found = torch.stack([product.to(device) for product in products]).cpu()
    return values.index_copy(0, torch.tensor([node.index for node in known]), found)


def _backward(
    chain: Nodes,
    observer: Observer,
    loss_fn: Callable[[Any, Any], Tensor],
    inputs: Any,
    targets: Any,
) -> tuple[dict[str, Tensor], str]:
    """Gradients of the loss without a penalty, and its reduction; the model is not changed."""
    named = {name: p for name, p in chain.model.named_parameters() if p.requires_grad}
    if not named:
        raise InputError(
            f"Every parameter of {type(chain.model).__name__} is frozen, so no gradient reaches a"
            " node; set requires_grad on at least the first layer."
        )
    following = observer.sites.following(chain.model)
    with unchanged(chain.model), penalty_disabled(chain.model), following, torch.enable_grad():
        outputs = call(chain.model, inputs)
        loss = lost(loss_fn, outputs, targets)
        if not isinstance(loss, Tensor) or not loss.requires_grad:
            raise InputError(
                f"The loss function returned {type(loss).__name__} without a gradient; return a"
                " tensor computed from the model's outputs."
            )
        with differentiating(chain.model):
            gradients = torch.autograd.grad(loss.sum(), list(named.values()), allow_unused=True)
    kind = reduction(loss_fn, outputs, targets, loss.detach(), observer.batch_dim)
    return {
        name: value for name, value in zip(named, gradients, strict=True) if value is not None
    }, kind


def observe(
    chain: Nodes,
    loss_fn: Callable[[Any, Any], Tensor],
    inputs: Any,
    targets: Any,
    *,
    batch_dim: int = 0,
) -> ChainRecord:
    """Measure a chain on a batch by one forward and one backward pass, without
    changing the model or ``.grad``.

    The gradients are those of the loss alone, even if the model is penalised.

    Args:
        chain: the traced chain.
        loss_fn: ``loss_fn(outputs, targets)``; a vector of losses is summed.
        inputs: a tensor, a tuple of positional inputs, or a dict of keyword inputs.
        targets: passed to ``loss_fn``.
        batch_dim: the dimension of the samples in the inputs; 1 for inputs of shape (T, B, ...).

    Returns:
        The record.

    Raises:
        InputError: the chain has no nodes, every parameter is frozen, or the loss has no gradient.
        UnsupportedError: no gradient reaches any node, or the model's
            additions differ from the trace.

    Example:
        >>> from torch import nn
        >>> from pathspace.diagnostics import MarkovChain
        >>> layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, norm_first=True)
        >>> x = torch.randn(4, 5, 8)
        >>> record = observe(
        ...     MarkovChain.trace(layer, x), nn.functional.mse_loss, x, torch.zeros_like(x)
        ... )
        >>> record.names, record.samples
        (('self_attn', 'linear2'), 4)

    Reference:
        Learnable Markov chain paper, Definitions 3 and 4, with the cosine of equation (10).
    """
    passes: list[ObservedPass] = []
    observer = Observer(chain, passes.append, batch_dim=batch_dim)
    gradients, kind = _backward(chain, observer, loss_fn, inputs, targets)
    observer.finish()
    if not passes:
        raise UnsupportedError(
            f"No gradient reached any of the {len(chain)} nodes of {type(chain.model).__name__};"
            " compute the loss from the outputs of this model."
        )
    return as_record(observer, passes[-1], gauge(chain, gradients), kind)


def tensors(
    chain: Nodes, loss_fn: Callable[[Any, Any], Tensor], inputs: Any, targets: Any
) -> tuple[NodeTensors, ...]:
    """Directions, streams and gradients as tensors, one entry per node,
    for small models and tests.
    """
    passes: list[ObservedPass] = []
    observer = Observer(chain, passes.append, keep=True)
    _backward(chain, observer, loss_fn, inputs, targets)
    observer.finish()
    if not passes or len(passes[-1].tensors) != len(chain):
        raise UnsupportedError(
            "Some node received no gradient, so its tensors are not defined; unfreeze the model's"
            " first layers."
        )
    return tuple(passes[-1].tensors[node.index] for node in chain.nodes)


class Watch:
    """Measures every step of a training loop; its hooks are removed at the end of the
    ``with`` block in any case.

    It measures the gradients that the loop computes: for a penalised model, those of loss and
    penalty. Steps of a model that ``torch.compile`` compiled are not measured.

    Args:
        chain: the traced chain; the loop may train ``chain.model`` directly or wrapped (data
            parallel, autocast, checkpointing).
        every: number of forward passes per measurement.
        batch_dim: the dimension of the samples in the inputs; 1 for inputs of shape (T, B, ...).

    Example:
        >>> from torch import nn
        >>> from pathspace.diagnostics import MarkovChain
        >>> layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, norm_first=True)
        >>> x = torch.randn(4, 5, 8)
        >>> with MarkovChain.trace(layer, x).watch() as watch:
        ...     for _ in range(3):
        ...         layer(x).square().mean().backward()
        >>> len(watch.records)
        3
    """

    def __init__(self, chain: Nodes, every: int = 1, batch_dim: int = 0) -> None:
        expect_numbers("watch", AT_LEAST_1, every=every)
        self.records: list[ChainRecord] = []
        self._observer = Observer(
            chain,
            lambda done: self.records.append(as_record(self._observer, done)),
            batch_dim=batch_dim,
        )
        self._chain, self._every, self._count = chain, every, 0
        sites = self._observer.sites
        self._meet, sites.handler, sites.start = sites.handler, self._pick, self._begin

    def _begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._count += 1
        self._observer.begin(args, kwargs)

    def _pick(self, addition: Addition) -> Tensor:
        return addition.run() if (self._count - 1) % self._every else self._meet(addition)

    def __enter__(self) -> Watch:
        self._observer.sites.attach(self._chain.model)
        return self

    def __exit__(self, *_: object) -> None:
        self._observer.sites.detach()
        self._observer.finish()


__all__ = ["ChainRecord", "Watch", "as_record", "gauge", "observe", "tensors"]
