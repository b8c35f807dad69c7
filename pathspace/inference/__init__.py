"""Who shares a scale with whom: a captured graph, read operation by operation through registered rules."""

# whoever reads the table of operations finds all of them in it, whatever was imported first
from pathspace.inference import rules

__all__ = ["rules"]
