"""Models of libraries as targets: ``transformers:path/to/config.json``, ``timm:NAME``, ``torchvision:NAME``.

The architecture is built, with random weights or, above :data:`LARGE` weights, without numbers: nothing is loaded.
"""

from __future__ import annotations

import difflib
import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pathspace.errors import InputError
from pathspace.without_values import without_weights

# models of more weights are built without numbers
LARGE = 30_000_000
BATCH, TOKENS, SAMPLES, SIDE = 2, 8, 16_000, 224

Example = dict[str, Tensor] | Tensor


def is_library(spec: str) -> bool:
    """Whether a target names a model of a library.

    Example:
        >>> is_library("timm:resnet50"), is_library("nets:net")
        (True, False)
    """
    return spec.partition(":")[0] in _BUILDERS


def build(spec: str) -> tuple[nn.Module, Example]:
    """The model that a target names, in evaluation mode, and example inputs.

    Args:
        spec: ``transformers:`` and the path of a configuration, ``timm:`` or ``torchvision:`` and a name.

    Returns:
        The model, without numbers in its parameters where there are more than :data:`LARGE`, and its inputs.

    Raises:
        InputError: the library is not installed, or knows no such model.
    """
    library, _, name = spec.partition(":")
    try:
        package = importlib.import_module("torchvision.models" if library == "torchvision" else library)
    except Exception as error:  # a library built for another torch fails in ways of its own
        raise InputError(
            f"The target '{spec}' needs the package {library}, which cannot be imported ({error}); install it with "
            f"pip install {library}, in a version for your torch."
        ) from error
    make = _BUILDERS[library](package, name)
    with without_weights():
        model, example = make()
    if sum(parameter.numel() for parameter in model.parameters()) <= LARGE:
        model, example = make()
    return model.eval(), example


def _transformers(package: Any, path: str) -> Callable[[], tuple[nn.Module, Example]]:
    file = Path(path) / "config.json" if Path(path).is_dir() else Path(path)
    if not file.is_file():
        raise InputError(f"There is no configuration '{path}', expected a config.json or its folder; check the path.")
    try:
        entries = json.loads(file.read_text(encoding="utf-8"))
        config = package.AutoConfig.for_model(entries.pop("model_type"), **entries)
    except KeyError as error:
        raise InputError(f"'{path}' has no model_type {error}, expected that of a transformers model.") from error
    except Exception as error:  # classes of configurations have errors of their own
        raise InputError(f"'{path}' is not a configuration of a transformers model: {_line(error)}.") from error
    kind = next((getattr(package, each) for each in config.architectures or () if hasattr(package, each)), None)

    def make() -> tuple[nn.Module, Example]:
        try:
            model = package.AutoModel.from_config(config) if kind is None else kind(config)
        except Exception as error:  # the code of the model may raise anything
            raise InputError(f"transformers cannot build the model of '{path}': {_line(error)}.") from error
        return model, _inputs(model, config)

    return make


def _inputs(model: Any, config: Any) -> Example:
    """Tokens, pixels or sound, by the name of the model's main input."""
    text = config.get_text_config()
    main = getattr(model, "main_input_name", "input_ids")
    tokens = torch.arange(BATCH * TOKENS).reshape(BATCH, TOKENS) % getattr(text, "vocab_size", 2)
    found: dict[str, Tensor] = {}
    if main in ("pixel_values", "pixel_values_videos"):
        vision = getattr(config, "vision_config", config)
        side = getattr(vision, "image_size", None) or SIDE
        height, width = side if isinstance(side, list | tuple) else (side, side)
        found[main] = torch.randn(BATCH, getattr(vision, "num_channels", 3), height, width)
        if hasattr(config, "text_config"):
            found["input_ids"] = tokens
    elif main == "input_features":
        bins = getattr(config, "num_mel_bins", getattr(config, "feature_size", 80))
        found[main] = torch.randn(BATCH, bins, 2 * getattr(config, "max_source_positions", 8))
    elif main == "input_values":
        found[main] = torch.randn(BATCH, SAMPLES)
    else:
        found[main] = tokens
    if getattr(config, "is_encoder_decoder", False):
        found["decoder_input_ids"] = tokens
    return found


def _timm(package: Any, name: str) -> Callable[[], tuple[nn.Module, Example]]:
    _known("timm", name, package.list_models())

    def make() -> tuple[nn.Module, Example]:
        model = package.create_model(name, pretrained=False)
        return model, torch.randn(BATCH, *model.default_cfg.get("input_size", (3, SIDE, SIDE)))

    return make


def _torchvision(package: Any, name: str) -> Callable[[], tuple[nn.Module, Example]]:
    _known("torchvision", name, package.list_models())

    def make() -> tuple[nn.Module, Example]:
        plain = {"weights": None, "weights_backbone": None} if "_" in name else {"weights": None}
        try:
            model = package.get_model(name, **plain)
        except TypeError:
            model = package.get_model(name, weights=None)
        return model, torch.randn(BATCH, 3, SIDE, SIDE)

    return make


def _known(library: str, name: str, names: list[str]) -> None:
    if name not in names:
        near = difflib.get_close_matches(name, names, n=1)
        hint = f"did you mean '{near[0]}'?" if near else f"{library} lists its models with list_models()."
        raise InputError(f"{library} has no model '{name}'; {hint}")


def _line(error: BaseException) -> str:
    text = " ".join(str(error.__cause__ or error).split()).rstrip(".")
    return text if len(text) <= 240 else text[:240].rsplit(" ", 1)[0] + " ..."


_BUILDERS: dict[str, Callable[[Any, str], Callable[[], tuple[nn.Module, Example]]]] = {
    "timm": _timm,
    "torchvision": _torchvision,
    "transformers": _transformers,
}

__all__ = ["LARGE", "build", "is_library"]
