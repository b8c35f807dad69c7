"""The papers' recipes as data: one file per cell of their tables and figures, and how a
run differs from its cell.

A folder per table holds what its cells share (``shared.toml``) and a file per cell. Every field of
:data:`~pathspace.training.experiments.reproduce.recipes.cells.FIELDS` has a value; what a paper
does not say is ``unsaid``, and what this library takes there stands apart, under ``fill``.
"""

from .cells import FIELDS, UNSAID, Cell, load_cells, table_cells
from .compare import describe, differences
from .full import full_arm, full_arms, full_trial, lacking, listed, runnable, settled

__all__ = [
    "FIELDS",
    "UNSAID",
    "Cell",
    "describe",
    "differences",
    "full_arm",
    "full_arms",
    "full_trial",
    "lacking",
    "listed",
    "load_cells",
    "runnable",
    "settled",
    "table_cells",
]
