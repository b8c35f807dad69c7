"""The Swin transformer, as the library transformers has it."""

from __future__ import annotations

from torch import Tensor, nn

from pathspace.errors import InputError

# blocks of the stages but the third, which has the rest; features of a head
STAGE, HEAD = 2, 32


class Scores(nn.Module):
    """A classifier of transformers, from images to scores alone."""

    def __init__(self, classifier: nn.Module) -> None:
        super().__init__()
        self.classifier = classifier

    def forward(self, images: Tensor) -> Tensor:
        """Map images of shape (B, 3, Y, X) to scores of shape (B, outputs)."""
        scores: Tensor = self.classifier(images).logits
        return scores


def swin(width: int = 96, layers: int = 24, outputs: int = 1000) -> nn.Module:
    """Return a Swin transformer of four stages for images of 224 x 224, with patches of 4 x 4 and
    windows of 7 x 7 of them.

    Reference:
        Liu et al., Swin transformer, section 3.3; Learnable Markov chain paper, Table 2.
    """
    try:
        from transformers import SwinConfig, SwinForImageClassification
    except ImportError as error:
        raise InputError(
            "The Swin transformer needs the package transformers, which is not installed;"
            " run: pip install 'pathspace[demo]'."
        ) from error
    third = layers - 3 * STAGE
    if width < HEAD or width % HEAD or third < 1:
        raise InputError(
            f"A Swin transformer got width = {width} and layers = {layers}; give a multiple of"
            f" {HEAD} and at least {3 * STAGE + 1} layers, such as 96 and 24."
        )
    config = SwinConfig(
        embed_dim=width,
        depths=(STAGE, STAGE, third, STAGE),
        num_heads=[width // HEAD * 2**stage for stage in range(4)],
        num_labels=outputs,  # type: ignore[call-arg]
        # as the others: no dropout, also of whole branches
        drop_path_rate=0.0,
    )
    return Scores(SwinForImageClassification(config))
