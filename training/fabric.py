"""Lightning Fabric, without the packages that it imports only to learn the version of one of them.

Fabric imports ``torchmetrics`` for its ``__version__``, and with it scipy.signal, transformers and matplotlib, where
they are installed: a third of the time that ``pathspace train`` needs to start.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType

METRICS = "torchmetrics"


@contextmanager
def only_the_version(package: str) -> Iterator[None]:
    """A context in which ``import package`` gives a module that has a version and nothing else.

    A package that has been imported before, or is not installed, stays as it is.

    Args:
        package: its name, which is that of its distribution as well.

    Example:
        >>> with only_the_version("absent"):
        ...     "absent" in sys.modules
        False
    """
    try:
        known = package in sys.modules or version(package)
    except PackageNotFoundError:
        known = True
    if known is True:
        yield
        return
    stand_in = ModuleType(package)
    stand_in.__version__ = known  # type: ignore[attr-defined]
    sys.modules[package] = stand_in
    try:
        yield
    finally:
        del sys.modules[package]


with only_the_version(METRICS):
    from lightning_fabric import Fabric
    from lightning_fabric.loggers import TensorBoardLogger  # type: ignore[attr-defined]
    from lightning_fabric.loggers.logger import Logger
    from lightning_fabric.strategies import DDPStrategy, SingleDeviceStrategy  # type: ignore[attr-defined]
    from lightning_fabric.utilities.exceptions import MisconfigurationException

__all__ = ["DDPStrategy", "Fabric", "Logger", "MisconfigurationException", "SingleDeviceStrategy", "TensorBoardLogger"]
