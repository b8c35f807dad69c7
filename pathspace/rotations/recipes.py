"""Rotations of a model as the recipe of another tool."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from json import dumps
from typing import Any

import numpy as np
import torch
from torch import nn

from ..errors import InputError
from ..graph.parts import owner
from ..models.walk import every_tensor
from .coordinates import Array
from .space import FeatureSlice, FeatureSpaces, Space

FORMATS = ("llm-compressor",)
# what the tool calls the features along a dimension of a parameter of a module of this very type
READ, WRITTEN = "weight_input", "weight_output"
LOCATIONS = {
    (nn.Linear, "weight", 0): WRITTEN,
    (nn.Linear, "bias", 0): WRITTEN,
    (nn.Linear, "weight", 1): READ,
    (nn.Embedding, "weight", 1): WRITTEN,
}
# norms that multiply by 1 + weight, and are replaced by others while llm-compressor 0.14 works
OFFSET_NORMS = (
    "GemmaRMSNorm", "Gemma2RMSNorm", "Gemma3RMSNorm", "MuseGlimmerTextCenteredRMSNorm",
    "Qwen3NextRMSNorm", "Qwen3_5RMSNorm", "Qwen3_5MoeRMSNorm",
)  # fmt: skip
Side = tuple[str, int]
# asked for, but not read beside transform_config; of the embedding the tool subtracts means
MAPPINGS = "embedding attn attn_q attn_k attn_v attn_o mlp_in mlp_out lm_head".split()


def rotation_recipe(model: nn.Module, spaces: FeatureSpaces, form: str = "llm-compressor") -> str:
    """Write the rotations of a model as a recipe for another tool.

    The recipe gives Hadamard matrices to spaces of ``O`` (R1) and ``GL`` (R2), as ``"hadamard"``
    does in :func:`pathspace.rotate_`. llm-compressor multiplies whole weights of linear layers and
    embeddings by one matrix, block by block, and moves gains of norms into the linear layers behind
    them. What does not fit this is left out, and a comment says why.

    Args:
        model: the model of the spaces; it needs no values.
        spaces: from :func:`pathspace.spaces`.
        form: ``"llm-compressor"`` (a recipe with a ``SpinQuantModifier``).

    Returns:
        YAML. Every module has its full name.

    Raises:
        InputError: unknown ``form``, spaces of another model, or the tool would change the function
            with any recipe: it cuts a tie on which the code of the model depends.

    Example:
        >>> import torch, pathspace as ps
        >>> model = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Linear(8, 2))
        >>> recipe = ps.rotation_recipe(model, ps.spaces(model, torch.randn(4, 3)))
        >>> print(recipe[recipe.index("apply:") :])
        apply:
                      - {"targets": ["0"], "location": "weight_output", "inverse": false}
                      - {"targets": ["1"], "location": "weight_input", "inverse": true}
    """
    if form not in FORMATS:
        raise InputError(
            f"rotation_recipe found form={form!r}, expected one of {', '.join(map(repr, FORMATS))}."
        )
    spaces.expect_own("rotation_recipe", every_tensor(model, "_parameters"))
    recipe, left_out = _SpinQuant(model, spaces), []
    for space in spaces:
        try:
            recipe.rotate(space)
        except _Unfit as why:
            left_out.append(f"# left out: {space.name}: {why}")
    return "\n".join([*recipe.lines(), *left_out])


class _Unfit(Exception):
    """Why the tool cannot rotate a space."""


class _SpinQuant:
    """A recipe with a ``SpinQuantModifier``.

    Its matrices are orthogonal, so what writes features and what reads them is multiplied alike.
    """

    def __init__(self, model: nn.Module, spaces: FeatureSpaces) -> None:
        self.spaces = spaces
        # (the tool takes the name of a class for all modules of this class)
        classes = {kind.__name__ for module in model.modules() for kind in type(module).__mro__}
        self.modules = {
            name: module for name, module in model.named_modules() if name not in classes
        }
        ends = _ends(model)
        names = [f"{name}.weight" for name, module in model.named_modules() if module in ends]
        if len({id(end.weight) for end in ends}) == 1 and not spaces.sizes.keys() >= set(names):
            raise InputError(
                f"rotation_recipe found that {type(model).__name__} computes something else if"
                f" {' and '.join(names)} are not tied, as llm-compressor makes them; use"
                " ps.rotate_ instead."
            )
        uses = Counter(
            id(parameter)
            for module in model.modules()
            if module not in ends
            for parameter in module.parameters(recurse=False)
        )
        self.shared = {parameter for parameter, count in uses.items() if count > 1}
        # values of gains that tell them apart
        generator = torch.Generator().manual_seed(0)
        self.gains = {
            name: torch.rand(spaces.sizes[name], dtype=torch.float64, generator=generator) + 0.5
            for name in spaces.shifts
        }
        self.factors = spaces.factors(self.gains.__getitem__)
        # norm -> linear layers; (R1 or R2, size of a block) -> location -> modules
        self.norms: dict[str, list[str]] = {}
        self.groups: dict[tuple[str, int], dict[str, list[str]]] = {}

    def rotate(self, space: Space) -> None:
        """Give a space a matrix, if it is of a kind that others rotate, too."""
        if space.group == "rigid":
            modules = [self.modules.get(owner(name)) for name in space.writers]
            if any(isinstance(module, nn.Embedding) for module in modules):
                raise _Unfit(space.reason.partition("; ")[0])
        if space.group == "O1":
            raise _Unfit("a layer norm needs matrices that keep the vector of ones")
        if space.group in ("O", "GL") and space.size > 1:
            self._add(space, _block(space.size))

    def _add(self, space: Space, block: int) -> None:
        if block == 1:
            raise _Unfit(f"there is no Hadamard matrix for {space.size} features")
        sides: dict[Side, list[FeatureSlice]] = {}
        for part in space.slices:
            sides.setdefault((part.parameter, part.dim), []).append(part)
        found = {side: self._location(side, sides) for side in sides}
        norms: dict[str, list[str]] = {}
        for (name, _), (location, coordinates) in found.items():
            if gain := self._gain(space, coordinates):
                norms.setdefault(gain if location == READ else "", []).append(owner(name))
        if norms.keys() != set(space.gains):
            raise _Unfit("its gains are not all those of norms before linear layers")
        for gain in norms:
            self._check_norm(gain)
        group = self.groups.setdefault(("R1" if space.group == "O" else "R2", block), {})
        for (name, _), (location, _) in found.items():
            if not name.endswith(".bias"):  # (goes with its weight)
                group.setdefault(location, []).append(owner(name))
        self.norms |= {owner(gain): linears for gain, linears in norms.items()}

    def _location(
        self, side: Side, sides: Mapping[Side, Sequence[FeatureSlice]]
    ) -> tuple[str, Array]:
        """Where the tool multiplies a whole parameter, and the coordinates there."""
        name, dim = side
        path, _, key = name.rpartition(".")
        module = self.modules.get(path)
        location = LOCATIONS.get((type(module), key, dim))
        if location is None:
            raise _Unfit(f"{name} is not the weight or bias of a Linear, or of an Embedding")
        parameter = getattr(module, key)
        positions = torch.cat([part.positions for part in sides[side]])
        order = positions[:, 0].argsort()
        if not torch.equal(positions[order].reshape(-1), torch.arange(parameter.shape[dim])):
            raise _Unfit(f"it is a part of {name}, or has another order there")
        beside = {(f"{path}.weight", 0), (f"{path}.bias", 0)}
        torn = dim == 0 and getattr(module, "bias", None) is not None and not beside <= set(sides)
        if torn or id(parameter) in self.shared:
            raise _Unfit(f"{name} has other uses")
        at = np.concatenate([part.coordinates for part in sides[side]])[order.numpy()]
        return location, at.reshape(-1)

    def _gain(self, space: Space, at: Array) -> str:
        """The gain that a parameter takes in at these coordinates, or none."""
        factors = np.where(self.spaces.solution.dual[at], self.factors[at], 1 / self.factors[at])
        if np.allclose(factors, 1.0):
            return ""
        for name in space.gains:
            values = self.gains[name].numpy() + self.spaces.shifts[name]
            if values.shape == factors.shape and np.allclose(values, factors):
                return name
        raise _Unfit("a parameter takes in other numbers than the gain of one norm")

    def _check_norm(self, gain: str) -> None:
        """Whether the tool sets a gain to one."""
        path, _, key = gain.rpartition(".")
        module, shift = self.modules.get(path), self.spaces.shifts[gain]
        if shift != float(type(module).__name__ in OFFSET_NORMS):
            raise _Unfit(f"llm-compressor does not know that {gain} stands for {shift:g} + {gain}")
        users = sum(gain in space.gains for space in self.spaces.free)
        if module is None or key != "weight" or users > 1 or id(module.weight) in self.shared:
            raise _Unfit(f"{gain} is not the weight of one norm, or has other uses")

    def lines(self) -> list[str]:
        """The recipe in YAML."""
        lines = ["default_stage:", "  default_modifiers:", "    SpinQuantModifier:"]
        lines += ["      # these match nothing; transform_config says what is rotated"]
        lines += ["      mappings:", *(f'        {name}: "re:(?!)"' for name in MAPPINGS)]
        lines.append(f"      norm_mappings:{'' if self.norms else ' []'}")
        for norm, linears in self.norms.items():
            lines.append(f"        - {dumps({'norm': norm, 'linears': linears})}")
        lines.append("      transform_config:")
        lines.append(f"        config_groups:{'' if self.groups else ' {}'}")
        names: dict[str, tuple[str, int]] = {}
        for kind, block in sorted(self.groups, key=lambda group: (group[0], -group[1])):
            names[f"{kind}_{block}" if kind in names else kind] = (kind, block)
        for name, group in names.items():
            lines += [f"          {name}:", "            type: random-hadamard"]
            lines += [f"            head_dim: {group[1]}", "            apply:"]
            for location, paths in self.groups[group].items():
                one = {"targets": paths, "location": location, "inverse": location == READ}
                lines.append(f"              - {dumps(one)}")
        return lines


def _ends(model: Any) -> list[Any]:
    """The modules at both ends, to which the tool gives weights of their own if it finds both."""
    try:
        found = [model.get_input_embeddings(), model.get_output_embeddings()]
    except (AttributeError, NotImplementedError, TypeError):
        return []
    return [] if None in found else found


def _block(size: int) -> int:
    """The largest divisor of a size for which the tool has a Hadamard matrix."""
    for block in range(size, 1, -1):
        odd = block // (block & -block)
        if size % block == 0 and (odd == 1 or (block % 4 == 0 and odd < 64)):
            return block
    return 1
