"""Options that the commands of this package share: the checkpoint, the data and the loss."""

from __future__ import annotations

from typing import Annotated

import typer

CheckpointOption = Annotated[
    str | None,
    typer.Option(
        "--checkpoint",
        metavar="FILE",
        help="Weights to load: safetensors, or a file of torch.save (read with weights_only).",
        show_default=False,
    ),
]
DataOption = Annotated[
    str | None,
    typer.Option(
        "--data",
        metavar="DATA",
        help=(
            "Batches (inputs, targets): place:name of a DataLoader, a data set, a list or a"
            " function that returns one, or a .safetensors or .pt file of named tensors. Replaces"
            " the example inputs."
        ),
        show_default=False,
    ),
]
LossOption = Annotated[
    str | None,
    typer.Option(
        "--loss",
        metavar="LOSS",
        help=(
            "A loss of torch (cross_entropy, MSELoss, ...), or place:name of a function"
            " loss(outputs, targets)."
        ),
        show_default="the model's own, or one that fits the targets",
    ),
]
BatchesOption = Annotated[
    int, typer.Option("--batches", metavar="N", min=1, help="Largest number of batches to use.")
]

__all__ = ["BatchesOption", "CheckpointOption", "DataOption", "LossOption"]
