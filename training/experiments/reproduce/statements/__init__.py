"""Every statement of the three documents: where it is, what it says, the verdict and the evidence.
Verdicts on experiments are read from their records and from measured figures.
"""

from .evidence import Judged, Statement, judge_all, load_statements
from .page import render

__all__ = ["Judged", "Statement", "judge_all", "load_statements", "render"]
