"""The picture of the page of rotations: outliers of the stream of SmolLM2-135M-Instruct.

``python -m benchmarks.outliers`` (with ``tests`` in the path) writes it. The gains of norms are
folded in both bases, so that nothing but the basis differs.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import torch
from real_models import Llama
from torch import Tensor

import pathspace as ps
from benchmarks.figures import DOCS

STREAM = "model.embed_tokens.weight"
BLOCKS = (2, 15, 28)  # of 30


@torch.no_grad()
def peaks(model: Any, tokens: Tensor) -> dict[int, Tensor]:
    """By block, the largest absolute input ``(D,)`` of its queries, keys and values."""
    found: dict[int, Tensor] = {}

    def keep(block: int, x: Tensor) -> None:
        found[block] = x.abs().flatten(0, -2).amax(0)

    hooks = [
        model.model.layers[block].self_attn.q_proj.register_forward_pre_hook(
            lambda _, args, block=block: keep(block, args[0])
        )
        for block in BLOCKS
    ]
    model(tokens)
    for hook in hooks:
        hook.remove()
    return found


def draw(trained: Mapping[int, Tensor], rotated: Mapping[int, Tensor]) -> Any:
    """A panel for each block, all with the same axes."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(
        len(trained), sharex=True, sharey=True, figsize=(4.6, 4.8), layout="constrained"
    )
    for axis, block in zip(axes, trained, strict=True):
        features = range(len(trained[block]))
        axis.vlines(features, 0, trained[block], color="tab:orange", linewidth=0.8)
        axis.plot(trained[block], "o", color="tab:orange", markersize=2.5, label="as trained")
        axis.plot(rotated[block], ".", color="tab:blue", markersize=2, label="rotated (Hadamard)")
        axis.set_title(f"input of attention, block {block + 1} of 30", fontsize=10)
        axis.set(xlim=(-5, len(features) + 4), ylim=(0, 25), yticks=(0, 5, 10, 15, 20, 25))
        axis.grid(axis="y", color="0.9", linewidth=0.7)
        axis.set_axisbelow(True)
    axes[-1].set_xlabel("feature of the stream")
    figure.supylabel("largest |activation|, in RMS of its token", fontsize=10)
    figure.legend(
        *axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=2, markerscale=2.5
    )
    return figure


def main() -> None:
    torch.set_num_threads(1)
    model, tokens = Llama().model(), Llama().held_out
    found = ps.spaces(model, kwargs={"input_ids": tokens[:, :16]})
    folded = ps.rotate_(deepcopy(model), found, {STREAM: torch.eye(found[STREAM].size)})
    before = peaks(folded, tokens)
    figure = draw(before, peaks(ps.rotate_(model, found, "hadamard"), tokens))
    figure.savefig(DOCS / "images" / "rotation-outliers.png", dpi=150, metadata={"Software": None})


if __name__ == "__main__":
    main()
