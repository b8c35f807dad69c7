"""``torch.utils.checkpoint`` without recomputation: what it checkpoints runs once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.utils.checkpoint as torch_checkpoint
from torch import Tensor

from .patched_attributes import replaced

# private, and not in every version of torch; without it torch itself refuses such recomputation
GENERATOR = "_checkpoint_without_reentrant_generator"


@contextmanager
def never_recomputed(as_in_training: bool = False) -> Iterator[None]:
    """A context in which checkpointed functions run once and keep their results, so that nothing
    of a model runs again in the backward pass.

    What is recomputed runs with the weights, buffers and hooks that the model has by then: other
    ones than in the forward pass if they were replaced for that pass alone. And reentrant
    checkpointing has no gradients with respect to chosen tensors.

    Args:
        as_in_training: reentrant checkpointing has no gradients if no tensor that enters it has
            one; without this option it has all of them.

    Example:
        >>> import torch
        >>> w, x = torch.ones(1, requires_grad=True), torch.ones(1)
        >>> with never_recomputed():
        ...     y = torch_checkpoint.checkpoint(lambda x: w * x, x, use_reentrant=True)
        >>> torch.autograd.grad(y, w)
        (tensor([1.]),)
    """

    def apply(function: Callable[..., Any], _preserve: bool, *args: Any) -> Any:
        if as_in_training and not enters_gradient(args):
            with torch.no_grad():
                return function(*args)
        return function(*args)

    def generator(*_: Any, **__: Any) -> Iterator[None]:
        # torch runs the function itself between the two halves of its generator
        yield

    with ExitStack() as stack:
        replace_reentrant(stack, apply)
        if hasattr(torch_checkpoint, GENERATOR):
            stack.enter_context(replaced((torch_checkpoint, GENERATOR, generator)))
        yield


def enters_gradient(args: tuple[Any, ...]) -> bool:
    """Whether reentrant checkpointing of a function of ``args`` has gradients in training."""
    return any(isinstance(value, Tensor) and value.requires_grad for value in args)


def replace_reentrant(stack: ExitStack, apply: Callable[..., Any]) -> None:
    """Replace reentrant checkpointing until the stack is closed.

    Args:
        stack: what restores it.
        apply: called with the function, a flag and the arguments of the function.
    """
    reentrant = torch_checkpoint.CheckpointFunction
    stack.enter_context(replaced((reentrant, "apply", staticmethod(apply))))
