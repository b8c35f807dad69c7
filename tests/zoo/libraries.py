"""Models of torchvision and timm, where these libraries are installed:
classification models, random weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from zoo.entry import Entry

# a batch of two has only +-1 after a batch norm on single pixels, where
# gradients vanish up to rounding
BATCH = 4
SIZES = {
    "huge": 9,
    "giant": 9,
    "xlarge": 8,
    "large": 7,
    "_l": 5,
    "base": 4,
    "_b": 2,
    "small": 1,
    "tiny": -2,
    "nano": -3,
    "pico": -3,
    "femto": -3,
    "atto": -4,
    "_xs": -2,
    "_s": -1,
    "_t": -1,
    "18": -3,
    "26": -1,
    "152": 4,
    "101": 3,
    "200": 4,
    "384": 3,
    "448": 3,
    "512": 3,
    "256": 1,
}


def torchvision_models() -> Iterator[Entry]:
    """All classification models."""
    import torchvision
    from torchvision.models import get_model, list_models

    for name in list_models(module=torchvision.models):

        def build(
            name: str = name, size: int = 299 if name == "inception_v3" else 224
        ) -> tuple[Any, ...]:
            options = {"init_weights": False} if name in ("googlenet", "inception_v3") else {}
            return get_model(name, weights=None, **options), torch.randn(BATCH, 3, size, size)

        fixed = name.startswith(("vit", "maxvit", "swin", "inception"))
        small = None if fixed else partial(build, size=64)
        yield Entry(name, "torchvision", build, small=small)


def timm_models() -> Iterator[Entry]:
    """One or two models of every family (module), small ones by their names."""
    import timm

    def weight(name: str) -> tuple[int, int, str]:
        return sum(value for key, value in SIZES.items() if key in name), len(name), name

    for module in sorted(timm.list_modules()):
        names = sorted(timm.list_models(module=module), key=weight)
        for name in [*names[:1], *names[len(names) // 3 : len(names) // 3 + (len(names) > 6)]]:

            def build(name: str = name) -> tuple[Any, ...]:
                model = timm.create_model(name, pretrained=False)
                return model, torch.randn(BATCH, *model.default_cfg["input_size"])

            yield Entry(name, "timm", build)


LIBRARIES = {"torchvision": torchvision_models, "timm": timm_models}
