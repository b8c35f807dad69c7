"""Path norms and statistics of path values, in logarithms: finite where the values
themselves leave the floats.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from scipy.special import logsumexp
from torch import Tensor, fx, nn

from ..capture.capture import capture
from ..capture.captured import Captured
from ..errors import InputError, UnsupportedError, expect_arguments, expect_numbers
from ..gauge.pairs import at
from ..graph.structure import Structure
from ..models.finite import expect_finite
from ..shown import Shown
from .basis import BasisPaths
from .path_facts import Request
from .path_forward import ends_of_paths
from .path_sums import Sum, added, is_float
from .two_trees import TwoTrees


def path_norm(
    model: Structure | nn.Module,
    *inputs: Any,
    kwargs: Mapping[str, Any] | None = None,
    p: float = 1,
    log: bool = False,
    batch_dim: int | None = 0,
    until: str | None = None,
    bound: bool = False,
) -> float:
    """``(sum over paths |v_path|^p)^(1/p)``, by one forward pass of the
    network with weights ``|w|^p``.

    Paths are those of the network unrolled on the example input, from every input element and
    bias to every output element; coefficients of means and frozen normalisations count as
    weights, and a maximum as a sum. A normalisation by the numbers themselves starts paths again,
    as in :meth:`ReductionGraph.paths`. Every branch has paths of its own: those of ``x - relu(x)``
    are the paths of ``x`` twice. Whole numbers in the example input are positions (the rows that
    they read are on paths, and any row where activations choose); as numbers or masks they count as
    1, as other inputs do. What a model computes from its own tensors alone (a weight norm, a
    product of two matrices) counts as one weight. Sums are kept with a common logarithm, so that
    depth neither overflows nor vanishes.

    An operation that fixes a scale (a sigmoid, ReLU6, a softmax, a quotient), or computes with
    complex numbers, ends the paths that lead to it, so that the network behind it has no path norm,
    and is refused. There are three ways to get a number:

    * ``until="name of a module"`` takes the norm of the part before: paths end in the outputs of
      that module, or in what enters it where it holds such an operation itself. The name of a node
      of the captured graph does the same. The part counts as a separate network: the number depends
      on the scales of the units at its end.
    * ``until="fixed"`` lets paths end wherever a scale is fixed, and start again behind with
      the value 1, as those of :meth:`ReductionGraph.paths` do. Roots and quotients of
      activations, which no path passes, are taken of the sums, so that the number does not
      depend on the scales of units.
    * ``bound=True`` passes functions of one operand with a largest slope by that slope: with
      ``p=1`` the outputs of one sample change by at most ``sum_o |f_o(x) - f_o(y)| <= norm * max_i
      |x_i - y_i|``, whatever x and y are. Products of activations, comparisons, normalisations by
      the numbers themselves and random numbers have no such slope, and are refused.

    Args:
        model: a traced reduction graph (its current weights are read), or a model.
        *inputs: example inputs of a model; of a graph ``p``, ``log`` and ``batch_dim``.
        kwargs: keyword example inputs of a model.
        p: the exponent, positive.
        log: return the natural logarithm of the norm.
        batch_dim: the dimension of the first output that counts samples, which are all alike, or
            ``None``.
        until: where paths end (the outputs).
        bound: pass functions by their slopes.

    Returns:
        The norm, or its logarithm (``-inf`` where every path vanishes).

    Raises:
        InputError: ``p`` is not positive, or so large that powers of weights leave the floats;
            ``until`` names nothing; the outputs have no ``batch_dim``; a parameter is not
            finite; the norm exceeds the largest float and ``log`` was not asked for.
        UnsupportedError: an operation is not positively homogeneous, so that path values
            have no meaning behind it.

    Example:
        >>> import torch, pathspace as ps
        >>> from torch.nn import Linear, ReLU, Sequential, Sigmoid
        >>> model, x = Sequential(Linear(2, 2, bias=False), ReLU(), Linear(2, 1)), torch.randn(1, 2)
        >>> for parameter in model.parameters():
        ...     _ = torch.nn.init.constant_(parameter, -2.0)
        >>> round(path_norm(ps.trace(model, x)), 9)  # four paths of value 4, and a bias of 2
        18.0
        >>> gated = Sequential(model, Sigmoid())
        >>> round(path_norm(gated, x, until="0"), 9)
        18.0
        >>> round(path_norm(gated, x, bound=True), 9)  # the slope of a sigmoid is at most 1/4
        4.5

    Reference:
        Neyshabur, Tomioka, Srebro: Norm-based capacity control in neural networks (2015).
    """
    if isinstance(model, Structure):
        if len(inputs) > 3 or kwargs:
            raise InputError(
                f"path_norm found {len(inputs) + len(kwargs or {})} further arguments after a"
                " graph, expected at most p, log and batch_dim, in this order; a graph needs no"
                " example inputs."
            )
        given = dict(enumerate(inputs))
        p, log, batch_dim = given.get(0, p), given.get(1, log), given.get(2, batch_dim)
        captured, exact_norms = model.captured, model.norm_eps == "respect"
    else:
        captured, exact_norms = capture(model, inputs, kwargs), False
    expect_numbers("path_norm", "a positive number", p=p)
    fixed = until == "fixed"
    if bound and fixed:
        raise InputError(
            "path_norm found bound=True with until='fixed', expected one of them: paths that start"
            " again bound nothing; leave out until, or name a module."
        )
    samples = _samples(captured, batch_dim)
    inside = set() if until is None or fixed else _inside(captured, until)
    # results of that part that the rest of the graph reads
    exits = {node for node in inside if any(user not in inside for user in node.users)}
    with torch.no_grad():
        request = Request(captured, p, bound, fixed, exact_norms, inside=inside, exits=exits)
        logs = [end.total - math.log(samples) for end in ends_of_paths(request)]
    result = float(np.logaddexp.reduce(logs)) / p if logs else -math.inf
    if log:
        return result
    if result > math.log(np.finfo(float).max):
        raise InputError(
            f"The path norm is about 10^{result / math.log(10):.0f}, above the largest float; use"
            " log=True to get its logarithm."
        )
    return math.exp(result) if result > -math.inf else 0.0


def _samples(captured: Captured, batch_dim: int | None) -> int:
    expect_numbers("path_norm", "a whole number", or_none=True, batch_dim=batch_dim)
    shown: list[Any] = [node.meta.get("val") for node in captured.outputs()]
    shape = next((tuple(each.shape) for each in shown if is_float(each) and each.dim()), ())
    if batch_dim is None or not shape:
        return 1
    inside = -len(shape) <= batch_dim < len(shape)
    count: Any = shape[batch_dim] if inside else None
    if not isinstance(count, int):
        raise InputError(
            f"path_norm found batch_dim={batch_dim}, expected the dimension that counts samples, of"
            f" a size that does not depend on data, in an output of {len(shape)} dimensions; use"
            " batch_dim=None if there is none."
        )
    return max(count, 1)


def _inside(captured: Captured, until: str) -> set[fx.Node]:
    calls = [node for node in captured.graph.graph.nodes if node.op == "call_function"]
    modules = {
        node: [entry[0] for entry in (node.meta.get("nn_module_stack") or {}).values()]
        for node in calls
    }
    inside = f"{until}."
    within = {node for node in calls if any(f"{m}.".startswith(inside) for m in modules[node])}
    within = within or {node for node in calls if node.name == until}
    if not within:
        names = sorted({name for found in modules.values() for name in found if name})
        shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
        raise InputError(
            f"path_norm found until={until!r}, expected 'fixed', the name of a node, or of a module"
            f" that the model calls ({shown or 'it has none'})."
        )
    return within


def path_sensitivity(
    graph: Structure, parameters: Mapping[str, Tensor] | None = None
) -> dict[str, Tensor]:
    """``g_e = sum over paths through e of (product of their other weights)^2``, over its
    largest entry, by name: the derivative of ``sum over paths v^2`` by ``w_e^2``.

    Raises:
        UnsupportedError: see :func:`path_norm`; also weights that are computed from others so
            that their paths cannot be told apart.
    """
    held = graph.parameters if parameters is None else parameters
    # (a weight of 0 has a derivative by its square all the same)
    own = {}
    for block in graph.blocks:
        expect_finite("path_sensitivity", block.name, held[block.name])
        value = held[block.name].detach().cpu().double()
        own[block.name] = torch.where(value == 0, 1e-100, value).requires_grad_()
    spliced: Any = {**graph.captured.parameters, **own}
    captured, exact = replace(graph.captured, parameters=spliced), graph.norm_eps == "respect"
    with torch.enable_grad():
        ends = ends_of_paths(Request(captured, 2.0, exact_norms=exact, apart=True))
        if not ends:
            raise UnsupportedError(
                "path_sensitivity found no real numbers among the outputs, expected some: paths"
                " end there; trace the model up to what it compares or chooses."
            )
        total = added(*(Sum(end.values.sum(), end.log) for end in ends)).values
        # (weights on no path have the derivative 0)
        total = total + sum(0.0 * value.sum() for value in own.values())
        found = torch.autograd.grad(total, list(own.values())) if own else ()
    slopes = {
        name: slope / (2 * value.detach())
        for (name, value), slope in zip(own.items(), found, strict=True)
    }
    bad = next((name for name, slope in slopes.items() if bool((slope < 0).any())), None)
    if bad is not None:
        raise UnsupportedError(
            f"path_sensitivity found weights that are computed from {bad!r} and others (a quotient,"
            " a sum), expected weights as they are: paths through such weights cannot be told"
            " apart; take the parametrisation off, or calibrate with data."
        )
    most = max((float(slope.max()) for slope in slopes.values() if slope.numel()), default=0.0)
    return {name: slope / most if most > 0 else slope for name, slope in slopes.items()}


@dataclass(frozen=True)
class PathStatistics(Shown):
    """Statistics of the absolute values of the basis paths, as natural logarithms.

    Attributes:
        count: number of basis paths.
        zeros: how many have the value 0; they are left out of the figures below.
        log_norm: logarithm of the basis-path norm ``(sum |v|^p)^(1/p)``.
        mean, std: of ``log |v|``.
        smallest, median, largest: of ``log |v|``.
        p: the exponent of the norm.
    """

    count: int
    zeros: int
    log_norm: float
    mean: float
    std: float
    smallest: float
    median: float
    largest: float
    p: float


def path_statistics(skeleton: TwoTrees, p: float = 1) -> PathStatistics:
    """Statistics of the values of all basis paths, ``log |v_P(e)| = log |pre(tail)| + log
    |w_e| + log |suf(head)|``.

    Args:
        skeleton: the two trees.
        p: exponent of the basis-path norm, positive.

    Returns:
        The statistics.

    Raises:
        InputError: a skeleton weight is zero, a weight is not finite, or ``p`` is not positive.

    Example:
        >>> import torch, pathspace as ps
        >>> from torch.nn import Linear, ReLU, Sequential
        >>> model = Sequential(Linear(2, 2, bias=False), ReLU(), Linear(2, 1))
        >>> for parameter in model.parameters():
        ...     _ = torch.nn.init.constant_(parameter, -2.0)
        >>> statistics = path_statistics(ps.trace(model, torch.randn(1, 2)).skeleton())
        >>> statistics.count, round(statistics.log_norm, 6) == round(math.log(18), 6)
        (5, True)

    Reference:
        Zheng et al.: Capacity control of ReLU neural networks by basis-path norm (2019).
    """
    expect_arguments("path_statistics", skeleton=skeleton)
    expect_numbers("path_statistics", "a positive number", p=p)
    graph = skeleton.graph
    for block in graph.blocks:
        expect_finite("path_statistics", block.name, graph.parameters[block.name])
    logs = np.concatenate([weights + scales for weights, scales in log_factors(skeleton)])
    kept = logs[np.isfinite(logs)]
    shown = kept if len(kept) else np.array([-math.inf])
    return PathStatistics(
        count=len(logs),
        zeros=len(logs) - len(kept),
        log_norm=float(logsumexp(p * shown)) / p,
        mean=float(shown.mean()),
        std=float(kept.std()) if len(kept) else 0.0,
        smallest=float(shown.min()),
        median=float(np.median(shown)),
        largest=float(shown.max()),
        p=p,
    )


def log_factors(skeleton: TwoTrees, zeros: bool = False) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """The two factors of every basis path value, ``log |w_e|`` and ``log |pre(tail) suf(head)|``,
    first of the ``p_k`` of all chains, then of the edges in neither tree, tensor by tensor.

    Minus twice the second is the factor by which a step on path values multiplies the learning
    rate of ``w_e``. With ``zeros``, logarithms can be ``-inf``, ``inf`` or NaN.
    """
    graph = skeleton.graph
    logs = skeleton.log_prefixes(zeros), skeleton.log_suffixes(zeros)
    prefix, suffix = map(torch.from_numpy, logs)
    first, basis = skeleton.representatives, BasisPaths(skeleton)
    yield np.zeros(len(first)), (prefix + suffix)[first].numpy()
    for i, block in enumerate(graph.blocks):
        weight = block.values(graph.parameters[block.name].double()).cpu().abs().log()
        scale = (at(prefix, block.tail) + at(suffix, block.head)).expand(block.shape)
        free = basis.in_no_tree(i)
        yield weight.reshape(-1)[free].numpy(), scale.reshape(-1)[free].numpy()
