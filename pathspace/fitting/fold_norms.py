"""Batch norms in evaluation mode, folded into the linear maps before them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.nn.utils.fusion import fuse_conv_bn_weights
from torch.nn.utils.parametrize import is_parametrized

from ..capture.captured import Captured
from ..errors import InputError, expect_arguments
from ..inference.registry import operation_name
from ..models.copies import safe_deepcopy
from ..models.finite import check_finite
from ..models.walk import has_hooks
from .clips import capture_examples, expect_same

# first arguments of all of them: input, weight, bias, running mean, running variance
NORMS = ("aten.batch_norm", "aten._native_batch_norm_legit_no_training", "aten.cudnn_batch_norm")
FOLDING = (
    "a layer does not use its bias, its code reads attributes of its norms, or single precision"
    " cannot represent the scales of its norm; fold by hand"
)


def fold_norms(model: nn.Module, *args: Any, kwargs: Mapping[str, Any] | None = None) -> nn.Module:
    """The same function with batch norms folded into the convolutions and
    linear layers before them.

    ``gamma (W x + b - mean) / sqrt(var + eps) + beta`` is one linear map. A norm is folded where
    its layer's output goes only to it, and both are used once; it becomes an ``nn.Identity``, and
    the layer gets a bias. All others do not change.

    Args:
        model: a module in evaluation mode; it does not change.
        *args: example inputs; without them, images or vectors for the first layer are tried.
        kwargs: example inputs by keyword.

    Returns:
        A copy.

    Raises:
        InputError: no norm can be folded, or example inputs are needed.
        CaptureError: the model fails on these inputs or cannot be captured.
        UnsupportedError: a layer does not use its bias, so the copy would be another function, or
            code reads attributes of its norms.

    Example:
        >>> import torch, pathspace as ps
        >>> from torch.nn import BatchNorm2d, Conv2d, Sequential
        >>> model = Sequential(Conv2d(3, 4, 3, bias=False), BatchNorm2d(4)).eval()
        >>> folded, x = ps.fold_norms(model), torch.randn(2, 3, 8, 8)
        >>> folded[1], torch.allclose(folded(x), model(x), atol=1e-5)
        (Identity(), True)
    """
    expect_arguments("fold_norms", model=model)
    check_finite(model, ())
    captured, args, kwargs = capture_examples("fold_norms", model, args, kwargs)
    pairs = list(_pairs(model, captured))
    if not pairs:
        norms = [module for module in model.modules() if isinstance(module, _BatchNorm)]
        training = sum(module.training for module in norms)
        raise InputError(
            f"fold_norms found {len(norms)} batch norms, {training} of them in training mode, and"
            " none that can be folded: expected one in evaluation mode after a convolution or"
            " linear layer that nothing else reads; call model.eval() first, or do not call"
            " fold_norms."
        )
    result = safe_deepcopy(model)
    for layer, norm in pairs:
        _fold(result.get_submodule(layer), result.get_submodule(norm))
        result.set_submodule(norm, nn.Identity())
    expect_same("fold_norms", model, result, args, kwargs, FOLDING)
    return result


def _pairs(model: nn.Module, captured: Captured) -> Iterator[tuple[str, str]]:
    nodes, sources = captured.graph.graph.nodes, captured.sources
    readers = {sources[node.name][1]: [*node.users] for node in nodes if node.name in sources}
    modules = dict(model.named_modules(remove_duplicate=False))
    times = [id(module) for module in modules.values()]
    # node -> the module all of whose tensors it reads, and no other node
    alone: dict[Any, str] = {}
    for path, module in modules.items():
        if isinstance(module, _BatchNorm | _ConvNd | nn.Linear) and times.count(id(module)) == 1:
            held = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
            own = [f"{path}.{key}" for key, tensor in held if tensor.is_floating_point()]
            users = [readers.get(name, []) for name in own]
            if users and len(users[0]) == 1 and all(each == users[0] for each in users):
                alone[users[0][0]] = path
    for node in nodes:
        source = node.args[0] if node.args else None
        if (
            operation_name(node.target) in NORMS
            and isinstance(source, fx.Node)
            and len(source.users) == 1
            and operation_name(source.target).startswith(("aten.conv", "aten.linear"))
            and {node, source} <= alone.keys()
        ):
            layer, norm = alone[source], alone[node]
            if _foldable(modules[layer], source.meta.get("val"), modules[norm]):
                yield layer, norm


def _foldable(layer: nn.Module, value: Any, norm: nn.Module) -> bool:
    """Whether a norm is a factor and a constant per feature of the layer that made its operand."""
    # (of other dimensions, the channels of a norm are not the features of the layer)
    rank = layer.weight.dim() if isinstance(layer, _ConvNd) else 2
    flat = isinstance(value, Tensor) and value.dim() == rank
    # (computed weights are no parameters, and hooks are left out with their norm)
    flat = flat and not is_parametrized(layer) and not has_hooks(norm)
    # (torch folds no groups of transposed convolutions)
    flat = flat and not (isinstance(layer, _ConvTransposeNd) and layer.groups > 1)
    known = type(norm).forward in (_BatchNorm.forward, nn.SyncBatchNorm.forward)
    known = known and not isinstance(layer, _BatchNorm)
    return flat and known and not norm.training and norm.running_var is not None


@torch.no_grad()
def _fold(layer: Any, norm: Any) -> None:
    mean, var = norm.running_mean.double(), norm.running_var.double()
    turned = isinstance(layer, _ConvTransposeNd)
    weight, bias = fuse_conv_bn_weights(
        layer.weight, layer.bias, mean, var, norm.eps, norm.weight, norm.bias, transpose=turned
    )
    layer.weight.copy_(weight)
    layer.bias = nn.Parameter(bias.detach(), requires_grad=layer.weight.requires_grad)
