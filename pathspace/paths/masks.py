"""Masks read from a file, and the skeleton that they make."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from ..errors import InputError, expect_arguments
from ..files.tensor_files import TensorFile
from ..files.writing import existing_file
from ..graph.growing import tree_of_edges
from ..graph.structure import Structure
from .mask_files import FORMAT
from .skeleton import Skeleton


class Masks(dict[str, dict[str, Tensor]]):
    """Masks read from a file: ``masks["incoming"][parameter name]`` and
    ``masks["outgoing"][...]``, bool tensors.

    Attributes:
        header: the file's metadata (format, rule, seed, weights, units, dimension).
    """

    def __init__(self, parts: Mapping[str, dict[str, Tensor]], header: Mapping[str, str]) -> None:
        super().__init__(parts)
        self.header = dict(header)

    def __repr__(self) -> str:
        return f"Masks({len(self.incoming)} parameters, rule={self.header.get('rule', '')!r})"

    @property
    def incoming(self) -> dict[str, Tensor]:
        """One entering edge of each unit, as :attr:`pathspace.Skeleton.incoming`."""
        return self["incoming"]

    @property
    def outgoing(self) -> dict[str, Tensor]:
        """One leaving edge of each unit, as :attr:`pathspace.Skeleton.outgoing`."""
        return self["outgoing"]

    @property
    def masks(self) -> dict[str, Tensor]:
        """The paper's mask, entering or leaving, as :attr:`pathspace.Skeleton.masks`."""
        return {name: mask | self["outgoing"][name] for name, mask in self["incoming"].items()}

    def skeleton(self, graph: Structure) -> Skeleton:
        """The skeleton with these masks.

        Args:
            graph: the reduction graph of a model of the same architecture.

        Raises:
            InputError: the masks are those of another architecture.

        Example:
            >>> import tempfile, torch, pathspace as ps
            >>> from torch.nn import Linear, ReLU, Sequential
            >>> graph = ps.trace(Sequential(Linear(2, 2), ReLU(), Linear(2, 1)), torch.randn(1, 2))
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     ps.save_masks(graph.skeleton(), f"{folder}/masks.safetensors")
            ...     masks = ps.load_masks(f"{folder}/masks.safetensors")
            >>> masks.skeleton(graph).rule
            'modulo'
        """
        expect_arguments("Masks.skeleton", graph=graph)
        found: tuple[dict[int, np.ndarray], ...] = ({}, {})
        for part, edges in zip((self.incoming, self.outgoing), found, strict=True):
            for number, block in enumerate(graph.blocks):
                shape = tuple(part[block.name].shape) if block.name in part else None
                if shape != block.shape:
                    raise InputError(
                        f"Masks.skeleton found {f'a mask of shape {shape}' if shape else 'no mask'}"
                        f" of {block.name!r}, expected shape {block.shape}; load masks of this"
                        " architecture."
                    )
                edges[number] = part[block.name].reshape(-1).nonzero()[:, 0].numpy()
        tree_in = tree_of_edges(graph, True, found[0])
        # (with products of scales, one tree serves both directions)
        one = bool(graph.forms.shape[0])
        tree_out = tree_in if one else tree_of_edges(graph, False, found[1])
        rule, seed = self.header.get("rule", "modulo"), int(self.header.get("seed", 0))
        return Skeleton(graph, tree_in, tree_out, rule, seed)


def load_masks(path: str | PathLike[str]) -> Masks:
    """Read masks written by :func:`save_masks`.

    Args:
        path: the file.

    Returns:
        The masks with their header.

    Raises:
        InputError: no such file, or not a file of masks.
    """
    path = existing_file(path, "load_masks", "write one with save_masks or 'pathspace masks'")
    header = TensorFile.open(path).metadata
    if header.get("format") != FORMAT:
        raise InputError(
            f"{str(path)!r} has format {header.get('format')!r}, expected {FORMAT!r}; write it with"
            " save_masks or 'pathspace masks'."
        )
    parts: dict[str, dict[str, Tensor]] = {"incoming": {}, "outgoing": {}}
    for key, mask in load_file(path).items():
        part, _, name = key.partition("/")
        parts.setdefault(part, {})[name] = mask.to(torch.bool)
    return Masks(parts, header)
