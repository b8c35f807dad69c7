"""Callbacks that watch the runs of a framework: transformers' Trainer,
Lightning, and Lightning Fabric.
"""

from __future__ import annotations

import math
from importlib import import_module
from typing import Any

from torch import nn

from pathspace.errors import InputError

from .watching import Watching, watching


class _Watched:
    """Starts and ends a :class:`Watching`, the attribute ``watch``."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options
        self.watch: Watching | None = None

    def begin(
        self, model: nn.Module, writes: bool = True, planned: float = 0, batches: float = 0
    ) -> None:
        self.end()
        kept = {} if writes else dict.fromkeys(("csv", "tensorboard", "page"))
        known = {"planned": planned, "batches": batches}
        sizes = {name: int(size) for name, size in known.items() if 0 < size < math.inf}
        self.watch = watching(model, **{**sizes, **self.options, **kept})
        self.watch.__enter__()

    def end(self) -> None:
        if self.watch is not None and self.watch.running:
            self.watch.__exit__(None, None, None)


def transformers_callback(**options: Any) -> Any:
    """A callback for ``transformers.Trainer`` that watches its runs.

    Args:
        **options: those of :func:`watching`, such as ``every``, ``page``,
            ``csv`` and ``tensorboard``.

    Returns:
        A ``TrainerCallback``; its ``watch`` has rows and alarms. Only the
        first process writes files.

    Raises:
        InputError: transformers is not installed.

    Example:
        >>> callback = transformers_callback(every=50)  # Trainer(..., callbacks=[callback])
        >>> callback.watch is None
        True
    """

    class TransformersWatch(_Watched, _base("transformers", "TrainerCallback")):  # type: ignore[misc]
        def on_train_begin(
            self, _args: Any, state: Any, _control: Any, model: Any = None, **given: Any
        ) -> None:
            from transformers.trainer_utils import has_length

            loader = given.get("train_dataloader")
            # streamed data have no length
            batches = len(loader) if has_length(loader) else 0
            self.begin(model, state.is_world_process_zero, state.max_steps, batches)

        def on_train_end(self, *_: Any, **__: Any) -> None:
            self.end()

    return TransformersWatch(**options)


def lightning_callback(model: str = "", **options: Any) -> Any:
    """A callback for Lightning's ``Trainer`` that watches its runs.

    Args:
        model: attribute of the LightningModule that holds the network; by default its only
            child that has parameters, or else the LightningModule itself, of which units
            and chain are not measured.
        **options: those of :func:`watching`.

    Returns:
        A ``Callback``; its ``watch`` holds rows and alarms.

    Raises:
        InputError: neither ``lightning`` nor ``pytorch_lightning`` is installed.
    """
    try:
        base = _base("lightning.pytorch", "Callback")
    except InputError:
        base = _base("pytorch_lightning", "Callback")

    class LightningWatch(_Watched, base):  # type: ignore[misc, valid-type]
        def on_train_start(self, trainer: Any, module: Any) -> None:
            holders = [
                child for child in module.children() if any(True for _ in child.parameters())
            ]
            found = (
                module.get_submodule(model)
                if model
                else holders[0]
                if len(holders) == 1
                else module
            )
            steps, batches = trainer.estimated_stepping_batches, trainer.num_training_batches
            self.begin(found, trainer.is_global_zero, steps, batches)

        def on_train_end(self, *_: Any) -> None:
            self.end()

        def on_exception(self, *_: Any) -> None:
            self.end()

    return LightningWatch(**options)


def fabric_callback(**options: Any) -> Any:
    """A callback for Lightning Fabric: ``fabric.call("on_train_start", fabric,
    model)`` and ``"on_train_end"``.

    Args:
        **options: those of :func:`watching`.

    Returns:
        An object for ``Fabric(callbacks=[...])``; its ``watch`` holds rows and alarms.

    Example:
        >>> import torch
        >>> from lightning.fabric import Fabric
        >>> callback = fabric_callback(every=2)
        >>> fabric = Fabric(accelerator="cpu", devices=1, callbacks=[callback])
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
        >>> model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.01))
        >>> fabric.call("on_train_start", fabric, model)
        >>> for _ in range(4):
        ...     optimizer.zero_grad()
        ...     fabric.backward(model(torch.ones(3, 4)).square().mean())
        ...     _ = optimizer.step()
        >>> fabric.call("on_train_end")
        >>> [int(row["step"]) for row in callback.watch.rows]
        [1, 2, 4]
    """

    class FabricWatch(_Watched):
        def on_train_start(self, fabric: Any, model: nn.Module) -> None:
            self.begin(model, fabric.is_global_zero)

        def on_train_end(self) -> None:
            self.end()

    return FabricWatch(**options)


def _base(package: str, name: str) -> Any:
    try:
        return getattr(import_module(package), name)
    except ImportError as error:
        raise InputError(
            f"{package} is not installed; install it, or use pathspace.diagnostics.watching in a"
            " loop."
        ) from error


__all__ = ["fabric_callback", "lightning_callback", "transformers_callback"]
