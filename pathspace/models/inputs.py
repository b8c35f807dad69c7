"""Example inputs in their usual forms: tensors, outputs of tokenizers, dictionaries, objects."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import InputError, InputTypeError
from .nested import is_plain, leaves, mapped
from .values import has_values

# inputs of a list that are described
MOST_SHOWN = 4
# made-up batches where none are given
SAMPLES = 4
# positional inputs, and inputs by keyword
Inputs = tuple[tuple[Any, ...], dict[str, Any]]


def arranged(model: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None) -> Inputs:
    """Inputs as ``forward`` takes them: a mapping alone can stand for its keywords."""
    if kwargs is not None and not _by_name(kwargs):
        raise InputTypeError(
            f"kwargs is of type {type(kwargs).__name__}, expected a mapping from the names of"
            " inputs to inputs, such as kwargs=tokenizer(text, return_tensors='pt')."
        )
    args, named = tuple(args), dict(kwargs or {})
    alone = len(args) == 1 and not named and _by_name(args[0]) and len(args[0])
    return ((), dict(args[0])) if alone and takes(model, list(args[0])) else (args, named)


def _by_name(value: Any) -> bool:
    """Whether a value is a mapping from names."""
    held = isinstance(value, Mapping) or (hasattr(value, "keys") and hasattr(value, "__getitem__"))
    return held and all(isinstance(key, str) for key in value.keys())  # noqa: SIM118 (not every mapping iterates)


def describe_inputs(values: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """A short account of example inputs: shapes and dtypes."""

    def one(value: Any) -> str:
        if isinstance(value, torch.Tensor):
            shape = "x".join(map(str, value.shape)) or "scalar"
            return f"{shape}:{str(value.dtype).removeprefix('torch.')}"
        if type(value) in (list, tuple):
            shown = [one(part) for part in value[:MOST_SHOWN]] + ["..."] * (len(value) > MOST_SHOWN)
            return f"[{', '.join(shown)}]"
        simple = isinstance(value, bool | int | float | str | None)
        return repr(value) if simple else type(value).__name__

    parts = [*map(one, values), *(f"{key}={one(value)}" for key, value in kwargs.items())]
    return ", ".join(parts) or "no inputs"


def mistaken_input(args: Sequence[Any]) -> str:
    """What a model that failed was given in place of tensors, and what to do; or ``""``."""
    given = args[0] if len(args) == 1 else None
    if isinstance(given, tuple | list) and given:
        if all(type(size) is int for size in given):
            shape = ", ".join(map(str, given))
            return f"the shape ({shape}) in place of an input; pass torch.randn({shape})"
        if all(isinstance(value, Tensor) for value in given):
            return f"a {type(given).__name__} of tensors; pass the tensors one by one"
    return ""


def is_empty(inputs: Any) -> bool:
    """Whether there are tensors, none of which has an entry."""
    tensors = [leaf for leaf in leaves(inputs) if isinstance(leaf, Tensor)]
    return bool(tensors) and not any(tensor.numel() for tensor in tensors)


def check_inputs(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Refuse inputs of another kind or without samples."""
    name = type(model).__name__
    for value in (*args, *kwargs.values()):
        if type(value).__module__ == "numpy" and hasattr(value, "__array__"):
            raise InputError(
                f"{name} was given a numpy array, expected tensors; convert it with"
                " torch.from_numpy, and let the model take a tensor."
            )
    if is_empty((args, kwargs)):
        raise InputError(
            f"{name} was given inputs with no samples ({describe_inputs(args, kwargs)}), expected"
            " at least one; pass a batch that is not empty."
        )


def ordinary(inputs: Any) -> Any:
    """Inputs that autograd can follow; those without values become zeros."""

    def one(tensor: Tensor) -> Tensor:
        if not has_values(tensor):
            return torch.zeros(tensor.shape, dtype=tensor.dtype)
        return tensor.clone() if tensor.is_inference() else tensor

    tensors = [leaf for leaf in leaves(inputs) if isinstance(leaf, Tensor)]
    return mapped(one, inputs) if any(one(tensor) is not tensor for tensor in tensors) else inputs


def opened(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Tensor, ...] | None:
    """Let a stand-in take its inputs as tensors alone, where they come in objects that torch does
    not know: the tensors to call it with, or ``None`` where the inputs can be passed as they are.
    """
    if is_plain((args, kwargs)):
        return None
    forward = model.forward
    # (a tensor that is met twice is one input)
    tensors = list({id(leaf): leaf for leaf in leaves((args, kwargs))}.values())
    place = {id(tensor): number for number, tensor in enumerate(tensors)}

    def restored(_module: nn.Module, given: tuple[Any, ...], _named: dict[str, Any]) -> Any:
        return mapped(lambda tensor: given[place[id(tensor)]], (args, dict(kwargs)))

    def taking(*given: Any, **named: Any) -> Any:
        return forward(*given, **named)

    # hooks of the model's own see its inputs as they are
    model.register_forward_pre_hook(restored, prepend=True, with_kwargs=True)
    model.forward = taking
    return tuple(tensors)


def batch_inputs(batch: Any) -> Inputs:
    """The positional and the keyword inputs of a batch."""
    if isinstance(batch, list | tuple):
        return tuple(batch), {}
    if hasattr(batch, "keys") and not isinstance(batch, Tensor):
        return (), dict(batch)
    return (batch,), {}


def takes(model: nn.Module, names: Sequence[str]) -> bool:
    """Whether ``forward`` can be called with inputs of these names."""
    try:
        inspect.signature(model.forward).bind(**dict.fromkeys(names))
    except (TypeError, ValueError):
        return False
    return True


def made_up(model: nn.Module, examples: Mapping[str, Any]) -> list[Any]:
    """Random inputs like examples: normal numbers, and whole ones that every embedding has."""
    if not examples or not all(isinstance(value, Tensor) for value in examples.values()):
        raise InputError(
            f"No random inputs can be made for {type(model).__name__}, expected calibration"
            " batches; pass some."
        )
    generator = torch.Generator().manual_seed(0)
    sizes = (part.num_embeddings for part in model.modules() if isinstance(part, nn.Embedding))
    most = min(sizes, default=2)

    def drawn(value: Tensor) -> Tensor:
        shape = tuple(value.shape)
        if value.is_floating_point():
            return torch.randn(shape, generator=generator).to(value.dtype)
        return torch.randint(0, most, shape, generator=generator).to(value.dtype)

    by_name = takes(model, list(examples))
    batches = [{name: drawn(value) for name, value in examples.items()} for _ in range(SAMPLES)]
    return [batch if by_name else tuple(batch.values()) for batch in batches]
