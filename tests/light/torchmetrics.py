"""In place of torchmetrics in processes that tests start.

Lightning Fabric imports it for the number of its version, which takes more than a
second; nothing that these processes do needs it.
"""

__version__ = "0"
