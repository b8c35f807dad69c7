"""Which elements share a scale: a captured graph, interpreted operation by operation
through registered rules.
"""

# import all rules, so that the table of operations is complete after any first import
from . import rules

__all__ = ["rules"]
