"""The papers' recipes as data: one file per table or figure, and how a run differs from its cell.
Every cell has a value of every field; what a paper does not say is ``unsaid``, and what this
library takes there stands apart, under ``fill``.
"""

from .cells import FIELDS, UNSAID, Cell, load_cells, table_cells
from .compare import describe, differences
from .full import full_arm, full_arms, full_trial, listed, runnable, settled

__all__ = ["FIELDS", "UNSAID", "Cell", "describe", "differences", "full_arm", "full_arms"]
__all__ += ["full_trial", "listed", "load_cells", "runnable", "settled", "table_cells"]
