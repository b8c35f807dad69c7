"""Recomputation by ``torch.utils.checkpoint``, followed where it runs a function rather than a module.

A module that is recomputed calls its hooks again. A method or a closure does not (Hugging Face models checkpoint the
``forward`` of a layer), so what is checkpointed inside a followed module remembers in which call it began.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch.utils.checkpoint as torch_checkpoint

if TYPE_CHECKING:
    from pathspace.diagnostics.addition_hooks import Sites

RUNNING: list[Sites] = []
"""Those that follow a forward now, the outermost first."""


def _remembering(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, which when it is run later stands where it stands now."""
    frames = [(sites, tuple(sites.stack[-1][:3])) for sites in RUNNING if sites.stack]
    if not frames:
        return function

    @wraps(function, assigned=(), updated=())
    def run(*args: Any, **kwargs: Any) -> Any:
        with ExitStack() as stack:
            for sites, frame in frames:
                if not sites.stack and sites.handles:
                    stack.enter_context(sites.resumed(*frame))
            return function(*args, **kwargs)

    return run


def track_recomputation() -> None:
    """Let both kinds of checkpointing remember; without a followed model running they are as they were."""
    if hasattr(torch_checkpoint, "_pathspace_follows"):
        return
    torch_checkpoint._pathspace_follows = True  # type: ignore[attr-defined]
    reentrant = torch_checkpoint.CheckpointFunction
    apply = reentrant.apply
    # private, and not in every version of torch; without it such recomputation is refused by torch itself
    other = getattr(torch_checkpoint, "_checkpoint_without_reentrant_generator", None)

    def apply_remembering(function: Callable[..., Any], *args: Any) -> Any:
        return apply(_remembering(function), *args)

    reentrant.apply = staticmethod(apply_remembering)  # type: ignore[method-assign, assignment]
    if other is not None:

        @wraps(other)
        def generator(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            return other(_remembering(fn), *args, **kwargs)

        torch_checkpoint._checkpoint_without_reentrant_generator = generator


__all__ = ["RUNNING", "track_recomputation"]
