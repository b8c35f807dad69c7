"""The register of models: how each is built, and what is known about it by hand."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

Built = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]
MODULES = ("vision", "attention", "sequences", "assorted", "transformers_models")


@dataclass(frozen=True)
class Entry:
    """One model.

    Attributes:
        name: unique name.
        family: where it belongs in the table.
        build: returns the model and its example inputs.
        weights: number of scalar parameters of the original, where the replica must have as many.
        units: mode (`"train"`, `"eval"`) -> number of units counted by hand.
        modes: modes it can be captured in.
        fast: whether continuous integration runs it.
        small: the same model with inputs on which it is quicker to run, where it takes any size.
    """

    name: str
    family: str
    build: Callable[[], tuple[Any, ...]]
    weights: int | None = None
    units: Mapping[str, int] = field(default_factory=dict)
    modes: tuple[str, ...] = ("train", "eval")
    fast: bool = False
    small: Callable[[], tuple[Any, ...]] | None = None

    def make(self, mode: str = "eval", seed: int = 0, small: bool = False) -> Built:
        """Build the model in a mode, reproducibly, leaving the global random state alone."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model, *rest = (self.small if small and self.small is not None else self.build)()
            kwargs = rest.pop() if rest and isinstance(rest[-1], dict) else {}
            return model.train(mode == "train"), tuple(rest), kwargs


ZOO: dict[str, Entry] = {}


def zoo(
    name: str, family: str, **facts: Any
) -> Callable[[Callable[[], tuple[Any, ...]]], Callable[[], Any]]:
    """Register a builder of `(model, *args)` or `(model, *args, kwargs)`."""

    def register(build: Callable[[], tuple[Any, ...]]) -> Callable[[], Any]:
        if name in ZOO:
            raise ValueError(f"two models are called {name!r}")
        if isinstance(facts.get("units"), int):
            facts["units"] = dict.fromkeys(("train", "eval"), facts["units"])
        ZOO[name] = Entry(name, family, build, **facts)
        return build

    return register


def load() -> dict[str, Entry]:
    """Import every module of models and return the register."""
    for module in MODULES:
        importlib.import_module(f"zoo.{module}")
    return ZOO
