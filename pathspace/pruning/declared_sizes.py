"""Sizes of tensors that torch's own modules store as attributes."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.prune import is_pruned

from ..errors import UnsupportedError
from ..models.copies import safe_deepcopy
from ..models.isolation import quiet, random_kept
from ..models.walk import tensors_of
from .groups import Cut

# attributes of torch's own modules that store the size of a tensor's dimension
DECLARED: Sequence[tuple[type[nn.Module], str, tuple[str | None, ...]]] = (
    (nn.Linear, "weight", ("out_features", "in_features")),
    (nn.Bilinear, "weight", ("out_features", "in1_features", "in2_features")),
    (nn.Embedding, "weight", ("num_embeddings", "embedding_dim")),
    (nn.EmbeddingBag, "weight", ("num_embeddings", "embedding_dim")),
    (nn.modules.batchnorm._NormBase, "running_mean", ("num_features",)),
    (nn.modules.batchnorm._NormBase, "weight", ("num_features",)),
    (nn.GroupNorm, "weight", ("num_channels",)),
    (nn.PReLU, "weight", ("num_parameters",)),
    (nn.RNNBase, "weight_ih_l0", (None, "input_size")),
    (nn.RNNCellBase, "weight_ih", (None, "input_size")),
    (nn.RNNCellBase, "weight_hh", (None, "hidden_size")),
)
# rows of a recurrent layer's weights for each hidden unit
GATES = {"LSTM": 4, "GRU": 3}
# dimensions of a sample that has no dimension for the batch
ALONE: dict[type[nn.Module], int] = {
    nn.InstanceNorm1d: 2,
    nn.InstanceNorm2d: 3,
    nn.InstanceNorm3d: 4,
}


def declare(module: Any, before: Mapping[str, Any]) -> None:
    """Write the new sizes of a module's tensors into its attributes.

    Args:
        module: the module; those of other libraries are not changed.
        before: its tensors in their sizes before.
    """
    for type_, key, attributes in DECLARED:
        now = getattr(module, key, None)
        if isinstance(module, type_) and isinstance(now, Tensor):
            if isinstance(module, nn.GroupNorm) and module.num_groups > 1:
                module.num_groups = module.num_groups * len(now) // module.num_channels
            for attribute, size in zip(attributes, now.shape, strict=True):
                if attribute is not None and hasattr(module, attribute):
                    setattr(module, attribute, size)
    if isinstance(module, nn.RNNBase):
        recurrent: Any = module.weight_hh_l0
        module.hidden_size = recurrent.shape[0] // GATES.get(module.mode, 1)
        module.proj_size = recurrent.shape[1] if module.proj_size else 0
    if isinstance(module, nn.modules.conv._ConvNd):
        # whole groups are removed
        split = 0 if not module.transposed else 1
        first, second = module.weight.shape[:2]
        module.groups = (
            module.groups * first // before["weight"].shape[0] if module.groups > 1 else 1
        )
        wide = second * module.groups
        module.out_channels, module.in_channels = (first, wide) if split == 0 else (wide, first)


@torch.no_grad()
def declare_norms(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Write the number of channels that norms without tensors meet into their attributes.

    Args:
        model: the model, of which a copy is run.
        args: example inputs.
        kwargs: example inputs by keyword.
    """
    places = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.modules.batchnorm._NormBase)
        and module.weight is None
        and module.running_mean is None
    ]
    if not places:
        return
    twin = safe_deepcopy(model).eval()

    def note(own: Any, module: nn.Module, given: tuple[Any, ...]) -> None:
        alone = ALONE.get(type(module)) == given[0].dim()
        own.num_features = given[0].shape[0 if alone else 1]

    for place in places:
        own = model.get_submodule(place)
        twin.get_submodule(place).register_forward_pre_hook(partial(note, own))
    with quiet():
        twin(*args, **kwargs)


def follow_config(model: Any, cuts: Sequence[Cut]) -> None:
    """Write the new sizes into the configuration of a model that is built from one
    (``type(model)(config)``, as in transformers), so that it can be saved and loaded.

    A number of the configuration is replaced if the model built from it has more tensors of the new
    sizes then.

    Args:
        model: the smaller model.
        cuts: what was removed.
    """
    config: Any = getattr(model, "config", None)
    if not cuts or not hasattr(config, "to_dict"):
        return
    wanted = {name: tensor.shape for name, tensor in tensors_of(model).items()}

    def misfits(**changes: int) -> float:
        other = copy.deepcopy(config)
        try:
            for name, size in changes.items():
                setattr(other, name, size)
            with torch.device("meta"), quiet(), random_kept():
                built = tensors_of(type(model)(other))
        except Exception:  # (numbers that do not go together, or another kind of class)
            return math.inf
        if built.keys() != wanted.keys():
            return math.inf
        return sum(built[name].shape != shape for name, shape in wanted.items())

    pairs = {
        (cut.channels * positions // part, len(cut.kept) * positions // part)
        for cut in cuts
        for positions in {1, *(where.shape[1] for where in cut.slices.values())}
        for part in range(1, positions + 1)
        if positions % part == 0
    }
    options = [
        (name, old, new)
        for name, value in config.to_dict().items()
        for old, new in sorted(pairs, reverse=True)
        if type(value) is int and value == old
    ]
    least = misfits()
    # (twice, because some numbers go together)
    for name, old, new in 2 * options:
        if 0 < least < math.inf and getattr(config, name, None) == old:
            now = misfits(**{name: new})
            if now < least:
                setattr(config, name, new)
                least = now


def check_no_masks(model: nn.Module) -> None:
    """Refuse a model whose weights are computed from masks at each call.

    Raises:
        UnsupportedError: it has masks of ``torch.nn.utils.prune``.
    """
    # (parts come after what they are in)
    names = [name for name, module in model.named_modules() if is_pruned(module)]
    if names:
        raise UnsupportedError(
            f"A weight of {names[-1] or type(model).__name__!r} is computed from a mask of"
            " torch.nn.utils.prune; call prune.remove(module, 'weight') first."
        )
