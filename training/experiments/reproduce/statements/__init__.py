"""Every statement of the three documents, with its verdict and its evidence."""

from .evidence import Judged, Statement, judge_all, load_statements

__all__ = ["Judged", "Statement", "judge_all", "load_statements"]
