"""Recomputation by ``torch.utils.checkpoint`` of functions that are not modules.

A recomputed module calls its hooks again, but a method or a closure does not (Hugging Face models
checkpoint the ``forward`` of a layer). So a checkpointed function inside a followed module stores
the call in which it first ran.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import wraps
from typing import Any, Protocol
from unittest.mock import patch

import torch
import torch.utils.checkpoint as torch_checkpoint


class Follower(Protocol):
    """A follower of a forward pass, which knows its position and can resume there later."""

    stack: list[list[Any]]
    calls: dict[str, int]
    handles: list[Any]
    recomputed: int
    """How many checkpointed functions are running, for the first time or again."""
    moment: Callable[[], Callable[[], AbstractContextManager[None]]]
    """Called when a function first runs; returns the maker of contexts of its later runs."""

    def resumed(
        self, name: str, call: int, order: int, calls: Mapping[str, int]
    ) -> AbstractContextManager[None]:
        """Resume a call at a position."""


RUNNING: list[Follower] = []
"""Those that follow a forward now, the outermost first."""


def _remembering(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with the current positions of all followers, which resume
    there when it runs again.
    """
    frames = [
        (sites, (*sites.stack[-1][:3], dict(sites.calls)), sites.moment())
        for sites in RUNNING
        if sites.stack
    ]
    if not frames:
        return function

    @wraps(function, assigned=(), updated=())
    def run(*args: Any, **kwargs: Any) -> Any:
        with ExitStack() as stack:
            for sites, frame, moment in frames:
                stack.callback(setattr, sites, "recomputed", sites.recomputed)
                sites.recomputed += 1
                if not sites.stack and sites.handles:
                    stack.enter_context(moment())
                    stack.enter_context(sites.resumed(*frame))
            return function(*args, **kwargs)

    return run


# private, and not in every version of torch; without it torch itself refuses such recomputation
_GENERATOR = "_checkpoint_without_reentrant_generator"


@contextmanager
def without_recomputation(as_in_training: bool = False) -> Iterator[None]:
    """A context in which checkpointed functions run once and keep their results, so that nothing
    of a model runs again in the backward pass.

    What is recomputed runs with the weights, buffers and hooks that the model has by then: other
    ones than in the forward pass if they were replaced for that pass alone. And reentrant
    checkpointing has no gradients with respect to chosen tensors.

    Args:
        as_in_training: reentrant checkpointing has no gradients if no tensor that enters it has
            one; without this option it has all of them.
    """

    def apply(function: Callable[..., Any], _preserve: bool, *args: Any) -> Any:
        if as_in_training and not _enters_gradient(args):
            with torch.no_grad():
                return function(*args)
        return function(*args)

    def generator(*_: Any, **__: Any) -> Iterator[None]:
        # torch runs the function itself between the two halves of its generator
        yield

    with ExitStack() as stack:
        _replace_reentrant(stack, apply)
        _replace_generator(stack, generator)
        yield


def _enters_gradient(args: tuple[Any, ...]) -> bool:
    """Whether reentrant checkpointing of a function of ``args`` has gradients in training."""
    return any(isinstance(value, torch.Tensor) and value.requires_grad for value in args)


def _replace_reentrant(stack: ExitStack, apply: Callable[..., Any]) -> None:
    """Replace reentrant checkpointing until the stack is closed, by a function of the function, a
    flag, and its arguments.
    """
    reentrant = torch_checkpoint.CheckpointFunction
    stack.enter_context(patch.object(reentrant, "apply", staticmethod(apply)))


def _replace_generator(stack: ExitStack, generator: Callable[..., Any]) -> None:
    """Replace the other checkpointing, where torch has its generator, until the stack is closed."""
    if hasattr(torch_checkpoint, _GENERATOR):
        stack.enter_context(patch.object(torch_checkpoint, _GENERATOR, generator))


_PATCHED = ExitStack()


def start_following(follower: Follower) -> None:
    """Add a follower; the first one patches both kinds of checkpointing, so that
    they store their positions.
    """
    if not RUNNING:
        _patch(_PATCHED)
    RUNNING.append(follower)


def stop_following(follower: Follower) -> None:
    """Remove a follower; the last one restores ``torch.utils.checkpoint``."""
    if follower in RUNNING:
        RUNNING[:] = [other for other in RUNNING if other is not follower]
        if not RUNNING:
            _PATCHED.close()


def _patch(stack: ExitStack) -> None:
    reentrant = torch_checkpoint.CheckpointFunction
    apply = reentrant.apply

    def apply_remembering(function: Callable[..., Any], *args: Any) -> Any:
        return apply(_remembering(function), *args)  # type: ignore[no-untyped-call]

    _replace_reentrant(stack, apply_remembering)
    other = getattr(torch_checkpoint, _GENERATOR, None)
    if other is not None:

        @wraps(other)
        def generator(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            # torch runs the function itself between the two halves of its generator
            inner, following = (
                other(_remembering(fn), *args, **kwargs),
                [sites for sites in RUNNING if sites.stack],
            )
            next(inner)
            for sites in following:
                sites.recomputed += 1
            try:
                yield
            finally:
                for sites in following:
                    sites.recomputed = max(0, sites.recomputed - 1)
            yield from inner

        _replace_generator(stack, generator)


@contextmanager
def never_reentrant() -> Iterator[None]:
    """A context in which reentrant checkpointing is the other one, with the same gradients.

    Reentrant checkpointing has no gradients with respect to chosen tensors: ``autograd.grad``
    raises an error, or leaves out what is checkpointed.

    Example:
        >>> import torch
        >>> w, x = torch.ones(1, requires_grad=True), torch.ones(1, requires_grad=True)
        >>> with never_reentrant():
        ...     y = torch_checkpoint.checkpoint(lambda x: w * x, x, use_reentrant=True)
        >>> torch.autograd.grad(y, w)
        (tensor([1.]),)
    """

    def apply(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
        if not _enters_gradient(args):
            with torch.no_grad():
                return function(*args)
        return torch_checkpoint.checkpoint(
            function, *args, use_reentrant=False, preserve_rng_state=preserve
        )

    with ExitStack() as stack:
        _replace_reentrant(stack, apply)
        yield


__all__ = [
    "RUNNING",
    "never_reentrant",
    "start_following",
    "stop_following",
    "without_recomputation",
]
