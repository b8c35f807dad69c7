"""Calls of a model, of its loss and of its backward pass, whose errors are one sentence each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from pathspace.errors import (
    CaptureError,
    InputError,
    InputTypeError,
    PathspaceError,
    UnsupportedError,
    first_line,
)
from pathspace.models.inputs import arranged, check_inputs, describe_inputs
from pathspace.models.nested import leaves
from pathspace.models.refusals import failed_run, no_derivative

from .real_tensors import is_real


def main_output(model: nn.Module, result: Any) -> Tensor:
    """The first floating-point tensor of a model's output.

    Raises:
        CaptureError: there is none, or it has no gradient.
    """
    values = result.values() if isinstance(result, Mapping) else [result]
    for value in leaves(list(values)):
        if is_real(value):
            if not value.requires_grad:
                raise CaptureError(
                    f"The output of {type(model).__name__} does not depend differentiably on its"
                    " inputs or parameters; remove no_grad() or detach() from its forward."
                )
            return value
    raise CaptureError(
        f"{type(model).__name__} returned no floating-point tensor; diagnostics need one."
    )


def pairs_of(owner: str, batches: Any) -> Iterator[tuple[Any, Any]]:
    """The batches, one after the other.

    Raises:
        InputTypeError: one is not a pair of inputs and targets.
    """
    try:
        each = iter(batches)
    except TypeError:
        each = None
    if each is None or isinstance(batches, Tensor | str | Mapping):
        raise InputTypeError(
            f"{owner} found {type(batches).__name__} in the place of batches, expected pairs"
            " (inputs, targets); pass a list of them, or a data loader."
        )
    for batch in each:
        if not isinstance(batch, tuple | list) or len(batch) != 2:
            size = f" of {len(batch)}" if isinstance(batch, tuple | list) else ""
            raise InputTypeError(
                f"{owner} found a batch that is a {type(batch).__name__}{size}, expected a pair"
                " (inputs, targets)."
            )
        yield batch[0], batch[1]


def call(model: nn.Module, inputs: Any) -> Any:
    """``model(inputs)``, ``model(*inputs)`` for a tuple or list,
    ``model(**inputs)`` for a mapping.

    Raises:
        CaptureError: the model raises an error on these inputs.
    """
    args, kwargs = arguments(model, inputs)
    check_inputs(model, args, kwargs)
    return called(model, args, kwargs)


def arguments(model: nn.Module, inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The positional and the keyword inputs in a batch of :func:`call`."""
    if isinstance(inputs, tuple | list):
        return arranged(model, inputs)
    return ((), dict(inputs)) if hasattr(inputs, "keys") else ((inputs,), {})


def called(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """``model(*args, **kwargs)``.

    Raises:
        CaptureError: the model raises an error on these inputs.
    """
    try:
        return model(*args, **kwargs)
    except PathspaceError:
        raise
    except Exception as error:
        raise failed_run(model, args, kwargs, error) from error


def lost(loss: Callable[[Any, Any], Any], outputs: Any, targets: Any) -> Tensor:
    """``loss(outputs, targets)``.

    Raises:
        InputError: the loss raises an error, or returns no tensor.
    """
    try:
        value = loss(outputs, targets)
    except PathspaceError:
        raise
    except Exception as error:
        raise InputError(
            f"The loss raised {type(error).__name__} on outputs and targets"
            f" ({describe_inputs((outputs, targets), {})}): {first_line(error)}; check that it"
            " takes what the model returns, and that the targets fit."
        ) from error
    if not isinstance(value, Tensor):
        raise InputError(
            f"The loss returned a {type(value).__name__}, expected a tensor with a gradient; let it"
            " return the number as a tensor."
        )
    return value


@contextmanager
def differentiating(model: nn.Module) -> Iterator[None]:
    """Replace errors of the backward pass by one sentence."""
    try:
        yield
    except PathspaceError:
        raise
    except Exception as error:
        kept = "second time" in str(error)
        advice = "a model that keeps results between runs must drop them, and must be built again"
        raise UnsupportedError(
            f"{type(model).__name__} cannot be differentiated: {no_derivative(error)}"
            f"{f'; {advice}' if kept else '; call its backward pass by itself to see why'}."
        ) from error


@contextmanager
def float64_errors_explained(model: nn.Module) -> Iterator[None]:
    """Replace errors of a model in float64, which some of torch's kernels do not
    support, by one sentence.
    """
    try:
        yield
    except PathspaceError:
        raise
    except Exception as error:
        raise CaptureError(
            f"{type(model).__name__} raised {type(error).__name__} in float64, which this"
            f" diagnostic needs: {first_line(error)}; use an implementation of that operation with"
            " float64."
        ) from error
