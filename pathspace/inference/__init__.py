"""Which elements share a scale: a captured graph, interpreted operation by operation through registered rules."""

# whoever reads the table of operations finds all of them in it, whatever was imported first
from pathspace.inference import rules

__all__ = ["rules"]
