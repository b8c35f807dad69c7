"""Every statement of the three documents: where it is, what it says, the
verdict on it, and the evidence.

The statements are data, one TOML file per document (``registry``). Verdicts on experiments are not
among them: they are read from records of experiments and from measured figures (``evidence``). The
page is written from both.
"""

from .evidence import Judged, judge_all
from .page import render
from .registry import Statement, load_statements

__all__ = ["Judged", "Statement", "judge_all", "load_statements", "render"]
