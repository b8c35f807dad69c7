"""Tests of the symmetry for other weights and inputs, because zeros in a
model can hide a wrong graph.

Biases and running means of batch norms start at 0, which no factor changes. Therefore all
parameters and running statistics are redrawn several times, inputs are multiplied by 100 and by
0.01, and scalars that count as unused are redrawn: the outputs must not change.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..models.modes import precision, without_eps
from ..models.nested import mapped
from ..models.restored_globals import values_kept
from ..models.running import LARGE, ForwardRun, difference, run_forward, seen
from ..reduction import ReductionGraph
from .invariance import powers_for, rescaled_weights

# factors of the inputs, one trial each
SIZES = (1.0, 100.0, 0.01)


def trials(
    graph: ReductionGraph,
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    seed: int,
) -> dict[str, Any]:
    """Rescale redrawn models at inputs of several magnitudes, and redraw
    scalars that count as unused.

    Args:
        graph: the reduction graph.
        model: a copy of the model, unchanged at the end; models too large to copy are not tested.
        args: inputs.
        kwargs: inputs by keyword.
        seed: seed of all draws.

    Returns:
        ``rescaling`` and ``unused``, the largest relative changes of the outputs (``None`` without
        such a trial), and ``tried``, the number of trials whose outputs are finite and not all 0.

    Example:
        >>> import torch, pathspace as ps
        >>> model = torch.nn.Sequential(
        ...     torch.nn.Linear(2, 3), torch.nn.ReLU(), torch.nn.Linear(3, 1)
        ... ).double()
        >>> x = torch.randn(4, 2).double()
        >>> found = trials(ps.trace(model, x), model, (x,), {}, seed=0)
        >>> found["tried"], found["rescaling"] < 1e-12, found["unused"]
        (3, True, None)
    """
    result: dict[str, Any] = {"tried": 0, "rescaling": None, "unused": None, "sizes": list(SIZES)}
    if graph.num_weights > LARGE:
        return result
    with without_eps(model, graph.folded_eps):
        for number, size in enumerate(SIZES):
            inputs = scaled(args, size), scaled(dict(kwargs), size)
            for gentle in (False, True):
                with redrawn_parameters(model, seed + number, gentle):
                    before = _run(model, inputs, seed)
                    fine = before is not None and bool(before.outputs.isfinite().any())
                    if before is not None and fine:
                        _try(graph, model, inputs, before, (seed, number), result)
                if fine:
                    break
    return result


def trials_in_words(found: Mapping[str, Any]) -> str:
    """The result of :func:`trials` as the end of a sentence.

    Example:
        >>> trials_in_words({"tried": 3, "rescaling": 1e-16, "unused": None, "sizes": [1.0]})
        '; with all weights redrawn, in 3 trials at inputs of several sizes, by 1.0e-16'
    """
    if found["rescaling"] is None and found["unused"] is None:
        return ""
    words = (
        f"; with all weights redrawn, in {found['tried']} trials at inputs of several sizes, by "
    )
    words += f"{found['rescaling']:.1e}" if found["rescaling"] is not None else "nothing (no units)"
    return words + (
        f", by {found['unused']:.1e} when unused scalars change"
        if found["unused"] is not None
        else ""
    )


def _try(
    graph: ReductionGraph,
    model: nn.Module,
    inputs: tuple[Any, Any],
    before: ForwardRun,
    seeds: tuple[int, int],
    result: dict[str, Any],
) -> None:
    result["tried"] += bool(seen(before))
    seed, number = seeds
    phi = powers_for(graph, precision(model), seed + number + 1)
    changes = [("rescaling", rescaled_weights(model, graph, phi))] if graph.num_units else []
    unused = _unused(graph, model, seed + number)
    changes += [("unused", unused)] if unused else []
    for kind, weights in changes:
        # (with the same random numbers as before)
        after = run_forward(model, *inputs, weights, seed=seed)
        gap = difference(before, after)
        result[kind] = gap if result[kind] is None else max(result[kind], gap)


def _run(model: nn.Module, inputs: tuple[Any, Any], seed: int) -> ForwardRun | None:
    """A run, or ``None`` if the model raises an error on these values."""
    try:
        return run_forward(model, *inputs, seed=seed)
    except (RuntimeError, ValueError, IndexError, ArithmeticError, AssertionError):
        return None


def scaled(tree: Any, size: float) -> Any:
    """Nested inputs with floating-point tensors multiplied, except tensors with
    infinite entries (masks).
    """

    def times(leaf: Tensor) -> Tensor:
        plain = leaf.is_floating_point() and leaf.layout == torch.strided
        return leaf * size if plain and size != 1 and bool(leaf.isfinite().all()) else leaf

    return mapped(times, tree)


def _unused(graph: ReductionGraph, model: nn.Module, seed: int) -> dict[str, Tensor]:
    """Parameters with unused scalars, in which these are redrawn."""
    generator = torch.Generator().manual_seed(seed)
    held = dict(model.named_parameters(remove_duplicate=False))
    masks = {block.name: block.unused for block in graph.blocks if block.unused is not None}
    masks |= {name: torch.ones((), dtype=torch.bool) for name in graph.unused if name in held}
    result = {}
    for name, mask in masks.items():
        value = held[name].detach()
        if value.is_floating_point() and value.numel():
            spread = float(value.double().square().mean().sqrt()) or 1.0
            noise = spread * torch.randn(value.shape, generator=generator, dtype=torch.float64)
            result[name] = torch.where(mask.to(value.device), value + noise.to(value), value)
    return result


@contextmanager
def redrawn_parameters(model: nn.Module, seed: int, gentle: bool = False) -> Iterator[None]:
    """A context in which parameters and running statistics are redrawn.

    Args:
        model: the model.
        seed: seed of the draws.
        gentle: keep signs, and draw zeros as small positive numbers.
    """
    generator = torch.Generator().manual_seed(seed)
    wanted: list[tuple[str, Tensor]] = [("", parameter) for parameter in model.parameters()]
    wanted += [
        (name, buffer)
        for module in model.modules()
        for name in ("running_mean", "running_var")
        if isinstance(buffer := getattr(module, name, None), Tensor)
    ]
    wanted = [
        (name, t)
        for name, t in wanted
        if t.is_floating_point() and t.numel() and t.layout == torch.strided
    ]
    with values_kept([tensor for _, tensor in wanted]):
        with torch.no_grad():
            for name, tensor in wanted:
                noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float64).to(
                    tensor
                )
                spread = float(tensor.double().square().mean().sqrt()) or 0.1
                if name == "running_var" or gentle:
                    fresh = tensor * (0.5 * noise).exp()
                    tensor.copy_(torch.where(tensor == 0, 0.1 * spread * noise.abs(), fresh))
                else:
                    tensor.add_((0.5 * spread if name != "running_mean" else 0.3) * noise)
        yield
