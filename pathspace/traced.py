"""Which graph a model was traced to last, so that one who has traced a model need not name its graph again."""

from __future__ import annotations

from typing import TYPE_CHECKING
from weakref import finalize, ref

from torch import nn

from pathspace.errors import InputError

if TYPE_CHECKING:
    from pathspace.reduction import ReductionGraph

# by identity: models may be equal without being the same
_LAST: dict[int, tuple[ref[nn.Module], ReductionGraph]] = {}


def remember(model: nn.Module, graph: ReductionGraph) -> ReductionGraph:
    """Keep ``graph`` for as long as ``model`` lives, or until it is traced again."""
    known = _LAST.get(id(model))
    if known is None or known[0]() is not model:
        finalize(model, _LAST.pop, id(model), None)
    _LAST[id(model)] = ref(model), graph
    return graph


def last_graph(model: nn.Module, asking: str) -> ReductionGraph:
    """The graph of the last :func:`pathspace.trace` of this very object.

    Args:
        model: a traced model (a copy of it has to be traced itself).
        asking: the name of the function that needs the graph.

    Raises:
        InputError: the model was never traced.

    Example:
        >>> import torch, pathspace as ps
        >>> model = torch.nn.Linear(2, 1)
        >>> graph = ps.trace(model, torch.randn(1, 2))
        >>> last_graph(model, "rescale") is graph
        True
    """
    held, found = _LAST.get(id(model), (None, None))
    if held is None or found is None or held() is not model:
        raise InputError(
            f"{asking} found no graph of this {type(model).__name__}, expected a model that was traced before; call "
            f"pathspace.trace(model, *inputs) first, or pass the graph of the model it is a copy of."
        )
    return found
