"""Sizes of tensors that torch's own modules, and configurations, store as numbers."""

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

NORM, CONV = nn.modules.batchnorm._NormBase, nn.modules.conv._ConvNd
TRANSPOSED = nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d
# module, tensor -> attributes in proportion to the sizes of the tensor's dimensions
SIZES: Sequence[tuple[Any, str, tuple[str, ...]]] = (
    (nn.Linear, "weight", ("out_features", "in_features")),
    (nn.Bilinear, "weight", ("out_features", "in1_features", "in2_features")),
    (nn.Embedding | nn.EmbeddingBag, "weight", ("num_embeddings", "embedding_dim")),
    (NORM, "running_mean", ("num_features",)),
    (NORM, "weight", ("num_features",)),
    (nn.GroupNorm, "weight", ("num_channels",)),
    (nn.GroupNorm, "weight", ("num_groups",)),
    (nn.PReLU, "weight", ("num_parameters",)),
    (CONV, "weight", ("out_channels", "in_channels")),
    (TRANSPOSED, "weight", ("in_channels", "out_channels")),
    (nn.RNNBase, "weight_ih_l0", ("", "input_size")),
    (nn.RNNBase, "weight_hh_l0", ("hidden_size", "proj_size")),
    (nn.RNNCellBase, "weight_ih", ("", "input_size")),
    (nn.RNNCellBase, "weight_hh", ("", "hidden_size")),
)
# dimensions of a sample that has no dimension for the batch
ALONE: Mapping[type[nn.Module], int] = {
    nn.InstanceNorm1d: 2,
    nn.InstanceNorm2d: 3,
    nn.InstanceNorm3d: 4,
}


def declare(module: Any, before: Mapping[str, Any]) -> None:
    """Write the new sizes of a module's tensors into its attributes, if it is one of torch's."""
    new = {}
    for kind, key, attributes in SIZES:
        now = getattr(module, key, None)
        if isinstance(module, kind) and isinstance(now, Tensor):
            for name, size, old in zip(attributes, now.shape, before[key].shape, strict=False):
                if hasattr(module, name):
                    new[name] = getattr(module, name) * size // old
    if isinstance(module, CONV) and module.groups > 1:
        # (whole groups are removed, and the second dimension is that of one group)
        second = "out_channels" if module.transposed else "in_channels"
        for name in ("groups", second):
            value = new.get(name, module.groups)
            new[name] = value * module.weight.shape[0] // before["weight"].shape[0]
    if isinstance(module, nn.LayerNorm | nn.RMSNorm):
        new["normalized_shape"] = tuple(module.weight.shape)
    for name, size in new.items():
        setattr(module, name, size)


@torch.no_grad()
def declare_norms(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Write the number of channels that norms without tensors meet into their attributes."""
    norms = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, NORM) and module.weight is None and module.running_mean is None
    }
    if not norms:
        return
    twin = safe_deepcopy(model).eval()

    def note(own: Any, module: nn.Module, given: tuple[Any, ...]) -> None:
        alone = ALONE.get(type(module)) == given[0].dim()
        own.num_features = given[0].shape[0 if alone else 1]

    for name, own in norms.items():
        twin.get_submodule(name).register_forward_pre_hook(partial(note, own))
    with quiet():
        twin(*args, **kwargs)


def follow_config(model: Any, cuts: Sequence[Cut]) -> None:
    """Write the new sizes into the configuration of a model that is built from one
    (``type(model)(config)``, as in transformers), so that it can be saved and loaded.

    A number of the configuration is replaced if the model built from it has more tensors of the new
    sizes then.
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
        differ = sum(built[name].shape != wanted[name] for name in built.keys() & wanted.keys())
        return differ if built.keys() == wanted.keys() else math.inf

    options = dict.fromkeys(
        (name, value, cut.per_channel(value) * len(cut.kept))
        for name, value in config.to_dict().items()
        for cut in cuts
        if cut.per_channel(value)
    )
    least = misfits()
    # (twice, because some numbers go together)
    for name, old, new in (*options, *options):
        if 0 < least < math.inf and getattr(config, name, None) == old:
            now = misfits(**{name: new})
            if now < least:
                setattr(config, name, new)
                least = now


def check_no_masks(model: nn.Module) -> None:
    """Refuse a model whose weights are computed from masks at each call."""
    # (parts come after what they are in)
    names = [name for name, module in model.named_modules() if is_pruned(module)]
    if names:
        raise UnsupportedError(
            f"A weight of {names[-1] or type(model).__name__!r} is computed from a mask of"
            " torch.nn.utils.prune; call prune.remove(module, 'weight') first."
        )
