"""Modules before and after each set of units, which tools for quantisation rescale."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from json import dumps

import numpy as np
import torch
from torch import Tensor

from ..errors import InputError, expect_arguments
from ..graph.parts import WeightBlock, owner
from ..graph.structure import Structure
from ..shown import Shown

FORMATS = ("llm-compressor", "awq", "smoothquant", "aimet")


@dataclass(frozen=True, eq=False)
class SmoothingPair(Shown):
    """Modules between which the scale of a set of units can be moved.

    Attributes:
        writers: modules whose weights enter the units (one, for most sets).
        readers: modules whose weights leave them.
        parameters: names of the weights on both sides: those that enter, those that leave.
        exact: whether the function of the unchanged model, every ``eps`` included, is preserved:
            nothing else is written into, reads or normalises these units.
        units: ids of the units.
        left_out: why :func:`smoothing_recipe` leaves the pair out; empty if it does not.
    """

    writers: tuple[str, ...]
    readers: tuple[str, ...]
    parameters: tuple[tuple[str, ...], tuple[str, ...]]
    exact: bool
    units: Tensor = field(repr=False)
    left_out: str = ""


def _units(graph: Structure, block: WeightBlock) -> tuple[frozenset[int], frozenset[int]]:
    """The units that the weights of a tensor enter, and those that they leave."""
    every = (ids.abs().unique() for ids in (block.head, block.tail))
    heads, tails = (frozenset(ids[(ids > 0) & (ids <= graph.num_units)].tolist()) for ids in every)
    return heads, tails


def smoothing_pairs(graph: Structure) -> list[SmoothingPair]:
    """Find the modules that compute each set of units (writers), and those that use it (readers).

    If the rows of the writers are multiplied by positive factors and the columns of all readers are
    divided by them, the outputs of an ``exact`` pair do not change.

    Args:
        graph: a traced reduction graph, of a model with weights or without.

    Returns:
        The pairs, in the order of the writers' parameters.

    Example:
        >>> import torch, pathspace as ps
        >>> from torch.nn import LayerNorm, Linear, ReLU, Sequential
        >>> model = Sequential(LayerNorm(4), Linear(4, 6), ReLU(), Linear(6, 2))
        >>> pairs = ps.smoothing_pairs(ps.trace(model, torch.randn(3, 4)))
        >>> [(pair.writers, pair.readers, pair.exact) for pair in pairs]
        [(('0',), ('1',), True), (('1',), ('3',), True)]
    """
    expect_arguments("smoothing_pairs", graph=graph)
    sides = {block.name: _units(graph, block) for block in graph.blocks}
    beside = Counter(owner(block.name) for block in graph.blocks)
    vectors = [block.name for block in graph.blocks if len(block.shape) == 1]
    biases = {name for name in vectors if name.endswith("bias") and beside[owner(name)] > 1}
    readers_of: dict[int, list[str]] = {}
    for block in graph.blocks:
        for unit in sides[block.name][1] if len(block.shape) > 1 else ():
            readers_of.setdefault(unit, []).append(block.name)
    sets: dict[tuple[frozenset[int], tuple[str, ...]], list[str]] = {}
    for name, (entering, _) in sides.items():
        units = frozenset(unit for unit in entering if unit in readers_of)
        found = dict.fromkeys(reader for unit in sorted(units) for reader in readers_of[unit])
        readers = tuple(reader for reader in found if reader != name)
        # (a single unit is left out; a bias has the same units as its weight)
        if len(units) > 1 and readers and name not in biases:
            sets.setdefault((units, readers), []).append(name)
    # unit -> tensors with its scale, those with products of it included
    touching: dict[int, set[str]] = {}
    ends = [(block.name, side) for block in graph.blocks for side in (block.tail, block.head)]
    ends += [(name, entry.units) for entry in graph.statistics for name in entry.names]
    for name, side in ends:
        for unit in np.unique(graph.expand[side.abs().unique().numpy()].indices).tolist():
            touching.setdefault(unit, set()).add(name)
    pairs, approximate = [], set(graph.approximate.tolist())
    for (units, readers), writers in sets.items():
        ids, names = torch.tensor(sorted(units)), (tuple(writers), readers)
        writing, reading = (tuple(dict.fromkeys(map(owner, side))) for side in names)
        # what the rows of writers and the columns of readers are, biases included
        moved = {*writers, *readers, *(name for name in biases if owner(name) in writing)}
        # (other tensors that are of the same units would have to follow)
        exact = all(touching[unit] <= moved for unit in units) and not units & approximate
        left_out = _left_out(graph, writing, names, ids)
        pairs.append(SmoothingPair(writing, reading, names, exact, ids, left_out))
    return pairs


def _left_out(
    graph: Structure, owners: Sequence[str], parameters: Sequence[Sequence[str]], units: Tensor
) -> str:
    """Why no tool can use a pair: rows of one weight that pairs with columns of readers."""
    if len(owners) > 1:
        return f"{len(owners)} modules write the units"
    every = [name for side in parameters for name in side]
    for name in every:
        if name != f"{owner(name)}.weight" or len(parameters[0]) > 1:
            return f"{name} is not the weight of a module"
    sides = []
    for name in every:
        block = graph.blocks[graph.index[name]]
        ids, along = (block.head, 0) if name == every[0] else (block.tail, 1)
        if any(size > 1 for dim, size in enumerate(ids.shape) if dim != along):
            return f"the units do not lie along {'columns' if along else 'rows'} of {name}"
        sides.append(ids.flatten())
    rows, *columns = sides
    if any(not torch.equal(rows[-len(own) :], own) for own in columns):
        return f"the last rows of {every[0]} are not in the order of its readers' columns"
    if not torch.equal(columns[0].sort().values, units):
        return "some units have several columns, or none"
    return ""


def smoothing_recipe(pairs: Iterable[SmoothingPair], form: str = "llm-compressor") -> str:
    """Write the pairs as the configuration of another tool.

    The tools divide the last rows of a writer by what they multiply the columns of its readers by,
    in order. Pairs of another layout, and those with several writers, are left out
    (:attr:`SmoothingPair.left_out`).

    Args:
        pairs: results of :func:`smoothing_pairs`.
        form: ``"llm-compressor"`` (a recipe with an ``AWQModifier``), ``"smoothquant"`` (one with a
            ``SmoothQuantModifier``), ``"awq"`` (``prev_op`` and ``layers``, as in AutoAWQ) or
            ``"aimet"`` (sets of layers for cross-layer equalisation).

    Returns:
        YAML for the first two, with a comment for each pair that is left out; JSON for the others.
        Every module has its full name.

    Raises:
        InputError: unknown ``form``.

    Example:
        >>> import torch, pathspace as ps
        >>> model = torch.nn.Sequential(torch.nn.LayerNorm(4), torch.nn.Linear(4, 2))
        >>> pairs = ps.smoothing_pairs(ps.trace(model, torch.randn(3, 4)))
        >>> print(ps.smoothing_recipe(pairs, "smoothquant"))
        default_stage:
          default_modifiers:
            SmoothQuantModifier:
              mappings:
                - [["1"], "0"]
    """
    if form not in FORMATS:
        raise InputError(
            f"smoothing_recipe found form={form!r}, expected one of"
            f" {', '.join(map(repr, FORMATS))}."
        )
    pairs = list(pairs) if isinstance(pairs, Iterable) else [pairs]
    for pair in pairs:
        expect_arguments("smoothing_recipe", pair=pair)
    single = [(pair.writers[0], list(pair.readers)) for pair in pairs if not pair.left_out]
    if form == "awq":
        mappings = [{"prev_op": w, "layers": layers, "inp": layers[0]} for w, layers in single]
        return dumps(mappings, indent=2)
    if form == "aimet":
        return dumps([[writer, *readers] for writer, readers in single], indent=2)
    smooth = form == "smoothquant"
    lines = [
        "default_stage:",
        "  default_modifiers:",
        f"    {'SmoothQuantModifier' if smooth else 'AWQModifier'}:",
        f"      mappings:{'' if single else ' []'}",
    ]
    for writer, readers in ((dumps(one), dumps(others)) for one, others in single):
        if smooth:
            lines.append(f"        - [{readers}, {writer}]")
        else:
            lines += [f"        - smooth_layer: {writer}", f"          balance_layers: {readers}"]
    for pair in pairs:
        if pair.left_out:
            names = " -> ".join(", ".join(side) for side in (pair.writers, pair.readers))
            lines.append(f"# left out: {names}: {pair.left_out}")
    return "\n".join(lines)
