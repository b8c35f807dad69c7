"""Changes of basis of checkpoints, one tensor at a time."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from ..errors import InputError
from ..files.checkpoints import Change, Checkpoint
from ..files.writing import replacing
from .rotate import BasisChange, Element, matrices
from .space import FeatureSpaces


def rotate_files(
    spaces: FeatureSpaces,
    elements: Mapping[str, Element] | str,
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    seed: int = 0,
) -> None:
    """Change the basis of feature spaces in a checkpoint, as :func:`pathspace.rotate_` does to a
    model in memory.

    It needs the memory of one tensor in float64. Each file is written under a temporary name and
    then renamed; if the call is interrupted, the same call completes the folder. Where a tie has to
    be cut, the checkpoint gets the second tensor, and ``tie_word_embeddings`` in ``config.json``
    becomes false. Other tensors and files are copied.

    Args:
        spaces: from :func:`pathspace.spaces`; the model needs no values there.
        elements: as in :func:`pathspace.rotate_`.
        source: a safetensors file, or a folder with one, or with several and their index.
        destination: a file or a folder, like the source.
        seed: of the random numbers.

    Raises:
        InputError: an element is wrong, see :func:`pathspace.rotate_`, a tensor is missing or has
            another shape, or files cannot be read or written.

    Example:
        >>> import tempfile, torch, pathspace as ps
        >>> from safetensors.torch import load_file, save_file
        >>> model, x = (
        ...     torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Linear(8, 2)),
        ...     torch.ones(3),
        ... )
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_file(model.state_dict(), f"{folder}/a.safetensors")
        ...     found = ps.spaces(model, x)
        ...     ps.rotate_files(
        ...         found, "random", f"{folder}/a.safetensors", f"{folder}/b.safetensors"
        ...     )
        ...     other = load_file(f"{folder}/b.safetensors")
        >>> torch.allclose(torch.func.functional_call(model, other, (x,)), model(x), atol=1e-5)
        True
    """
    chosen = matrices(spaces, elements, seed)
    checkpoint = Checkpoint.open(source)
    stored = _Stored(spaces, checkpoint)
    change = BasisChange(spaces, chosen, stored.read)
    added = {
        name: key
        for name, key in stored.keys.items()
        if (first := spaces.ties[name]) != name
        and stored.keys.get(first) == key
        and change.recipe(name) != change.recipe(first)
    }
    changes = {
        name if name in added else stored.keys[name]: _pieces(change, name)
        for name in sorted(change.names)
    }
    job = hashlib.sha256(
        b"".join(name.encode() + chosen[name].numpy().tobytes() for name in sorted(chosen))
    )
    checkpoint.rewrite(destination, changes, job.hexdigest(), added)
    if added:
        _untie(Path(destination) / "config.json")


class _Stored:
    """The tensors of a checkpoint under the names of the parameters."""

    def __init__(self, spaces: FeatureSpaces, checkpoint: Checkpoint) -> None:
        self._places = checkpoint.places()
        alike: dict[str, list[str]] = {}
        for name, first in spaces.ties.items():
            alike.setdefault(first, []).append(name)
        names = {name: (name, *alike[spaces.ties[name]]) for name in spaces.sizes}
        self.keys = {
            name: keys[0] for name, keys in checkpoint.named(names, "rotate_files").items()
        }
        self._sizes = spaces.sizes

    def read(self, name: str) -> Tensor:
        key = self.keys[name]
        file = self._places[key]
        entry = file.entries[key]
        size = prod(entry.shape)
        if entry.dtype is None or not entry.dtype.is_floating_point or size != self._sizes[name]:
            raise InputError(
                f"rotate_files found {key!r} of shape {entry.shape} and type {entry.kind}, expected"
                f" {self._sizes[name]} numbers in floating point; give the checkpoint of the model"
                " of these spaces."
            )
        return torch.cat([piece.reshape(piece.shape or (1,)) for _, piece in file.pieces(key)])


def _pieces(change: BasisChange, name: str) -> Change:
    """The new numbers piece by piece; the whole tensor is held while it is written."""
    held: list[Tensor] = []

    def piece(place: slice, old: Tensor) -> Tensor:
        if place.start == 0:
            held[:] = [change.of(name)]
        new = held[0][place].reshape(old.shape)
        if place.stop == len(held[0]):
            held.clear()
        return new

    return piece


def _untie(config: Path) -> None:
    """Let a configuration say that the tables at both ends differ."""
    if not config.is_file():
        return
    held = json.loads(config.read_text(encoding="utf-8"))
    for part in (held, held.get("text_config")):
        if isinstance(part, dict):
            part["tie_word_embeddings"] = False
    with replacing(config, alone=True) as temporary:
        temporary.write_text(json.dumps(held, indent=2) + "\n", encoding="utf-8")
