"""An independent checker of proof documents: it imports nothing from this library and
computes every count again.

The argument that it checks, in time linear in the number of ids in the document:

* *Upper bound.* A gauge transformation changes the logarithm of weight ``e`` by ``phi(head e) -
  phi(tail e)``: an integer row per edge. In the order of the tree ``T_in``, the rows of its edges
  are triangular with ``+-1`` on the diagonal, so the ``H`` generators are independent; every closed
  walk is orthogonal to all of them, hence ``rank <= m - H``.
* *Lower bound.* Every edge in neither tree occurs in exactly one basis path, once. The edges in
  both trees are a forest, which connects units to chains; exactly one edge of ``T_in`` outside
  ``T_out`` enters each chain without the root. Without the columns of ``T_out`` the basis is
  therefore triangular, and its ``m - H`` paths are independent.
* *The model.* If its tensors are given, their shapes are compared, and tree weights must not be
  0. If the model and a batch are given, the document must list all of its parameters. A copy is
  changed in two ways: scalars listed as unused are redrawn, and all weights are rescaled by
  random combinations of all generators, by powers of two, which need no rounding. The outputs
  must not change. This is repeated with other parameters, running statistics and inputs, which
  the checker draws itself, until every listed weight has had a visible effect several times; it
  says which did not. So the outputs depend on at most ``m - H`` independent values of the listed
  weights. The checker does not search for symmetries outside the document.
* *Spaces of features*, if the document lists any: see :mod:`pathspace.checker.spaces`. Without the
  model nothing is known of them but their dimensions.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .document import STATEMENT, Rejected, is_bare, read_document, read_tensors, require
from .spaces import check_places, read_spaces
from .trees import compare_tensors, count

__all__ = ["STATEMENT", "Judgement", "check"]


@dataclass(frozen=True)
class Judgement:
    """The result of the checker.

    Attributes:
        accepted: whether the document proves its statement (and fits the model, if one is given).
        reason: why not, or why outputs could not be compared (all 0,
            integers, no values); else empty.
        weights: ``m`` as counted by the checker.
        units: ``H``.
        dimension: ``m - H``, the proven dimension of the graph in the document; ``None`` if
            rejected. If outputs were compared, they depend on at most this number of independent
            values of the listed weights.
        compared: what the document was compared with: ``"nothing"``, ``"shapes"`` (of tensors
            without values), ``"tensors"`` or ``"outputs"``.
        seconds: elapsed time.
        unseen: what of the model had no visible effect in any run, in words: a false statement
            about these weights would not have been noticed.
        spaces: dimension of the groups of all spaces of features in the document, ``None`` if no
            outputs were compared, or it lists none.
    """

    accepted: bool
    reason: str
    weights: int
    units: int
    dimension: int | None
    compared: str
    seconds: float
    unseen: tuple[str, ...] = ()
    spaces: int | None = None


def check(
    document: Mapping[str, Any] | str | Path,
    tensors: Mapping[str, Any] | None = None,
    model: Any = None,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    tolerance: float = 1e-6,
) -> Judgement:
    """Accept or reject a proof document.

    Args:
        document: the document, or the path of its file.
        tensors: name -> array or tensor, checked one by one: shapes must be those of the
            document, and tree weights must not be zero. A module can be given for its tensors or,
            with inputs, for ``model``.
        model: a ``torch.nn.Module`` to rescale, on a copy.
        args: example inputs of the model.
        kwargs: example inputs by keyword.
        tolerance: largest relative change of the outputs that counts as rounding.

    Returns:
        The judgement. A malformed document, a file that cannot be read and a model that fails on
        its inputs are rejected; they do not raise an error.

    Example:
        >>> check({"format": "pathspace-proof"}).reason
        "the document lacks 'version'"
    """
    start = time.perf_counter()
    weights = units = 0
    accepted, compared, reason, unseen = False, "nothing", "", list[str]()
    moved: int | None = None
    try:
        loaded = read_document(document)
        blocks = list(read_tensors(loaded))
        weights, units = sum(block.edges for block in blocks), loaded["units"]
        count(loaded, blocks, weights, units)
        spaces, ties = read_spaces(loaded)
        tensors, model = _compared(tensors, model, bool(args or kwargs))
        if model is not None and any(map(is_bare, model.parameters())):
            reason = "the model has no numbers, so only shapes were compared"
            tensors, model = dict(model.named_parameters(remove_duplicate=False)), None
        if tensors is not None:
            compared = "shapes" if any(map(is_bare, tensors.values())) else "tensors"
            compare_tensors(loaded, blocks, tensors)
            check_places(spaces, tensors, ties)
        if model is not None:
            # (without a model, torch is not imported)
            from .bases import rotate_copy
            from .outputs import rescale_copy

            compared = "outputs"
            given = (model, args, kwargs or {}, tolerance)
            reason, unseen = rescale_copy(loaded, blocks, *given)
            if spaces and not reason:
                reason = rotate_copy(spaces, ties, *given)
            compared = "tensors" if reason else compared
        if spaces and compared == "outputs":
            moved = sum(space.dimension for space in spaces)
        elif spaces:
            unseen = [*unseen, f"what the groups of {len(spaces):,} spaces do to outputs"]
        accepted = True
    except Rejected as rejection:
        reason = str(rejection)
    except RecursionError:
        reason = "the document is nested too deeply"
    except MemoryError:
        reason = "there is too little memory for it"
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, OverflowError) as error:
        reason = f"the document is malformed: {type(error).__name__} ({error})"
    dimension, seconds = weights - units if accepted else None, time.perf_counter() - start
    told = (accepted, reason, weights, units, dimension, compared, seconds, tuple(unseen))
    return Judgement(*told, moved)


def _compared(tensors: Any, model: Any, inputs: bool) -> tuple[Mapping[str, Any] | None, Any]:
    """Tensors and model to compare with, in whichever argument they were given."""
    if hasattr(tensors, "named_parameters"):
        if inputs and model is None:
            tensors, model = None, tensors
        else:
            tensors = dict(tensors.named_parameters(remove_duplicate=False))
    told = f"the tensors are a {type(tensors).__name__}, expected a mapping from names to tensors"
    require(tensors is None or isinstance(tensors, Mapping), told)
    told = "expected a module; write check(document, model=model, args=inputs)"
    module = model is None or hasattr(model, "named_parameters")
    require(module, f"the model is a {type(model).__name__}, {told}")
    return tensors, model
