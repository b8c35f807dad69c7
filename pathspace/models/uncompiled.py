"""Operations that hold functions, run as they are written: what torch compiles while operations are
recorded fails from then on.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from .patched_attributes import replaced

_SCAN, _RUN = "torch._higher_order_ops.scan", "_maybe_compile_and_run_fn"


@contextmanager
def as_written() -> Iterator[None]:
    """Nothing is compiled; ``scan`` is a loop (without its compiler torch's own returns its
    results as a list, in another form than the function's).
    """
    with ExitStack() as stack:
        # (a model with such operations has been captured by now, which has imported the compiler)
        if "torch._dynamo" in sys.modules:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        if hasattr(sys.modules.get(_SCAN), _RUN):
            stack.enter_context(replaced((sys.modules[_SCAN], _RUN, _loop)))
        yield


def _loop(
    _: Callable[..., Any],
    step: Callable[..., tuple[Any, Any]],
    state: Sequence[Tensor],
    sequences: Sequence[Tensor],
) -> tuple[Any, Any]:
    """The last state, and the stacked outputs of all steps."""
    passed: Any = list(state)
    outputs = []
    for number in range(len(sequences[0])):
        parts = [sequence[number] for sequence in sequences]
        passed, output = step(*pytree.tree_leaves(passed), *parts)
        outputs.append(output)
    return passed, pytree.tree_map(lambda *parts: torch.stack(parts), *outputs)
