"""The axis of a tensor along which units (channels or features) are counted."""

from __future__ import annotations

from torch import Tensor, nn

# norms of images, and dimensions of an image
_IMAGES: dict[type[nn.Module], int] = {
    nn.InstanceNorm1d: 1,
    nn.InstanceNorm2d: 2,
    nn.InstanceNorm3d: 3,
}
_BATCHED = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, nn.GroupNorm)
_LAST = (nn.Linear, nn.Bilinear, nn.RNNBase, nn.RNNCellBase, nn.MultiheadAttention, nn.RMSNorm,
         nn.LayerNorm, nn.Embedding, nn.EmbeddingBag)  # fmt: skip


def unit_axis(module: nn.Module, value: Tensor) -> int | None:
    """The axis of units in an input or output of a module; ``None`` if its type does not say.

    Example:
        >>> import torch
        >>> unit_axis(nn.Conv2d(3, 4, 3), torch.ones(4, 6, 6))
        0
        >>> unit_axis(nn.LSTM(3, 4), torch.ones(7, 2, 4))
        2
    """
    if value.dim() < 2:
        return 0
    name = type(module).__name__
    if isinstance(module, nn.modules.conv._ConvNd):
        return value.dim() - len(module.kernel_size) - 1
    rank = next((rank for kind, rank in _IMAGES.items() if isinstance(module, kind)), None)
    if rank is not None:
        return value.dim() - rank - 1
    # (Conv1D, of transformers, is a linear map)
    if isinstance(module, _LAST) or name.startswith(("Linear", "LayerNorm", "RMSNorm", "Conv1D")):
        return value.dim() - 1
    return 1 if isinstance(module, _BATCHED) or name.startswith("Conv") else None


class CarriedAxis:
    """The axis of units from call to call: what says nothing of its own has that of the last layer,
    wherever its size is found now.
    """

    def __init__(self) -> None:
        self._axis, self._rank, self._units = -1, 0, 0

    def of(self, module: nn.Module, value: Tensor) -> int:
        """The axis for the output of the next call."""
        axis = unit_axis(module, value)
        axis = self._found(value) if axis is None else axis
        self._axis, self._rank, self._units = axis, value.dim(), value.shape[axis]
        return axis

    def _found(self, value: Tensor) -> int:
        alike = [d for d in range(1, value.dim()) if value.shape[d] == self._units]
        if value.dim() == self._rank and (self._axis in alike or len(alike) != 1):
            return self._axis
        return alike[0] if len(alike) == 1 else value.dim() - 1
