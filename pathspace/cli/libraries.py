"""Models of transformers, timm and torchvision as targets.

The architecture is built, with random weights or, above :data:`LARGE` weights, without
numbers: nothing is loaded.
"""

from __future__ import annotations

import importlib
import inspect
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import InputError, did_you_mean, on_one_line
from ..models.values import without_weights
from .errors import say

# models of more weights are built without numbers
LARGE = 30_000_000
PACKAGES = {"torchvision": "torchvision.models"}
BATCH, TOKENS, SIDE, FRAMES = 2, 8, 224, 16

Example = dict[str, Tensor] | Tensor | tuple[Tensor, ...]
Make = Callable[[], nn.Module]


def build_library_model(spec: str) -> tuple[nn.Module, Example | None]:
    """The model that a target names, in evaluation mode, and example inputs, or ``None``."""
    library, _, name = spec.partition(":")
    try:
        package = importlib.import_module(PACKAGES.get(library, library))
    except Exception as error:  # a library built for another torch fails in ways of its own
        raise InputError(
            f"The target '{spec}' needs the package {library}, which cannot be imported ({error});"
            f" install it with pip install {library}, in a version for your torch."
        ) from error
    find, example = _BUILDERS[library]
    make = find(package, name)
    try:
        # (warnings of a library about its own defaults are not for those who name a model)
        with warnings.catch_warnings(action="ignore"):
            model = _made(make)
            return model.eval(), example(model)
    except Exception as error:  # the code of the model may raise anything
        raise InputError(
            f"{library} cannot build the model of '{name}': {_line(error)}; build it in Python"
            " first to see why."
        ) from error


def _made(make: Make) -> nn.Module:
    """The model without numbers, or with them if it is small or runs while it is built."""
    try:
        with without_weights():
            model = make()
    except RuntimeError:
        return make()
    small = sum(parameter.numel() for parameter in model.parameters()) <= LARGE
    return make() if small else model


def _transformers(package: Any, path: str) -> Make:
    file = Path(path) / "config.json" if Path(path).is_dir() else Path(path)
    if not file.is_file():
        raise InputError(
            f"There is no configuration '{path}', expected a config.json or its folder; check the"
            " path."
        )
    try:
        config = package.AutoConfig.from_pretrained(str(file))
    except Exception as error:  # classes of configurations have errors of their own
        raise InputError(
            f"'{path}' is not a configuration of a transformers model: {type(error).__name__}"
            f" ({_line(error)}); expected JSON with the model_type of transformers"
            f" {package.__version__}, or name a function that builds the model, file.py:name."
        ) from error
    kind = _architecture(package, config, path) or package.AutoModel.from_config
    # (a structure has no data type, and parts with their own do not run)
    return lambda: kind(config).float()


def _architecture(package: Any, config: Any, path: str) -> Any:
    """The class of a model that a configuration names; ``None`` where it names none."""
    named = config.architectures or []
    names = [named] if isinstance(named, str) else list(named)
    kinds = [getattr(package, str(name), None) for name in names]
    # (of classes for several models, none is one)
    found = next((kind for kind in kinds if getattr(kind, "config_class", None) is not None), None)
    if names and found is None:
        raise InputError(
            f"'{path}' names the architecture {names[0]!r}, which is not a model of transformers"
            f" {package.__version__}{did_you_mean(str(names[0]), dir(package))}; correct the entry"
            " architectures, or remove it for the model without a head."
        )
    if not names:
        which = f"the {config.model_type} model without a head"
        say("Note", "yellow", f"'{path}' names no architectures: this is {which}.")
    return found


def _inputs(model: Any) -> Example | None:
    """The model's main input, text beside pictures, and a decoder's start; or ``None``."""
    config = model.config
    names = inspect.signature(model.forward).parameters
    main = getattr(model, "main_input_name", "input_ids")
    wanted = [main]
    # (a model whose text has a token in place of a picture also takes text alone)
    alone = any(hasattr(config, f"image_token_{which}") for which in ("id", "index"))
    if {"input_ids", "pixel_values"} <= names.keys() and (main == "pixel_values" or not alone):
        wanted = ["input_ids", "pixel_values"]
    if getattr(config, "is_encoder_decoder", False) and "decoder_input_ids" in names:
        wanted.append("decoder_input_ids")
    made = {name: example for name in wanted if (example := _example(name, config)) is not None}
    return made if len(made) == len(wanted) else None


def _example(name: str, config: Any) -> Tensor | None:
    if name in ("pixel_values", "pixel_values_videos"):
        parts = [getattr(config, part, None) for part in ("vision_config", "encoder")]
        vision = next((part for part in parts if hasattr(part, "image_size")), config)
        side = getattr(vision, "image_size", None) or getattr(vision, "crop_size", None) or SIDE
        height, width = side if isinstance(side, list | tuple) else (side, side)
        frames: int | None = getattr(vision, "num_frames", getattr(vision, "frames_per_clip", None))
        channels = getattr(vision, "num_channels", getattr(vision, "in_chans", 3))
        return torch.randn(BATCH, *(() if frames is None else (frames,)), channels, height, width)
    if name not in ("input_ids", "decoder_input_ids"):
        return None
    words = getattr(config.get_text_config(), "vocab_size", 2)
    return torch.arange(BATCH * TOKENS).reshape(BATCH, TOKENS) % words


def _timm(package: Any, name: str) -> Make:
    # (after a full stop, the data that weights were trained on)
    _known("timm", name, name.partition(".")[0], package.list_models())
    return partial(package.create_model, name, pretrained=False)


def _image(model: Any) -> Tensor:
    return torch.randn(BATCH, *model.default_cfg.get("input_size", (3, SIDE, SIDE)))


def _torchvision(package: Any, name: str) -> Make:
    _known("torchvision", name, name, package.list_models())

    def make() -> Any:
        try:
            return package.get_model(name, weights=None, weights_backbone=None)
        except TypeError:  # (it has no backbone)
            return package.get_model(name, weights=None)

    return make


def _pictures(model: nn.Module) -> tuple[Tensor, ...]:
    if ".video." in type(model).__module__:
        return (torch.randn(BATCH, 3, FRAMES, SIDE, SIDE),)
    parameters = inspect.signature(model.forward).parameters.values()
    needed = sum(each.default is each.empty for each in parameters)
    return tuple(torch.randn(BATCH, 3, SIDE, SIDE) for _ in range(needed))


def _known(library: str, name: str, architecture: str, names: list[str]) -> None:
    if architecture not in names:
        hint = did_you_mean(architecture.rpartition("/")[2], names)
        raise InputError(
            f"{library} has no model '{name}'{hint}; list_models() of {library} lists those that it"
            " has."
        )


def _line(error: BaseException) -> str:
    return on_one_line(str(error.__cause__ or error))


# library -> how a model is found by its name, and the example inputs of one
_BUILDERS: dict[str, tuple[Callable[[Any, str], Make], Callable[[Any], Example | None]]] = {
    "timm": (_timm, _image),
    "torchvision": (_torchvision, _pictures),
    "transformers": (_transformers, _inputs),
}

LIBRARIES = tuple(_BUILDERS)
