"""Cross-layer equalisation by the AIMET toolkit, for the comparison in `benchmarks/equalise.py`.

It needs an environment of its own: `pip install aimet-torch` beside torch and the packages in
`trained.txt`, then `python -m benchmarks.equalise aimet` from `tests/`.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn


def equalised(model: nn.Module, x: Tensor, relu: bool) -> nn.Module:
    """A copy with batch norms folded and layers equalised by the toolkit.

    Args:
        model: a trained network.
        x: an example input.
        relu: replace ReLU6 by ReLU first. The toolkit did so up to release 2.3; since then it
            leaves the layers around a ReLU6 as they are.
    """
    _without_operators()
    from aimet_torch.cross_layer_equalization import equalize_model

    net = copy.deepcopy(model)
    for module in list(net.modules()) if relu else []:
        for name, child in module.named_children():
            if isinstance(child, nn.ReLU6):
                setattr(module, name, nn.ReLU())
    with torch.enable_grad():
        equalize_model(net, dummy_input=x)
    return net


def _without_operators() -> None:
    """Let torchvision, which the toolkit imports and does not use here, load beside a torch
    that it was not built for.

    Its package index has no build for processors alone; the declarations of two operators
    are all that is missing.
    """
    try:
        torch.ops.torchvision.nms  # noqa: B018
    except AttributeError:
        library = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        # (the declarations live as long as the object)
        globals()["_library"] = library
