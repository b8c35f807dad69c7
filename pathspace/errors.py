"""The exceptions of the library: one base, and one sentence per error.

Every message says what went wrong, where, what was found, what was expected and what to do.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Iterable
from numbers import Integral, Real
from typing import Any


class PathspaceError(Exception):
    """Base of every error the library raises on purpose."""


class InputError(PathspaceError, ValueError):
    """A value handed to the library is wrong: a shape, a file, a name, a number."""


class InputTypeError(PathspaceError, TypeError):
    """A value handed to the library has the wrong type."""


class CaptureError(PathspaceError, ValueError):
    """The model could not be captured as a graph, or raised while it was being captured."""


class UnsupportedError(PathspaceError, ValueError):
    """The request has a meaning, but is not supported; the message says what is."""


# internal terms of torch, which users do not know
_INTERNAL = re.compile(
    r"aten|prims::|torch\._|torch\.fx|torch\.export|torch\.classes|__torch__|_export|Fake|Sym(Int|Float|Bool|Node)|Proxy"
    r"|pytree|[Ff]unctor|[Dd]ynamo|unhinted|\bz?u[f]?\d+\b|[Gg]uard|github\.com|\bc10\b|C10|[Dd]ispatch|backend"
    r"|tensor"
    r" subclass|\bmeta\b|_impl|_cpu\b|_cuda\b|HigherOrder|autograd\.Function|tracing|Unsupported"
)
_LONGEST = 240


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or a general phrase for internal terms of torch."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    line = (lines[0] if lines else type(error).__name__).rstrip(".")
    if _INTERNAL.search(line):
        return "a step inside torch fails"
    return on_one_line(line)


def on_one_line(text: str) -> str:
    """A message on one line, without its full stop; the end of a long one is left out."""
    text = " ".join(text.split()).rstrip(".")
    return text if len(text) <= _LONGEST else text[:_LONGEST].rsplit(" ", 1)[0] + " ..."


def did_you_mean(name: str, candidates: Iterable[str]) -> str:
    """The end of a sentence that offers the names nearest to a wrong one, or nothing."""
    close = difflib.get_close_matches(name, list(candidates), n=3, cutoff=0.6)
    return f" (did you mean {' or '.join(close)}?)" if close else ""


# name of an argument -> names of classes that it may have (none: what can be
# called), and these in words
_KINDS = {
    "model": (("Module",), "a torch.nn.Module"),
    "graph": (("Structure",), "a ReductionGraph, as ps.trace makes it"),
    "skeleton": (("TwoTrees",), "a Skeleton, as graph.skeleton() makes it"),
    "spaces": (("FeatureSpaces",), "spaces, as ps.spaces finds them"),
    "operator": (("LinearOperator",), "a linear operator, such as diagnostics.jacobian(model, x)"),
    "report": (("Report",), "a report, as diagnostics.report makes it"),
    "table": (("Table",), "a table, as functions of pathspace.diagnostics return it"),
    "pair": (("SmoothingPair",), "one of the pairs that ps.smoothing_pairs finds"),
    "loss": ((), "a function of output and target"),
    "optimizer": (("Optimizer",), "an optimizer of torch.optim"),
    "checkpoint": (("str", "PathLike"), "the name of a file"),
    "progress": ((), "a function that is called with the name of each stage"),
}


def expect_arguments(owner: str, *, or_none: bool = False, **given: object) -> None:
    """Refuse arguments of another kind, mostly given in the wrong order.

    Kinds are told by the names of classes, so that nothing has to be imported here. ``given`` are
    arguments of a function, the ``owner``, by what they have to be: ``model``, ``graph`` and so on.
    """
    for name, value in given.items():
        if or_none and value is None:
            continue
        kinds, expected = _KINDS[name]
        classes = {cls.__name__ for cls in type(value).__mro__} | (
            {"PathLike"} if hasattr(value, "__fspath__") else set()
        )
        if not (classes & set(kinds) if kinds else callable(value)):
            hint = "check the order of the arguments"
            if name == "skeleton" and classes & {"Structure", "Masks"}:
                call = "graph.skeleton()" if "Structure" in classes else "masks.skeleton(graph)"
                hint = f"call {call}"
            raise InputTypeError(
                f"{owner} found a {type(value).__name__} as its {name}, expected {expected}"
                f"{' or None' * or_none}; {hint}."
            )


# what a number has to be, in words -> does it?
_RANGES: dict[str, Callable[[Any], bool]] = {
    "a number": math.isfinite,
    "a whole number": lambda value: True,  # noqa: ARG005
    "a positive number": lambda value: 0 < value < math.inf,
    "a number of at least 0": lambda value: 0 <= value < math.inf,
    "a number from 0 to inf": lambda value: value >= 0,
    "a number of at least 1": lambda value: 1 <= value < math.inf,
    "a number above 1": lambda value: value > 1,
    "a number between 0 and 1": lambda value: 0 < value < 1,
    "a number of at least 0 and below 1": lambda value: 0 <= value < 1,
    "a whole number from 0 to 2^63 - 1": lambda value: 0 <= value < 2**63,
    "a whole number from 1 to 2^63 - 1": lambda value: 0 < value < 2**63,
    "a whole number from 0 to 1,000,000": lambda value: 0 <= value <= 1_000_000,
    "a whole number from 1 to 1,000,000": lambda value: 0 < value <= 1_000_000,
    "a whole number from 2 to 1,000,000": lambda value: 1 < value <= 1_000_000,
}
COUNT, AT_LEAST_1 = "a whole number from 1 to 1,000,000", "a whole number from 1 to 2^63 - 1"
SEED = "a whole number from 0 to 2^63 - 1"


def expect_numbers(owner: str, expected: str, *, or_none: bool = False, **given: object) -> None:
    """Refuse what is no number, or out of range; NaN is in no range, and a bool is no number.

    ``expected`` is one of the ranges in words, ``given`` are arguments of the ``owner`` by name.
    """
    kind = Real if expected.startswith(("a number", "a positive")) else Integral
    for name, value in given.items():
        if or_none and value is None:
            continue
        shown = repr(value) if isinstance(value, Real | str | None) else f"a {type(value).__name__}"
        told = f"{owner} found {name}={shown}, expected {expected}{' or None' * or_none}."
        if isinstance(value, bool) or not isinstance(value, kind):
            raise InputTypeError(told)
        if not _RANGES[expected](value):
            raise InputError(told)
