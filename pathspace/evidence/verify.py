"""Trace a model, prove the dimension of its path space, and test the
statements on the running model.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import SEED, InputError, expect_arguments, expect_numbers
from ..models.finite import check_finite
from ..models.inputs import arranged, check_inputs, ordinary
from ..models.isolation import untouched
from ..models.nested import leaves
from ..models.refusals import check_capturable, check_runs
from ..models.running import cast
from ..models.values import has_values, with_numbers
from ..paths.basis import BasisPaths
from ..reduction import ReductionGraph, trace
from ..rotations.space import FeatureSpaces
from .bench import Workbench, bench_copy
from .certificate import Certificate
from .explain import account
from .invariance import measure_invariance, measure_spaces
from .proof import space_lines
from .theorems import enumerable, small_matrix, theorem1, theorem2, theorem3, tree_problem
from .upper_bound import upper_bound as bound_from_above


def verify(
    model: nn.Module,
    *args: Any,
    kwargs: Mapping[str, Any] | None = None,
    norm_eps: str = "ignore",
    rule: str = "modulo",
    seed: int = 0,
    strict: bool = False,
    upper_bound: bool = False,
    graph: ReductionGraph | None = None,
    spaces: FeatureSpaces | None = None,
) -> Certificate:
    """Verify Theorems 1 to 3 and the rescaling invariance on a model.

    Args:
        model: any module; it is verified in its current mode, on a copy in float64 (above 30
            million weights on the model itself, in its own precision, and restored exactly).
            Without values (meta device, fake mode) only the structural part is verified:
            ``theorem2["holds"]`` and ``invariance["holds"]`` are ``None``.
        *args: example inputs.
        kwargs: example inputs by keyword.
        norm_eps: see :func:`pathspace.trace`.
        rule: rule of the skeleton, see :func:`pathspace.paths.skeleton.choose`.
        seed: seed of the random skeleton and of the random rescaling.
        strict: see :func:`pathspace.trace`.
        upper_bound: also compute an upper bound on the number of scale symmetries, by a
            randomised null-space test (:mod:`pathspace.evidence.upper_bound`); it takes about one
            backward pass for every row and column.
        graph: the model's reduction graph, if it has been traced on these inputs already. By
            default the model is traced here, for inputs of exactly these sizes. With a graph,
            ``norm_eps`` and ``strict`` are ignored.
        spaces: the model's spaces of features, from :func:`pathspace.spaces`: also list them, and
            let a random element of the group of each act on copies. It takes up to two runs for
            each space, and the memory of one more copy.

    Returns:
        The certificate; it prints as a table, and ``to_json()`` has all evidence.

    Raises:
        InputError: weights or inputs are NaN or infinite, or the graph or the spaces belong to
            another model.
        CaptureError: the model fails on these inputs or cannot be captured.

    Example:
        >>> import torch, pathspace as ps
        >>> model = torch.nn.Sequential(
        ...     torch.nn.Linear(2, 3), torch.nn.ReLU(), torch.nn.Linear(3, 1)
        ... )
        >>> certificate = ps.verify(model, torch.randn(4, 2))
        >>> certificate.holds, certificate.rank, certificate.method
        (True, 10, 'exact')

    Reference:
        Theorems 1, 2 and 3 of Path space for recurrent neural networks with ReLU activations.
    """
    start = time.perf_counter()
    expect_arguments("verify", model=model)
    expect_arguments("verify", or_none=True, graph=graph, spaces=spaces)
    expect_numbers("verify", SEED, seed=seed)
    args, kwargs = arranged(model, args, kwargs)
    check_capturable(model)
    check_inputs(model, args, kwargs)
    with untouched(model), torch.inference_mode(False), with_numbers():
        held = (*model.parameters(), *model.buffers(), *leaves((args, kwargs)))
        shapes = any(isinstance(tensor, Tensor) and not has_values(tensor) for tensor in held)
        if not shapes:
            check_finite(model, (args, kwargs))
        args, kwargs = ordinary((args, kwargs))
        # the theorems are statements about the network at these sizes
        if graph is None:
            graph = trace(
                model, *args, kwargs=kwargs, norm_eps=norm_eps, strict=strict, sizes="given"
            )
        else:
            _check_own(graph, model)
            if not shapes:
                check_runs(model, args, kwargs)
        if spaces is not None:
            spaces.expect_own("verify", graph.parameters)
        skeleton = graph.skeleton(rule=rule, seed=seed)
        basis = skeleton.basis()
        problem = tree_problem(graph, skeleton.tree_in) or tree_problem(graph, skeleton.tree_out)
        if shapes:
            found = _unmeasured(graph, spaces)
        else:
            copy, dtype = bench_copy(model, graph, (args, kwargs))
            bench = Workbench(graph, copy, cast((args, kwargs), dtype), seed)
            found = _measured(bench, basis, upper_bound, spaces)
        matrix = small_matrix(basis)
        first, vectors = theorem1(basis, enumerable(graph), matrix, problem)
        third, rank = theorem3(basis, matrix, vectors, first["exhaustive"], problem)
        totals = account(graph).totals
    return Certificate(
        model=type(model).__name__,
        weights=graph.num_weights,
        units=graph.num_units,
        dimension=graph.dimension,
        basis_paths=len(basis),
        rank=rank,
        method="certificate" if rank is None else "exact",
        theorem1=first,
        theorem3=third,
        parameters={"total": sum(totals.values()), **totals},
        units_exact=graph.num_exact_units,
        dimension_exact=graph.exact_dimension,
        approximate_units=graph.num_units - graph.num_exact_units,
        pinned=[asdict(pin) for pin in graph.pinned],
        unused=list(graph.unused),
        range=graph.range,
        skeleton={"rule": rule, "seed": seed},
        seconds=round(time.perf_counter() - start, 3),
        **found,
    )


def _check_own(graph: ReductionGraph, model: nn.Module) -> None:
    """Refuse the graph of another model."""
    held = dict(model.named_parameters(remove_duplicate=False))
    if any(held.get(name) is not parameter for name, parameter in graph.parameters.items()):
        raise InputError(
            f"verify found a graph that does not belong to this {type(model).__name__}, expected"
            " the graph that ps.trace returned for it; trace the model again."
        )


def _unmeasured(graph: ReductionGraph, spaces: FeatureSpaces | None) -> dict[str, Any]:
    """What the certificate says of a model without values."""
    words = "tensors of the model or of its inputs have no values, so nothing was run"
    none = {"holds": None, "evidence": words}
    levels = {
        name: {"units": units, "dimension": graph.num_weights - units, "changes": []}
        for name, units in (("exact", graph.num_exact_units), ("all", graph.num_units))
    }
    unseen = {"max_relative_violation": None, "tolerance": None}
    return {
        "invariance": none | unseen,
        "levels": levels | {"holds": None, "tolerance": None},
        "theorem2": none | {"rebuilt": False},
        "spaces": {} if spaces is None else none | {"tolerance": None} | space_lines(spaces),
    }


def _measured(
    bench: Workbench, basis: BasisPaths, upper_bound: bool, spaces: FeatureSpaces | None
) -> dict[str, Any]:
    """Rescale, rebuild and redraw a copy, and compare its outputs."""
    invariance, levels, switches = measure_invariance(bench)
    found: dict[str, Any] = {
        "invariance": invariance,
        "levels": levels,
        "theorem2": theorem2(basis, bench, (invariance, switches)),
    }
    if spaces is not None:
        found["spaces"] = measure_spaces(bench, spaces)
    if upper_bound:
        bound = bound_from_above(bench)
        found |= {"upper_bound": bound.to_dict(), "units_at_most": bound.at_most}
    return found
