"""Models that people use, as data: `ZOO[name].make()` returns `(model, args,
kwargs)` with random weights.
"""

from zoo.entry import ZOO, Entry, load, zoo

__all__ = ["ZOO", "Entry", "load", "zoo"]
