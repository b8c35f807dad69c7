"""Masks of a skeleton as one safetensors file."""

from __future__ import annotations

import json
from os import PathLike

import torch

from ..errors import expect_arguments
from ..files.tensor_files import StoredTensor, as_bytes, write
from ..files.writing import replacing
from .two_trees import TwoTrees

FORMAT = "pathspace-masks/1"


def save_masks(skeleton: TwoTrees, path: str | PathLike[str]) -> None:
    """Write the masks of a skeleton as one safetensors file.

    Tensors are named ``incoming/<parameter>`` and ``outgoing/<parameter>`` and have dtype bool
    and the parameter's shape. The header's metadata holds the format, the rule and its seed, and
    the figures of the graph.

    Args:
        skeleton: the skeleton.
        path: the file; an existing file is replaced completely or not at all.

    Raises:
        InputError: the path cannot be written.
        InputTypeError: something else stands in the place of the skeleton.

    Example:
        >>> import tempfile, torch, pathspace as ps
        >>> from torch.nn import Linear, ReLU, Sequential
        >>> model = Sequential(Linear(2, 2), ReLU(), Linear(2, 1))
        >>> skeleton = ps.trace(model, torch.randn(1, 2)).skeleton()
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     ps.save_masks(skeleton, f"{folder}/masks.safetensors")
        ...     masks = ps.load_masks(f"{folder}/masks.safetensors")
        >>> masks.header["units"], masks["outgoing"]["2.weight"].tolist()
        ('2', [[True, True]])
    """
    expect_arguments("save_masks", skeleton=skeleton)
    graph = skeleton.graph
    header = {
        "format": FORMAT,
        "rule": skeleton.rule,
        "seed": str(skeleton.seed),
        "weights": str(graph.num_weights),
        "units": str(graph.num_units),
        "dimension": str(graph.dimension),
        "pinned": json.dumps(sorted({pin.op for pin in graph.pinned})),
        "unused": json.dumps(list(graph.unused)),
        "meaning": (
            "incoming: one entering edge per unit (tree T_in); outgoing: one leaving edge per unit"
            " (tree T_out); skeleton = incoming or outgoing"
        ),
    }
    parts = ("incoming", "outgoing")
    entries = {
        f"{part}/{block.name}": StoredTensor.of(torch.bool, block.shape)
        for part in parts
        for block in graph.blocks
    }

    def data(key: str) -> list[memoryview]:
        # one mask at a time, as all together may be more than the memory holds
        part, name = key.split("/", 1)
        return [as_bytes(skeleton.mask(name, skeleton.positions(name)[parts.index(part)]))]

    with replacing(path) as temporary:
        write(temporary, entries, data, header)
