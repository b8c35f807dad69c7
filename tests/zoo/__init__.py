"""Models that people use, as data: `ZOO[name].make()` returns `(model, args, kwargs)`."""

from zoo.entry import ZOO, Entry, load, zoo

__all__ = ["ZOO", "Entry", "load", "zoo"]
