"""Channels inside of channels: the order within heads, groups and tables of matrices."""

from __future__ import annotations

from torch import Tensor

from .channels import Channels
from .sides import varying


class InnerChannels(Channels):
    """The interpretation in which the channels of a table of matrices are inside the matrices."""

    written = -1


class NestedChannels(InnerChannels):
    """Channels inside of heads and groups, whatever the order of what is reduced."""

    certain = False

    def _unordered(self, ids: Tensor, summed: set[int]) -> bool:
        return bool(varying(ids) & summed)

    def _whole(self, classes: Tensor) -> bool:
        return False

    def _rectangular(self, classes: Tensor) -> bool:
        return False
