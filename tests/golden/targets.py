"""Models whose answers are kept: the zoo, the small networks and the odd models, in both modes."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np
import odd_models
import odder_models  # noqa: F401 (registers its models)
import torch
from cases import CASES
from odd_models import ODD, Named, Odd
from zoo.entry import load

MODES = ("train", "eval")
# a compiler runs, for longer than all small networks together
COMPILED = {"compiled", "compiled_inside", "prepared_for_qat"}
Inputs = tuple[Any, tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Target:
    """One model in one mode.

    Attributes:
        name: where it comes from, its name, and its mode.
        build: returns the model, its inputs, and its inputs by keyword.
        around: the surroundings in which it is used.
    """

    name: str
    build: Callable[[], Inputs]
    around: Callable[[], Any] = contextlib.nullcontext


def _of_case(name: str, mode: str) -> Inputs:
    model, args = CASES[name]()
    return model.train(mode == "train"), tuple(args), {}


def _of_odd(entry: Odd, mode: str) -> Inputs:
    model, *args = entry.build()
    kwargs = dict(args.pop()) if args and isinstance(args[-1], Named) else {}
    # (modules that hold themselves, and those without a training mode, stay as they are built)
    with contextlib.suppress(AttributeError, NotImplementedError, RecursionError):
        model.train(mode == "train")
    return model, tuple(args), kwargs


@cache
def targets() -> dict[str, Target]:
    """Name -> target, the ones that take longest first."""
    found = [
        Target(f"zoo/{entry.name} {mode}", partial(entry.make, mode, small=True))
        for entry in load().values()
        for mode in entry.modes
    ]
    found += [
        Target(f"odd/{name} {mode}", partial(_of_odd, entry, mode), entry.around)
        for name, entry in ODD.items()
        if name not in COMPILED
        for mode in MODES
    ]
    found += [
        Target(f"case/{name} {mode}", partial(_of_case, name, mode))
        for name in CASES
        for mode in MODES
    ]
    return {target.name: target for target in found}


def seeded() -> None:
    """Set every random state that a model may read."""
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)


@contextlib.contextmanager
def settings_kept() -> Iterator[None]:
    """Undo what odd models do to the settings of torch and to their own records, so
    that no row depends on the rows before it.
    """
    dtype = torch.get_default_dtype()
    count = odd_models.COUNT
    try:
        yield
    finally:
        torch.set_default_dtype(dtype)
        torch.set_grad_enabled(True)
        odd_models.LOG.clear()
        odd_models.TABLE.clear()
        odd_models.COUNT = count
