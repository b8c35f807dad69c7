"""Every statement of the three documents: where it is, what it says, the
verdict on it, and the evidence.

The statements are data, one TOML file per document. Verdicts on experiments are not among them:
they are read from records of experiments and from measured figures. The page is written from both.
"""

from .evidence import Judged, Statement, judge_all, load_statements
from .page import render

__all__ = ["Judged", "Statement", "judge_all", "load_statements", "render"]
