"""The user's inputs to a diagnosis besides the model: a checkpoint, data, a loss."""

from __future__ import annotations

import inspect
import os
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader, Dataset

from pathspace.cli.target import find_object
from pathspace.errors import AT_LEAST_1, InputError, expect_numbers
from pathspace.files.tensor_files import read_saved
from pathspace.models.copies import safe_deepcopy
from pathspace.models.inputs import arranged

from .losses import Function, Loss, choose_loss

# keys of a state dictionary in checkpoints of this library, of Lightning, and of training scripts
_WRAPPERS = ("state_dict", "model_state_dict", "model", "module")
_PREFIXES = ("module.", "_orig_mod.", "model.")
_TARGETS = ("targets", "target", "labels", "label", "y")
DATASET_BATCH = 32


@dataclass(frozen=True)
class Subject:
    """A model and the data for its diagnosis.

    Attributes:
        model: the model, in its current mode.
        args: positional example inputs, from the first batch.
        kwargs: keyword example inputs.
        loss: ``loss(outputs, targets)``.
        batches: at least one pair ``(inputs, targets)``; the first has the example inputs.
    """

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    loss: Loss
    batches: tuple[tuple[Any, Any], ...]

    @property
    def weights(self) -> int:
        """Number of scalar parameters."""
        return sum(parameter.numel() for parameter in self.model.parameters())


def make_subject(
    model: nn.Module,
    inputs: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    checkpoint: str | os.PathLike[str] | None = None,
    data: Any = None,
    loss: str | Function | None = None,
    targets: Any = None,
    batches: int = 4,
    seed: int = 0,
) -> Subject:
    """Combine a model, a checkpoint, data and a loss.

    Args:
        model: any module; it is not changed, because a checkpoint is loaded into a copy.
        inputs: positional example inputs; with ``data``, those of its first batch.
        kwargs: keyword example inputs.
        checkpoint: a file of weights, see :func:`load_weights`.
        data: batches, see :func:`read_batches`, or their name, see :func:`load_data`.
        loss: see :func:`pathspace.diagnostics.shared.losses.choose_loss`.
        targets: targets of the example inputs, without ``data``.
        batches: largest number of batches to use.
        seed: seed of the stand-in loss.

    Returns:
        The subject of all measurements.

    Raises:
        InputError: a file, name, batch or loss is not valid.
    """
    if checkpoint is not None:
        model = safe_deepcopy(model)
        load_weights(model, checkpoint)
    chosen = choose_loss(loss, seed)
    if data is None:
        args, named = arranged(model, inputs, kwargs)
        return Subject(model, args, named, chosen, ((_joined(model, args, named), targets),))
    found = tuple(
        read_batches(
            model, load_data(data) if isinstance(data, str | os.PathLike) else data, batches
        )
    )
    if loss is not None:
        found = tuple(_without_labels(batch) for batch in found)
    first = found[0][0]
    if isinstance(first, Mapping):
        args, named = arranged(model, (), _example(model, first))
    else:
        args, named = arranged(model, first if isinstance(first, tuple) else (first,))
    return Subject(model, args, named, chosen, found)


def _example(model: nn.Module, batch: Mapping[str, Any]) -> dict[str, Any]:
    """The inputs without optional labels, so that the model returns scores
    without a loss before them.
    """
    takes = inspect.signature(model.forward).parameters
    optional = {name for name in _TARGETS if name in takes and takes[name].default is None}
    return {name: value for name, value in batch.items() if name not in optional}


def _joined(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Inputs as one value: a tuple, or a mapping if some are given by keyword."""
    if not kwargs:
        return args
    return (
        dict(inspect.signature(model.forward).bind(*args, **kwargs).arguments) if args else kwargs
    )


def load_weights(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Load all weights of a model, or none and raise an error.

    Args:
        model: its parameters and buffers are written; those on the meta device move to the CPU.
        path: a safetensors file, or a file of ``torch.save``, read with ``weights_only``; a state
            dictionary, alone or under the key ``state_dict``, ``model_state_dict``, ``model`` or
            ``module``. Prefixes that wrappers add to all names (``module.``, ``_orig_mod.``,
            ``model.``) are removed.

    Raises:
        InputError: the file cannot be read, or its names or shapes do not match the model.

    Example:
        >>> import tempfile
        >>> import torch
        >>> one, other = nn.Linear(2, 2), nn.Linear(2, 2)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     torch.save({"model": one.state_dict()}, f"{folder}/weights.pt")
        ...     load_weights(other, f"{folder}/weights.pt")
        >>> torch.equal(one.weight, other.weight)
        True
    """
    state = _named(read_saved(Path(path)), model)
    expected = {
        name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)
    }
    shared = {id(value): name for name, value in _all_tensors(model) if name in state}
    # a file has only one of the names of tied weights
    tied = {
        name for name, value in _all_tensors(model) if name not in state and id(value) in shared
    }
    missing = sorted(expected.keys() - state.keys() - tied)
    extra = sorted(state.keys() - expected.keys())
    if missing or extra:
        parts = [
            f"lacks {_few(missing)}" if missing else "",
            f"holds {_few(extra)} besides" if extra else "",
        ]
        raise InputError(
            f"The checkpoint '{path}' does not fit {type(model).__name__}: it"
            f" {' and '.join(filter(None, parts))}; give one of the same architecture."
        )
    for name, value in state.items():
        if value.shape != expected[name].shape:
            raise InputError(
                f"The checkpoint '{path}' has {name} of shape {tuple(value.shape)}, expected "
                f"{tuple(expected[name].shape)}; give one of the same architecture."
            )
    _make_room(model, expected.keys())
    model.load_state_dict(state, strict=False)


def _make_room(model: nn.Module, names: Container[str]) -> None:
    """Put memory in place of tensors on the meta device, of which each is one
    tensor under all its names.
    """
    room: dict[int, Tensor] = {}
    for name, value in _all_tensors(model):
        if name in names and value.is_meta:
            empty = torch.empty_like(value, device="cpu")
            room[id(value)] = (
                nn.Parameter(empty, value.requires_grad)
                if isinstance(value, nn.Parameter)
                else empty
            )
    for module in model.modules():
        places: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for held in places:
            held.update(
                {name: room[id(value)] for name, value in held.items() if id(value) in room}
            )


def _all_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _few(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _named(found: Any, model: nn.Module) -> dict[str, Tensor]:
    """The state dictionary in the content of a file, with the model's names."""
    while isinstance(found, Mapping) and not any(
        isinstance(value, Tensor) for value in found.values()
    ):
        inner = next((found[key] for key in _WRAPPERS if isinstance(found.get(key), Mapping)), None)
        if inner is None:
            break
        found = inner
    state = (
        {k: v for k, v in found.items() if isinstance(v, Tensor)}
        if isinstance(found, Mapping)
        else {}
    )
    if not state:
        raise InputError("The checkpoint holds no state dictionary; save model.state_dict().")
    names = set(model.state_dict())
    while not names & state.keys():
        prefix = next((p for p in _PREFIXES if all(name.startswith(p) for name in state)), None)
        if prefix is None:
            break
        state = {name.removeprefix(prefix): value for name, value in state.items()}
    return state


def load_data(spec: str | os.PathLike[str]) -> Any:
    """Load data from a file, or by its name.

    Args:
        spec: ``package.module:name`` or ``path/to/file.py:name`` of batches, a data set, or a
            function without arguments that returns them; or a ``.safetensors`` or ``.pt`` file of
            named tensors, one batch.

    Returns:
        Data for :func:`read_batches`.
    """
    text = os.fspath(spec)
    if Path(text).suffix in (".safetensors", ".pt", ".pth"):
        return read_saved(Path(text))
    found = find_object(text)
    return found() if callable(found) and not isinstance(found, Dataset | DataLoader) else found


def read_batches(model: nn.Module, data: Any, count: int) -> list[tuple[Any, Any]]:
    """The first batches of data, as pairs ``(inputs, targets)`` on the model's
    device and in its dtype.

    Args:
        model: the model; the names of its arguments determine which entries
            of a mapping are inputs.
        data: one batch, or an iterable of batches, such as a ``DataLoader``; a ``Dataset`` is
            read in its own order, in batches of 32 samples. A batch is a tensor (inputs alone),
            a mapping of tensors (the entry ``targets``, ``target``, ``labels``, ``label`` or
            ``y`` is the target, unless it is an argument of the model), or a tuple or list whose
            last entry is the target.
        count: largest number of batches.

    Returns:
        At least one pair; the inputs are a tensor, a tuple of positional or a
        mapping of keyword inputs.

    Raises:
        InputError: the data contain no batch, or are not batches.

    Example:
        >>> import torch
        >>> read_batches(nn.Linear(2, 1), [(torch.ones(4, 2), torch.zeros(4, 1))] * 3, 2)[1][
        ...     0
        ... ].shape
        torch.Size([4, 2])
    """
    expect_numbers("read_batches", AT_LEAST_1, batches=count)
    if isinstance(data, Dataset):
        data = DataLoader(data, batch_size=DATASET_BATCH)
    single = isinstance(data, Tensor | Mapping) or (isinstance(data, tuple) and len(data) > 1)
    if not single and not isinstance(data, Iterable):
        raise InputError(
            f"The data are a {type(data).__name__}, expected batches, a data set or a DataLoader."
        )
    found = [_pair(model, batch) for batch in ([data] if single else islice(data, count))]
    if not found:
        raise InputError("The data hold no batch, expected at least one.")
    return found


def _pair(model: nn.Module, batch: Any) -> tuple[Any, Any]:
    place = next((p for p in model.parameters() if p.is_floating_point()), None)

    def moved(value: Any) -> Any:
        if place is None or not isinstance(value, Tensor):
            return value
        return value.to(place.device, place.dtype if value.is_floating_point() else None)

    batch = tree_map(moved, dict(batch) if isinstance(batch, Mapping) else batch)
    if isinstance(batch, Tensor):
        return batch, None
    if isinstance(batch, list | tuple):
        if not batch:
            raise InputError(
                "A batch of the data is empty; expected inputs, and targets after them."
            )
        inputs = tuple(batch[:-1]) if len(batch) > 1 else tuple(batch)
        return (inputs[0] if len(inputs) == 1 else inputs), (batch[-1] if len(batch) > 1 else None)
    if not isinstance(batch, dict):
        raise InputError(
            f"A batch of the data is a {type(batch).__name__}, expected a tensor, a pair (inputs,"
            " targets) or a mapping."
        )
    takes = inspect.signature(model.forward).parameters
    key = next((name for name in _TARGETS if name in batch and name not in takes), None)
    targets = None if key is None else batch.pop(key)
    if len(batch) == 1 and not batch.keys() & takes.keys():
        return next(iter(batch.values())), targets
    return batch, targets


def _without_labels(batch: tuple[Any, Any]) -> tuple[Any, Any]:
    """A batch whose labels are targets only, because a named loss uses the model's scores."""
    inputs, targets = batch
    if isinstance(inputs, dict) and targets is None:
        key = next((name for name in _TARGETS if name in inputs), None)
        if key is not None:
            return {name: value for name, value in inputs.items() if name != key}, inputs[key]
    return batch
